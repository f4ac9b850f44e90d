//! Hidden rows that stay on GPUs between two stages of this machine: kept by the first stage, copied by the next one.
use std::sync::Arc;

use cubecl::server::Handle;
use kernels_models::hidden_rows::Piece;
use kernels_models::stage::StageError;

use super::memory::{Memory, ROWS};
use crate::graph::{Buffer, Graphs};
use crate::peers::{Kept, Reading, Ring, SLOTS, bring};
use crate::platform::Platform;

/// A stage's side of the handover: what it keeps for the next stage, and room for what it copies.
pub(super) struct Handover {
    /// If another stage follows.
    ring: Option<Arc<Ring>>,
    /// For the rows of passes that CubeCL launches, if another stage precedes: used in turn.
    inboxes: Vec<Buffer>,
    /// Rows that a queued step copies.
    reading: Vec<Reading>,
    /// Inboxes used since the host last waited for a pass: its kernels may still read them.
    used: usize,
}

impl Handover {
    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> u64 {
        let kept = self.ring.as_ref().map_or(0, |ring| ring.bytes());
        kept + self.inboxes.iter().map(|inbox| inbox.handle.size()).sum::<u64>()
    }

    pub(super) fn new<R: Platform>(
        graphs: &Graphs,
        memory: &Memory<'_, R>,
        width: usize,
        [precedes, follows]: [bool; 2],
    ) -> Result<Self, StageError> {
        let buffers = || -> Result<Vec<Buffer>, StageError> {
            let buffer = |_| graphs.buffer(memory.buffer(4 * ROWS * width, "rows for another device")?);
            (0..SLOTS).map(buffer).collect()
        };
        let ring = follows.then(|| Ok::<_, StageError>(Ring::new(graphs, buffers()?))).transpose()?;
        let inboxes = if precedes { buffers()? } else { Vec::new() };
        Ok(Self { ring, inboxes, reading: Vec::new(), used: 0 })
    }

    /// The host has waited for all passes.
    pub(super) fn waited(&mut self) {
        self.used = 0;
    }

    /// Queues copies of rows that other GPUs hold to address `to`, the input of a step. False if they do not hold all. No other step
    /// that copies rows is queued.
    pub(super) fn bring(&mut self, graphs: &Graphs, pieces: &[Piece<'_>], to: u64) -> bool {
        self.reading.clear();
        let reading = bring(graphs, pieces, to);
        let brought = reading.is_some();
        self.reading.extend(reading.into_iter().flatten());
        brought
    }

    /// Copies rows that other GPUs hold to a buffer of this device; `None` if they do not hold all.
    pub(super) fn brought(&mut self, graphs: &Graphs, pieces: &[Piece<'_>]) -> Result<Option<Handle>, StageError> {
        if self.inboxes.is_empty() {
            return Ok(None);
        }
        if self.used == self.inboxes.len() {
            graphs.join()?;
            self.used = 0;
        }
        let inbox = &self.inboxes[self.used];
        let Some(reading) = bring(graphs, pieces, inbox.address()) else { return Ok(None) };
        self.used += 1;
        graphs.settle()?;
        drop(reading);
        Ok(Some(inbox.handle.clone()))
    }

    /// Chooses a buffer for the rows of a pass, if another stage may need them on its device.
    pub(super) fn claim(&self) -> Option<(&Buffer, Kept)> {
        let ring = self.ring.as_ref()?;
        let kept = ring.claim()?;
        Some((ring.buffer(&kept), kept))
    }
}
