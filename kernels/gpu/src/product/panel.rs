//! Products of many activation rows (tokens) on matrix instructions: a cube computes 128 matrix rows for up to 64 tokens, a plane
//! 32 rows for up to 32.
//!
//! Planes share the tiles and activations of a group of columns in shared memory. While one group is multiplied, the next two are
//! copied asynchronously. The blocks that would not fill the device are divided: several cubes compute different chunks of one, which
//! are then added in order. Of a product with the matrices of experts, a cube computes one block of rows of one expert (`groups.rs`).
use cubecl::prelude::*;
use kernels::order::CHUNKS;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Scales};

use super::groups::BLOCK_WORDS;
use super::matrices::multiply;
use super::operands::{Finish, finish_element};
use crate::arithmetic::Features;
use crate::inline::{await_previous, begin_copy, end_group, release_next, wait_groups};
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

/// Maximum blocks of a product whose chunks are divided among cubes.
const DIVIDED_MAX: usize = 64;
/// Words of scratch for the chunk sums of such a product: `[block, chunk, token, matrix row]`.
pub(crate) const PARTS_WORDS: usize = DIVIDED_MAX * CHUNKS * TOKEN_PLANES * 32 * PANEL_ROWS;
/// Cubes that run on a multiprocessor at the same time: registers suffice for no more.
const RESIDENT: usize = 2;
/// Multiprocessors of a device that does not say their number.
const PROCESSORS: u32 = 128;

/// How the blocks of a product, of [`PANEL_ROWS`] matrix rows and [`panel_tokens`] tokens each, become cubes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    /// Blocks that one cube computes each.
    pub(super) whole: usize,
    /// Further blocks, whose chunks are divided among `parts` cubes each.
    pub(super) divided: usize,
    /// A divisor of [`CHUNKS`].
    pub(super) parts: usize,
}

impl Division {
    /// A device with `processors` multiprocessors computes whole blocks as long as they fill it, and then the others in parts.
    pub(super) fn of(blocks: usize, processors: Option<u32>) -> Self {
        let cubes = RESIDENT * processors.unwrap_or(PROCESSORS).max(1) as usize;
        let rest = blocks % cubes;
        let mut parts = 1;
        while parts < CHUNKS && rest * parts < cubes * 3 / 4 {
            parts *= 2;
        }
        if parts == 1 || rest == 0 || rest > DIVIDED_MAX {
            Self { whole: blocks, divided: 0, parts: 1 }
        } else {
            Self { whole: blocks - rest, divided: rest, parts }
        }
    }
}

/// Matrix rows of a product of `count` tokens that has both whole and divided blocks, some of them partial.
pub(crate) fn large_rows(kind: QuantType, count: usize, processors: Option<u32>) -> usize {
    let token_blocks = count.div_ceil(panel_tokens(kind));
    let cubes = RESIDENT * processors.unwrap_or(PROCESSORS).max(1) as usize;
    (cubes / token_blocks + 2) * PANEL_ROWS - 40
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

/// Adds the chunk sums of divided blocks in order. A cube adds those of one block and token, a unit one matrix row.
#[cube(launch_unchecked)]
pub(super) fn gather_kernel(
    parts: &Array<f32>,
    bias: &Array<f32>,
    y: &mut Array<f32>,
    whole: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] tokens: usize,
    #[comptime] finish: Finish,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let across = (count as usize).div_ceil(tokens);
    let (unit, token, block) = (UNIT_POS_X as usize, CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let tile = whole as usize + block;
    let (row, out) = (tile / across * comptime!(PANEL_ROWS) + unit, tile % across * tokens + token);
    if row >= width as usize || out >= count as usize {
        terminate!();
    }
    let mut total = 0.0f32;
    #[unroll]
    for chunk in 0..CHUNKS {
        total += parts[((block * comptime!(CHUNKS) + chunk) * tokens + token) * comptime!(PANEL_ROWS) + unit];
    }
    finish_element(y, out * stride as usize + offset as usize + row, total, bias, row, finish);
}

/// Which products a cube computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Share {
    /// All chunks of a block.
    Whole,
    /// All chunks of a block, or some if it is divided.
    Divided,
    /// All chunks of an expert's matrix, for a block of pairs.
    Expert,
}

