//! Predicts how long batches take on this node's executor, so that a stalled executor is detected.
use crate::limits::{CHUNK_POSITIONS_MAX, CHUNK_POSITIONS_MIN, SEQUENCES_MAX};
use crate::time::Duration;

/// Durations of past batches, to predict the next one.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Slowest recent batch of decode steps.
    decode: Option<Duration>,
    /// Slowest recent nanoseconds per row of a prefill batch.
    prefill_row_ns: Option<u64>,
    /// Usual nanoseconds per row of batches with many rows.
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

    /// Rows that usually take this long.
    pub(super) fn rows_within(&self, time: Duration) -> u32 {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let rows = self.row_ns.map_or(u64::from(ROWS_UNKNOWN), |row_ns| time_ns / row_ns.max(1));
        u32::try_from(rows).unwrap_or(u32::MAX).clamp(CHUNK_POSITIONS_MIN, CHUNK_POSITIONS_MAX)
    }

    /// Adopts a longer time immediately, and decays by an eighth with each shorter one.
    pub(super) fn learn(&mut self, rows: u64, took: Duration) {
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        if rows >= u64::from(CHUNK_POSITIONS_MIN) {
            let row_ns = took_ns / rows;
            self.row_ns = Some(self.row_ns.map_or(row_ns, |old| old - old / 4 + row_ns / 4));
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

/// Rows of a batch before any is measured: few enough for a processor.
const ROWS_UNKNOWN: u32 = 64;
