//! The router's part for losses: who is told that somebody is silent, and what becomes of the jobs.
use super::Node;
use crate::failover::FailoverOutput;
use crate::id::{JobId, NodeId};
use crate::message::Message;
use crate::output::Event;
use crate::time::Duration;

impl Node {
    /// Tells the head that a neighbour (or the head itself) is silent, or (with no silence) heard again.
    pub(super) fn report(&mut self, job: JobId, node: NodeId, silent: Duration) {
        let head = self.head_of(job).filter(|&(head, _)| head != self.me);
        if let Some((head, epoch)) = head {
            let silent_ms = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
            self.send(head, Message::Silent { job, epoch, node, silent_ms });
        }
    }

    pub(super) fn route_failover(&mut self, output: FailoverOutput) {
        match output {
            FailoverOutput::Lost { job, node, silent_ms } => self.notify(Event::Lost { job, node, silent_ms }),
            FailoverOutput::Replan { job } => {
                let lost = self.failover.lost(self.now, job).collect();
                self.jobs.handle_replan(self.now, job, &lost);
                self.grids.handle_replan(self.now, job, &lost);
            }
            FailoverOutput::StandbyLost { job, node } => {
                self.jobs.handle_standby_lost(self.now, job, node);
                self.grids.handle_standby_lost(self.now, job, node);
            }
            FailoverOutput::Strike { job, reason } => self.jobs.handle_strike(self.now, job, &reason),
            FailoverOutput::Refused { from, what } => self.refused(Some(from), what),
        }
    }
}
