//! Reports on a simulation for users and programs: by its coordinator, or by a node that computes tiles of it.
use super::submission::{Progress, Submission};
use super::view::LiveView;
use crate::report::{
    ForceReport, HeldReport, HeldTileReport, NodeReport, PictureReport, Role, RunReport, RunState, SimulationReport,
    TileReport, TileStandbyReport, TotalReport,
};
use crate::views::{Views, hex};
use kernels_grids::Region;
use kernels_grids::tile::Tile;
use kernels_simulations::Simulation;
use node_core::id::{JobId, NodeId};
use node_core::job::{JobView, PartView, WhatView};
use node_core::work::steps::TileFigures;
use node_core::work::{Ending, HeldPart, HeldWork};
use std::collections::{BTreeMap, BTreeSet};

/// What a report needs besides the submission itself.
pub(crate) struct ReportContext {
    me: NodeId,
    /// Names of nodes, and their memory bandwidth as measured at start: of a CPU while reading weights, of a GPU while
    /// copying.
    nodes: BTreeMap<String, (String, u64)>,
    grids: Vec<JobView>,
    /// Tiles on this node, of its own simulations and of others'.
    tiles: Vec<HeldPart>,
}

impl ReportContext {
    pub(super) fn new(me: NodeId, views: Views) -> Self {
        let Views { peers, jobs: _, grids, tiles } = views;
        let nodes = peers.into_iter().map(|peer| (peer.node, (peer.name, peer.bytes_per_second))).collect();
        Self { me, nodes, grids, tiles }
    }

    fn name(&self, node: &str) -> Option<&String> {
        self.nodes.get(node).map(|(name, _)| name)
    }

    fn node_of(&self, node: NodeId) -> NodeReport {
        let node = hex(&node);
        NodeReport { name: self.name(&node).cloned(), node }
    }

    /// Jobs whose tiles are on this node.
    pub(super) fn held(&self) -> BTreeSet<JobId> {
        self.tiles.iter().map(|tile| tile.job).collect()
    }

    pub(super) fn holds(&self, job: &str) -> bool {
        self.tiles.iter().any(|tile| format!("{:016x}", tile.job.0) == job)
    }

    /// The coordinator of a job whose tiles are on this node.
    pub(super) fn coordinator_of(&self, job: JobId) -> Option<NodeId> {
        self.tiles.iter().find(|tile| tile.job == job).map(|tile| tile.epoch.issuer)
    }
}

/// Reports on a simulation from the tiles on this node alone.
pub(super) fn held_report(job: JobId, around: &ReportContext) -> SimulationReport {
    let held: Vec<&HeldPart> = around.tiles.iter().filter(|tile| tile.job == job).collect();
    let (owns, is_standby) = (held.iter().any(|tile| !tile.standby), held.iter().any(|tile| tile.standby));
    let role = match (owns, is_standby) {
        (true, true) => Role::OwnerAndStandby,
        (true, false) => Role::Owner,
        (false, _) => Role::Standby,
    };
    let tiles = held.iter().map(|tile| HeldTileReport {
        tile: tile.part.0,
        standby: tile.standby,
        step: steps_of(tile)[0],
        bytes: tile.bytes.unwrap_or(0),
    });
    let (name, steps) = held.first().map_or(("", 0), |tile| (tile.name.as_str(), steps_of(tile)[1]));
    SimulationReport::Held(HeldReport {
        job: format!("{:016x}", job.0),
        name: name.to_owned(),
        state: RunState::Computing,
        role,
        coordinator: around.coordinator_of(job).map(|node| around.node_of(node)),
        step: held.iter().map(|tile| steps_of(tile)[0]).max(),
        steps: steps.into(),
        held: tiles.collect(),
        bytes: held.iter().filter_map(|tile| tile.bytes).sum(),
    })
}

/// Steps that a tile has completed, and its total steps.
fn steps_of(tile: &HeldPart) -> [u32; 2] {
    match tile.what {
        HeldWork::Tile { step, steps } => [step, steps],
        HeldWork::Stage { .. } => [0; 2],
    }
}

/// The accumulated times and bytes of a tile.
fn figures_of(tile: &PartView) -> TileFigures {
    match tile.what {
        WhatView::Tile { figures, .. } => figures,
        WhatView::Stage(_) => TileFigures::default(),
    }
}

