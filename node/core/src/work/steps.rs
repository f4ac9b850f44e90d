//! Vocabulary of stepping a grid: the simulation, orders of tiles, runs and their results, and the job's reports.
use crate::id::{ContentId, JobId, PartId, TensorId};
use crate::limits::{GRID_STEPS_MAX, SIMULATION_BYTES_MAX};
use alloc::collections::BTreeSet;
use alloc::{format, string::String, vec::Vec};
use partitioner::Tier;
use partitioner::tiles::{self, Block, DEPTH_MAX, GridWork, TILES_MAX, TileLink};
use serde::{Deserialize, Serialize};

/// A packed simulation, by content. The shells transfer its bytes as they transfer weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimulationId {
    /// blake3 hash of the packed bytes.
    pub content: ContentId,
    /// Number of packed bytes.
    pub bytes: u64,
}

/// A simulation, as the submitter's shell describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridSpec {
    /// Issued by the shell, which stores the results under this id.
    pub job: JobId,
    /// Human-readable name.
    pub name: String,
    /// The simulation. The shells fetch it by content.
    pub simulation: SimulationId,
    /// Costs, for the planner.
    pub work: GridWork,
    /// Halo depth (steps between exchanges) if the submitter fixes it. The planner chooses it otherwise.
    pub depth: Option<u32>,
    /// When to report, checkpoint and write outputs.
    pub schedule: Schedule,
    /// The tier of its standbys: `None`, `Warm` or `Hot`.
    pub tier: Tier,
    /// Start from the checkpoint of this step, which the submitter has on disk.
    pub resume: Option<u32>,
}

/// When to report, checkpoint and write outputs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Total number of steps.
    pub steps: u32,
    /// Steps between reports (totals, NaN check).
    pub report_every: u32,
    /// Steps between checkpoints.
    pub checkpoint_every: Option<u32>,
    /// Steps between frames, by output; 0 if the output is not requested.
    pub outputs: Vec<u32>,
    /// Range `(after, until]`: every step is reported, to find the first step with a value that is not finite.
    pub looks: Option<(u32, u32)>,
}

/// Kind of a saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum SaveKind {
    /// All cells, for the coordinator's disk.
    Checkpoint,
    /// All cells, for a standby.
    Snapshot,
    /// One output, for the coordinator.
    Output(u16),
}

/// An action that is due after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Action {
    /// The step.
    pub step: u32,
    /// The action.
    pub what: ActionKind,
}

/// The action of a [`Stop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ActionKind {
    /// Report totals and check for NaN.
    Report {
        /// Include the state hash: after the last step.
        hash: bool,
    },
    /// Save a state.
    Save(SaveKind),
}

impl Schedule {
    /// Actions due after steps in `from + 1..=to`, in order. With `first` a run starts at `from`: this step is
    /// included, except for its checkpoint.
    pub fn stops(&self, from: u32, to: u32, first: bool) -> Vec<Action> {
        let mut stops = Vec::new();
        let due = |step: u32, every: u32| every > 0 && step.is_multiple_of(every);
        let mut step = if first { from } else { from.saturating_add(1) };
        while step <= to {
            let last = step == self.steps;
            let begins = first && step == from;
            let looks = self.looks.is_some_and(|(after, until)| after < step && step <= until);
            // A report checks for NaN. Every checkpoint needs one, because a state with NaN is useless.
            let saves = self.checkpoint_every.is_some_and(|every| due(step, every));
            if last || due(step, self.report_every) || saves || begins || looks {
                stops.push(Action { step, what: ActionKind::Report { hash: last } });
            }
            if (saves || last && self.checkpoint_every.is_some()) && !begins {
                stops.push(Action { step, what: ActionKind::Save(SaveKind::Checkpoint) });
            }
            for (output, &every) in self.outputs.iter().enumerate() {
                if due(step, every) {
                    stops.push(Action { step, what: ActionKind::Save(SaveKind::Output(output as u16)) });
                }
            }
            step += 1;
        }
        stops
    }

