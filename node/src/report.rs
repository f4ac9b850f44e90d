//! Reports on simulations and their plans: what the API sends as JSON, and what the commands read.
//!
//! The order of the fields is their order in the JSON.
use serde::{Deserialize, Serialize};
use std::fmt;

/// A report on a simulation.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum SimulationReport {
    /// From its coordinator, or from a member that asked the coordinator.
    Run(Box<RunReport>),
    /// From a node that holds tiles of it and has no answer of the coordinator.
    Held(HeldReport),
    /// From the node that it was submitted to, which has restarted; no member has taken the simulation over.
    Lost(LostReport),
}

/// The progress or the end of a simulation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunReport {
    /// Job id, 16 hexadecimal digits.
    pub job: String,
    /// The job file's name for it.
    pub name: String,
    /// The rule.
    pub rule: String,
    /// Cells along each axis.
    pub size: Vec<usize>,
    /// Its state.
    pub state: RunState,
    /// Why it ended before its last step.
    pub error: Option<String>,
    /// What it waits for.
    pub waiting: Option<String>,
    /// Steps that all tiles have completed.
    pub step: u32,
    /// Steps of the job.
    pub steps: u64,
    /// The step at which it began.
    pub from_step: u32,
    /// Halo depth: steps between halo exchanges.
    pub depth: u32,
    /// Seconds since its first step.
    pub seconds: f64,
    /// Predicted seconds to its end.
    pub seconds_left: Option<f64>,
    /// Steps per second since its first step.
    pub steps_per_s: f64,
    /// Steps per second over the last few seconds; `None` once it has ended.
    pub steps_per_s_now: Option<f64>,
    /// The planner's prediction.
    pub predicted_steps_per_s: Option<f64>,
    /// Million cell updates per second.
    pub mlups: f64,
    /// Cell updates per second.
    pub cells_per_s: f64,
    /// Effective memory bandwidth: gigabytes of state read and written per second.
    pub t_eff_gb_s: f64,
    /// Its share of the memory bandwidth that the nodes measured.
    pub share_of_node_bandwidth: Option<f64>,
    /// Bytes of halos sent to the owners of neighbours.
    pub halo_bytes: u64,
    /// Bytes of halos sent to the standbys of neighbours.
    pub standby_bytes: u64,
    /// Share of the communication hidden behind computation.
    pub communication_hidden: Option<f64>,
    /// Number of nodes lost.
    pub losses: u32,
    /// The longest interruption, milliseconds.
    pub longest_stall_ms: f64,
    /// Sums of fields.
    pub totals: Vec<TotalReport>,
    /// The force on solid cells, if the job requests it.
    pub force: Option<ForceReport>,
    /// Step of the last checkpoint on disk.
    pub checkpoint: Option<u32>,
    /// The folder of outputs and checkpoints.
    pub out: Option<String>,
    /// The run that it was to replace, which is still there.
    pub replaced: Option<String>,
    /// Its tiles.
    pub tiles: Vec<TileReport>,
    /// The part of the reporting node.
    pub role: Role,
    /// Its coordinator.
    pub coordinator: NodeReport,
    /// Its previous coordinator.
    pub taken_over_from: Option<String>,
    /// The current picture.
    pub picture: Option<PictureReport>,
    /// The state hash after the last step, 32 hexadecimal digits.
    pub state_hash: Option<String>,
}

/// A simulation as seen by a node that holds tiles of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HeldReport {
    /// Job id, 16 hexadecimal digits.
    pub job: String,
    /// The job file's name for it.
    pub name: String,
    /// [`RunState::Computing`].
    pub state: RunState,
    /// The part of the reporting node.
    pub role: Role,
    /// Its coordinator.
    pub coordinator: Option<NodeReport>,
    /// The highest step of the tiles on the node.
    pub step: Option<u32>,
    /// Steps of the job.
    pub steps: u64,
    /// The tiles on the node.
    pub held: Vec<HeldTileReport>,
    /// Their memory in bytes.
    pub bytes: u64,
}

/// A simulation that no reachable member coordinates.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LostReport {
    /// Job id, 16 hexadecimal digits.
    pub job: String,
    /// The job file's name for it.
    pub name: String,
    /// [`RunState::Lost`].
    pub state: RunState,
    /// [`Role::Submitter`].
    pub role: Role,
    /// The folder of outputs and checkpoints.
    pub out: Option<String>,
    /// Step of the last checkpoint on disk.
    pub checkpoint: Option<u32>,
    /// What happened, and the next step.
    pub error: String,
}

