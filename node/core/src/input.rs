//! Everything that can happen to a node. Nothing else ever changes its state.
use crate::config::Capacity;
use crate::id::{CallId, ContentId, Epoch, JobId, LoadId, NodeId, PartId, TensorId, WorkId};
use crate::message::FrameHeader;
use crate::work::serve::Request;
use crate::work::steps::SaveKind;
use crate::work::{Asked, JobSpec, Loaded, Made, PlanSpec};
use alloc::{boxed::Box, string::String, vec::Vec};
use core::net::SocketAddr;
use partitioner::Answer;
use serde::{Deserialize, Serialize};

/// Something happened.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Input {
    /// The clock reached `next_wakeup`.
    Wakeup,

    // ---- membership
    /// Discovery or a ticket found an address of a peer that is (or was) a member; not a proof of anything.
    /// `peer_id` is the key behind `node`, to be pinned by the connection.
    PeerFound {
        node: NodeId,
        peer_id: Vec<u8>,
        gossip: Vec<SocketAddr>,
        data: Vec<SocketAddr>,
        /// From a ticket or a previous run, not from the network: the node keeps trying to reach it.
        remembered: bool,
    },
    /// A sealed gossip datagram was opened: its sender holds the mesh key.
    Datagram { from: NodeId, source: SocketAddr, bytes: Vec<u8> },
    /// A certified data-plane connection to a member stands.
    Connected { node: NodeId, rtt_ns: u64 },
    /// It is gone. Frames and messages on the way may be lost.
    Disconnected { node: NodeId },
    /// A control message of a certified member arrived.
    Message { from: NodeId, bytes: Vec<u8> },
    /// A signature asked for by `Output::Sign`.
    Signed { token: u64, signature: Vec<u8> },
    /// The answer to `Output::Verify`.
    Verified { token: u64, valid: bool },
    /// Measured round trip and throughput to a peer.
    LinkMeasured { node: NodeId, rtt_ns: u64, bytes_per_second: u64 },
    /// Free memory or measured speed of this node changed.
    CapacityChanged(Capacity),
    /// This node holds (some of) these contents on disk: model indices by content id.
    Holdings(Vec<ContentId>),
    /// These, and nobody else, are banned from the mesh: the list as it stands.
    Banned(Vec<NodeId>),
    /// `leave`, SIGTERM: announce, take no new work, hand over.
    Leave,
    /// `drain`: stay a member, take no new work. `false` ends it.
    Drain(bool),

    // ---- jobs: this node as coordinator
    /// A local caller starts a job. Where the model is served already, the caller waits for that job.
    Start { call: CallId, job: Box<JobSpec> },
    /// A local caller wants to know how a job would be placed, and with `standbys` which nodes would be its standbys.
    Plan { call: CallId, what: Box<PlanSpec>, standbys: bool },
    /// The planner answered `Output::Plan`.
    Planned { asked: Asked, answer: Answer },
    /// A local caller submits a request to a served model.
    Submit { call: CallId, job: JobId, request: Box<Request> },
    /// A local caller submits a request to a model that another node serves.
    Ask { call: CallId, to: NodeId, job: JobId, request: Box<Request> },
    /// The caller went away or has enough (stop string): stop its work.
    Cancel { call: CallId },
    /// A local caller ends a job.
    End { job: JobId },
    /// A local caller wants the mesh as plans see it, with what this job holds counted as free (answer: `Event::Fleet`).
    Survey { call: CallId, job: Option<JobId> },

    // ---- parts: this node as participant
    /// The answer to `Output::Load` and `Output::Restore`.
    Loaded { job: JobId, part: PartId, load: LoadId, result: Result<Loaded, String> },
    /// The answer to `Output::Fetch`: bytes that came from peers.
    Fetched { job: JobId, epoch: Epoch, part: PartId, result: Result<u64, String> },
    /// The answer to `Output::Challenge`: a digest of the last row made.
    Challenged { job: JobId, epoch: Epoch, part: PartId, nonce: u64, result: Result<u64, String> },
    /// A frame arrived; its payload is `tensor`, kept by the shell until a run takes it or `Discard` drops it.
    /// Header, shape and checksum have been checked against the job's shape.
    Frame { from: NodeId, header: FrameHeader, tensor: TensorId },
    /// A run of a tile has made its halos, which the shell keeps under their names: elements and bytes of each.
    Halos { job: JobId, part: PartId, work: WorkId, sizes: Vec<(u32, u64)> },
    /// The answer to `Output::Run`.
    Ran { job: JobId, part: PartId, work: WorkId, result: Result<Made, String> },

    // ---- states of simulations
    /// The answer to `Output::Collect`.
    Collected { job: JobId, part: PartId, step: u32, kind: SaveKind, result: Result<(), String> },
    /// The answer to `Output::KeepCheckpoint`.
    Kept { job: JobId, step: u32, result: Result<(), String> },
    /// The answer to `Output::Mirror`.
    Mirrored { job: JobId, step: u32, result: Result<(), String> },
}
