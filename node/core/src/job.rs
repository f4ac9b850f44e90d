//! The head side of jobs: from `Deploy` over plan, epoch and `Prepare` to a served model, and its requests.
//!
//! The head is the node whose API took the job. It mints the job's epochs, keeps the token log of every request, and
//! tells its callers each token once. It may or may not hold a stage itself. Next: `job/model_job.rs`, then
//! `job/requests.rs`.
mod elsewhere;
mod model_job;
mod refusals;
mod requests;
mod standbys;
mod stream;
mod trials;

use crate::id::{CallId, Epoch, Generation, Ids, JobId, NodeId, RequestId};
use crate::limits::{EPOCHS_FORGOTTEN_MAX, JOBS_MAX};
use crate::message::{FrameHeader, Message};
use crate::output::Event;
use crate::planted::{self, Planted};
use crate::time::{Duration, Instant};
use crate::work::serve::{DoneReason, ModelSpec, Position, Request};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::{format, string::String, vec::Vec};
use model_job::ModelJob;
pub use model_job::{JobState, JobView, Moved, StageView};
use partitioner::{Plan, PlanError, Work};
pub use standbys::StandbyView;

/// Top byte of this machine's `Plan` tokens.
const JOB_TAG: u64 = 2 << 56;

/// Bytes that nodes hold for a job.
pub type Holdings = Vec<(NodeId, u64)>;

/// What the jobs want done.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobOutput {
    /// Plan for a caller who only wants to know. If the model is served already: by which job, and the bytes that it holds.
    PlanOnly { token: u64, work: Box<Work>, served: Option<(JobId, Holdings)> },
    /// Tell the caller what was found, and who would stand by.
    PlanFound {
        call: CallId,
        result: Result<Box<Plan>, PlanError>,
        work: Box<Work>,
        /// Where the model is served already: by which job, the bytes that it holds, and as what plan.
        served: Option<(JobId, Holdings, Box<Plan>)>,
    },
    /// As `Plan`, for a job that runs as `present`: say what that takes on the same fleet (`handle_present`), then plan afresh,
    /// or `repair` it.
    Look { token: u64, job: JobId, work: Box<Work>, resident: Vec<(NodeId, u64)>, present: Box<Plan>, repair: bool },
    /// A node took this long for [`CHALLENGE_STEPS`](crate::limits::CHALLENGE_STEPS) steps of these layers, the way there and back
    /// included. `digest`: the nonce of the challenge, and the digest of its rows. `quiet`: no request of the job ran meanwhile.
    Measured {
        job: JobId,
        node: NodeId,
        work: Box<Work>,
        layers: core::ops::Range<u32>,
        took: Duration,
        quiet: bool,
        digest: (u64, u64),
    },
    /// Plan this job on the present fleet, but for the nodes `without`. `resident` bytes of a node are the job's own, and
    /// free for its next plan; `repair` is the plan whose stages may still be held.
    Plan {
        token: u64,
        job: JobId,
        work: Box<Work>,
        resident: Vec<(NodeId, u64)>,
        without: BTreeSet<NodeId>,
        repair: Option<Box<Plan>>,
    },
    /// A message to a participant.
    Message { to: NodeId, message: Message },
    /// Tokens into the first stage.
    Frame { to: NodeId, header: FrameHeader, tokens: Vec<u32>, copy: bool },
    /// These nodes take part in the job under this epoch: exchange heartbeats with them, take their loss as the job's.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId>, standbys: Vec<NodeId> },
    /// Choose standbys for the stages of this plan, besides those that there are.
    Standbys { job: JobId, plan: Box<Plan>, work: Box<Work>, kept: Vec<(u16, partitioner::DeviceId)> },
    /// The job is over.
    Unwatch { job: JobId },
    /// For callers and logs.
    Notify(Event),
}

/// All jobs of which this node is the head.
#[derive(Debug)]
pub struct Jobs {
    me: NodeId,
    generation: Generation,
    jobs: BTreeMap<JobId, ModelJob>,
    /// Where each running call's request is. Ended calls are removed when their `Done` is told.
    calls: BTreeMap<CallId, JobId>,
    /// Who waits for which plan.
    plan_calls: BTreeMap<u64, (CallId, Box<ModelSpec>)>,
    jobs_made: u64,
    ids: Ids,
    leaving: bool,
    out: VecDeque<JobOutput>,
}

