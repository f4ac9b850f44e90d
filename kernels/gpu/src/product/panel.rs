//! Products of many activation rows (tokens) on matrix instructions: a cube computes 128 matrix rows for up to 64 tokens, a plane
//! 32 rows for up to 32.
//!
//! Planes share the tiles and activations of a group of columns in shared memory. While one group is multiplied, the next two are
//! copied asynchronously. Of a small product several cubes compute different chunks, which are then added in order. Of a product with
//! the matrices of experts, a cube computes one block of rows of one expert (`groups.rs`).
use cubecl::prelude::*;
use kernels::order::CHUNKS;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use super::groups::BLOCK_WORDS;
use super::matrices::multiply;
use super::operands::{Finish, finish_element};
use crate::arithmetic::Features;
use crate::inline::{begin_copy, end_group, wait_groups};
use crate::tiles::{LaneTile, code_words, lane_scales, lane_vectors, read_lane, scale_words, tile_words};

/// Pairs of words in shared memory.
type Words = SharedMemory<Vector<u32, Const<2>>>;

/// Tokens per cube.
pub(super) const fn panel_tokens(kind: QuantType) -> usize {
    TOKEN_PLANES * 8 * eights(kind)
}

/// Matrix rows per cube.
pub(super) const PANEL_ROWS: usize = 128;
/// Tile rows (16 matrix rows) per cube.
const CUBE_STRIPS: usize = PANEL_ROWS / ROWS;
/// Tile rows per plane.
const PANEL_STRIPS: usize = 2;
/// Planes that share the same tile rows and compute different tokens.
const TOKEN_PLANES: usize = PLANES * PANEL_STRIPS / CUBE_STRIPS;
/// Planes per cube.
const PLANES: usize = 8;
/// Units per cube.
const UNITS: usize = 32 * PLANES;
/// Tokens per plane, in units of eight: fewer for formats whose tiles take more registers.
const fn eights(kind: QuantType) -> usize {
    if matches!(Layout::of(kind).scales, Scales::Sixteens) { 2 } else { 4 }
}

/// Maximum matrix rows of a product whose chunks are divided among cubes. Larger ones have enough cubes without that.
const PARTED_ROWS_MAX: usize = 8192;
/// Maximum tokens of such a product: those of one cube.
const PARTED_TOKENS_MAX: usize = 64;
/// Words of scratch for the chunk sums of such a product: `[chunk, token, matrix row]`.
pub(crate) const PARTS_WORDS: usize = CHUNKS * PARTED_TOKENS_MAX * PARTED_ROWS_MAX;
/// Cubes that fill a device with two each on 96 multiprocessors.
const CUBES_WANTED: usize = 192;

/// Cubes among which the chunks of a product are divided: more than one if there are too few tokens and rows to fill the device.
pub(super) const fn parts(rows: usize, count: usize, kind: QuantType) -> usize {
    if rows > PARTED_ROWS_MAX || count > PARTED_TOKENS_MAX {
        return 1;
    }
    let cubes = count.div_ceil(panel_tokens(kind)) * rows.div_ceil(PANEL_ROWS);
    let mut parts = 1;
    while parts < CHUNKS && cubes * parts < CUBES_WANTED {
        parts *= 2;
    }
    parts
}

/// Groups of columns in shared memory, including those being copied.
const STAGES: usize = 3;

/// Tiles and activations in shared memory.
#[derive(CubeType)]
struct Staged {
    /// Tile codes, `[stage, tile row, pairs]`.
    pairs: SharedMemory<Vector<u32, Const<2>>>,
    /// Tile scales, `[stage, tile row, words]`.
    singles: SharedMemory<u32>,
    /// Activation codes, `[stage, token, 4]`.
    codes: SharedMemory<Vector<u32, Const<4>>>,
    /// Activation scales, `[stage, block, token]`, so that lanes read adjacent elements.
    scales: SharedMemory<Vector<f32, Const<4>>>,
}

/// Indices of the 16-byte pieces of the first group that a unit copies. 32 bits suffice: the matrix and the activations each have
/// fewer than 2³² words.
#[derive(CubeType)]
struct Sources {
    pair: u32,
    single: u32,
    code: u32,
    scale: u32,
}

/// Index of piece `piece` of the codes of all tile rows.
#[cube]
fn pair_source(piece: u32, first_strip: u32, last_strip: u32, groups: u32, #[comptime] kind: QuantType) -> u32 {
    let each = comptime!(code_words(kind) as u32 / 4);
    let strip = min(first_strip + piece / each, last_strip);
    strip * groups * comptime!(tile_words(kind) as u32 / 2) + piece % each * 2
}

