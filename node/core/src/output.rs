//! Everything a node can do. The shell (or simnet) carries it out and answers with an `Input` where one is named.
use crate::id::{CallId, Epoch, JobId, LoadId, NodeId, PartId, RequestId, TensorId};
use crate::message::FrameHeader;
use crate::work::serve::DoneReason;
use crate::work::steps::{SaveKind, SimulationId, StepsEvent};
use crate::work::{Asked, Change, Contact, DownReason, Ending, Figures, Inherited, Order, Payload, Placement, Run};
use alloc::{boxed::Box, string::String, vec::Vec};
use core::net::SocketAddr;
use partitioner::tiles::{Block, GridError, GridPlan, TileStandby};
use partitioner::{Fleet, Options, Plan, PlanError, Question, Standby};

/// Do this.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    // ---- bytes to peers
    /// Seal and send one gossip datagram (may be lost).
    SendDatagram { to: NodeId, addr: SocketAddr, bytes: Vec<u8> },
    /// Send a control message in order on the peer's control stream; connect first if need be. If it cannot be delivered
    /// the shell says `Disconnected`.
    SendMessage { to: NodeId, bytes: Vec<u8> },
    /// Send a frame on the long-lived stream of (job, receiving part, epoch). The payload stays with the shell until `Discard`: the
    /// same rows may go to a standby, and be sent again. A `copy` is for a standby: it is left out where the way there is
    /// too slow for it, and the standby asks for what it misses.
    SendFrame { to: NodeId, header: FrameHeader, payload: Payload, copy: bool },
    /// Open a data-plane connection and keep it (answer: `Connected`, or `Disconnected`).
    Connect { node: NodeId, peer_id: Vec<u8>, addrs: Vec<SocketAddr> },
    /// The peer is gone for good: drop its connection and keys.
    Disconnect { node: NodeId },

    // ---- work done elsewhere, answered by an input
    /// Sign with the node's key (answer: `Signed`).
    Sign { token: u64, bytes: Vec<u8> },
    /// Verify a peer's signature (answer: `Verified`).
    Verify { token: u64, peer_id: Vec<u8>, bytes: Vec<u8>, signature: Vec<u8> },
    /// Answer the question with `Question::answer` (answer: `Planned`).
    Plan { asked: Asked, question: Question },
    /// Load a part, its data from disk or from `sources` by content hash, or make its cells as the order says; a standby of a tile
    /// gets none yet. The answer (`Loaded`) comes when kernels are compiled and a first step has run. Parts of the job that it
    /// `replaces` are dropped; what they have of the same data may be used.
    Load { job: JobId, epoch: Epoch, load: LoadId, order: Box<Order>, sources: Vec<NodeId>, replaces: Vec<PartId> },
    /// Give a tile the cells of the snapshot that was collected (answer: `Loaded`).
    Restore { job: JobId, load: LoadId, part: PartId, step: u32 },
    /// The part goes on under this epoch: frames for it are expected under that.
    Keep { job: JobId, epoch: Epoch, order: Box<Order> },
    /// Have the data of this part on disk, from `sources` by content hash, beside what runs (answer: `Fetched`).
    Fetch { job: JobId, epoch: Epoch, order: Box<Order>, sources: Vec<NodeId> },
    /// Run [`CHALLENGE_STEPS`](crate::limits::CHALLENGE_STEPS) steps of one row through the stage, after what waits
    /// there, on a sequence of their own that is released again (answer: `Challenged`).
    Challenge { job: JobId, epoch: Epoch, part: PartId, nonce: u64 },
    /// Drop a part, with its caches or its saved states.
    Drop { job: JobId, part: PartId },
    /// Drop all parts of a job, and what is kept for them.
    Unload { job: JobId },
    /// Compute (answers: `Halos` where there are some to make, then `Ran`).
    Run(Box<Run>),
    /// Free a request's key and value cache.
    Release { job: JobId, part: PartId, request: RequestId },
    /// Drop a payload that will not be used.
    Discard { tensor: TensorId },
    /// A payload is for another part of this node's: it is kept under a second name.
    Share { tensor: TensorId, also: TensorId },
    /// Fetch a state that another node saved: a snapshot is kept in memory, what is the coordinator's goes to disk (answer:
    /// `Collected`).
    Collect { job: JobId, from: NodeId, part: PartId, step: u32, kind: SaveKind, bytes: u64 },
    /// Drop a state that was saved or collected.
    Forget { job: JobId, part: PartId, step: u32, kind: SaveKind },
    /// The parts of this checkpoint are all on disk: make it the one to resume from (answer: `Kept`).
    KeepCheckpoint { job: JobId, step: u32 },
    /// Fetch another coordinator's checkpoint, in these parts of at most so many bytes, and keep it beside what this node may
    /// have to go on with (answer: `Mirrored`).
    Mirror { job: JobId, from: NodeId, step: u32, parts: Vec<(Block, u64)>, simulation: SimulationId },
    /// Write down the peers to announce to after a restart, in place of those written before. Nothing waits for the disk.
    Remember { peers: Vec<Contact> },

    // ---- what callers, logs and checkers see
    /// Something worth reporting.
    Notify(Event),
}

