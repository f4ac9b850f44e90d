//! Standbys in the life of a job: sought when it is ready, told to whoever feeds them, stepping in for nodes that leave.
use super::{ModelJob, Out, State, owners};
use crate::id::NodeId;
use crate::job::{Ids, JobOutput};
use crate::limits::STANDBY_RETRY;
use crate::message::Message;
use crate::output::Event;
use crate::planted::{self, Planted};
use crate::time::Instant;
use crate::work::serve::Position;
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

impl ModelJob {
    /// Stages of nodes that drain go to their standbys once those are current. Without such a one they stay where they are:
    /// a stage that serves is better than none.
    pub(super) fn hand_over(&mut self, now: Instant, ids: &mut Ids, out: &mut Out) {
        let State::Ready { plan } = &self.state else { return };
        let acked = self.requests.acked();
        let ready = |(at, node): &(u16, NodeId)| {
            self.draining.contains(node) && *node != self.epoch.minter && self.standbys.is_current(*at, &acked)
        };
        let stages = (0..).zip(plan.stages().iter().map(|stage| NodeId::from(stage.device)));
        let leaving: BTreeSet<NodeId> = stages.filter(ready).map(|(_, node)| node).collect();
        if !leaving.is_empty() {
            self.replan(now, &leaving, ids, out);
        }
    }

    /// Asks the planner for the standbys that are missing.
    pub(super) fn seek_standbys(&mut self, now: Instant, out: &mut Out) {
        let State::Ready { plan } = &self.state else { return };
        self.standbys_due = None;
        if planted::has(Planted::NoStandbys) {
            return;
        }
        let covered = self.standbys.kept();
        let open = plan.stages().iter().filter(|stage| NodeId::from(stage.device) != self.epoch.minter).count();
        if covered.len() < open {
            self.standbys_due = Some(now + STANDBY_RETRY);
            let (plan, work) = (plan.clone(), Box::new(self.model.work.clone()));
            out.push_back(JobOutput::Standbys { job: self.id, plan, work, kept: covered });
        }
    }

    /// The planner chose standbys.
    pub(in crate::job) fn handle_standbys(&mut self, now: Instant, chosen: Vec<partitioner::Standby>, out: &mut Out) {
        let State::Ready { plan } = &self.state else { return };
        let plan = plan.clone();
        let new = self.standbys.add(now, chosen);
        if new.is_empty() {
            return;
        }
        for (stage, node) in new {
            self.asked.insert(node);
            out.push_back(self.prepare(&plan, stage, node, self.standbys.bytes(stage), true));
            let event = Event::Standby { job: self.id, stage, node, current: false };
            out.push_back(JobOutput::Notify(event));
        }
        self.watch(&owners(&plan), out);
    }

    /// A standby has its stage in memory: whoever feeds it is told.
    pub(super) fn standby_prepared(&mut self, node: NodeId, positions: &[Position], out: &mut Out) {
        let Some(stage) = self.standbys.handle_prepared(node) else { return };
        let (job, epoch) = (self.id, self.epoch);
        self.requests.close_ended(node, positions, out);
        self.standbys.tell(job, &self.requests.acked(), out);
        let message = Message::Go { job, epoch, resume: Vec::new() };
        out.push_back(JobOutput::Message { to: node, message });
        if self.standbys.fed().any(|(_, fed)| fed == node) {
            self.announce(stage, Some(node), out);
            // It should know those beside itself, too.
            let fed: Vec<(u16, NodeId)> = self.standbys.fed().collect();
            for (other, standby) in fed.into_iter().filter(|(other, _)| other.abs_diff(stage) == 1) {
                let message = Message::Standby { job, epoch, stage: other, node: Some(standby) };
                out.push_back(JobOutput::Message { to: node, message });
            }
        }
    }

    pub(super) fn announce(&mut self, stage: u16, node: Option<NodeId>, out: &mut Out) {
        let Some(plan) = self.plan() else { return };
        let owners: Vec<NodeId> = plan.stages().iter().map(|stage| stage.device.into()).collect();
        self.standbys.announce(self.id, self.epoch, stage, node, &owners, out);
        self.requests.set_shadows(self.standbys.fed().collect());
    }

    /// A standby is lost, or cannot hold its stage.
    pub(in crate::job) fn handle_standby_lost(&mut self, now: Instant, node: NodeId, out: &mut Out) {
        if let Some(stage) = self.standbys.remove(node) {
            self.announce(stage, None, out);
            self.standbys_due = Some(now + STANDBY_RETRY);
            // If it lives it is to let go; if that is lost too, it does so when it hears no more of the job.
            let message = Message::End { job: self.id, epoch: self.epoch };
            out.push_back(JobOutput::Message { to: node, message });
            if let Some(owners) = self.plan().map(owners) {
                self.watch(&owners, out);
            }
        }
    }

    pub(in crate::job) fn handle_held(
        &mut self,
        now: Instant,
        from: NodeId,
        held: &[(crate::id::RequestId, u32)],
        ids: &mut Ids,
        out: &mut Out,
    ) {
        self.standbys.handle_held(from, held);
        if matches!(self.state, State::Ready { .. }) {
            self.standbys.tell(self.id, &self.requests.acked(), out);
            self.hand_over(now, ids, out);
        }
    }

    /// Somebody joined, or has memory free: perhaps a standby that is missing. Or somebody takes no new work any more:
    /// who stands by for it steps in while it still serves, and one that stood by itself is let go.
    pub(in crate::job) fn handle_fleet_changed(
        &mut self,
        now: Instant,
        draining: &BTreeSet<NodeId>,
        ids: &mut Ids,
        out: &mut Out,
    ) {
        let leaving: Vec<NodeId> = self.standbys.nodes().intersection(draining).copied().collect();
        for node in leaving {
            self.handle_standby_lost(now, node, out);
        }
        self.outdated = true;
        self.draining.clone_from(draining);
        self.hand_over(now, ids, out);
        if matches!(self.state, State::Ready { .. }) {
            self.standbys_due.get_or_insert(now + STANDBY_RETRY);
            self.notice_change(now);
        }
    }
}
