//! The jobs that this node coordinates: models that it serves, grids that it steps.
//!
//! A job is a set of parts joined by channels. Its coordinator is the node whose API accepted the job, or a successor
//! of that node. The coordinator issues the job's epochs, places its parts, and keeps what a recovery needs: a token
//! log or a checkpoint. It may or may not hold a part itself.
//! Next: `job/lifecycle.rs`, then `job/workload.rs`.
mod domains;
mod drafting;
mod gateway;
mod lifecycle;
mod output;
mod part;
mod rebalance;
mod refusals;
mod replicas;
mod serve;
mod standbys;
mod steps;
mod succession;
mod timeout;
mod view;
mod workload;

use crate::id::{CallId, Epoch, Generation, JobId, NodeId, PartId};
use crate::limits::{EPOCHS_FORGOTTEN_MAX, EXCLUDED, JOBS_MAX};
use crate::message::ToCoordinator;
use crate::output::Event;
use crate::place::{Place, PlaceSet};
use crate::planted::{self, Planted};
use crate::time::Instant;
use crate::work::serve::{DoneReason, FromCaller, ModelSpec, Request, ToCaller};
use crate::work::steps::{GridSpec, SaveKind};
use crate::work::{Ending, JobSpec, PlanSpec, PredictedChange, QuestionOrigin, Takeover};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{format, string::String, vec::Vec};
pub use domains::{Domains, SharedDomain};
use gateway::Gateway;
use lifecycle::{Job, Role};
use output::Out;
pub use output::{Drafting, JobOutput, JobQuestion, Measured, PlannerQuestion, ResidentBytes, Steering};
use partitioner::tiles::{GridPlan, RuleRates};
use partitioner::{Answer, ModelAnswer, Plan};
pub use rebalance::Moved;
use replicas::{Replicas, Routed};
use serve::{Caller, Serve};
use steps::Steps;
pub use view::{JobState, JobView, PartView, ProgramView, StandbyView, WhatView};
use workload::Workload;

/// All jobs that this node coordinates.
#[derive(Debug)]
pub struct Jobs {
    me: NodeId,
    generation: Generation,
    jobs: BTreeMap<JobId, Job>,
    /// The job of each running call. An ended call is removed when its `Done` is reported.
    calls: BTreeMap<CallId, JobId>,
    /// Calls that wait for a plan.
    plans: BTreeMap<CallId, PlanCall>,
    jobs_made: u64,
    leaving: bool,
    gateway: Gateway,
    replicas: Replicas,
    /// The highest epoch counters of jobs that this node gave to another coordinator: it may take one over again from a
    /// coordinator with a lower one. At most [`JOBS_MAX`].
    given_away: BTreeMap<JobId, u32>,
    out: Out,
}

/// A call that only asks for a plan.
#[derive(Debug)]
struct PlanCall {
    what: Box<PlanSpec>,
    standbys: bool,
    /// The grid's partition, while the planner chooses its standbys.
    cut: Option<Box<GridPlan>>,
}

/// A participant could not do what the coordinator ordered. Failover decides what follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParticipantFailure {
    /// It cannot hold its part.
    Unprepared {
        /// Its device that should hold it.
        device: u8,
        /// Reason.
        reason: String,
    },
    /// A part failed, or (not `held`) the node does not hold it.
    Failed {
        /// The device, or the node if more than a device failed.
        place: Place,
        /// Whether the node holds the part.
        held: bool,
        /// Reason.
        reason: String,
    },
}

impl Jobs {
    /// A coordinator without jobs.
    pub fn new(me: NodeId, generation: Generation) -> Self {
        Jobs {
            me,
            generation,
            jobs: BTreeMap::new(),
            calls: BTreeMap::new(),
            plans: BTreeMap::new(),
            jobs_made: 0,
            leaving: false,
            gateway: Gateway::default(),
            replicas: Replicas::default(),
            given_away: BTreeMap::new(),
            out: VecDeque::new(),
        }
    }

    // ---- callers