/// Something a caller, a log or a checker wants to know.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A member is alive.
    PeerUp { node: NodeId },
    /// A member is gone.
    PeerDown { node: NodeId, reason: DownReason },
    /// Answer to `Input::Plan` of a model: the plan and its standbys. Where the model is served already: what going from that
    /// placement to this plan would mean.
    PlanReady { call: CallId, result: Result<Box<Plan>, PlanError>, standbys: Vec<Standby>, change: Option<Change> },
    /// Answer to `Input::Plan` of a grid.
    GridPlan { call: CallId, result: Result<Box<GridPlan>, GridError>, standbys: Vec<TileStandby> },
    /// Answer to `Input::Survey`: the mesh as plans see it, and how they are made.
    Fleet { call: CallId, fleet: Box<Fleet>, options: Options },
    /// A node takes this many percent of the time that its advert claims: above 100 it is slower, below 100 faster.
    Measured { node: NodeId, percent: u32 },
    /// This node took the job over from its coordinator.
    JobInherited { job: JobId, from: NodeId, inherited: Box<Inherited> },
    /// A job has a new placement and is loading. `step_ns`: predicted nanoseconds of a token or of a step.
    JobPlaced { job: JobId, epoch: Epoch, step_ns: u64, placement: Box<Placement> },
    /// Every part is ready and the job runs: the answer to `Start`, and after each new placement.
    JobReady { call: Option<CallId>, job: JobId, epoch: Epoch },
    /// A job cannot run now; it is tried again when the mesh changes.
    JobDegraded { call: Option<CallId>, job: JobId, reason: String },
    /// A job that runs is to run elsewhere, because that is better or because a node leaves: the weights of a model are fetched first,
    /// a simulation goes on from its last checkpoint.
    JobMoves { job: JobId, change: Change },
    /// A job is over at this node.
    JobEnded { job: JobId, ending: Ending, figures: Figures },
    /// The next token of a call: once per position, in order.
    Token { call: CallId, position: u32, token: u32 },
    /// A call ended.
    Done { call: CallId, reason: DoneReason },
    /// Of a simulation.
    Steps { job: JobId, event: StepsEvent },
    /// A participant of a job was found dead: when the lease ran out, how long it had been silent.
    Lost { job: JobId, node: NodeId, silent_ms: u64 },
    /// A part has a standby that is asked to load (not `current`), or that can take the part over.
    Standby { job: JobId, part: PartId, node: NodeId, current: bool },
    /// The standby of a part becomes its owner.
    Promoted { job: JobId, epoch: Epoch, part: PartId, node: NodeId },
    /// Something was refused or dropped, for the log.
    Refused { from: Option<NodeId>, what: String },
}
