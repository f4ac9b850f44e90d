//! What the parts of this node want done: for the shell as it is, or for the router to pass on.
use crate::id::{Epoch, JobId, LoadId, NodeId, PartId, TensorId, WorkId};
use crate::message::{FrameHeader, ToCoordinator, ToParticipant};
use crate::output::Output;
use crate::time::Duration;
use crate::work::{Inheritance, Order, Payload, Task};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::{string::String, vec::Vec};

/// Do this.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartOutput {
    /// For the shell.
    Shell(Output),
    /// Load a part, with the nodes that may have its data added.
    Load { job: JobId, epoch: Epoch, load: LoadId, order: Box<Order>, replaces: Vec<PartId> },
    /// Have the data of a part on disk, from the nodes that may have them.
    Fetch { job: JobId, epoch: Epoch, order: Box<Order> },
    /// A message to another participant.
    Message { to: NodeId, job: JobId, epoch: Epoch, say: ToParticipant },
    /// A message to the coordinator, which is the epoch's issuer.
    Report { job: JobId, epoch: Epoch, say: ToCoordinator },
    /// The job's epoch is higher than what the node sent.
    Stale { to: NodeId, job: JobId, mine: Epoch },
    /// Rows or a halo for another part, or a copy for its standby. The payload stays with the shell until it is discarded.
    Frame { to: NodeId, header: FrameHeader, payload: Payload, copy: bool },
    /// The executor has work that should take `budget`.
    WorkStarted { job: JobId, budget: Duration },
    /// Its oldest work came back.
    WorkDone { job: JobId },
    /// Have a connection to this node: it will be needed.
    Connect { node: NodeId },
    /// Exchange heartbeats about the job with these nodes, and no others.
    Watch { job: JobId, epoch: Epoch, nodes: Vec<NodeId> },
    /// No heartbeats about the job any more.
    Unwatch { job: JobId },
    /// The coordinator is silent, and this node's turn has come: take the job over.
    Succeed(Box<Inheritance>),
    /// For the log.
    Refused { from: NodeId, what: String },
}

/// The queue of what is to be done.
pub(super) type Out = VecDeque<PartOutput>;

/// Drop a payload.
pub(super) fn discard(tensor: TensorId) -> PartOutput {
    PartOutput::Shell(Output::Discard { tensor })
}

/// Gives up a payload that will not be used.
pub(super) fn discard_payload(payload: Payload, out: &mut Out) {
    match payload {
        Payload::Tensor(tensor) => out.push_back(discard(tensor)),
        Payload::Tensors(tensors) => out.extend(tensors.into_iter().map(discard)),
        Payload::Tokens(_) => {}
    }
}

/// Names of loads, runs and what they make, counted over all parts of this node.
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
        TensorId::Made(self.tensors)
    }
}

/// Work that a part gives to the executor.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) work: WorkId,
    pub(super) task: Task,
    /// How long it should take.
    pub(super) budget: Duration,
    /// What it makes: dropped when it comes back to a part that is gone.
    pub(super) makes: Vec<TensorId>,
}
