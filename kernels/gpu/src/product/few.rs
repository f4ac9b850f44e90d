//! Products of up to eight rows on matrix instructions: a plane computes one chunk of a strip of 16 rows of the matrix.
use cubecl::prelude::*;
use kernels::order::CHUNKS;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS};

use super::matrices::multiply;
use super::{FEW, Finish, chunk_range, finish_element};
use crate::arithmetic::Abilities;
use crate::tiles::{LaneTile, lane_scales, lane_vectors, read_lane, tile_words};

/// Pairs of words of tiles.
type Words = Array<Vector<u32, Const<2>>>;

/// Tiles of each strip that a plane has asked for before it uses the first of them: as many as registers hold on all cards.
const fn ahead(kind: QuantType, strips: usize) -> usize {
    let words = 2 * lane_vectors(kind) + lane_scales(kind);
    let tiles = match words {
        ..=6 => 6,
        7..=8 => 5,
        9..=10 if Layout::of(kind).bits < 8 => 4,
        _ => 3,
    };
    if tiles / strips < 2 { 2 } else { tiles / strips }
}

#[cube(launch_unchecked, address_type = "u64")]
pub(super) fn few_kernel(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    nibbles: u32,
    groups: u32,
    strips: u32,
    first: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] kind: QuantType,
    #[comptime] each: usize,
    #[comptime] one: Option<usize>,
    #[comptime] finish: Finish,
    #[comptime] able: Abilities,
) {
    let columns = comptime!(if one.is_some() { 1usize } else { FEW });
    let (lane, chunk) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (groups, strip) = (groups as usize, CUBE_POS_X as usize * each);
    let mut sums = Array::<f32>::new(comptime!(4 * each));
    #[unroll]
    for i in 0..comptime!(4 * each) {
        sums[i] = 0.0f32;
    }
    let last = strips as usize - 1;
    strip_sums(
        pairs,
        singles,
        codes,
        scales,
        nibbles,
        strip,
        last,
        0usize,
        chunk,
        groups,
        first as usize,
        count as usize,
        lane,
        &mut sums,
        each,
        false,
        one,
        kind,
        able,
    );
    let mut shared = SharedMemory::<f32>::new(comptime!(CHUNKS * each * ROWS * columns));
    #[unroll]
    for s in 0..each {
        share_sums(&sums, &mut shared, lane, chunk, s, s, each, columns);
    }
    sync_cube();
    let mut unit = chunk * 32 + lane;
    while unit < comptime!(each * ROWS * columns) {
        let (row, column) = (unit % comptime!(each * ROWS), unit / comptime!(each * ROWS));
        let element = strip * comptime!(ROWS) + row;
        if column < count as usize && element < width as usize {
            let mut total = 0.0f32;
            #[unroll]
            for c in 0..CHUNKS {
                total += shared[(comptime!(c * columns) + column) * comptime!(each * ROWS) + row];
            }
            let at = (first as usize + column) * stride as usize + offset as usize + element;
            finish_element(y, at, total, bias, element, finish);
        }
        unit += comptime!(32 * CHUNKS);
    }
}

/// Puts a lane's sums of its `s`-th strip where all chunks meet, as strip `at` of `each`: `[chunk][column][strip][row]`.
#[cube]
pub(super) fn share_sums(
    sums: &Array<f32>,
    shared: &mut SharedMemory<f32>,
    lane: usize,
    chunk: usize,
    #[comptime] s: usize,
    #[comptime] at: usize,
    #[comptime] each: usize,
    #[comptime] columns: usize,
) {
    let (g, t) = (lane / 4, lane % 4);
    #[unroll]
    for row in 0..2usize {
        let to = comptime!(at * ROWS) + 2 * g + row;
        if comptime!(columns == 1) {
            if t == 0 {
                shared[chunk * comptime!(each * ROWS) + to] = sums[comptime!(4 * s + 2 * row)];
            }
        } else {
            #[unroll]
            for right in 0..2usize {
                let column = chunk * columns + 2 * t + right;
                shared[column * comptime!(each * ROWS) + to] = sums[comptime!(4 * s + 2 * row + right)];
            }
        }
    }
}

/// Tiles from a cube's first strip to its `s`-th.
#[cube]
fn tiles_to(
    #[comptime] s: usize,
    apart: usize,
    far: usize,
    #[comptime] each: usize,
    #[comptime] halves: bool,
) -> usize {
    if comptime!(halves) { comptime!(s % (each / 2)) * apart + comptime!(s / (each / 2)) * far } else { s * apart }
}

