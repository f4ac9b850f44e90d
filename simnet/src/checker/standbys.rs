//! Each stage but the coordinator's has a standby if a host has memory for one, and standbys that are current stay current while a
//! request runs.
use crate::host::HostId;
use crate::world::World;
use node_core::id::NodeId;
use node_core::job::{JobState, JobView, StandbyView};
use std::collections::BTreeSet;

/// Stages without a standby although a host outside the job has memory for one. Empty while the job is not ready.
pub fn missing(world: &World, head: HostId) -> Vec<String> {
    let Some(view) = job(world, head) else { return Vec::new() };
    let listed = view.standbys.iter().filter(|standby| standby.resident).filter_map(|standby| standby.node);
    let owners: BTreeSet<NodeId> = view.stages.iter().map(|stage| stage.node).collect();
    let part: BTreeSet<NodeId> = owners.iter().copied().chain(listed).collect();
    let head_node = world.host(head).node_id;
    let idle = |bytes: u64| {
        let free = world.hosts().filter(|host| host.runs() && !host.leaves && !part.contains(&host.node_id));
        free.map(|host| host.executor.memory_free()).any(|free| free >= bytes + bytes / MARGIN)
    };
    let covered = |at: usize| {
        let of = |standby: &&StandbyView| usize::from(standby.stage) == at;
        view.standbys.iter().find(of).is_some_and(|standby| standby.node.is_some() && standby.resident)
    };
    let open = view.stages.iter().enumerate().filter(|(at, stage)| stage.node != head_node && !covered(*at));
    let lacks = open.filter(|(_, stage)| stage.bytes.is_some_and(idle));
    lacks
        .map(|(at, stage)| format!("stage {at}, layers {:?}, has no standby, though a host has room", stage.layers))
        .collect()
}

/// Stages and standbys that are current.
pub fn current(world: &World, head: HostId) -> BTreeSet<(u16, NodeId)> {
    let view = job(world, head);
    let standbys = view.iter().flat_map(|view| &view.standbys).filter(|standby| standby.current);
    standbys.filter_map(|standby| Some((standby.stage, standby.node?))).collect()
}

fn job(world: &World, head: HostId) -> Option<JobView> {
    world.host(head).node.as_ref()?.jobs().find(|view| view.state == JobState::Ready)
}

/// The planner keeps a part of each host's memory free: a tenth, and what it rounds up.
const MARGIN: u64 = 4;
