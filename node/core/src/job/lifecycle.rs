//! The life cycle of one job at its coordinator: plan, prepare, run, and again after a loss.
//!
//! A lost part continues at its standby if the standby has the state that it needs. Otherwise all parts are placed from
//! scratch, and lost work is recomputed from what the coordinator keeps: a token log or a checkpoint. Next:
//! `standbys.rs`, `rebalance.rs`, `succession.rs` beside this file, then `serve.rs` and `steps.rs`.
mod holdings;
mod invariants;
mod placement;

use super::domains::Domains;
use super::output::{JobOutput, Out};
use super::part::Part;
use super::rebalance::Rebalance;
use super::refusals::Refusals;
use super::serve::Serve;
use super::succession::Claims;
use super::timeout::PrepareTimeout;
use super::workload::{NewPlan, Then, Workload};
use crate::id::{CallId, Epoch, JobId, NodeId, PartId};
use crate::limits::{DEGRADED_MAX, EXCLUDED, PREPARE_RETRY, STANDBY_RETRY};
use crate::message::{ToCoordinator, ToParticipant};
use crate::output::Event;
use crate::place::PlaceSet;
use crate::time::Instant;
use crate::work::serve::DoneReason;
use crate::work::steps::SaveKind;
use crate::work::{Ending, Ready, Resume};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::{format, string::String, vec::Vec};
use holdings::Held;
use partitioner::tiles::GridError;
use partitioner::{Answer, DeviceId, PlanError};

/// A job that this node coordinates.
///
/// Invariants: the epoch only grows; `parts` is empty only before the first placement and while there is none; parts
/// run only in `Phase::Running`. Epochs need not survive a restart: the job's id is a hash of the coordinator's
/// generation, which is on disk before the node communicates, so no later generation issues epochs for the same job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: JobId,
    pub(super) me: NodeId,
    pub(super) name: String,
    pub(super) workload: Workload,
    /// Calls of `Start` that are not answered yet.
    callers: Vec<CallId>,
    /// The highest epoch issued.
    pub(super) epoch: Epoch,
    pub(super) phase: Phase,
    pub(super) parts: Vec<Part>,
    /// Where the parts resumed when they began to run.
    resumed: Vec<Resume>,
    /// Number of questions asked of the planner.
    questions: u32,
    /// The pending question about standbys.
    pub(super) standbys_asked: Option<u32>,
    /// Nodes that were ordered to hold a part, under this or an earlier placement, and may still hold it.
    pub(super) asked: BTreeSet<NodeId>,
    /// Nodes of the placements since the job last ran, including the present one. They receive heartbeats until `End`,
    /// so that they do not take the job over among themselves.
    waiting: BTreeSet<NodeId>,
    /// Every node that was ever ordered to hold a part. Its reports about epochs are believed.
    pub(super) known: BTreeSet<NodeId>,
    /// Counts the partitions adopted. A part number identifies a part only within one partition.
    cut: u32,
    /// What each node reported to hold.
    resident: BTreeMap<NodeId, Held>,
    /// Placements tried since the job last ran.
    attempts: u32,
    /// Since when there has been no plan. `None` once the job runs again.
    degraded: Option<Degraded>,
    /// The mesh changed after the plan was asked for.
    outdated: bool,
    timeout: PrepareTimeout,
    /// Nodes that take no new work.
    pub(super) draining: BTreeSet<NodeId>,
    /// Owners in the other pipelines of the same model. They own no part of this job.
    pub(super) apart: BTreeSet<NodeId>,
    /// When to look for missing standbys. `None` while none is missing or no new node could help.
    pub(super) standbys_due: Option<Instant>,
    /// Devices that could not hold a standby under the present placement, and until when they are not asked again.
    pub(super) unfit: BTreeMap<DeviceId, Instant>,
    refusals: Refusals,
    pub(super) rebalance: Rebalance,
    /// Previous coordinators of the job, most recent first.
    pub(super) previous: Vec<NodeId>,
    /// Successors under the present epoch, in order.
    pub(super) successors: Vec<NodeId>,
    /// Every node that was named a successor, under any placement. No other node can have taken the job over.
    pub(super) named: BTreeSet<NodeId>,
    /// Failure domains of the nodes.
    pub(super) domains: Domains,
    /// This node took the job over, and has not placed it since.
    pub(super) inherited: bool,
    /// How it ended, once it has.
    pub(super) ending: Option<Ending>,
    /// The new coordinator, if this node stands down.
    pub(super) successor: Option<NodeId>,
    /// Reports of participants about another coordinator.
    pub(super) claims: Claims,
    /// This node stood still, or lost half of the participants in a short time: a majority may have lost contact with
    /// it.
    pub(super) was_absent: bool,
    /// Participants lost in a short time: when it began, the number of participants then, and the lost nodes.
    lost_lately: (Instant, usize, BTreeSet<NodeId>),
    /// Since when an inherited job has had no caller.
    pub(super) unused_since: Option<Instant>,
}

