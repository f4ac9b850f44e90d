//! Products of up to eight activation rows on matrix instructions: a plane computes one chunk of a tile row (16 matrix rows).
//!
//! Tiles and activations reach a plane through a ring buffer in shared memory, filled by asynchronous copies.
use cubecl::prelude::*;
use kernels::order::CHUNKS;
use kernels::quant::QuantType;
use kernels::tile::ROWS;

use super::matrices::multiply;
use super::operands::{Finish, finish_element};
use crate::arithmetic::{Features, chunk_range};
use crate::inline::{await_previous, begin_copy, end_group, release_next, wait_groups};
use crate::tiles::{LaneTile, code_words, lane_scales, lane_vectors, read_lane, scale_words, tile_words};

/// Activation rows per pass over the weights with matrix instructions.
pub(super) const FEW: usize = 8;
/// Maximum bytes of a plane's ring with more than three stages.
const RING_BYTES: usize = 7 << 10;
/// Maximum bytes of a plane's ring: eight rings and the sums of a cube fit into the shared memory of every card.
const RING_BYTES_MAX: usize = 10 << 10;

/// Work of a plane per stage of its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) kind: QuantType,
    /// Tile rows (16 matrix rows) per cube.
    pub(super) each: usize,
    /// The second half of the tile rows is not adjacent to the first half.
    pub(super) halves: bool,
    /// One activation row instead of up to [`FEW`].
    pub(super) one: bool,
}

impl Shape {
    /// Capacity in activation rows.
    pub(super) const fn columns(self) -> usize {
        if self.one { 1 } else { FEW }
    }

    /// Groups of columns per stage. A plane with only one tile row and one activation row takes two, to stay busy.
    const fn groups(self) -> usize {
        if self.one && self.each == 1 { 2 } else { 1 }
    }

    /// Tiles per stage.
    const fn tiles(self) -> usize {
        self.each * self.groups()
    }

    /// Activation codes per stage, in vectors of 16 bytes.
    const fn codes(self) -> usize {
        4 * self.columns() * self.groups()
    }

    /// Activation scales per stage, in vectors of 16 bytes.
    const fn scales(self) -> usize {
        2 * self.columns() * self.groups()
    }

    /// Stages of the ring.
    const fn stages(self) -> usize {
        let stage = self.tiles() * 4 * tile_words(self.kind) + 16 * (self.codes() + self.scales());
        match RING_BYTES / stage {
            0..=3 if 3 * stage <= RING_BYTES_MAX => 3,
            0..=3 => 2,
            fit @ 4..=7 => fit,
            _ => 8,
        }
    }
}

