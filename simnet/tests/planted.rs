//! Bugs that were planted are found: the simulator is worth what it finds.
//!
//! `cargo test --release -p simnet --features planted --test planted -- --nocapture`
#![cfg(feature = "planted")]
#![expect(clippy::print_stdout, reason = "figures for people")]
use node_core::planted::{Planted, plant};
use simnet::soak::{Size, cores, draw, run_caught, soak};
use std::sync::Mutex;

/// A bug is the whole process's: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The first seed below 2,000 that finds it, and what it says.
fn found(bug: Planted, word: &str) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let size = Size::default();
    plant(Some(bug));
    let mut first: Option<(u64, String)> = None;
    let mut from = 0;
    while first.is_none() && from < SEEDS_MAX {
        soak(from..from + TOGETHER, size, cores(), |outcome| {
            let said = outcome.violations.iter().find(|violation| violation.contains(word));
            if let Some(said) = said
                && first.as_ref().is_none_or(|(seed, _)| outcome.seed < *seed)
            {
                first = Some((outcome.seed, said.clone()));
            }
        });
        from += TOGETHER;
    }
    plant(None);
    let (seed, said) = first.unwrap_or_else(|| panic!("{bug:?} is not found in {SEEDS_MAX} seeds"));
    println!("{bug:?}: seed {seed} finds it: {said}");
    let without = run_caught(&draw(seed, size));
    assert!(without.violations.is_empty(), "seed {seed} without the bug: {:?}", without.violations);
}

#[test]
fn an_epoch_check_left_out_is_found() {
    found(Planted::EpochCheckLeftOut, "a frame of");
}

#[test]
fn a_ring_trimmed_too_early_is_found() {
    found(Planted::RingTrimmedEarly, "keeps request");
}

#[test]
fn a_standby_promoted_twice_is_found() {
    found(Planted::StandbyPromotedTwice, "stands by for stage");
}

/// Seeds a bug may hide from.
const SEEDS_MAX: u64 = 2000;
/// Seeds run before looking.
const TOGETHER: u64 = 20;