/// Phase of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The planner was asked for a placement.
    Planning { question: u32 },
    /// Parts are being loaded. Unanswered orders are repeated at `retry_at`.
    Preparing { retry_at: Instant },
    /// Parts run.
    Running,
    /// There is no plan. The planner is asked again at `retry_at`.
    Degraded { retry_at: Instant },
}

#[derive(Debug)]
struct Degraded {
    since: Instant,
    reason: String,
}

/// A node's role for a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Owner,
    Standby,
}

impl Job {
    pub(super) fn new(id: JobId, me: NodeId, name: String, workload: Workload, caller: Option<CallId>) -> Self {
        Job {
            id,
            me,
            name,
            workload,
            callers: caller.into_iter().collect(),
            epoch: Epoch { counter: 0, issuer: me },
            phase: Phase::Planning { question: 0 },
            parts: Vec::new(),
            resumed: Vec::new(),
            questions: 0,
            standbys_asked: None,
            asked: BTreeSet::new(),
            waiting: BTreeSet::new(),
            known: BTreeSet::new(),
            cut: 0,
            resident: BTreeMap::new(),
            attempts: 0,
            degraded: None,
            outdated: false,
            timeout: PrepareTimeout::default(),
            draining: BTreeSet::new(),
            apart: BTreeSet::new(),
            standbys_due: None,
            unfit: BTreeMap::new(),
            refusals: Refusals::default(),
            rebalance: Rebalance::default(),
            previous: Vec::new(),
            successors: Vec::new(),
            named: BTreeSet::new(),
            domains: Domains::default(),
            inherited: false,
            ending: None,
            successor: None,
            claims: Claims::default(),
            was_absent: false,
            lost_lately: (Instant::default(), 0, BTreeSet::new()),
            unused_since: None,
        }
    }

    // ---- callers

    /// Adds a caller. It is answered immediately if the job runs or is degraded.
    pub(super) fn add_caller(&mut self, call: CallId, out: &mut Out) {
        let (job, epoch) = (self.id, self.epoch);
        match (&self.phase, &self.degraded) {
            (Phase::Running, _) => {
                out.push_back(JobOutput::Notify(Event::JobReady { call: Some(call), job, epoch }));
            }
            (Phase::Degraded { .. }, Some(degraded)) => {
                let reason = degraded.reason.clone();
                out.push_back(JobOutput::Notify(Event::JobDegraded { call: Some(call), job, reason }));
            }
            (Phase::Planning { .. } | Phase::Preparing { .. } | Phase::Degraded { .. }, _) => self.callers.push(call),
        }
    }

    pub(super) fn forget_caller(&mut self, call: CallId) {
        self.callers.retain(|waiting| *waiting != call);
    }

    /// Takes the waiting calls. If there are none and there is news, one `None`: an event for all callers.
    fn take_callers(&mut self, news: bool) -> Vec<Option<CallId>> {
        let callers: Vec<Option<CallId>> = core::mem::take(&mut self.callers).into_iter().map(Some).collect();
        if callers.is_empty() && news { Vec::from([None]) } else { callers }
    }

    // ---- participants

    /// Owners, by part.
    pub(super) fn owners(&self) -> Vec<NodeId> {
        self.parts.iter().map(|part| part.owner).collect()
    }

    /// Nodes that are standbys of parts.
    pub(super) fn standby_nodes(&self) -> BTreeSet<NodeId> {
        self.parts.iter().filter_map(|part| part.standby.as_ref()).map(|standby| standby.node).collect()
    }

    /// Owners and standbys.
    pub(super) fn participants(&self) -> BTreeSet<NodeId> {
        self.parts.iter().map(|part| part.owner).chain(self.standby_nodes()).collect()
    }

