//! Predicts how long batches take on this node's executor: to detect a stalled one, and to limit the rows of prompts beside decode steps.
use crate::limits::{CHUNK_POSITIONS_MAX, SEQUENCES_MAX, STEP_ROWS_MAX};
use crate::time::Duration;
use alloc::collections::BTreeMap;

/// Durations of past batches, to predict the next one.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Slowest recent batch of decode steps.
    decode: Option<Duration>,
    /// Slowest recent nanoseconds per row of a prefill batch.
    prefill_row_ns: Option<u64>,
    /// Usual time of batches of decode steps alone, with the wait for what the device computed before. No more than the last batch
    /// with decode steps took.
    step_ns: Option<u64>,
    /// The time that the device computes such batches, by the power of two that their rows reach: a step with drafts has several.
    steps: BTreeMap<u32, Steps>,
    /// Usual nanoseconds that a row of a prompt adds to that.
    row_ns: Option<u64>,
    /// Usual nanoseconds from the end of a batch with decode steps until the next steps arrive, where none waited meanwhile.
    away_ns: Option<u64>,
}

/// Batches of decode steps with similar numbers of rows.
#[derive(Debug)]
struct Steps {
    /// Usual time of one without rows of prompts, in nanoseconds. No more than the last one with such rows took.
    alone_ns: u64,
    /// Batches with rows of prompts since one without them.
    beside: u32,
}

impl Pace {
    /// Before any measurement: a first batch on a slow machine under load.
    const UNKNOWN: Duration = Duration::from_secs(30);

    pub(super) fn predict(&self, rows: u64) -> Duration {
        let prefill = self.prefill_row_ns.map(|ns| Duration::from_nanos(ns.saturating_mul(rows)));
        if rows <= u64::from(SEQUENCES_MAX) {
            self.decode.or(prefill).unwrap_or(Self::UNKNOWN)
        } else {
            prefill.unwrap_or(Self::UNKNOWN)
        }
    }

    /// Rows that usually extend a batch of decode steps by this time, or by a quarter if that is more: where the device has
    /// other work as well, few rows in each of few batches would take seconds.
    pub(super) fn rows_within(&self, time: Duration) -> u32 {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let time_ns = time_ns.max(self.step_ns.unwrap_or(0) / 4);
        let rows = self.row_ns.map_or(u64::from(ROWS_UNKNOWN), |row_ns| time_ns / row_ns.max(1));
        u32::try_from(rows).unwrap_or(u32::MAX).clamp(ROWS_BESIDE_MIN, CHUNK_POSITIONS_MAX)
    }

    /// Decode steps arrived, this time after the last ones had left and none waited.
    pub(super) fn learn_away(&mut self, away: Duration) {
        let away_ns = u64::try_from(away.as_nanos()).unwrap_or(u64::MAX);
        // A stream that pauses says nothing about the others.
        let most_ns = self.away_ns.map_or(u64::MAX, |ns| ns.saturating_mul(2).max(AWAY_SLACK_NS));
        self.away_ns = Some(usual(self.away_ns, away_ns.min(most_ns)));
    }

    /// What a batch of prompts may hold whose stage has no decode step, when the last steps left `away` ago. Steps that left
    /// `alone`, without rows of prompts, give the next stages less to compute and return earlier than expected.
    pub(super) fn until_steps(&self, away: Duration, alone: bool) -> UntilSteps {
        let (Some(away_ns), Some(row_ns)) = (self.away_ns, self.row_ns) else { return UntilSteps::Overdue };
        let passed_ns = u64::try_from(away.as_nanos()).unwrap_or(u64::MAX);
        let overdue_ns = away_ns.saturating_mul(2).saturating_add(AWAY_SLACK_NS);
        if passed_ns >= overdue_ns {
            return UntilSteps::Overdue;
        }
        let rows = away_ns.saturating_sub(passed_ns).saturating_sub(self.fixed_ns()) / row_ns.max(1);
        match u32::try_from(rows).unwrap_or(u32::MAX) {
            rows if rows >= ROWS_BETWEEN_MIN && !alone => UntilSteps::Rows(rows),
            _ => UntilSteps::Wait(Duration::from_nanos(overdue_ns - passed_ns)),
        }
    }

    /// Nanoseconds that a batch takes on the device without rows of prompts.
    fn fixed_ns(&self) -> u64 {
        self.steps.values().next().map_or(0, |steps| steps.alone_ns)
    }

    /// Which decode steps have to be measured without rows of prompts, to tell their time from that of the rows: bit n for steps of
    /// 2^n rows and more.
    pub(super) fn unmeasured_steps(&self) -> u64 {
        let is_measured = |class: u32| self.steps.get(&class).is_some_and(|steps| steps.beside < BESIDE_MAX);
        (0..=CHUNK_POSITIONS_MAX.ilog2()).filter(|class| !is_measured(*class)).map(|class| 1 << class).sum()
    }

