//! Who computes slower than it says, as measured by this node's challenges: plans count with what was measured.
use crate::id::{JobId, NodeId};
use crate::limits::SLOWER_TIMES;
use alloc::collections::BTreeMap;
use alloc::{format, string::String};
use core::ops::Range;
use partitioner::Device;

/// What challenges found out.
#[derive(Debug, Default)]
pub(crate) struct Speeds {
    /// Percent of the time that a node says it takes; only those far over it.
    percent: BTreeMap<NodeId, u64>,
    /// What somebody made of the rows of a challenge.
    digests: BTreeMap<(JobId, u32, u32), Digest>,
}

#[derive(Clone, Copy, Debug)]
struct Digest {
    node: NodeId,
    numerics: u64,
    digest: u64,
}

impl Speeds {
    /// A node took so long for what it should do in `expected_ns`. Returns the percentage if plans are to count otherwise
    /// with it from now on.
    pub(crate) fn handle_measured(&mut self, node: NodeId, took_ns: u64, expected_ns: u64) -> Option<u32> {
        let percent = took_ns.saturating_mul(100) / expected_ns.max(1);
        let known = self.percent.get(&node).copied();
        // What was slow has to be clearly faster to be believed again.
        let limit = if known.is_some() { SLOWER_TIMES * 100 * 2 / 3 } else { SLOWER_TIMES * 100 };
        if percent < limit {
            return self.percent.remove(&node).map(|_| 100);
        }
        let news = known.is_none_or(|known| percent.abs_diff(known) * 4 > known);
        if !news {
            return None;
        }
        self.percent.insert(node, percent);
        Some(u32::try_from(percent).unwrap_or(u32::MAX))
    }

    /// What a node made of the rows of a challenge; who made something else of the same, if somebody did.
    pub(crate) fn handle_digest(
        &mut self,
        job: JobId,
        layers: &Range<u32>,
        node: NodeId,
        numerics: u64,
        digest: u64,
    ) -> Option<String> {
        let new = Digest { node, numerics, digest };
        let old = self.digests.insert((job, layers.start, layers.end), new)?;
        (old.numerics == numerics && old.digest != digest).then(|| {
            format!(
                "{} and {node} made different rows of the same rows with layers {}..{} of job {:x}, though they say that \
                 they compute alike: one of them computes wrongly, or not at all",
                old.node, layers.start, layers.end, job.0
            )
        })
    }

    /// The node is gone: in another life it may be another machine.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.percent.remove(&node);
        self.digests.retain(|_, digest| digest.node != node);
    }

    /// The job is over.
    pub(crate) fn forget_job(&mut self, job: JobId) {
        self.digests.retain(|(other, ..), _| *other != job);
    }

    /// The device as it was measured.
    pub(crate) fn correct(&self, device: &mut Device) {
        if let Some(&percent) = self.percent.get(&NodeId::from(device.id)) {
            let slower = |speed: u64| u64::try_from(u128::from(speed) * 100 / u128::from(percent)).unwrap_or(speed);
            device.bytes_per_second = slower(device.bytes_per_second).max(u64::from(device.bytes_per_second > 0));
            device.flops_per_second = slower(device.flops_per_second).max(u64::from(device.flops_per_second > 0));
            device.step_ns = device.step_ns.saturating_mul(percent) / 100;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);

    #[test]
    fn a_node_that_is_slower_than_it_says_is_planned_with_as_it_is() {
        let mut speeds = Speeds::default();
        let mut device = Device {
            id: A.into(),
            name: String::new(),
            machine: 1,
            memory: 1,
            bytes_per_second: 1_000,
            flops_per_second: 0,
            step_ns: 10,
            numerics: 1,
            pass_steps: 1,
            excluded: false,
        };
        assert_eq!(speeds.handle_measured(A, 2_900, 1_000), None, "what the mesh's load may do");
        assert_eq!(speeds.handle_measured(A, 10_000, 1_000), Some(1_000));
        assert_eq!(speeds.handle_measured(A, 11_000, 1_000), None, "no news");
        speeds.correct(&mut device);
        assert_eq!((device.bytes_per_second, device.flops_per_second, device.step_ns), (100, 0, 100));
        assert_eq!(speeds.handle_measured(A, 2_500, 1_000), Some(250), "better, but not what it says");
        assert_eq!(speeds.handle_measured(A, 1_100, 1_000), Some(100));
    }

    #[test]
    fn rows_that_differ_though_they_should_not_are_told() {
        let mut speeds = Speeds::default();
        assert_eq!(speeds.handle_digest(JobId(1), &(0..4), A, 7, 42), None);
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), B, 7, 43), None, "other layers");
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), A, 8, 44), None, "other numerics");
        assert!(
            speeds
                .handle_digest(JobId(1), &(4..8), B, 8, 45)
                .is_some_and(|what| what.contains("differently") || what.contains("different rows"))
        );
    }
}
