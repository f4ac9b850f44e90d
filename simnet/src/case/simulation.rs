//! A simulation of a case, as data: how large it is, how it is guarded, and what becomes of it.
use crate::grids;
use crate::units;
use node_core::id::JobId;
use node_core::time::{Duration, Instant};
use node_core::work::steps::{GridSpec, Schedule};
use partitioner::Tier;
use partitioner::tiles::GridWork;
use serde::{Deserialize, Serialize};

/// One simulation. Its cells are 64-bit numbers under the rule of `grids.rs`, of which each takes a host 0.4 ms a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Simulation {
    /// When it is submitted.
    #[serde(with = "units::moment")]
    pub at: Instant,
    /// At which host: its first coordinator.
    pub host: u32,
    /// Cells along x, y and z.
    pub size: [u64; 3],
    /// Axes whose ends meet.
    pub periodic: [bool; 3],
    /// Steps in all.
    pub steps: u32,
    /// How its tiles are guarded.
    pub tier: Guarded,
    /// Steps between exchanges; the planner chooses where it is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    /// Steps from one checkpoint to the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<u32>,
    /// Steps from one report to the next.
    pub report_every: u32,
    /// Steps from one frame of each output to the next.
    pub outputs: Vec<u32>,
    /// MiB that a tile takes besides its cells.
    pub scratch_mib: u64,
    /// The submitter ends it after this time.
    #[serde(with = "units::optional", skip_serializing_if = "Option::is_none")]
    pub cancel_after: Option<Duration>,
}

/// How tiles are guarded against the loss of their nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guarded {
    /// By checkpoints only.
    None,
    /// By standbys that hold snapshots.
    Warm,
    /// By standbys that compute along.
    Hot,
}

impl Default for Simulation {
    fn default() -> Self {
        Simulation {
            at: Instant(0),
            host: 0,
            size: [12, 16, 1],
            periodic: [true, false, false],
            steps: 500,
            tier: Guarded::Hot,
            depth: None,
            checkpoint_every: Some(100),
            report_every: 50,
            outputs: Vec::new(),
            scratch_mib: 1,
            cancel_after: None,
        }
    }
}

impl Simulation {
    /// Whether it can be tried at all, on this number of hosts.
    pub(super) fn check(&self, hosts: u32) -> Result<(), String> {
        if self.host >= hosts {
            return Err(format!("a simulation is submitted at host {}, there are {hosts}, counted from 0", self.host));
        }
        let cells = self.size.iter().fold(1u64, |cells, &axis| cells.saturating_mul(axis));
        if cells == 0 || cells > CELLS_MAX || self.steps == 0 || self.steps > STEPS_MAX {
            return Err(format!("expected 1 to {CELLS_MAX} cells and 1 to {STEPS_MAX} steps of a simulation"));
        }
        let every = self.outputs.iter().chain(&self.checkpoint_every).chain([&self.report_every]);
        if every.into_iter().any(|every| *every == 0) || self.outputs.len() > OUTPUTS_MAX {
            return Err(format!("expected at most {OUTPUTS_MAX} outputs, and periods of at least one step"));
        }
        if self.depth.is_some_and(|depth| !(1..=DEPTH_MAX).contains(&depth)) || self.scratch_mib > SCRATCH_MIB_MAX {
            return Err(format!("expected a depth of 1 to {DEPTH_MAX} and at most {SCRATCH_MIB_MAX} MiB beside cells"));
        }
        Ok(())
    }

    /// What the submitter's shell would submit. The name of a simulation is its seed.
    pub fn spec(&self, job: JobId, seed: u64, resume: Option<u32>) -> GridSpec {
        GridSpec {
            job,
            name: format!("simulation {seed:x}"),
            simulation: grids::simulation(seed),
            work: self.work(),
            depth: self.depth,
            schedule: Schedule {
                steps: self.steps,
                report_every: self.report_every,
                checkpoint_every: self.checkpoint_every,
                outputs: self.outputs.clone(),
                looks: None,
            },
            tier: match self.tier {
                Guarded::None => Tier::None,
                Guarded::Warm => Tier::Warm,
                Guarded::Hot => Tier::Hot,
            },
            resume,
        }
    }

    /// What the planner counts with.
    pub fn work(&self) -> GridWork {
        GridWork {
            size: self.size,
            periodic: self.periodic,
            radius: 1,
            state_bits: 1 << 16,
            traffic_bits: 1 << 16,
            face_bits: 64,
            cell_bits: 64,
            align_x: 1,
            scratch_bytes: self.scratch_mib << 20,
            pass_steps: 1,
        }
    }

    /// Cells of the whole grid.
    pub fn cells(&self) -> u64 {
        self.size.iter().product()
    }
}

/// A run in one piece takes a checker a second then.
const CELLS_MAX: u64 = 4096;
const STEPS_MAX: u32 = 20_000;
const OUTPUTS_MAX: usize = 4;
const DEPTH_MAX: u32 = 16;
/// A terabyte.
const SCRATCH_MIB_MAX: u64 = 1 << 20;