    /// A caller starts a job.
    pub fn handle_start(&mut self, call: CallId, spec: JobSpec) {
        match spec {
            JobSpec::Serve(model) => self.start_serving(call, model),
            JobSpec::Steps(grid) => self.start_steps(call, grid),
        }
    }

    fn start_serving(&mut self, call: CallId, model: ModelSpec) {
        let same = |job: &&mut Job| matches!(&job.workload, Workload::Serve(serve) if *serve.model == model);
        let mut firsts = self.jobs.values_mut().filter(|job| self.replicas.first(job.id).is_none());
        if let Some(job) = firsts.find(same) {
            return job.add_caller(call, &mut self.out);
        }
        self.jobs_made += 1;
        let id = self.job_id(self.jobs_made);
        if let Some(reason) = self.full() {
            return self.out.push_back(JobOutput::Notify(Event::JobDegraded { call: Some(call), job: id, reason }));
        }
        let name = model.name.clone();
        self.insert(Job::new(id, self.me, name, Workload::Serve(Serve::new(id, model)), Some(call)));
    }

    fn start_steps(&mut self, call: CallId, spec: GridSpec) {
        let (id, name) = (spec.job, spec.name.clone());
        let refusal = if self.jobs.contains_key(&id) {
            Some(format!("job {:016x} runs here already", id.0))
        } else {
            self.full()
        };
        if let Some(reason) = refusal {
            let ending = Ending::Failed(reason);
            return self.out.push_back(JobOutput::Notify(Event::JobEnded { job: id, ending, figures: Vec::new() }));
        }
        self.insert(Job::new(id, self.me, name, Workload::Steps(Steps::new(self.me, spec)), Some(call)));
    }

    /// Why this node accepts no further job.
    fn full(&self) -> Option<String> {
        if self.leaving {
            Some("this node is leaving the mesh: use another node".into())
        } else {
            (self.jobs.len() >= JOBS_MAX).then(|| format!("{JOBS_MAX} jobs run here already: use another node"))
        }
    }

    fn insert(&mut self, mut job: Job) {
        job.plan(&mut self.out);
        self.jobs.insert(job.id, job);
    }

