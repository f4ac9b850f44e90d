//! The codes of the four-bit encoding: Viterbi's algorithm along each row, as in `kernels::boundary`.
//!
//! `walk` goes through the blocks of a row in order: four units carry the errors of the eight states, each with one of the scales
//! tried, while the other units measure the distances of the next block. `trace` follows the best path back, all blocks at once: for
//! each block it first finds where every last state leads.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::boundary::{Codec, ROTATED, STATES, TRIED, ZEROS, level};
use kernels_models::stage::StageError;

use super::{TABLES, TRIED_AT, UNITS};
use crate::arithmetic::{Features, opaque_float};
use crate::inline::{await_previous, release_next};
use crate::platform::{Platform, array};

/// Units of a cube of `walk`: a plane of which four walk, and enough others that these never wait for a measurement.
const WALKERS: usize = 256;
/// First unit that measures.
const MEASURING: usize = 32;
/// Scales tried.
const SCALES: usize = TRIED.len();
/// Words of the turns of a block: a byte per element.
const TURN_WORDS: usize = ROTATED / 4;
/// Words of the transitions of a block: four bits per element.
const STEP_WORDS: usize = ROTATED / 8;
/// Maximum blocks of a row.
const BLOCKS_MAX: usize = kernels::boundary::WIDTH_MAX / ROTATED;
/// Error of a state that is not reached; those of states that are stay far below.
const UNREACHED: f32 = 1e30;

/// Scratch and results of the search; of one number each for other encodings.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// `[rows, blocks, 64]`: rotated elements, relative to the exponent of the row.
    pub(super) numbers: Handle,
    /// `[rows, blocks, 16]`: for each element a byte, the bit of each state telling which of two states was before it.
    turns: Handle,
    /// `[rows]`: the last state.
    ends: Handle,
    /// `[rows, blocks, 8]`: the transition before each element.
    pub(super) transitions: Handle,
    used: bool,
}

impl Found {
    /// `words` allocates this many words per row.
    pub(super) fn new(
        codec: Codec,
        width: usize,
        words: impl Fn(usize) -> Result<Handle, StageError>,
    ) -> Result<Self, StageError> {
        let used = codec == Codec::Q4;
        let blocks = if used { width.div_ceil(ROTATED) } else { 0 };
        Ok(Self {
            numbers: words(blocks * ROTATED)?,
            turns: words(blocks * TURN_WORDS)?,
            ends: words(usize::from(used))?,
            transitions: words(blocks * STEP_WORDS)?,
            used,
        })
    }

    /// For tests without a device.
    #[cfg(test)]
    pub(super) fn of(buffer: fn() -> Handle) -> Self {
        Self { numbers: buffer(), turns: buffer(), ends: buffer(), transitions: buffer(), used: true }
    }

    /// Elements of a row in `numbers`.
    pub(super) fn numbers_of_row(&self, width: usize) -> usize {
        if self.used { width.next_multiple_of(ROTATED) } else { 1 }
    }

    /// Words of `transitions` for this number of rows.
    pub(super) fn transitions_of(&self, count: usize, width: usize) -> usize {
        if self.used { count * width.div_ceil(ROTATED) * STEP_WORDS } else { 1 }
    }
}

/// Finds the scales and transitions of rows whose numbers and roots the survey wrote.
pub(super) fn find_codes<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    found: &Found,
    tables: &Handle,
    scales: &Handle,
    blocks: usize,
    count: usize,
) {
    let cubes = CubeCount::Static(count as u32, 1, 1);
    // SAFETY: a cube stays within its row.
    unsafe {
        walk_kernel::launch_unchecked::<R>(
            client,
            cubes.clone(),
            CubeDim::new_1d(WALKERS as u32),
            array(&found.numbers, count * blocks * ROTATED),
            array(tables, TABLES),
            array(scales, count * blocks),
            array(&found.turns, count * blocks * TURN_WORDS),
            array(&found.ends, count),
            blocks as u32,
            able,
        );
        trace_kernel::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(&found.turns, count * blocks * TURN_WORDS),
            array(&found.ends, count),
            array(&found.transitions, count * blocks * STEP_WORDS),
            blocks as u32,
            able,
        );
    }
}

/// The subset of levels of a transition: see `subset` in `kernels::boundary`.
const fn subset(transition: usize) -> usize {
    (2 * ((transition & 0b1011).count_ones() % 2) + (transition & 0b100).count_ones() % 2) as usize
}