/// Writes the elements of a unit, whose first matrix row is `first_row` and first token `first_token`.
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
                let mut out = token;
                if comptime!(share == Share::Expert) {
                    out = order[token] as usize;
                }
                finish_element(y, out * stride + offset + row, total, bias, first_bias + row, finish);
            }
        }
    }
}

/// Writes a chunk's sums of a unit to `parts[token, matrix row]` of its block, which begins at `base`.
#[cube]
fn write_chunk(
    totals: &SharedMemory<f32>,
    parts: &mut Array<f32>,
    base: usize,
    unit: usize,
    first_row: usize,
    first_token: usize,
    #[comptime] across: usize,
) {
    for tile in 0..comptime!((PANEL_STRIPS * across) as u32) {
        let tile = tile as usize;
        #[unroll]
        for element in 0..4usize {
            let row = first_row + tile / across * comptime!(ROWS) + comptime!(element / 2);
            let token = first_token + tile % across * 8 + comptime!(element % 2);
            parts[base + token * comptime!(PANEL_ROWS) + row] = totals[(4 * tile + element) * comptime!(UNITS) + unit];
        }
    }
}

/// Starts to copy the tiles of a group.
#[cube]
fn begin_tiles(
    pairs: &Array<Vector<u32, Const<2>>>,
    singles: &Array<u32>,
    sources: &Sources,
    staged: &Staged,
    group: u32,
    stage: usize,
    unit: usize,
    first_strip: u32,
    last_strip: u32,
    groups: u32,
    #[comptime] kind: QuantType,
) {
    let pieces = comptime!(code_pieces(kind));
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
}

