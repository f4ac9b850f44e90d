//! What the jobs of this node want done: for the shell as it is, or for the router to pass on.
use crate::id::{CallId, Epoch, JobId, NodeId};
use crate::message::{FrameHeader, ToParticipant};
use crate::output::{Event, Output};
use crate::time::Duration;
use crate::work::Asked;
use crate::work::serve::{FromCaller, ToCaller};
use alloc::boxed::Box;
use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::ops::Range;
use partitioner::tiles::{Block, GridWork, Paces};
use partitioner::{DeviceId, Plan, Work};

/// Bytes that nodes hold for a job.
pub type Holdings = Vec<(NodeId, u64)>;

/// Do this.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobOutput {
    /// For the shell.
    Shell(Output),
    /// Ask the planner, on the present mesh.
    Ask { asked: Asked, ask: Box<Ask> },
    /// A message to a participant.
    Message { to: NodeId, job: JobId, epoch: Epoch, say: ToParticipant },
    /// The epoch of a job that this node coordinates, for another coordinator of it.
    Stale { to: NodeId, job: JobId, mine: Epoch },
    /// Tokens into the first stage, or a copy for its standby.
    Frame { to: NodeId, header: FrameHeader, tokens: Vec<u32>, copy: bool },
    /// These nodes take part in the job under this epoch: exchange heartbeats with them, take their loss as the job's. `others` took
    /// part before and only have to hear this node.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId>, standbys: Vec<NodeId>, others: Vec<NodeId> },
    /// The job is over here, or goes on at `successor`.
    Unwatch { job: JobId, successor: Option<NodeId> },
    /// A node that has a caller learns of its request.
    Tell { to: NodeId, call: CallId, say: ToCaller },
    /// The coordinator of a job learns of a caller of this node.
    Call { to: NodeId, job: JobId, call: CallId, say: FromCaller },
    /// A node answered challenges.
    Measured { job: JobId, node: NodeId, work: Box<Work>, layers: Range<u32>, measured: Measured },
    /// For callers and logs.
    Notify(Event),
}

/// The queue of what is to be done.
pub(super) type Out = VecDeque<JobOutput>;

/// What a node took for [`CHALLENGE_STEPS`](crate::limits::CHALLENGE_STEPS) steps of some layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The fastest of some answers, the way there and back included.
    pub took: Duration,
    /// No request of the job ran meanwhile.
    pub quiet: bool,
    /// Of the last challenge.
    pub nonce: u64,
    /// The digest of its rows.
    pub digest: u64,
}

/// A question to the planner. The router adds the mesh as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The job that asks; none for a caller who only wants to know.
    pub job: Option<JobId>,
    /// Bytes that nodes hold for the job: free for its next plan.
    pub resident: Holdings,
    /// Nodes that are to be left out.
    pub without: BTreeSet<NodeId>,
    /// What is asked.
    pub what: What,
}

/// See [`Ask`].
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Place a model, from scratch or by repairing a plan; `present` is compared with. `caller`: with standbys, and what losses
    /// would cost.
    Model { work: Work, repair: Option<Box<Plan>>, present: Option<Box<Plan>>, caller: bool },
    /// Standbys for the stages of a plan.
    ModelStandbys { work: Work, plan: Box<Plan>, kept: Vec<(u16, DeviceId)> },
    /// Cut a grid; `present` is compared with.
    Grid { work: GridWork, depth: Option<u32>, rates: Paces, present: Option<(Vec<(DeviceId, Block)>, u32)> },
    /// Standbys for tiles.
    GridStandbys {
        work: GridWork,
        owners: Vec<(DeviceId, Block)>,
        depth: u32,
        step_ns: u64,
        kept: Vec<(u16, DeviceId)>,
    },
}