/// The state of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RunState {
    /// It has no tiles yet, or they have no cells yet.
    Starting,
    /// It computes.
    Running,
    /// It is interrupted.
    Waiting,
    /// All steps are computed, and all outputs are written.
    Done,
    /// It ended before its last step.
    Failed,
    /// A user ended it.
    Cancelled,
    /// The reporting node only holds tiles of it.
    Computing,
    /// No reachable member coordinates it.
    Lost,
}

impl RunState {
    /// Whether the simulation has ended where it was coordinated.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Computing => "computing",
            Self::Lost => "lost",
        })
    }
}

/// The part of the reporting node in a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// It coordinates or coordinated the simulation.
    Coordinator,
    /// It computes tiles.
    Owner,
    /// It is the standby of tiles.
    Standby,
    /// Both.
    #[serde(rename = "owner and standby")]
    OwnerAndStandby,
    /// The simulation was submitted to it before it restarted.
    Submitter,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Coordinator => "coordinator",
            Self::Owner => "owner",
            Self::Standby => "standby",
            Self::OwnerAndStandby => "owner and standby",
            Self::Submitter => "submitter",
        })
    }
}

/// A node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeReport {
    /// Its name, if the reporting node knows it.
    pub name: Option<String>,
    /// Its id, hex.
    pub node: String,
}

/// The sum of a field over all cells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TotalReport {
    /// The field, "mass" or "population".
    pub name: String,
    /// At the first check.
    pub first: Option<f64>,
    /// At the last check.
    pub last: Option<f64>,
}

/// The force on solid cells after a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ForceReport {
    /// The step.
    pub step: u32,
    /// Along each axis.
    pub force: Vec<f64>,
    /// Drag and lift coefficients, if the job gives a reference flow. `None`: not a finite number.
    pub coefficients: Option<Vec<Option<f64>>>,
}

/// A tile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TileReport {
    /// Name of the node that computes it.
    pub name: Option<String>,
    /// Its id, hex.
    pub node: String,
    /// The first cell.
    pub from: [usize; 3],
    /// One past the last cell.
    pub to: [usize; 3],
    /// Its standby.
    pub standby: Option<TileStandbyReport>,
    /// Seconds of computation.
    pub compute_s: f64,
    /// Seconds in which the node had nothing to compute for it, because halos were missing.
    pub wait_s: f64,
    /// Bytes of halos sent.
    pub halo_bytes: u64,
}

/// The standby of a tile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TileStandbyReport {
    /// Name of the node.
    pub name: Option<String>,
    /// Its id, hex.
    pub node: String,
    /// The step of its cells, once it has cells.
    pub step: Option<u32>,
}

/// A tile on the reporting node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HeldTileReport {
    /// Its number.
    pub tile: u16,
    /// Whether the node is its standby.
    pub standby: bool,
    /// Steps completed.
    pub step: u32,
    /// Its memory in bytes; 0 while it loads.
    pub bytes: u64,
}

/// The current picture of a simulation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PictureReport {
    /// The step.
    pub step: u32,
    /// The quantity that it shows.
    pub quantity: String,
    /// The values of the first and of the last colour. `None`: not a finite number.
    pub range: [Option<f64>; 2],
}

