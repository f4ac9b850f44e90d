//! The 4-bit encoding of rows: outliers apart, a rotation, and trellis-coded codes.
//!
//! A few channels of a language model's hidden rows are much larger than all others, and would take the precision of these:
//! they are kept apart. The rest is rotated in blocks of 64 (a Hadamard transform), after which each block is close to a
//! Gaussian whatever the channels are. A trellis of eight states (Ungerboeck's code, as in Marcellin and Fischer, "Trellis Coded
//! Quantization of Memoryless and Gauss-Markov Sources", 1990) then reaches with four bits what a scalar quantiser reaches with
//! 4.4: two thirds of its squared error.
//!
//! Layout of a row of `n` elements, b = ⌈n / 64⌉ blocks, the last one padded with zeros before the rotation:
//!
//! | bytes | what |
//! |---|---|
//! | 2 | exponent `e` (i16): all rotated elements are below 2^e; -32768 in a row of NaN, all else 0 |
//! | 4 · k | outliers by ascending index: the index (u16) and the value (bf16, to nearest even); they are 0 before the rotation |
//! | b | scale `s` of each block: σ = 2^(e - s/16); 255: all elements are 0 |
//! | 32 · b | codes, two per byte, the first one in the lower half |
//!
//! k is as great as 4.5 bits per element allow ([`kept`]).
//!
//! The trellis runs through the whole row, from state 0. From state `q` (3 bits) a code `c` leads to the state
//! `(2q + c/8) mod 8`; with `r = 2q + c/8` of four bits, its subset is `d = 2 · parity(r & 11) + parity(r & 4)`, and the element
//! is `σ · LEVELS[4 · (c mod 8) + d]`. At the end each block is rotated back.
use half::bf16;

use super::{BoundaryError, NAN_ROW, exponent, is_finite, largest, outlier, outliers, read_exponent, scaled};

/// Elements that are rotated together and share a scale.
pub const ROTATED: usize = 64;
/// Scale of a block of zeros.
pub const ZEROS: u8 = 255;
/// Scales tried, relative to that of the block's root mean square, in sixteenths of an octave.
pub const TRIED: [i32; 4] = [-4, -2, 0, 2];

/// Bytes of a row.
pub(super) fn row_bytes(width: usize) -> usize {
    let blocks = width.div_ceil(ROTATED);
    2 + 4 * kept(width) + blocks + ROTATED / 2 * blocks
}

/// Number of outliers: what 4.5 bits per element leave.
pub(super) fn kept(width: usize) -> usize {
    let blocks = width.div_ceil(ROTATED);
    ((width * 9 / 16).saturating_sub(2 + blocks + ROTATED / 2 * blocks) / 4).min(width)
}

#[inline(always)]
pub(super) fn encode(row: &[f32], out: &mut Vec<u8>) {
    let end = out.len() + row_bytes(row.len());
    let mut rotated = vec![[0.0; ROTATED]; row.len().div_ceil(ROTATED)];
    rotated.as_flattened_mut()[..row.len()].copy_from_slice(row);
    let apart = if is_finite(row) { outliers(row, kept(row.len())) } else { Vec::new() };
    apart.iter().for_each(|&at| rotated.as_flattened_mut()[at] = 0.0);
    rotated.iter_mut().for_each(rotate);
    let values: Vec<bf16> = apart.iter().map(|&at| bf16::from_f32(row[at])).collect();
    // Elements near the greatest f32 overflow in the rotation or in bf16.
    if !is_finite(rotated.as_flattened()) || values.iter().any(|value| !value.is_finite()) {
        out.extend(NAN_ROW.to_le_bytes());
        // Outliers are in order in every row.
        (0..kept(row.len()) as u16).for_each(|at| out.extend([at.to_le_bytes(), [0; 2]].as_flattened()));
        return out.resize(end, 0);
    }
    let power = exponent(largest(rotated.as_flattened()));
    out.extend((power as i16).to_le_bytes());
    for (at, value) in apart.iter().zip(values) {
        out.extend([(*at as u16).to_le_bytes(), value.to_le_bytes()].as_flattened());
    }
    rotated.as_flattened_mut().iter_mut().for_each(|x| *x = scaled(*x, -power));
    let (scales, codes) = search(&rotated);
    out.extend(scales);
    out.extend(codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4));
}

