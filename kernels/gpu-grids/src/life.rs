//! Life-like cellular automata on GPUs: 32 cells per word, one thread per column of words, with the bit planes of
//! `kernels/grids/src/life.rs`.
#![expect(clippy::collapsible_if, reason = "comptime conditions are kept apart from runtime conditions")]
use cubecl::prelude::*;
use kernels_grids::frame::Span;

use crate::memory::{Buffer, address};
use crate::place::{Boundary, Ends, Memory, Place, unit_row};

/// A Life-like rule; a compile-time parameter of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Counts {
    /// Bit n: born with n neighbours.
    pub(super) birth: u16,
    /// Bit n: survives with n neighbours.
    pub(super) survival: u16,
}

impl Counts {
    const CONWAY: Self = Self { birth: 1 << 3, survival: 1 << 2 | 1 << 3 };

    /// Next states of a dead and of a live cell with `count` live cells in its 3 × 3 square.
    fn becomes(self, count: usize) -> [bool; 2] {
        [count < 9 && self.birth >> count & 1 == 1, count > 0 && self.survival >> (count - 1) & 1 == 1]
    }
}

/// Life on one tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Life {
    pub(super) counts: Counts,
    pub(super) ends: Ends,
    /// Valid cells in the last word of the tile's rows.
    pub(super) valid: u32,
    /// Threads per cube, and consecutive rows per thread: each row's sums of three are used for three rows.
    pub(super) cube: CubeDim,
    pub(super) each: usize,
}

