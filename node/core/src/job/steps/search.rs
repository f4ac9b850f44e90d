//! Finds the first step after which a field is not finite: steps are replayed, and each one is checked.
//!
//! A check for NaN costs a pass over the memory, so it is done with each report only. A value that is not finite
//! appeared after the last check. Steps are deterministic, so it appears again in a replay from the last checkpoint.
use super::{Steps, Then};
use crate::job::output::{JobOutput, Out};
use crate::job::part::Part;
use crate::limits::SEARCH_MAX;
use crate::output::Event;
use crate::time::Instant;
use crate::work::steps::{Schedule, StepsEvent};
use alloc::{format, string::String};

/// The range of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Search {
    /// All values were finite after this step.
    after: u32,
    /// A value was not finite after this step.
    until: u32,
}

impl Search {
    /// Whether all values are known to be finite after a step.
    pub(super) fn has(&self, step: u32) -> bool {
        step <= self.after
    }
}

impl Steps {
    /// The schedule of the tiles. During a search, every step in its range is checked.
    pub(super) fn schedule(&self) -> Schedule {
        Schedule { looks: self.search.map(|search| (search.after, search.until)), ..self.spec.schedule.clone() }
    }

    /// After `step` a cell is NaN or infinite in some tile, and none was after the step checked `before` it. The job
    /// ends once the first such step is known.
    pub(super) fn handle_not_finite(
        &mut self,
        (now, running): (Instant, bool),
        (step, before): (u32, Option<u32>),
        (cell, field): ([u64; 3], u16),
        parts: &[Part],
        out: &mut Out,
    ) -> Then {
        if !running {
            // Another placement is being prepared. The value appears again under it.
            return Then::GoOn;
        }
        let [x, y, z] = cell;
        let has = |at: &[u64; 3], to: &[u64; 3]| (0..3).all(|axis| at[axis] <= cell[axis] && cell[axis] < to[axis]);
        let tile = self.tiles.iter().position(|tile| has(&tile.block.from, &tile.block.to)).unwrap_or(0);
        let owner = parts.get(tile).map_or(self.me, |part| part.owner);
        let what = format!("field {field} of the cell {x}, {y}, {z} (tile {tile}, on {owner}) is NaN or infinite");
        let back = self.checkpoint.unwrap_or(0);
        let end = |how: String| Some(Err(format!("after step {step}{how}: {UNSTABLE}")));
        if before.is_some_and(|before| before + 1 == step) {
            self.ending = end(format!(", not before, {what}"));
            return Then::GoOn;
        }
        if before.is_none() && step == back {
            self.ending = end(format!(", where this run starts, {what}"));
            return Then::GoOn;
        }
        let after = before.unwrap_or(back);
        let again = u128::from(step.saturating_sub(back));
        let made = u128::from(step.saturating_sub(self.begun_at.1).max(1));
        let takes = now.since(self.begun_at.0).as_nanos() * again / made;
        if self.search.is_some() || back > after || takes > SEARCH_MAX.as_nanos() {
            let why = if takes > SEARCH_MAX.as_nanos() {
                format!("a replay of {again} steps to find it would take too long")
            } else {
                "a replay did not find it".into()
            };
            self.ending = end(format!(
                " {what} (the first such step is after step {after}; {why}: check_every = 1 reports it immediately)"
            ));
            return Then::GoOn;
        }
        self.search = Some(Search { after, until: step });
        let reason = format!("{what}: steps are replayed from step {back} to find the first such step");
        self.notify(StepsEvent::Waiting { reason: format!("after step {step} {reason}") }, out);
        Then::RollBack
    }

    /// The search found nothing, so the steps were not deterministic.
    pub(super) fn end_search_if_over(&mut self, step: u32, out: &mut Out) {
        let Some(search) = self.search.take_if(|search| step >= search.until) else { return };
        let what = format!(
            "job {:016x}: after step {} a field was NaN or infinite, and in a replay it is not: a machine's memory or \
             processor is faulty; the run continues from the replay",
            self.job.0, search.until
        );
        out.push_back(JobOutput::Notify(Event::Rejected { from: None, what }));
    }
}

const UNSTABLE: &str = "the simulation is unstable; try a smaller step, a larger viscosity or a smaller velocity";
