//! Sorts pairs of a row and an expert by expert, so that the rows of one expert share a pass over its weights.
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::platform::{Platform, array};

/// Pairs by expert, on a device.
pub(crate) struct Groups {
    /// All pairs, ascending by expert, then by pair.
    pub(crate) order: Handle,
    /// For each size of [`BLOCK_PAIRS`], the blocks: the expert, the first place in `order` and the number of pairs. All pairs of a
    /// block have one expert. Blocks without pairs are last.
    pub(crate) blocks: [Handle; 2],
}

/// Most pairs of a block. A kernel uses the table for the number of rows that one of its cubes computes.
pub(crate) const BLOCK_PAIRS: [usize; 2] = [32, 64];
/// Words of a block.
pub(super) const BLOCK_WORDS: usize = 3;
/// Units of the kernel that sorts. A layer has at most this number of experts
/// ([`kernels::order::experts::EXPERTS_MAX`]).
const UNITS: usize = 1024;

/// Most blocks that `pairs` pairs with `experts` experts form.
pub(super) fn blocks_max(pairs: usize, experts: usize, block: usize) -> usize {
    pairs / block + experts.min(pairs)
}

impl Groups {
    /// Words of [`Groups::order`] and of both tables of blocks.
    pub(crate) fn words(pairs: usize, experts: usize) -> [usize; 3] {
        let [small, large] = BLOCK_PAIRS.map(|block| BLOCK_WORDS * blocks_max(pairs, experts, block));
        [pairs, small, large]
    }
}

/// Sorts `pairs` pairs, whose experts are in `chosen`, into `groups`. `experts`: the number of experts.
pub(crate) fn group<R: Platform>(
    client: &ComputeClient<R>,
    chosen: &Handle,
    experts: usize,
    pairs: usize,
    groups: &Groups,
) {
    let [order, small, large] = Groups::words(pairs, experts);
    // SAFETY: experts are below their number, so each pair has one place, and blocks stay within their bound.
    unsafe {
        group_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d((UNITS / experts * experts) as u32),
            array(chosen, pairs),
            array(&groups.order, order),
            array(&groups.blocks[0], small),
            array(&groups.blocks[1], large),
            pairs as u32,
            experts,
        );
    }
}

/// Unit `part * experts + expert` counts and places the pairs of one expert in one part of all pairs.
#[cube(launch_unchecked)]
fn group_kernel(
    chosen: &Array<u32>,
    order: &mut Array<u32>,
    small: &mut Array<u32>,
    large: &mut Array<u32>,
    pairs: u32,
    #[comptime] experts: usize,
) {
    let parts = comptime!(UNITS / experts);
    let unit = UNIT_POS_X as usize;
    let (expert, part) = (unit % experts, unit / experts);
    let each = (pairs as usize).div_ceil(parts);
    let (from, to) = (part * each, min((part + 1) * each, pairs as usize));
    let mut counts = SharedMemory::<u32>::new(comptime!(parts * experts));
    let mut totals = SharedMemory::<u32>::new(experts);
    let mut starts = SharedMemory::<u32>::new(experts);
    let mut ends = SharedMemory::<u32>::new(2usize);
    let mut found = 0u32;
    for pair in from..to {
        if chosen[pair] == expert as u32 {
            found += 1;
        }
    }
    counts[unit] = found;
    sync_cube();
    if part == 0 {
        let mut total = 0u32;
        #[unroll]
        for other in 0..parts {
            total += counts[comptime!(other * experts) + expert];
        }
        totals[expert] = total;
    }
    sync_cube();
    if part == 0 {
        let mut start = 0u32;
        let mut first = 0u32;
        let mut first_large = 0u32;
        for other in 0..expert {
            let total = totals[other];
            start += total;
            first += total.div_ceil(comptime!(BLOCK_PAIRS[0] as u32));
            first_large += total.div_ceil(comptime!(BLOCK_PAIRS[1] as u32));
        }
        starts[expert] = start;
        let total = totals[expert];
        let end = write_blocks(small, first, expert, start, total, comptime!(BLOCK_PAIRS[0] as u32));
        let end_large = write_blocks(large, first_large, expert, start, total, comptime!(BLOCK_PAIRS[1] as u32));
        if expert == comptime!(experts - 1) {
            ends[0] = end;
            ends[1] = end_large;
        }
    }
    sync_cube();
    clear_blocks(small, ends[0] as usize);
    clear_blocks(large, ends[1] as usize);
    let mut place = starts[expert];
    for other in 0..part {
        place += counts[other * experts + expert];
    }
    for pair in from..to {
        if chosen[pair] == expert as u32 {
            order[place as usize] = pair as u32;
            place += 1;
        }
    }
}

/// Writes the blocks of one expert from block `first` on, and returns the block after the last.
#[cube]
fn write_blocks(
    blocks: &mut Array<u32>,
    first: u32,
    expert: usize,
    start: u32,
    total: u32,
    #[comptime] most: u32,
) -> u32 {
    let count = total.div_ceil(most);
    for block in 0..count {
        let at = (first + block) as usize * comptime!(BLOCK_WORDS);
        blocks[at] = expert as u32;
        blocks[at + 1] = start + block * most;
        blocks[at + 2] = min(total - block * most, most);
    }
    first + count
}

/// Empties all blocks from `first` on.
#[cube]
fn clear_blocks(blocks: &mut Array<u32>, first: usize) {
    let mut block = first + UNIT_POS_X as usize;
    while (block + 1) * comptime!(BLOCK_WORDS) <= blocks.len() {
        blocks[block * comptime!(BLOCK_WORDS) + 2] = 0u32;
        block += CUBE_DIM_X as usize;
    }
}
