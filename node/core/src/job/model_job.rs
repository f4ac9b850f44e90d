//! The life cycle of one model job at its head: plan → epoch → Prepare → Go → ready, and again after a loss.
use super::elsewhere::Elsewhere;
use super::refusals::Refusals;
use super::requests::{Requests, Track};
use super::standbys::{StandbyView, Standbys};
use super::trials::{Found, Trials};
use super::{Ids, JobOutput};
use crate::id::{CallId, Epoch, JobId, NodeId};
use crate::limits::{
    CONTEXT_MAX, DEGRADED_MAX, DEGRADED_RETRY, HEARTBEAT, PLACE_ATTEMPTS_MAX, PREPARE_RETRY, SEQUENCES_MAX,
};
use crate::message::Message;
use crate::output::Event;
use crate::time::Instant;
use crate::work::serve::{DoneReason, ModelSpec, Position, Prepare};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{format, string::String, vec::Vec};
use core::ops::Range;
use partitioner::{Plan, PlanError};
use reshape::Reshape;

pub use reshape::Moved;

mod reshape;
mod standing_by;

type Out = VecDeque<JobOutput>;

/// A model being served, or on the way there.
///
/// Invariants: the epoch only grows; requests are sent only while `Ready`. Epochs need not survive a restart: the job's id
/// contains the head's generation, which is on disk before the node speaks, so no later life mints for the same job.
#[derive(Debug)]
pub(super) struct ModelJob {
    id: JobId,
    model: ModelSpec,
    /// Callers of `Deploy` that have had no answer.
    callers: Vec<CallId>,
    /// The highest epoch minted.
    epoch: Epoch,
    state: State,
    pub(super) requests: Requests,
    /// Bytes that nodes hold for this job, as they said.
    resident: BTreeMap<NodeId, u64>,
    /// The plan that was ready last: the next one keeps what it can of it.
    last_ready: Option<Box<Plan>>,
    /// Nodes that were asked to hold a stage, now or earlier, and may hold it still.
    asked: BTreeSet<NodeId>,
    /// Placements tried since the job was last ready.
    attempts: u32,
    /// Since when there has been no plan; none once it is ready again.
    degraded: Option<Degraded>,
    /// Nodes came or went since the plan was asked for.
    outdated: bool,
    elsewhere: Elsewhere,
    standbys: Standbys,
    /// Nodes that take no new work.
    draining: BTreeSet<NodeId>,
    /// When to look for standbys that are missing; none while nothing is missing or nobody new could help.
    standbys_due: Option<Instant>,
    refusals: Refusals,
    reshape: Reshape,
    trials: Trials,
}

#[derive(Debug)]
enum State {
    Planning { token: u64 },
    Preparing { plan: Box<Plan>, missing: BTreeSet<NodeId>, retry_at: Instant, held: BTreeMap<NodeId, Vec<Position>> },
    Ready { plan: Box<Plan> },
    Degraded { retry_at: Instant },
}

#[derive(Debug)]
struct Degraded {
    since: Instant,
    reason: String,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waiting for the planner.
    Planning,
    /// Stages are being loaded.
    Loading,
    /// Requests run.
    Ready,
    /// There is no plan; requests wait.
    Degraded,
}

/// A job as status pages show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView {
    /// Which.
    pub job: JobId,
    /// Model name.
    pub name: String,
    /// Model content.
    pub content: crate::id::ContentId,
    /// Present epoch.
    pub epoch: Epoch,
    /// Where it stands.
    pub state: JobState,
    /// Why it is degraded, if it is.
    pub reason: Option<String>,
    /// First to last; empty while there is no plan.
    pub stages: Vec<StageView>,
    /// Who stands by for which stage.
    pub standbys: Vec<StandbyView>,
    /// Predicted nanoseconds per token; 0 while there is no plan.
    pub token_ns: u64,
    /// Its last move to a better placement.
    pub moved: Option<Moved>,
    /// Tokens of context per request.
    pub context: u32,
    /// Requests that can run at once.
    pub sequences: u32,
    /// Requests in slots.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
}