    /// A node's role for a part of the present placement.
    pub(super) fn role(&self, node: NodeId, part: PartId) -> Option<Role> {
        let known = self.parts.get(part.index())?;
        if known.owner == node {
            Some(Role::Owner)
        } else {
            known.standby.as_ref().filter(|standby| standby.node == node).map(|_| Role::Standby)
        }
    }

    /// The device of a node that the present placement has for a part. The first one if there is none.
    pub(super) fn device_of(&self, part: PartId, node: NodeId) -> u8 {
        let Some(known) = self.parts.get(part.index()) else { return 0 };
        let standby = known.standby.as_ref().filter(|standby| standby.node == node).map(|standby| standby.device);
        if known.owner == node { known.device } else { standby.unwrap_or(0) }
    }

    /// Whether a node was ever ordered to hold a part, or coordinated the job before.
    pub(super) fn knows(&self, node: NodeId) -> bool {
        self.known.contains(&node) || self.previous.contains(&node)
    }

    /// Whether a node was ordered to own a part of the present placement and has not answered.
    pub(super) fn awaits(&self, node: NodeId) -> bool {
        let preparing = matches!(self.phase, Phase::Preparing { .. });
        preparing && self.parts.iter().any(|part| part.owner == node && part.ready.is_none())
    }

    pub(super) fn is_degraded(&self) -> bool {
        matches!(self.phase, Phase::Degraded { .. })
    }

    pub(super) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    pub(super) fn degraded_reason(&self) -> Option<String> {
        self.degraded.as_ref().filter(|_| self.is_degraded()).map(|degraded| degraded.reason.clone())
    }

    // ---- preparing

    /// A participant is ready. When all owners are, the job runs.
    pub(super) fn handle_prepared(
        &mut self,
        now: Instant,
        from: NodeId,
        epoch: Epoch,
        part: PartId,
        ready: Ready,
        out: &mut Out,
    ) {
        if !self.asked.contains(&from) {
            return;
        }
        // Recorded also if the placement was given up meanwhile: the node still holds the part, so the next plan may
        // use that memory.
        let loaded = self.note_resident(from.device(ready.device), part, ready.room());
        if epoch != self.epoch {
            return;
        }
        match self.role(from, part) {
            Some(Role::Standby) => return self.standby_prepared(now, part, &ready, out),
            Some(Role::Owner) => {}
            None => return,
        }
        let preparing = matches!(self.phase, Phase::Preparing { .. });
        let Some(known) = self.parts.get_mut(part.index()).filter(|known| preparing && known.ready.is_none()) else {
            return;
        };
        self.workload.prepared(part, &ready.has);
        if loaded {
            self.timeout.learn(now, ready.room().bytes());
        }
        known.ready = Some(ready);
        if self.parts.iter().all(|part| part.ready.is_some()) {
            self.run(now, loaded, out);
        }
    }

    /// All parts are ready.
    fn run(&mut self, now: Instant, loaded: bool, out: &mut Out) {
        let Some(resume) = self.workload.resume(now, self.epoch, &self.parts) else {
            // No node keeps what a part needs to resume.
            return self.place_from_scratch(out);
        };
        self.phase = Phase::Running;
        for ((at, owner), resume) in self.owners().into_iter().enumerate().zip(&resume) {
            self.send(owner, ToParticipant::Go { part: PartId::of(at), resume: resume.clone() }, out);
        }
        self.resumed = resume;
        let participants = self.participants();
        // They stay in `asked`: a node that is cut off receives `End` again when it is back.
        for &node in self.asked.difference(&participants) {
            self.resident.remove(&node);
            self.send(node, ToParticipant::End, out);
        }
        self.waiting = participants;
        self.watch(out);
        let (job, epoch) = (self.id, self.epoch);
        for call in self.take_callers(true) {
            out.push_back(JobOutput::Notify(Event::JobReady { call, job, epoch }));
        }
        let again = loaded && self.epoch.counter > 1;
        self.attempts = 0;
        self.degraded = None;
        self.refusals.clear();
        self.timeout.end();
        self.workload.begin(now, &self.parts, out);
        self.publish_record(out);
        if let Workload::Serve(serve) = &mut self.workload {
            serve.requests.log_again(now);
        }
        self.publish_log(now, out);
        self.announce_standbys(out);
        // Adverts of free memory do not yet reflect what the nodes dropped.
        self.standbys_due = Some(if again { now + STANDBY_RETRY } else { now });
    }

