//! Memory of a stage on a GPU: buffers that are there or an error, scratch for the rows of a pass, whether all of it fits the
//! device, and how it is given back.
use std::ops::Range;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;
use kernels::order::POSITIONS;
use kernels::stage::{StageError, StageOptions};
use kernels::tile::Layout;
use kernels::weights::{ModelConfig, ModelFile};

use super::{ROWS, failed, guarded, input};
use crate::Platform;
use crate::attention::{Heads, Partials};
use crate::draw::{DRAWN_MAX, DrawScratch};
use crate::product::Activations;

/// Bytes of attended pages that wait to be combined: rows that need more are attended in turns.
const PARTIAL_BYTES: usize = 64 << 20;
/// Stays free beside a stage, for what the driver takes and for the rows of passes. CubeCL keeps the latter in pools that grow by up
/// to a 64th of the largest buffer, which stays free too.
const SPARE_BYTES: u64 = 256 << 20;

/// The memory of a device that a stage is being loaded to.
pub(crate) struct Memory<'a, R: Platform> {
    pub(crate) client: &'a ComputeClient<R>,
    /// Of the device among those of its runtime.
    pub(crate) number: usize,
}

/// Bytes of a buffer at most: kernels count its words in 32 bits.
pub(crate) fn buffer_max<R: Platform>(client: &ComputeClient<R>) -> u64 {
    client.properties().memory.max_page_size.min(4 * u64::from(u32::MAX))
}

/// Buffers of exactly their size: CubeCL's pools would round one of some hundred MiB up to several times as much.
impl<R: Platform> Memory<'_, R> {
    /// A buffer that is there; it holds whatever the memory held.
    ///
    /// # Errors
    /// The device has no room for it.
    pub(crate) fn buffer(&self, bytes: usize, what: &str) -> Result<Handle, StageError> {
        if bytes as u64 > buffer_max(self.client) {
            return Err(self.no_room(bytes as u64, what));
        }
        let handle = self.exact(|| self.client.empty(bytes))?;
        self.check(&handle, what)?;
        Ok(handle)
    }

    /// A buffer with these bytes, sent by CubeCL.
    ///
    /// # Errors
    /// The device has no room for it.
    pub(crate) fn created(&self, bytes: Vec<u8>, what: &str) -> Result<Handle, StageError> {
        if bytes.len() as u64 > buffer_max(self.client) {
            return Err(self.no_room(bytes.len() as u64, what));
        }
        let handle = self.exact(|| self.client.create(Bytes::from_bytes_vec(bytes)))?;
        self.check(&handle, what)?;
        Ok(handle)
    }

    /// Runs what allocates.
    pub(super) fn exact<T: Send>(&self, allocate: impl FnOnce() -> T + Send) -> Result<T, StageError> {
        self.client.memory_persistent_allocation((), |()| allocate()).map_err(failed)
    }

    /// Whether a buffer is there. CubeCL does not say when an allocation fails; it panics when the buffer is used.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn check(&self, handle: &Handle, what: &str) -> Result<(), StageError> {
        let found = guarded(|| self.client.get_resource(handle.clone()).map(drop).map_err(failed));
        found.map_err(|_| self.no_room(handle.size(), what))
    }

    fn no_room(&self, bytes: u64, what: &str) -> StageError {
        let free = R::memory_free(self.number).map_or(String::new(), |free| format!("{} MiB are free, ", free >> 20));
        StageError::Device(format!(
            "it has no room for {} MiB of {what}: {free}a buffer holds at most {} MiB; give the stage fewer layers, a shorter \
             context or fewer sequences, or end what else uses the device",
            bytes.div_ceil(1 << 20),
            buffer_max(self.client) >> 20
        ))
    }
}

/// Gives a stage's memory back to the device. To be dropped after the buffers.
///
/// CubeCL keeps freed memory in pools of the stream, hence the thread, that allocated it; stages are loaded by threads that come and
/// go, so nobody would ever use it again.
pub(crate) struct Release<R: Platform> {
    client: ComputeClient<R>,
    stream: StreamId,
}

impl<R: Platform> Release<R> {
    /// For buffers that this thread allocates.
    pub(crate) fn new(client: &ComputeClient<R>) -> Self {
        Self { client: client.clone(), stream: StreamId::current() }
    }
}

impl<R: Platform> Drop for Release<R> {
    fn drop(&mut self) {
        let sync = || cubecl::future::block_on(self.client.sync()).map_err(failed);
        // A device that is lost has nothing to give back.
        let _ = guarded(|| {
            sync()?; // the thread that drops a stage is the one that computed with it: what it launched last reads the buffers
            self.stream.executes(|| {
                sync()?;
                self.client.memory_cleanup();
                sync() // CUDA gives freed memory back when it is waited for
            })
        });
    }
}

