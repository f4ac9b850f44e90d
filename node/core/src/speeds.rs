//! How fast nodes compute beside what they say, as timed by this node's challenges: plans count with what was timed.
//!
//! A node's own word counts until its stage was timed. After that its figures are scaled, both ways, by the time that the
//! coordinator took itself. The way there and back is in that time, so it bounds from above what the node took; without the
//! round trip it bounds it from below. What lies between the two changes nothing, and no node looks faster than it answers.
use crate::id::{JobId, NodeId};
use crate::limits::{FASTER_PERCENT_MIN, SLOWER_PERCENT_MAX, SLOWER_TIMES, UNTIMED_PERCENT_MAX};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::{format, string::String};
use core::ops::Range;
use partitioner::Device;

/// What challenges found out.
#[derive(Debug, Default)]
pub(crate) struct Speeds {
    timed: BTreeMap<NodeId, Timed>,
    /// What a node made of the rows of the last challenges of a job's layers, by their nonces; at most [`DIGESTS_MAX`].
    digests: BTreeMap<(JobId, u32, u32), VecDeque<(u64, Digest)>>,
}

#[derive(Clone, Copy, Debug)]
struct Timed {
    /// Percent of the time that the node says it takes.
    percent: u64,
    numerics: u64,
}

/// One challenge as the coordinator timed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// From the question to the answer.
    pub(crate) took_ns: u64,
    /// The round trip, which is part of it.
    pub(crate) way_ns: u64,
    /// What it should take by the node's advert.
    pub(crate) expected_ns: u64,
    /// No request of the job ran meanwhile, for which the challenge might have waited.
    pub(crate) quiet: bool,
}

#[derive(Clone, Copy, Debug)]
struct Digest {
    node: NodeId,
    numerics: u64,
    digest: u64,
}

/// Digests kept of the same layers: the challenges of a stage and of its standby in one period.
const DIGESTS_MAX: usize = 8;
/// A node that takes as long as it says.
const AS_IT_SAYS: u64 = 100;

impl Speeds {
    /// A node of this arithmetic was timed. Returns the percentage if plans are to count otherwise with it from now on.
    ///
    /// Requests slow a challenge down, so one beside them says that a node is slower only if it is far slower.
    pub(crate) fn handle_measured(&mut self, node: NodeId, numerics: u64, timing: Timing) -> Option<u32> {
        let percent_of = |ns: u64| ns.saturating_mul(100) / timing.expected_ns.max(1);
        let (least, most) = (percent_of(timing.took_ns.saturating_sub(timing.way_ns)), percent_of(timing.took_ns));
        let before = self.timed.get(&node).map_or(AS_IT_SAYS, |timed| timed.percent);
        let percent = before.clamp(least, most).clamp(FASTER_PERCENT_MIN, SLOWER_PERCENT_MAX);
        let loaded = !timing.quiet && percent > before && percent < SLOWER_TIMES * 100;
        // By more than a quarter: timings vary, and plans must not follow each of them.
        let moved = percent.abs_diff(before) * 4 > before;
        let percent = if moved && !loaded { percent } else { before };
        self.timed.insert(node, Timed { percent, numerics });
        (percent != before).then(|| u32::try_from(percent).unwrap_or(u32::MAX))
    }

    /// Percent of the time it says that a node is planned with.
    ///
    /// One that was never timed is taken for as good as the best that was, of the same arithmetic if there is one: what a whole
    /// stage takes beyond its products is common to all, and without this a job would move on to nodes only because nobody has
    /// timed them yet. No node is taken for faster than it says before it was timed.
    fn percent(&self, node: NodeId, numerics: u64) -> u64 {
        if let Some(timed) = self.timed.get(&node) {
            return timed.percent;
        }
        let usual = || self.timed.values().filter(|timed| timed.percent < SLOWER_TIMES * 100);
        let alike = usual().filter(|timed| timed.numerics == numerics).map(|timed| timed.percent).min();
        let best = alike.or_else(|| usual().map(|timed| timed.percent).min());
        best.unwrap_or(AS_IT_SAYS).clamp(AS_IT_SAYS, UNTIMED_PERCENT_MAX)
    }