/// Pieces (16 bytes) of the codes of all tile rows in one group.
const fn code_pieces(kind: QuantType) -> usize {
    CUBE_STRIPS * code_words(kind) / 4
}

/// The chunks of this cube: all of them, or a part.
#[cube]
fn chunks(#[comptime] parted: bool) -> (u32, u32) {
    if comptime!(parted) {
        let each = comptime!(CHUNKS as u32) / CUBE_COUNT_Z;
        (CUBE_POS_Z * each, (CUBE_POS_Z + 1) * each)
    } else {
        (0u32.runtime(), comptime!(CHUNKS as u32).runtime())
    }
}

/// Units of [`gather_kernel`] per cube.
pub(super) const GATHERERS: usize = 256;

/// Adds the chunk sums of a parted product in order.
#[cube(launch_unchecked)]
pub(super) fn gather_kernel(
    parts: &Array<f32>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] finish: Finish,
) {
    let (row, token) = (ABSOLUTE_POS_X as usize, CUBE_POS_Y as usize);
    if row >= width as usize {
        terminate!();
    }
    let mut total = 0.0f32;
    #[unroll]
    for chunk in 0..CHUNKS {
        total += parts[(chunk * count as usize + token) * width as usize + row];
    }
    finish_element(y, token * stride as usize + offset as usize + row, total, bias, row, finish);
}

/// Which products a cube computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Share {
    /// All chunks of a matrix.
    Whole,
    /// Some chunks of a matrix.
    Chunks,
    /// All chunks of an expert's matrix, for a block of pairs.
    Expert,
}

/// Writes the elements of a unit, whose first matrix row is `first_row` and first token `first_token`. Token 0 is row `base` of `y`.
#[cube]
fn write_elements(
    totals: &SharedMemory<f32>,
    bias: &Array<f32>,
    first_bias: usize,
    order: &Array<u32>,
    y: &mut Array<f32>,
    unit: usize,
    first_row: usize,
    first_token: usize,
    base: usize,
    count: usize,
    stride: usize,
    offset: usize,
    width: usize,
    #[comptime] across: usize,
    #[comptime] share: Share,
    #[comptime] finish: Finish,
) {
    // Not unrolled: the addresses of all elements would take too many registers.
    for tile in 0..comptime!((PANEL_STRIPS * across) as u32) {
        let tile = tile as usize;
        #[unroll]
        for element in 0..4usize {
            let row = first_row + tile / across * comptime!(ROWS) + comptime!(element / 2);
            let token = first_token + tile % across * 8 + comptime!(element % 2);
            if token < count && row < width {
                let total = totals[(4 * tile + element) * comptime!(UNITS) + unit];
                let mut out = base + token;
                if comptime!(share == Share::Expert) {
                    out = order[token] as usize;
                }
                finish_element(y, out * stride + offset + row, total, bias, first_bias + row, finish);
            }
        }
    }
}

#[cube]
fn begin_group(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    sources: &Sources,
    staged: &Staged,
    group: u32,
    stage: usize,
    unit: usize,
    first_strip: u32,
    last_strip: u32,
    groups: u32,
    tokens_here: u32,
    #[comptime] kind: QuantType,
) {
    let (tokens, pieces) = comptime!((panel_tokens(kind), code_pieces(kind)));
    #[unroll]
    for i in 0..comptime!(pieces.div_ceil(UNITS)) {
        if comptime!((i + 1) * UNITS <= pieces) || unit < comptime!(pieces - i * UNITS) {
            // Further indices are recomputed each time, because keeping them would take registers.
            let mut from = sources.pair;
            if comptime!(i > 0) {
                let piece = unit as u32 + comptime!((i * UNITS) as u32);
                from = pair_source(piece, first_strip, last_strip, groups, kind);
            }
            begin_copy::<Vector<u32, Const<2>>>(
                pairs,
                (from + group * comptime!(tile_words(kind) as u32 / 2)) as usize,
                &staged.pairs,
                stage * comptime!(2 * pieces) + 2 * unit + comptime!(2 * i * UNITS),
            );
        }
    }
    if unit < comptime!(CUBE_STRIPS * scale_words(kind) / 4) {
        begin_copy::<u32>(
            singles,
            (sources.single + group * comptime!(tile_words(kind) as u32)) as usize,
            &staged.singles,
            stage * comptime!(CUBE_STRIPS * scale_words(kind)) + 4 * unit,
        );
    }
    if (unit as u32) < 4 * tokens_here {
        begin_copy::<Vector<u32, Const<4>>>(
            codes,
            (sources.code + 4 * group) as usize,
            &staged.codes,
            stage * comptime!(4 * tokens) + unit,
        );
    }
    if (unit as u32) < 2 * tokens_here {
        begin_copy::<Vector<f32, Const<4>>>(
            scales,
            (sources.scale + 2 * group) as usize,
            &staged.scales,
            stage * comptime!(2 * tokens) + unit % 2 * tokens + unit / 2,
        );
    }
}

