//! Everything a node can do. The shell (or simnet) executes each output and answers with an `Input` where one is named.
use crate::id::{CallId, Epoch, JobId, LoadId, NodeId, PartId, RequestId, TensorId};
use crate::message::FrameHeader;
use crate::work::serve::{DoneReason, Sampled};
use crate::work::steps::{SaveKind, SimulationId, StepsEvent};
use crate::work::{
    Contact, DownReason, Ending, Figures, Inherited, Order, Payload, Placement, PredictedChange, QuestionOrigin, Run,
};
use alloc::{boxed::Box, string::String, vec::Vec};
use core::net::SocketAddr;
use partitioner::tiles::{Block, GridError, GridPlan, TileStandby};
use partitioner::{Fleet, Options, Plan, PlanError, Question, Standby};

/// An output.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    // ---- bytes to peers
    /// Seal and send one gossip datagram (may be lost).
    SendDatagram { to: NodeId, addr: SocketAddr, bytes: Vec<u8> },
    /// Send a control message in order on the peer's control stream; connect first if necessary. If it cannot be delivered, the
    /// shell reports `Disconnected`.
    SendMessage { to: NodeId, bytes: Vec<u8> },
    /// Send a frame on the long-lived stream of (job, receiving part, epoch). The shell retains the payload until `Discard`:
    /// the same rows may go to a standby, or be sent again. A `copy` is for a standby: it is dropped where the path is too
    /// slow, and the standby requests what it lacks.
    SendFrame { to: NodeId, header: FrameHeader, payload: Payload, copy: bool },
    /// Open a data-plane connection and keep it open (answer: `Connected`, or `Disconnected`).
    Connect { node: NodeId, peer_id: Vec<u8>, addrs: Vec<SocketAddr> },
    /// The peer is permanently gone: drop its connection and keys.
    Disconnect { node: NodeId },

    // ---- work done outside the core, answered by an input
    /// Sign with the node's key (answer: `Signed`).
    Sign { token: u64, bytes: Vec<u8> },
    /// Verify a peer's signature (answer: `Verified`).
    Verify { token: u64, peer_id: Vec<u8>, bytes: Vec<u8>, signature: Vec<u8> },
    /// Answer the question with `Question::answer` (answer: `Planned`).
    Plan { asked: QuestionOrigin, question: Question },
    /// Load a part: its data from disk, or from `sources` by content hash; or initialise its cells as the order says (a tile's
    /// standby gets none yet). The answer (`Loaded`) comes when kernels are compiled and a first step has run. The parts of the
    /// job that it `replaces` are dropped; data they share may be reused.
    Load { job: JobId, epoch: Epoch, load: LoadId, order: Box<Order>, sources: Vec<NodeId>, replaces: Vec<PartId> },
    /// Initialise a tile from the collected snapshot (answer: `Loaded`).
    Restore { job: JobId, load: LoadId, part: PartId, step: u32 },
    /// The part continues under this epoch: expect its frames under this epoch.
    Continue { job: JobId, epoch: Epoch, order: Box<Order> },
    /// Fetch the data of this part to disk, from `sources` by content hash, without stopping what runs (answer: `Fetched`).
    Fetch { job: JobId, epoch: Epoch, order: Box<Order>, sources: Vec<NodeId> },
    /// Run [`CHALLENGE_STEPS`](crate::limits::CHALLENGE_STEPS) steps of one row through the stage, after its queued work, on a
    /// temporary sequence (answer: `Challenged`).
    Challenge { job: JobId, epoch: Epoch, part: PartId, nonce: u64 },
    /// Drop a part, with its caches or its saved states.
    Drop { job: JobId, part: PartId },
    /// Drop all parts of a job, and everything retained for them.
    Unload { job: JobId },
    /// Compute (answers: `Halos` if halo strips are due, then `Ran`).
    Run(Box<Run>),
    /// Free a request's key and value cache.
    Release { job: JobId, part: PartId, request: RequestId },
    /// Give a request the cache of the first `positions` of another request, which stays.
    Fork { job: JobId, part: PartId, from: RequestId, to: RequestId, positions: u32 },
    /// Drop a payload that will not be used.
    Discard { tensor: TensorId },
    /// Split a payload of `of` hidden rows, or of `of` tokens from another node, into the first `at` and the others.
    Split { tensor: TensorId, at: u32, of: u32, into: [TensorId; 2] },
    /// A payload is for another part on this node too: retain it under a second name.
    Share { tensor: TensorId, also: TensorId },
    /// Fetch a state that another node saved: a snapshot stays in memory, the coordinator's states go to disk (answer:
    /// `Collected`).
    Collect { job: JobId, from: NodeId, part: PartId, step: u32, kind: SaveKind, bytes: u64 },
    /// Drop a state that was saved or collected.
    Forget { job: JobId, part: PartId, step: u32, kind: SaveKind },
    /// All parts of this checkpoint are on disk: make it the one to resume from (answer: `CheckpointKept`).
    KeepCheckpoint { job: JobId, step: u32 },
    /// Fetch another coordinator's checkpoint, in these parts of at most the given number of bytes, and store it: this node may
    /// have to succeed that coordinator (answer: `Mirrored`).
    Mirror { job: JobId, from: NodeId, step: u32, parts: Vec<(Block, u64)>, simulation: SimulationId },
    /// Persist the peers to announce to after a restart, replacing the previous list. Nothing waits for the disk.
    Remember { peers: Vec<Contact> },

    // ---- events for callers, logs and checkers
    /// An event.
    Notify(Event),
}

