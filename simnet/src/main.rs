//! The command line of the simulator: run scenarios, soak seeds, measure scale, replay recordings.
#![expect(clippy::disallowed_methods, reason = "measures how fast the simulator itself runs")]
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use node_core::time::Duration;
use serde_json::json;
use simnet::case::{EntryNode, Simulation};
use simnet::minimize::minimize;
use simnet::run::Outcome;
use simnet::soak::{self, Size, draw, run_caught};
use simnet::{Case, units};
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Deterministic simulation of a mesh: the decision code of real nodes in a virtual world with seeded faults
#[derive(Parser)]
#[command(name = "simnet", version)]
#[command(after_help = "\
Examples:
  simnet run simnet/scenarios/lose-a-rack.toml     a timeline of what happens
  simnet soak --seeds 300                          300 random worlds of 8 nodes and 60 virtual seconds
  simnet soak --seeds 1 --from 42                  one of them with its full log; a failure is minimised
  simnet replay recording.mesh                     the decisions of a node, recorded by `meshnode up --record`

Exit codes: 0 ok, 2 usage error, 5 a check failed.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a scenario and print its timeline
    Run(RunArgs),
    /// Run random worlds, one per seed, and check their invariants
    Soak(SoakArgs),
    /// Let a large mesh join and crash some of its nodes: measures convergence and simulation speed
    Scale(ScaleArgs),
    /// Replay a recording of `meshnode up --record FILE`
    Replay(ReplayArgs),
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  simnet run simnet/scenarios/kill-the-entry-node.toml
  simnet run simnet/scenarios/slow-node.toml --seed 7 --json | jq .ends

A scenario lists hosts, links, requests and faults; simnet/scenarios/ contains examples.")]
struct RunArgs {
    /// The scenario file
    #[arg(value_name = "SCENARIO.toml")]
    scenario: PathBuf,
    /// Also log every message of jobs and every frame
    #[arg(long)]
    messages: bool,
    /// Override the seed of the file
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Print one JSON object on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  simnet soak                                   300 seeds, as CI does
  simnet soak --seeds 20000 --jobs 8
  simnet soak --seeds 10 --nodes 16 --minutes 5
  simnet soak --seeds 1 --from 42               the seed 42 alone: options, faults, timeline

For a seed that fails, prints the command to rerun it and the fewest faults that reproduce the failure.")]
struct SoakArgs {
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first seed
    #[arg(long, value_name = "S", default_value_t = 0)]
    from: u64,
    /// Nodes per world
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=256))]
    nodes: u32,
    /// Virtual minutes per world [default: 1]
    #[arg(long, value_name = "M", conflicts_with = "seconds")]
    minutes: Option<u64>,
    /// Virtual seconds per world [default: 60]
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Threads [default: one per core]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// With one seed: also log every message of jobs, every frame and every membership change
    #[arg(long, conflicts_with = "json")]
    messages: bool,
    /// Print one JSON object per line on stdout: each seed that fails, then a summary
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  simnet scale                       1,000 nodes, 10 of which die, 60 virtual seconds
  simnet scale --nodes 200 --json")]
struct ScaleArgs {
    /// Number of nodes that join
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=4000))]
    nodes: u32,
    /// Number of nodes that crash together
    #[arg(long, value_name = "N", default_value_t = 10)]
    deaths: u32,
    /// Virtual seconds to observe
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    seconds: u64,
    /// Seed of all random streams
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  meshnode up --record lived.mesh        (on the machine that misbehaves; the file contains prompts, as token ids)
  simnet replay lived.mesh

Prints requests, the node's actions and a hash of all its outputs: the same program gives the same hash.")]
struct ReplayArgs {
    /// The recording file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print one JSON object on stdout
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    // clap prints usage errors and exits with 2, or with 0 for help and version.
    let matches = Cli::command().get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match cli.command {
        Command::Run(args) => run(&args),
        Command::Soak(args) => soak(&args),
        Command::Scale(args) => scale(&args),
        Command::Replay(args) => replay(&args),
    }
}