#[inline(always)]
pub(super) fn decode(bytes: &[u8], row: &mut [f32]) -> Result<(), BoundaryError> {
    let blocks = row.len().div_ceil(ROTATED);
    let (head, rest) = bytes.split_at(2);
    let (apart, rest) = rest.split_at(4 * kept(row.len()));
    let (scales, codes) = rest.split_at(blocks);
    let power = read_exponent(i16::from_le_bytes([head[0], head[1]]))?;
    let mut transition = 0;
    for ((block, scale), codes) in row.chunks_mut(ROTATED).zip(scales).zip(codes.chunks_exact(ROTATED / 2)) {
        let sigma = sigma(*scale);
        let mut rotated = [0.0; ROTATED];
        for (pair, codes) in rotated.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            for (x, code) in pair.iter_mut().zip([codes & 15, codes >> 4].map(usize::from)) {
                transition = (2 * transition + code / 8) % (2 * STATES);
                *x = sigma * TRANSITIONS[transition][code % 8];
            }
        }
        rotate(&mut rotated);
        for (x, rotated) in block.iter_mut().zip(rotated) {
            *x = power.map_or(f32::NAN, |power| scaled(rotated, power));
        }
    }
    let mut before = None;
    for [low, high, value @ ..] in apart.as_chunks::<4>().0 {
        let at = outlier(u16::from_le_bytes([*low, *high]), before, row.len())?;
        row[at] = power.map_or(f32::NAN, |_| bf16::from_le_bytes(*value).to_f32());
        before = Some(at);
    }
    Ok(())
}

