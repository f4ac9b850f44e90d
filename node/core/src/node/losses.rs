//! Losses, in the router: reports of silent nodes, and failover decisions for the jobs.
use super::Node;
use crate::failover::FailoverOutput;
use crate::id::{JobId, NodeId};
use crate::message::{Message, ToCoordinator};
use crate::output::Event;
use crate::time::Duration;

impl Node {
    /// Reports to the coordinator that a neighbour (or the coordinator itself) is silent; with zero silence, that it is
    /// heard again.
    pub(super) fn report(&mut self, job: JobId, node: NodeId, silent: Duration) {
        let coordinator = self.parts.coordinator_of(job).filter(|&(coordinator, _)| coordinator != self.me);
        if let Some((coordinator, epoch)) = coordinator {
            let silent_ms = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
            let say = ToCoordinator::Silent { node, silent_ms };
            self.send(coordinator, Message::ToCoordinator { job, epoch, say });
        }
    }

    pub(super) fn route_failover(&mut self, output: FailoverOutput) {
        match output {
            FailoverOutput::Lost { job, node, silent_ms } => self.notify(Event::Lost { job, node, silent_ms }),
            FailoverOutput::Replan { job } => {
                let lost = self.failover.lost(self.now, job);
                self.jobs.handle_replan(self.now, job, &lost);
            }
            FailoverOutput::StandbyLost { job, place } => {
                self.jobs.handle_standby_lost(self.now, job, place);
            }
            FailoverOutput::Strike { job, reason } => self.jobs.handle_strike(self.now, job, &reason),
            FailoverOutput::Rejected { from, what } => self.refused(Some(from), what),
        }
    }
}
