//! Measured speed of nodes relative to their adverts, from this node's challenges: plans use the measured figures.
//!
//! A node's advertised figures count until one of its stages was timed. After that they are scaled, up or down, by the time
//! that the coordinator measured. That time includes the round trip, so it is an upper bound of what the node took; less the
//! round trip it is a lower bound. A ratio between the bounds changes nothing, and no node looks faster than its answers
//! arrive.
use crate::id::{JobId, NodeId};
use crate::limits::{FASTER_PERCENT_MIN, SLOWER_PERCENT_MAX, SLOWER_TIMES, UNTIMED_PERCENT_MAX};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::{format, string::String};
use core::ops::Range;
use partitioner::{Device, DeviceId};

/// Results of challenges.
#[derive(Debug, Default)]
pub(crate) struct MeasuredSpeeds {
    timed: BTreeMap<DeviceId, Timed>,
    /// Output digests of the last challenges, by job and layer range, each with its nonce; at most [`DIGESTS_MAX`] per range.
    digests: BTreeMap<(JobId, u32, u32), VecDeque<(u64, Digest)>>,
}

#[derive(Clone, Copy, Debug)]
struct Timed {
    /// Measured time in percent of the advertised time.
    percent: u64,
    numerics: u64,
}

/// One challenge as the coordinator timed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// From sending the challenge to receiving the answer.
    pub(crate) took_ns: u64,
    /// The round trip contained in it.
    pub(crate) way_ns: u64,
    /// Time predicted from the node's advert.
    pub(crate) expected_ns: u64,
    /// No request of the job ran meanwhile that could have delayed the challenge.
    pub(crate) quiet: bool,
}

#[derive(Clone, Copy, Debug)]
struct Digest {
    device: DeviceId,
    numerics: u64,
    digest: u64,
}

/// Digests retained per layer range: the challenges of a stage and of its standby in one period.
const DIGESTS_MAX: usize = 8;
/// A node that is as fast as advertised.
const AS_ADVERTISED: u64 = 100;

impl MeasuredSpeeds {
    /// A device with these numerics was timed. Returns its percentage if plans must use a new one.
    ///
    /// Requests slow a challenge down, so a challenge beside running requests counts only if the node is far slower.
    pub(crate) fn handle_measured(&mut self, device: DeviceId, numerics: u64, timing: Timing) -> Option<u32> {
        let percent_of = |ns: u64| ns.saturating_mul(100) / timing.expected_ns.max(1);
        let (least, most) = (percent_of(timing.took_ns.saturating_sub(timing.way_ns)), percent_of(timing.took_ns));
        let before = self.timed.get(&device).map_or(AS_ADVERTISED, |timed| timed.percent);
        let percent = before.clamp(least, most).clamp(FASTER_PERCENT_MIN, SLOWER_PERCENT_MAX);
        let loaded = !timing.quiet && percent > before && percent < SLOWER_TIMES * 100;
        // Changes of more than a quarter only: timings vary, and plans must not follow each variation.
        let moved = percent.abs_diff(before) * 4 > before;
        let percent = if moved && !loaded { percent } else { before };
        self.timed.insert(device, Timed { percent, numerics });
        (percent != before).then(|| u32::try_from(percent).unwrap_or(u32::MAX))
    }

    /// The step time assumed for a device, in percent of its advertised time.
    ///
    /// A device that was never timed counts as the best timed one, of the same numerics if there is one. What a whole stage
    /// takes besides its matrix products is common to all nodes; without this rule a job would move to nodes only because they
    /// were never timed. No node counts as faster than advertised before it was timed.
    fn percent(&self, device: DeviceId, numerics: u64) -> u64 {
        if let Some(timed) = self.timed.get(&device) {
            return timed.percent;
        }
        let usual = || self.timed.values().filter(|timed| timed.percent < SLOWER_TIMES * 100);
        let alike = usual().filter(|timed| timed.numerics == numerics).map(|timed| timed.percent).min();
        let best = alike.or_else(|| usual().map(|timed| timed.percent).min());
        best.unwrap_or(AS_ADVERTISED).clamp(AS_ADVERTISED, UNTIMED_PERCENT_MAX)
    }

