//! Everything a node can do. The shell (or simnet) carries it out and answers with an `Input` where one is named.
use crate::id::{CallId, Epoch, JobId, LoadId, NodeId, RequestId, TensorId, WorkId};
use crate::message::FrameHeader;
use crate::work::serve::{DoneReason, Item, StageSpec};
use crate::work::steps::{GridEvent, SaveKind, SimulationId, TileOrder, TileWork};
use crate::work::{Change, Contact, DownReason, Payload};
use alloc::{boxed::Box, string::String, vec::Vec};
use core::net::SocketAddr;
use partitioner::tiles::{Block, GridError, GridPlan, GridQuestion, TileStandby};
use partitioner::{Fleet, Options, Plan, PlanError, Standby, Work};

/// Do this.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug)]
pub enum Output {
    // ---- bytes to peers
    /// Seal and send one gossip datagram (may be lost).
    SendDatagram { to: NodeId, addr: SocketAddr, bytes: Vec<u8> },
    /// Send a control message in order on the peer's control stream; connect first if need be. If it cannot be delivered
    /// the shell says `Disconnected`.
    SendMessage { to: NodeId, bytes: Vec<u8> },
    /// Send a frame on the long-lived stream of (job, edge, epoch). The payload stays with the shell until `Discard`: the
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
    /// Plan (answer: `Planned`): afresh with `partitioner::plan`, or where there is a plan to `repair` by the fewest bytes
    /// moved, with `partitioner::repair`.
    Plan { token: u64, work: Box<Work>, fleet: Box<Fleet>, options: Options, repair: Option<Box<Plan>> },
    /// Put a stage in memory, weights from disk or from `sources` by content hash; kernels compiled and warmed by a
    /// dummy step before the answer (`Loaded`). Layers already resident for the job stay; a former stage of the same
    /// job outside the new range is dropped.
    Load { job: JobId, epoch: Epoch, load: LoadId, stage: Box<StageSpec> },
    /// The job's stage is asked for anew as it is: weights and caches stay, under this epoch from now on (answer: `Loaded`,
    /// after the batch that runs).
    Keep { job: JobId, epoch: Epoch, load: LoadId, stage: Box<StageSpec> },
    /// Have the weights of this stage on disk, from `sources` by content hash, beside whatever runs (answer: `Fetched`).
    Fetch { job: JobId, epoch: Epoch, stage: Box<StageSpec> },
    /// Run [`CHALLENGE_STEPS`](crate::limits::CHALLENGE_STEPS) steps of one row through the job's stage, after what waits
    /// there, on a sequence of their own that is released again (answer: `Challenged`).
    Challenge { job: JobId, epoch: Epoch, nonce: u64 },
    /// Drop a job's stage, cache and tensors.
    Unload { job: JobId },
    /// Run items through the job's stage, in order, as one batch (answer: `Computed`). Inputs are consumed.
    Compute { work: WorkId, job: JobId, epoch: Epoch, items: Vec<Item> },
    /// Free a request's key and value cache.
    Release { job: JobId, request: RequestId },
    /// Drop a payload that will not be used.
    Discard { tensor: TensorId },
    /// About a simulation.
    Grid(GridCommand),
    /// Write down the peers to announce to after a restart, in place of those written before. Nothing waits for the disk.
    Remember { peers: Vec<Contact> },

    // ---- what people and callers see
    /// Something worth telling.
    Notify(Event),
}

