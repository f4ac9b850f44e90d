//! Draft tokens of a request: guesses of what it repeats, or of a draft model.
//!
//! Stages verify drafts in the pass that computes the next token, so a right guess saves a pass. How many are sent follows from
//! how often guesses of the request were right, from what their rows cost, and from how long the request waits for them.
//! Next: `drafter.rs` (the draft model).
use crate::time::Duration;
use alloc::vec::Vec;

/// Guesses the next tokens, at most `most`: those that followed the last tokens where these occurred before. Of several places
/// the one with the longest match counts, of equal ones the last.
pub(super) fn guess(tokens: &[u32], most: usize) -> Vec<u32> {
    let Some((&last, before)) = tokens.split_last() else { return Vec::new() };
    let (mut best, mut from) = (MATCH_MIN - 1, None);
    for at in (before.len().saturating_sub(SEARCH_MAX)..before.len()).rev().filter(|&at| before[at] == last) {
        let earlier = before[..at].iter().rev().zip(before.iter().rev());
        let length = 1 + earlier.take(MATCH_MAX - 1).take_while(|(a, b)| a == b).count();
        if length > best {
            (best, from) = (length, Some(at + 1));
            if length == MATCH_MAX {
                break;
            }
        }
    }
    let Some(from) = from else { return Vec::new() };
    let mut drafts: Vec<u32> = tokens[from..].iter().copied().take(most).collect();
    while drafts.len() < most {
        // The match ends where the drafts begin: what repeats is shorter than the drafts.
        drafts.push(drafts[drafts.len() - (tokens.len() - from)]);
    }
    drafts
}

/// Tokens that must match: one alone says little.
const MATCH_MIN: usize = 2;
/// Tokens that are compared: longer matches are no better in practice (prompt lookup decoding, Saxena 2023, uses 3).
const MATCH_MAX: usize = 8;
/// Tokens that are searched, the last ones: some microseconds of each step.
const SEARCH_MAX: usize = 8192;

/// How often the guesses of a request are right, given that those before them are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Accuracy {
    /// Of 1024.
    share: u64,
}

impl Default for Accuracy {
    fn default() -> Self {
        Accuracy { share: 512 }
    }
}

impl Accuracy {
    /// Of a draft model that has not been measured: published ones are right in two thirds to nine tenths of the cases.
    pub(super) const OF_MODELS: Accuracy = Accuracy { share: 768 };

    /// A guess was right or wrong.
    pub(super) fn learn(&mut self, right: bool) {
        let target = if right { 1024 } else { 0 };
        self.share = (7 * self.share + target) / 8;
    }
}

/// A number of drafts, and how fast all requests that share the stages are with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Choice {
    /// Tokens of all of them per nanosecond, times 2^74.
    rate: u128,
    pub(super) drafts: usize,
}

/// Times of decode steps of a job, from the frame to its token, and its drafts so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepTimes {
    /// Without drafts, nanoseconds. 0 if not known.
    alone: u64,
    /// What each row of a draft adds.
    row: Option<u64>,
    /// The job was placed again since: a shorter time is adopted immediately.
    is_old: bool,
    /// Steps with drafts since the last one without.
    drafted: u32,
    /// Drafts whose step was answered, and those of them that were right.
    counts: (u64, u64),
}

impl StepTimes {
    /// A step with this number of drafts took this long.
    pub(super) fn learn(&mut self, drafts: u32, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counts.0 += u64::from(drafts);
        self.drafted = if drafts == 0 { 0 } else { self.drafted.saturating_add(1) };
        if drafts == 0 {
            // A pause after a loss says nothing about steps.
            self.alone = match self.alone {
                0 => took,
                alone if core::mem::take(&mut self.is_old) && took < alone => took,
                alone => (3 * alone + took.min(4 * alone)) / 4,
            };
            return;
        }
        let row = took.saturating_sub(self.alone) / u64::from(drafts);
        let row = row.min(self.alone);
        self.row = Some(self.row.map_or(row, |before| (7 * before + row) / 8));
    }

    /// The job was placed again: its steps may have become faster.
    pub(super) fn placed_again(&mut self) {
        self.is_old = true;
    }

    /// A draft was right.
    pub(super) fn count_right(&mut self) {
        self.counts.1 += 1;
    }

    /// Number of drafts whose step was answered, and of those of them that were right.
    pub(super) fn counts(&self) -> (u64, u64) {
        self.counts
    }

    /// The time of a step without drafts, nanoseconds. `None` if it is not known, or has to be measured again.
    pub(super) fn alone(&self) -> Option<u64> {
        (self.alone > 0 && self.drafted < DRAFTED_MAX).then_some(self.alone)
    }

    /// The time of a step without drafts as last measured, nanoseconds. 0 if it was not.
    pub(super) fn measured(&self) -> u64 {
        self.alone
    }