/// A scale tried for a block with this root.
#[cube]
fn tried(root: u32, which: usize, tables: &Array<f32>) -> u32 {
    let scale = i32::cast_from(root) + i32::cast_from(tables[comptime!(TRIED_AT) + which]);
    let scale = u32::cast_from(max(min(scale, comptime!(ZEROS as i32 - 1)), 0i32));
    select(root == comptime!(ZEROS as u32), root, scale)
}

/// The squared distances of an element to the nearest level of each subset.
#[cube]
fn distances(x: f32, sigma: f32) -> Vector<f32, Const<4>> {
    let size = f32::abs(x);
    let mut squares = Array::<f32>::new(4usize);
    #[unroll]
    for subset in 0..4usize {
        // The four positive levels and the last one that is not: no other is the nearest to a magnitude.
        let mut near = f32::abs(size - opaque_float(sigma * comptime!(level(12 + subset))));
        #[unroll]
        for number in 1..5usize {
            near = min(near, f32::abs(size - opaque_float(sigma * comptime!(level(12 + 4 * number + subset)))));
        }
        squares[subset] = near * near;
    }
    // The levels of subset 3 - d are those of d with the other sign.
    let mut all = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for subset in 0..4usize {
        all[subset] = select(x < 0.0f32, squares[comptime!(3 - subset)], squares[subset]);
    }
    all
}

/// Measures the distances of a block with each of the scales tried, by the units from `first` on.
#[cube]
fn measure(
    numbers: &Array<f32>,
    tables: &Array<f32>,
    scales: &Array<u32>,
    block: usize,
    squares: &mut SharedMemory<Vector<f32, Const<4>>>,
    half: usize,
    #[comptime] first: usize,
) {
    let root = scales[block];
    let mut item = UNIT_POS_X as usize - comptime!(first);
    while item < comptime!(ROTATED * SCALES) {
        let x = numbers[block * comptime!(ROTATED) + item / comptime!(SCALES)];
        let sigma = tables[tried(root, item % comptime!(SCALES), tables) as usize];
        squares[half + item] = distances(x, sigma);
        item += comptime!(WALKERS - first);
    }
}

/// The least errors with which each state is reached, block by block: of each block the best scale, and the turns of its path.
#[cube(launch_unchecked)]
fn walk_kernel(
    numbers: &Array<f32>,
    tables: &Array<f32>,
    scales: &mut Array<u32>,
    turns: &mut Array<u32>,
    ends: &mut Array<u32>,
    blocks: u32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (row, unit, blocks) = (CUBE_POS_X as usize, UNIT_POS_X as usize, blocks as usize);
    // [two blocks in turn, element, scale] of the distances to each subset.
    let mut squares = SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(2 * ROTATED * SCALES));
    // [four elements, scale]: a byte per element.
    let mut path = SharedMemory::<u32>::new(comptime!(TURN_WORDS * SCALES));
    let mut reached = SharedMemory::<f32>::new(comptime!(SCALES * STATES));
    let mut errors = Array::<f32>::new(comptime!(STATES));
    #[unroll]
    for state in 0..STATES {
        errors[state] = comptime!(if state == 0 { 0.0f32 } else { UNREACHED }).runtime();
    }
    measure(numbers, tables, scales, row * blocks, &mut squares, 0usize, 0usize);
    sync_cube();
    let mut block = 0usize;
    while block < blocks {
        if unit < comptime!(SCALES) {
            let mut word = 0usize;
            while word < comptime!(TURN_WORDS) {
                // Loaded together: a load after the store of a path would wait for it.
                let mut square = Array::<Vector<f32, Const<4>>>::new(4usize);
                #[unroll]
                for k in 0..4usize {
                    let at = (4 * word + k) * comptime!(SCALES) + unit;
                    square[k] = squares[block % 2 * comptime!(ROTATED * SCALES) + at];
                }
                let mut turns = 0u32;
                #[unroll]
                for k in 0..4usize {
                    let mut after = Array::<f32>::new(comptime!(STATES));
                    let mut turn = 0u32;
                    #[unroll]
                    for state in 0..STATES {
                        let low = errors[comptime!(state / 2)] + square[k][comptime!(subset(state))];
                        let high =
                            errors[comptime!((state + STATES) / 2)] + square[k][comptime!(subset(state + STATES))];
                        // Of equal errors the first state before.
                        after[state] = select(high < low, high, low);
                        turn |= select(high < low, comptime!(1u32 << (8 * k + state)).runtime(), 0u32);
                    }
                    #[unroll]
                    for state in 0..STATES {
                        errors[state] = after[state];
                    }
                    turns |= turn;
                }
                path[word * comptime!(SCALES) + unit] = turns;
                word += 1;
            }
            #[unroll]
            for state in 0..STATES {
                reached[unit * comptime!(STATES) + state] = errors[state];
            }
        }
        if unit >= comptime!(MEASURING) && block + 1 < blocks {
            let half = (block + 1) % 2 * comptime!(ROTATED * SCALES);
            measure(numbers, tables, scales, row * blocks + block + 1, &mut squares, half, MEASURING);
        }
        sync_cube();
        // Of equal errors the first scale.
        let mut best = 0usize;
        let mut least = 0.0f32;
        #[unroll]
        for scale in 0..SCALES {
            let mut of_scale = reached[comptime!(scale * STATES)];
            #[unroll]
            for state in 1..STATES {
                of_scale = min(of_scale, reached[comptime!(scale * STATES + state)]);
            }
            if comptime!(scale == 0) {
                least = of_scale;
            } else if of_scale < least {
                least = of_scale;
                best = comptime!(scale).runtime();
            }
        }
        #[unroll]
        for state in 0..STATES {
            errors[state] = reached[best * comptime!(STATES) + state];
        }
        if unit < comptime!(TURN_WORDS) {
            turns[(row * blocks + block) * comptime!(TURN_WORDS) + unit] = path[unit * comptime!(SCALES) + best];
        }
        if unit == comptime!(TURN_WORDS) {
            let root = scales[row * blocks + block];
            scales[row * blocks + block] = tried(root, best, tables);
        }
        sync_cube();
        block += 1;
    }
    if unit == 0 {
        let mut state = 0u32;
        let mut least = errors[0];
        #[unroll]
        for other in 1..STATES {
            if errors[other] < least {
                least = errors[other];
                state = comptime!(other as u32).runtime();
            }
        }
        ends[row] = state;
    }
}

