//! Failure domains of nodes, seen from the coordinator, as far as nodes report them. Its successors should outlive it.
use crate::id::NodeId;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;

/// The failure domain that a node shares with this one. Ordered: better successors first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SharedDomain {
    /// In another zone, both known.
    OtherZone,
    /// On another machine as far as it reports, and in an unknown zone.
    Unknown,
    /// In the same zone.
    SameZone,
    /// On the same machine.
    SameMachine,
}

/// Failure domains of nodes, seen from this node. A missing node is [`SharedDomain::Unknown`].
pub type Domains = Arc<BTreeMap<NodeId, SharedDomain>>;

impl SharedDomain {
    /// Compares two nodes by the machine and zone that each reports.
    pub fn of(a: (u64, &str), b: (u64, &str)) -> SharedDomain {
        if a.0 == b.0 {
            SharedDomain::SameMachine
        } else if a.1.is_empty() || b.1.is_empty() {
            SharedDomain::Unknown
        } else if a.1 == b.1 {
            SharedDomain::SameZone
        } else {
            SharedDomain::OtherZone
        }
    }

    /// The entry of a node.
    pub(super) fn among(domains: &Domains, node: NodeId) -> SharedDomain {
        domains.get(&node).copied().unwrap_or(SharedDomain::Unknown)
    }
}