    /// A batch ended. `computed`: the part of the time `took` that the device computed it.
    ///
    /// What stalls are detected by is the longest recent time, which decays by an eighth with each shorter one. What prompts are
    /// limited by are means of recent times.
    pub(super) fn learn(&mut self, decodes: u64, prefill: u64, (took, computed): (Duration, Duration)) {
        let rows = decodes + prefill;
        let [took_ns, computed_ns] = [took, computed].map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        // The part of the time that does not depend on the rows of prompts.
        let fixed_ns = match decodes.checked_ilog2() {
            Some(class) if prefill == 0 => {
                self.step_ns = Some(usual(self.step_ns, took_ns));
                let alone_ns = match self.steps.get(&class) {
                    // The last measurement is old.
                    Some(steps) if steps.beside >= BESIDE_MAX => steps.alone_ns / 2 + computed_ns / 2,
                    steps => usual(steps.map(|steps| steps.alone_ns), computed_ns),
                };
                self.steps.insert(class, Steps { alone_ns, beside: 0 });
                None
            }
            Some(class) => {
                self.step_ns = self.step_ns.map(|ns| ns.min(took_ns));
                self.steps.get_mut(&class).map(|steps| {
                    steps.beside = steps.beside.saturating_add(1);
                    steps.alone_ns = steps.alone_ns.min(computed_ns);
                    steps.alone_ns
                })
            }
            None => Some(self.fixed_ns()),
        };
        if let Some(fixed_ns) = fixed_ns.filter(|_| prefill >= u64::from(ROWS_BESIDE_MIN)) {
            let row_ns = computed_ns.saturating_sub(fixed_ns).max(computed_ns / 8) / prefill;
            self.row_ns = Some(usual(self.row_ns, row_ns));
        }
        if rows <= u64::from(SEQUENCES_MAX) {
            let old = self.decode.map_or(took, |old| old - old / 8);
            self.decode = Some(old.max(took));
        } else {
            let row_ns = took_ns / rows.max(1);
            let old = self.prefill_row_ns.map_or(row_ns, |old| old - old / 8);
            self.prefill_row_ns = Some(old.max(row_ns));
        }
    }
}

/// What a batch may hold that no decode step goes with, while streams run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UntilSteps {
    /// As many rows as end before the next step arrives.
    Rows(u32),
    /// The next step arrives before a batch would end. It is overdue once this time has passed.
    Wait(Duration),
    /// Nothing is known of when the next step arrives.
    Overdue,
}

/// A mean that forgets old measurements.
fn usual(old: Option<u64>, new: u64) -> u64 {
    old.map_or(new, |old| old - old / 4 + new / 4)
}

/// Batches of decode steps with rows of prompts until one goes without, to be measured. It costs a prompt less than a sixteenth of its
/// time.
const BESIDE_MAX: u32 = 16;

/// How much later than after twice the usual time steps are overdue: the wake-up of a few threads under load.
const AWAY_SLACK_NS: u64 = 2_000_000;

/// Rows of a batch before any is measured: few enough for a processor.
const ROWS_UNKNOWN: u32 = 64;

/// Fewest rows of prompts that a batch of decode steps takes along, however long they take. Measured with two, beside a stream: a prompt
/// of 4,000 tokens takes up to twice as long, and the gaps between the stream's tokens are hardly shorter.
const ROWS_BESIDE_MIN: u32 = STEP_ROWS_MAX;

