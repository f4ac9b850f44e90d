//! How far from the coordinator nodes stand, as far as they say so: its successors are to outlive it.
use crate::id::NodeId;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;

/// What one failure may end together with this node; the better place for a successor first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Apart {
    /// In another zone, both known.
    OtherZone,
    /// On another machine, as far as it says, and in an unknown zone.
    Unknown,
    /// In the same zone.
    SameZone,
    /// On the same machine.
    SameMachine,
}

/// Where nodes stand, seen from this one; one that is missing is [`Apart::Unknown`].
pub type Domains = Arc<BTreeMap<NodeId, Apart>>;

impl Apart {
    /// Of two nodes, by what each says of its machine and its zone.
    pub fn of(a: (u64, &str), b: (u64, &str)) -> Apart {
        if a.0 == b.0 {
            Apart::SameMachine
        } else if a.1.is_empty() || b.1.is_empty() {
            Apart::Unknown
        } else if a.1 == b.1 {
            Apart::SameZone
        } else {
            Apart::OtherZone
        }
    }

    /// Of a node among these.
    pub(super) fn among(domains: &Domains, node: NodeId) -> Apart {
        domains.get(&node).copied().unwrap_or(Apart::Unknown)
    }
}
