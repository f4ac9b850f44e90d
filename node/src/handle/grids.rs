//! Simulations for the API and the commands.
use super::{NodeError, NodeHandle, PLAN_MAX, hex};
use crate::hub::CallEvent;
use crate::submissions::{Submissions, work};
use kernels::grid::simulation::{Simulation, Tier};
use node_core::id::NodeId;
use node_core::input::Input;
use node_core::limits::LEASE;
use node_core::output::Event;
use node_core::work::PlanSpec;
use partitioner::tiles::{GridPlan, GridWork, TileStandby, takeover_ns};
use partitioner::zones::grid_losses;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

impl NodeHandle {
    /// The simulations submitted here.
    pub fn submissions(&self) -> Arc<Submissions> {
        self.inner.submissions.clone()
    }

    /// Plans a simulation without starting it.
    ///
    /// # Errors
    /// It does not fit into the mesh; the text says what is missing.
    pub async fn plan_grid(&self, simulation: Simulation) -> Result<Value, NodeError> {
        let (call, mut events) = self.inner.hub.open(8);
        let (work, tier) = (work(&simulation), simulation.standby());
        let depth = simulation.depth().map(|depth| depth as u32);
        let what = Box::new(PlanSpec::Grid(work.clone(), depth));
        self.inner.driver.input(Input::Plan { call, what, standbys: tier != Tier::None });
        let answer = tokio::time::timeout(PLAN_MAX, async {
            loop {
                match events.recv().await {
                    None => return Err(NodeError::Failed("the node stopped".into())),
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
            let (standbys, hot) = (standbys.clone(), tier == Tier::Hot);
            move |fleet, options| grid_losses(&plan, (&standbys, hot), &work, fleet, options.head)
        });
        report["zones"] = json!(zones.await);
        let standby_of = |tile: usize| standbys.iter().find(|standby| usize::from(standby.tile) == tile);
        let tiles = if tier == Tier::None { 0 } else { plan.tiles().len() };
        let standbys: Vec<Value> = (0..tiles)
            .map(|tile| {
                let Some(standby) = standby_of(tile) else {
                    let back_to =
                        if simulation.checkpoint_every().is_some() { "the last checkpoint" } else { "the beginning" };
                    return json!({"tile": tile, "node": null, "tier": tier_name(Tier::None), "back_to": back_to});
                };
                let node = hex(&NodeId(standby.device.0));
                let [usual, most] = stalls_ms(tier, &work, &plan, standby);
                let snapshots = (tier == Tier::Warm).then_some(standby.snapshot_every_ns as f64 / 1e9);
                json!({
                    "tile": standby.tile, "node": node, "name": names.get(&node), "tier": tier_name(tier),
                    "stall_ms": usual, "stall_max_ms": most, "snapshot_every_s": snapshots,
                })
            })
            .collect();
        report["standbys"] = json!(standbys);
        Ok(report)
    }
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::None => "none",
        Tier::Warm => "warm",
        Tier::Hot => "hot",
    }
}

/// Predicted stall in milliseconds if a tile's node is lost, including the time to detect the loss: on average, and at
/// most (just before the next snapshot).
fn stalls_ms(tier: Tier, work: &GridWork, plan: &GridPlan, standby: &TileStandby) -> [f64; 2] {
    let every = standby.snapshot_every_ns;
    [every, 2 * every].map(|every| {
        let again = (tier == Tier::Warm).then_some(every);
        let takeover_ns = takeover_ns(work, plan, usize::from(standby.tile), again);
        LEASE.as_secs_f64() * 1e3 + takeover_ns as f64 / 1e6
    })
}

fn report(simulation: &Simulation, work: &GridWork, plan: &GridPlan, names: &BTreeMap<String, String>) -> Value {
    let cells = simulation.grid().region().cells() as f64;
    let step_ns = plan.step_ns().max(1) as f64;
    let tiles: Vec<Value> = plan
        .tiles()
        .iter()
        .map(|tile| {
            let node = hex(&NodeId(tile.device.0));
            json!({
                "node": node, "name": names.get(&node), "from": tile.block.from, "to": tile.block.to,
                "bytes": tile.bytes, "compute_ms": tile.compute_ns as f64 / 1e6, "halo_ms": tile.halo_ns as f64 / 1e6,
            })
        })
        .collect();
    json!({
        "simulation": simulation.name(), "rule": simulation.rule().name(), "size": work.size, "steps": simulation.steps(),
        "step_ms": step_ns / 1e6, "mlups": cells * 1e3 / step_ns, "depth": plan.depth(),
        "busy_percent": plan.busy_percent(), "duration_s": step_ns * simulation.steps() as f64 / 1e9, "tiles": tiles,
        "warnings": simulation.warnings(),
    })
}