/// A stage of a job as status pages show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageView {
    /// Where it is.
    pub node: NodeId,
    /// Layers `start..end`.
    pub layers: Range<u32>,
    /// Bytes that its node reported to hold; none until it is loaded.
    pub bytes: Option<u64>,
    /// Predicted nanoseconds per decoded token.
    pub step_ns: u64,
}

impl ModelJob {
    pub(super) fn new(id: JobId, me: NodeId, caller: CallId, model: ModelSpec) -> Self {
        let sequences = model.work.sequences.clamp(1, SEQUENCES_MAX);
        let context = model.work.context.clamp(1, CONTEXT_MAX);
        ModelJob {
            id,
            requests: Requests::new(id, sequences, context, model.eos.clone()),
            model,
            callers: Vec::from([caller]),
            epoch: Epoch { counter: 0, minter: me },
            state: State::Planning { token: 0 },
            resident: BTreeMap::new(),
            last_ready: None,
            asked: BTreeSet::new(),
            attempts: 0,
            degraded: None,
            outdated: false,
            elsewhere: Elsewhere::default(),
            standbys: Standbys::default(),
            draining: BTreeSet::new(),
            standbys_due: None,
            refusals: Refusals::default(),
            reshape: Reshape::default(),
            trials: Trials::default(),
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether this job is the very model another caller asks for.
    pub(super) fn serves(&self, model: &ModelSpec) -> bool {
        self.model == *model
    }

    /// One more caller waits for the job, or is answered at once.
    pub(super) fn add_caller(&mut self, call: CallId, out: &mut Out) {
        let (job, epoch) = (self.id, self.epoch);
        match (&self.state, &self.degraded) {
            (State::Ready { .. }, _) => {
                out.push_back(JobOutput::Notify(Event::JobReady { call: Some(call), job, epoch }));
            }
            (State::Degraded { .. }, Some(degraded)) => {
                let reason = degraded.reason.clone();
                out.push_back(JobOutput::Notify(Event::JobDegraded { call: Some(call), job, reason }));
            }
            (State::Planning { .. } | State::Preparing { .. } | State::Degraded { .. }, _) => {
                self.callers.push(call);
            }
        }
    }

    pub(super) fn forget_caller(&mut self, call: CallId) {
        self.callers.retain(|waiting| *waiting != call);
    }

    /// Whether a node may hold a stage of this job.
    pub(super) fn has_asked(&self, node: NodeId) -> bool {
        self.asked.contains(&node)
    }

    pub(super) fn forget_resident(&mut self, node: NodeId) {
        self.resident.remove(&node);
    }

    /// A node cannot hold the stage that it was asked for.
    pub(super) fn handle_refusal(&mut self, node: NodeId, reason: &str) {
        self.resident.remove(&node);
        self.refusals.note(node, reason);
    }

    pub(super) fn is_degraded(&self) -> bool {
        matches!(self.state, State::Degraded { .. })
    }

    /// A peer knows a higher epoch than was minted here: never mint at or below it.
    pub(super) fn skip_epochs(&mut self, theirs: Epoch) {
        self.epoch.counter = self.epoch.counter.max(theirs.counter);
    }

    /// Stops what runs and asks for a plan; where every lost stage has a standby in memory, that is the plan.
    pub(super) fn replan(&mut self, now: Instant, lost: &BTreeSet<NodeId>, ids: &mut Ids, out: &mut Out) {
        self.requests.stop();
        self.forget_move(now, out);
        if let Some(plan) = self.promote(lost, out) {
            return self.place(now, plan, out);
        }
        if !self.is_degraded() {
            self.attempts += 1;
            if self.attempts > PLACE_ATTEMPTS_MAX {
                self.attempts = 0;
                let reason = format!("{PLACE_ATTEMPTS_MAX} placements in a row came to nothing");
                return self.degrade(now, reason, out);
            }
        }
        self.plan_anew(ids, out);
    }

    fn plan_anew(&mut self, ids: &mut Ids, out: &mut Out) {
        let token = ids.next();
        self.outdated = false;
        self.state = State::Planning { token };
        out.push_back(self.ask_plan(token, BTreeSet::new(), self.last_ready.clone()));
    }

    fn ask_plan(&self, token: u64, without: BTreeSet<NodeId>, repair: Option<Box<Plan>>) -> JobOutput {
        let (job, resident) = self.holds();
        let work = Box::new(self.model.work.clone());
        JobOutput::Plan { token, job, work, resident, without, repair }
    }

    /// Asks for a plan that does without some nodes of the present one, which goes on until there is such a plan.
    fn look_elsewhere(&mut self, now: Instant, without: BTreeSet<NodeId>, ids: &mut Ids, out: &mut Out) {
        let token = ids.next();
        self.elsewhere.ask(now, token);
        out.push_back(self.ask_plan(token, without, self.plan().cloned().map(Box::new)));
    }

    /// The head's own executor does not get on.
    pub(super) fn handle_stuck(&mut self, now: Instant, me: NodeId, ids: &mut Ids, out: &mut Out) {
        if matches!(&self.state, State::Ready { plan } if plan.stage_of(me.into()).is_some()) {
            self.look_elsewhere(now, BTreeSet::from([me]), ids, out);
        }
    }

    /// The present plan with standbys in the place of all its lost stages, if there are such.
    fn promote(&mut self, lost: &BTreeSet<NodeId>, out: &mut Out) -> Option<Box<Plan>> {
        let plan = self.plan().cloned()?;
        let dead = plan.stages().iter().enumerate().filter(|(_, stage)| lost.contains(&stage.device.into()));
        let dead: Vec<u16> = dead.filter_map(|(at, _)| u16::try_from(at).ok()).collect();
        // All of them or none: a standby that is taken is no standby any more.
        if dead.is_empty() || !dead.iter().all(|&stage| self.standbys.can_take(stage, lost)) {
            return None;
        }
        let mut next = plan;
        for stage in dead {
            let place = self.standbys.take(stage)?;
            let (job, node) = (self.id, place.device.into());
            next = next.with_stage(usize::from(stage), place).ok()?;
            let epoch = Epoch { counter: self.epoch.counter.saturating_add(1), ..self.epoch };
            out.push_back(JobOutput::Notify(Event::Promoted { job, epoch, stage, node }));
        }
        Some(Box::new(next))
    }

    pub(super) fn waits_for_plan(&self, token: u64) -> bool {
        match self.state {
            State::Planning { token: waiting } => waiting == token,
            State::Preparing { .. } | State::Ready { .. } => self.elsewhere.awaits(token),
            State::Degraded { .. } => false,
        }
    }

    pub(super) fn handle_planned(
        &mut self,
        now: Instant,
        result: Result<Box<Plan>, PlanError>,
        ids: &mut Ids,
        out: &mut Out,
    ) {
        self.elsewhere.end();
        let goes_on = !matches!(self.state, State::Planning { .. });
        match result {
            Ok(plan) if goes_on && !plan.stages().is_empty() => {
                self.requests.stop();
                self.forget_move(now, out);
                self.place(now, plan, out);
            }
            Ok(_) | Err(_) if goes_on => {}
            Err(_) if self.outdated => self.plan_anew(ids, out),
            Ok(plan) if plan.stages().is_empty() => self.degrade(now, "the planner found no stages".into(), out),
            Ok(plan) => self.place(now, plan, out),
            Err(error) => self.degrade(now, self.refusals.explain(&error), out),
        }
    }

    /// Mints the next epoch and asks every node of the plan for its stage.
    fn place(&mut self, now: Instant, plan: Box<Plan>, out: &mut Out) {
        let Some(next) = self.epoch.counter.checked_add(1) else {
            return self.degrade(now, "all epochs of this job are used up: deploy the model anew".into(), out);
        };
        self.epoch.counter = next;
        let (job, epoch) = (self.id, self.epoch);
        let nodes: BTreeSet<NodeId> = plan.stages().iter().map(|stage| stage.device.into()).collect();
        out.push_back(JobOutput::Notify(Event::JobPlaced { job, epoch, plan: plan.clone() }));
        self.asked.extend(nodes.iter().copied());
        self.standbys.refit(now, plan.stages(), self.epoch.minter);
        self.watch(&nodes, out);
        let retry_at = now + PREPARE_RETRY;
        let bytes = plan.stages().iter().map(|stage| stage.bytes).max().unwrap_or(0);
        self.elsewhere.begin(now, bytes, plan.token_ns());
        self.state = State::Preparing { plan, missing: nodes, retry_at, held: BTreeMap::new() };
        self.send_prepares(out);
    }

    /// There is no plan: requests wait for a while, callers of `Deploy` are told why.
    pub(super) fn degrade(&mut self, now: Instant, reason: String, out: &mut Out) {
        self.requests.stop();
        self.state = State::Degraded { retry_at: now + DEGRADED_RETRY };
        let (since, news) = match &self.degraded {
            Some(known) => (known.since, known.reason != reason),
            None => (now, true),
        };
        for call in self.take_callers(news) {
            let event = Event::JobDegraded { call, job: self.id, reason: reason.clone() };
            out.push_back(JobOutput::Notify(event));
        }
        self.degraded = Some(Degraded { since, reason });
    }

    /// See [`Jobs::awaits_others`](super::Jobs::awaits_others).
    pub(super) fn awaits_others(&mut self, now: Instant, lost: &BTreeSet<NodeId>) -> bool {
        let State::Degraded { retry_at } = &mut self.state else { return false };
        let stages = self.last_ready.iter().flat_map(|plan| plan.stages());
        let awaited = stages.into_iter().any(|stage| lost.contains(&stage.device.into()));
        if awaited {
            *retry_at = (*retry_at).min(now + HEARTBEAT * 2);
        }
        awaited
    }

    /// Whom to tell: every caller that waits, else (if it is news) everybody once.
    fn take_callers(&mut self, news: bool) -> Vec<Option<CallId>> {
        let callers: Vec<Option<CallId>> = core::mem::take(&mut self.callers).into_iter().map(Some).collect();
        if callers.is_empty() && news { Vec::from([None]) } else { callers }
    }

    /// Leases with everybody who takes part.
    fn watch(&self, owners: &BTreeSet<NodeId>, out: &mut Out) {
        let (job, epoch, standbys) = (self.id, self.epoch, self.standbys.nodes());
        let nodes = owners.iter().copied().collect();
        out.push_back(JobOutput::Watch { job, epoch, nodes, standbys: standbys.into_iter().collect() });
    }

    /// Asks every participant that has not answered.
    fn send_prepares(&self, out: &mut Out) {
        let State::Preparing { plan, missing, .. } = &self.state else { return };
        for (at, stage) in plan.stages().iter().enumerate() {
            let to = NodeId::from(stage.device);
            if missing.contains(&to) {
                let at = u16::try_from(at).unwrap_or(u16::MAX);
                out.push_back(self.prepare(plan, at, to, stage.bytes, false));
            }
        }
    }

    fn prepare(&self, plan: &Plan, stage: u16, to: NodeId, bytes_max: u64, standby: bool) -> JobOutput {
        let prepare = self.prepared(plan, stage, bytes_max, standby);
        JobOutput::Message { to, message: Message::Prepare { job: self.id, epoch: self.epoch, prepare } }
    }

    fn prepared(&self, plan: &Plan, stage: u16, bytes_max: u64, standby: bool) -> Prepare {
        Prepare {
            content: self.model.content,
            name: self.model.name.clone(),
            route: route_of(plan),
            stage,
            sequences: self.model.work.sequences.clamp(1, SEQUENCES_MAX),
            context: self.model.work.context.clamp(1, CONTEXT_MAX),
            width: self.model.width,
            int8: self.model.int8,
            bytes_max,
            standby,
        }
    }

    /// A participant holds its stage; when all do, the job is ready.
    pub(super) fn handle_prepared(
        &mut self,
        now: Instant,
        from: NodeId,
        epoch: Epoch,
        bytes: u64,
        positions: Vec<Position>,
        out: &mut Out,
    ) {
        if !self.asked.contains(&from) {
            return;
        }
        // Also where the placement was given up meanwhile: the node holds it still, so it is free for the next plan.
        let loaded = self.resident.insert(from, bytes).is_none();
        if epoch != self.epoch {
            return;
        }
        if matches!(self.state, State::Ready { .. }) {
            self.standby_prepared(from, &positions, out);
            if !self.draining.is_empty() {
                self.standbys_due = Some(now); // it may step in at once
            }
            return;
        }
        let State::Preparing { missing, held, .. } = &mut self.state else { return };
        if !missing.remove(&from) {
            return;
        }
        held.insert(from, positions);
        if loaded {
            self.elsewhere.learn(now, bytes);
        }
        if missing.is_empty() {
            self.become_ready(now, out);
        }
    }

    fn become_ready(&mut self, now: Instant, out: &mut Out) {
        let State::Preparing { plan, held, .. } = core::mem::replace(&mut self.state, State::Planning { token: 0 })
        else {
            return;
        };
        let (job, epoch) = (self.id, self.epoch);
        let stages: Vec<NodeId> = plan.stages().iter().map(|stage| stage.device.into()).collect();
        let send = |to: NodeId, message: Message| JobOutput::Message { to, message };
        let track = Track { epoch, stages: stages.clone(), token_ns: plan.token_ns(), shadows: Vec::new() };
        let resume = self.requests.resume(now, track, &held);
        let go = stages.iter().zip(resume).map(|(&to, resume)| send(to, Message::Go { job, epoch, resume }));
        out.extend(go);
        let standbys = self.standbys.nodes();
        for &node in self.asked.iter().filter(|node| !stages.contains(node) && !standbys.contains(node)) {
            self.resident.remove(&node);
            out.push_back(send(node, Message::End { job, epoch }));
        }
        for call in self.take_callers(true) {
            out.push_back(JobOutput::Notify(Event::JobReady { call, job, epoch }));
        }
        self.attempts = 0;
        self.degraded = None;
        self.refusals.clear();
        self.elsewhere.end();
        self.last_ready = Some(plan.clone());
        self.requests.start(now, &held, out);
        for (stage, to) in self.standbys.refit(now, plan.stages(), self.epoch.minter) {
            out.push_back(self.prepare(&plan, stage, to, self.standbys.bytes(stage), true));
        }
        self.state = State::Ready { plan };
        self.standbys_due = Some(now);
    }

    /// A node is back: if it still holds what it held before it was lost, it may drop that now.
    pub(super) fn handle_back(&mut self, node: NodeId, out: &mut Out) {
        let State::Ready { plan } = &self.state else { return };
        let takes_part = plan.stage_of(node.into()).is_some() || self.standbys.nodes().contains(&node);
        if !takes_part && self.asked.remove(&node) {
            let message = Message::End { job: self.id, epoch: self.epoch };
            out.push_back(JobOutput::Message { to: node, message });
        }
    }

    pub(super) fn handle_reconnected(&mut self, now: Instant, node: NodeId, out: &mut Out) {
        match &self.state {
            State::Preparing { missing, .. } if missing.contains(&node) => self.send_prepares(out),
            State::Ready { plan } => {
                let owners = owners(plan);
                if owners.contains(&node) {
                    let message = Message::Go { job: self.id, epoch: self.epoch, resume: Vec::new() };
                    out.push_back(JobOutput::Message { to: node, message });
                }
                self.requests.handle_reconnected(now, node, out);
                // What it was told of standbys may be lost, too.
                let fed: Vec<(u16, NodeId)> = self.standbys.fed().collect();
                fed.into_iter().for_each(|(stage, standby)| self.announce(stage, Some(standby), out));
            }
            State::Planning { .. } | State::Preparing { .. } | State::Degraded { .. } => {}
        }
    }

    pub(super) fn handle_wakeup(&mut self, now: Instant, ids: &mut Ids, out: &mut Out) {
        match &mut self.state {
            State::Preparing { missing, .. } if self.elsewhere.due() <= now => {
                let missing = missing.clone();
                self.look_elsewhere(now, missing, ids, out);
            }
            State::Preparing { retry_at, .. } if *retry_at <= now => {
                *retry_at = now + PREPARE_RETRY;
                self.send_prepares(out);
            }
            State::Ready { .. } => {
                if let Some(reason) = self.requests.handle_wakeup(now, out) {
                    self.requests.strike(now, &reason, out);
                    return self.replan(now, &BTreeSet::new(), ids, out);
                }
                if self.standbys_due.is_some_and(|due| due <= now) {
                    self.standbys.tell(self.id, &self.requests.acked(), out);
                    self.seek_standbys(now, out);
                    self.hand_over(now, ids, out);
                }
                if let State::Ready { plan } = &self.state {
                    let plan = plan.clone();
                    for (stage, to) in self.standbys.due(now) {
                        out.push_back(self.prepare(&plan, stage, to, self.standbys.bytes(stage), true));
                    }
                    self.challenge(now, &plan, out);
                    self.reshape_wakeup(now, ids, out);
                }
            }
            State::Degraded { retry_at } if *retry_at <= now => {
                self.give_up_waiting(now, out);
                self.replan(now, &BTreeSet::new(), ids, out);
            }
            State::Planning { .. } | State::Preparing { .. } | State::Degraded { .. } => {}
        }
    }

    /// Asks the next node that is due, this one included, to show how fast it is.
    fn challenge(&mut self, now: Instant, plan: &Plan, out: &mut Out) {
        let owners = plan.stages().iter().map(|stage| (NodeId::from(stage.device), stage.layers.clone()));
        let holders = Vec::from_iter(owners.chain(self.standbys.following()));
        if let Some((to, nonce)) = self.trials.next(now, self.id, &holders, self.requests.quiet()) {
            let message = Message::Challenge { job: self.id, epoch: self.epoch, nonce };
            out.push_back(JobOutput::Message { to, message });
        }
    }

    /// A node answered a challenge.
    pub(super) fn handle_challenged(
        &mut self,
        now: Instant,
        node: NodeId,
        nonce: u64,
        result: Result<u64, String>,
        out: &mut Out,
    ) {
        let quiet = self.requests.quiet();
        let Some(found) = self.trials.handle_answer(now, node, nonce, result.is_ok(), quiet) else { return };
        let (job, work, digest) = (self.id, Box::new(self.model.work.clone()), result.unwrap_or_default());
        let Found { layers, took, quiet, nonce } = found;
        out.push_back(JobOutput::Measured { job, node, work, layers, took, quiet, digest: (nonce, digest) });
    }

    /// Fails the requests that have waited for a plan for too long.
    fn give_up_waiting(&mut self, now: Instant, out: &mut Out) {
        let Some(degraded) = self.degraded.as_ref().filter(|degraded| now.since(degraded.since) >= DEGRADED_MAX) else {
            return;
        };
        self.requests.fail_all(&DoneReason::Failed(degraded.reason.clone()), out);
        self.dismiss_all(out);
    }

    /// Nobody needs to hold anything for this job any more.
    fn dismiss_all(&mut self, out: &mut Out) {
        let (job, epoch) = (self.id, self.epoch);
        let asked = core::mem::take(&mut self.asked);
        out.extend(asked.into_iter().map(|to| JobOutput::Message { to, message: Message::End { job, epoch } }));
        self.resident.clear();
        self.last_ready = None;
        self.standbys = Standbys::default();
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        match &self.state {
            State::Preparing { retry_at, .. } => {
                Some(((*retry_at).min(self.elsewhere.due()), "job: a stage has not answered Prepare"))
            }
            State::Ready { .. } => {
                let requests = self.requests.next_wakeup().map(|at| (at, "job: a request makes no progress"));
                let standbys = [self.standbys_due, self.standbys.next_wakeup()].into_iter().flatten().min();
                let standbys = standbys.map(|at| (at, "job: a standby is missing"));
                let reshape = self.reshape.next_wakeup().map(|at| (at, "job: is there a better placement"));
                let trials = self.trials.next_wakeup().map(|at| (at, "job: how fast is a node"));
                [requests, standbys, reshape, trials].into_iter().flatten().min()
            }
            State::Degraded { retry_at } => Some((*retry_at, "job: there is no plan")),
            State::Planning { .. } => None,
        }
    }

    /// Ends the job everywhere.
    pub(super) fn end(&mut self, why: &str, out: &mut Out) {
        self.requests.fail_all(&DoneReason::Failed(why.into()), out);
        let job = self.id;
        self.dismiss_all(out);
        out.push_back(JobOutput::Unwatch { job });
        for call in core::mem::take(&mut self.callers) {
            out.push_back(JobOutput::Notify(Event::JobDegraded { call: Some(call), job, reason: why.into() }));
        }
        out.push_back(JobOutput::Notify(Event::JobEnded { job }));
    }

    /// Where it runs, if it is the model that is asked about.
    pub(super) fn present(&self, model: &ModelSpec) -> Option<&Plan> {
        self.plan()
            .filter(|plan| self.model.content == model.content && plan.layers() as usize == model.work.layers.len())
    }

    /// The bytes that nodes hold for it.
    pub(super) fn holds(&self) -> (JobId, Vec<(NodeId, u64)>) {
        (self.id, self.resident.iter().map(|(&node, &bytes)| (node, bytes)).collect())
    }

    fn plan(&self) -> Option<&Plan> {
        match &self.state {
            State::Preparing { plan, .. } | State::Ready { plan } => Some(plan),
            State::Planning { .. } | State::Degraded { .. } => None,
        }
    }

    fn stage_views(&self) -> Vec<StageView> {
        let stages = self.plan().map(Plan::stages).unwrap_or_default().iter();
        let view = |stage: &partitioner::Stage| {
            let node = NodeId::from(stage.device);
            let bytes = self.resident.get(&node).copied();
            StageView { node, layers: stage.layers.clone(), bytes, step_ns: stage.step_ns }
        };
        stages.map(view).collect()
    }

    pub(super) fn view(&self) -> JobView {
        let (running, waiting) = self.requests.counts();
        JobView {
            job: self.id,
            name: self.model.name.clone(),
            content: self.model.content,
            epoch: self.epoch,
            state: match &self.state {
                State::Planning { .. } => JobState::Planning,
                State::Preparing { .. } => JobState::Loading,
                State::Ready { .. } => JobState::Ready,
                State::Degraded { .. } => JobState::Degraded,
            },
            reason: self.degraded.as_ref().filter(|_| self.is_degraded()).map(|degraded| degraded.reason.clone()),
            stages: self.stage_views(),
            standbys: self.standbys.views(&self.requests.acked()),
            token_ns: self.plan().map_or(0, Plan::token_ns),
            moved: self.reshape.last(),
            context: self.model.work.context,
            sequences: self.model.work.sequences,
            running,
            waiting,
        }
    }
}

fn owners(plan: &Plan) -> BTreeSet<NodeId> {
    plan.stages().iter().map(|stage| stage.device.into()).collect()
}

fn route_of(plan: &Plan) -> Vec<(NodeId, Range<u32>)> {
    plan.stages().iter().map(|stage| (stage.device.into(), stage.layers.clone())).collect()
}
