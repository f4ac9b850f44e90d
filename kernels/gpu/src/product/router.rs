//! Scores of experts for few rows: a router has so few rows that a cube per tile row leaves most of a device idle. Here each chunk of
//! columns is a cube of its own, and the kernel that chooses experts adds the chunks.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::{CHUNKS, GROUP};
use kernels::quant::QuantType;
use kernels::tile::ROWS;

use super::operands::Matrix;
use crate::arithmetic::{Features, chunk_range, fused};
use crate::inline::{await_previous, release_next};
use crate::platform::{Platform, array};

/// Maximum number of activation rows.
const COUNT_MAX: usize = 8;
/// Units of a cube; at least one per matrix row and activation row.
const UNITS: usize = ROWS * COUNT_MAX;
/// Groups of columns in shared memory at once: 16 KiB of weights.
const GROUPS: usize = 4;
/// Words of weights that a unit loads at once.
const EACH: usize = GROUPS * GROUP * ROWS / UNITS;

/// Whether [`router_chunks`] computes this router for this number of rows.
pub(crate) fn is_chunked(able: Features, router: &Matrix, count: usize) -> bool {
    able.matrices && router.kind == QuantType::F32 && count <= COUNT_MAX
}

/// Words that [`router_chunks`] writes at most for `experts` experts.
pub(crate) const fn chunk_words(experts: usize) -> usize {
    COUNT_MAX * CHUNKS * experts.next_multiple_of(ROWS)
}

/// Writes the sum of each chunk of the products of a router of f32 with rows of `x`: `[rows, chunks, router rows]`, where router rows
/// are padded to whole tile rows. The sum of a row's chunks is the product in the order of `kernels::order::dot`.
pub(crate) fn router_chunks<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    router: &Matrix,
    x: &Handle,
    count: usize,
    chunks: &Handle,
) {
    let strips = router.rows.div_ceil(ROWS);
    // SAFETY: cubes stay within their tile row and chunk, and there is room for all rows.
    unsafe {
        router_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(strips as u32, CHUNKS as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            array(&router.tiles, router.words()),
            array(x, count * router.cols),
            array(chunks, count * CHUNKS * strips * ROWS),
            router.cols as u32,
            (strips * ROWS) as u32,
            count,
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn router_kernel(
    tiles: &Array<f32>,
    x: &Array<f32>,
    chunks: &mut Array<f32>,
    cols: u32,
    rows: u32,
    #[comptime] count: usize,
    #[comptime] able: Features,
) {
    let (unit, strip, chunk) = (UNIT_POS_X as usize, CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let (row, token) = (unit % comptime!(ROWS), unit / comptime!(ROWS));
    let cols = cols as usize;
    let groups = cols.div_ceil(comptime!(GROUP));
    let (from, to) = chunk_range(groups, chunk);
    let mut weights = SharedMemory::<f32>::new(comptime!(GROUPS * GROUP * ROWS));
    let mut numbers = SharedMemory::<f32>::new(comptime!(GROUPS * GROUP * count));
    let mut loaded = Array::<f32>::new(EACH);
    let mut sum = 0.0f32;
    release_next(able);
    let mut group = from;
    while group < to {
        let some = min(to - group, GROUPS);
        let words = some * comptime!(GROUP * ROWS);
        let tile = (strip * groups + group) * comptime!(GROUP * ROWS);
        #[unroll]
        for i in 0..EACH {
            let at = comptime!(i * UNITS) + unit;
            loaded[i] = 0.0f32;
            if at < words {
                loaded[i] = tiles[tile + at];
            }
        }
        // The weights are constant; what follows depends on the preceding kernel.
        await_previous(able);
        let first = group * comptime!(GROUP);
        let end = min(some * comptime!(GROUP), cols - first);
        #[unroll]
        for i in 0..EACH {
            weights[comptime!(i * UNITS) + unit] = loaded[i];
        }
        #[unroll]
        for token in 0..count {
            let mut column = unit;
            while column < end {
                numbers[comptime!(token * GROUPS * GROUP) + column] = x[token * cols + first + column];
                column += comptime!(UNITS);
            }
        }
        sync_cube();
        if token < count {
            let x_at = token * comptime!(GROUPS * GROUP);
            let mut column = 0usize;
            while column + comptime!(BATCH) <= end {
                #[unroll]
                for i in 0..BATCH {
                    let at = column + i;
                    sum = fused(weights[at * comptime!(ROWS) + row], numbers[x_at + at], sum, able);
                }
                column += comptime!(BATCH);
            }
            while column < end {
                sum = fused(weights[column * comptime!(ROWS) + row], numbers[x_at + column], sum, able);
                column += 1;
            }
        }
        sync_cube();
        group += comptime!(GROUPS);
    }
    await_previous(able); // a chunk may have no columns
    if token < count {
        let at = (token * comptime!(CHUNKS) + chunk) * rows as usize + strip * comptime!(ROWS) + row;
        chunks[at] = sum;
    }
}

/// Columns whose loads from shared memory overlap.
const BATCH: usize = 16;
