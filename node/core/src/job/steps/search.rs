//! At which step a field stopped being finite: steps are made once more, and each is checked.
//!
//! A check costs a pass over the memory, so it is done with each report. What it finds began somewhere since the last one; since
//! steps are deterministic, it comes again when they are replayed from the last checkpoint.
use super::{Steps, Then};
use crate::job::output::{JobOutput, Out};
use crate::job::part::Part;
use crate::limits::SEARCH_MOST;
use crate::output::Event;
use crate::time::Instant;
use crate::work::steps::{Schedule, StepsEvent};
use alloc::{format, string::String};

/// A search for the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Search {
    /// All was finite after this one.
    after: u32,
    /// Something was not after this one.
    until: u32,
}

impl Search {
    /// Whether all is known to have been finite after a step.
    pub(super) fn has(&self, step: u32) -> bool {
        step <= self.after
    }
}

impl Steps {
    /// What tiles are to make when: while a step is searched for, each of those in question is checked.
    pub(super) fn schedule(&self) -> Schedule {
        Schedule { looks: self.search.map(|search| (search.after, search.until)), ..self.spec.schedule.clone() }
    }

    /// A cell is infinite or no number, as all tiles together say after `step`, and none was after the one checked `before`
    /// it. The job ends, once it is known since when.
    pub(super) fn handle_not_finite(
        &mut self,
        (now, running): (Instant, bool),
        (step, before): (u32, Option<u32>),
        (cell, field): ([u64; 3], u16),
        parts: &[Part],
        out: &mut Out,
    ) -> Then {
        if !running {
            // Another cut is looked for already: it comes again.
            return Then::GoOn;
        }
        let [x, y, z] = cell;
        let has = |at: &[u64; 3], to: &[u64; 3]| (0..3).all(|axis| at[axis] <= cell[axis] && cell[axis] < to[axis]);
        let tile = self.tiles.iter().position(|tile| has(&tile.block.from, &tile.block.to)).unwrap_or(0);
        let owner = parts.get(tile).map_or(self.me, |part| part.owner);
        let what =
            format!("field {field} of the cell {x}, {y}, {z} (tile {tile}, on {owner}) is infinite or no number");
        let back = self.checkpoint.unwrap_or(0);
        let end = |how: String| Some(Err(format!("after step {step}{how}: {UNSTABLE}")));
        if before.is_some_and(|before| before + 1 == step) {
            self.ending = end(format!(", not before, {what}"));
            return Then::GoOn;
        }
        if before.is_none() && step == back {
            self.ending = end(format!(", where this run begins, {what}"));
            return Then::GoOn;
        }
        let after = before.unwrap_or(back);
        let again = u128::from(step.saturating_sub(back));
        let made = u128::from(step.saturating_sub(self.begun_at.1).max(1));
        let takes = now.since(self.begun_at.0).as_nanos() * again / made;
        if self.search.is_some() || back > after || takes > SEARCH_MOST.as_nanos() {
            let why = if takes > SEARCH_MOST.as_nanos() {
                format!("to replay {again} steps to see when would take too long")
            } else {
                "a replay did not show when".into()
            };
            self.ending = end(format!(
                " {what} (it began after step {after}; {why}: with check_every = 1 the job says it at once)"
            ));
            return Then::GoOn;
        }
        self.search = Some(Search { after, until: step });
        let reason = format!("{what}: steps are replayed from step {back}, to see after which one it began");
        self.notify(StepsEvent::Waiting { reason: format!("after step {step} {reason}") }, out);
        Then::RollBack
    }

    /// The search ended without finding anything: steps were not deterministic.
    pub(super) fn end_search_if_over(&mut self, step: u32, out: &mut Out) {
        let Some(search) = self.search.take_if(|search| step >= search.until) else { return };
        let what = format!(
            "job {:016x}: after step {} a field was infinite or no number, and in a replay it is not: a machine's memory or \
             processor is faulty; the run goes on from what the replay made",
            self.job.0, search.until
        );
        out.push_back(JobOutput::Notify(Event::Refused { from: None, what }));
    }
}

const UNSTABLE: &str = "the simulation is unstable; try a smaller step, a larger viscosity or a smaller velocity";