/// Ring buffers in shared memory, one per plane.
#[derive(CubeType)]
struct Ring {
    /// Tile codes, `[plane, stage, tile row, group]`.
    pairs: SharedMemory<Vector<u32, Const<2>>>,
    /// Tile scales, in the same order.
    singles: SharedMemory<u32>,
    /// Activation codes, `[plane, stage, row, group, 4]`.
    codes: SharedMemory<Vector<u32, Const<4>>>,
    /// Activation scales, `[plane, stage, row, group, block]`.
    scales: SharedMemory<Vector<f32, Const<4>>>,
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
    #[comptime] shape: Shape,
    #[comptime] finish: Finish,
    #[comptime] able: Features,
) {
    let (each, columns) = comptime!((shape.each, shape.columns()));
    let (lane, chunk) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (groups, strip) = (groups as usize, CUBE_POS_X as usize * each);
    let mut sums = Array::<f32>::new(comptime!(4 * each));
    #[unroll]
    for i in 0..comptime!(4 * each) {
        sums[i] = 0.0f32;
    }
    strip_sums(
        pairs,
        singles,
        codes,
        scales,
        nibbles,
        strip,
        strips as usize - 1,
        0u32,
        chunk,
        groups,
        first,
        count,
        lane,
        &mut sums,
        shape,
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

/// Writes a lane's sums of tile row `s` to `shared` as tile row `at` of `each`: `[chunk][activation row][tile row][row]`.
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

/// Offset in tiles from a cube's first tile row to its `s`-th. With `halves`, the second half starts `far` tiles after the first.
#[cube]
fn tiles_to(s: u32, apart: u32, far: u32, #[comptime] shape: Shape) -> u32 {
    let half = comptime!(shape.each as u32 / 2);
    if comptime!(shape.halves) { s % half * apart + s / half * far } else { s * apart }
}

/// Starts to copy a stage's tiles to stage `to`, counted over the rings of all planes. `tile`: the first tile in the first tile row;
/// `left`: groups from there to the end of the chunk. Indices are 32-bit because a matrix has fewer than 2³² words.
#[cube]
fn begin_tiles(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    ring: &Ring,
    to: usize,
    tile: u32,
    left: u32,
    apart: u32,
    far: u32,
    #[comptime] shape: Shape,
) {
    let (kind, lane) = (comptime!(shape.kind), UNIT_POS_X);
    // A piece is 16 bytes: two pairs, or four words.
    let (codes, scales) = comptime!((code_words(kind) / 4, scale_words(kind) / 4));
    #[unroll]
    for s in 0..comptime!(shape.each) {
        #[unroll]
        for i in 0..comptime!(shape.groups()) {
            let from = tile + comptime!(i as u32) + tiles_to(comptime!(s as u32), apart, far, shape);
            let at = (to * comptime!(shape.tiles()) + comptime!(s * shape.groups() + i)) * comptime!(2 * codes);
            if comptime!(i == 0) || comptime!(i as u32) < left {
                #[unroll]
                for piece in 0..comptime!(codes.div_ceil(32)) {
                    if comptime!(32 * (piece + 1) <= codes) || lane < comptime!((codes - 32 * piece) as u32) {
                        let in_tile = 2 * lane + comptime!(64 * piece as u32);
                        begin_copy::<Vector<u32, Const<2>>>(
                            pairs,
                            (from * comptime!(tile_words(kind) as u32 / 2) + in_tile) as usize,
                            &ring.pairs,
                            at + in_tile as usize,
                        );
                    }
                }
            }
        }
    }
    // A lane copies four scale words of one tile.
    let (of, piece) = (lane / comptime!(scales as u32), lane % comptime!(scales as u32));
    let (s, i) = (of / comptime!(shape.groups() as u32), of % comptime!(shape.groups() as u32));
    if of < comptime!(shape.tiles() as u32) && i < left {
        let from = tile + i + tiles_to(s, apart, far, shape);
        begin_copy::<u32>(
            singles,
            (from * comptime!(tile_words(kind) as u32) + comptime!(code_words(kind) as u32) + 4 * piece) as usize,
            &ring.singles,
            to * comptime!(shape.tiles() * scale_words(kind)) + 4 * lane as usize,
        );
    }
}

/// Starts to copy the activations of a stage, whose first group is `group`.
#[cube]
fn begin_activations(
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    ring: &Ring,
    to: usize,
    group: u32,
    left: u32,
    groups: u32,
    first: u32,
    last: u32,
    #[comptime] shape: Shape,
) {
    let lane = UNIT_POS_X;
    // Rows past the last one read the last, and their sums are not written.
    let (in_codes, in_scales) = comptime!((4 * shape.groups() as u32, 2 * shape.groups() as u32));
    let (row, within) = (min(lane / in_codes, last), lane % in_codes);
    if lane < comptime!(shape.codes() as u32) && within / 4 < left {
        begin_copy::<Vector<u32, Const<4>>>(
            codes,
            (((first + row) * groups + group) * 4 + within) as usize,
            &ring.codes,
            to * comptime!(shape.codes()) + lane as usize,
        );
    }
    let (row, within) = (min(lane / in_scales, last), lane % in_scales);
    if lane < comptime!(shape.scales() as u32) && within / 2 < left {
        begin_copy::<Vector<f32, Const<4>>>(
            scales,
            (((first + row) * groups + group) * 2 + within) as usize,
            &ring.scales,
            to * comptime!(shape.scales()) + lane as usize,
        );
    }
}

/// Computes one chunk of a cube's tile rows with one plane. The lane's sums are `[tile row][row][activation row]`.
#[cube]
pub(super) fn strip_sums(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    nibbles: u32,
    strip: usize,
    last_strip: usize,
    far: u32,
    chunk: usize,
    groups: usize,
    first: u32,
    count: u32,
    lane: usize,
    sums: &mut Array<f32>,
    #[comptime] shape: Shape,
    #[comptime] able: Features,
) {
    release_next(able);
    let (kind, depth) = comptime!((shape.kind, shape.stages()));
    let step_groups = comptime!(shape.groups() as u32);
    let (g, t) = (lane / 4, lane % 4);
    let (from, to) = chunk_range(groups, chunk);
    // Tiles between consecutive tile rows; 0 if there is no next one, whose sums are then not used.
    let apart = u32::cast_from(select(strip < last_strip, groups, 0usize));
    let ring = Ring {
        pairs: SharedMemory::<Vector<u32, Const<2>>>::new_aligned(
            comptime!(CHUNKS * depth * shape.tiles() * code_words(kind) / 2),
            16usize,
        ),
        singles: SharedMemory::<u32>::new_aligned(
            comptime!(CHUNKS * depth * shape.tiles() * scale_words(kind)),
            16usize,
        ),
        codes: SharedMemory::<Vector<u32, Const<4>>>::new(comptime!(CHUNKS * depth * shape.codes())),
        scales: SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(CHUNKS * depth * shape.scales())),
    };
    let ring_at = chunk * depth;
    let (all_groups, from, end) = (groups as u32, from as u32, to as u32);
    let first_tile = u32::cast_from(strip) * all_groups;
    #[unroll]
    for i in 0..comptime!(depth - 1) {
        let group = from + comptime!((i * shape.groups()) as u32);
        if group < end {
            begin_tiles(pairs, singles, &ring, ring_at + i, first_tile + group, end - group, apart, far, shape);
        }
    }
    // The weight copies above overlap the end of the preceding kernel. They are part of the first stage's copy group.
    await_previous(able);
    let last = count - 1;
    #[unroll]
    for i in 0..comptime!(depth - 1) {
        let group = from + comptime!((i * shape.groups()) as u32);
        if group < end {
            begin_activations(codes, scales, &ring, ring_at + i, group, end - group, all_groups, first, last, shape);
        }
        end_group();
    }
    let mut raw = Array::<Vector<u32, Const<2>>>::new(comptime!(lane_vectors(kind)));
    let mut raw_scales = Array::<u32>::new(comptime!(lane_scales(kind)));
    let mut x_scales = Array::<Vector<f32, Const<4>>>::new(4usize); // `[block][left, right column]`
    let (mut stage, mut group) = (0u32, from);
    while group < end {
        // After this, the lanes of a plane see each other's copies, and all have finished the previous stage.
        wait_groups(comptime!(depth - 2));
        sync_plane();
        let next = group + comptime!(((depth - 1) * shape.groups()) as u32);
        if next < end {
            let to = ring_at + select(stage == 0, comptime!(depth as u32 - 1), stage - 1) as usize;
            begin_tiles(pairs, singles, &ring, to, first_tile + next, end - next, apart, far, shape);
            begin_activations(codes, scales, &ring, to, next, end - next, all_groups, first, last, shape);
        }
        end_group();
        let at = ring_at + stage as usize;
        #[unroll]
        for i in 0..comptime!(shape.groups()) {
            if comptime!(i == 0) || group + comptime!(i as u32) < end {
                // With one activation row, all lanes read that row.
                let many = comptime!(usize::from(!shape.one));
                let (row, left, right) = (g * many, 2 * t * many, (2 * t + 1) * many);
                #[unroll]
                for block in 0..2usize {
                    let x = at * comptime!(shape.scales()) + comptime!(2 * i + block);
                    x_scales[comptime!(2 * block)] = ring.scales[x + left * comptime!(2 * shape.groups())];
                    x_scales[comptime!(2 * block + 1)] = ring.scales[x + right * comptime!(2 * shape.groups())];
                }
                let x = ring.codes
                    [at * comptime!(shape.codes()) + row * comptime!(4 * shape.groups()) + comptime!(4 * i) + t];
                #[unroll]
                for s in 0..comptime!(shape.each) {
                    let tile = at * comptime!(shape.tiles()) + comptime!(s * shape.groups() + i);
                    let tile = LaneTile::new(
                        tile * comptime!(code_words(kind) / 2),
                        tile * comptime!(scale_words(kind)),
                        lane,
                    );
                    read_lane::<SharedMemory<Vector<u32, Const<2>>>, SharedMemory<u32>>(
                        &ring.pairs,
                        &ring.singles,
                        tile,
                        &mut raw,
                        &mut raw_scales,
                        0usize,
                        kind,
                    );
                    let (to, one) = comptime!((4 * s, shape.one));
                    #[unroll]
                    for block in 0..2usize {
                        let (left, right) = (x_scales[comptime!(2 * block)], x_scales[comptime!(2 * block + 1)]);
                        multiply(
                            &raw,
                            &raw_scales,
                            x,
                            left,
                            right,
                            nibbles,
                            lane,
                            sums,
                            0usize,
                            to,
                            block,
                            one,
                            kind,
                            able,
                        );
                    }
                }
            }
        }
        stage = select(stage == comptime!(depth as u32 - 1), 0u32, stage + 1);
        group += step_groups;
    }
}
