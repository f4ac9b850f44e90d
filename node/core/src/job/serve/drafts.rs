//! Draft tokens of a request: guesses of what it repeats.
//!
//! Stages verify drafts in the pass that computes the next token, so a right guess saves a pass. How many are sent follows from
//! how often guesses of the request were right, and from what their rows cost.
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
#[derive(Clone, Copy, Debug)]
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
    /// A guess was right or wrong.
    pub(super) fn learn(&mut self, right: bool) {
        let target = if right { 1024 } else { 0 };
        self.share = (7 * self.share + target) / 8;
    }
}

/// Times of decode steps of a job, from the frame to its token, and its drafts so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepTimes {
    /// Without drafts, nanoseconds. 0 if not known.
    alone: u64,
    /// What each row of a draft adds.
    row: Option<u64>,
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
            let took = if self.alone > 0 { took.min(4 * self.alone) } else { took };
            self.alone = if self.alone > 0 { (3 * self.alone + took) / 4 } else { took };
            return;
        }
        let row = took.saturating_sub(self.alone) / u64::from(drafts);
        let row = row.min(self.alone);
        self.row = Some(self.row.map_or(row, |before| (7 * before + row) / 8));
    }

    /// A draft was right.
    pub(super) fn count_right(&mut self) {
        self.counts.1 += 1;
    }

    /// Number of drafts whose step was answered, and of those of them that were right.
    pub(super) fn counts(&self) -> (u64, u64) {
        self.counts
    }

    /// The number of drafts, at most `most`, with which the tokens of all requests that share the stages come fastest: rows of
    /// drafts take time of each of them.
    pub(super) fn best(&self, accuracy: Accuracy, most: usize, sharers: u32) -> usize {
        if self.alone == 0 || self.drafted >= DRAFTED_MAX {
            return 0;
        }
        let row = self.row.unwrap_or(self.alone / ROW_SHARE);
        // Expected tokens of a step and its time, with 0, 1, 2, ... drafts.
        let (mut tokens, mut right, mut time) = (1024 * u64::from(sharers.max(1)), 1024, self.alone);
        let (mut best, mut best_tokens, mut best_time) = (0, tokens, time);
        for drafts in 1..=most {
            right = right * accuracy.share / 1024;
            tokens += right;
            time += row;
            if u128::from(tokens) * u128::from(best_time) > u128::from(best_tokens) * u128::from(time) {
                (best, best_tokens, best_time) = (drafts, tokens, time);
            }
        }
        best
    }
}

/// Steps with drafts before one without, which shows what these cost now.
const DRAFTED_MAX: u32 = 32;
/// Until it is measured, a row of a draft is assumed to cost this fraction of a step.
const ROW_SHARE: u64 = 8;

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
        let times = StepTimes { alone: 1000, row: Some(0), ..StepTimes::default() };
        assert_eq!(times.best(Accuracy { share: 600 }, 7, 1), 7, "rows that cost nothing");
        let times = StepTimes { alone: 1000, row: Some(250), drafted: 31, counts: (0, 0) };
        assert_eq!(times.best(Accuracy { share: 1000 }, 7, 1), 7);
        assert_eq!(times.best(Accuracy { share: 512 }, 7, 1), 1, "1.5 tokens in 1.25, 1.75 in 1.5 steps");
        assert_eq!(times.best(Accuracy { share: 200 }, 7, 1), 0);
        assert_eq!(times.best(Accuracy { share: 1000 }, 7, 3), 6, "8.6 tokens in 2.5 steps instead of 7.5");
        assert_eq!(times.best(Accuracy { share: 1000 }, 7, 4), 0, "four requests wait a quarter of a step each");
        let times = StepTimes { drafted: 32, ..times };
        assert_eq!(times.best(Accuracy { share: 1000 }, 7, 1), 0, "a step without drafts is measured now and then");
        assert_eq!(StepTimes::default().best(Accuracy { share: 1024 }, 7, 1), 0, "a step is measured first");
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