/// An event for a caller, a log or a checker.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A member is alive.
    PeerUp { node: NodeId },
    /// A member is down.
    PeerDown { node: NodeId, reason: DownReason },
    /// Answer to `Input::Plan` of a model: the plan and its standbys. If the model is served already, also the change from the
    /// present placement to this plan.
    PlanReady {
        call: CallId,
        result: Result<Box<Plan>, PlanError>,
        standbys: Vec<Standby>,
        change: Option<PredictedChange>,
    },
    /// Answer to `Input::Plan` of a grid.
    GridPlan { call: CallId, result: Result<Box<GridPlan>, GridError>, standbys: Vec<TileStandby> },
    /// Answer to `Input::Survey`: the fleet as the planner sees it, and the planner's options.
    Fleet { call: CallId, fleet: Box<Fleet>, options: Options },
    /// A node's measured step time, in percent of the time that its advert claims: above 100 it is slower, below 100 faster.
    Measured { node: NodeId, percent: u32 },
    /// This node took the job over from its coordinator.
    JobInherited { job: JobId, from: NodeId, inherited: Box<Inherited> },
    /// A job has a new placement and is loading. `step_ns`: predicted nanoseconds per token or per step.
    JobPlaced { job: JobId, epoch: Epoch, step_ns: u64, placement: Box<Placement> },
    /// All parts are ready and the job runs: the answer to `Start`, and sent after each new placement.
    JobReady { call: Option<CallId>, job: JobId, epoch: Epoch },
    /// A job has no placement now; it is placed again when the mesh changes.
    JobDegraded { call: Option<CallId>, job: JobId, reason: String },
    /// A running job moves, because another placement is better or because a node leaves. The weights of a model are fetched
    /// first; a simulation continues from its last checkpoint.
    JobMoves { job: JobId, change: PredictedChange },
    /// A job ended on this node.
    JobEnded { job: JobId, ending: Ending, figures: Figures },
    /// The next token of a call: once per position, in order.
    Token { call: CallId, position: u32, sampled: Sampled },
    /// A request runs; the first `cached` tokens of its prompt were cached.
    Begun { call: CallId, cached: u32 },
    /// A running request gave up its pages, because the cache is full. It is computed again once there are pages for it.
    Preempted { job: JobId, request: RequestId },
    /// A call ended.
    Done { call: CallId, reason: DoneReason },
    /// An event of a simulation.
    Steps { job: JobId, event: StepsEvent },
    /// A participant of a job is lost; `silent_ms`: for how long it was silent when the lease expired.
    Lost { job: JobId, node: NodeId, silent_ms: u64 },
    /// The standby of a part: able to take over (`current`), or not yet, or no longer.
    Standby { job: JobId, part: PartId, node: NodeId, current: bool },
    /// The standby of a part becomes its owner.
    Promoted { job: JobId, epoch: Epoch, part: PartId, node: NodeId },
    /// Something was rejected or dropped, for the log.
    Rejected { from: Option<NodeId>, what: String },
}
