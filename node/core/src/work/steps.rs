//! The vocabulary of stepping a grid: the simulation, a tile's order, its work and results, and what the job reports.
use crate::id::{ContentId, JobId, PartId, TensorId};
use crate::limits::{GRID_STEPS_MAX, SIMULATION_BYTES_MAX};
use alloc::collections::BTreeSet;
use alloc::{format, string::String, vec::Vec};
use partitioner::Tier;
use partitioner::tiles::{self, Block, DEPTH_MAX, GridWork, TILES_MAX, TileLink};
use serde::{Deserialize, Serialize};

/// A packed simulation by its content. Its bytes travel between the shells, on the plane of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimulationId {
    /// blake3 of the packed bytes.
    pub content: ContentId,
    /// How many there are.
    pub bytes: u64,
}

/// A simulation as the submitter's shell describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridSpec {
    /// Minted by the shell, which files what comes of it under this name.
    pub job: JobId,
    /// Name for people.
    pub name: String,
    /// Which simulation: the shells fetch it.
    pub simulation: SimulationId,
    /// Costs for the planner.
    pub work: GridWork,
    /// Steps between exchanges, as asked for; chosen where it is not.
    pub depth: Option<u32>,
    /// What is made when.
    pub schedule: Schedule,
    /// The tier of its standbys: `None`, `Warm` or `Hot`.
    pub tier: Tier,
    /// Start from the checkpoint of this step, which the submitter has on disk.
    pub resume: Option<u32>,
}

/// What is made at which steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Steps in all.
    pub steps: u32,
    /// Steps from one report (totals, whether all is finite) to the next.
    pub report_every: u32,
    /// Steps from one checkpoint to the next.
    pub checkpoint_every: Option<u32>,
    /// Steps from one frame of each output to the next; 0: it is not wanted.
    pub outputs: Vec<u32>,
    /// After the first and up to the second all are reported: which of them was the first that is not finite is searched for.
    pub looks: Option<(u32, u32)>,
}

/// A state that was put aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum SaveKind {
    /// All cells, for the submitter's disk.
    Checkpoint,
    /// All cells, for a standby.
    Snapshot,
    /// What an output shows, for the submitter.
    Output(u16),
}

/// Something to do when a step has been made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stop {
    /// After this step.
    pub step: u32,
    /// What.
    pub what: StopKind,
}

/// What a stop is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StopKind {
    /// Totals; with the state hash after the last step.
    Report {
        /// With the state hash.
        hash: bool,
    },
    /// Put something aside.
    Save(SaveKind),
}

impl Schedule {
    /// What is to be made after `from` and until `to`, in order; with `first` also at `from` itself, where a run begins:
    /// there no checkpoint is needed.
    pub fn stops(&self, from: u32, to: u32, first: bool) -> Vec<Stop> {
        let mut stops = Vec::new();
        let due = |step: u32, every: u32| every > 0 && step.is_multiple_of(every);
        let mut step = if first { from } else { from.saturating_add(1) };
        while step <= to {
            let last = step == self.steps;
            let begins = first && step == from;
            let looks = self.looks.is_some_and(|(after, until)| after < step && step <= until);
            // A checkpoint that is not finite is no use to anybody.
            let saves = self.checkpoint_every.is_some_and(|every| due(step, every));
            if last || due(step, self.report_every) || saves || begins || looks {
                stops.push(Stop { step, what: StopKind::Report { hash: last } });
            }
            if (saves || last && self.checkpoint_every.is_some()) && !begins {
                stops.push(Stop { step, what: StopKind::Save(SaveKind::Checkpoint) });
            }
            for (output, &every) in self.outputs.iter().enumerate() {
                if due(step, every) {
                    stops.push(Stop { step, what: StopKind::Save(SaveKind::Output(output as u16)) });
                }
            }
            step += 1;
        }
        stops
    }

    /// The last step before this one after which it is looked whether all is finite.
    pub fn look_before(&self, step: u32) -> u32 {
        let before = |every: u32| step.saturating_sub(1).checked_div(every).map_or(0, |times| times * every);
        before(self.report_every).max(self.checkpoint_every.map_or(0, before))
    }

    /// Whether a report after this step was asked for: others are only to see whether all is finite.
    pub fn is_reported(&self, step: u32) -> bool {
        step == self.steps || self.report_every > 0 && step.is_multiple_of(self.report_every)
    }

    fn unsound(&self) -> Option<String> {
        if self.steps > GRID_STEPS_MAX {
            Some(format!("{} steps, at most {GRID_STEPS_MAX} are possible", self.steps))
        } else if self.report_every == 0 || self.checkpoint_every == Some(0) {
            Some(String::from("something is to be made every 0 steps: 1 is the least"))
        } else if self.outputs.len() > OUTPUTS_MAX {
            Some(format!("{} outputs, at most {OUTPUTS_MAX} are possible", self.outputs.len()))
        } else {
            None
        }
    }
}

/// Outputs of a job: each costs a pass over the tile.
const OUTPUTS_MAX: usize = 64;

/// Where a tile gets its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TileStart {
    /// From the simulation's initial state.
    Initial,
    /// From the coordinator's checkpoint of this step.
    Checkpoint {
        /// Steps made by then.
        step: u32,
    },
    /// It has them: as the owner it was, or as the standby it was.
    Continue,
    /// From a snapshot of the owner's, as its standby; or it has them.
    Snapshot,
}

