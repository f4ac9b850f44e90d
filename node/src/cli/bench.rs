//! Commands that measure or prove something on this machine: `bench`, `selftest`, `demo`.
use super::interrupt::Interrupts;
use super::model::fetch;
use super::progress::Spinner;
use super::table::{render, row};
use super::{Failure, Global, answer, remark};
use crate::config::UpOptions;
use crate::demo::Kills;
use serde_json::{Value, json};
use std::path::PathBuf;

mod grid;
mod model;
mod net;
mod sampler;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode bench decode                    tokens per second, and their share of what the memory gives
  meshnode bench decode --threads 1 --json
  meshnode bench decode --device cuda --shape qwen2.5-7b --quant q4    random weights, made on the GPU
  meshnode bench decode --device cuda --shape qwen2.5-7b --requests 8 --temperature 1
  meshnode bench prefill --device cuda --shape qwen2.5-7b --prompt 512
  meshnode bench device --device cuda:0    what a node would tell the mesh about this GPU
  meshnode bench lbm --json                cell updates per second of a fluid, and their share of a copy's bandwidth
  meshnode bench life --threads 2
  meshnode bench sampler                   milliseconds to choose a token from a vocabulary
  meshnode bench net                       the data plane over this machine's loopback")]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    what: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Decode and prefill speed of a model on this machine's processor or a GPU, and where the time goes
    Decode(model::DecodeArgs),
    /// Prefill speed alone
    Prefill(model::PrefillArgs),
    /// Speed of a device by the kernels that stages run, and the memory a node would offer: what plans are made with
    Device(DeviceArgs),
    /// Fluids by the lattice Boltzmann method on this machine's processor
    Lbm(grid::LbmArgs),
    /// Life on this machine's processor
    Life(grid::LifeArgs),
    /// Time to choose a token from the logits, by vocabulary and settings, on one core
    Sampler(sampler::SamplerArgs),
    /// Round trip and throughput of the data plane between two endpoints on this machine
    Net,
}

pub(super) fn bench(global: &Global, args: &BenchArgs) -> Result<(), Failure> {
    match &args.what {
        Bench::Decode(args) => model::decode(global, args),
        Bench::Prefill(args) => model::prefill(global, args),
        Bench::Device(device) => bench_device(global, device),
        Bench::Lbm(lbm) => {
            let spinner = Spinner::new("measuring");
            let figures = grid::lbm(lbm).map_err(Failure::failed)?;
            drop(spinner);
            answer(global, &figures, grid::lbm_text);
            Ok(())
        }
        Bench::Life(life) => {
            let spinner = Spinner::new("measuring");
            let figures = grid::life(life).map_err(Failure::failed)?;
            drop(spinner);
            answer(global, &figures, grid::life_text);
            Ok(())
        }
        Bench::Sampler(args) => {
            let spinner = Spinner::new("measuring");
            let figures = sampler::measure(args).map_err(Failure::failed)?;
            drop(spinner);
            answer(global, &figures, sampler::text);
            Ok(())
        }
        Bench::Net => {
            let spinner = Spinner::new("measuring");
            let figures = net::measure()?;
            drop(spinner);
            answer(global, &figures, net::text);
            Ok(())
        }
    }
}

#[derive(Debug, clap::Args)]
struct DeviceArgs {
    /// auto, cpu, cuda[:i] or vulkan[:i]
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "MESHNODE_DEVICE", value_parser = super::model::device)]
    device: String,
    /// Compute threads of the processor [default: one per core]
    #[arg(long, value_name = "N", env = "MESHNODE_THREADS", value_parser = super::model::threads)]
    threads: Option<usize>,
}

