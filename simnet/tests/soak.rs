//! Many random worlds, one per seed: no invariant is violated, and the same seed gives the same run.
//!
//! More seeds: `SIMNET_SEEDS=20000 cargo test --release -p simnet --test soak -- --nocapture`, from `SIMNET_FROM` on.
#![expect(clippy::disallowed_methods, reason = "measures how fast the simulator itself runs")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
use simnet::minimize::minimize;
use simnet::run;
use simnet::soak::{Size, cores, draw, run_caught, soak};
use std::collections::BTreeMap;

fn read(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(usual)
}

#[test]
fn no_random_world_violates_an_invariant() {
    let (from, seeds, size) = (read("SIMNET_FROM", 0), read("SIMNET_SEEDS", 300), Size::default());
    let began = std::time::Instant::now();
    let mut failed = BTreeMap::new();
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    soak(from..from + seeds, size, cores(), |outcome| {
        outcome.ends.iter().for_each(|(kind, count)| *ends.entry(kind.clone()).or_default() += count);
        if !outcome.violations.is_empty() {
            failed.insert(outcome.seed, outcome);
        }
    });
    println!("{seeds} seeds of 8 nodes and 60 virtual seconds in {:.1?}: requests {ends:?}", began.elapsed());
    let Some((seed, outcome)) = failed.first_key_value() else { return };
    let least = minimize(&draw(*seed, size), outcome, 100);
    let faults: Vec<String> = least.case.faults.iter().map(|timed| format!("{:?} {}", timed.at, timed.fault)).collect();
    panic!(
        "seeds {:?} fail; seed {seed}: {:#?}\nfewest faults: {faults:#?}\nrerun: cargo run --release -p simnet -- soak \
         --seeds 1 --from {seed}",
        failed.keys(),
        outcome.violations,
    );
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..12 {
        let case = draw(seed, Size::default());
        let (one, other) = (run(&case), run(&case));
        assert_eq!((&one.trace, one.events, &one.ends), (&other.trace, other.events, &other.ends), "seed {seed}");
        assert_eq!(one.timeline, other.timeline, "seed {seed}");
    }
    let (one, other) = (run_caught(&draw(1, Size::default())), run_caught(&draw(2, Size::default())));
    assert_ne!(one.trace, other.trace);
}

/// Seeds that once found a bug, in the core or in the checkers.
#[test]
fn regression_seeds_pass() {
    for seed in [
        3751, 4762, 5884, 7945, 8527, 9448, 10818, 10829, 12287, 43183, 173, 224, 693, 1345, 1583, 1881, 1949, 1960,
        2209,
    ] {
        let outcome = run_caught(&draw(seed, Size::default()));
        assert!(outcome.violations.is_empty(), "seed {seed}: {:#?}", outcome.violations);
    }
}

#[test]
fn zero_seeds_are_a_usage_error() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_simnet")).args(["soak", "--seeds", "0"]).output();
    let output = output.expect("simnet runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("--seeds"), "{output:?}");
}
