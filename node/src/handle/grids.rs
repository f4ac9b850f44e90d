//! Simulations for the API and the commands.
use super::{NodeHandle, PLAN_MAX};
use crate::error::NodeError;
use crate::hub::CallEvent;
use crate::report::{PlannedStandby, PlannedTile, SimulationPlan};
use crate::submissions::Submissions;
use crate::submissions::spec::work;
use crate::views::hex;
use kernels_simulations::{Simulation, StandbyTier};
use node_core::id::NodeId;
use node_core::input::Input;
use node_core::limits::LEASE;
use node_core::output::Event;
use node_core::work::PlanSpec;
use partitioner::tiles::{GridPlan, GridWork, TileStandby, takeover_ns};
use partitioner::zones::grid_losses;
use std::collections::BTreeMap;
use std::sync::Arc;

impl NodeHandle {
    /// The simulations submitted here.
    pub(crate) fn submissions(&self) -> Arc<Submissions> {
        self.inner.submissions.clone()
    }

    /// Plans a simulation without starting it.
    ///
    /// # Errors
    /// It does not fit into the mesh; the text says what is missing.
    pub(crate) async fn plan_grid(&self, simulation: Simulation) -> Result<SimulationPlan, NodeError> {
        let (call, mut events) = self.inner.hub.open(8);
        let (work, tier) = (work(&simulation), simulation.standby());
        let depth = simulation.depth().map(|depth| depth as u32);
        let what = Box::new(PlanSpec::Grid(work.clone(), depth));
        self.inner.driver.input(Input::Plan { call, what, standbys: tier != StandbyTier::None });
        let answer = tokio::time::timeout(PLAN_MAX, async {
            loop {
                match events.recv().await {
                    None => {
                        return Err(NodeError::Failed("the node has stopped: send the request to another node".into()));
                    }
                    Some(CallEvent::Node(Event::GridPlan { result, standbys, .. })) => {
                        return match result {
                            Ok(plan) => Ok((plan, standbys)),
                            Err(error) => Err(NodeError::Failed(error.to_string())),
                        };
                    }
                    Some(CallEvent::Node(_)) => {}
                }
            }
        })
        .await
        .unwrap_or_else(|_| Err(NodeError::Failed("the planner did not respond: retry".into())));
        self.inner.hub.forget(call);
        let names = self.names().await;
        let (plan, standbys) = answer?;
        let mut report = report(&simulation, &work, &plan, &names);
        let zones = self.zone_losses(None, {
            let (plan, work) = (plan.clone(), work.clone());
            let (standbys, hot) = (standbys.clone(), tier == StandbyTier::Hot);
            move |fleet, options| grid_losses(&plan, (&standbys, hot), &work, fleet, options.head)
        });
        report.zones = zones.await;
        let standby_of = |tile: usize| standbys.iter().find(|standby| usize::from(standby.tile) == tile);
        let tiles = if tier == StandbyTier::None { 0 } else { plan.tiles().len() };
        report.standbys = (0..tiles)
            .map(|tile| {
                let Some(standby) = standby_of(tile) else {
                    let back_to =
                        if simulation.checkpoint_every().is_some() { "the last checkpoint" } else { "the beginning" };
                    let tier = tier_name(StandbyTier::None).to_owned();
                    return PlannedStandby::Missing { tile, node: (), tier, back_to: back_to.to_owned() };
                };
                let node = hex(&NodeId::from(standby.device));
                let [usual, most] = stalls_ms(tier, &work, &plan, standby);
                let snapshots = (tier == StandbyTier::Warm).then_some(standby.snapshot_every_ns as f64 / 1e9);
                PlannedStandby::Found {
                    tile: standby.tile,
                    name: names.get(&node).cloned(),
                    node,
                    tier: tier_name(tier).to_owned(),
                    stall_ms: usual,
                    stall_max_ms: most,
                    snapshot_every_s: snapshots,
                }
            })
            .collect();
        Ok(report)
    }
}

fn tier_name(tier: StandbyTier) -> &'static str {
    match tier {
        StandbyTier::None => "none",
        StandbyTier::Warm => "warm",
        StandbyTier::Hot => "hot",
    }
}

/// Predicted stall in milliseconds if a tile's node is lost, including the time to detect the loss: on average, and at
/// most (just before the next snapshot).
fn stalls_ms(tier: StandbyTier, work: &GridWork, plan: &GridPlan, standby: &TileStandby) -> [f64; 2] {
    let every = standby.snapshot_every_ns;
    [every, 2 * every].map(|every| {
        let again = (tier == StandbyTier::Warm).then_some(every);
        let takeover_ns = takeover_ns(work, plan, usize::from(standby.tile), again);
        LEASE.as_secs_f64() * 1e3 + takeover_ns as f64 / 1e6
    })
}

/// The plan without the effect of losses.
fn report(
    simulation: &Simulation,
    work: &GridWork,
    plan: &GridPlan,
    names: &BTreeMap<String, String>,
) -> SimulationPlan {
    let cells = simulation.grid().region().cells() as f64;
    let step_ns = plan.step_ns().max(1) as f64;
    let tiles = plan.tiles().iter().map(|tile| {
        let node = hex(&NodeId::from(tile.device));
        PlannedTile {
            name: names.get(&node).cloned(),
            node,
            from: tile.block.from,
            to: tile.block.to,
            bytes: tile.bytes,
            compute_ms: tile.compute_ns as f64 / 1e6,
            halo_ms: tile.halo_ns as f64 / 1e6,
        }
    });
    SimulationPlan {
        simulation: simulation.name().to_owned(),
        rule: simulation.rule().name().to_owned(),
        size: work.size,
        steps: simulation.steps(),
        step_ms: step_ns / 1e6,
        mlups: cells * 1e3 / step_ns,
        depth: plan.depth(),
        busy_percent: plan.busy_percent(),
        duration_s: step_ns * simulation.steps() as f64 / 1e9,
        tiles: tiles.collect(),
        warnings: simulation.warnings(),
        zones: Vec::new(),
        standbys: Vec::new(),
    }
}