/// Reports the progress or the end of a simulation.
pub(super) fn report(submission: &Submission, around: &ReportContext) -> SimulationReport {
    let (mut told, simulation) = (submission.told(), &submission.simulation);
    // While it runs, the core has the tiles' figures and standbys.
    let running = around.grids.iter().find(|grid| grid.job == submission.job && told.ended.is_none());
    let running = running.map(|grid| grid.parts.as_slice()).unwrap_or_default();
    if told.ended.is_none() {
        told.figures = running.iter().map(figures_of).collect();
    }
    let cells = simulation.grid().region().cells() as f64;
    let steps = f64::from(told.step.saturating_sub(told.begun_at));
    let end = told.computed.unwrap_or_else(std::time::Instant::now);
    let seconds = told.running_since.map_or(0.0, |since| (end - since).as_secs_f64());
    let rate = if seconds > 0.0 { steps / seconds } else { 0.0 };
    let now = if told.ended.is_some() { None } else { told.pace.steps_per_s(std::time::Instant::now(), told.step) };
    let left = (simulation.steps() as f64 - f64::from(told.step)).max(0.0);
    let traffic = simulation.rule().costs().traffic_bits as f64 / 8.0;
    let sum = |value: fn(&TileFigures) -> u64| told.figures.iter().map(value).sum::<u64>();
    let (halo_ns, wait_ns) = (sum(|f| f.halo_ns), sum(|f| f.wait_ns));
    let pace = now.unwrap_or(rate);
    SimulationReport::Run(Box::new(RunReport {
        job: format!("{:016x}", submission.job.0),
        name: simulation.name().to_owned(),
        rule: simulation.rule().name().to_owned(),
        size: simulation.grid().size()[..simulation.grid().dimensions()].to_vec(),
        state: state(&told),
        error: told.error().map(str::to_owned),
        step: told.step,
        steps: simulation.steps(),
        from_step: told.begun_at,
        depth: told.depth,
        seconds,
        seconds_left: (pace > 0.0).then(|| left / pace),
        steps_per_s: rate,
        steps_per_s_now: now,
        predicted_steps_per_s: (told.step_ns > 0).then(|| 1e9 / told.step_ns as f64),
        mlups: rate * cells / 1e6,
        cells_per_s: rate * cells,
        t_eff_gb_s: rate * cells * traffic / 1e9,
        share_of_node_bandwidth: share_of_bandwidth(&told, around, rate * cells * traffic).filter(|_| rate > 0.0),
        halo_bytes: sum(|f| f.sent_bytes),
        standby_bytes: sum(|f| f.copied_bytes),
        communication_hidden: (halo_ns > 0).then(|| 1.0 - wait_ns as f64 / halo_ns as f64),
        losses: told.losses,
        longest_stall_ms: told.longest_stall.as_secs_f64() * 1e3,
        totals: totals(simulation, &told),
        force: force(simulation, &told),
        checkpoint: told.checkpoint,
        out: submission.out.as_ref().map(|out| out.display().to_string()),
        tiles: tiles(&told, running, around),
        role: Role::Coordinator,
        coordinator: around.node_of(around.me),
        taken_over_from: told.inherited_from.map(|node| node.to_string()),
        picture: picture(submission),
        state_hash: told.hash.map(|hash| format!("{hash:032x}")),
        waiting: told.waiting,
        replaced: told.replaced,
    }))
}

fn state(told: &Progress) -> RunState {
    match (&told.ended, told.running_since) {
        (Some(Ending::Completed), _) => RunState::Done,
        (Some(Ending::Cancelled), _) => RunState::Cancelled,
        (Some(Ending::Moved(_) | Ending::Failed(_)), _) => RunState::Failed,
        (None, Some(_)) if told.waiting.is_some() => RunState::Waiting,
        (None, Some(_)) => RunState::Running,
        (None, None) => RunState::Starting,
    }
}

/// The share of the computing nodes' memory bandwidth in a traffic of `bytes_per_s`.
fn share_of_bandwidth(told: &Progress, around: &ReportContext, bytes_per_s: f64) -> Option<f64> {
    let computing: BTreeSet<String> = told.tiles.iter().map(|(node, _)| hex(&NodeId(node.0))).collect();
    let read = computing.iter().map(|node| around.nodes.get(node).map(|(_, read)| *read));
    let read = read.sum::<Option<u64>>().filter(|read| *read > 0);
    // A small tile that stays in cache can exceed the memory bandwidth; then no share is reported.
    read.map(|read| bytes_per_s / read as f64).filter(|share| *share <= 1.0)
}

fn totals(simulation: &Simulation, told: &Progress) -> Vec<TotalReport> {
    let number = |totals: &[i128], fields: &[usize]| {
        let sum =
            fields.iter().filter_map(|field| totals.get(*field)).fold(0i128, |sum, total| sum.wrapping_add(*total));
        Tile::total_value(sum)
    };
    let totals = simulation.totals();
    totals
        .into_iter()
        .map(|(name, fields)| TotalReport {
            name,
            first: told.first_totals.as_deref().map(|totals| number(totals, &fields)),
            last: told.totals.as_ref().map(|(_, totals)| number(totals, &fields)),
        })
        .collect()
}

fn force(simulation: &Simulation, told: &Progress) -> Option<ForceReport> {
    let (step, totals) = told.totals.as_ref()?;
    let force = simulation.force_of(totals)?;
    let coefficients = force.coefficients.map(|parts| parts.into_iter().map(Some).collect());
    Some(ForceReport { step: *step, force: force.force, coefficients })
}

/// The tiles; `running` has their standbys.
fn tiles(told: &Progress, running: &[PartView], around: &ReportContext) -> Vec<TileReport> {
    let report = |(number, (node, Region { start, end })): (usize, &(NodeId, Region))| {
        let node = hex(&NodeId(node.0));
        let figures = told.figures.get(number).copied().unwrap_or_default();
        let standby = running.get(number).and_then(|tile| tile.standby.as_ref()).and_then(|standby| {
            let node = hex(&standby.node?);
            Some(TileStandbyReport { name: around.name(&node).cloned(), node, step: standby.step })
        });
        TileReport {
            name: around.name(&node).cloned(),
            node,
            from: *start,
            to: *end,
            standby,
            compute_s: figures.compute_ns as f64 / 1e9,
            wait_s: figures.wait_ns as f64 / 1e9,
            halo_bytes: figures.sent_bytes,
        }
    };
    told.tiles.iter().enumerate().map(report).collect()
}

fn picture(submission: &Submission) -> Option<PictureReport> {
    let view = submission.view()?;
    let quantity = LiveView::of(&submission.simulation).quantity.to_owned();
    Some(PictureReport { step: view.step, quantity, range: view.range.map(|value| Some(f64::from(value))) })
}

#[cfg(test)]
mod tests;
