//! A simulation of a case as data: size, schedule, standby tier and cancellation.
use crate::grids;
use crate::units;
use node_core::id::JobId;
use node_core::time::{Duration, Instant};
use node_core::work::steps::{GridSpec, Schedule};
use partitioner::Tier;
use partitioner::tiles::GridWork;
use serde::{Deserialize, Serialize};

/// One simulation. Its cells are 64-bit numbers under the rule of `grids.rs`; a host takes 0.4 ms per cell and step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Simulation {
    /// When it is submitted.
    #[serde(with = "units::moment")]
    pub at: Instant,
    /// The host that receives it, its first coordinator.
    pub host: u32,
    /// Cells along x, y and z.
    pub size: [u64; 3],
    /// Periodic axes.
    pub periodic: [bool; 3],
    /// Number of steps.
    pub steps: u32,
    /// Standby tier of its tiles.
    pub tier: StandbyTier,
    /// Halo depth: steps between halo exchanges. The planner chooses it if it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    /// Checkpoint interval in steps; no checkpoints if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<u32>,
    /// Report interval in steps.
    pub report_every: u32,
    /// Frame interval of each output in steps.
    pub outputs: Vec<u32>,
    /// Scratch memory per tile, MiB.
    pub scratch_mib: u64,
    /// The submitter cancels it after this time.
    #[serde(with = "units::optional", skip_serializing_if = "Option::is_none")]
    pub cancel_after: Option<Duration>,
}

/// Standby tier of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StandbyTier {
    /// No standbys, only checkpoints.
    None,
    /// Standbys that hold snapshots.
    Warm,
    /// Standbys that compute the same steps.
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
            tier: StandbyTier::Hot,
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
    /// Checks all values against their bounds, for this number of hosts.
    pub(super) fn check(&self, hosts: u32) -> Result<(), String> {
        if self.host >= hosts {
            return Err(format!(
                "expected the host of a simulation from 0 to {}, found {}",
                hosts.saturating_sub(1),
                self.host
            ));
        }
        let cells = self.size.iter().fold(1u64, |cells, &axis| cells.saturating_mul(axis));
        if cells == 0 || cells > CELLS_MAX || self.steps == 0 || self.steps > STEPS_MAX {
            return Err(format!("expected a simulation of 1 to {CELLS_MAX} cells and 1 to {STEPS_MAX} steps"));
        }
        let every = self.outputs.iter().chain(&self.checkpoint_every).chain([&self.report_every]);
        if every.into_iter().any(|every| *every == 0) || self.outputs.len() > OUTPUTS_MAX {
            return Err(format!("expected at most {OUTPUTS_MAX} outputs, and periods of at least one step"));
        }
        if self.depth.is_some_and(|depth| !(1..=DEPTH_MAX).contains(&depth)) || self.scratch_mib > SCRATCH_MIB_MAX {
            return Err(format!(
                "expected a halo depth of 1 to {DEPTH_MAX} and at most {SCRATCH_MIB_MAX} MiB of scratch"
            ));
        }
        Ok(())
    }

    /// The job as a shell would submit it. The simulation id encodes the seed.
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
                StandbyTier::None => Tier::None,
                StandbyTier::Warm => Tier::Warm,
                StandbyTier::Hot => Tier::Hot,
            },
            resume,
        }
    }

    /// The costs that the planner uses.
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

/// Bounds the checker's reference run to about a second.
const CELLS_MAX: u64 = 4096;
const STEPS_MAX: u32 = 20_000;
const OUTPUTS_MAX: usize = 4;
const DEPTH_MAX: u32 = 16;
/// 1 TiB.
const SCRATCH_MIB_MAX: u64 = 1 << 20;
