//! GPU memory of a stage: checked allocation, scratch for the rows of a pass, the check that everything fits, and freeing.
use std::ops::Range;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;
use kernels::order::POSITIONS;
use kernels::tile::Layout;
use kernels_models::stage::{StageError, StageOptions};
use kernels_models::weights::{ModelConfig, ModelFile, RopeKind};

use crate::attention::{Heads, Partials};
use crate::draw::{DRAWN_MAX, DrawScratch};
use crate::error::{failed, guarded, input};
use crate::platform::Platform;
use crate::product::operands::Activations;
use crate::product::{Groups, PARTS_WORDS, chunk_words};

/// Maximum rows of a forward pass.
pub(super) const ROWS: usize = 512;
/// Scratch for attention results per page, before they are combined. Passes that need more process their rows in turns.
const PARTIAL_BYTES: usize = 64 << 20;
/// Memory that a stage leaves free for the driver and the uploaded rows of passes. CubeCL keeps the latter in pools that grow by
/// up to 1/64 of the largest buffer, so that stays free too.
const SPARE_BYTES: u64 = 256 << 20;

/// Allocates memory on the device that a stage is loaded to.
pub(crate) struct Memory<'a, R: Platform> {
    pub(crate) client: &'a ComputeClient<R>,
    /// Index of the device within its runtime.
    pub(crate) number: usize,
}

/// Maximum bytes of a buffer: kernels count its words in 32 bits.
pub(crate) fn buffer_max<R: Platform>(client: &ComputeClient<R>) -> u64 {
    client.properties().memory.max_page_size.min(4 * u64::from(u32::MAX))
}

/// Buffers are allocated with exactly their size: CubeCL's pools would round hundreds of MiB up to several times that.
impl<R: Platform> Memory<'_, R> {
    /// Allocates an uninitialised buffer.
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

    /// Allocates a buffer with these bytes; CubeCL copies them.
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

    /// Runs `allocate` so that its buffers have exact sizes.
    pub(super) fn exact<T: Send>(&self, allocate: impl FnOnce() -> T + Send) -> Result<T, StageError> {
        self.client.memory_persistent_allocation((), |()| allocate()).map_err(failed)
    }

    /// Checks that a buffer was allocated. CubeCL does not report failed allocations; it panics when such a buffer is used.
    ///
    /// # Errors
    /// The allocation failed.
    pub(crate) fn check(&self, handle: &Handle, what: &str) -> Result<(), StageError> {
        let found = guarded(|| self.client.get_resource(handle.clone()).map(drop).map_err(failed));
        found.map_err(|_| self.no_room(handle.size(), what))
    }

    fn no_room(&self, bytes: u64, what: &str) -> StageError {
        let free = R::memory_free(self.number).map_or(String::new(), |free| format!("{} MiB are free, ", free >> 20));
        StageError::Device(format!(
            "no room for {} MiB of {what}: {free}a buffer holds at most {} MiB; give the stage fewer layers, a shorter context or \
             fewer sequences, or stop other programs that use the device",
            bytes.div_ceil(1 << 20),
            buffer_max(self.client) >> 20
        ))
    }
}

/// Returns a stage's memory to the device when dropped. Must be dropped after the buffers.
///
/// CubeCL keeps freed memory in pools of the allocating stream, which belongs to a thread. Stages are loaded by short-lived threads,
/// so nothing would use those pools again.
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
        // Errors are ignored: a lost device has no memory to return.
        let _ = guarded(|| {
            sync()?; // the thread that drops a stage also computed with it: its last launches may still read the buffers
            self.stream.executes(|| {
                sync()?;
                self.client.memory_cleanup();
                sync() // CUDA returns freed memory only at a synchronisation
            })
        });
    }
}

/// Scratch buffers for the rows of a pass.
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
    pub(super) mixture: MixtureScratch,
    /// Chunk sums of products that several cubes share.
    pub(super) parts: Handle,
}

