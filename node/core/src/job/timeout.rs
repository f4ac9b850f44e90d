//! Prepare timeout: asks for a fallback plan although no part of the present placement is lost, because a part does not
//! become ready or an executor is stalled. If there is no other plan, the job waits for the present one.
use crate::time::{Duration, Instant};

/// The fallback question of one job, and how fast its parts usually load.
#[derive(Debug, Default)]
pub(super) struct PrepareTimeout {
    /// The pending question for a fallback plan.
    question: Option<u32>,
    /// When the present placement began, how long it may take, and when that time is over.
    began: Instant,
    allowed: Duration,
    due: Instant,
    /// Running mean of nanoseconds per mebibyte from `Prepare` to ready, of parts that were loaded.
    pace: Option<u64>,
}

impl PrepareTimeout {
    /// A placement begins. `bytes` is the size of its largest part, `token_ns` the predicted time per token or step.
    pub(super) fn begin(&mut self, now: Instant, bytes: u64, token_ns: u64) {
        // Before the first measurement: a stage may have to be fetched over a slow network.
        let pace = self.pace.map_or(PACE_UNKNOWN, |pace| pace.saturating_mul(LOAD_FACTOR));
        let loading = Duration::from_nanos(pace.saturating_mul(bytes >> 20));
        // A stage that stays answers when its running batch is done.
        let batch = Duration::from_nanos(token_ns.saturating_mul(BATCH_TOKENS));
        self.question = None;
        self.began = now;
        self.allowed = READY_MIN + loading + batch;
        self.due = now + self.allowed;
    }

    /// A part of this size is ready that had to be loaded.
    pub(super) fn learn(&mut self, now: Instant, bytes: u64) {
        let took = u64::try_from(now.since(self.began).as_nanos()).unwrap_or(u64::MAX);
        let pace = took / (bytes >> 20).max(1);
        self.pace = Some(self.pace.map_or(pace, |old| old / 4 * 3 + pace / 4));
    }

    /// When to ask for a plan without the parts that are not ready.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// A fallback plan is asked for. If there is none, the next question waits twice as long, so that a slow network
    /// does not cause more and more questions.
    pub(super) fn ask(&mut self, now: Instant, question: u32) {
        self.question = Some(question);
        self.allowed = self.allowed.saturating_mul(2);
        self.due = now + self.allowed;
    }

    /// Whether the answer to this question is awaited.
    pub(super) fn awaits(&self, question: u32) -> bool {
        self.question == Some(question)
    }

    /// The plan arrived, or is not needed any more.
    pub(super) fn end(&mut self) {
        self.question = None;
    }
}

/// Allowed for any placement: a few round trips, a lost connection.
const READY_MIN: Duration = Duration::from_secs(2);
/// Nanoseconds per mebibyte allowed before any load was measured: 16 MiB/s.
const PACE_UNKNOWN: u64 = 62_500_000;
/// Factor by which a load may exceed the mean.
const LOAD_FACTOR: u64 = 4;
/// Time allowed for the batch that runs before a stage answers, in tokens: a chunk of a prompt.
const BATCH_TOKENS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    #[test]
    fn measured_loads_set_the_timeout() {
        let mut timeout = PrepareTimeout::default();
        timeout.begin(at(0), GIB, 0);
        assert_eq!(timeout.due(), at(66_000), "a GiB at 16 MiB/s");
        timeout.learn(at(1024), GIB);
        timeout.begin(at(2000), GIB, 10_000_000);
        assert_eq!(timeout.due(), at(2000 + 2000 + 4096 + 1000));
    }

    #[test]
    fn each_question_without_a_plan_doubles_the_timeout() {
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
