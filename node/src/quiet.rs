//! Rate-limits log lines that strangers can cause: writes a few per minute and counts the rest.
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Most lines of one kind within `PERIOD`: enough for everything that happens on a normal day.
const LINES_MAX: u32 = 20;
const PERIOD: Duration = Duration::from_secs(60);

/// The rate limit of one kind of log line.
#[derive(Debug, Default)]
pub(crate) struct Quiet(Mutex<Option<Window>>);

#[derive(Debug)]
struct Window {
    begun: Instant,
    lines: u32,
    /// Lines left out since the last one that was written.
    left_out: u64,
}

impl Quiet {
    /// `None` if the line must be left out; else a suffix for it, with the number of lines left out before.
    pub(crate) fn admit(&self) -> Option<String> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<String> {
        let mut window = self.0.lock();
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
    fn a_flood_of_rejections_logs_a_few_lines_and_counts_the_rest() {
        let (quiet, start) = (Quiet::default(), Instant::now());
        let written = (0..10_000).filter(|_| quiet.admit_at(start).is_some()).count();
        assert_eq!(written, LINES_MAX as usize);
        let next = quiet.admit_at(start + PERIOD);
        assert_eq!(next.as_deref(), Some(" (9980 lines of this kind were left out)"));
        assert_eq!(quiet.admit_at(start + PERIOD).as_deref(), Some(""));
    }
}