/// Scratch of mixtures of experts; of one number each for a model without.
pub(super) struct MixtureScratch {
    /// `[rows, experts]`, or chunks of them.
    pub(super) scores: Handle,
    /// Experts and their factors, `[rows, used]`.
    pub(super) choices: [Handle; 2],
    /// Slots of the chosen experts, `[rows, used]`.
    pub(super) slots: Handle,
    pub(super) groups: Groups,
    /// `[rows, used, width]`
    pub(super) outputs: Handle,
    /// Gates and outputs of the shared expert.
    pub(super) shared: [Handle; 2],
    pub(super) shared_gated: Activations,
    /// `[rows · used, width of an expert]`
    pub(super) gated: Activations,
}

/// Numbers per row of the scratch of a mixture: experts, experts of a row, their width, and that of the shared one.
fn mixture_of(config: &ModelConfig) -> [usize; 4] {
    config.experts.map_or([0; 4], |experts| {
        [experts.count, experts.used, experts.width, experts.shared.map_or(0, |shared| shared.width)]
    })
}

impl Scratch {
    /// # Errors
    /// The device has no room for them.
    pub(super) fn new<R: Platform>(
        memory: &Memory<'_, R>,
        config: &ModelConfig,
        heads: &Heads,
        options: &StageOptions,
    ) -> Result<Self, StageError> {
        let client = memory.client;
        let floats = |numbers: usize| client.empty(numbers * 4);
        let room = partial_room(heads, options.context);
        let [experts, used, width, shared] = mixture_of(config);
        // Rows of experts.
        let pairs = ROWS * used;
        let some = |rows: usize, cols: usize| Activations::new(client, rows.max(1), cols.max(1));
        let groups = || {
            let [order, small, large] = Groups::words(pairs, experts).map(|words| floats(words.max(1)));
            Groups { order, blocks: [small, large] }
        };
        let scratch = memory.exact(|| Self {
            hidden: floats(ROWS * config.width),
            delta: floats(ROWS * config.width),
            x: Activations::new(client, ROWS, config.width),
            qkv: floats(ROWS * heads.row()),
            queries: floats(ROWS * heads.queries()),
            partials: Partials { values: floats(room * heads.queries()), sums: floats(room * heads.heads * 2), room },
            attended: Activations::new(client, ROWS, heads.queries()),
            both: floats(2 * (pairs * width).max(ROWS * config.ffn.max(shared))),
            gated: Activations::new(client, ROWS, config.ffn),
            mixture: MixtureScratch {
                scores: floats((ROWS * experts).max(chunk_words(experts)).max(1)),
                choices: [floats(pairs.max(1)), floats(pairs.max(1))],
                slots: floats(pairs.max(1)),
                groups: groups(),
                outputs: floats((ROWS * used * config.width).max(1)),
                shared: [floats(ROWS), floats(if shared > 0 { ROWS * config.width } else { 1 })],
                shared_gated: some(if shared > 0 { ROWS } else { 1 }, shared),
                gated: some(pairs, width),
            },
            parts: floats(PARTS_WORDS),
        })?;
        let Self { hidden, delta, x, qkv, queries, partials, attended, both, gated, mixture, parts } = &scratch;
        let activations =
            [x, attended, gated, &mixture.shared_gated, &mixture.gated].map(|a| [&a.floats, &a.codes, &a.scales]);
        let [experts, weights] = &mixture.choices;
        let [gates, outputs] = &mixture.shared;
        let others = [hidden, delta, qkv, queries, &partials.values, &partials.sums, both, parts];
        let Groups { order, blocks: [small, large] } = &mixture.groups;
        let mixture =
            [&mixture.scores, experts, weights, &mixture.slots, order, small, large, &mixture.outputs, gates, outputs];
        let others: Vec<&Handle> = others.into_iter().chain(mixture).collect();
        activations.as_flattened().iter().chain(&others).try_for_each(|handle| memory.check(handle, "scratch"))?;
        Ok(scratch)
    }
}

/// Maximum rows · pages of attention results before they are combined.
fn partial_room(heads: &Heads, context: usize) -> usize {
    let each = heads.heads * (heads.head_dim + 2) * 4;
    let blocks = context.div_ceil(POSITIONS);
    (PARTIAL_BYTES / each).clamp(blocks, ROWS * blocks)
}

