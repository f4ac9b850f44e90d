//! Matrices of random weights made on the device: 16 rows of each format and width are sent, and varied there.
//!
//! What a step takes does not depend on the values of weights, so a model of any size can be measured without a file of it. No two
//! strips of 16 rows are equal: drawing a token among logits that tie takes longer.
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::GROUP;
use kernels::quant::{QuantType, random_blocks};
use kernels::stage::StageError;
use kernels::tile::{Layout, ROWS, convert};

use super::{CUBES, Joined, UNITS};
use crate::engine::memory::Memory;
use crate::tiles::{code_words, tile_words};
use crate::{Platform, array};

/// Columns whose codes differ from the first strip's in the same bits.
const SPAN: usize = 256;
/// Tiles of as many columns.
const SPAN_TILES: usize = SPAN / GROUP;

/// 16 random rows as tiles, on the device.
pub(super) struct Strip {
    words: usize,
    /// Sums of the words of each span of columns, for each [`flips`] of it.
    sums: Vec<[u32; 16]>,
    tiles: Handle,
}

/// Which of the low four bits of the codes of a span are flipped in strip `strip` of a matrix.
pub(crate) fn flips(strip: usize, span: usize) -> u32 {
    (strip as u32).wrapping_mul(STRIP_STEP).wrapping_add((span as u32).wrapping_mul(SPAN_STEP)) >> 28
}

/// Odd numbers whose multiples spread over all 32 bits.
const STRIP_STEP: u32 = 0x9e37_79b1;
const SPAN_STEP: u32 = 0x85eb_ca77;

/// The low bits of all codes of a word.
const fn low_bits(kind: QuantType) -> u32 {
    if Layout::of(kind).bits == 8 { 0x0101_0101 } else { 0x1111_1111 }
}

/// Words of a block that begin with whole codes or their low four bits; further bits follow.
const fn low_words(kind: QuantType) -> usize {
    match Layout::of(kind).bits {
        0 => 0,
        8 => 8 * ROWS,
        _ => 4 * ROWS,
    }
}

/// The rows of a file that the first strip of a matrix is made of, before bits are flipped.
pub(crate) fn rows(kind: QuantType, cols: usize) -> Vec<u8> {
    const SEED: u64 = 1;
    random_blocks(kind, ROWS * cols / kind.block_len(), SEED)
}

impl Strip {
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

    /// The sum of the words of a matrix of `strips` strips.
    fn sum(&self, strips: usize) -> u32 {
        let spans = |strip| self.sums.iter().enumerate().map(move |(span, sums)| sums[flips(strip, span) as usize]);
        (0..strips).flat_map(spans).fold(0, u32::wrapping_add)
    }
}

/// A matrix of variations of the strip of its format and columns, and the sum of its words.
pub(super) fn matrix<R: Platform>(
    memory: &Memory<'_, R>,
    strips: &mut BTreeMap<(QuantType, usize), Strip>,
    joined: &Joined<'_>,
) -> Result<(Handle, u32), StageError> {
    let strip = match strips.entry((joined.kind, joined.cols)) {
        Entry::Occupied(made) => made.into_mut(),
        Entry::Vacant(first) => first.insert(Strip::new(memory, joined.kind, joined.cols)?),
    };
    let many = joined.rows.div_ceil(ROWS);
    let buffer = memory.buffer(joined.bytes(), joined.pieces[0].0)?;
    // SAFETY: the matrix is `many` strips long, and the kernel stays below both lengths.
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

/// Each cube writes whole strips.
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
