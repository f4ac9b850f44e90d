//! What this node's stages gave to others: rows for the next stage, and the copies of them for its standby.
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counted where frames leave; nobody waits for it.
#[derive(Debug, Default)]
pub struct Boundary {
    stage_bytes: AtomicU64,
    standby_bytes: AtomicU64,
    copies_left_out: AtomicU64,
}

/// The counts since the node was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BoundaryView {
    /// Bytes of rows and token ids for stages of other nodes, before they are packed.
    pub stage_bytes: u64,
    /// Bytes of the copies of these for standbys.
    pub standby_bytes: u64,
    /// Copies not sent because the way to the standby was too slow: it asks for them later.
    pub copies_left_out: u64,
}

impl Boundary {
    /// A frame was given to the transport, which took it or not.
    pub fn count(&self, copy: bool, bytes: u64, taken: bool) {
        match (copy, taken) {
            (false, true) => self.stage_bytes.fetch_add(bytes, Relaxed),
            (true, true) => self.standby_bytes.fetch_add(bytes, Relaxed),
            (true, false) => self.copies_left_out.fetch_add(1, Relaxed),
            (false, false) => 0,
        };
    }

    /// The counts so far.
    pub fn view(&self) -> BoundaryView {
        BoundaryView {
            stage_bytes: self.stage_bytes.load(Relaxed),
            standby_bytes: self.standby_bytes.load(Relaxed),
            copies_left_out: self.copies_left_out.load(Relaxed),
        }
    }
}
