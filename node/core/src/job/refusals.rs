//! Nodes that rejected a part of a job, and why. Reported when there is no plan without them.
use crate::id::NodeId;
use alloc::collections::BTreeMap;
use alloc::{format, string::String};
use partitioner::PlanError;

/// Rejections since the job was last ready.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeMap<NodeId, String>);

impl Refusals {
    /// A node reports why it cannot hold its part.
    pub(super) fn note(&mut self, node: NodeId, reason: &str) {
        if self.0.len() < NODES_MAX || self.0.contains_key(&node) {
            self.0.insert(node, reason.chars().take(REASON_CHARS_MAX).collect());
        }
    }

    /// The job runs, so rejections no longer matter.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Why there is no plan, human-readable.
    pub(super) fn explain(&self, error: &PlanError) -> String {
        let refused = self.0.iter().map(|(node, reason)| format!("; {node} is left out for now: {reason}"));
        core::iter::once(format!("{error}")).chain(refused).collect()
    }
}

/// Nodes listed in a message: a few are enough for a reader.
const NODES_MAX: usize = 3;
/// Length of a reason, which is a peer's own text.
const REASON_CHARS_MAX: usize = 300;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_reported_with_the_missing_plan_and_bounded() {
        let mut refusals = Refusals::default();
        let error = PlanError::NoDevices;
        assert_eq!(refusals.explain(&error), format!("{error}"));
        for node in 0..10 {
            refusals.note(NodeId([node; 16]), "no room on the disk");
            refusals.note(NodeId([0; 16]), &"x".repeat(1000));
        }
        let text = refusals.explain(&error);
        assert!(text.starts_with(&format!("{error}; 00000000 is left out for now: xxx")), "{text}");
        assert!(text.ends_with("no room on the disk"), "{text}");
        assert!(text.chars().count() < 1000, "{text}");
        refusals.clear();
        assert_eq!(refusals.explain(&error), format!("{error}"));
    }
}