/// The transition into `state` at an element with these turns: four bits, the state being the lower three.
#[cube]
fn transition(state: u32, turns: u32) -> u32 {
    state + 8u32 * ((turns >> state) & 1u32)
}

/// Follows the path of the least error back from its end.
#[cube(launch_unchecked)]
fn trace_kernel(
    turns: &Array<u32>,
    ends: &Array<u32>,
    transitions: &mut Array<u32>,
    blocks: u32,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (row, unit, blocks) = (CUBE_POS_X as usize, UNIT_POS_X as usize, blocks as usize);
    // For each block four bits per last state: the state before the block.
    let mut maps = SharedMemory::<u32>::new(comptime!(BLOCKS_MAX));
    let mut lasts = SharedMemory::<u32>::new(comptime!(BLOCKS_MAX));
    let mut block = UNIT_POS_X as usize;
    while block < blocks {
        let mut states = Array::<u32>::new(comptime!(STATES));
        #[unroll]
        for state in 0..STATES {
            states[state] = comptime!(state as u32).runtime();
        }
        let mut left = comptime!(TURN_WORDS).runtime();
        while left > 0 {
            left -= 1;
            let word = turns[(row * blocks + block) * comptime!(TURN_WORDS) + left];
            #[unroll]
            for k in 0..4u32 {
                let byte = word >> comptime!(24 - 8 * k);
                #[unroll]
                for state in 0..STATES {
                    states[state] = transition(states[state], byte) >> 1u32;
                }
            }
        }
        let mut map = 0u32;
        #[unroll]
        for state in 0..STATES {
            map |= states[state] << comptime!(4 * state as u32);
        }
        maps[block] = map;
        block += comptime!(UNITS);
    }
    sync_cube();
    if unit == 0 {
        let mut state = ends[row];
        let mut done = 0usize;
        while done < blocks {
            let at = blocks - 1 - done;
            lasts[at] = state;
            state = (maps[at] >> (4u32 * state)) & 15u32;
            done += 1;
        }
    }
    sync_cube();
    let mut block = UNIT_POS_X as usize;
    while block < blocks {
        let mut state = lasts[block];
        let mut left = comptime!(STEP_WORDS).runtime();
        while left > 0 {
            left -= 1;
            let mut steps = 0u32;
            #[unroll]
            for half in 0..2usize {
                let at = (row * blocks + block) * comptime!(TURN_WORDS) + 2 * left + comptime!(1 - half);
                let word = turns[at];
                #[unroll]
                for k in 0..4u32 {
                    let step = transition(state, word >> comptime!(24 - 8 * k));
                    steps |= step << comptime!(28 - 16 * half as u32 - 4 * k);
                    state = step >> 1u32;
                }
            }
            transitions[(row * blocks + block) * comptime!(STEP_WORDS) + left] = steps;
        }
        block += comptime!(UNITS);
    }
}