    /// A participant cannot hold its part. Returns the role that it was ordered to have.
    pub(super) fn handle_unprepared(
        &mut self,
        now: Instant,
        from: NodeId,
        part: PartId,
        reason: &str,
        out: &mut Out,
    ) -> Option<Role> {
        let (role, device) = (self.role(from, part), from.device(self.device_of(part, from)));
        // An owner that cannot be a standby as well still holds its own part.
        if role == Some(Role::Standby)
            && let Some(held) = self.resident.get_mut(&from)
        {
            held.parts.remove(&part);
        } else if self.forget_device(device) {
            self.waiting.remove(&from);
        }
        let role = role?;
        match role {
            Role::Owner => self.refusals.note(from, reason),
            Role::Standby => {
                self.unfit.insert(device, now + EXCLUDED);
                self.drop_standby(now, part, out);
            }
        }
        Some(role)
    }

    /// A node is back. It may drop what it still holds from before it was lost.
    pub(super) fn handle_back(&mut self, node: NodeId, out: &mut Out) {
        if !self.is_running() || self.participants().contains(&node) {
            return;
        }
        // A previous coordinator may not know that it no longer coordinates the job.
        if self.asked.contains(&node) || self.previous.contains(&node) {
            self.send(node, ToParticipant::End, out);
        }
    }

    /// A broken connection is up again: messages that were in flight may be lost.
    pub(super) fn handle_reconnected(&mut self, now: Instant, node: NodeId, out: &mut Out) {
        match self.phase {
            Phase::Preparing { .. } => self.send_orders(out),
            Phase::Running => {
                let owned =
                    self.parts.iter().zip(&self.resumed).enumerate().filter(|(_, (part, _))| part.owner == node);
                for (at, (_, resume)) in owned {
                    let resume = resume.repeated();
                    self.send(node, ToParticipant::Go { part: PartId::of(at), resume }, out);
                }
                if let Workload::Serve(serve) = &mut self.workload {
                    serve.requests.handle_reconnected(now, node, out);
                    serve.requests.log_again(now);
                }
                self.publish_record(out);
                self.announce_standbys(out);
            }
            Phase::Planning { .. } | Phase::Degraded { .. } => {}
        }
        self.handle_back(node, out);
    }

    // ---- fallback plans

    /// Asks for a fallback plan without some nodes of the present placement. The present placement continues until
    /// there is one.
    fn ask_fallback(&mut self, now: Instant, without: PlaceSet, out: &mut Out) {
        let what = self.workload.ask(true);
        let question = self.ask(without, what, out);
        self.timeout.ask(now, question);
    }

    /// This node's own executor is stalled. Standbys take its parts over if they can. Otherwise the planner is asked
    /// for a fallback plan.
    pub(super) fn handle_stalled(&mut self, now: Instant, out: &mut Out) {
        let own = self.parts.iter().any(|part| part.owner == self.me);
        if !self.is_running() || !own {
            return;
        }
        let lost = PlaceSet::from_iter([self.me]);
        let able = |part: &Part| part.owner != self.me || part.standby.as_ref().is_some_and(|standby| standby.ready);
        if self.workload.can_promote() && self.parts.iter().all(able) {
            return self.replan(now, &lost, out);
        }
        self.ask_fallback(now, lost, out);
    }

    // ---- messages

    /// A participant reports on its part under the present epoch. `Jobs::handle_message` has handled what concerns
    /// failover.
    ///
    /// # Errors
    /// The node must not be trusted with its part.
    pub(super) fn handle_report(
        &mut self,
        now: Instant,
        from: NodeId,
        epoch: Epoch,
        say: ToCoordinator,
        out: &mut Out,
    ) -> Result<(), String> {
        let running = self.is_running();
        match say {
            ToCoordinator::Held { part, cursors } => self.handle_held(now, from, part, cursors, out),
            ToCoordinator::Fetched { part, result } => self.handle_fetched(now, from, part, result, out),
            say @ (ToCoordinator::Stage(_) | ToCoordinator::Tile(_) | ToCoordinator::Challenged { .. }) => {
                let parts = &mut self.parts;
                let then = self.workload.handle_report(now, from, (running, epoch), say, parts, out)?;
                if then == Some(Then::RollBack) {
                    self.place_from_scratch(out);
                }
                if then.is_some() {
                    self.standbys_moved(now, out);
                }
            }
            ToCoordinator::Prepared { .. } | ToCoordinator::Failed { .. } | ToCoordinator::Silent { .. } => {}
        }
        self.take_ending();
        Ok(())
    }