    /// The last step before this one after which the fields are checked for NaN.
    pub fn last_check_before(&self, step: u32) -> u32 {
        let before = |every: u32| step.saturating_sub(1).checked_div(every).map_or(0, |times| times * every);
        before(self.report_every).max(self.checkpoint_every.map_or(0, before))
    }

    /// Whether the submitter asked for a report after this step. Other reports only check for NaN.
    pub fn is_reported(&self, step: u32) -> bool {
        step == self.steps || self.report_every > 0 && step.is_multiple_of(self.report_every)
    }

    fn unsound(&self) -> Option<String> {
        if self.steps > GRID_STEPS_MAX {
            Some(format!("{} steps, expected at most {GRID_STEPS_MAX}", self.steps))
        } else if self.report_every == 0 || self.checkpoint_every == Some(0) {
            Some(String::from("an interval of 0 steps between reports or checkpoints, expected at least 1"))
        } else if self.outputs.len() > OUTPUTS_MAX {
            Some(format!("{} outputs, expected at most {OUTPUTS_MAX}", self.outputs.len()))
        } else {
            None
        }
    }
}

/// Outputs per job. Each costs a pass over the tile.
const OUTPUTS_MAX: usize = 64;

/// Where a tile's cells come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TileStart {
    /// From the simulation's initial state.
    Initial,
    /// From the coordinator's checkpoint of this step.
    Checkpoint {
        /// Steps completed by then.
        step: u32,
    },
    /// The node has them, as the tile's owner or standby under an earlier placement.
    Continue,
    /// For a standby: from a snapshot of the owner, unless the node has cells.
    Snapshot,
}

/// A tile, as the coordinator orders it. The part number selects its block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileOrder {
    /// The simulation. The shell fetches it from the coordinator or an owner before it answers the order.
    pub simulation: SimulationId,
    /// Grid size, periodic axes and costs.
    pub work: GridWork,
    /// Halo depth: steps between exchanges.
    pub depth: u32,
    /// When to report, checkpoint and write outputs.
    pub schedule: Schedule,
    /// Cells of each tile.
    pub blocks: Vec<Block>,
    /// Where the cells come from.
    pub start: TileStart,
    /// Predicted nanoseconds of computation per step.
    pub step_ns: u64,
    /// Snapshot interval of a warm standby, in milliseconds.
    pub snapshot_ms: u32,
}

impl TileOrder {
    /// Cells of a tile. The order is valid, so the tile exists.
    pub fn block(&self, part: PartId) -> &Block {
        &self.blocks[part.index()]
    }

    /// Links of a tile to its neighbours.
    pub fn links(&self, part: PartId) -> Vec<TileLink> {
        let reach = u64::from(self.depth) * u64::from(self.work.radius);
        tiles::links(self.work.size, self.work.periodic, &self.blocks, part.index(), reach)
    }

    /// Neighbouring tiles, each once.
    pub fn peers(&self, part: PartId) -> Vec<PartId> {
        let peers: BTreeSet<PartId> = self.links(part).iter().map(|link| PartId(link.peer)).collect();
        peers.into_iter().collect()
    }

    pub(super) fn is_same_cut(&self, other: &TileOrder) -> bool {
        self.depth == other.depth
            && self.work == other.work
            && self.simulation == other.simulation
            && self.blocks == other.blocks
    }

