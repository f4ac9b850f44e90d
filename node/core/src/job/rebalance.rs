//! Rebalancing: moves a running job to a better placement, or away from a node that drains.
//!
//! The placement of a served model is reviewed when the mesh changes. Several reviews must confirm a gain, and nodes are
//! measured again in between: what was slow may have been busy with something else. Then the new owners fetch the weights
//! while the job runs, and only then the job is placed again. A grid is measured while it runs, and rolls back to a
//! checkpoint if the gain is worth it.
use super::lifecycle::{Job, Phase};
use super::output::{JobOutput, JobQuestion, Out};
use super::serve::Serve;
use super::workload::{NewPlan, Workload};
use crate::id::{NodeId, PartId};
use crate::limits::{FETCH_MAX, MOVE_EVERY, MOVE_QUIET, MOVE_REVIEWS, PREPARE_RETRY, STANDBY_RETRY};
use crate::message::ToParticipant;
use crate::output::Event;
use crate::place::PlaceSet;
use crate::time::Instant;
use crate::work::{Order, PredictedChange};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::{format, string::String, vec::Vec};
use partitioner::{Answer, ModelAnswer, Plan, Stage, explain, pays_to_move};

/// State of the rebalancing of one job.
#[derive(Debug, Default)]
pub(super) struct Rebalance {
    /// When the next review is due. `None` while nothing has changed since the last review.
    review_at: Option<Instant>,
    /// No review before this, except for a node that drains.
    quiet_until: Option<Instant>,
    /// Consecutive reviews that found a better placement.
    confirmed: u32,
    question: Option<Question>,
    moving: Option<Moving>,
    last: Option<Moved>,
}

/// A pending question to the planner.
#[derive(Debug)]
struct Question {
    number: u32,
    /// Asked because an owner drains.
    leaving: bool,
}

/// A move that waits for weights.
#[derive(Debug)]
struct Moving {
    plan: Box<Plan>,
    change: PredictedChange,
    /// Parts whose owners do not have the weights yet.
    missing: BTreeMap<PartId, NodeId>,
    came: u64,
    retry_at: Instant,
    until: Instant,
}

/// The last move of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The predicted effect.
    pub change: PredictedChange,
    /// Weight bytes that nodes fetched from peers for it. Weights that were on disk already are not counted.
    pub fetched_bytes: u64,
}

impl Rebalance {
    pub(super) fn last(&self) -> Option<Moved> {
        self.last
    }

    /// Whether the answer to this question is awaited.
    pub(super) fn awaits(&self, question: u32) -> bool {
        self.question.as_ref().is_some_and(|asked| asked.number == question)
    }

    /// The mesh changed.
    fn notice(&mut self, now: Instant) {
        let earliest = self.quiet_until.map_or(now, |until| until.max(now));
        self.review_at.get_or_insert(earliest + MOVE_EVERY);
    }

    /// An owner drains, and its part has no standby.
    fn hurry(&mut self, now: Instant) {
        let at = now + STANDBY_RETRY / 4;
        self.review_at = Some(self.review_at.map_or(at, |review| review.min(at)));
    }

    fn rest(&mut self, now: Instant) {
        self.quiet_until = Some(now + MOVE_QUIET);
        self.confirmed = 0;
    }

    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        match (&self.moving, &self.question) {
            (Some(moving), _) => Some(moving.retry_at),
            (None, Some(_)) => None, // the planner's answer wakes this node
            (None, None) => self.review_at,
        }
    }
}

impl Job {
    /// Whether an owner drains and its part has no standby. The coordinator's own parts stay as long as its requests
    /// do.
    fn leaving_uncovered(&self) -> bool {
        let leaves = |node: NodeId| node != self.me && self.draining.contains(&node);
        self.is_running() && self.parts.iter().any(|part| leaves(part.owner) && part.standby.is_none())
    }

    /// The mesh changed while the job runs.
    pub(super) fn notice_change(&mut self, now: Instant) {
        if let Workload::Steps(steps) = &mut self.workload {
            return steps.fleet_changed(now);
        }
        self.rebalance.notice(now);
        if self.leaving_uncovered() {
            self.rebalance.hurry(now);
        }
    }