    /// What a node made of the rows of a challenge; which node made something else of the same, if one did.
    pub(crate) fn handle_digest(
        &mut self,
        job: JobId,
        layers: &Range<u32>,
        node: NodeId,
        numerics: u64,
        (nonce, digest): (u64, u64),
    ) -> Option<String> {
        let known = self.digests.entry((job, layers.start, layers.end)).or_default();
        let old = known.iter().find(|(asked, old)| *asked == nonce && old.node != node).map(|(_, old)| *old);
        known.push_back((nonce, Digest { node, numerics, digest }));
        if known.len() > DIGESTS_MAX {
            known.pop_front();
        }
        let old = old?;
        (old.numerics == numerics && old.digest != digest).then(|| {
            format!(
                "{} and {node} made different rows of the same rows with layers {} of job {:x}, though they say that \
                 they compute alike: one of them computes wrongly, or not at all",
                old.node,
                partitioner::explain::layers(layers),
                job.0
            )
        })
    }

    /// The node is gone: in another life it may be another machine.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.timed.remove(&node);
        for known in self.digests.values_mut() {
            known.retain(|(_, digest)| digest.node != node);
        }
    }

    /// The job is over.
    pub(crate) fn forget_job(&mut self, job: JobId) {
        self.digests.retain(|(other, ..), _| *other != job);
    }

    /// The device as it was timed.
    pub(crate) fn correct(&self, device: &mut Device) {
        let percent = self.percent(NodeId::from(device.id), device.numerics);
        if percent == AS_IT_SAYS {
            return;
        }
        let scaled = |speed: u64| {
            let scaled = u64::try_from(u128::from(speed) * 100 / u128::from(percent)).unwrap_or(u64::MAX);
            scaled.max(u64::from(speed > 0))
        };
        device.bytes_per_second = scaled(device.bytes_per_second);
        device.flops_per_second = scaled(device.flops_per_second);
        device.cache_bytes_per_second = scaled(device.cache_bytes_per_second);
        device.step_ns = device.step_ns.saturating_mul(percent) / 100;
        device.layer_ns = device.layer_ns.saturating_mul(percent) / 100;
        if percent >= SLOWER_TIMES * 100 {
            // So much is the machine, not the model: its grids are as slow.
            device.copy_bytes_per_second = scaled(device.copy_bytes_per_second);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);
    const C: NodeId = NodeId([3; 16]);
    const MILLISECOND: u64 = 1_000_000;

    fn device(node: NodeId) -> Device {
        Device {
            id: node.into(),
            name: String::new(),
            machine: 1,
            zone: String::new(),
            memory: 1,
            bytes_per_second: 1_000,
            flops_per_second: 0,
            copy_bytes_per_second: 500,
            step_ns: 10,
            layer_ns: 20,
            cache_bytes_per_second: 2_000,
            numerics: 1,
            pass_steps: 1,
            excluded: false,
        }
    }

    /// A challenge that should take 10 ms.
    fn quiet(took_ms: u64) -> Timing {
        Timing { took_ns: took_ms * MILLISECOND, way_ns: 0, expected_ns: 10 * MILLISECOND, quiet: true }
    }

    fn busy(took_ms: u64) -> Timing {
        Timing { quiet: false, ..quiet(took_ms) }
    }

    fn bytes_per_second(speeds: &Speeds, node: NodeId) -> u64 {
        let mut device = device(node);
        speeds.correct(&mut device);
        device.bytes_per_second
    }

    #[test]
    fn speeds_are_corrected_both_ways_by_what_stages_take() {
        let mut speeds = Speeds::default();
        assert_eq!(speeds.handle_measured(A, 1, quiet(12)), None, "timings vary by so much");
        assert_eq!(speeds.handle_measured(A, 1, quiet(20)), Some(200), "half as fast as it says");
        assert_eq!(bytes_per_second(&speeds, A), 500);
        assert_eq!(speeds.handle_measured(A, 1, quiet(18)), None, "no news");
        assert_eq!(speeds.handle_measured(A, 1, quiet(9)), Some(90));
        assert_eq!(speeds.handle_measured(B, 1, quiet(5)), Some(50), "twice as fast as it says");
        assert_eq!(bytes_per_second(&speeds, B), 2_000);
        assert_eq!(speeds.handle_measured(B, 1, quiet(0)), Some(25), "but not without bound");
        speeds.forget(B);
        assert_eq!(bytes_per_second(&speeds, B), 1_000, "another life is another machine");
    }

    #[test]
    fn all_figures_of_a_stage_are_scaled_alike() {
        let figures = |took_ms: u64| {
            let mut speeds = Speeds::default();
            speeds.handle_measured(A, 1, quiet(took_ms));
            let mut corrected = device(A);
            speeds.correct(&mut corrected);
            let Device { bytes_per_second, cache_bytes_per_second, step_ns, layer_ns, .. } = corrected;
            (bytes_per_second, cache_bytes_per_second, step_ns, layer_ns)
        };
        assert_eq!(figures(10), (1_000, 2_000, 10, 20), "as it says");
        assert_eq!(figures(20), (500, 1_000, 20, 40), "half as fast");
        assert_eq!(figures(5), (2_000, 4_000, 5, 10), "twice as fast");
        let mut unmeasured = Device { cache_bytes_per_second: 0, ..device(A) };
        let mut speeds = Speeds::default();
        speeds.handle_measured(A, 1, quiet(20));
        speeds.correct(&mut unmeasured);
        assert_eq!(unmeasured.cache_bytes_per_second, 0, "what was not measured stays so");
    }

    #[test]
    fn a_node_over_three_times_slower_than_it_says_is_planned_with_as_it_is() {
        let mut speeds = Speeds::default();
        assert_eq!(speeds.handle_measured(A, 1, busy(29)), None, "what requests may do");
        assert_eq!(speeds.handle_measured(A, 1, busy(100)), Some(1_000), "what they do not");
        assert_eq!(speeds.handle_measured(A, 1, busy(110)), None, "no news");
        let mut corrected = device(A);
        speeds.correct(&mut corrected);
        assert_eq!((corrected.bytes_per_second, corrected.flops_per_second, corrected.step_ns), (100, 0, 100));
        assert_eq!(corrected.copy_bytes_per_second, 50, "the whole machine is slow");
        assert_eq!(bytes_per_second(&speeds, B), 1_000, "others are not suspected for it");
        assert_eq!(speeds.handle_measured(A, 1, busy(25)), Some(250), "better, but not what it says");
        assert_eq!(speeds.handle_measured(A, 1, busy(11)), Some(110));
    }

    #[test]
    fn no_node_looks_faster_than_it_answers_nor_slower_than_its_link() {
        let mut speeds = Speeds::default();
        let far = |took_ms: u64| Timing { way_ns: 30 * MILLISECOND, ..quiet(took_ms) };
        assert_eq!(speeds.handle_measured(A, 1, far(32)), None, "2 to 32 ms for what should take 10");
        assert_eq!(speeds.handle_measured(A, 1, far(5)), Some(50), "5 ms at most");
        assert_eq!(speeds.handle_measured(A, 1, far(60)), Some(300), "30 ms at least");
    }

    #[test]
    fn nodes_never_timed_are_taken_for_as_good_as_the_best_that_was() {
        let mut speeds = Speeds::default();
        speeds.handle_measured(A, 1, quiet(15));
        assert_eq!(bytes_per_second(&speeds, C), 666, "stages take half as long again as their products: C's will too");
        speeds.handle_measured(B, 2, quiet(13));
        assert_eq!(bytes_per_second(&speeds, C), 666, "another arithmetic's figure does not replace its own kind's");
        speeds.handle_measured(A, 1, quiet(28));
        assert_eq!(bytes_per_second(&speeds, C), 666, "so much more than its products is A's own");
        speeds.handle_measured(A, 1, quiet(4));
        assert_eq!(bytes_per_second(&speeds, C), 1_000, "nor is it believed to be faster than it says");
    }

    #[test]
    fn rows_that_differ_though_they_should_not_are_told() {
        let mut speeds = Speeds::default();
        assert_eq!(speeds.handle_digest(JobId(1), &(0..4), A, 7, (1, 42)), None);
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), B, 7, (1, 43)), None, "other layers");
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), A, 8, (1, 44)), None, "other numerics");
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), A, 8, (2, 45)), None, "another question");
        assert!(
            speeds
                .handle_digest(JobId(1), &(4..8), B, 8, (2, 46))
                .is_some_and(|what| what.contains("differently") || what.contains("different rows"))
        );
    }
}
