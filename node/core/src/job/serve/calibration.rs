//! Calibration: timed challenges of one served model that measure whether its nodes compute as fast as they report.
//!
//! The coordinator asks every node, itself included, to run a few steps of the stage that the node holds, and takes the
//! time. The shortest of a few answers counts, because one may wait behind a busy executor. The results of a stage and
//! its standby are compared, and no node gets the same question twice: a node that answers without computing is
//! detected.
use crate::id::{JobId, NodeId};
use crate::limits::{CHALLENGE_EVERY, CHALLENGE_MAX, CHALLENGE_SOON, CHALLENGES};
use crate::time::{Duration, Instant};
use alloc::collections::{BTreeMap, VecDeque};
use core::ops::Range;
use partitioner::DeviceId;

/// Challenges of one model.
#[derive(Debug, Default)]
pub(super) struct Calibration {
    by_device: BTreeMap<DeviceId, Probe>,
    running: Option<Running>,
}

#[derive(Debug, Default)]
struct Probe {
    /// The layers that the device holds. The answers are dropped when it holds others.
    layers: Range<u32>,
    /// Times of the last [`CHALLENGES`] answers, and whether no request ran meanwhile.
    took: VecDeque<(Duration, bool)>,
    /// Answers that are still needed before the measurement is complete.
    needed: usize,
    due: Instant,
    /// The period of [`CHALLENGE_EVERY`] of the last challenge, and the number of that challenge in the period.
    asked: (u64, u32),
}

/// Measured speed of a device, once enough challenges were answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MeasuredSpeed {
    pub(super) device: DeviceId,
    pub(super) layers: Range<u32>,
    /// The shortest time of the last answers.
    pub(super) took: Duration,
    /// Whether no request of the job ran meanwhile.
    pub(super) quiet: bool,
    /// Nonce of the last answer.
    pub(super) nonce: u64,
}

#[derive(Debug)]
struct Running {
    device: DeviceId,
    nonce: u64,
    sent: Instant,
    /// Result of `Requests::quiet` at that time.
    quiet: Option<u64>,
}

impl Calibration {
    /// The next challenge, if one is due: the device and the nonce. `holders`: devices and the layers that they hold in
    /// memory.
    pub(super) fn next(
        &mut self,
        now: Instant,
        job: JobId,
        holders: &[(DeviceId, Range<u32>)],
        quiet: Option<u64>,
    ) -> Option<(DeviceId, u64)> {
        self.by_device
            .retain(|device, probe| holders.iter().any(|(held, layers)| held == device && *layers == probe.layers));
        for (device, layers) in holders {
            self.by_device.entry(*device).or_insert_with(|| Probe {
                layers: layers.clone(),
                took: VecDeque::new(),
                needed: CHALLENGES,
                due: now + CHALLENGE_SOON,
                asked: (0, 0),
            });
        }
        if let Some(lost) = self.running.take_if(|running| now.since(running.sent) >= CHALLENGE_MAX)
            && let Some(probe) = self.by_device.get_mut(&lost.device)
        {
            probe.due = now + CHALLENGE_MAX;
        }
        if self.running.is_some() {
            return None;
        }
        let (&device, probe) = self.by_device.iter_mut().min_by_key(|(_, probe)| probe.due)?;
        if probe.due > now {
            return None;
        }
        let period = now.0 / CHALLENGE_EVERY.as_nanos() as u64;
        probe.asked = if probe.asked.0 == period { (period, probe.asked.1 + 1) } else { (period, 0) };
        let nonce = nonce_of(job, &probe.layers, probe.asked);
        self.running = Some(Running { device, nonce, sent: now, quiet });
        Some((device, nonce))
    }

    /// A node answered. Returns the device, its layers and the time that they took, once enough answers are known.
    pub(super) fn handle_answer(
        &mut self,
        now: Instant,
        node: NodeId,
        nonce: u64,
        done: bool,
        quiet: Option<u64>,
    ) -> Option<MeasuredSpeed> {
        let running = self.running.take_if(|running| NodeId::from(running.device) == node && running.nonce == nonce)?;
        let probe = self.by_device.get_mut(&running.device)?;
        if !done {
            probe.due = now + CHALLENGE_MAX; // it had no memory for the challenge
            return None;
        }
        if probe.took.len() >= CHALLENGES {
            probe.took.pop_front();
        }
        probe.took.push_back((now.since(running.sent), quiet.is_some() && quiet == running.quiet));
        probe.needed = probe.needed.saturating_sub(1);
        probe.due = now + if probe.needed == 0 { CHALLENGE_EVERY } else { CHALLENGE_SOON };
        let &(took, quiet) = probe.took.iter().min_by_key(|(took, _)| *took)?;
        (probe.took.len() >= CHALLENGES).then(|| MeasuredSpeed {
            device: running.device,
            layers: probe.layers.clone(),
            took,
            quiet,
            nonce,
        })
    }

