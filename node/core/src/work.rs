//! The vocabulary of the seam between the core and its shell, and of what nodes ask of each other: jobs, their parts, orders,
//! results and events. It imports no machine.
//!
//! A job is parts joined by channels. A part is a stage of a model or a tile of a grid; on each channel into it a cursor counts
//! what it has: positions of a request, steps of a neighbour. Next: `work/serve.rs`, `work/steps.rs`.
pub mod log;
pub mod serve;
pub mod steps;

use crate::id::{CallId, ContentId, Epoch, JobId, NodeId, PartId, RequestId, TensorId, WorkId};
use crate::limits::{PARTS_MAX, PREVIOUS_COORDINATORS_MAX, SUCCESSORS_MAX};
use alloc::collections::BTreeSet;
use alloc::{boxed::Box, format, string::String, vec::Vec};
use core::net::SocketAddr;
use core::ops::Range;
use log::TokenLog;
use partitioner::Tier;
use partitioner::tiles::{Block, GridWork};
use serde::{Deserialize, Serialize};
use serve::{Item, ItemResult, ModelSpec, Position, ServeRecord, StageOrder};
use steps::{GridSpec, SimulationId, StepsRecord, TileFigures, TileMade, TileOrder, TileWork};

/// Who asked the shell a question, so that the router hands the answer back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Asked {
    /// A local caller, who only wants to know.
    Caller(CallId),
    /// A job that this node coordinates.
    Job {
        /// Which job.
        job: JobId,
        /// Which of its questions. An answer to another one is out of date.
        question: u32,
    },
}

/// A job as a local caller describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobSpec {
    /// Serve a model.
    Serve(ModelSpec),
    /// Step a grid.
    Steps(GridSpec),
}

/// What a local caller wants a plan for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlanSpec {
    /// A model.
    Model(ModelSpec),
    /// A grid, with the number of steps between two exchanges if it is given.
    Grid(GridWork, Option<u32>),
}

/// A part as the coordinator orders it from its owner or from a standby.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The job's name, human-readable.
    pub name: String,
    /// Which part.
    pub part: PartId,
    /// The owners of all parts, by part.
    pub owners: Vec<NodeId>,
    /// The receiver is not the part's owner but its standby of this tier.
    pub standby: Option<Tier>,
    /// Parts that the receiver has besides this one, as owner or standby: of a model, others give way.
    pub beside: Vec<PartId>,
    /// Bytes that the plan allows the part.
    pub bytes_max: u64,
    /// Nodes that may take the job over when its coordinator is silent, in order.
    pub successors: Vec<NodeId>,
    /// Nodes that coordinated the job before, the last one first. They may come back.
    pub previous: Vec<NodeId>,
    /// What the part is.
    pub work: PartWork,
}

/// What a part is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartWork {
    /// Consecutive layers of a model.
    Stage(StageOrder),
    /// A block of a grid.
    Tile(TileOrder),
}

impl Order {
    /// The owner of a part; none if there is no such part.
    pub fn owner(&self, part: PartId) -> Option<NodeId> {
        self.owners.get(part.index()).copied()
    }

    /// Whether a node may be the job's coordinator after the present one.
    pub fn may_coordinate(&self, node: NodeId) -> bool {
        self.successors.contains(&node) || self.previous.contains(&node)
    }

    /// Whether what was made for `other` is as good for this: the same part of the same cut, whatever the owners.
    pub fn is_same_part(&self, other: &Order) -> bool {
        let same = match (&self.work, &other.work) {
            (PartWork::Stage(a), PartWork::Stage(b)) => a.is_same_stage(self.part, b, other.part),
            (PartWork::Tile(a), PartWork::Tile(b)) => a.is_same_cut(b),
            (PartWork::Stage(_), PartWork::Tile(_)) | (PartWork::Tile(_), PartWork::Stage(_)) => false,
        };
        self.part == other.part && same
    }

    /// Whether this is an order that was received before, asked again.
    pub fn is_repeated(&self, before: &Order) -> bool {
        *self == Order { beside: self.beside.clone(), ..before.clone() }
    }

