//! Prepare timeout: when a fallback plan is asked for although nothing of the present one is lost, because a part does not become
//! ready or an executor is stalled. There may be no other plan; then the job waits for the present one.
use crate::time::{Duration, Instant};

/// The fallback plan of one job, and how long its parts usually take to load.
#[derive(Debug, Default)]
pub(super) struct PrepareTimeout {
    /// The question whose plan is awaited.
    question: Option<u32>,
    /// When the present placement began, what is allowed it, and when that is over.
    began: Instant,
    allowed: Duration,
    due: Instant,
    /// Running mean of the nanoseconds per mebibyte from `Prepare` to ready, of stages that were loaded.
    pace: Option<u64>,
}

impl PrepareTimeout {
    /// A placement begins: its largest stage has so many bytes, and a token takes so long.
    pub(super) fn begin(&mut self, now: Instant, bytes: u64, token_ns: u64) {
        // Until something was measured: a stage may have to come over a slow network.
        let pace = self.pace.map_or(PACE_UNKNOWN, |pace| pace.saturating_mul(LOAD_FACTOR));
        let loading = Duration::from_nanos(pace.saturating_mul(bytes >> 20));
        // A stage that stays answers when the batch that runs is done.
        let batch = Duration::from_nanos(token_ns.saturating_mul(BATCH_TOKENS));
        self.question = None;
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
    pub(super) fn ask(&mut self, now: Instant, question: u32) {
        self.question = Some(question);
        self.allowed = self.allowed.saturating_mul(2);
        self.due = now + self.allowed;
    }

    /// Whether this plan was asked for, and is awaited still.
    pub(super) fn awaits(&self, question: u32) -> bool {
        self.question == Some(question)
    }

    /// The plan came, or is not wanted any more.
    pub(super) fn end(&mut self) {
        self.question = None;
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
        let mut timeout = PrepareTimeout::default();
        timeout.begin(at(0), GIB, 0);
        assert_eq!(timeout.due(), at(66_000), "a GiB at 16 MiB/s");
        timeout.learn(at(1024), GIB);
        timeout.begin(at(2000), GIB, 10_000_000);
        assert_eq!(timeout.due(), at(2000 + 2000 + 4096 + 1000));
    }

    #[test]
    fn each_search_in_vain_waits_for_twice_as_long() {
        let mut timeout = PrepareTimeout::default();
        timeout.begin(at(0), 0, 0);
        timeout.ask(at(2000), 7);
        assert!(timeout.awaits(7) && !timeout.awaits(8));
        assert_eq!(timeout.due(), at(6000));
        timeout.end();
        assert!(!timeout.awaits(7));
        timeout.ask(at(6000), 8);
        assert_eq!(timeout.due(), at(14_000));
    }
}
