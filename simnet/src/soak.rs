//! Many random cases, one per seed, run on all cores. Next: `minimize.rs`.
use crate::case::{Ask, Case, EntryNode, Mesh, Simulation, StandbyTier};
use crate::faults::{self, Ground};
use crate::options::{Options, chance};
use crate::run::{Outcome, run};
use crate::workload::WIDTH;
use node_core::time::{Duration, Instant};
use rand::RngExt;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

/// Size of the cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Hosts of each case.
    pub hosts: u32,
    /// Virtual time of each case, including setup and settling.
    pub time: Duration,
}

impl Default for Size {
    fn default() -> Self {
        Size { hosts: 8, time: Duration::from_secs(60) }
    }
}

/// The random case of a seed: options, requests and faults.
pub fn draw(seed: u64, size: Size) -> Case {
    let mut rng = chance(seed, "case");
    let lasts = size.time * 11 / 20; // the rest is for setup and settling
    let span_us = u64::try_from(lasts.as_micros()).unwrap_or(u64::MAX).max(1);
    let mut network = Options { seed: 0, ..Options::swarm(seed) };
    let mut regions = Vec::new();
    if rng.random_bool(0.3) {
        network.latency_per_region = Duration::from_micros(rng.random_range(500..15_000));
        regions = (0..size.hosts).map(|_| rng.random_range(0..3)).collect();
    }
    // A stream of its own, so that seeds keep their earlier draws.
    let mut more = chance(seed, "more");
    let calm = more.random_bool(0.25);
    let mixed = more.random_bool(0.3);
    let wide = more.random_bool(0.1);
    if wide {
        network.bandwidth = FAST_BYTES_PER_SECOND;
    }
    let mut disk = chance(seed, "disk");
    network.unsynced_lost_percent = [100, 50, 20][disk.random_range(0..3usize)];
    network.unsynced_torn_percent = [0, 30, 50][disk.random_range(0..3usize)];
    let handling_us = [0, 2, 10, 40][chance(seed, "driver").random_range(0..4usize)];
    network.handling = Duration::from_micros(handling_us);
    let memory_mib = [297, 297, 378, 576, 900][rng.random_range(0..5usize)];
    let head_mortal = rng.random_bool(0.3);
    let asks = rng.random_range(4..=20);
    let ask = |_| {
        let at = Instant(0) + Duration::from_micros(rng.random_range(0..span_us));
        let prompt = if rng.random_bool(0.5) { rng.random_range(1..100) } else { rng.random_range(100..1500) };
        let cancel_after = rng.random_bool(0.15).then(|| Duration::from_micros(rng.random_range(0..2_000_000)));
        let tokens = rng.random_range(if calm { 200..450 } else { 1..300 });
        Ask { at, prompt, tokens, cancel_after, entry: 0 }
    };
    let mut requests: Vec<Ask> = (0..asks).map(ask).collect();
    requests.sort_by_key(|ask| ask.at);
    let simulations = draw_simulations(seed, size, span_us);
    let alone = !simulations.is_empty() && chance(seed, "no model").random_bool(0.15);
    let draft = draw_draft(seed, memory_mib).filter(|_| !alone);
    let entries = if alone { Vec::new() } else { draw_entries(seed, size, memory_mib, &mut requests) };
    Case {
        about: format!("seed {seed}"),
        seed,
        lasts,
        mesh: Mesh {
            hosts: size.hosts,
            memory_mib,
            layers: if alone { 0 } else { LAYERS },
            regions,
            devices: draw_devices(seed, size),
            mixed,
            width: if wide { WIDE } else { WIDTH },
            ram_pages: if chance(seed, "ram").random_bool(0.3) { RAM_PAGES } else { 0 },
            replicas: if memory_mib >= TWICE_MIB && chance(seed, "replicas").random_bool(0.25) { 2 } else { 1 },
            draft,
        },
        network,
        entries,
        requests: if alone { Vec::new() } else { requests },
        simulations,
        faults: {
            let ground = Ground { hosts: size.hosts, span: lasts, entry_mortal: head_mortal };
            let mut all = if calm { faults::losses(seed, &ground) } else { faults::any(seed, &ground) };
            if !calm {
                all.extend(faults::disks(seed, &ground));
            }
            all.extend(faults::forgeries(seed, &ground));
            all.extend(faults::gone_devices(seed, &ground, &draw_devices(seed, size)));
            all.sort_by_key(|timed| timed.at);
            all
        },
    }
}

/// In a fifth of the worlds, some hosts have two or three devices.
fn draw_devices(seed: u64, size: Size) -> Vec<u32> {
    let mut rng = chance(seed, "devices");
    if !rng.random_bool(0.2) {
        return Vec::new();
    }
    (0..size.hosts).map(|_| if rng.random_bool(0.4) { rng.random_range(2..=3) } else { 1 }).collect()
}

