//! After the last fault and some time, every live node's view of the mesh equals the set of live nodes.
use crate::host::HostId;
use crate::world::World;
use node_core::id::NodeId;
use node_core::membership::MemberState;
use std::collections::BTreeSet;

/// A view that differs from the set of live nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The host that has this view.
    pub host: HostId,
    /// Live nodes that it does not list as alive.
    pub missing: Vec<NodeId>,
    /// Dead nodes that it lists as alive.
    pub ghosts: Vec<NodeId>,
}

/// Every view that differs from the set of hosts that run and have not left.
pub fn divergences(world: &World, gone: &[HostId]) -> Vec<Divergence> {
    let live: BTreeSet<NodeId> =
        world.hosts().filter(|host| host.runs() && !gone.contains(&host.id)).map(|host| host.node_id).collect();
    world
        .hosts()
        .filter(|host| live.contains(&host.node_id))
        .filter_map(|host| {
            let node = host.node.as_ref()?;
            let mut seen: BTreeSet<NodeId> = node
                .members()
                .filter(|member| match member.state {
                    MemberState::Alive | MemberState::Suspect => true,
                    MemberState::Down(_) => false,
                })
                .map(|member| member.node)
                .collect();
            seen.insert(host.node_id);
            let missing: Vec<NodeId> = live.difference(&seen).copied().collect();
            let ghosts: Vec<NodeId> = seen.difference(&live).copied().collect();
            let wrong = !missing.is_empty() || !ghosts.is_empty();
            wrong.then_some(Divergence { host: host.id, missing, ghosts })
        })
        .collect()
}

/// Whether no view differs.
pub fn converged(world: &World, gone: &[HostId]) -> bool {
    divergences(world, gone).is_empty()
}

/// Whether no view differs and every node has the adverts of all others.
pub fn informed(world: &World, gone: &[HostId]) -> bool {
    converged(world, gone)
        && world.hosts().filter(|host| host.runs() && !gone.contains(&host.id)).all(|host| {
            host.node.as_ref().is_some_and(|node| {
                node.members()
                    .filter(|member| !matches!(member.state, MemberState::Down(_)))
                    .all(|m| m.advert.is_some())
            })
        })
}