/// Room for the rows of a pass.
pub(super) struct Scratch {
    pub(super) hidden: Handle,
    pub(super) delta: Handle,
    pub(super) x: Activations,
    pub(super) qkv: Handle,
    pub(super) queries: Handle,
    pub(super) partials: Partials,
    pub(super) attended: Activations,
    pub(super) both: Handle,
    pub(super) gated: Activations,
}

impl Scratch {
    /// # Errors
    /// The device has no room for it.
    pub(super) fn new<R: Platform>(
        memory: &Memory<'_, R>,
        config: &ModelConfig,
        heads: &Heads,
        options: &StageOptions,
    ) -> Result<Self, StageError> {
        let client = memory.client;
        let floats = |numbers: usize| client.empty(numbers * 4);
        let room = partial_room(heads, options.context);
        let scratch = memory.exact(|| Self {
            hidden: floats(ROWS * config.width),
            delta: floats(ROWS * config.width),
            x: Activations::new(client, ROWS, config.width),
            qkv: floats(ROWS * heads.row()),
            queries: floats(ROWS * heads.queries()),
            partials: Partials { values: floats(room * heads.queries()), sums: floats(room * heads.heads * 2), room },
            attended: Activations::new(client, ROWS, heads.queries()),
            both: floats(ROWS * 2 * config.ffn),
            gated: Activations::new(client, ROWS, config.ffn),
        })?;
        let Self { hidden, delta, x, qkv, queries, partials, attended, both, gated } = &scratch;
        let activations = [x, attended, gated].map(|a| [&a.floats, &a.codes, &a.scales]);
        let others = [hidden, delta, qkv, queries, &partials.values, &partials.sums, both];
        activations.as_flattened().iter().chain(&others).try_for_each(|handle| memory.check(handle, "scratch"))?;
        Ok(scratch)
    }
}

/// Rows times pages that wait to be combined at most.
fn partial_room(heads: &Heads, context: usize) -> usize {
    let each = heads.heads * (heads.head_dim + 2) * 4;
    let blocks = context.div_ceil(POSITIONS);
    (PARTIAL_BYTES / each).clamp(blocks, ROWS * blocks)
}

/// Bytes of scratch, of rotary tables, and of what recorded steps of a stage with the head draw tokens from.
pub(super) fn scratch_bytes(config: &ModelConfig, heads: &Heads, options: &StageOptions) -> u64 {
    let rotary = options.context * 2 * heads.pairs;
    let per_row = 2 * config.width + heads.row() + heads.queries() + 2 * config.ffn;
    let activations = 2 * (config.width + heads.queries() + config.ffn); // floats, codes, scales
    let last = options.layers.end == config.layers;
    let drawn = if last { 4 * DRAWN_MAX * config.vocab + DrawScratch::bytes(config.vocab) } else { 0 };
    ((ROWS * (per_row + activations) + rotary) * 4 + PARTIAL_BYTES + drawn) as u64
}

/// Refuses what cannot fit, naming the sums: a device that is full computes wrong numbers instead of failing.
pub(super) fn check_memory(
    file: &ModelFile,
    options: &StageOptions,
    heads: &Heads,
    pages: usize,
    free: Option<u64>,
    most: u64,
) -> Result<(), StageError> {
    let config = file.config();
    let spare = SPARE_BYTES + most / 64;
    let layer_pages = (pages * heads.page_bytes()) as u64;
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if layer_pages > most {
        return Err(input(format!(
            "keys and values of one layer take {} MiB ({} sequences of {} positions), a buffer of this device holds {}; give \
             it a shorter context or fewer sequences",
            mib(layer_pages),
            options.sequences,
            options.context,
            mib(most)
        )));
    }
    let Some(free) = free else { return Ok(()) };
    let weights: u64 = file
        .tensors()
        .iter()
        .filter(|t| belongs(config, &t.name, &options.layers))
        .map(|t| match t.rows {
            1 => (t.cols * 4) as u64,
            _ => Layout::of(t.quant).matrix_bytes(t.rows, t.cols) as u64,
        })
        .sum();
    let caches = layer_pages * options.layers.len() as u64;
    let scratch = scratch_bytes(config, heads, options);
    let total = weights + caches + scratch;
    let room = free - spare.min(free / 10);
    if total <= room {
        return Ok(());
    }
    Err(input(format!(
        "the device has {} MiB free, {} less than needed: {} MiB of weights, {} of caches ({} sequences of {} positions), {} of \
         scratch; give it fewer layers, a shorter context or fewer sequences",
        mib(free),
        mib(total - room),
        mib(weights),
        mib(caches),
        options.sequences,
        options.context,
        mib(scratch)
    )))
}

/// Whether a stage of these layers holds a tensor on the device.
fn belongs(config: &ModelConfig, name: &str, layers: &Range<usize>) -> bool {
    config.belongs_to(name, layers) && (name != "token_embd.weight" || layers.start == 0 || config.tied)
}
