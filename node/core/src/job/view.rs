//! Views of a job, for status pages and callers.
use super::lifecycle::{Job, Phase};
use super::part::Part;
use super::rebalance::Moved;
use crate::id::{ContentId, Epoch, JobId, NodeId, PartId, RequestId};
use crate::work::serve::RowFormat;
use crate::work::steps::TileFigures;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use partitioner::Tier;
use partitioner::tiles::Block;

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waiting for the planner.
    Planning,
    /// Parts are being loaded.
    Loading,
    /// Parts run.
    Running,
    /// There is no plan. The job waits for the mesh to change.
    Degraded,
}

/// A job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView {
    /// Job id.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// The first job of its model, if this one is a replica.
    pub replica_of: Option<JobId>,
    /// The present epoch.
    pub epoch: Epoch,
    /// State.
    pub state: JobState,
    /// Why it is degraded, if it is.
    pub reason: Option<String>,
    /// Predicted nanoseconds per token or step; 0 while there is no plan.
    pub step_ns: u64,
    /// Its parts, in order; empty while there is no plan.
    pub parts: Vec<PartView>,
    /// What it computes.
    pub program: ProgramView,
}

/// What a job computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramView {
    /// Serving a model.
    Serve {
        /// Content id of the model.
        content: ContentId,
        /// The last move to a better placement.
        moved: Option<Moved>,
        /// Context length per request, in tokens.
        context: u32,
        /// Number of whole contexts that the cache has room for.
        sequences: u32,
        /// Encoding of the rows between its stages.
        row: RowFormat,
        /// Free pages of the cache, and all of them.
        pages: (u32, u32),
        /// Ended requests that stay cached.
        resting: Vec<RequestId>,
        /// Draft tokens so far, and those of them that were right.
        drafts: (u64, u64),
        /// Those of a draft model among them.
        model_drafts: (u64, u64),
        /// Running requests.
        running: usize,
        /// Queued requests.
        waiting: usize,
    },
    /// Stepping a grid.
    Steps {
        /// Steps completed by all tiles.
        step: u32,
        /// Total number of steps.
        steps: u32,
        /// Halo depth: steps between exchanges.
        depth: u32,
        /// Step of the last checkpoint.
        checkpoint: Option<u32>,
    },
}

/// A part of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartView {
    /// Its owner.
    pub owner: NodeId,
    /// Its owner's device, by its place in the node's advert.
    pub device: u8,
    /// Bytes that its owner reported to hold. `None` until it is loaded.
    pub bytes: Option<u64>,
    /// Memory that the plan allows it, in bytes.
    pub bytes_max: u64,
    /// Bytes of a stage's experts that lie in RAM by the plan.
    pub ram: u64,
    /// Predicted nanoseconds per token or step.
    pub step_ns: u64,
    /// Share of the last second that a stage computed, of 1000, if requests ran all that time.
    pub busy: Option<u32>,
    /// What it computes.
    pub what: WhatView,
    /// Its standby. Present without a node if no node can be the standby.
    pub standby: Option<StandbyView>,
}

/// What a part computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhatView {
    /// Layers `start..end` of a model.
    Stage(Range<u32>),
    /// A tile of a grid.
    Tile {
        /// Its cells.
        block: Block,
        /// Steps completed.
        step: u32,
        /// Execution figures.
        figures: TileFigures,
    },
}

/// A part's standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandbyView {
    /// Node id. `None` if no node can be the standby.
    pub node: Option<NodeId>,
    /// The node's device, by its place in the node's advert.
    pub device: u8,
    /// Tier: of a stage the present one, so that `Hot` is current; of a tile the planned one.
    pub tier: Tier,
    /// Whether it has what it needs to take the part over: weights in memory, or a tile's cells.
    pub resident: bool,
    /// Whether its state counts as current, so that it can take over.
    pub current: bool,
    /// Step of a tile's standby, once it has cells.
    pub step: Option<u32>,
    /// Predicted nanoseconds from the detection of the loss to the next token, if predicted.
    pub stall_ns: Option<u64>,
}

impl Job {
    pub(super) fn view(&self) -> JobView {
        let parts = self.parts.iter().enumerate();
        JobView {
            job: self.id,
            name: self.name.clone(),
            replica_of: None,
            epoch: self.epoch,
            state: match self.phase {
                Phase::Planning { .. } => JobState::Planning,
                Phase::Preparing { .. } => JobState::Loading,
                Phase::Running => JobState::Running,
                Phase::Degraded { .. } => JobState::Degraded,
            },
            reason: self.degraded_reason(),
            step_ns: if self.parts.is_empty() { 0 } else { self.workload.step_ns() },
            parts: parts.map(|(at, part)| self.part_view(PartId::of(at), part)).collect(),
            program: self.workload.view(self.rebalance.last()),
        }
    }

    fn part_view(&self, number: PartId, part: &Part) -> PartView {
        PartView {
            owner: part.owner,
            device: part.device,
            bytes: self.bytes_at(number, part.owner),
            bytes_max: part.room.memory,
            ram: part.room.ram,
            step_ns: part.step_ns,
            busy: self.workload.busy(number),
            what: self.workload.part_view(number),
            standby: self.workload.standby_view(number, part.standby.as_ref()),
        }
    }
}
