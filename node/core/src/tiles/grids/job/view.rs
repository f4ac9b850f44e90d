//! A simulation as people and programs see it.
use super::{GridJob, Phase};
use crate::id::{Epoch, JobId, NodeId};
use crate::work::steps::TileFigures;
use alloc::string::String;
use alloc::vec::Vec;
use partitioner::tiles::Block;

/// What a grid job is doing, in a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GridState {
    /// A cut is looked for, or agreed on.
    Planning,
    /// Tiles are loaded.
    Loading,
    /// Steps are made.
    Running,
    /// It cannot go on now, and why.
    Degraded(String),
}

/// A grid job, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridJobView {
    /// Its id.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// Under which placement.
    pub epoch: Epoch,
    /// What it is doing.
    pub state: GridState,
    /// Steps that all tiles have made.
    pub step: u32,
    /// Steps in all.
    pub steps: u32,
    /// Steps between exchanges.
    pub depth: u32,
    /// Predicted nanoseconds of a step.
    pub step_ns: u64,
    /// The last checkpoint.
    pub checkpoint: Option<u32>,
    /// Its tiles.
    pub tiles: Vec<TileView>,
}

/// A tile of a grid job, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileView {
    /// Who computes it.
    pub owner: NodeId,
    /// Which cells.
    pub block: Block,
    /// Bytes it takes.
    pub bytes: u64,
    /// Steps made.
    pub step: u32,
    /// What it has spent.
    pub figures: TileFigures,
    /// Who stands by, and the step of what it has.
    pub standby: Option<(NodeId, Option<u32>)>,
}

impl GridJob {
    pub(in crate::tiles::grids) fn view(&self) -> GridJobView {
        GridJobView {
            job: self.spec.job,
            name: self.spec.name.clone(),
            epoch: self.epoch,
            state: match &self.phase {
                Phase::Planning { .. } => GridState::Planning,
                Phase::Preparing { .. } => GridState::Loading,
                Phase::Running => GridState::Running,
                Phase::Degraded { reason, .. } => GridState::Degraded(reason.clone()),
            },
            step: self.step(),
            steps: self.spec.schedule.steps,
            depth: self.depth,
            step_ns: self.step_ns,
            checkpoint: self.checkpoint,
            tiles: self
                .tiles
                .iter()
                .map(|tile| TileView {
                    owner: tile.owner,
                    block: tile.block,
                    bytes: tile.bytes,
                    step: tile.step,
                    figures: tile.figures,
                    standby: tile.standby.map(|standby| (standby.node, standby.step)),
                })
                .collect(),
        }
    }
}
