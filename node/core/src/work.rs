//! Vocabulary shared by the core, its shell and other nodes: jobs, parts, orders, results and events. Imports no state
//! machine.
//!
//! A job is a set of parts joined by channels. A part is a stage of a model or a tile of a grid. Each input channel of
//! a part has a cursor that counts what has arrived: positions of a request, or steps of a neighbouring tile. Next:
//! `work/serve.rs`, `work/steps.rs`.
pub mod log;
pub mod pages;
pub mod serve;
pub mod steps;

use crate::id::{CallId, ContentId, Epoch, JobId, NodeId, PartId, RequestId, TensorId, WorkId};
use crate::limits::{DEVICES_MAX, PARTS_MAX, PREVIOUS_COORDINATORS_MAX, SUCCESSORS_MAX};
use alloc::collections::BTreeSet;
use alloc::{boxed::Box, format, string::String, vec::Vec};
use core::net::SocketAddr;
use core::ops::Range;
use log::TokenLog;
use partitioner::cost::ram::ram_beside_max;
use partitioner::tiles::{Block, GridWork};
use partitioner::{DeviceId, Room, Tier};
use serde::{Deserialize, Serialize};
use serve::{Item, ItemResult, ModelSpec, Position, ServeRecord, StageOrder};
use steps::{GridSpec, SimulationId, StepsRecord, TileFigures, TileOrder, TileResult, TileWork};

/// The origin of a question to the planner. The router returns the answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum QuestionOrigin {
    /// A local caller. The answer places nothing.
    Caller(CallId),
    /// A job that this node coordinates.
    Job {
        /// Job id.
        job: JobId,
        /// Number of the question within the job. The job ignores an answer that it no longer awaits.
        question: u32,
    },
}

/// A job as a local caller submits it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobSpec {
    /// Serve a model.
    Serve(ModelSpec),
    /// Step a grid.
    Steps(GridSpec),
}

/// What a local caller requests a plan for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlanSpec {
    /// A model.
    Model(ModelSpec),
    /// A grid, and the halo depth (steps between two exchanges) if the caller fixes it.
    Grid(GridWork, Option<u32>),
}

/// The coordinator's order for one part, sent to the part's owner or to its standby.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The job's name, human-readable.
    pub name: String,
    /// The part.
    pub part: PartId,
    /// Owners of all parts, indexed by part.
    pub owners: Vec<NodeId>,
    /// The receiver's device for it, by its place in the advert.
    pub device: u8,
    /// The tier, if the receiver is the part's standby. `None` if it is the owner.
    pub standby: Option<Tier>,
    /// Other parts of this job at the receiver, as owner or standby. The receiver drops stages that are not listed.
    pub other_parts: Vec<PartId>,
    /// Memory of the device that the plan allows the part, in bytes.
    pub bytes_max: u64,
    /// Bytes of a stage's experts that lie in the RAM of the receiver's machine. The rest of the stage takes `bytes_max`.
    pub ram: u64,
    /// Nodes that may take the job over when the coordinator falls silent, in order.
    pub successors: Vec<NodeId>,
    /// Previous coordinators of the job, most recent first. They may come back.
    pub previous: Vec<NodeId>,
    /// What the part computes.
    pub work: PartWork,
}

/// What a part computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartWork {
    /// Consecutive layers of a model.
    Stage(StageOrder),
    /// A block of a grid.
    Tile(TileOrder),
}

impl Order {
    /// What the part may take of the device's memory and of RAM.
    pub fn room(&self) -> Room {
        Room { memory: self.bytes_max, ram: self.ram }
    }

    /// The owner of a part. `None` if there is no such part.
    pub fn owner(&self, part: PartId) -> Option<NodeId> {
        self.owners.get(part.index()).copied()
    }

    /// Whether a node may coordinate the job under a later epoch: it is a named successor or a previous coordinator.
    pub fn may_coordinate(&self, node: NodeId) -> bool {
        self.successors.contains(&node) || self.previous.contains(&node)
    }

    /// Whether state loaded for `other` can be used for this order: same part of the same partition, on the same device.
    /// Owners may differ, and the share of a stage in RAM: it stays where it was loaded.
    pub fn is_same_part(&self, other: &Order) -> bool {
        let same = match (&self.work, &other.work) {
            (PartWork::Stage(a), PartWork::Stage(b)) => a.is_same_stage(self.part, b, other.part),
            (PartWork::Tile(a), PartWork::Tile(b)) => a.is_same_cut(b),
            (PartWork::Stage(_), PartWork::Tile(_)) | (PartWork::Tile(_), PartWork::Stage(_)) => false,
        };
        self.part == other.part && self.device == other.device && same
    }

