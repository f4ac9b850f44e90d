//! When another plan is looked for though the present one is not lost: a stage does not become ready, or the head's own
//! executor does not get on. There may be no other plan; then the present one is waited for.
use crate::time::{Duration, Instant};

/// The search of one job, and how long its stages usually take to load.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    /// The plan that is awaited.
    token: Option<u64>,
    /// When the present placement began, what is allowed it, and when that is over.
    began: Instant,
    allowed: Duration,
    due: Instant,
    /// Running mean of the nanoseconds per mebibyte from `Prepare` to ready, of stages that were loaded.
    pace: Option<u64>,
}

impl Elsewhere {
    /// A placement begins: its largest stage has so many bytes, and a token takes so long.
    pub(super) fn begin(&mut self, now: Instant, bytes: u64, token_ns: u64) {
        // Until something was measured: a stage may have to come over a slow network.
        let pace = self.pace.map_or(PACE_UNKNOWN, |pace| pace.saturating_mul(LOAD_FACTOR));
        let loading = Duration::from_nanos(pace.saturating_mul(bytes >> 20));
        // A stage that stays answers when the batch that runs is done.
        let batch = Duration::from_nanos(token_ns.saturating_mul(BATCH_TOKENS));
        self.token = None;
        self.began = now;
        self.allowed = READY_MIN + loading + batch;
        self.due = now + self.allowed;
    }

    /// A stage of so many bytes that had to be loaded is ready.
    pub(super) fn learn(&mut self, now: Instant, bytes: u64) {
        let took = u64::try_from(now.since(self.began).as_nanos()).unwrap_or(u64::MAX);
        let pace = took / (bytes >> 20).max(1);
        self.pace = Some(self.pace.map_or(pace, |old| old / 4 * 3 + pace / 4));
    }

    /// When stages that are not ready have been waited for long enough to ask for a plan without them.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// A plan is asked for. If there is none, the next one is asked for after twice the time: so a network on which all
    /// take long is not asked for more and more.
    pub(super) fn ask(&mut self, now: Instant, token: u64) {
        self.token = Some(token);
        self.allowed = self.allowed.saturating_mul(2);
        self.due = now + self.allowed;
    }

    /// Whether this plan was asked for, and is awaited still.
    pub(super) fn awaits(&self, token: u64) -> bool {
        self.token == Some(token)
    }

    /// The plan came, or is not wanted any more.
    pub(super) fn end(&mut self) {
        self.token = None;
    }
}

/// What any placement is allowed: a few round trips, a lost connection.
const READY_MIN: Duration = Duration::from_secs(2);
/// Nanoseconds per mebibyte allowed before any load was measured: 16 MiB/s.
const PACE_UNKNOWN: u64 = 62_500_000;
/// How much longer than the mean a load may take.
const LOAD_FACTOR: u64 = 4;
/// How many tokens' time a batch may take that runs before a stage answers: a chunk of a prompt.
const BATCH_TOKENS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    #[test]
    fn what_was_measured_says_how_long_to_wait() {
        let mut elsewhere = Elsewhere::default();
        elsewhere.begin(at(0), GIB, 0);
        assert_eq!(elsewhere.due(), at(66_000), "a GiB at 16 MiB/s");
        elsewhere.learn(at(1024), GIB);
        elsewhere.begin(at(2000), GIB, 10_000_000);
        assert_eq!(elsewhere.due(), at(2000 + 2000 + 4096 + 1000));
    }

    #[test]
    fn each_search_in_vain_waits_for_twice_as_long() {
        let mut elsewhere = Elsewhere::default();
        elsewhere.begin(at(0), 0, 0);
        elsewhere.ask(at(2000), 7);
        assert!(elsewhere.awaits(7) && !elsewhere.awaits(8));
        assert_eq!(elsewhere.due(), at(6000));
        elsewhere.end();
        assert!(!elsewhere.awaits(7));
        elsewhere.ask(at(6000), 8);
        assert_eq!(elsewhere.due(), at(14_000));
    }
}
