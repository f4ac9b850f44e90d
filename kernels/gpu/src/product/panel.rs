//! Products of many rows on matrix instructions: a cube computes 64 rows of the matrix for up to 128 tokens, a plane 32 for 32.
//!
//! What the planes read of a group of columns lies in shared memory, twice: while one copy is multiplied, the next group is on its way
//! to registers, and from there to the other copy.
use cubecl::prelude::*;
use kernels::order::CHUNKS;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use super::matrices::multiply;
use super::{Finish, chunk_range, finish_element};
use crate::arithmetic::Abilities;
use crate::tiles::{LaneTile, code_words, lane_scales, lane_vectors, read_lane, tile_words};

/// Pairs of words in shared memory.
type Words = SharedMemory<Vector<u32, Const<2>>>;

/// Tokens of a cube.
pub(super) const fn panel_tokens(kind: QuantType) -> usize {
    4 * 8 * eights(kind)
}

/// Matrix rows of a cube.
pub(super) const PANEL_ROWS: usize = 64;
/// Strips of 16 rows of a cube.
const CUBE_STRIPS: usize = PANEL_ROWS / ROWS;
/// Strips that a plane computes.
const PANEL_STRIPS: usize = 2;
/// Units of a cube.
const UNITS: usize = 256;
/// Times eight tokens that a plane of a panel computes: fewer where a tile takes more registers.
const fn eights(kind: QuantType) -> usize {
    if matches!(Layout::of(kind).scales, Scales::Sixteens) { 2 } else { 4 }
}

/// Pairs of words of a strip's codes in one group.
const fn pairs_of(kind: QuantType) -> usize {
    code_words(kind) / 2
}

/// Words of a strip's scales in one group.
const fn scales_of(kind: QuantType) -> usize {
    tile_words(kind) - code_words(kind)
}

/// What all planes of a cube read of one group, twice.
#[derive(CubeType)]
struct Staged {
    /// `[copy, strip, pairs]`
    pairs: SharedMemory<Vector<u32, Const<2>>>,
    /// `[copy, strip, words]`
    singles: SharedMemory<u32>,
    /// `[copy, token, 4]`
    codes: SharedMemory<Vector<u32, Const<4>>>,
    /// `[copy, block, token]`: so that lanes read neighbours.
    scales: SharedMemory<Vector<f32, Const<4>>>,
}

/// A unit's part of a group on its way to shared memory.
#[derive(CubeType)]
struct Fetched {
    pairs: Array<Vector<u32, Const<2>>>,
    single: Array<u32>,
    codes: Array<Vector<u32, Const<4>>>,
    scales: Array<Vector<f32, Const<4>>>,
}

/// The number, or the most that it may be. (CUDA's `min` does not take a constant beside a number of 64 bits.)
#[cube]
fn at_most(number: usize, #[comptime] most: usize) -> usize {
    select(number < most, number, most)
}

/// Elements that a unit moves, of `of` in all.
const fn each(of: usize) -> usize {
    of.div_ceil(UNITS)
}

#[cube]
fn fetch(
    fetched: &mut Fetched,
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    strip: usize,
    last_strip: usize,
    token: usize,
    last_token: usize,
    groups: usize,
    group: usize,
    unit: usize,
    #[comptime] kind: QuantType,
) {
    let all_pairs = comptime!(CUBE_STRIPS * pairs_of(kind));
    #[unroll]
    for i in 0..comptime!(each(all_pairs)) {
        // Units beyond the last pair read it once more.
        let at = at_most(unit + comptime!(i * UNITS), comptime!(all_pairs - 1));
        let tile = min(strip + at / comptime!(pairs_of(kind)), last_strip) * groups + group;
        fetched.pairs[i] = pairs[tile * comptime!(tile_words(kind) / 2) + at % comptime!(pairs_of(kind))];
    }
    let all_scales = comptime!(CUBE_STRIPS * scales_of(kind));
    let at = at_most(unit, comptime!(all_scales - 1));
    let tile = min(strip + at / comptime!(scales_of(kind)), last_strip) * groups + group;
    fetched.single[0] =
        singles[tile * comptime!(tile_words(kind)) + comptime!(code_words(kind)) + at % comptime!(scales_of(kind))];
    #[unroll]
    for i in 0..comptime!(each(4 * panel_tokens(kind))) {
        let at = unit + comptime!(i * UNITS);
        fetched.codes[i] = codes[(min(token + at / 4, last_token) * groups + group) * 4 + at % 4];
    }
    let at = at_most(unit, comptime!(2 * panel_tokens(kind) - 1));
    fetched.scales[0] = scales[(min(token + at / 2, last_token) * groups + group) * 2 + at % 2];
}