/// Starts to copy the activations of a group.
#[cube]
fn begin_activations(
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<f32, Const<4>>>,
    sources: &Sources,
    staged: &Staged,
    group: u32,
    stage: usize,
    unit: usize,
    tokens_here: u32,
    #[comptime] kind: QuantType,
) {
    let tokens = comptime!(panel_tokens(kind));
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
    sums_of_chunks: &mut Array<f32>,
    nibbles: u32,
    groups: u32,
    strips: u32,
    first: u32,
    all_strips: u32,
    each: u32,
    whole: u32,
    parts: u32,
    count: u32,
    stride: u32,
    offset: u32,
    width: u32,
    #[comptime] share: Share,
    #[comptime] kind: QuantType,
    #[comptime] finish: Finish,
    #[comptime] able: Features,
) {
    release_next(able);
    if comptime!(share == Share::Expert) {
        // The preceding kernels choose the weights.
        await_previous(able);
    }
    let lane = UNIT_POS_X as usize;
    let (across, tokens) = comptime!((eights(kind), panel_tokens(kind)));
    let (plane, groups) = (UNIT_POS_Y as usize, groups as usize);
    let (g, t, unit) = (lane / 4, lane % 4, plane * 32 + lane);
    // Tokens `first_token .. count` of the tile rows `begin ..`.
    let mut begin = 0usize.runtime();
    let mut first_token = CUBE_POS_X as usize * tokens;
    let mut panel = CUBE_POS_Y as usize;
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
    let mut divided = false;
    let mut first_chunk = 0u32.runtime();
    let mut last_chunk = comptime!(CHUNKS as u32).runtime();
    // Chunk sums of this block, if it is divided.
    let mut base = 0usize.runtime();
    if comptime!(share == Share::Divided) {
        let mut block = CUBE_POS_X;
        if CUBE_POS_X >= whole {
            let (cube, each) = (CUBE_POS_X - whole, comptime!(CHUNKS as u32) / parts);
            let rest = (CUBE_COUNT_X - whole) / parts;
            divided = true;
            block = whole + cube % rest;
            first_chunk = cube / rest * each;
            last_chunk = first_chunk + each;
            base = (cube % rest) as usize * comptime!(CHUNKS * tokens * PANEL_ROWS);
        }
        let token_blocks = count.div_ceil(tokens);
        first_token = block as usize % token_blocks * tokens;
        panel = block as usize / token_blocks;
    }
    let first_row = panel * CUBE_STRIPS * comptime!(ROWS);
    let first_strip = begin + panel * CUBE_STRIPS;
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
    let groups = groups as u32;
    let mut group = first_chunk * groups / comptime!(CHUNKS as u32);
    let end = last_chunk * groups / comptime!(CHUNKS as u32);
    #[unroll]
    for i in 0..comptime!(STAGES - 1) {
        let first = group + comptime!(i as u32);
        if first < end {
            let (begin, last) = (first_strip as u32, last_strip as u32);
            begin_tiles(pairs, singles, &sources, &staged, first, i, unit, begin, last, groups, kind);
        }
    }
    if comptime!(share != Share::Expert) {
        // The copies of tiles above overlap the end of the preceding kernel. They are part of the first group.
        await_previous(able);
    }
    #[unroll]
    for i in 0..comptime!(STAGES - 1) {
        let first = group + comptime!(i as u32);
        if first < end {
            begin_activations(codes, scales, &sources, &staged, first, i, unit, tokens_here, kind);
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
                let (begin, last) = (first_strip as u32, last_strip as u32);
                begin_tiles(pairs, singles, &sources, &staged, next, to, unit, begin, last, groups, kind);
                begin_activations(codes, scales, &sources, &staged, next, to, unit, tokens_here, kind);
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
            if divided {
                totals[at] = sums[i];
            } else {
                totals[at] = totals[at] + sums[i];
            }
            sums[i] = 0.0f32;
        }
        if active && divided {
            write_chunk(
                &totals,
                sums_of_chunks,
                base + chunk as usize * comptime!(tokens * PANEL_ROWS),
                unit,
                strip * comptime!(ROWS) + 2 * g,
                token + 2 * t,
                across,
            );
        } else if active && chunk + 1 == last_chunk {
            write_elements(
                &totals,
                bias,
                first_bias,
                order,
                y,
                unit,
                first_row + strip * comptime!(ROWS) + 2 * g,
                first_token + token + 2 * t,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_beyond_those_that_fill_the_device_are_divided() {
        let of = |blocks, processors| {
            let Division { whole, divided, parts } = Division::of(blocks, processors);
            (whole, divided, parts)
        };
        // 132 multiprocessors run 264 cubes.
        assert_eq!(of(296, Some(132)), (264, 32, 8));
        assert_eq!(of(28, Some(132)), (0, 28, 8));
        assert_eq!(of(60, Some(132)), (0, 60, 4));
        assert_eq!(of(264, Some(132)), (264, 0, 1));
        assert_eq!(of(264 + 65, Some(132)), (329, 0, 1), "the scratch holds chunk sums of {DIVIDED_MAX} blocks");
        assert_eq!(of(35, Some(10)), (35, 0, 1), "most multiprocessors are busy");
        assert_eq!(of(3, None), (0, 3, 8));
        assert_eq!(of(3, Some(0)), (3, 0, 1));
    }

    #[test]
    fn large_products_have_whole_and_divided_blocks() {
        for kind in [QuantType::Q4_0, QuantType::Q6K] {
            for processors in [Some(1), Some(20), Some(82), Some(128), Some(132), Some(170), None] {
                let blocks =
                    large_rows(kind, 70, processors).div_ceil(PANEL_ROWS) * 70usize.div_ceil(panel_tokens(kind));
                let division = Division::of(blocks, processors);
                assert!(
                    division.whole > 0 && (division.divided > 0 || processors == Some(1)),
                    "{processors:?}: {division:?}"
                );
            }
        }
    }
}