/// A tile as the coordinator orders it: its part number names its block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileOrder {
    /// Which simulation. The shell fetches it from the coordinator or an owner before it answers the order.
    pub simulation: SimulationId,
    /// Size, periodic axes and costs.
    pub work: GridWork,
    /// Steps between exchanges.
    pub depth: u32,
    /// What is made when.
    pub schedule: Schedule,
    /// The cells of each tile.
    pub blocks: Vec<Block>,
    /// Where the cells come from.
    pub start: TileStart,
    /// Predicted nanoseconds of computing a step.
    pub step_ns: u64,
    /// For a warm standby: milliseconds from one snapshot to the next.
    pub snapshot_ms: u32,
}

impl TileOrder {
    /// The cells of a tile. The order has been checked: there is such a tile.
    pub fn block(&self, part: PartId) -> &Block {
        &self.blocks[part.index()]
    }

    /// The neighbours of a tile.
    pub fn links(&self, part: PartId) -> Vec<TileLink> {
        let reach = u64::from(self.depth) * u64::from(self.work.radius);
        tiles::links(self.work.size, self.work.periodic, &self.blocks, part.index(), reach)
    }

    /// The tiles beside a tile, each once.
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
            return Some(format!("a cut into {} tiles, expected 1 to {TILES_MAX}", self.blocks.len()));
        }
        if self.simulation.bytes > SIMULATION_BYTES_MAX {
            return Some(format!("a simulation of {} bytes, at most {SIMULATION_BYTES_MAX}", self.simulation.bytes));
        }
        if self.depth == 0 || self.depth > DEPTH_MAX || self.work.radius == 0 || self.work.radius > DEPTH_MAX {
            return Some(format!("a halo of {} steps of radius {}", self.depth, self.work.radius));
        }
        if self.work.size.iter().any(|&cells| cells == 0 || cells > tiles::AXIS_MAX) {
            return Some(String::from("a grid without cells, or with too many"));
        }
        if !tiles::covers(self.work.size, &self.blocks) {
            return Some(String::from("a cut whose tiles do not cover the grid once"));
        }
        if standby.is_none() && self.start == TileStart::Snapshot {
            return Some(String::from("an owner that waits for a snapshot"));
        }
        self.schedule.unsound()
    }
}

/// Steps of a tile, for the executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileWork {
    /// Steps made before.
    pub from: u32,
    /// Steps made afterwards; the same where only what is there is to be reported.
    pub to: u32,
    /// The neighbours' halos of step `from`, by link; consumed.
    pub halos_in: Vec<(u16, TensorId)>,
    /// Names for the halos of step `to`, by link: to be made first, and announced by `Input::Halos`.
    pub halos_out: Vec<(u16, TensorId)>,
    /// What is to be made on the way.
    pub stops: Vec<Stop>,
}

/// What a successor needs to go on stepping a grid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepsRecord {
    /// The tier of its standbys.
    pub tier: Tier,
    /// Steps between exchanges, as the submitter asked for them.
    pub depth: Option<u32>,
    /// Predicted nanoseconds of a step.
    pub step_ns: u64,
    /// Where the present placement began.
    pub start: TileStart,
    /// The last checkpoint that the coordinator has.
    pub checkpoint: Option<u32>,
    /// Of each tile: thousandths of its node's speed by which its time was predicted; 0 where it was planned for another node.
    pub rates: Vec<u32>,
}

/// What becomes of a simulation, for callers, logs and pages.
#[expect(missing_docs, reason = "fields of variants are named after what they are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepsEvent {
    /// All tiles run from here on, having made this many steps: after each new placement.
    Runs { step: u32 },
    /// All tiles have made so many steps.
    Progress { step: u32 },
    /// After this step, all tiles together.
    Report { step: u32, report: Report },
    /// A checkpoint of this step is on disk.
    Checkpoint { step: u32 },
    /// What it makes cannot be written, or something else holds it up; it tries again.
    Waiting { reason: String },
}

/// What a tile says after a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The sum of each field, and what else the simulation wants added up, in units that add up the same in any order.
    pub totals: Vec<i128>,
    /// The tile's part of the state hash, to be added.
    pub hash: Option<u128>,
    /// The first cell that is infinite or no number, and its field.
    pub not_finite: Option<([u64; 3], u16)>,
}

/// What a tile has spent since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileFigures {
    /// Nanoseconds in which the executor worked for it.
    pub compute_ns: u64,
    /// Nanoseconds from its strips being ready to its neighbours' being here.
    pub halo_ns: u64,
    /// Of these, nanoseconds in which it had nothing to compute.
    pub wait_ns: u64,
    /// Bytes of strips given to neighbours on other nodes.
    pub sent_bytes: u64,
    /// Bytes of copies of these given to standbys.
    pub copied_bytes: u64,
}

/// What an executor made of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileMade {
    /// Nanoseconds it worked; a device that is told ahead, on the run before.
    pub compute_ns: u64,
    /// Nanoseconds for which a device was still at the run before when that was answered, and this one not begun.
    pub overlap_ns: u64,
    /// Reports, by step.
    pub reports: Vec<(u32, Report)>,
    /// States put aside, and their bytes.
    pub saves: Vec<(u32, SaveKind, u64)>,
}