impl SimulationReport {
    /// The JSON, in one line.
    pub(crate) fn to_json(&self) -> String {
        // All keys are strings, so it can be serialised.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The coordinator's report.
    pub(crate) fn run(&self) -> Option<&RunReport> {
        match self {
            Self::Run(run) => Some(run),
            Self::Held(_) | Self::Lost(_) => None,
        }
    }

    /// Job id.
    pub(crate) fn job(&self) -> &str {
        match self {
            Self::Run(run) => &run.job,
            Self::Held(held) => &held.job,
            Self::Lost(lost) => &lost.job,
        }
    }

    /// The job file's name for it.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Run(run) => &run.name,
            Self::Held(held) => &held.name,
            Self::Lost(lost) => &lost.name,
        }
    }

    /// Its state.
    pub(crate) fn state(&self) -> RunState {
        match self {
            Self::Run(run) => run.state,
            Self::Held(held) => held.state,
            Self::Lost(lost) => lost.state,
        }
    }

    /// Why it ended before its last step.
    pub(crate) fn error(&self) -> Option<&str> {
        match self {
            Self::Run(run) => run.error.as_deref(),
            Self::Held(_) => None,
            Self::Lost(lost) => Some(&lost.error),
        }
    }

    /// What it waits for.
    pub(crate) fn waiting(&self) -> Option<&str> {
        self.run()?.waiting.as_deref()
    }

    /// Steps completed.
    pub(crate) fn step(&self) -> Option<u32> {
        match self {
            Self::Run(run) => Some(run.step),
            Self::Held(held) => held.step,
            Self::Lost(_) => None,
        }
    }

    /// Steps of the job.
    pub(crate) fn steps(&self) -> Option<u64> {
        match self {
            Self::Run(run) => Some(run.steps),
            Self::Held(held) => Some(held.steps),
            Self::Lost(_) => None,
        }
    }

    /// Tiles known to the reporting node: all, or those that it holds.
    pub(crate) fn tiles(&self) -> usize {
        match self {
            Self::Run(run) => run.tiles.len(),
            Self::Held(held) => held.held.len(),
            Self::Lost(_) => 0,
        }
    }

    /// Step of the last checkpoint on disk.
    pub(crate) fn checkpoint(&self) -> Option<u32> {
        match self {
            Self::Run(run) => run.checkpoint,
            Self::Held(_) => None,
            Self::Lost(lost) => lost.checkpoint,
        }
    }

    /// The part of the reporting node.
    pub(crate) fn role(&self) -> Role {
        match self {
            Self::Run(run) => run.role,
            Self::Held(held) => held.role,
            Self::Lost(lost) => lost.role,
        }
    }

    /// Sets the part of the reporting node, for a report from another node.
    pub(crate) fn set_role(&mut self, role: Role) {
        match self {
            Self::Run(run) => run.role = role,
            Self::Held(held) => held.role = role,
            Self::Lost(lost) => lost.role = role,
        }
    }

    /// Its coordinator.
    pub(crate) fn coordinator(&self) -> Option<&NodeReport> {
        match self {
            Self::Run(run) => Some(&run.coordinator),
            Self::Held(held) => held.coordinator.as_ref(),
            Self::Lost(_) => None,
        }
    }
}

/// The answer to a submission.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Submitted {
    /// Job id, 16 hexadecimal digits.
    pub job: String,
    /// The step at which it begins.
    pub from_step: u32,
}

/// The answer to the end of a simulation by a user.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cancelled {
    /// Job id, 16 hexadecimal digits.
    pub job: String,
    /// Always true.
    pub cancelled: bool,
}

/// The planned decomposition of a simulation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SimulationPlan {
    /// The job file's name for it.
    pub simulation: String,
    /// The rule.
    pub rule: String,
    /// Cells along x, y and z; z is 1 in two dimensions.
    pub size: [u64; 3],
    /// Steps of the job.
    pub steps: u64,
    /// Predicted milliseconds per step.
    pub step_ms: f64,
    /// Predicted million cell updates per second.
    pub mlups: f64,
    /// Halo depth: steps between halo exchanges.
    pub depth: u32,
    /// Share of a step that the slowest tile spends computing.
    pub busy_percent: u64,
    /// Predicted seconds of the whole run.
    pub duration_s: f64,
    /// The tiles.
    pub tiles: Vec<PlannedTile>,
    /// Unstable settings, and the like.
    pub warnings: Vec<String>,
    /// The effect of losing each zone; empty if no zone is known.
    pub zones: Vec<ZoneView>,
    /// The standby of each tile; empty if the job requests none.
    pub standbys: Vec<PlannedStandby>,
}

/// A planned tile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PlannedTile {
    /// Id of the node, hex.
    pub node: String,
    /// Its name.
    pub name: Option<String>,
    /// The first cell.
    pub from: [u64; 3],
    /// One past the last cell.
    pub to: [u64; 3],
    /// Memory in bytes.
    pub bytes: u64,
    /// Predicted milliseconds of computation per step.
    pub compute_ms: f64,
    /// Predicted milliseconds per step until the halo has arrived.
    pub halo_ms: f64,
}

/// The planned standby of a tile.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum PlannedStandby {
    /// A node has the memory.
    Found {
        /// The tile's number.
        tile: u16,
        /// Id of the node, hex.
        node: String,
        /// Its name.
        name: Option<String>,
        /// "warm" or "hot".
        tier: String,
        /// Predicted milliseconds without a step if the tile's node is lost, on average.
        stall_ms: f64,
        /// The longest.
        stall_max_ms: f64,
        /// Seconds between two snapshots; `None` for a hot standby.
        snapshot_every_s: Option<f64>,
    },
    /// No node has the memory.
    Missing {
        /// The tile's number.
        tile: usize,
        /// `null`.
        node: (),
        /// "none".
        tier: String,
        /// What all tiles roll back to.
        back_to: String,
    },
}

/// The effect of losing a zone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ZoneView {
    /// Its name.
    pub zone: String,
    /// The job's coordinator is in it.
    pub coordinator: bool,
    /// Indices of the stages or tiles in it.
    pub parts: Vec<u16>,
    /// What happens to these.
    pub then: ZoneThen,
    /// Predicted milliseconds without a token or step, including the time to detect the loss.
    pub stall_ms: Option<f64>,
    /// Why the job could not continue.
    pub error: Option<String>,
}