    /// The job is placed again because of a loss. A pending move is dropped.
    pub(super) fn forget_move(&mut self, now: Instant, out: &mut Out) {
        self.rebalance.question = None;
        if self.epoch.counter > 0 {
            self.rebalance.rest(now);
        }
        if let Some(moving) = self.rebalance.moving.take() {
            self.dismiss_strangers(&moving.plan, out);
        }
    }

    /// Releases the nodes of an abandoned move that have no part in the job.
    fn dismiss_strangers(&mut self, planned: &Plan, out: &mut Out) {
        let present = self.participants();
        for node in planned.stages().iter().map(|stage| NodeId::from(stage.device)) {
            if !present.contains(&node) && self.asked.remove(&node) {
                self.send(node, ToParticipant::End, out);
            }
        }
    }

    /// Reviews the placement of a model if a review is due.
    pub(super) fn rebalance_wakeup(&mut self, now: Instant, out: &mut Out) {
        if self.rebalance.moving.is_some() {
            return self.move_wakeup(now, out);
        }
        let due = self.rebalance.review_at.is_some_and(|at| at <= now) && self.rebalance.question.is_none();
        if !due || !self.is_running() {
            return;
        }
        self.rebalance.review_at = None;
        let leaving = self.leaving_uncovered();
        let Workload::Serve(serve) = &self.workload else { return };
        let what = serve.ask_better(leaving);
        let number = self.ask(PlaceSet::default(), what, out);
        self.rebalance.question = Some(Question { number, leaving });
    }

    /// Asks for a better partition of a grid, if there is a question.
    pub(super) fn ask_better(&mut self, what: Option<JobQuestion>, out: &mut Out) {
        let (Some(what), Workload::Steps(steps)) = (what, &self.workload) else { return };
        let without = steps.distrusted();
        let number = self.ask(without, what, out);
        self.rebalance.question = Some(Question { number, leaving: false });
    }

    /// The planner answers a review.
    pub(super) fn handle_better(&mut self, now: Instant, answer: Answer, out: &mut Out) {
        let Some(question) = self.rebalance.question.take().filter(|_| self.phase == Phase::Running) else { return };
        match (answer, &mut self.workload) {
            (Answer::Model(answer), Workload::Serve(_)) => {
                self.review(now, question.leaving, answer.ok().map(|answer| *answer), out);
            }
            (Answer::Grid(Ok(plan)), Workload::Steps(steps)) => {
                if let Some(change) = steps.gains(now, &plan, &self.parts) {
                    steps.roll_back();
                    out.push_back(JobOutput::Notify(Event::JobMoves { job: self.id, change }));
                    self.adopt(now, NewPlan::Grid(plan), out);
                }
            }
            (Answer::Model(_) | Answer::Grid(_) | Answer::ModelStandbys(_) | Answer::GridStandbys(_), _) => {}
        }
    }

    /// Compares the placement of a model with the best one. If the planner finds none, the present placement stays.
    fn review(&mut self, now: Instant, leaving: bool, answer: Option<ModelAnswer>, out: &mut Out) {
        let Workload::Serve(serve) = &mut self.workload else { return };
        let change = answer.as_ref().and_then(|answer| serve.change(answer));
        let gains = |change: &PredictedChange| pays_to_move(change.before_ns, change.after_ns);
        let (Some(change), Some(answer)) = (change.filter(|change| leaving || gains(change)), answer) else {
            self.rebalance.confirmed = 0;
            return;
        };
        self.rebalance.confirmed += 1;
        if self.rebalance.confirmed < MOVE_REVIEWS && !leaving {
            if self.rebalance.confirmed == 1 {
                serve.measure_again(now);
            }
            self.rebalance.review_at = Some(now + MOVE_EVERY);
            return;
        }
        let missing: BTreeMap<PartId, NodeId> =
            serve.moved(&answer.plan).map(|(part, stage)| (part, stage.device.into())).collect();
        for &node in missing.values() {
            self.asked.insert(node);
            self.note_asked(node);
        }
        out.push_back(JobOutput::Notify(Event::JobMoves { job: self.id, change }));
        let (plan, retry_at, until) = (Box::new(answer.plan), now, now + FETCH_MAX);
        self.rebalance.moving = Some(Moving { plan, change, missing, came: 0, retry_at, until });
        self.move_wakeup(now, out);
    }

