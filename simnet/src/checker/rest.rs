//! A mesh at rest holds what its heads know of and nothing else: no orphaned stage, no memory without a stage.
use crate::world::World;
use node_core::job::PartView;

/// Stages whose head does not count on them, and memory that nobody accounts for.
pub fn orphans(world: &World) -> Vec<String> {
    let mut wrong = Vec::new();
    for host in world.hosts() {
        let Some(node) = &host.node else { continue };
        let mut holds = false;
        for stage in node.parts() {
            holds = true;
            let head = world.host_of(stage.epoch.issuer).and_then(|head| world.host(head).node.as_ref());
            let view = head.and_then(|head| head.jobs().find(|view| view.job == stage.job));
            let counted = view.is_some_and(|view| {
                let standby = |part: &PartView| part.standby.as_ref().and_then(|standby| standby.node);
                view.parts.iter().any(|part| part.owner == host.node_id || standby(part) == Some(host.node_id))
            });
            if !counted {
                let (what, epoch) = (stage.what, stage.epoch.counter);
                wrong.push(format!(
                    "host {} holds {what:?} of epoch {epoch}, its coordinator does not know it",
                    host.id.0
                ));
            }
        }
        let taken = host.spec.capacity.memory_free.saturating_sub(host.executor.memory_free());
        if !holds && taken > 0 {
            wrong.push(format!("host {} holds no stage, yet {taken} bytes are taken", host.id.0));
        }
    }
    wrong
}
