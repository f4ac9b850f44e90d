//! Keeps weights to their share of a link, so that decode frames find it free.
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::{Instant, sleep_until};

/// Paces writers to a rate; without one it lets everything through.
#[derive(Debug, Default)]
pub(crate) struct Throttle(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    bytes_per_second: Option<u64>,
    /// When what was let through so far will have passed.
    clear: Option<Instant>,
}

impl Throttle {
    pub(crate) fn set(&self, bytes_per_second: Option<u64>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).bytes_per_second = bytes_per_second.map(|b| b.max(1));
    }

    /// Waits until `bytes` more may pass.
    pub(crate) async fn take(&self, bytes: usize) {
        let start = self.reserve(bytes, Instant::now());
        if let Some(start) = start {
            sleep_until(start).await;
        }
    }

    /// When the writer may start, if not now.
    fn reserve(&self, bytes: usize, now: Instant) -> Option<Instant> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = state.bytes_per_second?;
        let clear = state.clear.filter(|t| *t > now).unwrap_or(now);
        let nanos = (bytes as u128 * 1_000_000_000 / u128::from(rate)).min(u128::from(NANOS_MAX));
        state.clear = Some(clear + Duration::from_nanos(nanos as u64));
        // Timers are good to a millisecond: short debts are let through and paid with the next.
        (clear > now + BURST).then_some(clear)
    }
}

/// What may be owed before a writer waits.
const BURST: Duration = Duration::from_millis(5);
/// A minute: no single write is worth more.
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
        assert_eq!(throttle.reserve(1, idle), None, "time without writers is not saved up");
        throttle.set(None);
        assert_eq!(throttle.reserve(1 << 30, idle), None);
    }
}