/// Bytes of scratch, rotary tables, and, for a stage with the output head, the logits and scratch of recorded steps.
pub(super) fn scratch_bytes(config: &ModelConfig, heads: &Heads, options: &StageOptions) -> u64 {
    let rotary = options.context * (2 * heads.pairs + 1);
    let [experts, used, width, shared] = mixture_of(config);
    let both = 2 * (used * width).max(config.ffn.max(shared));
    let mixture = experts + 3 * used.max(1) + 1 + (used + 1) * config.width + 2 * shared + 2 * used * width;
    let per_row = 2 * config.width + heads.row() + heads.queries() + both + mixture;
    let activations = 2 * (config.width + heads.queries() + config.ffn); // floats, codes, scales
    let last = config.has_head(&options.layers);
    let drawn = if last { 4 * DRAWN_MAX * (config.vocab + config.width) + DrawScratch::bytes(config.vocab) } else { 0 };
    let groups: usize = Groups::words(ROWS * used, experts).into_iter().sum();
    ((ROWS * (per_row + activations) + rotary + PARTS_WORDS + groups) * 4 + PARTIAL_BYTES + drawn) as u64
}

/// Rejects a stage that cannot fit: a full device computes wrong numbers instead of failing. `in_ram`: bytes of its weights in RAM.
///
/// # Errors
/// It does not fit; the error lists the sizes.
pub(super) fn check_memory(
    file: &ModelFile,
    options: &StageOptions,
    heads: &Heads,
    in_ram: u64,
    free: Option<u64>,
    most: u64,
) -> Result<(), StageError> {
    let spare = SPARE_BYTES + most / 64;
    let layer_pages = (pages_of(options) * heads.page_bytes()) as u64;
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if layer_pages > most {
        return Err(input(format!(
            "keys and values of one layer take {} MiB ({} sequences of {} positions), but a buffer of this device holds at most \
             {} MiB; use a shorter context or fewer sequences",
            mib(layer_pages),
            options.sequences,
            options.context,
            mib(most)
        )));
    }
    let Some(free) = free else { return Ok(()) };
    let [weights, caches, scratch] = bytes_of(file, options, heads);
    let weights = weights.saturating_sub(in_ram);
    let total = weights + caches + scratch;
    let room = free - spare.min(free / 10);
    if total <= room {
        return Ok(());
    }
    Err(input(format!(
        "the device has {} MiB free, {} MiB less than needed: {} MiB of weights, {} MiB of KV cache ({} sequences of {} \
         positions), {} MiB of scratch; give it fewer layers, a shorter context or fewer sequences",
        mib(free),
        mib(total - room),
        mib(weights),
        mib(caches),
        options.sequences,
        options.context,
        mib(scratch)
    )))
}

/// Bytes of weights, of the cache and of scratch of a stage.
fn bytes_of(file: &ModelFile, options: &StageOptions, heads: &Heads) -> [u64; 3] {
    let config = file.config();
    let tensors = file.tensors().iter().filter(|t| belongs(config, &t.name, &options.layers));
    let weights = tensors.map(|t| match t.rows {
        1 => (t.cols * 4) as u64,
        _ => Layout::of(t.quant).matrix_bytes(t.rows, t.cols) as u64,
    });
    let caches = pages_of(options) * heads.page_bytes() * options.layers.len();
    [weights.sum(), caches as u64, scratch_bytes(config, heads, options)]
}

/// Bytes that a stage takes on a GPU if none of its experts lie in RAM.
pub fn stage_bytes(file: &ModelFile, options: &StageOptions) -> u64 {
    bytes_of(file, options, &heads_of(file.config(), options)).into_iter().sum()
}

/// Pages of a stage's cache: one more for a challenge beside the requests.
pub(super) fn pages_of(options: &StageOptions) -> usize {
    options.sequences * options.context.div_ceil(POSITIONS) + 1
}

pub(super) fn heads_of(config: &ModelConfig, options: &StageOptions) -> Heads {
    Heads {
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        pairs: config.rope.dims / 2,
        halves: config.rope.kind == RopeKind::Halves,
        half_cells: options.activations.cache_cell_bytes() == 2,
    }
}

/// Whether a stage with these layers holds the tensor on the device.
fn belongs(config: &ModelConfig, name: &str, layers: &Range<usize>) -> bool {
    config.belongs_to(name, layers) && (name != "token_embd.weight" || layers.start == 0 || config.tied)
}