/// What happens to the parts of a lost zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ZoneThen {
    /// No part is in it.
    Untouched,
    /// A standby takes over each part.
    Standbys,
    /// The parts are placed again on the remaining nodes.
    Placed,
    /// The job ends.
    Ends,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(json: &Value) -> SimulationReport {
        let report: SimulationReport = serde_json::from_str(&json.to_string()).unwrap();
        assert_eq!(report.to_json(), json.to_string(), "the same keys in the same order");
        report
    }

    #[test]
    fn each_kind_of_report_is_recognised_and_keeps_its_json() {
        let node = json!({"name": "a", "node": "00"});
        let mut run = json!({
            "job": "000000000000002a", "name": "drop", "rule": "wave", "size": [64, 64], "state": "running", "error": null,
            "waiting": null, "step": 3, "steps": 10, "from_step": 0, "depth": 1, "seconds": 0.5, "seconds_left": null,
            "steps_per_s": 6.0, "steps_per_s_now": null, "predicted_steps_per_s": 7.5, "mlups": 0.1, "cells_per_s": 1e5,
            "t_eff_gb_s": 1e-5, "share_of_node_bandwidth": null, "halo_bytes": 0, "standby_bytes": 0,
            "communication_hidden": null, "losses": 0, "longest_stall_ms": 0.0,
            "totals": [{"name": "mass", "first": 1.5, "last": null}],
            "force": {"step": 2, "force": [0.25, -1.0], "coefficients": [null, 2.0]}, "checkpoint": null, "out": "/o",
            "replaced": null,
            "tiles": [{
                "name": null, "node": "00", "from": [0, 0, 0], "to": [64, 64, 1],
                "standby": {"name": "b", "node": "01", "step": null}, "compute_s": 0.1, "wait_s": 0.0, "halo_bytes": 0,
            }],
            "role": "coordinator", "coordinator": node, "taken_over_from": null,
            "picture": {"step": 2, "quantity": "height", "range": [-0.5, null]}, "state_hash": null,
        });
        let mut report = read(&run);
        assert_eq!((report.tiles(), report.state(), report.job()), (1, RunState::Running, "000000000000002a"));
        assert!(report.run().is_some());
        report.set_role(Role::Submitter);
        run["role"] = json!("submitter");
        assert_eq!(report.to_json(), run.to_string());

        let held = read(&json!({
            "job": "000000000000002a", "name": "drop", "state": "computing", "role": "owner and standby", "coordinator": node,
            "step": 3, "steps": 10, "held": [{"tile": 1, "standby": false, "step": 3, "bytes": 9}], "bytes": 9,
        }));
        assert!(matches!(held, SimulationReport::Held(_)), "{held:?}");
        assert_eq!((held.role(), held.role().to_string().as_str()), (Role::OwnerAndStandby, "owner and standby"));

        let lost = read(&json!({
            "job": "000000000000002a", "name": "drop", "state": "lost", "role": "submitter", "out": null, "checkpoint": 4,
            "error": "no member has it",
        }));
        assert!(matches!(lost, SimulationReport::Lost(_)), "{lost:?}");
        assert_eq!((lost.checkpoint(), lost.error()), (Some(4), Some("no member has it")));
    }

    #[test]
    fn names_in_texts_are_those_of_the_json() {
        use RunState::{Cancelled, Computing, Done, Failed, Lost, Running, Starting, Waiting};
        for state in [Starting, Running, Waiting, Done, Failed, Cancelled, Computing, Lost] {
            assert_eq!(json!(state), state.to_string());
        }
        for role in [Role::Coordinator, Role::Owner, Role::Standby, Role::OwnerAndStandby, Role::Submitter] {
            assert_eq!(json!(role), role.to_string());
        }
    }

    #[test]
    fn a_missing_standby_of_a_plan_is_recognised() {
        let found = json!({
            "tile": 0, "node": "00", "name": null, "tier": "warm", "stall_ms": 1.5, "stall_max_ms": 2.5,
            "snapshot_every_s": 0.5,
        });
        let missing = json!({"tile": 1, "node": null, "tier": "none", "back_to": "the beginning"});
        let standbys: Vec<PlannedStandby> = serde_json::from_value(json!([found, missing])).unwrap();
        assert!(matches!(standbys[..], [PlannedStandby::Found { .. }, PlannedStandby::Missing { .. }]), "{standbys:?}");
        assert_eq!(serde_json::to_string(&standbys).unwrap(), json!([found, missing]).to_string());
    }
}
