//! The simulator finds planted bugs.
//!
//! `.ci/run` runs the seeds that found them. If a change alters what seeds draw, search for new ones:
//! `cargo test --release -p simnet --features planted --test planted -- --ignored --nocapture`
#![cfg(feature = "planted")]
#![expect(clippy::print_stdout, reason = "figures for people")]
use node_core::planted::{Planted, plant};
use simnet::run::Outcome;
use simnet::soak::{Size, cores, draw, run_caught, soak};
use std::sync::Mutex;

/// Each bug, a seed that finds it where one is recorded, and a part of the violation.
const BUGS: [(Planted, Option<u64>, &str); 20] = [
    (Planted::EpochCheckLeftOut, Some(25), "a frame of"),
    (Planted::RingTrimmedEarly, Some(7), "keeps request"),
    (Planted::StandbyPromotedTwice, None, "as standby of part"),
    (Planted::ResumeOneAhead, None, "and a request waits"),
    (Planted::CancelDropped, None, "after its caller went away"),
    (Planted::SeedByFirstPosition, None, "the solo chain has"),
    (Planted::StandbyNeverFed, None, "and a request waits"),
    (Planted::NoFence, None, "sends a frame of"),
    (Planted::CloseNotToStandby, None, "caches"),
    (Planted::LostNotExcluded, None, "reported lost and not heard since"),
    (Planted::BackIgnored, None, "though a host has room"),
    (Planted::BanIgnored, None, "banned"),
    (Planted::OrphansStay, None, "its coordinator does not"),
    (Planted::LossFailsRequests, None, "though its coordinator lives"),
    (Planted::NoStandbys, None, "though a host has room"),
    (Planted::TileOneAhead, None, "and a simulation waits"),
    (Planted::SuccessionWithoutMajority, None, "participants ask for it"),
    (Planted::ReportsOfTwoCuts, None, "the sum of step"),
    (Planted::SimulationCancelDropped, None, "after its cancellation"),
    (Planted::CheckpointIncomplete, None, "a wrong checkpoint"),
];

/// A planted bug affects the whole process: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn planted<T>(bug: Planted, work: impl FnOnce() -> T) -> T {
    plant(Some(bug));
    let result = work();
    plant(None);
    result
}

fn said<'o>(outcome: &'o Outcome, word: &str) -> Option<&'o String> {
    outcome.violations.iter().find(|violation| violation.contains(word))
}

#[test]
fn recorded_seeds_find_their_bugs() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let recorded = BUGS.into_iter().filter_map(|(bug, seed, word)| Some((bug, seed?, word)));
    for (bug, seed, word) in recorded {
        let case = draw(seed, Size::default());
        let outcome = planted(bug, || run_caught(&case));
        assert!(said(&outcome, word).is_some(), "{bug:?}, seed {seed}: {:?}", outcome.violations);
        let without = run_caught(&case);
        assert!(without.violations.is_empty(), "seed {seed} without {bug:?}: {:?}", without.violations);
    }
}

#[test]
#[ignore = "prints the first seed that finds each bug; some minutes"]
fn every_bug_is_found() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let missed = BUGS.iter().filter(|(bug, _, word)| match planted(*bug, || first_seed(word)) {
        Some((seed, what)) => {
            println!("{bug:?}: seed {seed} finds it: {what}");
            false
        }
        None => true,
    });
    let missed: Vec<Planted> = missed.map(|(bug, ..)| *bug).collect();
    assert!(missed.is_empty(), "not found in {SEEDS_MAX} seeds: {missed:?}");
}

/// The first seed that finds the planted bug, and the violation.
fn first_seed(word: &str) -> Option<(u64, String)> {
    let mut first: Option<(u64, String)> = None;
    for from in (0..SEEDS_MAX).step_by(TOGETHER as usize) {
        soak(from..from + TOGETHER, Size::default(), cores(), |outcome| {
            if let Some(what) = said(&outcome, word)
                && first.as_ref().is_none_or(|(seed, _)| outcome.seed < *seed)
            {
                first = Some((outcome.seed, what.clone()));
            }
        });
        if first.is_some() {
            break;
        }
    }
    first
}

/// Seeds a bug may hide from.
const SEEDS_MAX: u64 = 2000;
/// Seeds run before looking.
const TOGETHER: u64 = 20;
