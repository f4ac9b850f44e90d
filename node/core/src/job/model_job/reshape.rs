//! Whether a job that runs would run better elsewhere, or must because a node leaves: looked at when the mesh changes,
//! confirmed, the weights fetched beside what runs, and only then placed anew.
use super::{ModelJob, Out, State, route_of};
use crate::id::{Epoch, NodeId};
use crate::job::{Ids, JobOutput};
use crate::limits::{
    FETCH_MAX, PREPARE_RETRY, RESHAPE_EVERY, RESHAPE_GAIN_PERCENT, RESHAPE_LOOKS, RESHAPE_QUIET, STANDBY_RETRY,
};
use crate::message::Message;
use crate::output::Event;
use crate::time::Instant;
use crate::work::Change;
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::{format, string::String, vec::Vec};
use partitioner::{Plan, PlanError, explain};

/// What a job is up to about its placement, besides keeping it.
#[derive(Debug, Default)]
pub(super) struct Reshape {
    /// When to look next; none while nothing has changed since the last look.
    look_at: Option<Instant>,
    /// No look before this, but for a node that leaves.
    quiet_until: Option<Instant>,
    /// Looks in a row that found something better.
    confirmed: u32,
    question: Option<Question>,
    moving: Option<Moving>,
    last: Option<Moved>,
}

/// The planner was asked.
#[derive(Debug)]
struct Question {
    token: u64,
    /// What the present placement is predicted to take on the fleet that the planner was given.
    present_ns: Option<u64>,
    /// Asked because a node leaves.
    leaving: bool,
}

/// Weights are on their way.
#[derive(Debug)]
struct Moving {
    plan: Box<Plan>,
    change: Change,
    /// Whose weights are not there yet.
    missing: BTreeSet<NodeId>,
    came: u64,
    retry_at: Instant,
    until: Instant,
}

/// The last move of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// As it was planned.
    pub change: Change,
    /// Weight bytes that nodes fetched from peers for it: what they had on disk already did not have to come.
    pub fetched_bytes: u64,
}

impl Reshape {
    pub(super) fn last(&self) -> Option<Moved> {
        self.last
    }

    /// Something about the mesh is different.
    pub(super) fn notice(&mut self, now: Instant) {
        let earliest = self.quiet_until.map_or(now, |until| until.max(now));
        self.look_at.get_or_insert(earliest + RESHAPE_EVERY);
    }

    /// A node that owns a stage takes no new work, and nobody stands by for it.
    fn hurry(&mut self, now: Instant) {
        let at = now + STANDBY_RETRY / 4;
        self.look_at = Some(self.look_at.map_or(at, |look| look.min(at)));
    }

    fn rest(&mut self, now: Instant) {
        self.quiet_until = Some(now + RESHAPE_QUIET);
        self.confirmed = 0;
    }

    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        match (&self.moving, &self.question) {
            (Some(moving), _) => Some(moving.retry_at),
            (None, Some(_)) => None, // the planner's answer wakes this node
            (None, None) => self.look_at,
        }
    }
}

impl ModelJob {
    /// Owners that take no new work and for whom nobody stands by. The head itself stays as long as its requests do.
    fn leaving_uncovered(&self) -> bool {
        let State::Ready { plan } = &self.state else { return false };
        let covered = self.standbys.kept();
        let uncovered = |(at, node): (u16, NodeId)| {
            let stands_by = covered.iter().any(|&(stage, _)| stage == at);
            node != self.epoch.minter && self.draining.contains(&node) && !stands_by
        };
        (0..).zip(plan.stages().iter().map(|stage| NodeId::from(stage.device))).any(uncovered)
    }

    /// The mesh has changed while the job runs.
    pub(super) fn notice_change(&mut self, now: Instant) {
        self.reshape.notice(now);
        if self.leaving_uncovered() {
            self.reshape.hurry(now);
        }
    }

    /// The job was placed anew because something was lost.
    pub(super) fn forget_move(&mut self, now: Instant, out: &mut Out) {
        self.reshape.question = None;
        if self.last_ready.is_some() {
            self.reshape.rest(now);
        }
        if let Some(moving) = self.reshape.moving.take() {
            self.dismiss_strangers(&moving.plan, out);
        }
    }

    /// Nodes of a move that comes to nothing have no part in the job.
    fn dismiss_strangers(&mut self, planned: &Plan, out: &mut Out) {
        let present = self.plan().map(super::owners).unwrap_or_default();
        let standbys = self.standbys.nodes();
        for node in planned.stages().iter().map(|stage| NodeId::from(stage.device)) {
            if !present.contains(&node) && !standbys.contains(&node) && self.asked.remove(&node) {
                let message = Message::End { job: self.id, epoch: self.epoch };
                out.push_back(JobOutput::Message { to: node, message });
            }
        }
    }

    pub(super) fn reshape_wakeup(&mut self, now: Instant, ids: &mut Ids, out: &mut Out) {
        if self.reshape.moving.is_some() {
            return self.move_wakeup(now, out);
        }
        let due = self.reshape.look_at.is_some_and(|at| at <= now) && self.reshape.question.is_none();
        let State::Ready { plan } = &self.state else { return };
        if !due {
            return;
        }
        self.reshape.look_at = None;
        let leaving = self.leaving_uncovered();
        let token = ids.next();
        let (present, work) = (plan.clone(), Box::new(self.model.work.clone()));
        let (job, resident) = self.holds();
        self.reshape.question = Some(Question { token, present_ns: None, leaving });
        out.push_back(JobOutput::Look { token, job, work, resident, present, repair: leaving });
    }

    /// Whether this job asked the planner for something better.
    pub(in crate::job) fn looks(&self, token: u64) -> bool {
        self.reshape.question.as_ref().is_some_and(|question| question.token == token)
    }

