//! Hands hidden rows from one GPU of this machine to another without a way through RAM.
//!
//! A stage keeps the rows of its latest passes in a ring of buffers on its device. They also go to RAM, from where they are sent to
//! other nodes, and sent again after a loss. So a buffer may be overwritten as soon as no stage reads it: a reader checks that it still
//! has the rows, and reads them from RAM otherwise. Next: `engine/handover.rs`, where stages use this.
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use cudarc::driver::{result, sys};
use kernels_models::hidden_rows::Piece;
use kernels_models::stage::StageError;
use parking_lot::Mutex;

use crate::error::failed;
use crate::graph::{Buffer, Graphs};

/// Buffers of a ring: one in use by each of two receivers, one that is written, and one to spare.
pub(crate) const SLOTS: usize = 4;

/// The latest rows of a stage, on its device.
pub(crate) struct Ring {
    /// Number of the device.
    number: usize,
    context: Context,
    slots: Vec<Slot>,
    next: Mutex<usize>,
}

/// The device's primary context, which lives as long as the process.
#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for Context {}
// SAFETY: likewise.
unsafe impl Sync for Context {}

struct Slot {
    buffer: Buffer,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Counts the passes whose rows the buffer had.
    generation: u64,
    readers: usize,
}

/// The rows of one pass in a ring.
pub(crate) struct Kept {
    ring: Weak<Ring>,
    slot: usize,
    generation: u64,
}

/// Rows that are being read: their buffer is not overwritten.
pub(crate) struct Reading {
    ring: Arc<Ring>,
    slot: usize,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.ring.slots[self.slot].state.lock().readers -= 1;
    }
}

/// Whether the machine has several CUDA devices.
pub(crate) fn has_peers() -> bool {
    result::device::get_count().is_ok_and(|count| count > 1)
}

impl Ring {
    /// A ring of these buffers, which are on the device of `graphs`.
    pub(crate) fn new(graphs: &Graphs, buffers: Vec<Buffer>) -> Arc<Self> {
        let slots = buffers.into_iter().map(|buffer| Slot { buffer, state: Mutex::default() }).collect();
        Arc::new(Self { number: graphs.number(), context: Context(graphs.context()), slots, next: Mutex::default() })
    }

    /// Bytes of its buffers.
    pub(crate) fn bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.buffer.handle.size()).sum()
    }

    /// Chooses a buffer that no stage reads for the rows of a pass; the rows that it had are no longer kept.
    pub(crate) fn claim(self: &Arc<Self>) -> Option<Kept> {
        let mut next = self.next.lock();
        (0..self.slots.len()).find_map(|_| {
            let slot = *next;
            *next = (slot + 1) % self.slots.len();
            let mut state = self.slots[slot].state.lock();
            (state.readers == 0).then(|| {
                state.generation += 1;
                Kept { ring: Arc::downgrade(self), slot, generation: state.generation }
            })
        })
    }

    /// The buffer of a pass.
    pub(crate) fn buffer(&self, kept: &Kept) -> &Buffer {
        &self.slots[kept.slot].buffer
    }
}

impl Kept {
    /// Begins to read; `None` if the buffer has other rows now.
    fn read(&self) -> Option<Reading> {
        let ring = self.ring.upgrade()?;
        let mut state = ring.slots[self.slot].state.lock();
        if state.generation != self.generation {
            return None;
        }
        state.readers += 1;
        drop(state);
        Some(Reading { ring, slot: self.slot })
    }
}

/// Queues copies of all pieces to `to`, one after another, on the stream of `graphs`. Returns what the caller must keep until the
/// copies are complete; `None` if other GPUs do not hold all pieces or cannot be reached: the caller then copies all rows from RAM.
pub(crate) fn bring(graphs: &Graphs, pieces: &[Piece<'_>], to: u64) -> Option<Vec<Reading>> {
    let held = |piece: &Piece<'_>| {
        let (kept, start) = piece.held::<Kept>()?;
        let reading = kept.read()?;
        let from = reading.ring.slots[reading.slot].buffer.part(4 * start, piece.rows.len()).ok()?;
        reaches(graphs, &reading.ring).then_some((reading, from, 4 * piece.rows.len()))
    };
    let found = pieces.iter().map(held).collect::<Option<Vec<_>>>()?;
    let mut to = to;
    // Rows that lie one behind the other, as those of all requests of a batch do, are copied at once.
    for run in found.chunk_by(|(_, from, bytes), (_, next, _)| from + *bytes as u64 == *next) {
        let bytes = run.iter().map(|(_, _, bytes)| bytes).sum();
        if let Some((reading, from, _)) = run.first()
            && let Err(error) = graphs.queue_peer_copy(to, (*from, reading.ring.context.0), bytes)
        {
            note(pair(graphs, &reading.ring), Err(error));
            // Copies that were queued before still read from `found`, which is dropped here.
            let _ = graphs.settle();
            return None;
        }
        to += bytes as u64;
    }
    Some(found.into_iter().map(|(reading, ..)| reading).collect())
}

/// The numbers of the device that reads and of the one that is read.
type Pair = (usize, usize);

fn pair(graphs: &Graphs, ring: &Ring) -> Pair {
    (graphs.number(), ring.number)
}

/// Pairs of devices of which the first can copy from the second, or not.
static REACHES: Mutex<BTreeMap<Pair, bool>> = Mutex::new(BTreeMap::new());

/// Whether the device of `graphs` can copy from that of a ring. Asked once per pair.
fn reaches(graphs: &Graphs, ring: &Ring) -> bool {
    let pair = pair(graphs, ring);
    let known = REACHES.lock().get(&pair).copied();
    known.unwrap_or_else(|| pair.0 == pair.1 || note(pair, connect(graphs, ring)))
}

/// Remembers whether a device can copy from another.
fn note(pair: Pair, reaches: Result<bool, StageError>) -> bool {
    let reaches = reaches.unwrap_or_else(|error| {
        tracing::info!("rows from cuda:{} to cuda:{} go through RAM: {error}", pair.1, pair.0);
        false
    });
    REACHES.lock().insert(pair, reaches);
    reaches
}

/// Lets the device of `graphs` read the memory of a ring's device.
fn connect(graphs: &Graphs, ring: &Ring) -> Result<bool, StageError> {
    let device = |number: usize| result::device::get(i32::try_from(number).map_err(failed)?).map_err(failed);
    let (reader, owner) = (device(graphs.number())?, device(ring.number)?);
    graphs.enter()?;
    let mut can = 0;
    // SAFETY: both devices exist and their contexts are retained; the calls write one number and one handle, and read one
    // description.
    unsafe {
        sys::cuDeviceCanAccessPeer(&raw mut can, reader, owner).result().map_err(failed)?;
        if can == 0 {
            return Ok(false);
        }
        let enabled = sys::cuCtxEnablePeerAccess(ring.context.0, 0);
        if enabled != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            enabled.result().map_err(failed)?;
        }
        // CubeCL allocates from the device's pool, whose access is set apart.
        let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
        sys::cuDeviceGetDefaultMemPool(&raw mut pool, owner).result().map_err(failed)?;
        let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
        // The type of a location, then its number. The bindings of some CUDA versions have a union there.
        let location = (&raw mut access.location).cast::<i32>();
        location.write(sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32);
        location.add(1).write(reader);
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        sys::cuMemPoolSetAccess(pool, &raw const access, 1).result().map_err(failed)?;
    }
    Ok(true)
}