const FAILED: u8 = 5;
const USAGE: u8 = 2;

fn usage(what: impl std::fmt::Display) -> ExitCode {
    eprintln!("simnet: {what}");
    ExitCode::from(USAGE)
}

fn verdict(fine: bool) -> ExitCode {
    if fine { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

fn run(args: &RunArgs) -> ExitCode {
    let mut case = match Case::load(&args.scenario) {
        Ok(case) => case,
        Err(error) => return usage(error),
    };
    case.seed = args.seed.unwrap_or(case.seed);
    let outcome = match args.messages {
        true => simnet::run::run_with_timeline(&case, simnet::timeline::Timeline::with_messages()),
        false => run_caught(&case),
    };
    if args.json {
        say(&json!({ "scenario": case.about, "result": outcome, "timeline": outcome.timeline }).to_string());
    } else {
        say(&format!("{} (seed {})\n{}", case.about, case.seed, figures(&case)));
        print_outcome(&outcome);
    }
    verdict(outcome.violations.is_empty())
}

/// The parameters of a case, drawn or from a scenario.
fn figures(case: &Case) -> String {
    let (mesh, network) = (&case.mesh, &case.network);
    let part = |name: &str, ppm: u32| {
        if ppm == 0 { String::new() } else { format!(", {name} {:.2} %", f64::from(ppm) / 10_000.0) }
    };
    let entries: Vec<String> = case.entries.iter().map(entry_text).collect();
    let simulations: Vec<String> = case.simulations.iter().map(simulation_text).collect();
    let further = entries.into_iter().chain(simulations).map(|text| format!("  {text}\n")).collect::<String>();
    let regions = match mesh.regions.is_empty() {
        true => String::new(),
        false => format!(", {} more per region, regions {:?}", units::text(network.latency_per_region), mesh.regions),
    };
    format!(
        "  {} hosts of {} MiB, {} layers; link latency {}, jitter {}, {} MB/s{}{}{}{regions}; {} requests; \
         faults healed after {}\n{further}",
        mesh.hosts,
        mesh.memory_mib,
        mesh.layers,
        units::text(network.latency),
        units::text(network.jitter),
        network.bandwidth / 1_000_000,
        part("loss", network.loss_ppm),
        part("duplicates", network.duplicate_ppm),
        part("reordered", network.reorder_ppm),
        case.requests.len(),
        units::text(case.lasts),
    )
}

fn entry_text(entry: &EntryNode) -> String {
    let serves = entry.layers.map_or("the same model".into(), |layers| format!("a model of {layers} layers"));
    format!("entry node: host {} serves {serves}", entry.host)
}

fn simulation_text(simulation: &Simulation) -> String {
    let Simulation { at, host, size, steps, tier, depth, checkpoint_every, cancel_after, .. } = simulation;
    let every = checkpoint_every.map_or("no checkpoints".into(), |every| format!("checkpoints every {every} steps"));
    let depth = depth.map_or(String::new(), |depth| format!(", halo depth {depth}"));
    let cancelled = cancel_after.map_or(String::new(), |after| format!(", cancelled after {}", units::text(after)));
    format!(
        "simulation at {} on host {host}: {size:?}, {steps} steps, standby tier {tier:?}, {every}{depth}{cancelled}",
        ms(*at)
    )
}

fn print_outcome(outcome: &Outcome) {
    for line in &outcome.timeline {
        say(&line.to_string());
    }
    let (ends, simulations) = (counts(&outcome.ends), counts(&outcome.simulations));
    say(&format!(
        "\nrequests: {ends}; simulations: {simulations}; longest pause between two tokens {} ms; settled {} ms after the faults were healed; {} virtual s, {} \
         events, trace {}",
        outcome.pause_ms_max,
        outcome.settled_ms,
        outcome.virtual_ms / 1000,
        outcome.events,
        outcome.trace,
    ));
    if outcome.violations.is_empty() {
        say("result: ok, no violations");
    }
    for violation in &outcome.violations {
        say(&format!("VIOLATION: {violation}"));
    }
}

/// Counts of ends by kind, as text.
fn counts(ends: &BTreeMap<String, u32>) -> String {
    let ends: Vec<String> = ends.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    if ends.is_empty() { "none".into() } else { ends.join(", ") }
}

fn soak(args: &SoakArgs) -> ExitCode {
    let seconds = args.seconds.or(args.minutes.map(|minutes| minutes * 60)).unwrap_or(60);
    if !(5..=86_400).contains(&seconds) {
        return usage(format!("expected 5 s to a day of virtual time, found {seconds} s"));
    }
    let size = Size { hosts: args.nodes, time: Duration::from_secs(seconds) };
    let Some(end) = args.from.checked_add(args.seeds) else { return usage("expected --from plus --seeds below 2^64") };
    std::panic::set_hook(Box::new(|_| {})); // a panic is reported as a violation of its seed
    if args.seeds == 1 && !args.json {
        return one(args, size);
    }
    let began = Instant::now();
    let mut sums = Sums::default();
    let jobs = args.jobs.unwrap_or_else(soak::cores);
    soak::soak(args.from..end, size, jobs, |outcome| {
        sums.add(&outcome);
        if !outcome.violations.is_empty() {
            if args.json {
                say(&serde_json::to_string(&outcome).unwrap_or_default());
            } else {
                say(&format!("seed {}: {}", outcome.seed, outcome.violations[0]));
                say(&format!("  rerun: {}", again(args, outcome.seed)));
            }
        }
        if !args.json && sums.seeds.is_multiple_of(100) {
            eprint!("\r{} of {} seeds, {} fail ", sums.seeds, args.seeds, sums.failed.len());
            let _ = std::io::stderr().flush();
        }
    });
    let real = began.elapsed().as_secs_f64();
    sums.failed.sort_unstable();
    if args.json {
        say(&sums.to_json(real).to_string());
    } else {
        eprintln!();
        say(&sums.to_text(real, jobs));
        if let Some(&seed) = sums.failed.first() {
            say("\nthe first seed that fails, with the fewest faults that reproduce it:");
            shrink(args, size, seed);
        }
    }
    verdict(sums.failed.is_empty())
}

fn scale(args: &ScaleArgs) -> ExitCode {
    let progress = |stage: &str| {
        // On a terminal one line that is overwritten; no progress with --json.
        if !args.json && std::io::stderr().is_terminal() {
            eprint!("\r\x1b[K{stage}");
        } else if !args.json {
            eprintln!("{stage}");
        }
    };
    let watched = Duration::from_secs(args.seconds);
    let scale = simnet::scale::scale(args.seed, args.nodes, args.deaths, watched, progress);
    if !args.json && std::io::stderr().is_terminal() {
        eprintln!();
    }
    if args.json {
        say(&serde_json::to_string(&scale).unwrap_or_default());
    } else {
        say(&format!(
            "{} nodes joined after {} ms ({:.1} s real); {}: the first report after {} ms, the last after {} ms; {}, {}; \
             {} virtual s in {:.1} s on one core: {:.2} times real time, {} events",
            scale.nodes,
            scale.joined_ms,
            scale.joining_real_s,
            units::count(scale.deaths as usize, "death"),
            scale.first_told_ms,
            scale.all_know_ms,
            units::count(scale.false_deaths, "false death"),
            units::count(scale.wrong_views, "wrong view"),
            scale.virtual_s,
            scale.real_s,
            scale.virtual_s as f64 / scale.real_s,
            scale.events,
        ));
    }
    verdict(scale.wrong_views == 0 && scale.joined_ms != u64::MAX)
}

fn replay(args: &ReplayArgs) -> ExitCode {
    let bytes = match std::fs::read(&args.file) {
        Ok(bytes) => bytes,
        Err(error) => return usage(format!("cannot read {}: {error}", args.file.display())),
    };
    let replayed = match simnet::replay::replay(&bytes) {
        Ok(replayed) => replayed,
        Err(error) => return usage(format!("{}: {error}", args.file.display())),
    };
    let cut = replayed.cut.as_ref().map(ToString::to_string);
    let lasted_ms = replayed.lasted_ns / 1_000_000;
    let header = &replayed.header;
    if args.json {
        say(&json!({
            "name": header.config.name, "node": header.config.node.to_string(), "program": header.program,
            "inputs": replayed.inputs, "outputs": replayed.outputs, "lasted_ms": lasted_ms, "hash": replayed.hash,
            "cut": cut, "timeline": replayed.timeline,
        })
        .to_string());
    } else {
        say(&format!("node `{}` ({}), recorded by {}\n", header.config.name, header.config.node, header.program));
        replayed.timeline.iter().for_each(|line| say(&line.to_string()));
        say(&format!(
            "\n{} inputs in {:.3} s, {} outputs with the hash {}",
            replayed.inputs,
            lasted_ms as f64 / 1000.0,
            replayed.outputs,
            replayed.hash,
        ));
        if let Some(cut) = &cut {
            say(cut);
        }
    }
    // A recording of a node that was killed may end within an entry. A damaged one is a failure.
    verdict(matches!(replayed.cut, None | Some(node_core::record::RecordError::CutShort { .. })))
}

/// Runs one seed with its full log.
fn one(args: &SoakArgs, size: Size) -> ExitCode {
    let case = draw(args.from, size);
    say(&format!("seed {}\n{}", case.seed, figures(&case)));
    case.faults.iter().for_each(|timed| say(&format!("  {:>10} {}", ms(timed.at), timed.fault)));
    let outcome = match args.messages {
        true => simnet::run::run_with_timeline(&case, simnet::timeline::Timeline::with_messages()),
        false => run_caught(&case),
    };
    print_outcome(&outcome);
    if !outcome.violations.is_empty() {
        say(&format!("\nrerun: {}\nthe fewest faults that reproduce it:", again(args, args.from)));
        shrink(args, size, args.from);
    }
    verdict(outcome.violations.is_empty())
}

fn shrink(args: &SoakArgs, size: Size, seed: u64) {
    let case = draw(seed, size);
    let outcome = run_caught(&case);
    let least = minimize(&case, &outcome, MINIMIZE_RUNS);
    for timed in &least.case.faults {
        say(&format!("  {:>10} {}", ms(timed.at), timed.fault));
    }
    let (faults, requests) = (least.case.faults.len(), least.case.requests.len());
    let simulations = least.case.simulations.len();
    say(&format!(
        "{faults} of {} faults, {requests} of {} requests and {simulations} of {} simulations reproduce it ({} runs): {}",
        case.faults.len(),
        case.requests.len(),
        case.simulations.len(),
        least.runs,
        least.outcome.violations.first().map_or("", String::as_str),
    ));
    say(&format!("rerun: {}", again(args, seed)));
    say(&format!("\n# as a scenario, for `simnet run FILE.toml`\n{}", least.case.to_toml()));
}

fn ms(at: node_core::time::Instant) -> String {
    format!("{:.1} ms", at.0 as f64 / 1e6)
}

/// The command that reruns a seed.
fn again(args: &SoakArgs, seed: u64) -> String {
    let seconds = args.seconds.or(args.minutes.map(|minutes| minutes * 60)).unwrap_or(60);
    let nodes = if args.nodes == 8 { String::new() } else { format!(" --nodes {}", args.nodes) };
    let time = if seconds == 60 { String::new() } else { format!(" --seconds {seconds}") };
    format!("cargo run --release -p simnet -- soak --seeds 1 --from {seed}{nodes}{time}")
}

#[derive(Default)]
struct Sums {
    seeds: u64,
    events: u64,
    virtual_ms: u64,
    failed: Vec<u64>,
    ends: BTreeMap<String, u32>,
    simulations: BTreeMap<String, u32>,
    successions: u64,
    /// (milliseconds, seed) of each seed.
    pauses_ms: Vec<(u64, u64)>,
    stalls_ms: Vec<(u64, u64)>,
    settled_ms_max: u64,
    /// Losses after which requests and simulations must continue within a second, and the longest wait of each seed that
    /// has any.
    losses: u64,
    losses_ms: Vec<(u64, u64)>,
}

impl Sums {
    fn add(&mut self, outcome: &Outcome) {
        self.seeds += 1;
        self.events += outcome.events;
        self.virtual_ms += outcome.virtual_ms;
        if !outcome.violations.is_empty() {
            self.failed.push(outcome.seed);
        }
        for (kind, count) in &outcome.ends {
            *self.ends.entry(kind.clone()).or_insert(0) += count;
        }
        for (kind, count) in &outcome.simulations {
            *self.simulations.entry(kind.clone()).or_insert(0) += count;
        }
        self.successions += u64::from(outcome.successions);
        self.losses += u64::from(outcome.losses);
        if outcome.losses > 0 {
            self.losses_ms.push((outcome.loss_ms_max, outcome.seed));
        }
        self.pauses_ms.push((outcome.pause_ms_max, outcome.seed));
        self.stalls_ms.push((outcome.stall_ms_max, outcome.seed));
        self.settled_ms_max = self.settled_ms_max.max(outcome.settled_ms);
    }

    fn percentile(times_ms: &[(u64, u64)], percent: usize) -> u64 {
        let mut sorted = times_ms.to_vec();
        sorted.sort_unstable();
        sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).map_or(0, |(ms, _)| *ms)
    }

    /// The seeds with the longest times, longest first.
    fn worst(times_ms: &[(u64, u64)]) -> Vec<serde_json::Value> {
        let mut sorted = times_ms.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        sorted.iter().take(WORST_TOLD).map(|(ms, seed)| json!({ "seed": seed, "ms": ms })).collect()
    }

    fn to_json(&self, real_s: f64) -> serde_json::Value {
        json!({
            "seeds": self.seeds, "failed": self.failed, "ends": self.ends, "simulations": self.simulations,
            "successions": self.successions, "events": self.events,
            "virtual_s": self.virtual_ms / 1000, "real_s": real_s,
            "pause_ms_p50": Sums::percentile(&self.pauses_ms, 50),
            "pause_ms_max": Sums::percentile(&self.pauses_ms, 100), "settled_ms_max": self.settled_ms_max,
            "losses": self.losses, "loss_ms_p50": Sums::percentile(&self.losses_ms, 50),
            "loss_ms_max": Sums::percentile(&self.losses_ms, 100),
            "worst_pauses": Sums::worst(&self.pauses_ms), "worst_stalls": Sums::worst(&self.stalls_ms),
        })
    }

    fn to_text(&self, real_s: f64, jobs: usize) -> String {
        format!(
            "{} seeds, {} fail {:?}; requests: {}; simulations: {}, continued {} times by a successor or from a checkpoint; longest pause of a seed: median {} ms, worst {} ms; {} losses of \
             stages and tiles with current standbys, longest wait of a seed median {} ms, worst {} ms; after the faults were \
             healed: longest wait {} ms, settled within {} ms; {:.0} virtual s in {real_s:.1} s on {} ({:.0} ms per seed and thread), {} events",
            self.seeds,
            self.failed.len(),
            self.failed,
            counts(&self.ends),
            counts(&self.simulations),
            self.successions,
            Sums::percentile(&self.pauses_ms, 50),
            Sums::percentile(&self.pauses_ms, 100),
            self.losses,
            Sums::percentile(&self.losses_ms, 50),
            Sums::percentile(&self.losses_ms, 100),
            self.stalls_ms.iter().map(|(ms, _)| *ms).max().unwrap_or(0),
            self.settled_ms_max,
            self.virtual_ms as f64 / 1000.0,
            units::count(jobs, "thread"),
            real_s * 1000.0 * jobs as f64 / self.seeds.max(1) as f64,
            self.events,
        )
    }
}

/// Ignores write errors: a reader may close the pipe (`| head`).
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Number of worst seeds in the JSON summary.
const WORST_TOLD: usize = 20;
/// Bound of the minimisation: about ten seconds.
const MINIMIZE_RUNS: u32 = 200;