    /// Measures all nodes again. What slowed one down may have passed.
    pub(super) fn repeat(&mut self, now: Instant) {
        for probe in self.by_device.values_mut() {
            probe.needed = CHALLENGES;
            probe.due = probe.due.min(now + CHALLENGE_SOON);
        }
    }

    /// When the next challenge or timeout is due.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        match &self.running {
            Some(running) => Some(running.sent + CHALLENGE_MAX),
            None => self.by_device.values().map(|probe| probe.due).min(),
        }
    }
}

/// Nonce of a challenge. Equal for the nth challenge of a period of all nodes that hold these layers of the job, so
/// that their rows can be compared. Different for every challenge of one node.
fn nonce_of(job: JobId, layers: &Range<u32>, (period, nth): (u64, u32)) -> u64 {
    let asked = (period.wrapping_mul(64) + u64::from(nth)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    job.0.rotate_left(17) ^ (u64::from(layers.start) << 32 | u64::from(layers.end)) ^ asked
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const A: DeviceId = DeviceId::first([1; 16]);
    const B: DeviceId = DeviceId::first([2; 16]);

    #[test]
    fn each_holder_is_challenged_in_turn_and_the_fastest_answer_counts() {
        let mut calibration = Calibration::default();
        let holders = [(A, 0..4), (B, 0..4)];
        let (mut now, mut asked, mut said) = (Instant(0), Vec::new(), Vec::new());
        for round in 0..600u64 {
            if let Some((node, nonce)) = calibration.next(now, JobId(1), &holders, Some(round)) {
                asked.push((node, nonce));
                assert_eq!(calibration.next(now, JobId(1), &holders, Some(round)), None, "one at a time");
                now = now + Duration::from_millis(10 + round % 7);
                let begun = if node == A { round } else { round + 1 };
                said.extend(
                    calibration.handle_answer(now, node.into(), nonce, true, Some(begun)).map(|found| (node, found)),
                );
            }
            now = now + Duration::from_millis(20);
        }
        assert_eq!(
            asked.iter().map(|(node, _)| *node).collect::<Vec<_>>(),
            [A, B, A, B, A, B],
            "three each, none for a minute"
        );
        let of = |wanted: DeviceId| {
            asked.iter().filter(|(node, _)| *node == wanted).map(|(_, nonce)| *nonce).collect::<Vec<_>>()
        };
        assert_eq!(of(A), of(B), "rows of equal questions are compared");
        assert!(of(A)[0] != of(A)[1] && of(A)[1] != of(A)[2], "an answer cannot be given twice");
        assert_eq!(said.len(), 2);
        assert!(said.iter().all(|(_, found)| found.took <= Duration::from_millis(14)), "{said:?}");
        let quiet: Vec<bool> = said.iter().map(|(_, found)| found.quiet).collect();
        assert_eq!(quiet, [true, false], "requests began while B was challenged");
    }

    #[test]
    fn a_slow_answer_is_forgotten_when_all_nodes_are_measured_again() {
        let holders = [(A, 0..4)];
        let mut calibration = Calibration::default();
        calibration.next(Instant(0), JobId(1), &holders, None);
        let mut answer = |millis: u64, repeat: bool| {
            let due = calibration.next_wakeup().expect("a challenge is due");
            let (node, nonce) = calibration.next(due, JobId(1), &holders, None).expect("it is sent");
            let now = due + Duration::from_millis(millis);
            let found = calibration.handle_answer(now, node.into(), nonce, true, None);
            if repeat {
                calibration.repeat(now);
            }
            (found.map(|found| found.took.as_millis()), calibration.next_wakeup().map(|next| next.since(now)))
        };
        assert_eq!(answer(700, false), (None, Some(CHALLENGE_SOON)));
        assert_eq!(answer(800, false), (None, Some(CHALLENGE_SOON)));
        assert_eq!(answer(900, true), (Some(700), Some(CHALLENGE_SOON)), "all nodes are measured again");
        assert_eq!(answer(10, false), (Some(10), Some(CHALLENGE_SOON)));
        assert_eq!(answer(20, false), (Some(10), Some(CHALLENGE_SOON)));
        assert_eq!(answer(30, false), (Some(10), Some(CHALLENGE_EVERY)));
    }

    #[test]
    fn a_missing_answer_blocks_no_other_node() {
        let mut calibration = Calibration::default();
        let holders = [(A, 0..4), (B, 4..8)];
        calibration.next(Instant(0), JobId(1), &holders, None);
        let due = calibration.next_wakeup().expect("the first is due");
        let (first, nonce) = calibration.next(due, JobId(1), &holders, None).expect("it is challenged");
        let late = calibration.next_wakeup().expect("its answer is awaited");
        let (second, other) = calibration.next(late, JobId(1), &holders, None).expect("the other one's turn");
        assert_ne!((first, nonce), (second, other), "other layers, other rows");
        assert_eq!(calibration.handle_answer(late, first.into(), nonce, true, None), None, "too late");
    }
}
