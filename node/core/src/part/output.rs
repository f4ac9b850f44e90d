//! Outputs of the parts of this node: for the shell as they are, or for the router to pass on.
use crate::id::{Epoch, JobId, LoadId, NodeId, PartId, TensorId, WorkId};
use crate::message::{FrameHeader, ToCoordinator, ToParticipant};
use crate::output::Output;
use crate::time::Duration;
use crate::work::{Order, Payload, Takeover, Task};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::{string::String, vec::Vec};

/// An action for the router.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartOutput {
    /// For the shell.
    Shell(Output),
    /// Load a part. The router adds the nodes that may have its data.
    Load { job: JobId, epoch: Epoch, load: LoadId, order: Box<Order>, replaces: Vec<PartId> },
    /// Fetch the data of a part to disk. The router adds the nodes that may have it.
    Fetch { job: JobId, epoch: Epoch, order: Box<Order> },
    /// A message to another participant.
    Message { to: NodeId, job: JobId, epoch: Epoch, say: ToParticipant },
    /// A message to the coordinator, which is the epoch's issuer.
    Report { job: JobId, epoch: Epoch, say: ToCoordinator },
    /// The job's epoch is higher than the one that the node sent.
    Stale { to: NodeId, job: JobId, mine: Epoch },
    /// Rows or a halo for another part, or a copy for its standby. The payload stays with the shell until it is discarded.
    Frame { to: NodeId, header: FrameHeader, payload: Payload, copy: bool },
    /// The executor of a device has a run that should take `budget`.
    WorkStarted { job: JobId, device: u8, budget: Duration },
    /// The executor of a device answered a run.
    WorkDone { job: JobId, device: u8 },
    /// Connect to this node: the connection will be needed.
    Connect { node: NodeId },
    /// Exchange heartbeats about the job with these nodes, and no others.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId> },
    /// Stop the heartbeats about the job.
    Unwatch { job: JobId },
    /// The coordinator is silent, and it is this node's turn: take the job over.
    Succeed(Box<Takeover>),
    /// For the log.
    Refused { from: NodeId, what: String },
}

/// Queue of outputs.
pub(super) type Out = VecDeque<PartOutput>;

/// The output that discards a payload.
pub(super) fn discard(tensor: TensorId) -> PartOutput {
    PartOutput::Shell(Output::Discard { tensor })
}

/// Discards a payload.
pub(super) fn discard_payload(payload: Payload, out: &mut Out) {
    match payload {
        Payload::Tensor(tensor) => out.push_back(discard(tensor)),
        Payload::Tensors(tensors) => out.extend(tensors.into_iter().map(discard)),
        Payload::Tokens(_) => {}
    }
}

/// Ids of loads, runs and payloads, counted over all parts of this node.
#[derive(Debug, Default)]
pub(super) struct Names {
    loads: u64,
    works: u64,
    tensors: u64,
}

impl Names {
    pub(super) fn load(&mut self) -> LoadId {
        self.loads += 1;
        LoadId(self.loads)
    }

    pub(super) fn work(&mut self) -> WorkId {
        self.works += 1;
        WorkId(self.works)
    }

    pub(super) fn tensor(&mut self) -> TensorId {
        self.tensors += 1;
        TensorId::Produced(self.tensors)
    }
}

/// What computes on this node or device beside a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    /// This node computes for no other job.
    pub(super) alone: bool,
    /// Parts of the job on the device, this one included.
    pub(super) parts: u32,
}

/// A run that a part gives to the executor.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) work: WorkId,
    pub(super) task: Task,
    /// Predicted duration.
    pub(super) budget: Duration,
    /// What the shell does before it.
    pub(super) before: Vec<Output>,
    /// Payloads that it creates. They are discarded if the part is gone when it returns.
    pub(super) makes: Vec<TensorId>,
}