impl Jobs {
    /// No jobs yet.
    pub fn new(me: NodeId, generation: Generation) -> Self {
        Jobs {
            me,
            generation,
            jobs: BTreeMap::new(),
            calls: BTreeMap::new(),
            plan_calls: BTreeMap::new(),
            jobs_made: 0,
            ids: Ids::new(JOB_TAG),
            leaving: false,
            out: VecDeque::new(),
        }
    }

    /// A caller wants a model served, or only a plan.
    pub fn handle_deploy(&mut self, now: Instant, call: CallId, model: ModelSpec, plan_only: bool) {
        if plan_only {
            let token = self.ids.next();
            let work = Box::new(model.work.clone());
            let served = self.jobs.values().find(|job| job.present(&model).is_some()).map(ModelJob::holds);
            self.plan_calls.insert(token, (call, Box::new(model)));
            self.out.push_back(JobOutput::PlanOnly { token, work, served });
            return;
        }
        if let Some(job) = self.jobs.values_mut().find(|job| job.serves(&model)) {
            return job.add_caller(call, &mut self.out);
        }
        self.jobs_made += 1;
        let id = self.job_id(self.jobs_made);
        if self.leaving || self.jobs.len() >= JOBS_MAX {
            let reason =
                if self.leaving { "this node is leaving".into() } else { format!("{JOBS_MAX} jobs run here already") };
            return self.out.push_back(JobOutput::Notify(Event::JobDegraded { call: Some(call), job: id, reason }));
        }
        let mut job = ModelJob::new(id, self.me, call, model);
        job.replan(now, &BTreeSet::new(), &mut self.ids, &mut self.out);
        self.jobs.insert(id, job);
    }

