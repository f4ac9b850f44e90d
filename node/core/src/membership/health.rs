//! Local health: how far this node trusts its own judgement of others. It falls with lost answers and with this node's own
//! lateness.
use crate::time::{Duration, Instant};

/// Local health after Lifeguard: the less healthy this node is, the more time a suspect gets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Health {
    /// Share of direct probes without a timely answer, × 1,000, over roughly the last 16.
    missed_e3: u32,
    probing: bool,
    doubtful_until: Instant,
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
        } else {
            self.missed_e3 += (1000 - self.missed_e3) / 16;
        }
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
            151..=400 => 2,
            _ => 4,
        };
        losses + u32::from(now < self.doubtful_until)
    }
}

/// How long one such event counts.
const DOUBT: Duration = Duration::from_secs(2);

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
}
