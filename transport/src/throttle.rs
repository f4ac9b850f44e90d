//! Rate limiter that keeps weight transfers to their share of a link, so that decode frames do not queue behind them.
use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Paces writers to a rate; unlimited while no rate is set.
#[derive(Debug, Default)]
pub(crate) struct Throttle(Mutex<Allowance>);

#[derive(Debug, Default)]
struct Allowance {
    bytes_per_second: Option<u64>,
    /// When the bytes admitted so far will have been sent at the current rate.
    clear: Option<Instant>,
}

impl Throttle {
    pub(crate) fn set(&self, bytes_per_second: Option<u64>) {
        self.0.lock().bytes_per_second = bytes_per_second.map(|b| b.max(1));
    }

    /// Waits until `bytes` more may be sent.
    pub(crate) async fn take(&self, bytes: usize) {
        let start = self.reserve(bytes, Instant::now());
        if let Some(start) = start {
            sleep_until(start).await;
        }
    }

    /// Reserves `bytes` and returns when the writer may start; `None` means now.
    fn reserve(&self, bytes: usize, now: Instant) -> Option<Instant> {
        let mut state = self.0.lock();
        let rate = state.bytes_per_second?;
        let clear = state.clear.filter(|t| *t > now).unwrap_or(now);
        let nanos = (bytes as u128 * 1_000_000_000 / u128::from(rate)).min(u128::from(NANOS_MAX));
        state.clear = Some(clear + Duration::from_nanos(nanos as u64));
        // Timers are accurate to about a millisecond: a short debt is admitted and paid by the next writer.
        (clear > now + BURST).then_some(clear)
    }
}

/// Debt allowed before a writer waits.
const BURST: Duration = Duration::from_millis(5);
/// One minute: the most time that a single write is charged.
const NANOS_MAX: u64 = 60_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_paced_to_the_rate() {
        let throttle = Throttle::default();
        let start = Instant::now();
        assert_eq!(throttle.reserve(1 << 30, start), None, "no rate, no wait");
        throttle.set(Some(1_000_000));
        assert_eq!(throttle.reserve(100_000, start), None);
        assert_eq!(throttle.reserve(100_000, start), Some(start + Duration::from_millis(100)));
        assert_eq!(throttle.reserve(100_000, start), Some(start + Duration::from_millis(200)));
        let idle = start + Duration::from_secs(10);
        assert_eq!(throttle.reserve(1, idle), None, "idle time does not accumulate");
        throttle.set(None);
        assert_eq!(throttle.reserve(1 << 30, idle), None);
    }
}