/// A draft model in an eighth of the cases: a smaller one, or the model itself where hosts have memory for it twice. A hash of
/// the seed, so that seeds keep their other draws.
fn draw_draft(seed: u64, memory_mib: u64) -> Option<u32> {
    let mut rng = chance(seed, "draft model");
    let drawn = rng.random_bool(0.125);
    let same = memory_mib >= TWICE_MIB && rng.random_bool(0.3);
    drawn.then(|| if same { LAYERS } else { rng.random_range(1..=4) })
}

/// A simulation in a third of the cases, two in some. A stream of its own, so that seeds keep their earlier draws.
fn draw_simulations(seed: u64, size: Size, span_us: u64) -> Vec<Simulation> {
    let mut rng = chance(seed, "simulations");
    let count = if rng.random_bool(0.35) { 1 + usize::from(rng.random_bool(0.15)) } else { 0 };
    let one = |_| {
        let at = Instant(0) + Duration::from_micros(rng.random_range(0..span_us * 3 / 5));
        let flat = rng.random_bool(0.8);
        let mut axis = |least: u64, most: u64| rng.random_range(least..=most);
        let extent = if flat { [axis(8, 18), axis(8, 18), 1] } else { [axis(5, 7), axis(5, 7), axis(4, 6)] };
        let periodic = [0.5, 0.3, 0.1].map(|chance| rng.random_bool(chance));
        let steps = rng.random_range(100..1_200);
        let tier =
            [StandbyTier::None, StandbyTier::Warm, StandbyTier::Hot, StandbyTier::Hot][rng.random_range(0..4usize)];
        let depth = rng.random_bool(0.5).then(|| rng.random_range(1..=4));
        let checkpoint_every = rng.random_bool(0.7).then(|| rng.random_range(15..250));
        let outputs = (0..rng.random_range(0..=2)).map(|_| rng.random_range(20..200)).collect();
        Simulation {
            at,
            host: rng.random_range(0..size.hosts),
            size: extent,
            periodic: [periodic[0], periodic[1], periodic[2] && !flat],
            steps,
            tier,
            depth,
            checkpoint_every,
            report_every: rng.random_range(5..100),
            outputs,
            scratch_mib: [1, 4, 16][rng.random_range(0..3usize)],
            cancel_after: rng.random_bool(0.15).then(|| Duration::from_micros(rng.random_range(0..6_000_000))),
        }
    };
    (0..count).map(one).collect()
}

/// A second entry node in a fifth of the cases, which receives a part of the requests. It serves the same model if hosts
/// have memory for it twice, else a smaller one.
fn draw_entries(seed: u64, size: Size, memory_mib: u64, requests: &mut [Ask]) -> Vec<EntryNode> {
    let mut rng = chance(seed, "second entry node");
    if size.hosts < 4 || !rng.random_bool(0.2) {
        return Vec::new();
    }
    let same = rng.random_bool(0.5) && memory_mib >= TWICE_MIB;
    let layers = (!same).then(|| rng.random_range(3..=6));
    for ask in requests {
        ask.entry = u32::from(rng.random_bool(0.4));
    }
    vec![EntryNode { host: rng.random_range(1..size.hosts), layers }]
}

/// Less than one whole context, which has 32.
const RAM_PAGES: u32 = 24;
/// Layers of the model.
const LAYERS: u32 = 12;
/// With this much memory on each of eight hosts, two models of twelve layers and their standbys fit.
const TWICE_MIB: u64 = 576;
/// Rows so wide that a stage's replay ring holds 256 of them.
const WIDE: u32 = 65_536;
/// The bandwidth for wide rows: 100 Gbit/s.
const FAST_BYTES_PER_SECOND: u64 = 12_500_000_000;

/// Runs a case; a panic of the code under test is a violation.
pub fn run_caught(case: &Case) -> Outcome {
    match catch_unwind(AssertUnwindSafe(|| run(case))) {
        Ok(outcome) => outcome,
        Err(panic) => Outcome {
            seed: case.seed,
            violations: vec![format!("panicked: {}", panic_text(panic.as_ref()))],
            ..Outcome::default()
        },
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_else(|| "no message".into())
}

/// Runs all seeds on `jobs` threads, and calls `report` with each outcome as it completes (not in order).
pub fn soak(seeds: Range<u64>, size: Size, jobs: usize, mut report: impl FnMut(Outcome)) {
    let next = AtomicU64::new(seeds.start);
    let (sender, outcomes) = mpsc::sync_channel(jobs.max(1));
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            let (sender, next, end) = (sender.clone(), &next, seeds.end);
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || sender.send(run_caught(&draw(seed, size))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        outcomes.into_iter().for_each(&mut report);
    });
}

/// Number of hardware threads.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