fn bench_device(global: &Global, args: &DeviceArgs) -> Result<(), Failure> {
    let spinner = Spinner::new(format!("measuring {}", args.device));
    let nowhere = UpOptions::solo(PathBuf::new(), PathBuf::new());
    let options = UpOptions { device: args.device.clone(), threads: args.threads, ..nowhere };
    let figures = crate::measure::device(&options).map_err(Failure::failed)?;
    drop(spinner);
    answer(global, &figures, crate::measure::device_text);
    Ok(())
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode selftest
  meshnode selftest --device cuda --json")]
pub(super) struct SelftestArgs {
    /// auto, cpu, cuda[:i] or vulkan[:i] [default: auto]
    #[arg(long, value_name = "DEVICE", env = "MESHNODE_DEVICE", value_parser = super::model::device)]
    device: Option<String>,
}

pub(super) fn selftest(global: &Global, args: &SelftestArgs) -> Result<(), Failure> {
    let wanted = args.device.as_deref().or(global.file.device.as_deref()).unwrap_or("auto");
    let spinner = Spinner::new(format!("testing {wanted}"));
    let (device, checks) = crate::measure::selftest(wanted).map_err(Failure::failed)?;
    drop(spinner);
    let failed = checks.iter().filter(|c| c["ok"] != true).count();
    let value = json!({"device": device.to_string(), "ok": failed == 0, "checks": checks});
    answer(global, &value, selftest_text);
    match failed {
        0 => Ok(()),
        _ => Err(Failure::failed(format!(
            "{failed} of {} checks failed on {device}: do not trust this device",
            checks.len()
        ))),
    }
}

fn selftest_text(value: &Value) -> String {
    let rows: Vec<_> = value["checks"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|check| {
            let verdict = if check["ok"] == true { "ok" } else { "FAIL" };
            row([verdict, check["name"].as_str().unwrap_or("?"), check["seen"].as_str().unwrap_or("")])
        })
        .collect();
    render(&rows)
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Starts three node processes with their own directories and ports on 127.0.0.1, each with too little memory for the model,
lets them share it, and kills one with SIGKILL while they speak. Needs nothing else; under a minute.

Examples:
  meshnode demo
  meshnode demo --json | tail -1")]
pub(super) struct DemoArgs {
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = clap::value_parser!(u32).range(8..=1024))]
    tokens: u32,
    /// Compute threads of each node
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Kill a stage in each of many generations, with hot standbys, and measure the stalls
    #[arg(long)]
    chaos: bool,
    /// How many to kill, with --chaos
    #[arg(long, value_name = "N", default_value_t = 100, requires = "chaos", value_parser = clap::value_parser!(u32).range(0..=100_000))]
    kills: u32,
    /// How often to kill the coordinator after that, with --chaos: the client goes on at another node
    #[arg(long, value_name = "N", default_value_t = 1, requires = "chaos", value_parser = clap::value_parser!(u32).range(0..=100_000))]
    coordinator_kills: u32,
    /// Which tokens to kill at, with --chaos: drawn from this
    #[arg(long, value_name = "S", requires = "chaos")]
    seed: Option<u64>,
}

pub(super) fn demo(global: &Global, args: &DemoArgs) -> Result<(), Failure> {
    let model = fetch(global, "smollm2-135m")?;
    let program = std::env::current_exe().map_err(|e| Failure::failed(format!("where is this program? {e}")))?;
    let options = crate::demo::DemoOptions {
        json: global.json,
        tokens: args.tokens,
        threads: usize::from(args.threads),
        quiet: args.chaos,
    };
    if args.chaos {
        let kills = Kills { stages: args.kills as usize, coordinators: args.coordinator_kills as usize };
        let seed = args.seed.unwrap_or_else(|| u64::from(std::process::id()));
        let show = move || crate::demo::chaos(&program, &model, &options, kills, seed).map_err(Failure::failed);
        let summary = Interrupts::listen()?.during(show)?;
        return verdict(summary.tokens_equal_solo && summary.requests_lost == 0);
    }
    let show = move || crate::demo::run(&program, &model, &options).map_err(Failure::failed);
    let summary = Interrupts::listen()?.during(show)?;
    verdict(summary.tokens_equal_solo && summary.requests_lost == 0)
}

fn verdict(good: bool) -> Result<(), Failure> {
    if good {
        return Ok(());
    }
    remark("the demo did not show what it should");
    Err(Failure::quiet(Failure::FAILED))
}
