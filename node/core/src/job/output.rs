//! Outputs of the coordinator: for the shell as they are, or for the router to pass on.
use crate::id::{CallId, ContentId, Epoch, JobId, NodeId, RequestId};
use crate::message::{FrameHeader, ToParticipant};
use crate::output::{Event, Output};
use crate::place::PlaceSet;
use crate::time::Duration;
use crate::work::QuestionOrigin;
use crate::work::serve::{FromCaller, Sampling, ToCaller};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;
use partitioner::tiles::{Block, GridWork, RuleRates};
use partitioner::{DeviceId, Plan, Room, Work};

/// Bytes that devices hold for a job.
pub type ResidentBytes = Vec<(DeviceId, Room)>;

/// An action for the router.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobOutput {
    /// For the shell.
    Shell(Output),
    /// Ask the planner, on the present mesh.
    Ask { asked: QuestionOrigin, ask: Box<PlannerQuestion> },
    /// A message to a participant.
    Message { to: NodeId, job: JobId, epoch: Epoch, say: ToParticipant },
    /// The epoch of a job that this node coordinates, to another coordinator of the job.
    Stale { to: NodeId, job: JobId, mine: Epoch },
    /// Tokens into the first stage, or a copy for its standby.
    Frame { to: NodeId, header: FrameHeader, tokens: Vec<u32>, copy: bool },
    /// These nodes take part in the job under this epoch: exchange heartbeats with them, and report the loss of one to
    /// the job. `others` took part before and only need this node's heartbeats.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId>, standbys: Vec<NodeId>, others: Vec<NodeId> },
    /// The job is over here, or continues at `successor`.
    Unwatch { job: JobId, successor: Option<NodeId> },
    /// To a node that has a caller: progress of the caller's request.
    Tell { to: NodeId, call: CallId, say: ToCaller },
    /// To the coordinator of a job: a message about a caller of this node.
    Call { to: NodeId, job: JobId, call: CallId, say: FromCaller },
    /// A node answered challenges with this device, which holds these layers with `ram` bytes of experts in RAM.
    Measured { job: JobId, device: DeviceId, work: Box<Work>, layers: Range<u32>, ram: u64, measured: Measured },
    /// Between two jobs of this node. [`Jobs`](super::Jobs) routes it itself.
    Drafting(Drafting),
    /// For callers and logs.
    Notify(Event),
}

/// Between a request and the job of its draft model, which this node coordinates both. `job` and `request` are the request's.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drafting {
    /// To the job that serves this content: continue the request.
    Steer { job: JobId, request: RequestId, content: ContentId, steering: Steering },
    /// To the same job: the request needs no more drafts.
    Leave { job: JobId, request: RequestId, content: ContentId },
    /// To the request: the drafts. `None`: that job does not know the request, or has no room for it.
    Answer { job: JobId, request: RequestId, drafts: Option<Vec<u32>> },
}

/// A question to the draft model: continue these tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steering {
    /// Position of the first of them. The model has had the tokens before it, from the same request.
    pub from: u32,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Number of tokens to add.
    pub more: u32,
    /// How to sample them.
    pub sampling: Sampling,
}

/// Queue of outputs.
pub(super) type Out = VecDeque<JobOutput>;

/// Time that a device took for [`CHALLENGE_STEPS`](crate::limits::CHALLENGE_STEPS) steps of some layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The shortest of several answers, including the round trip.
    pub took: Duration,
    /// Whether no request of the job ran meanwhile.
    pub quiet: bool,
    /// Nonce of the last challenge.
    pub nonce: u64,
    /// Digest of the rows that the last challenge produced.
    pub digest: u64,
}

/// A question to the planner. The router adds the present mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannerQuestion {
    /// The job that asks; `None` for a caller that only asks for a plan.
    pub job: Option<JobId>,
    /// Memory and RAM that devices hold for the job. Its next plan may use them.
    pub resident: ResidentBytes,
    /// Nodes and devices to leave out.
    pub without: PlaceSet,
    /// The question.
    pub what: JobQuestion,
}

/// The question of an [`PlannerQuestion`].
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobQuestion {
    /// Place a model, from scratch or by repairing a plan. `present`: compare the plan with this one. `caller`: include
    /// standbys and the cost of losses.
    Model { work: Work, repair: Option<Box<Plan>>, present: Option<Box<Plan>>, caller: bool },
    /// Standbys for the stages of a plan.
    ModelStandbys { work: Work, plan: Box<Plan>, kept: Vec<(u16, DeviceId)> },
    /// Partition a grid. `present`: compare the plan with this one.
    Grid { work: GridWork, depth: Option<u32>, rates: RuleRates, present: Option<(Vec<(DeviceId, Block)>, u32)> },
    /// Standbys for tiles.
    GridStandbys {
        work: GridWork,
        owners: Vec<(DeviceId, Block)>,
        depth: u32,
        step_ns: u64,
        kept: Vec<(u16, DeviceId)>,
    },
}
