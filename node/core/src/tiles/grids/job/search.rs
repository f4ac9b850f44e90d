//! At which step a field stopped being finite: steps are made once more, each of them looked at.
//!
//! Looking costs a pass over the memory, so it is done every so many steps. What is found then began somewhere between; since
//! steps are deterministic, it comes again when they are made again from the last checkpoint.
use super::super::super::order::Schedule;
use super::super::{GridEvent, GridOutput};
use super::{GridJob, Ids, Phase};
use crate::id::NodeId;
use crate::limits::SEARCH_MOST;
use crate::time::Instant;
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

impl GridJob {
    /// What tiles are to make when: while a step is searched for, each of those in question is looked at.
    pub(super) fn schedule(&self) -> Schedule {
        Schedule { looks: self.search.map(|search| (search.after, search.until)), ..self.spec.schedule.clone() }
    }

    /// A cell is infinite or no number: the job ends, once it is known since when.
    pub(super) fn handle_not_finite(
        &mut self,
        now: Instant,
        from: NodeId,
        (tile, step): (u16, u32),
        (cell, field): ([u64; 3], u16),
        ids: &mut Ids,
        out: &mut VecDeque<GridOutput>,
    ) {
        let [x, y, z] = cell;
        let what = format!("field {field} of the cell {x}, {y}, {z} (tile {tile}, on {from}) is infinite or no number");
        let exact = |search: Search| search.after < step && step <= search.until;
        let after = self.spec.schedule.look_before(step).max(self.begun_at.1);
        if self.search.is_some_and(exact) || step <= after.saturating_add(1) {
            let began = if step == self.begun_at.1 { "where this run begins" } else { "not before" };
            self.outcome = Some(Err(format!("after step {step}, {began}, {what}: {UNSTABLE}")));
            return;
        }
        if self.search.is_some() && self.phase != Phase::Running {
            // Another tile's word, or the same again: it is being searched for.
            return;
        }
        let back = self.checkpoint.unwrap_or(0);
        let again = u128::from(step.saturating_sub(back));
        let made = u128::from(step.saturating_sub(self.begun_at.1).max(1));
        let takes = now.since(self.begun_at.0).as_nanos() * again / made;
        if back > after || self.search.is_some() || takes > SEARCH_MOST.as_nanos() {
            self.outcome = Some(Err(format!(
                "after step {step} {what} (it began after step {after}, and making {again} steps again to see when would take too \
                 long: with check_every = 1 the job says it at once): {UNSTABLE}"
            )));
            return;
        }
        self.search = Some(Search { after, until: step });
        self.tell(GridEvent::Waiting { reason: format!("after step {step} {what}: {}", self.searching(back)) }, out);
        self.go_back(&BTreeSet::new(), ids, out);
    }

    fn searching(&self, back: u32) -> String {
        format!("steps are made once more from step {back}, to see after which one it began")
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
    }
}

const UNSTABLE: &str = "the simulation is unstable; try a smaller step, a larger viscosity or a smaller velocity";
