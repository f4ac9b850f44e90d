//! Commands that benchmark or test this machine: `bench`, `selftest`, `demo`.
use super::compute;
use super::failure::Failure;
use super::global::{Global, answer};
use super::interrupt::Interrupts;
use super::model::fetch;
use super::print::remark;
use super::progress::Spinner;
use super::table::{render, row};
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
  meshnode bench decode                    tokens/s, share of memory bandwidth
  meshnode bench decode --threads 1 --json
  meshnode bench decode --device cuda --shape qwen2.5-7b --quant q4
  meshnode bench decode --device cuda --shape qwen2.5-7b --requests 8 --temperature 1
  meshnode bench prefill --device cuda --shape qwen2.5-7b --prompt 512
  meshnode bench device --device cuda:0    what a node on this GPU advertises
  meshnode bench lbm --json                cell updates/s, share of copy bandwidth
  meshnode bench life --threads 2
  meshnode bench sampler                   milliseconds per sampled token
  meshnode bench net                       the data plane over loopback

--shape generates random weights, on the GPU if --device names one.")]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    what: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Decode and prefill speed of a model on the CPU or a GPU, with a breakdown of the time
    Decode(model::DecodeArgs),
    /// Prefill speed only
    Prefill(model::PrefillArgs),
    /// Device speed, measured with the kernels of stages, and the memory a node would offer: the planner's inputs
    Device(DeviceArgs),
    /// Lattice Boltzmann fluids on the CPU
    Lbm(grid::LbmArgs),
    /// Game of Life on the CPU
    Life(grid::LifeArgs),
    /// Time to sample a token from the logits on one core, by vocabulary size and settings
    Sampler(sampler::SamplerArgs),
    /// Round-trip time and throughput of the data plane between two endpoints on this machine
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
    /// Compute device: auto, cpu, cuda[:i] or vulkan[:i], where i is the number of the GPU
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "MESHNODE_DEVICE", value_parser = compute::one_device)]
    device: String,
    /// Compute threads on the CPU [default: one per core]
    #[arg(long, value_name = "N", env = "MESHNODE_THREADS", value_parser = compute::threads)]
    threads: Option<usize>,
}

fn bench_device(global: &Global, args: &DeviceArgs) -> Result<(), Failure> {
    let spinner = Spinner::new(format!("measuring {}", args.device));
    let without_dirs = UpOptions::solo(PathBuf::new(), PathBuf::new());
    let options = UpOptions { device: args.device.clone(), threads: args.threads, expert_ram: Some(0), ..without_dirs };
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
    /// Compute device: auto, cpu, cuda[:i] or vulkan[:i], where i is the number of the GPU [default: auto]
    #[arg(long, value_name = "DEVICE", env = "MESHNODE_DEVICE", value_parser = compute::one_device)]
    device: Option<String>,
}

pub(super) fn selftest(global: &Global, args: &SelftestArgs) -> Result<(), Failure> {
    let requested = args.device.as_deref().or(global.file.device.as_deref()).unwrap_or("auto");
    let spinner = Spinner::new(format!("testing {requested}"));
    let progress =
        |done: usize, last: &str| spinner.say(format!("testing {requested}: {done} checks done, last: {last}"));
    let (device, checks) = crate::measure::selftest(requested, progress).map_err(Failure::failed)?;
    drop(spinner);
    let failed = checks.iter().filter(|c| c["ok"] != true).count();
    let value = json!({"device": device.to_string(), "ok": failed == 0, "checks": checks});
    answer(global, &value, selftest_text);
    match failed {
        0 => Ok(()),
        _ => Err(Failure::failed(format!(
            "{failed} of {} checks failed on {device}: do not use this device",
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
Starts three node processes with their own directories and ports on 127.0.0.1, each with too little memory for the \
whole model, distributes the model over them, and kills one with SIGKILL during generation. Takes less than a minute.

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
    /// Number of stages to kill, with --chaos
    #[arg(long, value_name = "N", default_value_t = 100, requires = "chaos", value_parser = clap::value_parser!(u32).range(0..=100_000))]
    kills: u32,
    /// Number of times to kill the coordinator after that, with --chaos: the client resumes at another node
    #[arg(long, value_name = "N", default_value_t = 1, requires = "chaos", value_parser = clap::value_parser!(u32).range(0..=100_000))]
    coordinator_kills: u32,
    /// Seed that chooses the tokens to kill at, with --chaos [default: the process id]
    #[arg(long, value_name = "S", requires = "chaos")]
    seed: Option<u64>,
}

pub(super) fn demo(global: &Global, args: &DemoArgs) -> Result<(), Failure> {
    let model = fetch(global, "smollm2-135m")?;
    let program =
        std::env::current_exe().map_err(|e| Failure::failed(format!("cannot find the path of this program: {e}")))?;
    let options = crate::demo::DemoOptions {
        json: global.json,
        tokens: args.tokens,
        threads: usize::from(args.threads),
        quiet: args.chaos,
    };
    if args.chaos {
        let kills = Kills { stages: args.kills as usize, coordinators: args.coordinator_kills as usize };
        let seed = args.seed.unwrap_or_else(|| u64::from(std::process::id()));
        let demo = move || crate::demo::chaos(&program, &model, &options, kills, seed).map_err(Failure::failed);
        let summary = Interrupts::listen()?.during(demo)?;
        return verdict(summary.tokens_equal_solo && summary.requests_lost == 0);
    }
    let demo = move || crate::demo::run(&program, &model, &options).map_err(Failure::failed);
    let summary = Interrupts::listen()?.during(demo)?;
    verdict(summary.tokens_equal_solo && summary.requests_lost == 0)
}

fn verdict(good: bool) -> Result<(), Failure> {
    if good {
        return Ok(());
    }
    remark("the demo failed: expected the same tokens as without failures, and no lost request");
    Err(Failure::quiet(Failure::FAILED))
}