impl Life {
    pub(super) fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        memory: &Memory,
        span: &Span,
        [from, to]: [&Buffer; 2],
    ) {
        let dim = self.cube;
        // SAFETY: `span` and one cell around it are in memory; threads outside it do nothing.
        unsafe {
            life_step::launch_unchecked::<R>(
                client,
                memory.cubes(span, dim, self.each),
                dim,
                address(client, from.len),
                from.arg(),
                to.arg(),
                memory.place(span),
                self.valid,
                self.counts,
                self.ends,
                self.each,
            );
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn life_step(
    from: &Array<u32>,
    to: &mut Array<u32>,
    place: &Place,
    valid: u32,
    #[comptime] counts: Counts,
    #[comptime] ends: Ends,
    #[comptime] each: usize,
) {
    let x = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let row = unit_row() * comptime!(each as u32);
    if x < place.nx && row < place.rows {
        let x = place.x + x;
        let y = place.y + row;
        let above = triple(from, place, valid, x, y, 0u32, ends);
        let here = triple(from, place, valid, x, y, 1u32, ends);
        let (mut above_low, mut above_high) = (above.low, above.high);
        let (mut here_low, mut here_high, mut cell) = (here.low, here.high, here.cell);
        #[unroll]
        for i in 0..each {
            let y = y + i as u32;
            if row + (i as u32) < place.rows {
                let below = triple(from, place, valid, x, y, 2u32, ends);
                let (t0, c0) = sum(above_low, here_low, below.low);
                let (u0, u1) = sum(above_high, here_high, below.high);
                let carry = u0 & c0;
                let next = become_next(t0, u0 ^ c0, u1 ^ carry, u1 & carry, cell, counts);
                to[y as usize * place.row + x as usize] = next;
                above_low = here_low;
                above_high = here_high;
                here_low = below.low;
                here_high = below.high;
                cell = below.cell;
            }
        }
    }
}

/// For each cell of a word the sum of its left neighbour, itself and its right neighbour, as two bit planes; and the
/// cells.
#[derive(CubeType, Clone, Copy)]
struct Triple {
    low: u32,
    high: u32,
    cell: u32,
}

/// [`Triple`] of the row above `y` (`which` = 0), of `y` (1), or below it (2).
#[cube]
fn triple(from: &Array<u32>, place: &Place, valid: u32, x: u32, y: u32, which: u32, #[comptime] ends: Ends) -> Triple {
    // One too high, so that it is never negative.
    let row = y + which;
    let mut real = row - 1u32;
    let mut all = 0xffff_ffffu32;
    let (low, high) = comptime!((ends.0[1][0], ends.0[1][1]));
    if comptime!(low != Boundary::Cells) {
        if row == place.low {
            if comptime!(low == Boundary::Wrap) {
                real = place.high;
            } else {
                real = place.low;
                all = 0u32;
            }
        }
    }
    if comptime!(high != Boundary::Cells) {
        if row == place.high + 2u32 {
            if comptime!(high == Boundary::Wrap) {
                real = place.low;
            } else {
                real = place.high;
                all = 0u32;
            }
        }
    }
    let base = real as usize * place.row;
    let cell = word(from, place, valid, base, x, ends) & all;
    let before = word(from, place, valid, base, x - 1u32, ends) & all;
    let after = word(from, place, valid, base, x + 1u32, ends) & all;
    let left = (cell << 1u32) | (before >> 31u32);
    let right = (cell >> 1u32) | (after << 31u32);
    let (low, high) = sum(left, cell, right);
    Triple { low, high, cell }
}

/// A word of a row, with ghost cells inserted next to the owned cells at the ends of the tile.
#[cube]
fn word(from: &Array<u32>, place: &Place, valid: u32, base: usize, x: u32, #[comptime] ends: Ends) -> u32 {
    let mut found = from[base + x as usize];
    let (left, right) = comptime!((ends.0[0][0], ends.0[0][1]));
    if comptime!(left != Boundary::Cells) {
        if x + 1u32 == place.left {
            if comptime!(left == Boundary::Wrap) {
                found = (from[base + place.right as usize] >> (valid - 1u32)) << 31u32;
            } else {
                found = 0u32;
            }
        }
    }
    if comptime!(right != Boundary::Cells) {
        if x >= place.right {
            let mut ghost = 0u32;
            if comptime!(right == Boundary::Wrap) {
                ghost = from[base + place.left as usize] & 1u32;
            }
            if x == place.right {
                if valid < 32u32 {
                    found = (found & ((1u32 << valid) - 1u32)) | (ghost << valid);
                }
            } else {
                found = ghost;
            }
        }
    }
    found
}

#[cube]
fn sum(a: u32, b: u32, c: u32) -> (u32, u32) {
    let ab = a ^ b;
    (ab ^ c, (a & b) | (ab & c))
}

/// The next state from the cell and the bit planes of the live count in its 3 × 3 square, which includes it.
#[cube]
fn become_next(t0: u32, t1: u32, t2: u32, t3: u32, cell: u32, #[comptime] counts: Counts) -> u32 {
    if comptime!(counts == Counts::CONWAY) {
        // Three in the square, or four with the cell alive. Nine is 1001, so t3 is not needed.
        ((t0 & t1) & !t2) | ((cell & t2) & !(t0 | t1))
    } else {
        let low = four(0usize, t0, t1, cell, counts);
        let high = four(4usize, t0, t1, cell, counts);
        choose(t3, choose(t2, low, high), two(8usize, t0, cell, counts))
    }
}

#[cube]
fn four(#[comptime] count: usize, t0: u32, t1: u32, cell: u32, #[comptime] counts: Counts) -> u32 {
    choose(t1, two(count, t0, cell, counts), two(comptime!(count + 2), t0, cell, counts))
}

#[cube]
fn two(#[comptime] count: usize, t0: u32, cell: u32, #[comptime] counts: Counts) -> u32 {
    choose(t0, one(count, cell, counts), one(comptime!(count + 1), cell, counts))
}

#[cube]
fn one(#[comptime] count: usize, cell: u32, #[comptime] counts: Counts) -> u32 {
    let [dead, alive] = comptime!(counts.becomes(count));
    if comptime!(dead && alive) {
        0xffff_ffffu32.runtime()
    } else if comptime!(dead) {
        !cell
    } else if comptime!(alive) {
        cell
    } else {
        0u32.runtime()
    }
}

/// `one` where the bit is set, else `zero`.
#[cube]
fn choose(by: u32, zero: u32, one: u32) -> u32 {
    zero ^ (by & (zero ^ one))
}