    /// The number of drafts, at most `most`, with which the tokens of all requests that share the stages come fastest. Rows of
    /// drafts take time of each of them; for each draft the request itself waits `wait_ns` more. Without a clear gain there are
    /// no drafts: the times of steps contain the drafts of others, so a small one may be none.
    pub(super) fn best(&self, accuracy: Accuracy, most: usize, sharers: u32, wait_ns: u64) -> Choice {
        let Some(alone) = self.alone() else { return Choice::default() };
        let row = self.row.unwrap_or(alone / ROW_SHARE);
        let others = 1024 * u128::from(sharers.saturating_sub(1));
        let rate = |own: u64, step: u64, waits: u64| {
            let all = (others << 64) / u128::from(step.max(1));
            all + (u128::from(own) << 64) / u128::from(step.saturating_add(waits).max(1))
        };
        // Expected tokens of a step, its time and the wait before it, with 0, 1, 2, ... drafts.
        let (mut tokens, mut right, mut step, mut waits) = (1024, 1024, alone, 0_u64);
        let none = rate(tokens, step, waits);
        let mut best = Choice { rate: none, drafts: 0 };
        for drafts in 1..=most {
            right = right * accuracy.share / 1024;
            tokens += right;
            step = step.saturating_add(row);
            waits = waits.saturating_add(wait_ns);
            let rate = rate(tokens, step, waits);
            if rate > best.rate {
                best = Choice { rate, drafts };
            }
        }
        if best.rate - none < none / GAIN_SHARE { Choice { rate: none, drafts: 0 } } else { best }
    }
}

/// Steps with drafts before one without, which shows what these cost now.
const DRAFTED_MAX: u32 = 32;
/// Until it is measured, a row of a draft is assumed to cost this fraction of a step.
const ROW_SHARE: u64 = 8;
/// Drafts are sent if they make the requests faster by this fraction.
const GAIN_SHARE: u128 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_longest_match_is_guessed() {
        assert_eq!(guess(&[], 3), []);
        assert_eq!(guess(&[1, 2, 3], 3), []);
        assert_eq!(guess(&[7, 1, 7], 3), [], "one token is no match");
        assert_eq!(guess(&[1, 2, 3, 4, 9, 1, 2], 2), [3, 4]);
        assert_eq!(guess(&[1, 2, 3, 4, 9, 1, 2], 7), [3, 4, 9, 1, 2, 3, 4]);
        assert_eq!(guess(&[0, 1, 2, 5, 9, 1, 2, 6, 8, 0, 1, 2], 1), [5], "the longer match");
        assert_eq!(guess(&[1, 2, 5, 9, 1, 2, 6, 8, 1, 2], 1), [6], "the later one of equal matches");
        assert_eq!(guess(&[4, 4, 4], 5), [4; 5]);
    }

    #[test]
    fn drafts_are_sent_while_they_pay() {
        let best = |times: StepTimes, share, sharers| times.best(Accuracy { share }, 7, sharers, 0).drafts;
        let times = StepTimes { alone: 1000, row: Some(0), ..StepTimes::default() };
        assert_eq!(best(times, 600, 1), 7, "rows that cost nothing");
        let times = StepTimes { alone: 1000, row: Some(250), drafted: 31, ..StepTimes::default() };
        assert_eq!(best(times, 1000, 1), 7);
        assert_eq!(best(times, 512, 1), 1, "1.5 tokens in 1.25, 1.75 in 1.5 steps");
        assert_eq!(best(times, 400, 1), 0, "1.39 tokens in 1.25 steps are a gain of less than an eighth");
        assert_eq!(best(times, 200, 1), 0);
        assert_eq!(best(times, 1000, 3), 6, "8.6 tokens in 2.5 steps instead of 7.5");
        assert_eq!(best(times, 1000, 4), 0, "four requests wait a quarter of a step each");
        let times = StepTimes { drafted: 32, ..times };
        assert_eq!(best(times, 1000, 1), 0, "a step without drafts is measured now and then");
        assert_eq!(best(StepTimes::default(), 1024, 1), 0, "a step is measured first");
    }

    #[test]
    fn the_wait_for_a_draft_model_is_the_requests_own() {
        let times = StepTimes { alone: 1000, row: Some(50), ..StepTimes::default() };
        let best = |wait, sharers| times.best(Accuracy { share: 768 }, 7, sharers, wait).drafts;
        assert_eq!([best(0, 1), best(100, 1), best(300, 1), best(600, 1)], [6, 4, 2, 0]);
        assert_eq!(best(300, 8), 0, "one request gains little, and seven wait for its rows");
        let (model, repeats) = (Accuracy { share: 900 }, Accuracy { share: 600 });
        assert!(times.best(model, 7, 1, 100) > times.best(repeats, 7, 1, 0), "the source with more tokens in the time");
        assert!(times.best(model, 7, 1, 900) < times.best(repeats, 7, 1, 0));
    }

    #[test]
    fn times_and_accuracy_follow_what_is_measured() {
        let mut times = StepTimes::default();
        times.learn(0, Duration::from_micros(100));
        times.learn(4, Duration::from_micros(140));
        assert_eq!((times.alone, times.row), (100_000, Some(10_000)));
        times.learn(0, Duration::from_secs(1));
        assert_eq!(times.alone, 175_000, "a pause counts as four steps");
        let mut accuracy = Accuracy::default();
        (0..50).for_each(|_| accuracy.learn(true));
        assert!(accuracy.share > 1000, "{accuracy:?}");
        (0..50).for_each(|_| accuracy.learn(false));
        assert_eq!(accuracy.share, 0);
    }
}
