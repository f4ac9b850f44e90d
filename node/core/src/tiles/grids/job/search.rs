//! At which step a field stopped being finite: steps are made once more, each of them looked at.
//!
//! Looking costs a pass over the memory, so it is done every so many steps. What is found then began somewhere between; since
//! steps are deterministic, it comes again when they are made again from the last checkpoint.
use super::super::GridOutput;
use super::{GridJob, Ids, Phase};
use crate::limits::SEARCH_MOST;
use crate::time::Instant;
use crate::work::steps::{GridEvent, Schedule};
use alloc::collections::{BTreeSet, VecDeque};
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

impl GridJob {
    /// What tiles are to make when: while a step is searched for, each of those in question is looked at.
    pub(super) fn schedule(&self) -> Schedule {
        Schedule { looks: self.search.map(|search| (search.after, search.until)), ..self.spec.schedule.clone() }
    }

    /// A cell is infinite or no number, as all tiles together say after `step`, and of none after the one looked at `before`
    /// it. The job ends, once it is known since when.
    pub(super) fn handle_not_finite(
        &mut self,
        now: Instant,
        (step, before): (u32, Option<u32>),
        (cell, field): ([u64; 3], u16),
        ids: &mut Ids,
        out: &mut VecDeque<GridOutput>,
    ) {
        if self.phase != Phase::Running {
            // Another cut is looked for already: it comes again.
            return;
        }
        let [x, y, z] = cell;
        let has = |at: &[u64; 3], to: &[u64; 3]| (0..3).all(|axis| at[axis] <= cell[axis] && cell[axis] < to[axis]);
        let tile = self.tiles.iter().position(|tile| has(&tile.block.from, &tile.block.to)).unwrap_or(0);
        let owner = self.tiles.get(tile).map_or(self.me, |tile| tile.owner);
        let what =
            format!("field {field} of the cell {x}, {y}, {z} (tile {tile}, on {owner}) is infinite or no number");
        let back = self.checkpoint.unwrap_or(0);
        let end = |how: String| Some(Err(format!("after step {step}{how}: {UNSTABLE}")));
        if before.is_some_and(|before| before + 1 == step) {
            self.outcome = end(format!(", not before, {what}"));
            return;
        }
        if before.is_none() && step == back {
            self.outcome = end(format!(", where this run begins, {what}"));
            return;
        }
        let after = before.unwrap_or(back);
        let again = u128::from(step.saturating_sub(back));
        let made = u128::from(step.saturating_sub(self.begun_at.1).max(1));
        let takes = now.since(self.begun_at.0).as_nanos() * again / made;
        if self.search.is_some() || back > after || takes > SEARCH_MOST.as_nanos() {
            let why = if takes > SEARCH_MOST.as_nanos() {
                format!("making {again} steps again to see when would take too long")
            } else {
                "when, could not be seen by making steps again".into()
            };
            self.outcome = end(format!(
                " {what} (it began after step {after}; {why}: with check_every = 1 the job says it at once)"
            ));
            return;
        }
        self.search = Some(Search { after, until: step });
        let reason = format!("{what}: steps are made once more from step {back}, to see after which one it began");
        self.tell(GridEvent::Waiting { reason: format!("after step {step} {reason}") }, out);
        self.go_back(&BTreeSet::new(), ids, out);
    }

    /// The search went by without finding anything: steps were not deterministic.
    pub(super) fn look_whether_found(&mut self, step: u32, out: &mut VecDeque<GridOutput>) {
        let Some(search) = self.search.take_if(|search| step >= search.until) else { return };
        let reason = format!(
            "after step {} a field was infinite or no number, and made once more it is not: a machine's memory or processor is \
             faulty; the run goes on from what was made the second time",
            search.until
        );
        self.tell(GridEvent::Waiting { reason }, out);
        // Said, and nothing to wait for.
        self.tell(GridEvent::Running { epoch: self.epoch, step }, out);
    }
}

const UNSTABLE: &str = "the simulation is unstable; try a smaller step, a larger viscosity or a smaller velocity";
