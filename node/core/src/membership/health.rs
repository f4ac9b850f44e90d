//! Local health: how far this node trusts its own judgement of others, and what it knows of them. It falls with lost answers and
//! with this node's own lateness.
use crate::time::{Duration, Instant};

/// Local health after Lifeguard: the less healthy this node is, the more time a suspect gets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Health {
    /// Share of direct probes without a timely answer, × 1,000, over roughly the last 16.
    missed_e3: u32,
    probing: bool,
    doubtful_until: Instant,
    /// Probes answered in a row since most were lost; `None` once that outage is reported as over.
    regained: Option<u8>,
    /// When the end of an outage may be reported again.
    next_report: Instant,
}

impl Health {
    /// A probe was sent.
    pub(super) fn probed(&mut self) {
        self.probing = true;
    }

    /// The probe was answered.
    pub(super) fn acked(&mut self) {
        if core::mem::take(&mut self.probing) {
            self.answered(true);
        }
    }

    /// The probe's time is over.
    pub(super) fn judged(&mut self) {
        if core::mem::take(&mut self.probing) {
            self.answered(false);
        }
    }

    /// The probe is judged later, by `answered`.
    pub(super) fn put_off(&mut self) {
        self.probing = false;
    }

    /// A probe was answered in time, or was not.
    pub(super) fn answered(&mut self, in_time: bool) {
        if in_time {
            self.missed_e3 -= self.missed_e3 / 16;
            self.regained = self.regained.map(|answers| answers.saturating_add(1));
            if self.regains() {
                // The share lags behind by a second.
                self.missed_e3 = self.missed_e3.min(MISSED_MANY_E3);
            }
        } else {
            self.missed_e3 += (1000 - self.missed_e3) / 16;
            self.regained = (self.regained.is_some() || self.missed_e3 > MISSED_MANY_E3).then_some(0);
        }
    }

    /// Whether an outage just ended, during which this node missed gossip as well as answers. True once per outage.
    pub(super) fn take_recovery(&mut self, now: Instant) -> bool {
        let recovered = now >= self.next_report && self.regains();
        if recovered {
            self.regained = None;
            self.next_report = now + REPORT_EVERY;
        }
        recovered
    }

    fn regains(&self) -> bool {
        self.regained.is_some_and(|answers| answers >= REGAINED)
    }

    /// This node's own thread was late.
    pub(super) fn late(&mut self, now: Instant) {
        self.doubtful_until = now + DOUBT;
    }

    /// Another node suspected this node.
    pub(super) fn doubted(&mut self, now: Instant) {
        self.doubtful_until = now + DOUBT;
    }

    /// Factor by which a suspect's time to refute is stretched.
    pub(super) fn patience(&self, now: Instant) -> u32 {
        // A round trip at 1 % packet loss misses 2 %, at 5 % loss 10 %: those stay near the base.
        let losses = match self.missed_e3 {
            0..=150 => 1,
            151..=MISSED_MANY_E3 => 2,
            _ => 4,
        };
        losses + u32::from(now < self.doubtful_until)
    }
}

/// How long one such event counts.
const DOUBT: Duration = Duration::from_secs(2);
/// Missed answers × 1,000 above which most datagrams to or from this node are lost: at 25 % packet loss a round trip misses 44 %.
const MISSED_MANY_E3: u32 = 400;
/// Answers in a row that end an outage: at 75 % packet loss, two probes in a row are answered once in 25 s.
const REGAINED: u8 = 2;
/// On a network that always loses a third, two answers in a row come about every second: each would cost an exchange of all
/// state, where one in thirty seconds is usual.
const REPORT_EVERY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_and_lateness_stretch_the_time_to_refute() {
        let mut health = Health::default();
        let now = Instant(1);
        assert_eq!(health.patience(now), 1);
        for _ in 0..16 {
            health.probed();
            health.judged();
        }
        assert_eq!(health.patience(now), 4);
        for _ in 0..64 {
            health.probed();
            health.acked();
            health.judged();
        }
        assert_eq!(health.patience(now), 1, "answers restore trust, and a judged answer is no miss");
        health.late(now);
        assert_eq!(health.patience(now), 2);
        assert_eq!(health.patience(now + DOUBT), 1);
    }

    #[test]
    fn the_end_of_an_outage_is_reported_once_and_ends_the_longest_patience() {
        let mut health = Health::default();
        let now = Instant(1);
        let answer = |health: &mut Health, answers: &[bool]| answers.iter().for_each(|&given| health.answered(given));
        answer(&mut health, &[false, false, true, true]);
        assert!(!health.take_recovery(now), "two lost answers are no outage");
        answer(&mut health, &[false; 16]);
        answer(&mut health, &[true, false, true]);
        assert!(!health.take_recovery(now) && health.patience(now) == 4, "not two answers in a row");
        answer(&mut health, &[true]);
        assert_eq!(health.patience(now), 2, "answers arrive again");
        assert!(health.take_recovery(now) && !health.take_recovery(now));
        answer(&mut health, &[false; 16]);
        answer(&mut health, &[true; 2]);
        assert!(!health.take_recovery(now), "too soon after the last one");
        assert!(health.take_recovery(now + REPORT_EVERY));
    }
}
