//! Counts the bytes this node's stages sent to other nodes: rows for the next stage, and copies of them for its
//! standby.
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters updated where frames leave; never blocks.
#[derive(Debug, Default)]
pub(crate) struct StageTraffic {
    stage_bytes: AtomicU64,
    standby_bytes: AtomicU64,
    copies_left_out: AtomicU64,
}

/// The counts since the node started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BoundaryView {
    /// Bytes of rows and token ids sent to stages on other nodes, before compression.
    pub stage_bytes: u64,
    /// Bytes of the copies sent to standbys.
    pub standby_bytes: u64,
    /// Copies not sent because the connection to the standby was too slow; the standby requests them later.
    pub copies_left_out: u64,
}

impl StageTraffic {
    /// Counts a frame that was handed to the transport; `taken` is whether the transport accepted it.
    pub(crate) fn count(&self, copy: bool, bytes: u64, taken: bool) {
        match (copy, taken) {
            (false, true) => self.stage_bytes.fetch_add(bytes, Relaxed),
            (true, true) => self.standby_bytes.fetch_add(bytes, Relaxed),
            (true, false) => self.copies_left_out.fetch_add(1, Relaxed),
            (false, false) => 0,
        };
    }

    /// The counts so far.
    pub(crate) fn view(&self) -> BoundaryView {
        BoundaryView {
            stage_bytes: self.stage_bytes.load(Relaxed),
            standby_bytes: self.standby_bytes.load(Relaxed),
            copies_left_out: self.copies_left_out.load(Relaxed),
        }
    }
}
