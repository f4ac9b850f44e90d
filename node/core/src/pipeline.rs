//! The stage side of running requests: frames in, batches to the executor, frames or tokens out.
//!
//! One rule serves replay, cancellation and resending: a frame names its positions; a stage that holds more truncates
//! to them, one that holds less answers `Gap { have }`. Positions are counted when work is queued, because the
//! executor runs in order. Epochs have been checked by `placement` before anything reaches this file.
//! A standby runs the same stage in the shadow: it is fed a copy of the frames, and tells nobody what comes out.
//! Next: `pipeline/stage.rs`, then `queue.rs` and `ring.rs` beside it.
mod pace;
mod queue;
mod ring;
mod stage;

use crate::id::{Epoch, JobId, NodeId, RequestId, TensorId, WorkId};
use crate::limits::LEASE;
use crate::message::{FrameHeader, Message};
use crate::time::{Duration, Instant};
use crate::work::Payload;
use crate::work::serve::{Item, ItemResult, Position, Sampling};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::{format, string::String, vec::Vec};
use stage::{Batch, StageRun};

/// What a stage needs to know of the route it is part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Under which placement.
    pub epoch: Epoch,
    /// Who gets tokens, progress and gaps.
    pub head: NodeId,
    /// Which stage this is: frames for this part are accepted.
    pub stage: u16,
    /// Who sends this stage its frames.
    pub previous: NodeId,
    /// Who gets its hidden rows; none at the last stage.
    pub next: Option<NodeId>,
    /// Sequences held at once.
    pub sequences: u32,
    /// Positions per sequence.
    pub context: u32,
    /// Stages of the route: how many positions of one request are computed in one pass.
    pub stages: u32,
    /// Hidden rows kept to be sent again.
    pub ring_rows: u64,
    /// This is the stage's standby.
    pub shadow: bool,
}

/// What the pipeline wants done.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PipelineOutput {
    /// Run a batch, which should take `budget`.
    Compute { work: WorkId, job: JobId, epoch: Epoch, items: Vec<Item>, budget: Duration },
    /// A batch came back, whatever became of it.
    Returned { job: JobId },
    /// Free a request's cache.
    Release { job: JobId, request: RequestId },
    /// Drop a payload.
    Discard { tensor: TensorId },
    /// Hidden rows for the next stage, or a copy for its standby. They stay with the shell until they are discarded.
    Frame { to: NodeId, header: FrameHeader, payload: Payload, copy: bool },
    /// A message for the head.
    Message { to: NodeId, message: Message },
    /// The executor failed under this stage: it is not to be trusted before it is placed anew.
    Failed { job: JobId, epoch: Epoch, reason: String },
    /// Something was dropped, for the log.
    Refused { from: NodeId, what: String },
}

/// The stages this node runs, one per job at most.
///
/// Invariants: every tensor that came in is consumed by a `Compute` or discarded, and every hidden row that a `Compute`
/// made is sent or discarded; at most one batch per stage is in flight.
#[derive(Debug, Default)]
pub struct Pipeline {
    stages: BTreeMap<JobId, StageRun>,
    in_flight: BTreeMap<WorkId, Batch>,
    work_next: u64,
    tensor_next: u64,
    out: VecDeque<PipelineOutput>,
}

impl Pipeline {
    /// A stage is resident: frames of its epoch are welcome from now on. A former stage of the job is fenced first.
    pub fn install(&mut self, job: JobId, route: Route) {
        self.fence(job);
        self.stages.insert(job, StageRun::new(job, route));
    }

    /// Stops a job's stage before anything else is done under its epoch: what waits is discarded, caches are freed, the
    /// batch in flight will be dropped when it returns.
    pub fn fence(&mut self, job: JobId) {
        if let Some(mut stage) = self.stages.remove(&job) {
            stage.drop_everything(&mut self.out);
        }
    }

    /// The job is being placed anew and this stage stays as it is: what waits is discarded, what was computed is kept, and
    /// nothing leaves until `reroute` and `go`.
    pub fn quiesce(&mut self, job: JobId) {
        if let Some(stage) = self.stages.get_mut(&job) {
            stage.quiesce(&mut self.out);
        }
    }

    /// The stage stays, with its caches and its ring, under another route.
    pub fn reroute(&mut self, job: JobId, route: Route) {
        match self.stages.get_mut(&job) {
            Some(stage) => stage.reroute(route, &mut self.out),
            None => self.install(job, route),
        }
    }

    /// This node was paused: of the stages that others head nothing leaves before their head is heard.
    pub fn withhold(&mut self, me: NodeId) {
        self.stages.values_mut().filter(|stage| stage.head() != me).for_each(StageRun::withhold);
    }

    /// This node comes back so much later than it wanted: it was stopped, and its executor perhaps with it. No batch counts
    /// as late for that, and an answer may be waiting to be read.
    pub fn excuse(&mut self, late: Duration) {
        if late >= LEASE {
            self.in_flight.values_mut().for_each(|batch| batch.started = batch.started + late + LEASE);
        }
    }

    /// A job's head is heard under the present epoch.
    pub fn release(&mut self, job: JobId) {
        if let Some(stage) = self.stages.get_mut(&job) {
            stage.release(true, &mut self.out);
        }
    }

    /// Every stage of the route is ready. The stage after this one holds so many positions of these requests.
    pub fn go(&mut self, now: Instant, job: JobId, resume: &[(RequestId, u32)]) {
        if let Some(stage) = self.stages.get_mut(&job) {
            stage.go(now, resume, &mut self.out);
        }
    }