    /// Hash of (coordinator, its generation, a counter). No other node or generation produces the same id, so epochs
    /// need not survive a restart.
    fn job_id(&self, counter: u64) -> JobId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.me.0).update(&self.generation.0.to_le_bytes()).update(&counter.to_le_bytes());
        let mut id = [0; 8];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        JobId(u64::from_le_bytes(id))
    }

    /// A caller asks how a job would be placed.
    pub fn handle_plan(&mut self, call: CallId, what: PlanSpec, standbys: bool) {
        let ask = match &what {
            PlanSpec::Model(model) => {
                let served = self.served(model);
                let (job, resident, present) = match served {
                    Some((job, holdings, plan)) => (Some(job), holdings, Some(Box::new(plan.clone()))),
                    None => (None, ResidentBytes::new(), None),
                };
                let asked = JobQuestion::Model { work: model.work.clone(), repair: None, present, caller: true };
                PlannerQuestion { job, resident, without: PlaceSet::default(), what: asked }
            }
            PlanSpec::Grid(work, depth) => {
                let (work, depth) = (work.clone(), *depth);
                let asked = JobQuestion::Grid { work, depth, rates: RuleRates::default(), present: None };
                PlannerQuestion { job: None, resident: ResidentBytes::new(), without: PlaceSet::default(), what: asked }
            }
        };
        self.plans.insert(call, PlanCall { what: Box::new(what), standbys, cut: None });
        self.out.push_back(JobOutput::Ask { asked: QuestionOrigin::Caller(call), ask: Box::new(ask) });
    }

    /// The job that serves a model, the memory that nodes hold for it, and its placement.
    fn served(&self, model: &ModelSpec) -> Option<(JobId, ResidentBytes, &Plan)> {
        self.jobs.values().find_map(|job| {
            let Workload::Serve(serve) = &job.workload else { return None };
            serve.present(model).map(|plan| (job.id, job.holdings(), plan))
        })
    }

    /// The planner answered.
    pub fn handle_planned(&mut self, now: Instant, asked: QuestionOrigin, answer: Answer) {
        match asked {
            QuestionOrigin::Caller(call) => self.answer_caller(call, answer),
            QuestionOrigin::Job { job, question } => {
                if let Some(answer) = self.handle_replica_plan(now, job, answer)
                    && let Some(job) = self.jobs.get_mut(&job)
                {
                    job.handle_answer(now, question, answer, &mut self.out);
                }
                self.sweep(now);
            }
        }
    }

    fn answer_caller(&mut self, call: CallId, answer: Answer) {
        let Some(mut asked) = self.plans.remove(&call) else { return };
        match (answer, &*asked.what) {
            (Answer::Model(Ok(answer)), PlanSpec::Model(_)) => {
                let ModelAnswer { plan, before_ns, moved_bytes, standbys } = *answer;
                let change = before_ns.map(|before_ns| {
                    let after_ns = plan.token_ns();
                    PredictedChange { before_ns, after_ns, bytes: moved_bytes }
                });
                let result = Ok(Box::new(plan));
                self.out.push_back(JobOutput::Notify(Event::PlanReady { call, result, standbys, change }));
            }
            (Answer::Model(Err(error)), _) => {
                let (result, standbys) = (Err(error), Vec::new());
                self.out.push_back(JobOutput::Notify(Event::PlanReady { call, result, standbys, change: None }));
            }
            (Answer::Grid(Ok(plan)), PlanSpec::Grid(work, _)) if asked.standbys => {
                let owners = plan.tiles().iter().map(|tile| (tile.device, tile.block)).collect();
                let (work, depth, step_ns) = (work.clone(), plan.depth(), plan.step_ns());
                let what = JobQuestion::GridStandbys { work, owners, depth, step_ns, kept: Vec::new() };
                let ask =
                    PlannerQuestion { job: None, resident: ResidentBytes::new(), without: PlaceSet::default(), what };
                asked.cut = Some(plan);
                self.plans.insert(call, asked);
                self.out.push_back(JobOutput::Ask { asked: QuestionOrigin::Caller(call), ask: Box::new(ask) });
            }
            (Answer::Grid(result), _) => {
                self.out.push_back(JobOutput::Notify(Event::GridPlan { call, result, standbys: Vec::new() }));
            }
            (Answer::GridStandbys(standbys), _) => {
                if let Some(plan) = asked.cut {
                    self.out.push_back(JobOutput::Notify(Event::GridPlan { call, result: Ok(plan), standbys }));
                }
            }
            (Answer::Model(Ok(_)) | Answer::ModelStandbys(_), _) => {}
        }
    }

    /// A caller submits a request. If another node took the job over from this one, the request goes there.
    pub fn handle_submit(&mut self, now: Instant, call: CallId, job: JobId, request: Request) {
        let moved_to = self.gateway.moved_to(job).filter(|_| !self.jobs.contains_key(&job));
        if let Some(to) = moved_to {
            return self.handle_ask(now, call, to, job, request);
        }
        let reason = match self.route(now, Caller::Here(call), job, request, 0) {
            Routed::To(job) => {
                self.calls.insert(call, job);
                return;
            }
            Routed::Refused => return,
            Routed::Leaving => DoneReason::Failed("this node is leaving the mesh: use another node".into()),
            Routed::Unknown => DoneReason::Invalid(format!("job {:x} is not served by this node", job.0)),
        };
        self.out.push_back(JobOutput::Notify(Event::Done { call, reason }));
    }

    /// A caller submits a request to a model that another node serves.
    pub fn handle_ask(&mut self, now: Instant, call: CallId, to: NodeId, job: JobId, request: Request) {
        self.gateway.ask(now, call, (to, job), (request, 0), &mut self.out);
    }

    /// A message from a node that has a caller, to this node as the job's coordinator.
    pub fn handle_from_caller(&mut self, now: Instant, from: NodeId, job: JobId, call: CallId, say: FromCaller) {
        let caller = Caller::Away(from, call);
        let (request, position) = match say {
            FromCaller::Ask { request, from } => (request, from),
            FromCaller::Cancel => return self.cancel_in_group(now, job, caller),
        };
        let say = match self.route(now, caller, job, *request, position) {
            Routed::To(job) => {
                let successors = self.jobs.get(&job).map(Job::successors).unwrap_or_default();
                ToCaller::RunsIn { job, successors }
            }
            Routed::Refused => return,
            Routed::Leaving => {
                let reason = "the node that serves the model is leaving the mesh: retry".into();
                ToCaller::Done { reason: DoneReason::Failed(reason), end: 0 }
            }
            Routed::Unknown => match self.gateway.moved_to(job) {
                Some(to) if to != from => ToCaller::Moved(to),
                _ => ToCaller::Unknown,
            },
        };
        self.out.push_back(JobOutput::Tell { to: from, call, say });
    }

    /// The coordinator of a call's request answers.
    pub fn handle_to_caller(&mut self, now: Instant, from: NodeId, call: CallId, say: ToCaller) {
        self.gateway.handle_answer(now, from, call, say, &mut self.out);
    }

    /// A caller cancelled or disconnected. Also ends its wait for a job or a plan.
    pub fn handle_cancel(&mut self, now: Instant, call: CallId) {
        self.plans.remove(&call);
        self.jobs.values_mut().for_each(|job| job.forget_caller(call));
        self.gateway.cancel(call, &mut self.out);
        if let Some(serve) = self.calls.get(&call).and_then(|job| self.jobs.get_mut(job)).and_then(Job::serve) {
            serve.requests.cancel(now, Caller::Here(call), &mut self.out);
        }
    }

    /// A caller ends a job.
    pub fn handle_end(&mut self, id: JobId) {
        if planted::has(Planted::SimulationCancelDropped)
            && self.jobs.get(&id).is_some_and(|job| matches!(job.workload, Workload::Steps(_)))
        {
            return;
        }
        for id in core::iter::once(id).chain(self.replicas_of(id)) {
            if let Some(mut job) = self.jobs.remove(&id) {
                job.end(Ending::Cancelled, &mut self.out);
            }
        }
        self.forget_ended_replicas();
    }

    /// This node leaves and accepts no new work. A served model ends with its last request. A simulation continues at a
    /// successor if a majority of its participants remains. Otherwise it ends, and its checkpoints stay.
    pub fn handle_leave(&mut self) {
        self.leaving = true;
        // From now on a successor's claim to the job is easier to believe (`handle_claim`).
        self.jobs.values_mut().for_each(|job| job.was_absent = true);
        for (_, mut job) in self.jobs.extract_if(.., |_, job| job.workload.survives_coordinator()) {
            if job.can_be_left() {
                job.leave(&mut self.out);
            } else {
                let reason = String::from("the coordinator's node left the mesh: submit with --resume");
                job.end(Ending::Failed(reason), &mut self.out);
            }
        }
        self.end_idle_when_leaving();
    }

    fn end_idle_when_leaving(&mut self) {
        if !self.leaving {
            return;
        }
        let idle = |job: &Job| matches!(&job.workload, Workload::Serve(serve) if serve.requests.counts() == (0, 0));
        let ids: Vec<JobId> = self.jobs.iter().filter(|(_, job)| idle(job)).map(|(&id, _)| id).collect();
        ids.into_iter().for_each(|id| self.handle_end(id));
    }

    // ---- participants

    /// A participant reports. Returns a complaint if failover has to act on it.
    pub fn handle_message(
        &mut self,
        now: Instant,
        from: NodeId,
        id: JobId,
        epoch: Epoch,
        say: ToCoordinator,
    ) -> Option<ParticipantFailure> {
        let job = self.jobs.get_mut(&id)?;
        let out = &mut self.out;
        if let ToCoordinator::Prepared { part, result: Ok(ready) } = say {
            job.handle_prepared(now, from, epoch, part, ready, out);
            self.sweep(now);
            return None;
        }
        if job.epoch != epoch {
            return None;
        }
        let complaint = match say {
            ToCoordinator::Prepared { part, result: Err(reason) } => {
                let device = job.device_of(part, from);
                job.handle_unprepared(now, from, part, &reason, out)?;
                // An owner of another part is only unfit as this part's standby.
                let owns = job.owners().contains(&from) && job.role(from, part) != Some(Role::Owner);
                (!owns).then_some(ParticipantFailure::Unprepared { device, reason })
            }
            ToCoordinator::Failed { part, held, reason } => {
                let role = job.role(from, part)?;
                let owns = job.owners().contains(&from);
                let device = from.device(job.device_of(part, from));
                // A node that does not hold its part has restarted.
                let place = if held { Place::Device(device) } else { Place::Node(from) };
                if role == Role::Standby {
                    job.drop_standby(now, part, out);
                    job.unfit.insert(device, now + EXCLUDED);
                }
                // A failed executor may have damaged the node's own tile. For a stage, the next batch would show it.
                let both = held && !matches!(job.workload, Workload::Serve(_));
                (role == Role::Owner || both || !owns).then_some(ParticipantFailure::Failed { place, held, reason })
            }
            say @ (ToCoordinator::Prepared { .. }
            | ToCoordinator::Fetched { .. }
            | ToCoordinator::Challenged { .. }
            | ToCoordinator::Held { .. }
            | ToCoordinator::Silent { .. }
            | ToCoordinator::Stage(_)
            | ToCoordinator::Tile(_)) => {
                let result = job.handle_report(now, from, epoch, say, out);
                let place = Place::Node(from);
                result.err().map(|reason| ParticipantFailure::Failed { place, held: true, reason })
            }
        };
        self.sweep(now);
        complaint
    }

    /// A saved state has been fetched, or could not be.
    pub fn handle_collected(
        &mut self,
        now: Instant,
        job: JobId,
        state: (PartId, u32, SaveKind),
        result: Result<(), String>,
    ) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_collected(now, state, result, &mut self.out);
        }
        self.sweep(now);
    }

    /// The checkpoint is now the one to roll back to, or could not be made that.
    pub fn handle_kept(&mut self, now: Instant, job: JobId, step: u32, result: Result<(), String>) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_kept(now, step, result, &mut self.out);
        }
        self.sweep(now);
    }

    /// A previous coordinator of the job reports that it coordinates it, under any epoch. This node stands down.
    pub fn handle_predecessor(&mut self, now: Instant, from: NodeId, id: JobId, theirs: Epoch) {
        if from == theirs.issuer
            && let Some(job) = self.jobs.get_mut(&id).filter(|job| job.succeeded(from))
        {
            job.stand_down(from);
            self.sweep(now);
        }
    }

    /// A participant reports a higher epoch than this coordinator's: one that this node issued and forgot, or a
    /// successor's. Only nodes that were ordered to take part are believed, and only epochs that can have been issued
    /// meanwhile.
    pub fn handle_stale(&mut self, now: Instant, from: NodeId, id: JobId, theirs: Epoch) {
        let me = self.me;
        let believed = |job: &&mut Job| {
            let ahead = theirs.counter.saturating_sub(job.epoch.counter);
            // A node that has answered under the present epoch knows no higher one of this coordinator.
            let known = if theirs.issuer == me { job.awaits(from) } else { job.knows(from) };
            // A coordinator that was absent may have issued higher epochs since, which its participants did not adopt.
            // Another coordinator of the job is answered whatever its epoch.
            let higher = job.epoch < theirs || theirs.issuer != me && (job.was_absent || from == theirs.issuer);
            higher && ahead <= EPOCHS_FORGOTTEN_MAX && known
        };
        let Some(job) = self.jobs.get_mut(&id).filter(believed) else { return };
        if theirs.issuer == me {
            job.skip_epochs(theirs);
            job.replan(now, &PlaceSet::default(), &mut self.out);
        } else if job.may_succeed(theirs.issuer) {
            job.handle_claim(now, from, theirs, &mut self.out);
        }
        self.sweep(now);
    }

    /// Whether this node was away while it coordinated a job, and has yet to learn whether another coordinates it.
    pub fn doubts(&self, now: Instant, id: JobId) -> bool {
        self.jobs.get(&id).is_some_and(|job| job.doubts(now))
    }

    /// This node takes a job over. Returns false if it cannot, or coordinates the job already.
    pub fn handle_inherited(&mut self, mut inheritance: Takeover) -> bool {
        let id = inheritance.job;
        if self.leaving || self.jobs.contains_key(&id) {
            return false;
        }
        let issued = self.given_away.remove(&id).unwrap_or(0);
        inheritance.epoch.counter = inheritance.epoch.counter.max(issued);
        let Some(job) = Job::inherited(self.me, inheritance, &mut self.out) else { return false };
        self.jobs.insert(id, job);
        true
    }

    /// Failure domains of the members, seen from this node, for the next placements.
    pub fn set_domains(&mut self, domains: &Domains) {
        self.jobs.values_mut().for_each(|job| job.domains = domains.clone());
    }

    // ---- losses

    /// The job is placed again. The `lost` nodes and devices do not hold their parts any more.
    pub fn handle_replan(&mut self, now: Instant, job: JobId, lost: &PlaceSet) {
        if let Some(job) = self.jobs.get_mut(&job) {
            if planted::has(Planted::LossFailsRequests)
                && let Some(serve) = job.serve()
            {
                serve.requests.fail_all(&DoneReason::Failed("a stage was lost".into()), &mut self.out);
            }
            job.replan(now, lost, &mut self.out);
        }
        self.sweep(now);
    }

    /// This node stood still for longer than a lease: successors may have taken its jobs over.
    pub fn handle_clock_leap(&mut self) {
        self.jobs.values_mut().for_each(|job| job.was_absent = true);
    }

    /// The standbys on a node or a device are lost.
    pub fn handle_standby_lost(&mut self, now: Instant, job: JobId, place: Place) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_standby_lost(now, &PlaceSet::from_iter([place]), &mut self.out);
        }
    }

    /// An executor failed under the job's running requests.
    pub fn handle_strike(&mut self, now: Instant, job: JobId, reason: &str) {
        if let Some(serve) = self.jobs.get_mut(&job).and_then(Job::serve) {
            serve.requests.strike(now, reason, &mut self.out);
        }
    }

    /// This node's own executor is stalled. Jobs that have a part here move it to another node if they can.
    pub fn handle_stalled(&mut self, now: Instant) {
        self.jobs.values_mut().for_each(|job| job.handle_stalled(now, &mut self.out));
    }

    /// A member is down, for any reason.
    pub fn handle_down(&mut self, now: Instant, node: NodeId) {
        self.jobs.values_mut().for_each(|job| job.handle_gone(now, node, &mut self.out));
        self.jobs.values_mut().filter_map(Job::serve).for_each(|serve| serve.requests.handle_gone(now, node));
        self.gateway.handle_gone(now, node, &mut self.out);
    }

    /// A member is down for good, with all it held. A member that only fell silent may come back and still hold its
    /// parts. If the coordinator forgot them, their memory would count as taken by other jobs, and a mesh without spare
    /// memory would find no plan.
    pub fn handle_peer_left(&mut self, node: NodeId) {
        self.jobs.values_mut().for_each(|job| job.forget_resident(node));
    }

    /// A broken connection is up again.
    pub fn handle_reconnected(&mut self, now: Instant, node: NodeId) {
        self.jobs.values_mut().for_each(|job| job.handle_reconnected(now, node, &mut self.out));
    }

    /// A member is alive, for the first time or again.
    pub fn handle_peer_up(&mut self, node: NodeId) {
        self.jobs.values_mut().for_each(|job| job.handle_back(node, &mut self.out));
    }

    /// A lost participant is heard again. Returns whether the job waits for the other `lost` nodes before it asks for a
    /// plan.
    pub fn awaits_others(&mut self, now: Instant, job: JobId, lost: &PlaceSet) -> bool {
        self.jobs.get_mut(&job).is_some_and(|job| job.awaits_others(now, lost))
    }

    /// A member joined or left, or memory became free. The `draining` nodes take no new work, the `gone` devices hold no parts
    /// any more.
    pub fn handle_fleet_changed(&mut self, now: Instant, draining: &BTreeSet<NodeId>, gone: &PlaceSet) {
        self.replicas.handle_fleet_changed(now);
        self.jobs.values_mut().for_each(|job| job.handle_fleet_changed(now, (draining, gone), &mut self.out));
    }

    // ---- time

    /// Watchdogs, retries and timeouts.
    pub fn handle_wakeup(&mut self, now: Instant) {
        self.jobs.values_mut().for_each(|job| job.handle_wakeup(now, &mut self.out));
        self.gateway.handle_wakeup(now, &mut self.out);
        self.seek_replicas(now);
        self.sweep(now);
    }

    /// When the next timer is due.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let jobs = self.jobs.values().filter_map(Job::next_wakeup);
        jobs.chain(self.gateway.next_wakeup()).chain(self.replicas.next_wakeup()).min()
    }

    /// The next output.
    pub fn poll_output(&mut self, now: Instant) -> Option<JobOutput> {
        let mut output = self.out.pop_front()?;
        while let JobOutput::Drafting(drafting) = output {
            self.route_drafting(now, drafting);
            output = self.out.pop_front()?;
        }
        if let JobOutput::Notify(Event::Done { call, .. }) = &output {
            self.calls.remove(call);
            self.end_idle_when_leaving();
        }
        Some(output)
    }

    /// Removes ended jobs. Callers of a job that another node coordinates now are served from there.
    fn sweep(&mut self, now: Instant) {
        self.tend_replicas(now);
        for (id, mut job) in self.jobs.extract_if(.., |_, job| job.ending.is_some()) {
            if job.successor.is_some() {
                self.given_away.insert(id, job.epoch.counter);
                if self.given_away.len() > JOBS_MAX {
                    self.given_away.pop_first();
                }
            }
            if let Some(to) = job.successor
                && job.serve().is_some()
            {
                self.gateway.note_moved(now, id, to, job.may_go_on());
                let Some(serve) = job.serve() else { continue };
                for (call, request, next) in serve.requests.hand_over(&mut self.out) {
                    self.calls.remove(&call);
                    self.gateway.ask(now, call, (to, id), (request, next), &mut self.out);
                }
            }
            if let Some(ending) = job.ending.take() {
                job.end(ending, &mut self.out);
            }
        }
        self.forget_ended_replicas();
    }

    // ---- views

    /// Bytes that devices hold for a job, as their nodes reported.
    pub fn holdings(&self, job: JobId) -> ResidentBytes {
        self.jobs.get(&job).map(Job::holdings).unwrap_or_default()
    }

    /// Asserts what holds between two inputs.
    ///
    /// # Panics
    /// An invariant is violated.
    pub fn assert_invariants(&self) {
        assert!(self.out.is_empty(), "{} outputs of jobs are not routed", self.out.len());
        for (id, job) in &self.jobs {
            assert_eq!(*id, job.id, "a job under the id of another one");
            job.assert_invariants();
        }
        let lost = self.calls.iter().find(|(_, job)| !self.jobs.contains_key(*job));
        assert!(lost.is_none(), "a running call of a job that is over: {lost:?}");
        self.gateway.assert_invariants();
        self.replicas.assert_invariants(|job| self.jobs.contains_key(&job));
    }

    /// Whether this node coordinates no job.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// The epoch of a job that this node coordinates.
    pub fn epoch_of(&self, job: JobId) -> Option<Epoch> {
        self.jobs.get(&job).map(|job| job.epoch)
    }

    /// All jobs, for status pages.
    pub fn views(&self) -> impl Iterator<Item = JobView> + '_ {
        self.jobs.values().map(|job| JobView { replica_of: self.replicas.first(job.id), ..job.view() })
    }
}

#[cfg(test)]
mod tests;