/// The Hadamard transform, which is its own inverse: butterflies over distances 1, 2, … 32, then times 1/8.
#[inline(always)]
fn rotate(block: &mut [f32; ROTATED]) {
    let mut distance = 1;
    while distance < ROTATED {
        for pair in block.chunks_exact_mut(2 * distance) {
            let (low, high) = pair.split_at_mut(distance);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        distance *= 2;
    }
    block.iter_mut().for_each(|x| *x *= 0.125);
}

/// States of the trellis.
pub const STATES: usize = 8;

/// The subset of levels that belongs to a transition, `2 · state + bit`. The two transitions from a state, and the two into
/// one, have subsets 0 and 2, or 1 and 3: levels of one are midway between those of the other.
const fn subset(transition: usize) -> usize {
    let parities = [(transition & 0b1011).count_ones(), (transition & 0b100).count_ones()];
    (2 * (parities[0] % 2) + parities[1] % 2) as usize
}

/// The upper half of 32 levels that have the least mean squared error for a Gaussian of variance 1 (Max, "Quantizing for
/// minimum distortion", 1960). Subset `d` has every fourth level from level `d` on.
pub const LEVELS: [f32; 16] = [
    0.0674, 0.2024, 0.3381, 0.4756, 0.6158, 0.7594, 0.9080, 1.0631, 1.2266, 1.4015, 1.5914, 1.8022, 2.0432, 2.3315,
    2.7038, 3.2718,
];

/// A level: number 0 is the least of 32.
#[must_use]
pub const fn level(index: usize) -> f32 {
    if index < LEVELS.len() { -LEVELS[LEVELS.len() - 1 - index] } else { LEVELS[index - LEVELS.len()] }
}

/// σ of a scale, relative to 2^e.
#[must_use]
pub fn sigma(scale: u8) -> f32 {
    match scale {
        ZEROS => 0.0,
        scale => scaled(SIXTEENTHS[usize::from(scale) % 16], -i32::from(scale) / 16),
    }
}

/// 2^(-i/16).
pub const SIXTEENTHS: [f32; 16] = [
    1.0,
    0.957_603_3,
    0.917_004_05,
    0.878_126_1,
    0.840_896_4,
    0.805_245_2,
    0.771_105_4,
    0.738_413_1,
    0.707_106_77,
    0.677_127_8,
    0.648_419_8,
    0.620_928_9,
    0.594_603_6,
    0.569_394_3,
    0.545_253_9,
    0.522_136_9,
];

/// The scale nearest to a block's root mean square, from its mean square, which is at most 1: the first whose square, half a
/// step less, is not greater. `None` for a block that counts as zeros.
fn root(mean_square: f32) -> Option<i32> {
    // The squares of all before this one are at least 2^(3/8) times greater than the mean square can be.
    let first = (-8 * exponent(mean_square) - 3).max(0);
    (first..i32::from(ZEROS)).find(|&scale| {
        let sigma = sigma(scale as u8);
        // The square of 2^(-1/32).
        mean_square >= sigma * sigma * SIXTEENTHS[1]
    })
}

/// Errors of the scales tried at once, by their places in [`TRIED`].
type Errors = [f32; TRIED.len()];
/// For the scales tried at once, the states that were reached from the greater of their two predecessors: a bit each.
type Turns = [u32; TRIED.len()];

/// Scales and codes of normalised blocks: of each block the best of the scales tried, by the least error up to its end; then
/// the path of the least error.
#[inline(always)]
fn search(blocks: &[[f32; ROTATED]]) -> (Vec<u8>, Vec<u8>) {
    let mut errors = [f32::INFINITY; STATES];
    errors[0] = 0.0;
    let (mut scales, mut turns) = (Vec::with_capacity(blocks.len()), Vec::with_capacity(blocks.len()));
    for block in blocks {
        let mean_square = block.iter().fold(0.0, |sum, x| sum + x * x) * (1.0 / ROTATED as f32);
        let tried = match root(mean_square) {
            Some(root) => TRIED.map(|more| (root + more).clamp(0, i32::from(ZEROS) - 1) as u8),
            None => [ZEROS; TRIED.len()],
        };
        let (after, path) = walk(block, tried.map(sigma), errors);
        let least: Errors =
            core::array::from_fn(|scale| after.iter().fold(f32::INFINITY, |least, error| lesser(least, error[scale])));
        // Of equal errors the first scale, and below the first state.
        let best = (1..TRIED.len()).fold(0, |best, scale| if least[scale] < least[best] { scale } else { best });
        errors = after.map(|error| error[best]);
        scales.push(tried[best]);
        turns.push(path.map(|turns| turns[best] as u8));
    }
    let mut state = (0..STATES).fold(0, |best, state| if errors[state] < errors[best] { state } else { best });
    let mut codes = vec![0; ROTATED * blocks.len()];
    for (at, turns) in turns.as_flattened().iter().enumerate().rev() {
        // A transition's lowest bit is that of the state it leads to, its highest one that of the state it comes from.
        let transition = state + STATES * usize::from(turns >> state & 1);
        codes[at] = transition as u8;
        state = transition / 2;
    }
    for ((codes, block), scale) in codes.chunks_exact_mut(ROTATED).zip(blocks).zip(&scales) {
        let sigma = sigma(*scale);
        let levels = SUBSETS.map(|levels| levels.map(|level| sigma * level));
        for (code, x) in codes.iter_mut().zip(block) {
            let transition = usize::from(*code);
            *code = (8 * (transition % 2)) as u8 | nearest(*x, &levels[subset(transition)]);
        }
    }
    (scales, codes)
}

/// Viterbi's algorithm over one block, with several scales side by side: the least error with which each state is
/// reached, and how it is reached at each element.
#[inline(always)]
fn walk(block: &[f32; ROTATED], sigmas: Errors, before: [f32; STATES]) -> ([Errors; STATES], [Turns; ROTATED]) {
    let mut errors = before.map(|error| [error; TRIED.len()]);
    let mut path = [[0; TRIED.len()]; ROTATED];
    // Of a subset, the four levels that are positive and the last one that is not: no other is the nearest to an |x|.
    let levels: [[Errors; 4]; 5] = core::array::from_fn(|number| {
        core::array::from_fn(|subset| sigmas.map(|sigma| sigma * level(4 * (number + 3) + subset)))
    });
    for (x, turns) in block.iter().zip(&mut path) {
        let mut squares = [[f32::INFINITY; TRIED.len()]; 4];
        for levels in &levels {
            for (squares, levels) in squares.iter_mut().zip(levels) {
                for (square, level) in squares.iter_mut().zip(levels) {
                    *square = lesser(*square, (x.abs() - level).abs());
                }
            }
        }
        for square in squares.as_flattened_mut() {
            *square *= *square;
        }
        // The levels of subset 3 - d are those of d with the other sign.
        let mirror = if *x < 0.0 { 3 } else { 0 };
        let squares = [squares[mirror], squares[1 ^ mirror], squares[2 ^ mirror], squares[3 ^ mirror]];
        // One by one, so that the compiler makes each of them a few operations on vectors of the scales.
        let (e, s) = (&errors, &squares);
        let (e0, t0) = arrive::<0>(e, s);
        let (e1, t1) = arrive::<1>(e, s);
        let (e2, t2) = arrive::<2>(e, s);
        let (e3, t3) = arrive::<3>(e, s);
        let (e4, t4) = arrive::<4>(e, s);
        let (e5, t5) = arrive::<5>(e, s);
        let (e6, t6) = arrive::<6>(e, s);
        let (e7, t7) = arrive::<7>(e, s);
        errors = [e0, e1, e2, e3, e4, e5, e6, e7];
        for scale in 0..TRIED.len() {
            turns[scale] =
                (t0[scale] | t1[scale] | t2[scale] | t3[scale]) | (t4[scale] | t5[scale] | t6[scale] | t7[scale]);
        }
    }
    (errors, path)
}

/// The least error with which a state is reached from its two predecessors, and its bit of the turns.
#[inline(always)]
fn arrive<const STATE: usize>(errors: &[Errors; STATES], squares: &[Errors; 4]) -> (Errors, Turns) {
    let (from_low, from_high) = (&errors[STATE / 2], &errors[(STATE + STATES) / 2]);
    let (low, high) = (&squares[subset(STATE)], &squares[subset(STATE + STATES)]);
    let (mut after, mut turns) = ([0.0; TRIED.len()], [0; TRIED.len()]);
    for scale in 0..TRIED.len() {
        let (low, high) = (from_low[scale] + low[scale], from_high[scale] + high[scale]);
        // Of equal errors the first state before.
        after[scale] = lesser(low, high);
        turns[scale] = if high < low { 1 << STATE } else { 0 };
    }
    (after, turns)
}

/// The number of the level nearest to `x`, of equally near ones the first.
#[inline(always)]
fn nearest(x: f32, levels: &[f32; 8]) -> u8 {
    let errors = levels.map(|level| (x - level) * (x - level));
    let mut best = (errors[0], 0);
    for (number, error) in (0..).zip(errors) {
        if error < best.0 {
            best = (error, number);
        }
    }
    best.1
}

/// `a` unless `b` is less; unlike [`f32::min`] one instruction.
#[inline(always)]
fn lesser(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

/// The levels of each subset.
const SUBSETS: [[f32; 8]; 4] = {
    let mut subsets = [[0.0; 8]; 4];
    let mut index = 0;
    while index < 32 {
        subsets[index % 4][index / 4] = level(index);
        index += 1;
    }
    subsets
};

/// The levels of each transition.
const TRANSITIONS: [[f32; 8]; 2 * STATES] = {
    let mut transitions = [[0.0; 8]; 2 * STATES];
    let mut transition = 0;
    while transition < 2 * STATES {
        transitions[transition] = SUBSETS[subset(transition)];
        transition += 1;
    }
    transitions
};

#[cfg(test)]
mod tests;