    /// What a job's stage holds of each request.
    pub fn positions(&self, job: JobId) -> Vec<Position> {
        self.stages.get(&job).map(StageRun::positions).unwrap_or_default()
    }

    /// The head named the standby of a stage beside this one, or says that it has none.
    pub fn handle_standby(&mut self, job: JobId, stage: u16, node: Option<NodeId>) {
        if let Some(run) = self.stages.get_mut(&job) {
            run.handle_standby(stage, node);
        }
    }

    /// A standby of the next stage wants what follows the positions it has.
    pub fn handle_resume(&mut self, from: NodeId, job: JobId, request: RequestId, have: u32) {
        if let Some(stage) = self.stages.get_mut(&job) {
            stage.handle_resume(from, request, have, &mut self.out);
        }
    }

    /// Somebody after this stage said what it holds.
    pub fn handle_held(&mut self, from: NodeId, job: JobId, held: Vec<(RequestId, u32)>) {
        if let Some(stage) = self.stages.get_mut(&job) {
            stage.handle_held(from, held);
        }
    }

    /// Time to tell those before what is held.
    pub fn handle_wakeup(&mut self, now: Instant) {
        self.stages.values_mut().for_each(|stage| stage.report(now, &mut self.out));
    }

    /// When the next report is due.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let due = self.stages.values().filter_map(StageRun::report_at).min();
        due.map(|at| (at, "pipeline: tell what is held"))
    }

    /// A frame of the current epoch arrived.
    pub fn handle_frame(&mut self, now: Instant, from: NodeId, header: FrameHeader, payload: Payload) {
        match self.stages.get_mut(&header.job) {
            Some(stage) => stage.handle_frame(now, from, header, payload, &mut self.out),
            None => discard(payload, &mut self.out),
        }
    }

    /// The head told the last stage how to sample a request.
    pub fn handle_open(&mut self, job: JobId, request: RequestId, sampling: Sampling, tokens: Vec<u32>, prompt: u32) {
        if let Some(stage) = self.stages.get_mut(&job) {
            stage.handle_open(request, sampling, tokens, prompt);
        }
    }

    /// The head ended a request.
    pub fn handle_close(&mut self, job: JobId, request: RequestId) {
        if let Some(stage) = self.stages.get_mut(&job) {
            stage.handle_close(request, &mut self.out);
        }
    }

    /// A connection to a peer broke and stands again: what it had sent may be lost, so tell the head what is held.
    pub fn handle_reconnected(&mut self, node: NodeId) {
        for stage in self.stages.values_mut() {
            stage.handle_reconnected(node, &mut self.out);
        }
    }

    /// The executor answered.
    pub fn handle_computed(&mut self, now: Instant, work: WorkId, results: Result<Vec<ItemResult>, String>) {
        let Some(batch) = self.in_flight.remove(&work) else { return };
        self.out.push_back(PipelineOutput::Returned { job: batch.job });
        let stage = self.stages.get_mut(&batch.job).filter(|stage| stage.runs(work));
        match stage {
            Some(stage) => stage.handle_computed(now, &batch, results, &mut self.out),
            None => batch.discard_results(results, &mut self.out),
        }
    }

    /// When a batch with the executor (perhaps of a stage long gone) will have been there for far longer than predicted.
    pub fn stuck_at(&self) -> Option<Instant> {
        self.in_flight.values().map(|batch| batch.started + BATCH_MIN.max(batch.budget * 4)).min()
    }

    /// For how long the executor has been busy with a batch, if that is far longer than predicted.
    pub fn stuck(&self, now: Instant) -> Option<Duration> {
        self.stuck_at().filter(|at| *at <= now)?;
        self.in_flight.values().map(|batch| now.since(batch.started)).max()
    }

    /// Why the executor would not get to new work, if it would not.
    pub fn wedged(&self, now: Instant) -> Option<String> {
        let elapsed = self.stuck(now)?;
        Some(format!("the executor has been busy with one batch for {} ms", elapsed.as_millis()))
    }

    /// The next thing to do, besides starting batches.
    pub fn poll_output(&mut self) -> Option<PipelineOutput> {
        self.out.pop_front()
    }

    /// Starts a batch on every idle stage where work waits. Called when the shell has told everything that has happened,
    /// so that the decode steps of several requests meet in one batch.
    pub fn poll_compute(&mut self, now: Instant) -> Option<PipelineOutput> {
        let (work, tensors) = (WorkId(self.work_next), &mut self.tensor_next);
        for (&job, stage) in &mut self.stages {
            if let Some((batch, items)) = stage.start_batch(now, work, tensors) {
                self.work_next += 1;
                let (epoch, budget) = (batch.epoch, batch.budget);
                self.in_flight.insert(work, batch);
                return Some(PipelineOutput::Compute { work, job, epoch, items, budget });
            }
        }
        None
    }
}

/// A batch shorter than this never counts as stuck, whatever was predicted.
const BATCH_MIN: Duration = Duration::from_secs(1);

/// Gives up a payload that will not be used.
fn discard(payload: Payload, out: &mut VecDeque<PipelineOutput>) {
    match payload {
        Payload::Tensor(tensor) => out.push_back(PipelineOutput::Discard { tensor }),
        Payload::Tensors(tensors) => {
            out.extend(tensors.into_iter().map(|tensor| PipelineOutput::Discard { tensor }));
        }
        Payload::Tokens(_) => {}
    }
}

#[cfg(test)]
mod tests;