    /// Whether this order repeats `before`. `other_parts` may differ.
    pub fn is_repeated(&self, before: &Order) -> bool {
        *self == Order { other_parts: self.other_parts.clone(), ..before.clone() }
    }

    /// Why node `me` cannot follow the order. `None` if the order is valid.
    pub fn problem(&self, me: NodeId) -> Option<String> {
        let parts = match &self.work {
            PartWork::Stage(stage) => stage.layers.len(),
            PartWork::Tile(tile) => tile.blocks.len(),
        };
        if self.owners.len() != parts {
            return Some(format!("the order names {} owners, expected {parts}: one per part", self.owners.len()));
        }
        if self.successors.len() > SUCCESSORS_MAX || self.previous.len() > PREVIOUS_COORDINATORS_MAX {
            return Some(format!(
                "{} successors and {} previous coordinators, expected at most {SUCCESSORS_MAX} and {PREVIOUS_COORDINATORS_MAX}",
                self.successors.len(),
                self.previous.len()
            ));
        }
        if usize::from(self.device) >= DEVICES_MAX {
            return Some(format!("the order names device {}, expected less than {DEVICES_MAX}", self.device));
        }
        if self.other_parts.len() > PARTS_MAX {
            return Some(format!("{} other parts at this node, expected at most {PARTS_MAX}", self.other_parts.len()));
        }
        match self.owner(self.part) {
            None => return Some(format!("the order is for part {}, expected less than {parts}", self.part)),
            Some(owner) if (owner == me) == self.standby.is_some() => {
                let role = if self.standby.is_some() { "its standby" } else { "its owner" };
                return Some(format!("part {} belongs to {owner}: node {me} cannot be {role}", self.part));
            }
            Some(_) => {}
        }
        let ram_max = match &self.work {
            PartWork::Stage(_) => ram_beside_max(self.bytes_max),
            PartWork::Tile(_) => 0,
        };
        if self.ram > ram_max {
            return Some(format!("{} bytes of the part in RAM, expected at most {ram_max}", self.ram));
        }
        match &self.work {
            PartWork::Stage(stage) => stage.unsound(),
            PartWork::Tile(tile) => tile.unsound(self.standby),
        }
    }

    /// Content id of the data that the part is loaded from: the model's weights or the simulation.
    pub fn content(&self) -> ContentId {
        match &self.work {
            PartWork::Stage(stage) => stage.content,
            PartWork::Tile(tile) => tile.simulation.content,
        }
    }

    /// The downstream part that sends nothing back: the next stage. There may be no part of this number. `None` for
    /// tiles.
    pub fn downstream(&self, part: PartId) -> Option<PartId> {
        match &self.work {
            PartWork::Stage(_) => Some(part.after()),
            PartWork::Tile(_) => None,
        }
    }

    /// Parts that send to `part`: the previous stage, or the neighbouring tiles.
    pub fn upstream(&self, part: PartId) -> Vec<PartId> {
        match &self.work {
            PartWork::Stage(_) => part.before().into_iter().collect(),
            PartWork::Tile(tile) => tile.peers(part),
        }
    }
}

/// A participant's answer to an order: the part is loaded or kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The device that it is on.
    pub device: u8,
    /// Memory that it takes there, in bytes.
    pub bytes: u64,
    /// Bytes of a stage's experts in RAM.
    pub ram: u64,
    /// Pages that a stage has in RAM beside those of its device.
    pub ram_pages: u32,
    /// State that it holds.
    pub has: PartState,
}

impl Ready {
    /// What the part takes of its device's memory and of RAM.
    pub fn room(&self) -> Room {
        Room { memory: self.bytes, ram: self.ram }
    }
}

/// State that a part holds when it is ordered. The coordinator computes from it where the job resumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartState {
    /// A stage: cached positions, by request.
    Stage(Vec<Position>),
    /// A tile.
    Tile {
        /// Steps completed.
        step: u32,
        /// For each neighbour, the first step whose halos are still in the send log for it.
        kept: Vec<(PartId, u32)>,
    },
}

/// Where a part resumes, sent once all parts are ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resume {
    /// A stage: for each request, the number of positions that the next stage holds. This stage resends what follows.
    Stage(Vec<(RequestId, u32)>),
    /// A tile: steps completed by each tile of the grid, by part.
    Tile(Vec<u32>),
}

