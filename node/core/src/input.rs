//! Everything that can happen to a node. Nothing else ever changes its state.
use crate::config::Capacity;
use crate::id::{CallId, ContentId, Epoch, JobId, LoadId, NodeId, TensorId, WorkId};
use crate::message::FrameHeader;
use crate::work::serve::{ItemResult, LoadedStage, ModelSpec, Request};
use crate::work::steps::{GridSpec, SaveKind, TileLoaded, TileMade};
use alloc::{boxed::Box, string::String, vec::Vec};
use core::net::SocketAddr;
use partitioner::tiles::{GridError, GridPlan, GridWork};
use partitioner::{Plan, PlanError};
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

    // ---- jobs: this node as head
    /// A local caller wants a model served (or planned only).
    Deploy { call: CallId, model: Box<ModelSpec>, plan_only: bool },
    /// The planner answered `Output::Plan`.
    Planned { token: u64, result: Result<Box<Plan>, PlanError> },
    /// A local caller submits a request to a served model.
    Submit { call: CallId, job: JobId, request: Box<Request> },
    /// The caller went away or has enough (stop string): stop its work.
    Cancel { call: CallId },
    /// A local caller ends a job.
    Undeploy { job: JobId },

    // ---- stages: this node as participant
    /// The answer to `Output::Load`.
    Loaded { job: JobId, load: LoadId, result: Result<LoadedStage, String> },
    /// The answer to `Output::Fetch`: bytes that came from peers.
    Fetched { job: JobId, epoch: Epoch, result: Result<u64, String> },
    /// The answer to `Output::Challenge`: a digest of the last row made.
    Challenged { job: JobId, epoch: Epoch, nonce: u64, result: Result<u64, String> },
    /// A frame arrived; its payload is `tensor`, kept by the shell until `Compute` takes it or `Discard` drops it.
    /// Header, shape and checksum have been checked against the job's shape.
    Frame { from: NodeId, header: FrameHeader, tensor: TensorId },
    /// The answer to `Output::Compute`, one result per item in order.
    Computed { work: WorkId, results: Result<Vec<ItemResult>, String> },

    // ---- simulations
    /// About a grid job: this node as coordinator or as participant.
    Grid(GridInput),
    /// A local caller wants the mesh as plans see it, with what this job holds counted as free (answer: `Event::Fleet`).
    Survey { call: CallId, job: Option<JobId> },
}

/// What happens to simulations.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum GridInput {
    /// A local caller submits a simulation.
    Submit(Box<GridSpec>),
    /// A local caller wants to know how a grid would be cut; `guarded`: and who would stand by.
    Plan { call: CallId, work: Box<GridWork>, depth: Option<u32>, guarded: bool },
    /// A local caller ends a job.
    Cancel { job: JobId },
    /// The answer to `GridCommand::Plan`.
    Planned { token: u64, result: Result<Box<GridPlan>, GridError> },
    /// The answer to `GridCommand::Load` and `Restore`.
    Loaded { job: JobId, tile: u16, load: LoadId, result: Result<TileLoaded, String> },
    /// Of `GridCommand::Run`: its strips are kept by the shell under their names; elements and bytes of each.
    Strips { job: JobId, tile: u16, work: WorkId, sizes: Vec<(u32, u64)> },
    /// The answer to `GridCommand::Run`.
    Made { job: JobId, tile: u16, work: WorkId, result: Result<TileMade, String> },
    /// The answer to `GridCommand::Collect`.
    Collected { job: JobId, tile: u16, step: u32, kind: SaveKind, result: Result<(), String> },
    /// The answer to `GridCommand::KeepCheckpoint`.
    Kept { job: JobId, step: u32, result: Result<(), String> },
    /// The answer to `GridCommand::Mirror`.
    Mirrored { job: JobId, step: u32, result: Result<(), String> },
}