    /// Why a node cannot follow the order, if it cannot.
    pub fn unsound(&self, me: NodeId) -> Option<String> {
        let parts = match &self.work {
            PartWork::Stage(stage) => stage.layers.len(),
            PartWork::Tile(tile) => tile.blocks.len(),
        };
        if self.owners.len() != parts {
            return Some(format!("{} owners for {parts} parts", self.owners.len()));
        }
        if self.successors.len() > SUCCESSORS_MAX || self.previous.len() > PREVIOUS_COORDINATORS_MAX {
            return Some(format!(
                "{} successors and {} previous coordinators, expected at most {SUCCESSORS_MAX} and {PREVIOUS_COORDINATORS_MAX}",
                self.successors.len(),
                self.previous.len()
            ));
        }
        if self.beside.len() > PARTS_MAX {
            return Some(format!("{} parts beside this one, expected at most {PARTS_MAX}", self.beside.len()));
        }
        match self.owner(self.part) {
            None => return Some(format!("part {}, the job has {parts}", self.part)),
            Some(owner) if (owner == me) == self.standby.is_some() => {
                let role = if self.standby.is_some() { "its standby" } else { "its owner" };
                return Some(format!("part {} belongs to {owner}: node {me} cannot be {role}", self.part));
            }
            Some(_) => {}
        }
        match &self.work {
            PartWork::Stage(stage) => stage.unsound(),
            PartWork::Tile(tile) => tile.unsound(self.standby),
        }
    }

    /// What a part is made from, by content: the model's weights, the simulation.
    pub fn content(&self) -> ContentId {
        match &self.work {
            PartWork::Stage(stage) => stage.content,
            PartWork::Tile(tile) => tile.simulation.content,
        }
    }

    /// The part that a part sends to and does not hear from: the stage after it. There may be none of this number.
    pub fn fed(&self, part: PartId) -> Option<PartId> {
        match &self.work {
            PartWork::Stage(_) => Some(part.after()),
            PartWork::Tile(_) => None,
        }
    }

    /// Parts that send to a part: the stage before it, the tiles beside it.
    pub fn feeders(&self, part: PartId) -> Vec<PartId> {
        match &self.work {
            PartWork::Stage(_) => part.before().into_iter().collect(),
            PartWork::Tile(tile) => tile.peers(part),
        }
    }
}

/// A part that a node has loaded or kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Bytes it takes.
    pub bytes: u64,
    /// What it has.
    pub has: Has,
}

/// What a part has when it is asked for: where the job can go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Has {
    /// A stage: positions of requests.
    Stage(Vec<Position>),
    /// A tile.
    Tile {
        /// Steps made.
        step: u32,
        /// Of each neighbour, the first step whose halos it still has for that.
        kept: Vec<(PartId, u32)>,
    },
}

/// Where a part goes on, once all parts are ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resume {
    /// A stage: of each request, the positions that the next stage has. It is sent what follows.
    Stage(Vec<(RequestId, u32)>),
    /// A tile: the steps that each tile of the grid has made.
    Tile(Vec<u32>),
}

impl Has {
    /// What a stage has of each request.
    pub fn positions(&self) -> &[Position] {
        match self {
            Has::Stage(positions) => positions,
            Has::Tile { .. } => &[],
        }
    }
}

impl Resume {
    /// For a part that had it before: what a stage sent since then need not be sent once more.
    pub fn repeated(&self) -> Resume {
        match self {
            Resume::Stage(_) => Resume::Stage(Vec::new()),
            Resume::Tile(at) => Resume::Tile(at.clone()),
        }
    }
}

/// How far a part is on its channels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cursors {
    /// The same on all of them.
    All(u32),
    /// By channel; 0 where a channel is not named.
    Each(Vec<(u64, u32)>),
}

/// What the shell made of a `Load`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// Bytes it takes: weights, caches and scratch, or cells.
    pub bytes: u64,
    /// The step of a tile's cells; none for a stage, and for a standby that waits for a snapshot.
    pub step: Option<u32>,
}

/// Work for the executor. It runs in order, and each is answered by `Input::Ran`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Named in the answers.
    pub work: WorkId,
    /// Which job.
    pub job: JobId,
    /// Under which placement.
    pub epoch: Epoch,
    /// Which part.
    pub part: PartId,
    /// What to do.
    pub task: Task,
}

/// What a run does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Items through a stage, in order, as one batch. Their inputs are consumed.
    Batch(Vec<Item>),
    /// Steps of a tile.
    Steps(TileWork),
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Made {
    /// One result for each item, in order.
    Batch(Vec<ItemResult>),
    /// Of steps.
    Steps(TileMade),
}

/// A part that this node holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    /// Of which job.
    pub job: JobId,
    /// The job's name.
    pub name: String,
    /// Under which placement.
    pub epoch: Epoch,
    /// Which part.
    pub part: PartId,
    /// Held as a standby.
    pub standby: bool,
    /// Bytes it takes; none while it loads or after it failed.
    pub bytes: Option<u64>,
    /// What it is.
    pub what: HeldWork,
}