    /// Records a device's digest of a challenge's output. Returns a report if another one with the same numerics produced a
    /// different digest.
    pub(crate) fn handle_digest(
        &mut self,
        job: JobId,
        layers: &Range<u32>,
        device: DeviceId,
        numerics: u64,
        (nonce, digest): (u64, u64),
    ) -> Option<String> {
        let known = self.digests.entry((job, layers.start, layers.end)).or_default();
        let old = known.iter().find(|(asked, old)| *asked == nonce && old.device != device).map(|(_, old)| *old);
        known.push_back((nonce, Digest { device, numerics, digest }));
        if known.len() > DIGESTS_MAX {
            known.pop_front();
        }
        let old = old?;
        (old.numerics == numerics && old.digest != digest).then(|| {
            format!(
                "{} and {} computed different rows from the same input with layers {} of job {:x}, though both \
                 advertise the same numerics: one of them computes wrongly, or not at all",
                NodeId::from(old.device),
                NodeId::from(device),
                partitioner::explain::layers(layers),
                job.0
            )
        })
    }

    /// The node is down: its next lifetime may run on another machine.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.timed.retain(|device, _| NodeId::from(*device) != node);
        for known in self.digests.values_mut() {
            known.retain(|(_, digest)| NodeId::from(digest.device) != node);
        }
    }

    /// The job ended.
    pub(crate) fn forget_job(&mut self, job: JobId) {
        self.digests.retain(|(other, ..), _| *other != job);
    }

    /// Scales a device's figures by its measured speed.
    pub(crate) fn correct(&self, device: &mut Device) {
        let percent = self.percent(device.id, device.numerics);
        if percent == AS_ADVERTISED {
            return;
        }
        let scaled = |speed: u64| {
            let scaled = u64::try_from(u128::from(speed) * 100 / u128::from(percent)).unwrap_or(u64::MAX);
            scaled.max(u64::from(speed > 0))
        };
        device.bytes_per_second = scaled(device.bytes_per_second);
        device.flops_per_second = scaled(device.flops_per_second);
        device.cache_bytes_per_second = scaled(device.cache_bytes_per_second);
        device.ram_bytes_per_second = scaled(device.ram_bytes_per_second);
        device.ram_flops_per_second = scaled(device.ram_flops_per_second);
        device.step_ns = device.step_ns.saturating_mul(percent) / 100;
        device.layer_ns = device.layer_ns.saturating_mul(percent) / 100;
        if percent >= SLOWER_TIMES * 100 {
            // A factor this large is the machine's, not the model's: its grid steps are slow too.
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
            id: node.device(0),
            name: String::new(),
            label: String::new(),
            machine: 1,
            zone: String::new(),
            memory: 1,
            bytes_per_second: 1_000,
            flops_per_second: 0,
            copy_bytes_per_second: 500,
            step_ns: 10,
            layer_ns: 20,
            cache_bytes_per_second: 2_000,
            ram: 0,
            ram_bytes_per_second: 0,
            ram_flops_per_second: 0,
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

    fn bytes_per_second(speeds: &MeasuredSpeeds, node: NodeId) -> u64 {
        let mut device = device(node);
        speeds.correct(&mut device);
        device.bytes_per_second
    }

    #[test]
    fn speeds_are_corrected_both_ways_by_what_stages_take() {
        let mut speeds = MeasuredSpeeds::default();
        assert_eq!(speeds.handle_measured(A.device(0), 1, quiet(12)), None, "within the variation of timings");
        assert_eq!(speeds.handle_measured(A.device(0), 1, quiet(20)), Some(200), "half as fast as advertised");
        assert_eq!(bytes_per_second(&speeds, A), 500);
        assert_eq!(speeds.handle_measured(A.device(0), 1, quiet(18)), None, "no change");
        assert_eq!(speeds.handle_measured(A.device(0), 1, quiet(9)), Some(90));
        assert_eq!(speeds.handle_measured(B.device(0), 1, quiet(5)), Some(50), "twice as fast as advertised");
        assert_eq!(bytes_per_second(&speeds, B), 2_000);
        assert_eq!(speeds.handle_measured(B.device(0), 1, quiet(0)), Some(25), "bounded");
        speeds.forget(B);
        assert_eq!(bytes_per_second(&speeds, B), 1_000, "another lifetime counts as another machine");
    }

    #[test]
    fn all_figures_of_a_stage_are_scaled_alike() {
        let figures = |took_ms: u64| {
            let mut speeds = MeasuredSpeeds::default();
            speeds.handle_measured(A.device(0), 1, quiet(took_ms));
            let mut corrected = device(A);
            speeds.correct(&mut corrected);
            let Device { bytes_per_second, cache_bytes_per_second, step_ns, layer_ns, .. } = corrected;
            (bytes_per_second, cache_bytes_per_second, step_ns, layer_ns)
        };
        assert_eq!(figures(10), (1_000, 2_000, 10, 20), "as advertised");
        assert_eq!(figures(20), (500, 1_000, 20, 40), "half as fast");
        assert_eq!(figures(5), (2_000, 4_000, 5, 10), "twice as fast");
        let mut unmeasured = Device { cache_bytes_per_second: 0, ..device(A) };
        let mut speeds = MeasuredSpeeds::default();
        speeds.handle_measured(A.device(0), 1, quiet(20));
        speeds.correct(&mut unmeasured);
        assert_eq!(unmeasured.cache_bytes_per_second, 0, "unmeasured figures stay unmeasured");
    }

    #[test]
    fn a_node_over_three_times_slower_than_advertised_is_planned_with_its_measured_speed() {
        let mut speeds = MeasuredSpeeds::default();
        assert_eq!(speeds.handle_measured(A.device(0), 1, busy(29)), None, "requests may explain this");
        assert_eq!(speeds.handle_measured(A.device(0), 1, busy(100)), Some(1_000), "requests cannot explain this");
        assert_eq!(speeds.handle_measured(A.device(0), 1, busy(110)), None, "no change");
        let mut corrected = device(A);
        speeds.correct(&mut corrected);
        assert_eq!((corrected.bytes_per_second, corrected.flops_per_second, corrected.step_ns), (100, 0, 100));
        assert_eq!(corrected.copy_bytes_per_second, 50, "the whole machine is slow");
        assert_eq!(bytes_per_second(&speeds, B), 1_000, "other nodes are unaffected");
        assert_eq!(speeds.handle_measured(A.device(0), 1, busy(25)), Some(250), "better, but slower than advertised");
        assert_eq!(speeds.handle_measured(A.device(0), 1, busy(11)), Some(110));
    }

    #[test]
    fn no_node_looks_faster_than_it_answers_nor_slower_than_its_link() {
        let mut speeds = MeasuredSpeeds::default();
        let far = |took_ms: u64| Timing { way_ns: 30 * MILLISECOND, ..quiet(took_ms) };
        assert_eq!(speeds.handle_measured(A.device(0), 1, far(32)), None, "2 to 32 ms for what should take 10");
        assert_eq!(speeds.handle_measured(A.device(0), 1, far(5)), Some(50), "5 ms at most");
        assert_eq!(speeds.handle_measured(A.device(0), 1, far(60)), Some(300), "30 ms at least");
    }

    #[test]
    fn a_node_never_timed_counts_as_the_best_timed_node() {
        let mut speeds = MeasuredSpeeds::default();
        speeds.handle_measured(A.device(0), 1, quiet(15));
        assert_eq!(bytes_per_second(&speeds, C), 666, "a stage takes 1.5 times its products: C's will too");
        speeds.handle_measured(B.device(0), 2, quiet(13));
        assert_eq!(bytes_per_second(&speeds, C), 666, "a node with other numerics does not count");
        speeds.handle_measured(A.device(0), 1, quiet(28));
        assert_eq!(bytes_per_second(&speeds, C), 666, "a factor this large is specific to A");
        speeds.handle_measured(A.device(0), 1, quiet(4));
        assert_eq!(bytes_per_second(&speeds, C), 1_000, "nor does it count as faster than advertised");
    }

    #[test]
    fn different_digests_with_the_same_numerics_are_reported() {
        let mut speeds = MeasuredSpeeds::default();
        assert_eq!(speeds.handle_digest(JobId(1), &(0..4), A.device(0), 7, (1, 42)), None);
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), B.device(0), 7, (1, 43)), None, "other layers");
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), A.device(0), 8, (1, 44)), None, "other numerics");
        assert_eq!(speeds.handle_digest(JobId(1), &(4..8), A.device(0), 8, (2, 45)), None, "another nonce");
        assert!(
            speeds
                .handle_digest(JobId(1), &(4..8), B.device(0), 8, (2, 46))
                .is_some_and(|what| what.contains("different rows"))
        );
    }
}
