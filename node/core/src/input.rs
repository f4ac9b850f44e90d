//! Everything that can happen to a node. Nothing else ever changes its state.
use crate::config::Capacity;
use crate::id::{CallId, ContentId, Epoch, JobId, LoadId, NodeId, PartId, TensorId, WorkId};
use crate::message::FrameHeader;
use crate::work::serve::Request;
use crate::work::steps::SaveKind;
use crate::work::{JobSpec, Loaded, PlanSpec, QuestionOrigin, RunResult};
use alloc::{boxed::Box, string::String, vec::Vec};
use core::net::SocketAddr;
use partitioner::Answer;
use serde::{Deserialize, Serialize};

/// An input.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Input {
    /// The clock reached `next_wakeup`.
    Wakeup,

    // ---- membership
    /// Discovery or a ticket found an address of a present or former member. It proves nothing. `peer_id` is the key behind
    /// `node`; the connection pins it.
    PeerFound {
        node: NodeId,
        peer_id: Vec<u8>,
        gossip: Vec<SocketAddr>,
        data: Vec<SocketAddr>,
        /// From a ticket or a previous run, not from the network: the node keeps trying to reach it.
        remembered: bool,
    },
    /// A sealed gossip datagram was decrypted: its sender holds the mesh key.
    Datagram { from: NodeId, source: SocketAddr, bytes: Vec<u8> },
    /// A certified data-plane connection to a member was established.
    Connected { node: NodeId, rtt_ns: u64 },
    /// The connection broke. Frames and messages in transit may be lost.
    Disconnected { node: NodeId },
    /// A control message of a certified member arrived.
    Message { from: NodeId, bytes: Vec<u8> },
    /// The answer to `Output::Sign`.
    Signed { token: u64, signature: Vec<u8> },
    /// The answer to `Output::Verify`.
    Verified { token: u64, valid: bool },
    /// Measured round trip and throughput to a peer.
    LinkMeasured { node: NodeId, rtt_ns: u64, bytes_per_second: u64 },
    /// Free memory or measured speed of this node changed.
    CapacityChanged(Capacity),
    /// This node holds (some of) these contents on disk: content ids of model indices.
    Holdings(Vec<ContentId>),
    /// The complete list of banned nodes; it replaces the previous list.
    Banned(Vec<NodeId>),
    /// `leave`, SIGTERM: announce the departure, take no new work, hand over.
    Leave,
    /// `drain`: stay a member, take no new work. `false` ends the drain.
    Drain(bool),

    // ---- jobs: this node as coordinator
    /// A local caller starts a job. If the model is served already, the caller waits for that job.
    Start { call: CallId, job: Box<JobSpec> },
    /// A local caller requests a plan for a job, and with `standbys` the choice of standbys too.
    Plan { call: CallId, what: Box<PlanSpec>, standbys: bool },
    /// The planner answered `Output::Plan`.
    Planned { asked: QuestionOrigin, answer: Answer },
    /// A local caller submits a request to a model that this node coordinates.
    Submit { call: CallId, job: JobId, request: Box<Request> },
    /// A local caller submits a request to a model that another node serves.
    Ask { call: CallId, to: NodeId, job: JobId, request: Box<Request> },
    /// The caller disconnected or has enough (stop string): cancel its request.
    Cancel { call: CallId },
    /// A local caller ends a job.
    End { job: JobId },
    /// A local caller requests the fleet as the planner sees it, with what this job holds counted as free (answer:
    /// `Event::Fleet`).
    Survey { call: CallId, job: Option<JobId> },

    // ---- parts: this node as participant
    /// The answer to `Output::Load` and `Output::Restore`.
    Loaded { job: JobId, part: PartId, load: LoadId, result: Result<Loaded, String> },
    /// The answer to `Output::Fetch`: bytes received from peers.
    Fetched { job: JobId, epoch: Epoch, part: PartId, result: Result<u64, String> },
    /// The answer to `Output::Challenge`: a digest of the last row computed.
    Challenged { job: JobId, epoch: Epoch, part: PartId, nonce: u64, result: Result<u64, String> },
    /// A frame arrived. The shell holds its payload as `tensor` until a run takes it or `Discard` drops it. The shell has
    /// checked header, shape and checksum against the job's shape.
    Frame { from: NodeId, header: FrameHeader, tensor: TensorId },
    /// A run of a tile has computed its halo strips, which the shell holds under their names: elements and bytes of each.
    Halos { job: JobId, part: PartId, work: WorkId, sizes: Vec<(u32, u64)> },
    /// The answer to `Output::Run`.
    Ran { job: JobId, part: PartId, work: WorkId, result: Result<RunResult, String> },

    // ---- states of simulations
    /// The answer to `Output::Collect`.
    Collected { job: JobId, part: PartId, step: u32, kind: SaveKind, result: Result<(), String> },
    /// The answer to `Output::KeepCheckpoint`.
    CheckpointKept { job: JobId, step: u32, result: Result<(), String> },
    /// The answer to `Output::Mirror`.
    Mirrored { job: JobId, step: u32, result: Result<(), String> },
}