impl PartState {
    /// Cached positions, by request. Empty for a tile.
    pub fn positions(&self) -> &[Position] {
        match self {
            PartState::Stage(positions) => positions,
            PartState::Tile { .. } => &[],
        }
    }
}

impl Resume {
    /// For a `Go` that is repeated to a running part. The list of a stage is empty, so the stage resends nothing.
    pub fn repeated(&self) -> Resume {
        match self {
            Resume::Stage(_) => Resume::Stage(Vec::new()),
            Resume::Tile(at) => Resume::Tile(at.clone()),
        }
    }
}

/// A part's progress on its channels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cursors {
    /// The same cursor on all channels.
    All(u32),
    /// Cursor by channel. Channels that are not listed are at 0.
    Each(Vec<(u64, u32)>),
}

/// Result of a `Load` or a `Restore`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// Memory that it takes, in bytes: weights, caches and scratch, or cells.
    pub bytes: u64,
    /// Bytes of a stage's experts in RAM.
    pub ram: u64,
    /// Pages that a stage has in RAM beside those of its device.
    pub ram_pages: u32,
    /// The step of a tile's cells. `None` for a stage, and for a standby that waits for a snapshot.
    pub step: Option<u32>,
}

/// Work for the executor of a device. Runs of one part execute in order. Each is answered by `Input::Ran`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Id used in the answers.
    pub work: WorkId,
    /// Job id.
    pub job: JobId,
    /// Epoch of the placement.
    pub epoch: Epoch,
    /// The part.
    pub part: PartId,
    /// The device that holds it.
    pub device: u8,
    /// The task.
    pub task: Task,
}

/// What a run computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// A batch of items through a stage, in order. Their inputs are consumed.
    Batch(Vec<Item>),
    /// Time steps of a tile.
    Steps(TileWork),
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunResult {
    /// One result per item, in order.
    Batch {
        /// The results.
        results: Vec<ItemResult>,
        /// Time that the device computed them, in nanoseconds, without waits for other work.
        compute_ns: u64,
    },
    /// Result of time steps.
    Steps(TileResult),
}

/// A part that this node holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    /// Job id.
    pub job: JobId,
    /// The job's name.
    pub name: String,
    /// Epoch of the placement.
    pub epoch: Epoch,
    /// The part.
    pub part: PartId,
    /// The device that it is on, by its place in this node's advert.
    pub device: u8,
    /// Whether it is held as a standby.
    pub standby: bool,
    /// Memory that it takes, in bytes. `None` while it loads or after it failed.
    pub bytes: Option<u64>,
    /// Bytes of a stage's experts in RAM.
    pub ram: u64,
    /// What it computes.
    pub what: HeldWork,
}

/// What a [`HeldPart`] computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldWork {
    /// Layers of a model.
    Stage {
        /// Layers `start..end`.
        layers: Range<u32>,
    },
    /// A tile.
    Tile {
        /// Steps completed.
        step: u32,
        /// Total number of steps.
        steps: u32,
    },
}

/// Succession record: what a successor needs to take a job over, besides the order of its own part. The coordinator
/// publishes it to each successor when it changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// All parts, by part.
    pub parts: Vec<PartRecord>,
    /// State of the workload.
    pub program: ProgramRecord,
}

/// A part in a [`Record`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecord {
    /// Its owner's device.
    pub device: u8,
    /// Memory of that device that the plan allows it, in bytes.
    pub bytes: u64,
    /// Bytes of a stage's experts that lie in RAM there.
    pub ram: u64,
    /// Predicted nanoseconds per token or step on its owner.
    pub step_ns: u64,
    /// Its standby, if it has one.
    pub standby: Option<StandbyRecord>,
}

impl PartRecord {
    /// What it takes of its owner's device and RAM.
    pub fn room(&self) -> Room {
        Room { memory: self.bytes, ram: self.ram }
    }
}

impl StandbyRecord {
    /// Its device.
    pub fn place(&self) -> DeviceId {
        self.node.device(self.device)
    }

    /// What it takes of its device's memory and RAM, as the standby of `part`.
    pub fn room(&self, part: &PartRecord) -> Room {
        Room { memory: part.room().bytes().saturating_sub(self.ram), ram: self.ram }
    }
}

