//! `--record FILE`: what happens to this node, written down for `simnet replay`. Its prompts are in it, as token ids.
use node_core::config::Config;
use node_core::input::Input;
use node_core::record;
use node_core::time::Instant;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

/// A recording being written, on the driver's thread.
pub struct Recorder {
    file: BufWriter<File>,
    /// Reused for each entry.
    entry: Vec<u8>,
    bytes: u64,
    /// Something was handled since the last `polled`.
    handled: bool,
    flushed: Instant,
    /// Nothing more is written: the disk is full, or the file is as long as it may be.
    ended: bool,
}

impl Recorder {
    /// Begins a recording, over whatever the file holds.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin(path: &Path, config: &Config, seed: u64) -> std::io::Result<Self> {
        let mut file = BufWriter::with_capacity(BUFFER_BYTES, crate::private::create(path)?);
        let head = record::begin(config, seed, concat!("meshnode ", env!("CARGO_PKG_VERSION")));
        file.write_all(&head)?;
        file.flush()?;
        let bytes = head.len() as u64;
        Ok(Self { file, entry: Vec::new(), bytes, handled: false, flushed: Instant(0), ended: false })
    }

    /// The node is about to handle this.
    pub fn input(&mut self, at: Instant, input: &Input) {
        if !self.ended {
            record::append_input(&mut self.entry, at, input);
            self.handled = true;
            self.write();
        }
    }

    /// The node is about to be polled until it has nothing to do.
    pub fn polled(&mut self, now: Instant) {
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
            self.end(&format!("it is {} GiB long", BYTES_MAX >> 30));
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

    /// Said once; the node goes on.
    fn end(&mut self, why: &str) {
        if !std::mem::replace(&mut self.ended, true) {
            tracing::warn!("the recording ends here: {why}; the node goes on without it");
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

/// A kill loses at most this much, besides what the buffer holds.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// A busy node writes about 100 kB a second.
const BUFFER_BYTES: usize = 1 << 20;
/// Half a day of a busy node: nobody looks through more, and a forgotten flag fills no disk.
const BYTES_MAX: u64 = 4 << 30;