/// One chunk of `each` strips, by one plane. Sums are `[strip][row][column]` of the lane. `one`: there is one row of activations,
/// which goes through shared memory; the value is the most groups that a chunk has. `halves`: the second half of the strips lies `far`
/// tiles behind the first.
#[cube]
pub(super) fn strip_sums(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    nibbles: u32,
    strip: usize,
    last_strip: usize,
    far: usize,
    chunk: usize,
    groups: usize,
    first: usize,
    count: usize,
    lane: usize,
    sums: &mut Array<f32>,
    #[comptime] each: usize,
    #[comptime] halves: bool,
    #[comptime] one: Option<usize>,
    #[comptime] kind: QuantType,
    #[comptime] able: Abilities,
) {
    let depth = comptime!(ahead(kind, each));
    let (g, t) = (lane / 4, lane % 4);
    let (from, to) = chunk_range(groups, chunk);
    // Tiles from one strip to the next: none where there is no next one, whose sums nobody wants then.
    let apart = select(strip < last_strip, groups, 0usize);
    let last = count - 1;
    let x = (first + min(g, last)) * groups * 4 + from * 4 + t;
    let left = (first + min(2 * t, last)) * groups * 2 + from * 2;
    let right = (first + min(2 * t + 1, last)) * groups * 2 + from * 2;
    let mut raw = Array::<Vector<u32, Const<2>>>::new(comptime!(depth * each * lane_vectors(kind)));
    let mut raw_scales = Array::<u32>::new(comptime!(depth * each * lane_scales(kind)));
    let mut x_scales = Array::<Vector<f32, Const<4>>>::new(4usize);
    let steps = u32::cast_from(to - from);
    let mut next = LaneTile::new((strip * groups + from) * comptime!(tile_words(kind)), lane, kind);
    #[unroll]
    for i in 0..depth {
        if comptime!(i as u32) < steps {
            #[unroll]
            for s in 0..each {
                let tile = next.after(tiles_to(s, apart, far, each, halves), kind);
                read_lane::<Words, Array<u32>>(
                    pairs,
                    singles,
                    tile,
                    &mut raw,
                    &mut raw_scales,
                    comptime!(i * each + s),
                    kind,
                );
            }
        }
        next.advance(kind);
    }
    let room = comptime!(one.unwrap_or(1));
    let mut one_codes = SharedMemory::<Vector<u32, Const<4>>>::new(comptime!(CHUNKS * room * 4));
    let mut one_scales = SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(CHUNKS * room * 2));
    let mine = chunk * room;
    if comptime!(one.is_some()) {
        let mut i = lane;
        while i < 4 * (to - from) {
            one_codes[4 * mine + i] = codes[(first * groups + from) * 4 + i];
            i += 32;
        }
        let mut i = lane;
        while i < 2 * (to - from) {
            one_scales[2 * mine + i] = scales[left + i];
            i += 32;
        }
        sync_cube();
    }
    let mut step = 0u32;
    while step < steps {
        #[unroll]
        for i in 0..depth {
            if step + comptime!(i as u32) < steps {
                let now = step as usize + i;
                #[unroll]
                for block in 0..2usize {
                    if comptime!(one.is_some()) {
                        x_scales[comptime!(2 * block)] = one_scales[2 * (mine + now) + block];
                        x_scales[comptime!(2 * block + 1)] = x_scales[comptime!(2 * block)];
                    } else {
                        x_scales[comptime!(2 * block)] = scales[left + 2 * now + block];
                        x_scales[comptime!(2 * block + 1)] = scales[right + 2 * now + block];
                    }
                }
                let x_codes =
                    if comptime!(one.is_some()) { one_codes[4 * (mine + now) + t] } else { codes[x + 4 * now] };
                let alone = comptime!(one.is_some());
                #[unroll]
                for s in 0..each {
                    let (at, to) = comptime!((i * each + s, 4 * s));
                    multiply(&raw, &raw_scales, x_codes, &x_scales, nibbles, lane, sums, at, to, alone, kind, able);
                }
                if step + comptime!((i + depth) as u32) < steps {
                    #[unroll]
                    for s in 0..each {
                        let tile = next.after(tiles_to(s, apart, far, each, halves), kind);
                        read_lane::<Words, Array<u32>>(
                            pairs,
                            singles,
                            tile,
                            &mut raw,
                            &mut raw_scales,
                            comptime!(i * each + s),
                            kind,
                        );
                    }
                }
                next.advance(kind);
            }
        }
        step += comptime!(depth as u32);
    }
}
