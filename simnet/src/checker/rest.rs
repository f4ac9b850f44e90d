//! A mesh at rest holds only what its coordinators list: no orphaned stage or tile, no ended simulation, no memory without
//! a part.
use crate::world::World;
use node_core::job::{JobView, ProgramView};
use node_core::work::HeldWork;

/// Parts that their coordinator does not list, simulations that have not ended, and memory in use without a part.
pub fn orphans(world: &World) -> Vec<String> {
    let mut wrong = Vec::new();
    for host in world.hosts() {
        let Some(node) = &host.node else { continue };
        let mut holds = false;
        for held in node.parts() {
            holds = true;
            let coordinator = world.host_of(held.epoch.issuer).and_then(|host| world.host(host).node.as_ref());
            let view = coordinator.and_then(|node| node.jobs().find(|view| view.job == held.job));
            let counted = view.and_then(|view| view.parts.get(held.part.index()).cloned()).is_some_and(|part| {
                let standby = part.standby.as_ref().and_then(|standby| standby.node);
                part.owner == host.node_id || standby == Some(host.node_id)
            });
            if !counted {
                let (number, what, epoch) = (held.part, held.what, held.epoch.counter);
                wrong.push(format!(
                    "host {} holds part {number}, {what:?}, of epoch {epoch}, which its coordinator does not list",
                    host.id.0
                ));
            }
        }
        let is_simulation = |view: &JobView| matches!(view.program, ProgramView::Steps { .. });
        for view in node.jobs().filter(is_simulation) {
            wrong.push(format!("host {} coordinates a simulation that should have ended, {:?}", host.id.0, view.state));
        }
        let states = host.executor.grids.states_held();
        if !node.parts().any(|held| matches!(held.what, HeldWork::Tile { .. })) && states > 0 {
            wrong.push(format!("host {} holds {states} saved tile states, but no tile", host.id.0));
        }
        let taken = host.spec.capacity.memory_free().saturating_sub(host.executor.memory_free());
        if !holds && taken > 0 {
            wrong.push(format!("host {} holds no part, but {taken} bytes are in use", host.id.0));
        }
    }
    wrong
}
