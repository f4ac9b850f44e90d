//! A job as status pages and callers see it.
use super::lifecycle::{Job, Phase};
use super::part::Part;
use super::rebalance::Moved;
use crate::id::{ContentId, Epoch, JobId, NodeId, PartId};
use crate::work::steps::TileFigures;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use partitioner::Tier;
use partitioner::tiles::Block;

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waiting for the planner.
    Planning,
    /// Parts are being loaded.
    Loading,
    /// Parts run.
    Running,
    /// There is no plan; it waits for the mesh to change.
    Degraded,
}

/// A job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView {
    /// Which.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// Present epoch.
    pub epoch: Epoch,
    /// Where it stands.
    pub state: JobState,
    /// Why it is degraded, if it is.
    pub reason: Option<String>,
    /// Predicted nanoseconds of a token or of a step; 0 while there is no plan.
    pub step_ns: u64,
    /// Its parts, in order; empty while there is no plan.
    pub parts: Vec<PartView>,
    /// What it computes.
    pub program: ProgramView,
}

/// What a job computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramView {
    /// It serves a model.
    Serve {
        /// Model content.
        content: ContentId,
        /// Its last move to a better placement.
        moved: Option<Moved>,
        /// Tokens of context per request.
        context: u32,
        /// Requests that can run at once.
        sequences: u32,
        /// Requests in slots.
        running: usize,
        /// Requests in the queue.
        waiting: usize,
    },
    /// It steps a grid.
    Steps {
        /// Steps that all tiles have made.
        step: u32,
        /// Steps in all.
        steps: u32,
        /// Steps between exchanges.
        depth: u32,
        /// The last checkpoint.
        checkpoint: Option<u32>,
    },
}

/// A part of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartView {
    /// Where it is.
    pub owner: NodeId,
    /// Bytes that its owner reported to hold; none until it is loaded.
    pub bytes: Option<u64>,
    /// Bytes that the plan allows it.
    pub bytes_max: u64,
    /// Predicted nanoseconds of a token or of a step.
    pub step_ns: u64,
    /// What it is.
    pub what: WhatView,
    /// Its standby, or that no node can be one.
    pub standby: Option<StandbyView>,
}

/// What a part is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhatView {
    /// Layers `start..end` of a model.
    Stage(Range<u32>),
    /// A tile of a grid.
    Tile {
        /// Its cells.
        block: Block,
        /// Steps made.
        step: u32,
        /// What it has spent.
        figures: TileFigures,
    },
}

/// A part's standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandbyView {
    /// Which node; none where no node can be one.
    pub node: Option<NodeId>,
    /// How ready it is meant to be. Hot is said only of one that is.
    pub tier: Tier,
    /// It has what it needs to take the part over: weights in memory, a tile's cells.
    pub resident: bool,
    /// It has what its owner has.
    pub current: bool,
    /// Of a tile: the step that it has.
    pub step: Option<u32>,
    /// Predicted nanoseconds from the loss being noticed to the next token, if predicted.
    pub stall_ns: Option<u64>,
}

impl Job {
    pub(super) fn view(&self) -> JobView {
        let parts = self.parts.iter().enumerate();
        JobView {
            job: self.id,
            name: self.name.clone(),
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
            bytes: self.bytes_at(number, part.owner),
            bytes_max: part.bytes,
            step_ns: part.step_ns,
            what: self.workload.part_view(number),
            standby: self.workload.standby_view(number, part.standby.as_ref()),
        }
    }
}
