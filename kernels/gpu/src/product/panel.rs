//! Products of many rows on matrix instructions: a plane computes 32 rows of the matrix for 32 tokens, chunk after chunk.
use cubecl::prelude::*;
use kernels::order::CHUNKS;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use super::matrices::multiply;
use super::{Finish, chunk_range, finish_element};
use crate::arithmetic::Abilities;
use crate::tiles::{LaneTile, lane_scales, lane_vectors, read_lane, tile_words};

/// Tokens of a cube.
pub(super) const fn panel_tokens(kind: QuantType) -> usize {
    4 * 8 * eights(kind)
}

/// Matrix rows of a cube.
pub(super) const PANEL_ROWS: usize = 64;
/// Tiles of 16 rows that a plane of a panel computes.
const PANEL_STRIPS: usize = 2;
/// Times eight tokens that a plane of a panel computes: fewer where a tile takes more registers.
const fn eights(kind: QuantType) -> usize {
    if matches!(Layout::of(kind).scales, Scales::Sixteens) { 2 } else { 4 }
}

#[cube(launch_unchecked, address_type = "u64")]
pub(super) fn panel_kernel(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    nibbles: u32,
    groups: u32,
    strips: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] kind: QuantType,
    #[comptime] finish: Finish,
    #[comptime] able: Abilities,
) {
    let lane = UNIT_POS_X as usize;
    let across = comptime!(eights(kind));
    let (plane, groups, count) = (UNIT_POS_Y as usize, groups as usize, count as usize);
    let (g, t) = (lane / 4, lane % 4);
    let strip = CUBE_POS_Y as usize * comptime!(PANEL_ROWS / ROWS) + plane / 4 * PANEL_STRIPS;
    let token = CUBE_POS_X as usize * comptime!(panel_tokens(kind)) + plane % 4 * comptime!(8 * across);
    let elements = comptime!(PANEL_STRIPS * across * 4);
    let mut sums = Array::<f32>::new(elements);
    let mut totals = Array::<f32>::new(elements);
    #[unroll]
    for i in 0..elements {
        sums[i] = 0.0f32;
        totals[i] = 0.0f32;
    }
    if token < count && strip < strips as usize {
        let mut raw = Array::<Vector<u32, Const<2>>>::new(comptime!(PANEL_STRIPS * lane_vectors(kind)));
        let mut raw_scales = Array::<u32>::new(comptime!(PANEL_STRIPS * lane_scales(kind)));
        let mut x_scales = Array::<Vector<f32, Const<4>>>::new(4usize);
        for chunk in 0..CHUNKS {
            let (from, to) = chunk_range(groups, chunk);
            for group in from..to {
                #[unroll]
                for i in 0..PANEL_STRIPS {
                    let tile = (min(strip + i, strips as usize - 1) * groups + group) * comptime!(tile_words(kind));
                    let tile = LaneTile::new(tile, lane, kind);
                    read_lane(pairs, singles, tile, &mut raw, &mut raw_scales, i, kind);
                }
                #[unroll]
                for n in 0..across {
                    let eight = token + comptime!(8 * n);
                    let last = count - 1;
                    let x = codes[(min(eight + g, last) * groups + group) * 4 + t];
                    let left = (min(eight + 2 * t, last) * groups + group) * 2;
                    let right = (min(eight + 2 * t + 1, last) * groups + group) * 2;
                    #[unroll]
                    for block in 0..2usize {
                        x_scales[comptime!(2 * block)] = scales[left + block];
                        x_scales[comptime!(2 * block + 1)] = scales[right + block];
                    }
                    #[unroll]
                    for i in 0..PANEL_STRIPS {
                        let at = comptime!((i * across + n) * 4);
                        multiply(&raw, &raw_scales, x, &x_scales, nibbles, lane, &mut sums, i, at, false, kind, able);
                    }
                }
            }
            #[unroll]
            for i in 0..elements {
                totals[i] += sums[i];
                sums[i] = 0.0f32;
            }
        }
        #[unroll]
        for i in 0..PANEL_STRIPS {
            #[unroll]
            for n in 0..across {
                #[unroll]
                for element in 0..4usize {
                    let row = (strip + i) * comptime!(ROWS) + 2 * g + comptime!(element / 2);
                    let to = token + comptime!(8 * n) + 2 * t + comptime!(element % 2);
                    if to < count && row < width as usize {
                        let at = to * stride as usize + offset as usize + row;
                        finish_element(y, at, totals[comptime!((i * across + n) * 4 + element)], bias, row, finish);
                    }
                }
            }
        }
    }
}
