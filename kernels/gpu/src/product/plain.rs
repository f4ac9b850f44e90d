//! Products on any device and in any format: a unit computes one chunk of one matrix row.
use cubecl::prelude::*;
use kernels::order::{CHUNKS, GROUP};
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use super::operands::{Finish, finish_element};
use crate::arithmetic::{Features, chunk_range, fused};
use crate::inline::{await_previous, release_next};
use crate::tiles::{code_words, row_scales, slot_codes, tile_words, weight};

/// Columns of unquantised weights that are loaded at once: as many as the registers hold. With several activation rows, each has its
/// own numbers; halves are converted.
const fn batch(tokens: usize, kind: QuantType) -> usize {
    if tokens > 1 {
        16
    } else if matches!(kind, QuantType::F32) {
        GROUP
    } else {
        GROUP / 2
    }
}

/// Activation rows per cube: several rows of unquantised weights share the loaded weights.
pub(super) const fn plain_tokens(kind: QuantType, count: usize) -> usize {
    if Layout::of(kind).bits == 0 && count >= SHARED_ROWS { SHARED_ROWS } else { 1 }
}

/// Activation rows that share loaded weights.
const SHARED_ROWS: usize = 8;

#[cube(launch_unchecked)]
pub(super) fn plain_kernel(
    tiles: &Array<u32>,
    floats: &Array<f32>,
    codes: &Array<u32>,
    scales: &Array<f32>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    cols: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] tokens: usize,
    #[comptime] kind: QuantType,
    #[comptime] integers: bool,
    #[comptime] finish: Finish,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (row, chunk) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (strip, token, count) = (CUBE_POS_X as usize, CUBE_POS_Y as usize * tokens, count as usize);
    let mut sums = Array::<f32>::new(tokens);
    chunk_sums(
        tiles,
        floats,
        codes,
        scales,
        strip,
        token,
        count - 1,
        row,
        chunk,
        cols as usize,
        &mut sums,
        tokens,
        kind,
        integers,
        able,
    );
    let element = strip * comptime!(ROWS) + row;
    #[unroll]
    for i in 0..tokens {
        let total = total_of(sums[i], row, chunk);
        if chunk == 0 && element < width as usize && token + i < count {
            let at = (token + i) * stride as usize + offset as usize + element;
            finish_element(y, at, total, bias, element, finish);
        }
    }
}

/// The sums of one chunk of the products of a matrix row, row `row` of tile row `strip`, with activation rows `token ..`. In place
/// of rows past row `last`, it reads that one.
#[cube]
pub(super) fn chunk_sums(
    tiles: &Array<u32>,
    floats: &Array<f32>,
    codes: &Array<u32>,
    scales: &Array<f32>,
    strip: usize,
    token: usize,
    last: usize,
    row: usize,
    chunk: usize,
    cols: usize,
    sums: &mut Array<f32>,
    #[comptime] tokens: usize,
    #[comptime] kind: QuantType,
    #[comptime] integers: bool,
    #[comptime] able: Features,
) {
    let groups = cols.div_ceil(comptime!(GROUP));
    let (from, to) = chunk_range(groups, chunk);
    #[unroll]
    for i in 0..tokens {
        sums[i] = 0.0f32;
    }
    for group in from..to {
        let tile = (strip * groups + group) * comptime!(tile_words(kind));
        if comptime!(integers) {
            #[unroll]
            for i in 0..tokens {
                let at = min(token + i, last) * groups + group;
                #[unroll]
                for block in 0..2usize {
                    sums[i] = plain_block(tiles, tile, codes, scales, at, block, row, sums[i], kind, able);
                }
            }
        } else {
            let end = min(comptime!(GROUP), cols - group * comptime!(GROUP));
            let mut column = 0usize;
            if comptime!(Layout::of(kind).bits == 0) {
                // Loads of a batch overlap; the chains of additions keep their order.
                let batch = comptime!(batch(tokens, kind));
                let mut weights = Array::<f32>::new(batch);
                let mut numbers = Array::<f32>::new(batch);
                while column + batch <= end {
                    #[unroll]
                    for i in 0..batch {
                        weights[i] = weight(tiles, tile, row, column + i, kind, able);
                    }
                    #[unroll]
                    for n in 0..tokens {
                        let x = min(token + n, last) * cols + group * comptime!(GROUP) + column;
                        #[unroll]
                        for i in 0..batch {
                            numbers[i] = floats[x + i];
                        }
                        #[unroll]
                        for i in 0..batch {
                            sums[n] = fused(weights[i], numbers[i], sums[n], able);
                        }
                    }
                    column += batch;
                }
            }
            while column < end {
                let w = weight(tiles, tile, row, column, kind, able);
                #[unroll]
                for n in 0..tokens {
                    let x = min(token + n, last) * cols + group * comptime!(GROUP) + column;
                    sums[n] = fused(w, floats[x], sums[n], able);
                }
                column += 1;
            }
        }
    }
}

/// The sum of all chunks of a row, for the units of chunk 0. All units of the cube must call it.
#[cube]
pub(super) fn total_of(sum: f32, row: usize, chunk: usize) -> f32 {
    let mut sums = SharedMemory::<f32>::new(comptime!(ROWS * CHUNKS));
    sums[chunk * comptime!(ROWS) + row] = sum;
    sync_cube();
    let mut total = 0.0f32;
    if chunk == 0 {
        #[unroll]
        for c in 0..CHUNKS {
            total += sums[comptime!(c * ROWS) + row];
        }
    }
    total
}

/// Adds one quantised block of a matrix row to `sum`: see `kernels::order::block_dot`.
#[cube]
fn plain_block(
    tiles: &Array<u32>,
    tile: usize,
    codes: &Array<u32>,
    scales: &Array<f32>,
    group: usize,
    #[comptime] block: usize,
    row: usize,
    sum: f32,
    #[comptime] kind: QuantType,
    #[comptime] able: Features,
) -> f32 {
    let layout = comptime!(Layout::of(kind));
    let words = tile + comptime!(block * layout.block_bytes / 4);
    let (first, second, minimum) = row_scales(tiles, tile + comptime!(code_words(kind)), block, row, kind, able);
    let x = (2 * group + block) * 4;
    let scale = scales[x];
    let mut dots = Array::<i32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let mut dot = 0i32;
        #[unroll]
        for i in 0..4usize {
            let slot = comptime!(4 * half + i);
            let w = slot_codes(tiles, words, row, slot, kind);
            let v = codes[group * 16 + comptime!(4 * i + 2 * block + half)];
            #[unroll]
            for j in 0..4u32 {
                let a = i32::cast_from((w >> comptime!(8 * j)) & 255u32);
                let b = i32::cast_from(((v >> comptime!(8 * j)) & 255u32) ^ 128u32) - 128i32;
                dot += a * b;
            }
        }
        let first = i32::reinterpret(scales[x + 3]);
        let sum = if comptime!(half == 0) { first } else { i32::reinterpret(scales[x + 2]) - first };
        dots[half] = dot - comptime!(layout.offset) * sum;
    }
    let mut out = sum;
    if comptime!(layout.scales == Scales::Sixteens) {
        out = fused(f32::cast_from(dots[0]), first * scale, out, able);
        out = fused(f32::cast_from(dots[1]), second * scale, out, able);
    } else {
        out = fused(f32::cast_from(dots[0] + dots[1]), first * scale, out, able);
    }
    if comptime!(layout.scales.minimum()) {
        out = fused(minimum, scales[x + 1], out, able);
    }
    out
}
