//! The simulator finds planted bugs.
//!
//! `.ci/run` runs the seeds that found them. If a change alters the random draws, search for new seeds:
//! `cargo test --release -p simnet --features planted --test planted -- --ignored --nocapture`
#![cfg(feature = "planted")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
use node_core::planted::{Planted, plant};
use parking_lot::Mutex;
use simnet::run::Outcome;
use simnet::soak::{Size, cores, draw, run_caught, soak};

/// Each bug, a seed that finds it, and a part of the violation's text.
const BUGS: [(Planted, u64, &str); 22] = [
    (Planted::EpochCheckLeftOut, 50, "a frame of"),
    (Planted::RingTrimmedEarly, 3, "keeps request"),
    (Planted::StandbyPromotedTwice, 2, "as standby of part"),
    (Planted::ResumeOneAhead, 3, "and a request waits"),
    (Planted::CancelDropped, 0, "after its caller went away"),
    (Planted::SeedByFirstPosition, 0, "the solo chain has"),
    (Planted::StandbyNeverFed, 866, "and a request waits"),
    (Planted::NoFence, 25, "sends a frame of"),
    (Planted::PrefixUnchecked, 0, "the solo chain has"),
    (Planted::CloseNotToStandby, 0, "caches"),
    (Planted::LostNotExcluded, 1, "reported lost and not heard since"),
    (Planted::RejoinIgnored, 16, "though a host has room"),
    (Planted::BanIgnored, 25, "banned"),
    (Planted::OrphansStay, 6, "its coordinator does not"),
    (Planted::LossFailsRequests, 3, "though its coordinator lives"),
    (Planted::NoStandbys, 0, "though a host has room"),
    (Planted::TileOneAhead, 173, "and a simulation waits"),
    (Planted::SuccessionWithoutMajority, 25, "participants ask for it"),
    (Planted::ReportsOfTwoPartitions, 85, "the sum of step"),
    (Planted::SimulationCancelDropped, 173, "after its cancellation"),
    (Planted::CheckpointIncomplete, 1, "a wrong checkpoint"),
    (Planted::DraftsCounted, 47, "the solo chain has"),
];

/// A planted bug affects the whole process, so tests run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn planted<T>(bug: Planted, work: impl FnOnce() -> T) -> T {
    plant(Some(bug));
    let result = work();
    plant(None);
    result
}

fn violation_with<'o>(outcome: &'o Outcome, word: &str) -> Option<&'o String> {
    outcome.violations.iter().find(|violation| violation.contains(word))
}

#[test]
fn recorded_seeds_find_their_bugs() {
    let _alone = ONE_AT_A_TIME.lock();
    let mut wrong = Vec::new();
    for (bug, seed, word) in BUGS {
        let case = draw(seed, Size::default());
        let outcome = planted(bug, || run_caught(&case));
        if violation_with(&outcome, word).is_none() {
            wrong.push(format!("{bug:?}, seed {seed}: {:?}", outcome.violations));
        }
        let without = run_caught(&case);
        if !without.violations.is_empty() {
            wrong.push(format!("seed {seed} without {bug:?}: {:?}", without.violations));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
#[ignore = "prints the first seed that finds each bug; some minutes"]
fn every_bug_is_found() {
    let _alone = ONE_AT_A_TIME.lock();
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
            if let Some(what) = violation_with(&outcome, word)
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

/// Number of seeds to search for a bug.
const SEEDS_MAX: u64 = 2000;
/// Seeds per round of the search.
const TOGETHER: u64 = 20;