/// Fewest rows of a batch between decode steps: the device has nothing else to do, but a single row would count as a step.
const ROWS_BETWEEN_MIN: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Learns a batch that waits for nothing.
    fn learn(pace: &mut Pace, decodes: u64, prefill: u64, took: Duration) {
        pace.learn(decodes, prefill, (took, took));
    }

    fn assert_rows(pace: &Pace, time: Duration, expected: u32, why: &str) {
        let rows = pace.rows_within(time);
        assert!(rows.abs_diff(expected) <= expected / 10, "{rows} rows: {why}");
    }

    #[test]
    fn a_device_with_other_work_takes_more_rows_at_once() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows_within(MS * 25), ROWS_UNKNOWN);
        for _ in 0..20 {
            learn(&mut pace, 1, 0, MS * 8);
            learn(&mut pace, 1, 100, MS * 108);
        }
        assert_rows(&pace, MS * 25, 25, "a row takes a millisecond");
        for _ in 0..200 {
            // Each batch now waits 92 ms for something else.
            pace.learn(1, 0, (MS * 100, MS * 8));
            pace.learn(1, 25, (MS * 125, MS * 33));
        }
        assert_rows(&pace, MS * 20, 25, "a quarter of a step");
        for _ in 0..200 {
            pace.learn(0, 4, (MS * 120, MS * 12));
        }
        assert_rows(&pace, MS * 100, 100, "waits are not those of rows");
    }

    #[test]
    fn a_device_that_slows_down_takes_fewer_rows() {
        let mut pace = Pace::default();
        learn(&mut pace, 64, 0, MS);
        learn(&mut pace, 64, 100, MS * 101);
        for _ in 0..60 {
            learn(&mut pace, 64, 0, MS);
            learn(&mut pace, 64, 50, MS * 201);
        }
        assert_rows(&pace, MS * 100, 25, "a row takes four milliseconds");
    }

    #[test]
    fn steps_with_drafts_do_not_count_as_rows_of_prompts() {
        let mut pace = Pace::default();
        for _ in 0..20 {
            learn(&mut pace, 1, 0, MS * 2);
            learn(&mut pace, 8, 0, MS * 16);
            learn(&mut pace, 8, 10, MS * 26);
        }
        assert_rows(&pace, MS * 12, 12, "a row takes a millisecond");
    }

    /// Rows of the last of `batches` batches, each of a step beside a prompt where the step need not be measured, and of `between`
    /// batches of the prompt alone after each. A step takes 40 ms, a row 0.2.
    fn beside(pace: &mut Pace, batches: u32, between: u32) -> u32 {
        let cost = |step: u32, rows: u32| Duration::from_micros(u64::from(40_000 * step + 200 * rows));
        for _ in 0..batches {
            let rows = if pace.unmeasured_steps() & 1 == 1 { 0 } else { pace.rows_within(MS * 20) };
            learn(pace, 1, rows.into(), cost(1, rows));
            for _ in 0..between {
                let rows = pace.rows_within(MS * 20);
                learn(pace, 0, rows.into(), cost(1, rows));
            }
        }
        pace.rows_within(MS * 20)
    }

    #[test]
    fn the_time_of_steps_never_counts_as_that_of_rows() {
        for between in [0, 1] {
            let mut pace = Pace::default();
            for batches in [10, 50, 500] {
                let rows = beside(&mut pace, batches, between);
                assert!(
                    (90..=110).contains(&rows),
                    "{rows} rows after {batches} more steps, {between} batches between"
                );
            }
        }
    }

    #[test]
    fn steps_are_measured_alone_at_first_and_now_and_then() {
        let mut pace = Pace::default();
        assert_eq!(pace.unmeasured_steps(), 0b11_1111_1111);
        learn(&mut pace, 1, 0, MS * 8);
        learn(&mut pace, 9, 0, MS * 8);
        assert_eq!(pace.unmeasured_steps(), 0b11_1111_0110);
        (0..BESIDE_MAX).for_each(|_| learn(&mut pace, 1, 10, MS * 18));
        assert_eq!(pace.unmeasured_steps(), 0b11_1111_0111);
        (0..BESIDE_MAX).for_each(|_| learn(&mut pace, 0, 10, MS * 18));
        learn(&mut pace, 1, 0, MS * 8);
        assert_eq!(pace.unmeasured_steps(), 0b11_1111_0110);
    }

    #[test]
    fn steps_that_become_slower_or_faster_do_not_change_the_time_of_rows() {
        let mut pace = Pace::default();
        learn(&mut pace, 1, 0, MS * 800);
        let mut steps = |step: u32| {
            for _ in 0..400 {
                let rows = if pace.unmeasured_steps() & 1 == 1 { 0 } else { pace.rows_within(MS * 12) };
                learn(&mut pace, 1, rows.into(), MS * (step + rows));
            }
            let rows = pace.rows_within(MS * 12);
            assert!((10..=14).contains(&rows), "{rows} rows of a millisecond beside steps of {step}");
        };
        for step in [2, 40, 2, 20] {
            steps(step);
        }
    }

    #[test]
    fn prompts_between_steps_end_before_the_next_one_arrives() {
        let mut pace = Pace::default();
        assert_eq!(pace.until_steps(MS, false), UntilSteps::Overdue, "nothing is known");
        for _ in 0..20 {
            learn(&mut pace, 1, 0, MS * 8);
            learn(&mut pace, 1, 10, MS * 18);
            pace.learn_away(MS * 20);
        }
        let UntilSteps::Rows(rows) = pace.until_steps(MS * 2, false) else { panic!("there is time for 10 rows") };
        assert!((9..=11).contains(&rows), "{rows} rows in 20 - 2 - 8 ms");
        assert_eq!(pace.until_steps(MS * 11, false), UntilSteps::Wait(MS * 31), "one row would be ready");
        assert_eq!(pace.until_steps(MS * 2, true), UntilSteps::Wait(MS * 40), "the step returns early");
        assert_eq!(pace.until_steps(MS * 41, false), UntilSteps::Wait(MS));
        assert_eq!(pace.until_steps(MS * 42, false), UntilSteps::Overdue);
        pace.learn_away(MS * 5000);
        assert_eq!(pace.until_steps(MS * 52, false), UntilSteps::Overdue, "one stream paused");
    }
}