    /// Asks the new owners for the weights. Repeats what was not answered.
    fn move_wakeup(&mut self, now: Instant, out: &mut Out) {
        let Some(moving) = &mut self.rebalance.moving else { return };
        if moving.until <= now {
            let waiting: Vec<String> = moving.missing.values().map(|node| format!("{node}")).collect();
            let reason = format!("the weights did not reach {} in {} s", waiting.join(", "), FETCH_MAX.as_secs());
            return self.abandon_move(now, None, &reason, out);
        }
        if moving.retry_at > now {
            return;
        }
        moving.retry_at = now + PREPARE_RETRY;
        let (plan, missing) = (moving.plan.clone(), moving.missing.clone());
        let Workload::Serve(serve) = &self.workload else { return };
        for (part, node) in missing {
            let order = self.planned_order(serve, &plan, part);
            self.send(node, ToParticipant::Fetch(Box::new(order)), out);
        }
    }

    /// The order of a part of a placement that is not adopted yet.
    fn planned_order(&self, serve: &Serve, plan: &Plan, part: PartId) -> Order {
        let stage = plan.stages().get(part.index());
        let room = stage.map(Stage::room).unwrap_or_default();
        Order {
            name: self.name.clone(),
            part,
            owners: plan.stages().iter().map(|stage| stage.device.into()).collect(),
            device: stage.map_or(0, |stage| stage.device.index),
            standby: None,
            bytes_max: room.memory,
            ram: room.ram,
            successors: Vec::new(),
            other_parts: Vec::new(),
            previous: self.previous.clone(),
            work: serve.work_of(plan),
        }
    }

    fn abandon_move(&mut self, now: Instant, from: Option<NodeId>, reason: &str, out: &mut Out) {
        if let Some(moving) = self.rebalance.moving.take() {
            let route = moving.plan.stages().iter();
            let route: Vec<String> = route
                .map(|stage| format!("{} {}", NodeId::from(stage.device), explain::layers(&stage.layers)))
                .collect();
            let what =
                format!("job {:x} keeps its placement and does not move to {}: {reason}", self.id.0, route.join(", "));
            out.push_back(JobOutput::Notify(Event::Rejected { from, what }));
            self.rebalance.rest(now);
            self.rebalance.notice(now);
            self.dismiss_strangers(&moving.plan, out);
        }
    }

    /// A node has the weights of its future part, or cannot get them. When all nodes have theirs, the job moves.
    pub(super) fn handle_fetched(
        &mut self,
        now: Instant,
        from: NodeId,
        part: PartId,
        result: Result<u64, String>,
        out: &mut Out,
    ) {
        let Some(moving) = &mut self.rebalance.moving else { return };
        if moving.missing.get(&part) != Some(&from) {
            return;
        }
        match result {
            Err(reason) => self.abandon_move(now, Some(from), &reason, out),
            Ok(bytes) => {
                moving.missing.remove(&part);
                moving.came = moving.came.saturating_add(bytes);
                if moving.missing.is_empty()
                    && let Some(Moving { plan, change, came, .. }) = self.rebalance.moving.take()
                {
                    self.rebalance.last = Some(Moved { change, fetched_bytes: came });
                    self.rebalance.rest(now);
                    self.workload.stop(out);
                    self.adopt(now, NewPlan::Model(*plan), out);
                }
            }
        }
    }

    /// A member is down. A move that depends on it is abandoned.
    pub(super) fn handle_gone(&mut self, now: Instant, node: NodeId, out: &mut Out) {
        let uses = |plan: &Plan| plan.stages().iter().any(|stage| NodeId::from(stage.device) == node);
        if self.rebalance.moving.as_ref().is_some_and(|moving| uses(&moving.plan)) {
            self.abandon_move(now, Some(node), "it is down", out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_due_while_the_planner_is_asked() {
        let mut rebalance = Rebalance::default();
        rebalance.notice(Instant(0));
        assert_eq!(rebalance.next_wakeup(), Some(Instant(0) + MOVE_EVERY));
        rebalance.review_at = None;
        rebalance.question = Some(Question { number: 1, leaving: false });
        rebalance.hurry(Instant(0));
        assert_eq!(
            rebalance.next_wakeup(),
            None,
            "a review that cannot begin yet must not wake the node again and again"
        );
        rebalance.question = None;
        assert_eq!(rebalance.next_wakeup(), Some(Instant(0) + STANDBY_RETRY / 4));
    }
}
