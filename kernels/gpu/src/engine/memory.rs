//! Memory of a stage on a GPU beside its weights: scratch for the rows of a pass, and whether all of it fits the device.
use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::POSITIONS;
use kernels::stage::{StageError, StageOptions};
use kernels::tile::Layout;
use kernels::weights::{ModelConfig, ModelFile};

use super::{ROWS, input};
use crate::Platform;
use crate::attention::{Heads, Partials};
use crate::product::Activations;

/// Bytes of attended pages that wait to be combined: rows that need more are attended in turns.
const PARTIAL_BYTES: usize = 64 << 20;
/// Stays free beside a stage: pools round up.
const SPARE_BYTES: u64 = 256 << 20;

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
    pub(super) fn new<R: Platform>(
        client: &ComputeClient<R>,
        config: &ModelConfig,
        heads: &Heads,
        options: &StageOptions,
    ) -> Self {
        let floats = |numbers: usize| client.empty(numbers * 4);
        let room = partial_room(heads, options.context);
        Self {
            hidden: floats(ROWS * config.width),
            delta: floats(ROWS * config.width),
            x: Activations::new(client, ROWS, config.width),
            qkv: floats(ROWS * heads.row()),
            queries: floats(ROWS * heads.queries()),
            partials: Partials { values: floats(room * heads.queries()), sums: floats(room * heads.heads * 2), room },
            attended: Activations::new(client, ROWS, heads.queries()),
            both: floats(ROWS * 2 * config.ffn),
            gated: Activations::new(client, ROWS, config.ffn),
        }
    }
}

/// Rows times pages that wait to be combined at most.
fn partial_room(heads: &Heads, context: usize) -> usize {
    let each = heads.heads * (heads.head_dim + 2) * 4;
    let blocks = context.div_ceil(POSITIONS);
    (PARTIAL_BYTES / each).clamp(blocks, ROWS * blocks)
}

pub(super) fn scratch_bytes(config: &ModelConfig, heads: &Heads) -> u64 {
    let per_row = 2 * config.width + heads.row() + heads.queries() + 2 * config.ffn;
    let activations = 2 * (config.width + heads.queries() + config.ffn); // floats, codes, scales
    ((ROWS * (per_row + activations) + config.vocab) * 4 + PARTIAL_BYTES) as u64
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
    let scratch = scratch_bytes(config, heads);
    let total = weights + caches + scratch;
    let room = free - SPARE_BYTES.min(free / 10);
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
