//! Lines of the log that strangers can cause: a few a minute, the rest is counted.
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines of one kind within `PERIOD`: a person who reads along misses nothing of a normal day.
const LINES_MAX: u32 = 20;
const PERIOD: Duration = Duration::from_secs(60);

/// Whether another line may be written.
#[derive(Debug, Default)]
pub(crate) struct Quiet(Mutex<Option<Window>>);

#[derive(Debug)]
struct Window {
    begun: Instant,
    lines: u32,
    /// Not written since the last line that was.
    left_out: u64,
}

impl Quiet {
    /// `None` for a line to be left out; else what to append to it: how many were left out before.
    pub(crate) fn admit(&self) -> Option<String> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<String> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let window = window.get_or_insert(Window { begun: now, lines: 0, left_out: 0 });
        if now.duration_since(window.begun) >= PERIOD {
            (window.begun, window.lines) = (now, 0);
        }
        if window.lines >= LINES_MAX {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        match std::mem::take(&mut window.left_out) {
            0 => Some(String::new()),
            left_out => Some(format!(" ({left_out} lines of this kind were left out)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_refusals_writes_a_few_lines_and_counts_the_rest() {
        let (quiet, start) = (Quiet::default(), Instant::now());
        let written = (0..10_000).filter(|_| quiet.admit_at(start).is_some()).count();
        assert_eq!(written, LINES_MAX as usize);
        let next = quiet.admit_at(start + PERIOD);
        assert_eq!(next.as_deref(), Some(" (9980 lines of this kind were left out)"));
        assert_eq!(quiet.admit_at(start + PERIOD).as_deref(), Some(""));
    }
}