/// The activation row of a token; of an expert's block, that of the pair at this place, or of the last pair.
#[cube]
fn row_of(order: &Array<u32>, token: usize, count: usize, each: u32, #[comptime] share: Share) -> usize {
    if comptime!(share == Share::Expert) { (order[min(token, count - 1)] / each) as usize } else { token }
}

#[cube(launch_unchecked, address_type = "u64")]
pub(super) fn panel_kernel(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    bias: &Array<f32>,
    order: &Array<u32>,
    blocks: &Array<u32>,
    y: &mut Array<f32>,
    nibbles: u32,
    groups: u32,
    strips: u32,
    first: u32,
    all_strips: u32,
    each: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] share: Share,
    #[comptime] kind: QuantType,
    #[comptime] finish: Finish,
    #[comptime] able: Features,
) {
    let lane = UNIT_POS_X as usize;
    let (across, tokens, parted) = comptime!((eights(kind), panel_tokens(kind), share == Share::Chunks));
    let (plane, groups) = (UNIT_POS_Y as usize, groups as usize);
    let (g, t, unit) = (lane / 4, lane % 4, plane * 32 + lane);
    // Tokens `first_token .. count` of the tile rows `begin ..`.
    let mut begin = 0usize.runtime();
    let mut first_token = CUBE_POS_X as usize * tokens;
    let mut count = count as usize;
    let mut offset = offset as usize;
    let mut first_bias = 0usize.runtime();
    if comptime!(share == Share::Expert) {
        let block = CUBE_POS_X as usize * comptime!(BLOCK_WORDS);
        if blocks[block + 2] == 0u32 {
            terminate!();
        }
        let from = CUBE_POS_Z * all_strips + blocks[block] * strips;
        begin = (first + from) as usize;
        first_bias = from as usize * comptime!(ROWS);
        first_token = blocks[block + 1] as usize;
        count = first_token + blocks[block + 2] as usize;
        offset += (CUBE_POS_Z * strips) as usize * comptime!(ROWS);
    }
    let first_row = CUBE_POS_Y as usize * CUBE_STRIPS * comptime!(ROWS);
    let first_strip = begin + CUBE_POS_Y as usize * CUBE_STRIPS;
    let (strip, token) = (plane / TOKEN_PLANES * PANEL_STRIPS, plane % TOKEN_PLANES * comptime!(8 * across));
    let last_strip = begin + strips as usize - 1;
    let elements = comptime!(PANEL_STRIPS * across * 4);
    let mut sums = Array::<f32>::new(elements);
    // Sums of the finished chunks, `[element, unit]`, in shared memory: in registers they would halve the number of resident cubes.
    let mut totals = SharedMemory::<f32>::new(comptime!(elements * UNITS));
    #[unroll]
    for i in 0..elements {
        sums[i] = 0.0f32;
        totals[comptime!(i * UNITS) + unit] = 0.0f32;
    }
    let staged = Staged {
        pairs: SharedMemory::<Vector<u32, Const<2>>>::new_aligned(
            comptime!(STAGES * CUBE_STRIPS * code_words(kind) / 2),
            16usize,
        ),
        singles: SharedMemory::<u32>::new_aligned(comptime!(STAGES * CUBE_STRIPS * scale_words(kind)), 16usize),
        codes: SharedMemory::<Vector<u32, Const<4>>>::new(comptime!(STAGES * 4 * tokens)),
        scales: SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(STAGES * 2 * tokens)),
    };
    // In place of tile rows past the last one, units read the last one. Tokens past the last one are not copied: their sums are not used.
    let tokens_here = min(u32::cast_from(count - first_token), comptime!(tokens as u32));
    let in_scales = comptime!(scale_words(kind) / 4);
    let tile = min(first_strip + unit / in_scales, last_strip) * groups;
    let sources = Sources {
        pair: pair_source(unit as u32, first_strip as u32, last_strip as u32, groups as u32, kind),
        single: u32::cast_from(tile * comptime!(tile_words(kind)) + comptime!(code_words(kind)) + unit % in_scales * 4),
        code: u32::cast_from(row_of(order, first_token + unit / 4, count, each, share) * groups * 4 + unit % 4),
        scale: u32::cast_from(row_of(order, first_token + unit / 2, count, each, share) * groups * 2 + unit % 2),
    };
    let (first_chunk, last_chunk) = chunks(parted);
    let groups = groups as u32;
    let mut group = first_chunk * groups / comptime!(CHUNKS as u32);
    let end = last_chunk * groups / comptime!(CHUNKS as u32);
    #[unroll]
    for i in 0..comptime!(STAGES - 1) {
        let first = group + comptime!(i as u32);
        if first < end {
            begin_group(
                pairs,
                singles,
                codes,
                scales,
                &sources,
                &staged,
                first,
                i,
                unit,
                first_strip as u32,
                last_strip as u32,
                groups,
                tokens_here,
                kind,
            );
        }
        end_group();
    }
    let active = first_token + token < count && first_strip + strip <= last_strip;
    let mut raw = Array::<Vector<u32, Const<2>>>::new(comptime!(PANEL_STRIPS * lane_vectors(kind)));
    let mut raw_scales = Array::<u32>::new(comptime!(PANEL_STRIPS * lane_scales(kind)));
    let mut stage = 0u32;
    for chunk in first_chunk..last_chunk {
        let to = (chunk + 1) * groups / comptime!(CHUNKS as u32);
        while group < to {
            // After this, the group's copies by all units are visible, and all units have finished the previous group.
            wait_groups(comptime!(STAGES - 2));
            sync_cube();
            let next = group + comptime!(STAGES as u32 - 1);
            if next < end {
                let to = select(stage == 0, comptime!(STAGES as u32 - 1), stage - 1) as usize;
                begin_group(
                    pairs,
                    singles,
                    codes,
                    scales,
                    &sources,
                    &staged,
                    next,
                    to,
                    unit,
                    first_strip as u32,
                    last_strip as u32,
                    groups,
                    tokens_here,
                    kind,
                );
            }
            end_group();
            if active {
                #[unroll]
                for i in 0..PANEL_STRIPS {
                    let at = (stage * comptime!(CUBE_STRIPS as u32) + strip as u32) as usize + i;
                    let tile =
                        LaneTile::new(at * comptime!(code_words(kind) / 2), at * comptime!(scale_words(kind)), lane);
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
                // One block at a time: the fragments of both would take too many registers.
                #[unroll]
                for block in 0..2usize {
                    #[unroll]
                    for n in 0..across {
                        let eight = token as u32 + comptime!(8 * n as u32);
                        let row = stage * comptime!(tokens as u32) + eight + g as u32;
                        let x = staged.codes[(row * 4 + t as u32) as usize];
                        let at = (stage * 2 + comptime!(block as u32)) * comptime!(tokens as u32) + eight;
                        let at = (at + 2 * t as u32) as usize;
                        let (left, right) = (staged.scales[at], staged.scales[at + 1]);
                        #[unroll]
                        for i in 0..PANEL_STRIPS {
                            let at = comptime!((i * across + n) * 4);
                            multiply(
                                &raw,
                                &raw_scales,
                                x,
                                left,
                                right,
                                nibbles,
                                lane,
                                &mut sums,
                                i,
                                at,
                                block,
                                false,
                                kind,
                                able,
                            );
                        }
                    }
                }
            }
            stage = select(stage == comptime!(STAGES as u32 - 1), 0u32, stage + 1);
            group += 1u32;
        }
        #[unroll]
        for i in 0..elements {
            let at = comptime!(i * UNITS) + unit;
            if comptime!(parted) {
                totals[at] = sums[i];
            } else {
                totals[at] = totals[at] + sums[i];
            }
            sums[i] = 0.0f32;
        }
        if active && (comptime!(parted) || chunk + 1 == last_chunk) {
            let mut base = 0usize.runtime();
            if comptime!(parted) {
                base = chunk as usize * count;
            }
            write_elements(
                &totals,
                bias,
                first_bias,
                order,
                y,
                unit,
                first_row + strip * comptime!(ROWS) + 2 * g,
                first_token + token + 2 * t,
                base,
                count,
                stride as usize,
                offset,
                width as usize,
                across,
                share,
                finish,
            );
        }
    }
}