    /// A saved state has been fetched, or could not be.
    pub(super) fn handle_collected(
        &mut self,
        now: Instant,
        state: (PartId, u32, SaveKind),
        result: Result<(), String>,
        out: &mut Out,
    ) {
        self.workload.handle_collected((now, self.epoch), state, result, &self.parts, out);
        self.take_ending();
    }

    /// The checkpoint is now the one to roll back to, or could not be made that.
    pub(super) fn handle_kept(&mut self, now: Instant, step: u32, result: Result<(), String>, out: &mut Out) {
        let running = self.is_running();
        if self.workload.handle_kept(step, result, out) {
            let better = self.workload.ask_better_now(now, running, &self.parts);
            self.publish_record(out);
            self.ask_better(better, out);
        }
        self.take_ending();
    }

    fn take_ending(&mut self) {
        if let Some(ending) = self.workload.take_ending() {
            self.ending = Some(match ending {
                Ok(()) => Ending::Completed,
                Err(reason) => Ending::Failed(reason),
            });
        }
    }

    // ---- the mesh

    /// The mesh changed. The `draining` nodes take no new work, the `gone` devices hold no parts any more.
    pub(super) fn handle_fleet_changed(
        &mut self,
        now: Instant,
        (draining, gone): (&BTreeSet<NodeId>, &PlaceSet),
        out: &mut Out,
    ) {
        if self.is_degraded() {
            return self.replan(now, &PlaceSet::default(), out);
        }
        self.outdated = true;
        let placed = matches!(self.phase, Phase::Preparing { .. } | Phase::Running);
        if placed && self.parts.iter().any(|part| gone.has(part.place())) {
            return self.replan(now, gone, out);
        }
        self.handle_standby_lost(now, gone, out);
        self.draining.clone_from(draining);
        self.release_draining_standbys(now, out);
        self.hand_over(now, out);
        if self.is_running() {
            let soon = now + STANDBY_RETRY;
            self.standbys_due = Some(self.standbys_due.map_or(soon, |at| at.min(soon)));
            self.notice_change(now);
        }
    }

    // ---- the end

    /// Ends the job here, and at all participants unless another node coordinates it now.
    pub(super) fn end(&mut self, ending: Ending, out: &mut Out) {
        let why = match &ending {
            Ending::Completed => String::from("the job is over"),
            Ending::Cancelled => String::from("the model was stopped or restarted with other options: retry"),
            Ending::Moved(reason) | Ending::Failed(reason) => reason.clone(),
        };
        if let Workload::Serve(serve) = &mut self.workload {
            serve.give_up(&DoneReason::Failed(why.clone()), out);
        }
        if !matches!(ending, Ending::Moved(_)) {
            self.dismiss_all(out);
        } else if self.successor.is_some() {
            // Those that obey the successor ignore it. The others would elect a second one.
            let all: BTreeSet<NodeId> = self.asked.iter().copied().chain(self.participants()).collect();
            let others = all.into_iter().filter(|node| *node != self.me && Some(*node) != self.successor);
            others.for_each(|node| self.send(node, ToParticipant::End, out));
        }
        let job = self.id;
        out.push_back(JobOutput::Unwatch { job, successor: self.successor });
        for call in core::mem::take(&mut self.callers) {
            out.push_back(JobOutput::Notify(Event::JobDegraded { call: Some(call), job, reason: why.clone() }));
        }
        let figures = self.workload.figures();
        out.push_back(JobOutput::Notify(Event::JobEnded { job, ending, figures }));
    }

    /// Sends `End` to all nodes that may hold something for this job.
    fn dismiss_all(&mut self, out: &mut Out) {
        let all: BTreeSet<NodeId> = core::mem::take(&mut self.asked).into_iter().chain(self.participants()).collect();
        all.into_iter().for_each(|node| self.send(node, ToParticipant::End, out));
        self.resident.clear();
        self.parts.clear();
    }

    /// Fails the requests of a job that has had no plan for too long.
    fn give_up_waiting(&mut self, now: Instant, out: &mut Out) {
        let Some(degraded) = self.degraded.as_ref().filter(|degraded| now.since(degraded.since) >= DEGRADED_MAX) else {
            return;
        };
        if let Workload::Serve(serve) = &mut self.workload {
            serve.give_up(&DoneReason::Failed(degraded.reason.clone()), out);
            self.dismiss_all(out);
        }
    }

