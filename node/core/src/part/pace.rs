//! Predicts how long batches take on this node's executor: to detect a stalled one, and to limit the rows of prompts beside decode steps.
use crate::limits::{CHUNK_POSITIONS_MAX, SEQUENCES_MAX};
use crate::time::Duration;
use alloc::collections::BTreeMap;

/// Durations of past batches, to predict the next one.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Slowest recent batch of decode steps.
    decode: Option<Duration>,
    /// Slowest recent nanoseconds per row of a prefill batch.
    prefill_row_ns: Option<u64>,
    /// Usual time of batches of decode steps alone, with the wait for what the device computed before.
    step_ns: Option<u64>,
    /// Usual time that the device computes such batches, by the power of two that their rows reach: a step with drafts has
    /// several.
    steps_ns: BTreeMap<u32, u64>,
    /// Usual nanoseconds that a row of a prompt adds to that.
    row_ns: Option<u64>,
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

    /// Adopts a longer time immediately, and decays by an eighth with each shorter one. `computed`: the part of the time `took`
    /// that the device computed for this batch.
    pub(super) fn learn(&mut self, decodes: u64, prefill: u64, (took, computed): (Duration, Duration)) {
        let rows = decodes + prefill;
        let [took_ns, computed_ns] = [took, computed].map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        match decodes.checked_ilog2() {
            Some(class) if prefill == 0 => {
                let before = self.steps_ns.get(&class).copied();
                self.steps_ns.insert(class, usual(before, computed_ns));
                self.step_ns = Some(usual(self.step_ns, took_ns));
            }
            Some(class) => {
                // What was measured long ago counts less and less.
                let steps_ns = self.steps_ns.get_mut(&class).map(|ns| {
                    *ns = (*ns).min(computed_ns) / 128 * 127;
                    *ns
                });
                self.step_ns = self.step_ns.map(|ns| ns.min(took_ns));
                if prefill >= u64::from(ROWS_BESIDE_MIN) {
                    // Before such steps are measured alone, their rows count as those of prompts.
                    let steps = steps_ns.unwrap_or(computed_ns / rows * decodes);
                    let row_ns = computed_ns.saturating_sub(steps).max(computed_ns / 8) / prefill;
                    self.row_ns = Some(usual(self.row_ns, row_ns));
                }
            }
            None if prefill >= u64::from(ROWS_BESIDE_MIN) => {
                self.row_ns = Some(usual(self.row_ns, computed_ns / prefill));
            }
            None => {}
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

/// A mean that forgets old measurements.
fn usual(old: Option<u64>, new: u64) -> u64 {
    old.map_or(new, |old| old - old / 4 + new / 4)
}

/// Rows of a batch before any is measured: few enough for a processor.
const ROWS_UNKNOWN: u32 = 64;

/// Fewest rows of prompts that a batch of decode steps takes along: the weights are read once for all rows of a batch, so that fewer
/// would cost about as much as these.
const ROWS_BESIDE_MIN: u32 = 4;

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
            pace.learn(0, 4, (MS * 120, MS * 4));
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
        let mut pace = Pace::default();
        (0..20).for_each(|_| learn(&mut pace, 8, 8, MS * 16));
        assert_rows(&pace, MS * 12, 12, "steps alone were not measured");
    }

    #[test]
    fn a_step_that_was_slow_once_does_not_let_prompts_delay_streams() {
        let mut pace = Pace::default();
        learn(&mut pace, 1, 0, MS * 800);
        let mut rows = u64::from(pace.rows_within(MS * 12));
        for _ in 0..600 {
            learn(&mut pace, 1, rows, MS * 2 + MS * u32::try_from(rows).unwrap());
            rows = u64::from(pace.rows_within(MS * 12));
        }
        assert!((10..=16).contains(&rows), "{rows} rows of a millisecond");
    }
}
