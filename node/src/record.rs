//! `--record FILE`: records the inputs of the core for `simnet replay`, including prompts as token ids.
use node_core::config::Config;
use node_core::input::Input;
use node_core::record;
use node_core::time::Instant;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

/// Writes the recording, on the driver's thread.
pub(crate) struct Recorder {
    file: BufWriter<File>,
    /// Reused for each entry.
    entry: Vec<u8>,
    bytes: u64,
    /// An input was recorded since the last call of `polled`.
    handled: bool,
    flushed: Instant,
    /// Recording has stopped: writing failed, or the file has reached [`BYTES_MAX`].
    ended: bool,
}

impl Recorder {
    /// Begins a recording, and overwrites the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn begin(path: &Path, config: &Config, seed: u64) -> std::io::Result<Self> {
        let mut file = BufWriter::with_capacity(BUFFER_BYTES, crate::private::create(path)?);
        let head = record::begin(config, seed, concat!("meshnode ", env!("CARGO_PKG_VERSION")));
        file.write_all(&head)?;
        file.flush()?;
        let bytes = head.len() as u64;
        Ok(Self { file, entry: Vec::new(), bytes, handled: false, flushed: Instant(0), ended: false })
    }

    /// Records an input, before the node handles it.
    pub(crate) fn input(&mut self, at: Instant, input: &Input) {
        if !self.ended {
            record::append_input(&mut self.entry, at, input);
            self.handled = true;
            self.write();
        }
    }

    /// Records that the node is polled, before it is polled until idle.
    pub(crate) fn polled(&mut self, now: Instant) {
        if self.ended || !self.handled {
            return;
        }
        self.handled = false;
        record::append_polled(&mut self.entry);
        self.write();
        if now.since(self.flushed) >= FLUSH_EVERY {
            self.flushed = now;
            self.flush();
        }
    }

    fn write(&mut self) {
        self.bytes += self.entry.len() as u64;
        if self.bytes > BYTES_MAX {
            self.end(&format!("it has reached the limit of {} GiB", BYTES_MAX >> 30));
        } else if let Err(error) = self.file.write_all(&self.entry) {
            self.end(&error.to_string());
        }
        self.entry.clear();
    }

    fn flush(&mut self) {
        if let Err(error) = self.file.flush() {
            self.end(&error.to_string());
        }
    }

    /// Ends the recording, and logs it once. The node keeps running.
    fn end(&mut self, why: &str) {
        if !std::mem::replace(&mut self.ended, true) {
            tracing::warn!("the recording has ended: {why}; the node keeps running");
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.ended {
            self.flush();
        }
    }
}

/// Flush interval: bounds the loss if the process is killed.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// A busy node writes about 100 kB per second.
const BUFFER_BYTES: usize = 1 << 20;
/// Half a day of a busy node: enough to inspect, and a forgotten flag cannot fill the disk.
const BYTES_MAX: u64 = 4 << 30;
