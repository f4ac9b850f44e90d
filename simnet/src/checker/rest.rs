//! A mesh at rest holds what its heads know of and nothing else: no orphaned stage, no memory without a stage.
use crate::world::World;

/// Stages whose head does not count on them, and memory that nobody accounts for.
pub fn orphans(world: &World) -> Vec<String> {
    let mut wrong = Vec::new();
    for host in world.hosts() {
        let Some(node) = &host.node else { continue };
        let mut holds = false;
        for stage in node.stages() {
            holds = true;
            let head = world.host_of(stage.epoch.minter).and_then(|head| world.host(head).node.as_ref());
            let view = head.and_then(|head| head.jobs().find(|view| view.job == stage.job));
            let counted = view.is_some_and(|view| {
                let owners = view.stages.iter().map(|stage| stage.node);
                owners.chain(view.standbys.iter().filter_map(|standby| standby.node)).any(|node| node == host.node_id)
            });
            if !counted {
                let (layers, epoch) = (stage.layers, stage.epoch.counter);
                wrong.push(format!("host {} holds layers {layers:?} of epoch {epoch}, its head does not", host.id.0));
            }
        }
        let taken = host.spec.capacity.memory_free.saturating_sub(host.executor.memory_free());
        if !holds && taken > 0 {
            wrong.push(format!("host {} holds no stage, yet {taken} bytes are taken", host.id.0));
        }
    }
    wrong
}