/// What is to be done for simulations, each answered by the `GridInput` of the same name where there is one.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GridCommand {
    /// Answer the question with `GridQuestion::answer` (answer: `Planned`).
    Plan { token: u64, question: Box<GridQuestion> },
    /// Make a tile, with the cells that its order says: the simulation's own, or from the coordinator's checkpoint; for a
    /// standby none yet. Strips for it are expected from now on (answer: `Loaded`).
    Load { job: JobId, epoch: Epoch, load: LoadId, order: Box<TileOrder> },
    /// Give it the cells of the snapshot that was collected (answer: `Loaded`).
    Restore { job: JobId, load: LoadId, tile: u16, step: u32 },
    /// It goes on under this epoch: strips for it are expected under that.
    Keep { job: JobId, epoch: Epoch, tile: u16 },
    /// Compute (answers: `Strips` where there are some to make, then `Made`).
    Run(Box<TileWork>),
    /// Fetch what was put aside there: a snapshot is kept in memory, what is the coordinator's goes to disk (answer:
    /// `Collected`).
    Collect { job: JobId, from: NodeId, tile: u16, step: u32, kind: SaveKind, bytes: u64 },
    /// A strip is for another tile of this node's: it is kept under a second name.
    Share { tensor: TensorId, also: TensorId },
    /// Drop a state that was put aside or collected.
    Forget { job: JobId, tile: u16, step: u32, kind: SaveKind },
    /// Drop a tile and its states.
    Drop { job: JobId, tile: u16 },
    /// The parts of this checkpoint are all on disk: make it the one to resume from (answer: `Kept`).
    KeepCheckpoint { job: JobId, step: u32 },
    /// Fetch another coordinator's checkpoint, in these parts of at most so many bytes, and keep it beside what this node may
    /// have to go on with (answer: `Mirrored`).
    Mirror { job: JobId, from: NodeId, step: u32, parts: Vec<(Block, u64)>, simulation: SimulationId },
}

/// Something a caller, a log or a checker wants to know.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A member is alive.
    PeerUp { node: NodeId },
    /// A member is gone.
    PeerDown { node: NodeId, reason: DownReason },
    /// Answer to `Deploy` with `plan_only`: the plan, and who would stand by.
    /// Where the model is served already: what going from that placement to this plan would mean.
    PlanReady { call: CallId, result: Result<Box<Plan>, PlanError>, standbys: Vec<Standby>, change: Option<Change> },
    /// Answer to `Input::Survey`: the mesh as plans see it, and how they are made.
    Fleet { call: CallId, fleet: Box<Fleet>, options: Options },
    /// A job that runs is to run elsewhere, because that is better or because a node leaves: the weights are fetched first.
    Reshaping { job: JobId, change: Change },
    /// A node takes this many percent of the time that its advert claims: above 100 it is slower, below 100 faster.
    Measured { node: NodeId, percent: u32 },
    /// A job has a new placement and is loading.
    JobPlaced { job: JobId, epoch: Epoch, plan: Box<Plan> },
    /// Answer to `Deploy`: every stage is resident and warm. Also told (without call) after each re-plan.
    JobReady { call: Option<CallId>, job: JobId, epoch: Epoch },
    /// A job cannot run now; it is tried again when the mesh changes.
    JobDegraded { call: Option<CallId>, job: JobId, reason: String },
    /// A job ended.
    JobEnded { job: JobId },
    /// The next token of a call: told once per position, in order.
    Token { call: CallId, position: u32, token: u32 },
    /// A call ended.
    Done { call: CallId, reason: DoneReason },
    /// A participant of a job was found dead: when the lease ran out, how long it had been silent.
    Lost { job: JobId, node: NodeId, silent_ms: u64 },
    /// A stage has a standby that is asked to load (not `current`), or that holds what the stage holds.
    Standby { job: JobId, stage: u16, node: NodeId, current: bool },
    /// The standby of a stage takes its place.
    Promoted { job: JobId, epoch: Epoch, stage: u16, node: NodeId },
    /// Of a simulation that is coordinated here.
    Grid { job: JobId, event: Box<GridEvent> },
    /// Answer to `GridInput::Plan`, and who would stand by for which tile.
    GridPlan { call: CallId, result: Result<Box<GridPlan>, GridError>, standbys: Vec<TileStandby> },
    /// Something was refused or dropped, for the log.
    Refused { from: Option<NodeId>, what: String },
}
