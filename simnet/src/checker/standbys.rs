//! Each stage but the coordinator's has a standby if a host has memory for one, and standbys that are current stay current while a
//! request runs.
use crate::host::HostId;
use crate::world::World;
use node_core::id::NodeId;
use node_core::job::{JobState, JobView, PartView};
use std::collections::BTreeSet;

/// Stages without a standby although a host outside the job has memory for one. Empty while the job is not ready.
pub fn missing(world: &World, head: HostId) -> Vec<String> {
    let Some(view) = job(world, head) else { return Vec::new() };
    let listed = view.parts.iter().filter_map(|part| part.standby.as_ref().filter(|s| s.resident)?.node);
    let owners: BTreeSet<NodeId> = view.parts.iter().map(|part| part.owner).collect();
    let part: BTreeSet<NodeId> = owners.iter().copied().chain(listed).collect();
    let head_node = world.host(head).node_id;
    let idle = |bytes: u64| {
        let free = world.hosts().filter(|host| host.runs() && !host.leaves && !part.contains(&host.node_id));
        free.map(|host| host.executor.memory_free()).any(|free| free >= bytes + bytes / MARGIN)
    };
    let covered =
        |part: &PartView| part.standby.as_ref().is_some_and(|standby| standby.node.is_some() && standby.resident);
    let open = view.parts.iter().enumerate().filter(|(_, part)| part.owner != head_node && !covered(part));
    let lacks = open.filter(|(_, part)| part.bytes.is_some_and(idle));
    lacks.map(|(at, part)| format!("part {at}, {:?}, has no standby, though a host has room", part.what)).collect()
}

/// Stages and standbys that are current.
pub fn current(world: &World, head: HostId) -> BTreeSet<(u16, NodeId)> {
    let view = job(world, head);
    let parts = view.iter().flat_map(|view| &view.parts).zip(0..);
    parts.filter_map(|(part, at)| Some((at, part.standby.as_ref().filter(|s| s.current)?.node?))).collect()
}

fn job(world: &World, head: HostId) -> Option<JobView> {
    world.host(head).node.as_ref()?.jobs().find(|view| view.state == JobState::Running)
}

/// The planner keeps a part of each host's memory free: a tenth, and what it rounds up.
const MARGIN: u64 = 4;