#[cube]
fn store(fetched: &Fetched, staged: &mut Staged, copy: usize, unit: usize, #[comptime] kind: QuantType) {
    let (all_pairs, all_scales) = comptime!((CUBE_STRIPS * pairs_of(kind), CUBE_STRIPS * scales_of(kind)));
    let tokens = comptime!(panel_tokens(kind));
    #[unroll]
    for i in 0..comptime!(each(all_pairs)) {
        let at = unit + comptime!(i * UNITS);
        if comptime!((i + 1) * UNITS <= all_pairs) || at < all_pairs {
            staged.pairs[copy * all_pairs + at] = fetched.pairs[i];
        }
    }
    if unit < all_scales {
        staged.singles[copy * all_scales + unit] = fetched.single[0];
    }
    #[unroll]
    for i in 0..comptime!(each(4 * tokens)) {
        staged.codes[copy * comptime!(4 * tokens) + unit + comptime!(i * UNITS)] = fetched.codes[i];
    }
    if unit < comptime!(2 * tokens) {
        staged.scales[copy * comptime!(2 * tokens) + unit % 2 * tokens + unit / 2] = fetched.scales[0];
    }
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
    let (across, tokens) = comptime!((eights(kind), panel_tokens(kind)));
    let (plane, groups, count) = (UNIT_POS_Y as usize, groups as usize, count as usize);
    let (g, t, unit) = (lane / 4, lane % 4, plane * 32 + lane);
    let (first_strip, first_token) = (CUBE_POS_Y as usize * CUBE_STRIPS, CUBE_POS_X as usize * tokens);
    let (strip, token) = (plane / 4 * PANEL_STRIPS, plane % 4 * comptime!(8 * across));
    let last_strip = strips as usize - 1;
    let elements = comptime!(PANEL_STRIPS * across * 4);
    let mut sums = Array::<f32>::new(elements);
    let mut totals = Array::<f32>::new(elements);
    #[unroll]
    for i in 0..elements {
        sums[i] = 0.0f32;
        totals[i] = 0.0f32;
    }
    let mut staged = Staged {
        pairs: SharedMemory::<Vector<u32, Const<2>>>::new(comptime!(2 * CUBE_STRIPS * pairs_of(kind))),
        singles: SharedMemory::<u32>::new(comptime!(2 * CUBE_STRIPS * scales_of(kind))),
        codes: SharedMemory::<Vector<u32, Const<4>>>::new(comptime!(2 * 4 * tokens)),
        scales: SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(2 * 2 * tokens)),
    };
    let mut fetched = Fetched {
        pairs: Array::<Vector<u32, Const<2>>>::new(comptime!(each(CUBE_STRIPS * pairs_of(kind)))),
        single: Array::<u32>::new(1usize),
        codes: Array::<Vector<u32, Const<4>>>::new(comptime!(each(4 * tokens))),
        scales: Array::<Vector<f32, Const<4>>>::new(1usize),
    };
    let last_token = count - 1;
    fetch(
        &mut fetched,
        pairs,
        singles,
        codes,
        scales,
        first_strip,
        last_strip,
        first_token,
        last_token,
        groups,
        0usize,
        unit,
        kind,
    );
    store(&fetched, &mut staged, 0usize, unit, kind);
    sync_cube();
    let active = first_token + token < count && first_strip + strip <= last_strip;
    let mut raw = Array::<Vector<u32, Const<2>>>::new(comptime!(PANEL_STRIPS * lane_vectors(kind)));
    let mut raw_scales = Array::<u32>::new(comptime!(PANEL_STRIPS * lane_scales(kind)));
    let mut x_scales = Array::<Vector<f32, Const<4>>>::new(4usize);
    for chunk in 0..CHUNKS {
        let (from, to) = chunk_range(groups, chunk);
        for group in from..to {
            let copy = group % 2;
            // Behind the last group it is read once more.
            let next = select(group + 1 < groups, group + 1, group);
            fetch(
                &mut fetched,
                pairs,
                singles,
                codes,
                scales,
                first_strip,
                last_strip,
                first_token,
                last_token,
                groups,
                next,
                unit,
                kind,
            );
            if active {
                #[unroll]
                for i in 0..PANEL_STRIPS {
                    let at = copy * CUBE_STRIPS + strip + i;
                    let tile = LaneTile::apart(at * comptime!(pairs_of(kind)), at * comptime!(scales_of(kind)), lane);
                    read_lane::<Words, SharedMemory<u32>>(
                        &staged.pairs,
                        &staged.singles,
                        tile,
                        &mut raw,
                        &mut raw_scales,
                        i,
                        kind,
                    );
                }
                #[unroll]
                for n in 0..across {
                    let eight = token + comptime!(8 * n);
                    let x = staged.codes[(copy * tokens + eight + g) * 4 + t];
                    #[unroll]
                    for block in 0..2usize {
                        let at = (copy * 2 + block) * tokens + eight + 2 * t;
                        x_scales[comptime!(2 * block)] = staged.scales[at];
                        x_scales[comptime!(2 * block + 1)] = staged.scales[at + 1];
                    }
                    #[unroll]
                    for i in 0..PANEL_STRIPS {
                        let at = comptime!((i * across + n) * 4);
                        multiply(&raw, &raw_scales, x, &x_scales, nibbles, lane, &mut sums, i, at, false, kind, able);
                    }
                }
            }
            // All units were done with the other copy before they met last.
            store(&fetched, &mut staged, 1 - copy, unit, kind);
            sync_cube();
        }
        #[unroll]
        for i in 0..elements {
            totals[i] += sums[i];
            sums[i] = 0.0f32;
        }
    }
    if active {
        #[unroll]
        for i in 0..PANEL_STRIPS {
            #[unroll]
            for n in 0..across {
                #[unroll]
                for element in 0..4usize {
                    let row = (first_strip + strip + i) * comptime!(ROWS) + 2 * g + comptime!(element / 2);
                    let to = first_token + token + comptime!(8 * n) + 2 * t + comptime!(element % 2);
                    if to < count && row < width as usize {
                        let at = to * stride as usize + offset as usize + row;
                        finish_element(y, at, totals[comptime!((i * across + n) * 4 + element)], bias, row, finish);
                    }
                }
            }
        }
    }
}