/// See [`HeldPart`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldWork {
    /// Layers `start..end`.
    Stage {
        /// Which.
        layers: Range<u32>,
    },
    /// A tile.
    Tile {
        /// Steps made.
        step: u32,
        /// Steps in all.
        steps: u32,
    },
}

/// What a successor needs to take a job over, besides the order of its own part. The coordinator sends it to each successor
/// when it changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// All parts, in order.
    pub parts: Vec<PartRecord>,
    /// The state of the program.
    pub program: ProgramRecord,
}

/// See [`Record`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecord {
    /// Bytes that the plan allows it.
    pub bytes: u64,
    /// Predicted nanoseconds of a step on its owner.
    pub step_ns: u64,
    /// Its standby.
    pub standby: Option<StandbyRecord>,
}

/// See [`PartRecord`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyRecord {
    /// Which node.
    pub node: NodeId,
    /// Its tier.
    pub tier: Tier,
    /// It can take the part over.
    pub ready: bool,
    /// Milliseconds from one of its snapshots to the next.
    pub snapshot_ms: u32,
}

/// See [`Record`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramRecord {
    /// Serving a model.
    Serve(Box<ServeRecord>),
    /// Stepping a grid.
    Steps(StepsRecord),
}

impl ProgramRecord {
    /// The step of the coordinator's last checkpoint.
    pub fn checkpoint(&self) -> Option<u32> {
        match self {
            ProgramRecord::Serve(_) => None,
            ProgramRecord::Steps(steps) => steps.checkpoint,
        }
    }
}

impl Record {
    /// Owners and standbys.
    pub fn participants(&self, owners: &[NodeId]) -> BTreeSet<NodeId> {
        let standbys = self.parts.iter().filter_map(|part| part.standby).map(|standby| standby.node);
        owners.iter().copied().chain(standbys).collect()
    }
}

/// A job as its successor takes it over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inheritance {
    /// Which job.
    pub job: JobId,
    /// Under which placement it ran. Its issuer is the silent coordinator.
    pub epoch: Epoch,
    /// The order of a part that the successor has.
    pub order: Box<Order>,
    /// What the coordinator left.
    pub record: Box<Record>,
    /// The step of the coordinator's checkpoint of which the successor has a copy.
    pub checkpoint: Option<u32>,
    /// The requests of a served model.
    pub log: TokenLog,
}

/// A peer to announce to after a restart. The shell stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// Which node.
    pub node: NodeId,
    /// The key behind `node`, to be pinned by the connection.
    pub peer_id: Vec<u8>,
    /// Where its gossip socket was reached.
    pub gossip: Vec<SocketAddr>,
    /// Where its data socket was reached.
    pub data: Vec<SocketAddr>,
}

/// What a frame carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Hidden rows kept by the shell.
    Tensor(TensorId),
    /// Hidden rows of consecutive positions, kept apart: to be read one after the other.
    Tensors(Vec<TensorId>),
    /// Token ids for the first stage.
    Tokens(Vec<u32>),
}

/// From one placement of a job to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Predicted nanoseconds per token or step as it is, on the mesh as it is now.
    pub before_ns: u64,
    /// And as it would be.
    pub after_ns: u64,
    /// Weight bytes that nodes hold then and do not hold now; 0 of a simulation.
    pub bytes: u64,
}

/// Why a member is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// It said so.
    Left,
    /// SWIM lost it.
    Failed,
}

/// Where the parts of a job are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Stages: node and layers, first to last.
    Stages(Vec<(NodeId, Range<u32>)>),
    /// Tiles: node and cells.
    Tiles {
        /// By number.
        tiles: Vec<(NodeId, Block)>,
        /// Steps between two exchanges.
        depth: u32,
        /// Where it begins or goes on.
        step: u32,
    },
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All is done.
    Completed,
    /// A caller ended it.
    Cancelled,
    /// Another node coordinates it from now on, and why.
    Moved(String),
    /// It cannot go on, and why.
    Failed(String),
}

/// A job as a successor takes it over, for its shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inherited {
    /// Serving a model.
    Serve {
        /// Which model.
        model: ModelSpec,
    },
    /// Stepping a grid.
    Steps {
        /// Which simulation.
        simulation: SimulationId,
        /// What is made when.
        schedule: steps::Schedule,
    },
}

/// How a job's placement ends, for the figures of each part that has some.
pub type Figures = Vec<TileFigures>;