    /// The served model, if the job serves one.
    pub(super) fn serve(&mut self) -> Option<&mut Serve> {
        self.workload.serve()
    }

    // ---- time

    pub(super) fn handle_wakeup(&mut self, now: Instant, out: &mut Out) {
        match self.phase {
            Phase::Preparing { .. } if self.timeout.due() <= now => {
                let missing = self.parts.iter().filter(|part| part.ready.is_none()).map(Part::place).collect();
                self.ask_fallback(now, missing, out);
            }
            Phase::Preparing { retry_at } if retry_at <= now => {
                self.phase = Phase::Preparing { retry_at: now + PREPARE_RETRY };
                self.send_orders(out);
            }
            Phase::Running => self.running_wakeup(now, out),
            Phase::Degraded { retry_at } if retry_at <= now => {
                self.give_up_waiting(now, out);
                self.replan(now, &PlaceSet::default(), out);
            }
            Phase::Planning { .. } | Phase::Preparing { .. } | Phase::Degraded { .. } => {}
        }
        let better = self.workload.handle_wakeup(now, self.phase == Phase::Running, &self.parts, out);
        self.ask_better(better, out);
        self.take_ending();
    }

    fn running_wakeup(&mut self, now: Instant, out: &mut Out) {
        self.publish_log(now, out);
        self.end_unused(now);
        if let Workload::Serve(serve) = &mut self.workload
            && let Some(reason) = serve.requests.handle_wakeup(now, out)
        {
            serve.requests.strike(now, &reason, out);
            return self.replan(now, &PlaceSet::default(), out);
        }
        self.report_standbys(now, out);
        if self.standbys_due.is_some_and(|due| due <= now) {
            self.seek_standbys(now, out);
            self.hand_over(now, out);
        }
        if !self.is_running() {
            return;
        }
        self.standbys_wakeup(now, out);
        if let Workload::Serve(serve) = &mut self.workload {
            serve.refresh(now, &self.parts, out);
            serve.challenge(now, self.epoch, &self.parts, out);
            self.rebalance_wakeup(now, out);
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let phase = match &self.phase {
            Phase::Preparing { retry_at } => {
                Some(((*retry_at).min(self.timeout.due()), "job: a part has not answered Prepare"))
            }
            Phase::Degraded { retry_at } => Some((*retry_at, "job: there is no plan")),
            Phase::Running => self.next_running_wakeup(),
            Phase::Planning { .. } => None,
        };
        [phase, self.workload.next_wakeup()].into_iter().flatten().min()
    }

    fn next_running_wakeup(&self) -> Option<(Instant, &'static str)> {
        let standbys = [self.standbys_due, self.next_standby_retry()].into_iter().flatten().min();
        let standbys = standbys.map(|at| (at, "job: a standby is missing"));
        let Workload::Serve(serve) = &self.workload else { return standbys };
        let requests = serve.requests.next_wakeup().map(|at| (at, "job: a request makes no progress"));
        let moves = self.rebalance.next_wakeup().map(|at| (at, "job: a placement review is due"));
        let challenge = serve.next_challenge().map(|at| (at, "job: a challenge is due"));
        [standbys, requests, moves, challenge].into_iter().flatten().min()
    }
}

/// Why there is no plan.
enum NoPlan {
    /// There can never be one.
    Never(String),
    Model(PlanError),
    Grid(GridError),
}

fn found(answer: Answer) -> Result<NewPlan, NoPlan> {
    match answer {
        Answer::Model(Ok(answer)) if answer.plan.stages().is_empty() => {
            Err(NoPlan::Model(PlanError::Invalid("the planner found no stages".into())))
        }
        Answer::Model(Ok(answer)) => Ok(NewPlan::Model(answer.plan)),
        Answer::Model(Err(error)) => Err(NoPlan::Model(error)),
        Answer::Grid(Ok(plan)) => Ok(NewPlan::Grid(plan)),
        // A question that can never have a plan ends the job. Otherwise the job waits for the mesh to change.
        Answer::Grid(Err(error @ (GridError::Invalid(_) | GridError::Depth { .. }))) => {
            Err(NoPlan::Never(format!("{error}")))
        }
        Answer::Grid(Err(error)) => Err(NoPlan::Grid(error)),
        Answer::ModelStandbys(_) | Answer::GridStandbys(_) => {
            Err(NoPlan::Model(PlanError::Invalid("the planner answered another question".into())))
        }
    }
}