/// The standby in a [`PartRecord`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyRecord {
    /// Node id.
    pub node: NodeId,
    /// The node's device.
    pub device: u8,
    /// Bytes of a stage's experts that lie in RAM there. With the memory of its device it takes as many bytes as the owner.
    pub ram: u64,
    /// Its tier.
    pub tier: Tier,
    /// Whether it can take the part over.
    pub ready: bool,
    /// Snapshot interval, in milliseconds.
    pub snapshot_ms: u32,
}

/// State of the workload in a [`Record`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramRecord {
    /// Serving a model.
    Serve(Box<ServeRecord>),
    /// Stepping a grid.
    Steps(StepsRecord),
}

impl ProgramRecord {
    /// The step of the coordinator's last checkpoint. `None` for a model.
    pub fn checkpoint(&self) -> Option<u32> {
        match self {
            ProgramRecord::Serve(_) => None,
            ProgramRecord::Steps(steps) => steps.checkpoint,
        }
    }
}

impl Record {
    /// Owners and standbys of all parts.
    pub fn participants(&self, owners: &[NodeId]) -> BTreeSet<NodeId> {
        let standbys = self.parts.iter().filter_map(|part| part.standby).map(|standby| standby.node);
        owners.iter().copied().chain(standbys).collect()
    }

    /// The participants whose majority elects a successor: owners, and standbys that have held their part. A standby that
    /// was ordered a moment ago may not know of the job. If it counted, its silence could prevent a majority for ever.
    pub fn voters(&self, owners: &[NodeId]) -> BTreeSet<NodeId> {
        let standbys = self.parts.iter().filter_map(|part| part.standby).filter(|standby| standby.ready);
        owners.iter().copied().chain(standbys.map(|standby| standby.node)).collect()
    }
}

/// A job that its successor takes over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Takeover {
    /// Job id.
    pub job: JobId,
    /// Epoch under which it ran. Its issuer is the silent coordinator.
    pub epoch: Epoch,
    /// The order of one part that the successor holds.
    pub order: Box<Order>,
    /// The coordinator's succession record.
    pub record: Box<Record>,
    /// Step of the successor's copy of the coordinator's checkpoint, if it has one.
    pub checkpoint: Option<u32>,
    /// Token log of a served model.
    pub log: TokenLog,
}

/// Addresses of a peer to contact after a restart. The shell stores them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// Node id.
    pub node: NodeId,
    /// The `PeerId` behind `node`. The connection pins it.
    pub peer_id: Vec<u8>,
    /// Addresses at which its gossip socket was reached.
    pub gossip: Vec<SocketAddr>,
    /// Addresses at which its data socket was reached.
    pub data: Vec<SocketAddr>,
}

/// The payload of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Hidden rows or a halo, stored by the shell.
    Tensor(TensorId),
    /// Hidden rows of consecutive positions in several tensors, to be concatenated.
    Tensors(Vec<TensorId>),
    /// Token ids for the first stage.
    Tokens(Vec<u32>),
}

/// Predicted effect of moving a job to another placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictedChange {
    /// Nanoseconds per token or step under the present placement, on the mesh as it is now.
    pub before_ns: u64,
    /// Nanoseconds per token or step under the new placement.
    pub after_ns: u64,
    /// Weight bytes that nodes hold under the new placement and do not hold now. 0 for a simulation.
    pub bytes: u64,
}

/// Why a member is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// It left, or it is banned.
    Left,
    /// SWIM declared it failed.
    Failed,
}

/// Where the parts of a job are placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Stages in order: device and layers.
    Stages(Vec<(DeviceId, Range<u32>)>),
    /// Tiles of a grid.
    Tiles {
        /// Node and cells, by tile.
        tiles: Vec<(NodeId, Block)>,
        /// Halo depth: steps between two exchanges.
        depth: u32,
        /// The step from which the tiles start or resume.
        step: u32,
    },
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All work is done.
    Completed,
    /// A caller ended it.
    Cancelled,
    /// Another node coordinates it now. The text says why.
    Moved(String),
    /// It cannot continue. The text says why.
    Failed(String),
}

/// A job that a successor takes over, as its shell sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inherited {
    /// Serving a model.
    Serve {
        /// The model.
        model: ModelSpec,
    },
    /// Stepping a grid.
    Steps {
        /// The simulation.
        simulation: SimulationId,
        /// When to report, checkpoint and write outputs.
        schedule: steps::Schedule,
    },
}

/// Execution figures of a job by part, reported when it ends. Empty for a model.
pub type Figures = Vec<TileFigures>;
