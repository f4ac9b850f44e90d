//! How busy the stages of a model are while requests run: the rest is the bubble of the pipeline.
use crate::id::PartId;
use crate::time::{Duration, Instant};
use alloc::collections::BTreeMap;

/// What the stages reported.
#[derive(Debug, Default)]
pub(super) struct Occupancy {
    /// Since when at least one request runs.
    since: Instant,
    parts: BTreeMap<PartId, Report>,
}

#[derive(Clone, Copy, Debug)]
struct Report {
    at: Instant,
    /// Total time that the stage has computed.
    busy: Duration,
    /// Share of the time since the report before, of 1000, if requests ran all that time.
    share: Option<u32>,
}

impl Occupancy {
    /// The first request begins after a time without any.
    pub(super) fn begin(&mut self, now: Instant) {
        self.since = now;
    }

    /// There is a new placement.
    pub(super) fn clear(&mut self) {
        self.parts.clear();
    }

    /// A stage has computed this long in total.
    pub(super) fn take(&mut self, now: Instant, part: PartId, busy: Duration) {
        let before = self.parts.get(&part).filter(|before| before.at >= self.since && before.busy <= busy);
        let share = before.and_then(|before| {
            let (computed, passed) = (busy.saturating_sub(before.busy), now.since(before.at));
            computed.as_nanos().saturating_mul(1000).checked_div(passed.as_nanos())
        });
        let share = share.map(|share| u32::try_from(share).unwrap_or(1000).min(1000));
        self.parts.insert(part, Report { at: now, busy, share });
    }

    /// Share of the time that a stage computed of late, of 1000. `None` if it was not measured.
    pub(super) fn share(&self, part: PartId) -> Option<u32> {
        self.parts.get(&part)?.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_counts_time_in_which_requests_ran() {
        let at = |ms| Instant::default() + Duration::from_millis(ms);
        let mut occupancy = Occupancy::default();
        let part = PartId(1);
        occupancy.begin(at(1000));
        occupancy.take(at(2000), part, Duration::from_millis(300));
        assert_eq!(occupancy.share(part), None, "one report says nothing");
        occupancy.take(at(3000), part, Duration::from_millis(900));
        assert_eq!((occupancy.share(part), occupancy.share(PartId(0))), (Some(600), None));
        occupancy.begin(at(3500));
        occupancy.take(at(4000), part, Duration::from_millis(1000));
        assert_eq!(occupancy.share(part), None, "no request ran from some time on until 3500 ms");
        occupancy.take(at(5000), part, Duration::from_millis(1250));
        assert_eq!(occupancy.share(part), Some(250));
        occupancy.take(at(6000), part, Duration::from_millis(10));
        assert_eq!(occupancy.share(part), None, "the stage was loaded again");
        occupancy.take(at(6000), part, Duration::from_secs(9));
        assert_eq!(occupancy.share(part), None, "two reports at once");
    }
}