    /// Hash of (head, its generation, a counter): no other node or life makes the same, so epochs need not survive this life.
    fn job_id(&self, counter: u64) -> JobId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.me.0).update(&self.generation.0.to_le_bytes()).update(&counter.to_le_bytes());
        let mut id = [0; 8];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        JobId(u64::from_le_bytes(id))
    }

    /// The planner answered.
    pub fn handle_planned(&mut self, now: Instant, token: u64, result: Result<Box<Plan>, PlanError>) {
        if let Some((call, model)) = self.plan_calls.remove(&token) {
            let served = self.jobs.values().find_map(|job| {
                let (id, holdings) = job.holds();
                Some((id, holdings, Box::new(job.present(&model)?.clone())))
            });
            let work = Box::new(model.work);
            return self.out.push_back(JobOutput::PlanFound { call, result, work, served });
        }
        if let Some(job) = self.jobs.values_mut().find(|job| job.waits_for_plan(token)) {
            job.handle_planned(now, result, &mut self.ids, &mut self.out);
        } else if let Some(job) = self.jobs.values_mut().find(|job| job.looks(token)) {
            job.handle_looked(now, result, &mut self.out);
        }
    }

    /// What the present placement of the job that asked takes per token.
    pub fn handle_present(&mut self, token: u64, present_ns: Option<u64>) {
        if let Some(job) = self.jobs.values_mut().find(|job| job.looks(token)) {
            job.handle_present(present_ns);
        }
    }

    /// A node has the weights that it is to hold soon, or cannot get them.
    pub fn handle_fetched(
        &mut self,
        now: Instant,
        from: NodeId,
        job: JobId,
        epoch: Epoch,
        result: Result<u64, String>,
    ) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_fetched(now, from, epoch, result, &mut self.out);
        }
    }

    /// A node answered a challenge.
    pub fn handle_challenged(
        &mut self,
        now: Instant,
        from: NodeId,
        job: JobId,
        nonce: u64,
        result: Result<u64, String>,
    ) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_challenged(now, from, nonce, result, &mut self.out);
        }
    }

    /// A member is gone, for whatever reason.
    pub fn handle_gone(&mut self, now: Instant, node: NodeId) {
        self.jobs.values_mut().for_each(|job| job.handle_gone(now, node, &mut self.out));
    }

    /// A participant holds its stage, and in its caches so many positions.
    pub fn handle_prepared(
        &mut self,
        now: Instant,
        from: NodeId,
        job: JobId,
        epoch: Epoch,
        bytes: u64,
        held: Vec<Position>,
    ) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_prepared(now, from, epoch, bytes, held, &mut self.out);
        }
    }

    /// The planner chose standbys.
    pub fn handle_standbys(&mut self, now: Instant, job: JobId, chosen: Vec<partitioner::Standby>) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_standbys(now, chosen, &mut self.out);
        }
    }

    /// A standby is lost.
    pub fn handle_standby_lost(&mut self, now: Instant, job: JobId, node: NodeId) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_standby_lost(now, node, &mut self.out);
        }
    }

    /// Whether this head itself feeds a standby: that of the first stage.
    pub fn feeds(&self, from: NodeId, job: JobId, epoch: Epoch) -> bool {
        self.jobs.get(&job).is_some_and(|job| job.requests.feeds(from, epoch))
    }

    /// The standby of the first stage misses positions.
    pub fn handle_resume(&mut self, from: NodeId, job: JobId, request: RequestId, have: u32) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.requests.handle_resume(from, request, have, &mut self.out);
        }
    }

    /// A standby says what it holds.
    pub fn handle_held(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, held: &[(RequestId, u32)]) {
        if let Some(job) = self.jobs.get_mut(&job).filter(|job| job.epoch() == epoch) {
            job.handle_held(now, from, held, &mut self.ids, &mut self.out);
        }
    }

    /// The last stage chose a token.
    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub fn handle_token(
        &mut self,
        now: Instant,
        from: NodeId,
        job: JobId,
        epoch: Epoch,
        request: RequestId,
        position: u32,
        token: u32,
    ) {
        if let Some(job) = self.jobs.get_mut(&job).filter(|job| job.requests.is_last_stage(from, epoch)) {
            job.requests.handle_token(now, request, position, token, &mut self.out);
        }
    }

    /// Positions before `position` are in every cache.
    pub fn handle_progress(
        &mut self,
        now: Instant,
        from: NodeId,
        job: JobId,
        epoch: Epoch,
        request: RequestId,
        position: u32,
    ) {
        if let Some(job) = self.jobs.get_mut(&job).filter(|job| job.requests.is_last_stage(from, epoch)) {
            job.requests.handle_progress(now, request, position, &mut self.out);
        }
    }

    /// A stage misses positions.
    pub fn handle_gap(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, request: RequestId, have: u32) {
        if let Some(job) = self.jobs.get_mut(&job).filter(|job| job.requests.is_stage(from, epoch)) {
            job.requests.handle_gap(now, request, have, &mut self.out);
        }
    }

    /// A stage knows a higher epoch than this head: it outlived something this head forgot. Mint above it. Nobody else
    /// mints for this job, so whatever else is claimed is not true.
    pub fn handle_stale(&mut self, now: Instant, from: NodeId, job: JobId, theirs: Epoch) {
        let me = self.me;
        let forgotten = |job: &&mut ModelJob| {
            let mine = job.epoch();
            let ahead = theirs.counter.saturating_sub(mine.counter);
            theirs.minter == me && ahead > 0 && ahead <= EPOCHS_FORGOTTEN_MAX && job.has_asked(from)
        };
        if let Some(job) = self.jobs.get_mut(&job).filter(forgotten) {
            job.skip_epochs(theirs);
            job.replan(now, &BTreeSet::new(), &mut self.ids, &mut self.out);
        }
    }

    /// A connection stands again after it had broken.
    pub fn handle_reconnected(&mut self, now: Instant, node: NodeId) {
        for job in self.jobs.values_mut() {
            job.handle_reconnected(now, node, &mut self.out);
            job.handle_back(node, &mut self.out);
        }
    }

    /// A member is alive again, or for the first time.
    pub fn handle_peer_up(&mut self, node: NodeId) {
        self.jobs.values_mut().for_each(|job| job.handle_back(node, &mut self.out));
    }

    /// Something of the present placement is lost: place the job anew.
    pub fn handle_replan(&mut self, now: Instant, job: JobId, lost: &BTreeSet<NodeId>) {
        if let Some(job) = self.jobs.get_mut(&job) {
            if planted::has(Planted::LossFailsRequests) {
                job.requests.fail_all(&DoneReason::Failed("a stage was lost".into()), &mut self.out);
            }
            job.replan(now, lost, &mut self.ids, &mut self.out);
        }
    }

    /// An executor failed under the job's running requests.
    pub fn handle_strike(&mut self, now: Instant, job: JobId, reason: &str) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.requests.strike(now, reason, &mut self.out);
        }
    }

    /// This node's own executor does not get on: jobs that have a stage here go on elsewhere, where they can.
    pub fn handle_stuck(&mut self, now: Instant) {
        let me = self.me;
        for job in self.jobs.values_mut() {
            job.handle_stuck(now, me, &mut self.ids, &mut self.out);
        }
    }

    /// A node is gone for good, with all it held. One that only fell silent may come back and hold it still: were that
    /// forgotten, its memory would count as taken by others, and a mesh without spare memory would not find a plan again.
    pub fn handle_peer_left(&mut self, node: NodeId) {
        self.jobs.values_mut().for_each(|job| job.forget_resident(node));
    }

    /// A participant could not hold its stage: it holds nothing else of the job either (it may have started anew).
    pub fn handle_unprepared(&mut self, now: Instant, job: JobId, node: NodeId, reason: &str) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.handle_refusal(node, reason);
            job.handle_standby_lost(now, node, &mut self.out);
        }
    }

    /// A participant that was lost is heard again. Returns whether the job waits for the others that are `lost` before it looks
    /// for a plan. Where this node itself stood still, they are heard within the next heartbeats, and their stages need not be
    /// loaded elsewhere.
    pub fn awaits_others(&mut self, now: Instant, job: JobId, lost: &BTreeSet<NodeId>) -> bool {
        self.jobs.get_mut(&job).is_some_and(|job| job.awaits_others(now, lost))
    }

    /// A member joined, or memory became free: degraded jobs look for a plan again.
    pub fn handle_fleet_changed(&mut self, now: Instant, draining: &BTreeSet<NodeId>) {
        for job in self.jobs.values_mut() {
            if job.is_degraded() {
                job.replan(now, &BTreeSet::new(), &mut self.ids, &mut self.out);
            } else {
                job.handle_fleet_changed(now, draining, &mut self.ids, &mut self.out);
            }
        }
    }

    /// A caller submits a request.
    pub fn handle_submit(&mut self, now: Instant, call: CallId, job: JobId, request: Request) {
        let refusal = match self.jobs.get_mut(&job) {
            None => DoneReason::Invalid(format!("job {:x} is not served by this node", job.0)),
            Some(_) if self.leaving => DoneReason::Failed("this node is leaving the mesh: send it elsewhere".into()),
            Some(found) => {
                if found.requests.submit(now, call, request, &mut self.out) {
                    self.calls.insert(call, job);
                }
                return;
            }
        };
        self.out.push_back(JobOutput::Notify(Event::Done { call, reason: refusal }));
    }

    /// A caller has enough, or went away. Also ends a caller's wait for a deploy.
    pub fn handle_cancel(&mut self, now: Instant, call: CallId) {
        self.plan_calls.retain(|_, (waiting, _)| *waiting != call);
        self.jobs.values_mut().for_each(|job| job.forget_caller(call));
        if let Some(job) = self.calls.get(&call).and_then(|job| self.jobs.get_mut(job)) {
            job.requests.cancel(now, call, &mut self.out);
        }
    }

    /// A caller ends a job.
    pub fn handle_undeploy(&mut self, id: JobId) {
        if let Some(mut job) = self.jobs.remove(&id) {
            job.end("the model was stopped or restarted with other options: retry", &mut self.out);
        }
    }

    /// Takes no new work; each job ends with its last request.
    pub fn handle_leave(&mut self) {
        self.leaving = true;
        self.end_idle_when_leaving();
    }

    fn end_idle_when_leaving(&mut self) {
        if !self.leaving {
            return;
        }
        let idle: Vec<JobId> = self.jobs.iter().filter(|(_, job)| job.requests.is_empty()).map(|(&id, _)| id).collect();
        idle.into_iter().for_each(|id| self.handle_undeploy(id));
    }

    /// Watchdogs, retries and the end of patience.
    pub fn handle_wakeup(&mut self, now: Instant) {
        for job in self.jobs.values_mut() {
            job.handle_wakeup(now, &mut self.ids, &mut self.out);
        }
    }

    /// When the next of them is due.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        self.jobs.values().filter_map(ModelJob::next_wakeup).min()
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<JobOutput> {
        let output = self.out.pop_front()?;
        if let JobOutput::Notify(Event::Done { call, .. }) = &output {
            self.calls.remove(call);
            self.end_idle_when_leaving();
        }
        Some(output)
    }

    /// What nodes hold for a job, as they reported.
    pub fn holdings(&self, job: JobId) -> Holdings {
        self.jobs.get(&job).map(|job| job.holds().1).unwrap_or_default()
    }

    /// Whether this node heads no job.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Whether this node is the head of the job, and its epoch.
    pub fn epoch_of(&self, job: JobId) -> Option<Epoch> {
        self.jobs.get(&job).map(ModelJob::epoch)
    }

    /// All jobs, for status pages.
    pub fn views(&self) -> impl Iterator<Item = JobView> + '_ {
        self.jobs.values().map(ModelJob::view)
    }
}
