//! Generates random weights on the device, for benchmarks: uploads 16 rows per format and width, and varies them there.
//!
//! The time of a step does not depend on the weights' values, so a model of any size can be measured without its file. No two tile
//! rows (16 matrix rows, a `TileRow`) are equal, because drawing a token from tied logits takes longer.
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::GROUP;
use kernels::quant::{QuantType, random_blocks};
use kernels::tile::{Layout, ROWS, convert};
use kernels_models::stage::StageError;

use super::{CUBES, Joined, UNITS};
use crate::engine::memory::Memory;
use crate::platform::{Platform, array};
use crate::tiles::{code_words, tile_words};

/// Columns whose codes differ from those of the uploaded rows in the same bits.
const SPAN: usize = 256;
/// Tiles per span.
const SPAN_TILES: usize = SPAN / GROUP;

/// A tile row on the device: 16 random matrix rows.
pub(super) struct TileRow {
    words: usize,
    /// Sum of the words of each span of columns, for each value of [`flips`].
    sums: Vec<[u32; 16]>,
    tiles: Handle,
}

/// Which of the low four bits of a span's codes are flipped in tile row `strip` of a matrix.
pub(crate) fn flips(strip: usize, span: usize) -> u32 {
    (strip as u32).wrapping_mul(STRIP_STEP).wrapping_add((span as u32).wrapping_mul(SPAN_STEP)) >> 28
}

/// Odd multipliers that spread over all 32 bits.
const STRIP_STEP: u32 = 0x9e37_79b1;
const SPAN_STEP: u32 = 0x85eb_ca77;

/// Mask of the lowest bit of every code in a word.
const fn low_bits(kind: QuantType) -> u32 {
    if Layout::of(kind).bits == 8 { 0x0101_0101 } else { 0x1111_1111 }
}

/// Words of a block that hold whole codes or their low four bits; the words of higher bits follow them.
const fn low_words(kind: QuantType) -> usize {
    match Layout::of(kind).bits {
        0 => 0,
        8 => 8 * ROWS,
        _ => 4 * ROWS,
    }
}

/// The 16 rows in file format that all tile rows of a matrix are derived from by flipping bits.
pub(crate) fn rows(kind: QuantType, cols: usize) -> Vec<u8> {
    const SEED: u64 = 1;
    random_blocks(kind, ROWS * cols / kind.block_len(), SEED)
}

/// Writes tiles of random weights to RAM: the same tile row again and again.
///
/// # Errors
/// The format has no tiles of these columns.
pub(crate) fn fill(kind: QuantType, cols: usize, tiles: &mut [u8]) -> Result<(), StageError> {
    let mut strip = vec![0; Layout::of(kind).matrix_bytes(ROWS, cols)];
    convert(kind, cols, 0..ROWS, &rows(kind, cols), &mut strip)
        .map_err(|error| StageError::Device(format!("random weights: {error}")))?;
    tiles.chunks_mut(strip.len()).for_each(|out| out.copy_from_slice(&strip[..out.len()]));
    Ok(())
}

impl TileRow {
    fn new<R: Platform>(memory: &Memory<'_, R>, kind: QuantType, cols: usize) -> Result<Self, StageError> {
        let mut tiles = vec![0; Layout::of(kind).matrix_bytes(ROWS, cols)];
        convert(kind, cols, 0..ROWS, &rows(kind, cols), &mut tiles)
            .map_err(|error| StageError::Device(format!("random weights: {error}")))?;
        let words = tiles.len() / 4;
        let mut sums = Vec::new();
        for span in tiles.chunks(SPAN_TILES * 4 * tile_words(kind)) {
            sums.push(std::array::from_fn(|flips| {
                let varied = span.chunks_exact(4).enumerate().map(|(i, word)| {
                    let word = u32::from_le_bytes(word.try_into().expect("four bytes"));
                    let at = i % tile_words(kind);
                    let in_codes = at < code_words(kind) && at % (code_words(kind) / 2) < low_words(kind);
                    if in_codes { word ^ (flips as u32 * low_bits(kind)) } else { word }
                });
                varied.fold(0, u32::wrapping_add)
            }));
        }
        Ok(Self { words, sums, tiles: memory.created(tiles, "random weights")? })
    }

    /// The sum of the words of a matrix of `strips` tile rows.
    fn sum(&self, strips: usize) -> u32 {
        let spans = |strip| self.sums.iter().enumerate().map(move |(span, sums)| sums[flips(strip, span) as usize]);
        (0..strips).flat_map(spans).fold(0, u32::wrapping_add)
    }
}

/// Generates a matrix from the random rows of its format and columns. Returns it with the sum of its words.
pub(super) fn matrix<R: Platform>(
    memory: &Memory<'_, R>,
    strips: &mut BTreeMap<(QuantType, usize), TileRow>,
    joined: &Joined<'_>,
) -> Result<(Handle, u32), StageError> {
    let strip = match strips.entry((joined.kind, joined.cols)) {
        Entry::Occupied(made) => made.into_mut(),
        Entry::Vacant(first) => first.insert(TileRow::new(memory, joined.kind, joined.cols)?),
    };
    let many = joined.rows.div_ceil(ROWS);
    let buffer = memory.buffer(joined.bytes(), joined.pieces[0].0)?;
    // SAFETY: the matrix has `many` tile rows, and the kernel stays below both lengths.
    unsafe {
        repeat_kernel::launch_unchecked::<R>(
            memory.client,
            CubeCount::Static(CUBES, 1, 1),
            CubeDim::new_1d(UNITS),
            array(&strip.tiles, strip.words),
            array(&buffer, many * strip.words),
            strip.words as u32,
            many as u32,
            joined.kind,
        );
    }
    Ok((buffer, strip.sum(many)))
}

/// Each cube writes whole tile rows.
#[cube(launch_unchecked)]
fn repeat_kernel(strip: &Array<u32>, matrix: &mut Array<u32>, len: u32, many: u32, #[comptime] kind: QuantType) {
    let (tile, codes) = comptime!((tile_words(kind) as u32, code_words(kind) as u32));
    let mut at = CUBE_POS_X;
    while at < many {
        let mut i = UNIT_POS_X;
        while i < len {
            let mut word = strip[i as usize];
            if comptime!(low_words(kind) > 0) {
                let in_tile = i % tile;
                if in_tile < codes && in_tile % comptime!(codes / 2) < comptime!(low_words(kind) as u32) {
                    let span = i / comptime!(SPAN_TILES as u32 * tile);
                    let flips = (at * comptime!(STRIP_STEP) + span * comptime!(SPAN_STEP)) >> 28u32;
                    word ^= flips * comptime!(low_bits(kind));
                }
            }
            matrix[at as usize * len as usize + i as usize] = word;
            i += comptime!(UNITS);
        }
        at += comptime!(CUBES);
    }
}