    /// What the present placement takes per token, predicted as the planner will predict the other.
    pub(in crate::job) fn handle_present(&mut self, present_ns: Option<u64>) {
        if let Some(question) = &mut self.reshape.question {
            question.present_ns = present_ns;
        }
    }

    /// The planner says what it would do now.
    pub(in crate::job) fn handle_looked(&mut self, now: Instant, result: Result<Box<Plan>, PlanError>, out: &mut Out) {
        let Some(question) = self.reshape.question.take() else { return };
        let State::Ready { plan: present } = &self.state else { return };
        // Where there is no plan at all, what runs is better than nothing.
        let (Ok(next), Some(before_ns)) = (result, question.present_ns) else {
            self.reshape.confirmed = 0;
            return;
        };
        let gains = next.token_ns().saturating_mul(100) <= before_ns.saturating_mul(100 - RESHAPE_GAIN_PERCENT);
        if next.placement() == present.placement() || !(gains || question.leaving) {
            self.reshape.confirmed = 0;
            return;
        }
        self.reshape.confirmed += 1;
        if self.reshape.confirmed < RESHAPE_LOOKS && !question.leaving {
            self.reshape.look_at = Some(now + RESHAPE_EVERY);
            return;
        }
        let bytes = partitioner::moved_bytes(present, &next, &self.model.work);
        let change = Change { before_ns, after_ns: next.token_ns(), bytes };
        let changes =
            |stage: &&partitioner::Stage| present.stage_of(stage.device).is_none_or(|held| held.layers != stage.layers);
        let missing: BTreeSet<NodeId> = next.stages().iter().filter(changes).map(|stage| stage.device.into()).collect();
        self.asked.extend(missing.iter().copied());
        out.push_back(JobOutput::Notify(Event::Reshaping { job: self.id, change }));
        let (retry_at, until) = (now, now + FETCH_MAX);
        self.reshape.moving = Some(Moving { plan: next, change, missing, came: 0, retry_at, until });
        self.move_wakeup(now, out);
    }

    /// Asks, again where it was not answered, for the weights.
    fn move_wakeup(&mut self, now: Instant, out: &mut Out) {
        let Some(moving) = &mut self.reshape.moving else { return };
        if moving.until <= now {
            let waiting: Vec<String> = moving.missing.iter().map(|node| format!("{node}")).collect();
            let reason = format!("the weights did not come to {} in {} s", waiting.join(", "), FETCH_MAX.as_secs());
            return self.abandon_move(now, None, &reason, out);
        }
        if moving.retry_at > now {
            return;
        }
        moving.retry_at = now + PREPARE_RETRY;
        let (plan, missing) = (moving.plan.clone(), moving.missing.clone());
        for (stage, place) in (0..).zip(plan.stages()).filter(|(_, place)| missing.contains(&place.device.into())) {
            let prepare = self.prepared(&plan, stage, place.bytes, false);
            let message = Message::Fetch { job: self.id, epoch: self.epoch, prepare };
            out.push_back(JobOutput::Message { to: place.device.into(), message });
        }
    }

    fn abandon_move(&mut self, now: Instant, from: Option<NodeId>, reason: &str, out: &mut Out) {
        if let Some(moving) = self.reshape.moving.take() {
            let route = route_of(&moving.plan);
            let route: Vec<String> =
                route.iter().map(|(node, layers)| format!("{node} {}", explain::layers(layers))).collect();
            let what =
                format!("job {:x} stays where it is, and does not move to {}: {reason}", self.id.0, route.join(", "));
            out.push_back(JobOutput::Notify(Event::Refused { from, what }));
            self.reshape.rest(now);
            self.reshape.notice(now);
            self.dismiss_strangers(&moving.plan, out);
        }
    }

    /// A node has the weights of the stage it is to hold, or cannot get them. When all have them, the job moves.
    pub(in crate::job) fn handle_fetched(
        &mut self,
        now: Instant,
        from: NodeId,
        epoch: Epoch,
        result: Result<u64, String>,
        out: &mut Out,
    ) {
        let Some(moving) = self.reshape.moving.as_mut().filter(|_| epoch == self.epoch) else { return };
        if !moving.missing.contains(&from) {
            return;
        }
        match result {
            Err(reason) => self.abandon_move(now, Some(from), &reason, out),
            Ok(bytes) => {
                moving.missing.remove(&from);
                moving.came = moving.came.saturating_add(bytes);
                if moving.missing.is_empty()
                    && let Some(Moving { plan, change, came, .. }) = self.reshape.moving.take()
                {
                    self.reshape.last = Some(Moved { change, fetched_bytes: came });
                    self.reshape.rest(now);
                    self.requests.stop();
                    self.place(now, plan, out);
                }
            }
        }
    }

    /// A member is gone: a move that counts on it comes to nothing.
    pub(in crate::job) fn handle_gone(&mut self, now: Instant, node: NodeId, out: &mut Out) {
        if self.reshape.moving.as_ref().is_some_and(|moving| moving.plan.stage_of(node.into()).is_some()) {
            self.abandon_move(now, Some(node), "it is gone", out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_due_while_the_planner_is_asked() {
        let mut reshape = Reshape::default();
        reshape.notice(Instant(0));
        assert_eq!(reshape.next_wakeup(), Some(Instant(0) + RESHAPE_EVERY));
        reshape.look_at = None;
        reshape.question = Some(Question { token: 1, present_ns: None, leaving: false });
        reshape.hurry(Instant(0));
        assert_eq!(reshape.next_wakeup(), None, "a look that cannot begin yet must not wake the node again and again");
        reshape.question = None;
        assert_eq!(reshape.next_wakeup(), Some(Instant(0) + STANDBY_RETRY / 4));
    }
}