    pub(super) fn unsound(&self, standby: Option<Tier>) -> Option<String> {
        if self.blocks.is_empty() || self.blocks.len() > TILES_MAX {
            return Some(format!("a partition into {} tiles, expected 1 to {TILES_MAX}", self.blocks.len()));
        }
        if self.simulation.bytes > SIMULATION_BYTES_MAX {
            return Some(format!("a simulation of {} bytes, at most {SIMULATION_BYTES_MAX}", self.simulation.bytes));
        }
        if self.depth == 0 || self.depth > DEPTH_MAX || self.work.radius == 0 || self.work.radius > DEPTH_MAX {
            return Some(format!(
                "a halo depth of {} steps and a radius of {}, expected 1 to {DEPTH_MAX}",
                self.depth, self.work.radius
            ));
        }
        if self.work.size.iter().any(|&cells| cells == 0 || cells > tiles::AXIS_MAX) {
            return Some(String::from("a grid with an axis that has no cells or too many"));
        }
        if !tiles::covers(self.work.size, &self.blocks) {
            return Some(String::from("tiles that do not cover the grid exactly once"));
        }
        if standby.is_none() && self.start == TileStart::Snapshot {
            return Some(String::from("an owner that starts from a snapshot: only a standby can"));
        }
        self.schedule.unsound()
    }
}

/// Steps of a tile, for the executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileWork {
    /// Steps completed before the run.
    pub from: u32,
    /// Steps completed after the run. Equal to `from` if the run only reports or saves the present cells.
    pub to: u32,
    /// The neighbours' halos of step `from`, by link. Consumed.
    pub halos_in: Vec<(u16, TensorId)>,
    /// Ids of the halos of step `to`, by link. They are computed first and announced by `Input::Halos`.
    pub halos_out: Vec<(u16, TensorId)>,
    /// Actions due during the run.
    pub stops: Vec<Action>,
}

/// Succession record of a simulation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepsRecord {
    /// The tier of its standbys.
    pub tier: Tier,
    /// Halo depth, if the submitter fixed it.
    pub depth: Option<u32>,
    /// Predicted nanoseconds per step.
    pub step_ns: u64,
    /// Where the cells of the present placement came from.
    pub start: TileStart,
    /// The coordinator's last checkpoint.
    pub checkpoint: Option<u32>,
    /// For each tile, the rate that its predicted time assumes, in thousandths of the node's nominal speed; 0 if the
    /// tile was planned for another node.
    pub rates: Vec<u32>,
}

/// Progress of a simulation, for callers, logs and status pages.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepsEvent {
    /// All tiles run from this step on. Sent after each new placement.
    Runs { step: u32 },
    /// All tiles have completed this step.
    Progress { step: u32 },
    /// Report after this step, over all tiles.
    Report { step: u32, report: Report },
    /// A checkpoint of this step is on disk.
    Checkpoint { step: u32 },
    /// The job is delayed, for example because its results cannot be written. It retries.
    Waiting { reason: String },
}

/// A tile's report after a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The sum of each field, and further sums that the simulation defines. Integers, so that the order of addition
    /// does not matter.
    pub totals: Vec<i128>,
    /// The tile's contribution to the state hash. Contributions are added.
    pub hash: Option<u128>,
    /// The first cell with a value that is not finite (NaN or infinite), and the field.
    pub not_finite: Option<([u64; 3], u16)>,
}

/// Execution figures of a tile since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileFigures {
    /// Nanoseconds that the executor worked for it.
    pub compute_ns: u64,
    /// Nanoseconds from its own halos being computed to its neighbours' halos being here.
    pub halo_ns: u64,
    /// Part of `halo_ns` in which the executor had nothing to compute for it.
    pub wait_ns: u64,
    /// Bytes of halos sent to the owners of neighbours.
    pub sent_bytes: u64,
    /// Bytes of halos sent to the standbys of neighbours.
    pub copied_bytes: u64,
}

/// Result of a tile's run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileResult {
    /// Nanoseconds that the executor worked. On a device that works asynchronously: on the previous run.
    pub compute_ns: u64,
    /// Nanoseconds between the answer to the previous run and the start of this one in which the device still computed
    /// the previous one.
    pub overlap_ns: u64,
    /// Reports, by step.
    pub reports: Vec<(u32, Report)>,
    /// Saved states: step, kind and bytes.
    pub saves: Vec<(u32, SaveKind, u64)>,
}
