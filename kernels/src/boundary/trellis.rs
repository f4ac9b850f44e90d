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
const ROTATED: usize = 64;
/// Scale of a block of zeros.
const ZEROS: u8 = 255;
/// Scales tried, relative to that of the block's root mean square, in sixteenths of an octave.
const TRIED: [i32; 4] = [-4, -2, 0, 2];

/// Bytes of a row.
pub(super) fn row_bytes(width: usize) -> usize {
    let blocks = width.div_ceil(ROTATED);
    2 + 4 * kept(width) + blocks + ROTATED / 2 * blocks
}

/// Number of outliers: what 4.5 bits per element leave.
fn kept(width: usize) -> usize {
    let blocks = width.div_ceil(ROTATED);
    ((width * 9 / 16).saturating_sub(2 + blocks + ROTATED / 2 * blocks) / 4).min(width)
}

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

pub(super) fn decode(bytes: &[u8], row: &mut [f32]) -> Result<(), BoundaryError> {
    let blocks = row.len().div_ceil(ROTATED);
    let (head, rest) = bytes.split_at(2);
    let (apart, rest) = rest.split_at(4 * kept(row.len()));
    let (scales, codes) = rest.split_at(blocks);
    let power = read_exponent(i16::from_le_bytes([head[0], head[1]]))?;
    let mut state = 0;
    for ((block, scale), codes) in row.chunks_mut(ROTATED).zip(scales).zip(codes.chunks_exact(ROTATED / 2)) {
        let sigma = sigma(*scale);
        let mut rotated = [0.0; ROTATED];
        for (at, x) in rotated.iter_mut().enumerate() {
            let code = usize::from(codes[at / 2] >> (4 * (at % 2)) & 15);
            *x = sigma * level(4 * (code % 8) + subset(2 * state + code / 8));
            state = (2 * state + code / 8) % STATES;
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
const STATES: usize = 8;

/// The subset of levels that belongs to a transition, `2 · state + bit`. The two transitions from a state, and the two into
/// one, have subsets 0 and 2, or 1 and 3: levels of one are midway between those of the other.
fn subset(transition: usize) -> usize {
    let parity = |mask: usize| (transition & mask).count_ones() as usize % 2;
    2 * parity(0b1011) + parity(0b100)
}

/// The upper half of 32 levels that have the least mean squared error for a Gaussian of variance 1 (Max, "Quantizing for
/// minimum distortion", 1960). Subset `d` has every fourth level from level `d` on.
const LEVELS: [f32; 16] = [
    0.0674, 0.2024, 0.3381, 0.4756, 0.6158, 0.7594, 0.9080, 1.0631, 1.2266, 1.4015, 1.5914, 1.8022, 2.0432, 2.3315,
    2.7038, 3.2718,
];

/// Level 0 is the least of 32.
fn level(index: usize) -> f32 {
    if index < LEVELS.len() { -LEVELS[LEVELS.len() - 1 - index] } else { LEVELS[index - LEVELS.len()] }
}

/// σ of a scale, relative to 2^e.
fn sigma(scale: u8) -> f32 {
    match scale {
        ZEROS => 0.0,
        scale => scaled(SIXTEENTHS[usize::from(scale) % 16], -i32::from(scale) / 16),
    }
}

/// 2^(-i/16).
const SIXTEENTHS: [f32; 16] = [
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
    (0..i32::from(ZEROS)).find(|&scale| {
        let sigma = sigma(scale as u8);
        // The square of 2^(-1/32).
        mean_square >= sigma * sigma * SIXTEENTHS[1]
    })
}

/// How each state was reached at one element: the state before, and the code.
type Steps = [(u8, u8); STATES];

/// Scales and codes of normalised blocks: of each block the best of the scales tried, by the least error up to its end; then
/// the path of the least error.
fn search(blocks: &[[f32; ROTATED]]) -> (Vec<u8>, Vec<u8>) {
    let mut errors = [f32::INFINITY; STATES];
    errors[0] = 0.0;
    let (mut scales, mut steps) = (Vec::with_capacity(blocks.len()), Vec::<Steps>::new());
    for block in blocks {
        let mean_square = block.iter().fold(0.0, |sum, x| sum + x * x) * (1.0 / ROTATED as f32);
        let tried: Vec<u8> = match root(mean_square) {
            Some(root) => TRIED.iter().map(|more| (root + more).clamp(0, i32::from(ZEROS) - 1) as u8).collect(),
            None => vec![ZEROS],
        };
        let mut best: Option<(f32, u8, [f32; STATES], Vec<Steps>)> = None;
        for scale in tried {
            let (after, path) = walk(block, scale, errors);
            let least = after.iter().copied().fold(f32::INFINITY, f32::min);
            if best.as_ref().is_none_or(|(error, ..)| least < *error) {
                best = Some((least, scale, after, path));
            }
        }
        if let Some((_, scale, after, path)) = best {
            errors = after;
            scales.push(scale);
            steps.extend(path);
        }
    }
    let mut state = (0..STATES).fold(0, |best, state| if errors[state] < errors[best] { state } else { best });
    let mut codes = vec![0; steps.len()];
    for (code, steps) in codes.iter_mut().zip(&steps).rev() {
        let (before, taken) = steps[state];
        *code = taken;
        state = usize::from(before);
    }
    (scales, codes)
}

/// Viterbi's algorithm over one block: the least error with which each state is reached, and how.
fn walk(block: &[f32; ROTATED], scale: u8, mut errors: [f32; STATES]) -> ([f32; STATES], Vec<Steps>) {
    let sigma = sigma(scale);
    let mut path = Vec::with_capacity(ROTATED);
    for &x in block {
        let nearest: [(f32, u8); 4] = core::array::from_fn(|subset| nearest(x, sigma, subset));
        let mut after = [f32::INFINITY; STATES];
        let mut steps = [(0, 0); STATES];
        for (state, &error) in errors.iter().enumerate() {
            for bit in 0..2 {
                let transition = 2 * state + bit;
                let (more, code) = nearest[subset(transition)];
                let (to, sum) = (transition % STATES, error + more);
                // Of equal errors the first state.
                if sum < after[to] {
                    (after[to], steps[to]) = (sum, (state as u8, (8 * bit) as u8 | code));
                }
            }
        }
        errors = after;
        path.push(steps);
    }
    (errors, path)
}

/// The squared error of the level of a subset that is nearest to `x`, and its number within the subset.
fn nearest(x: f32, sigma: f32, subset: usize) -> (f32, u8) {
    let mut best = (f32::INFINITY, 0);
    for number in 0..8 {
        let difference = x - sigma * level(4 * number + subset);
        let error = difference * difference;
        if error < best.0 {
            best = (error, number as u8);
        }
    }
    best
}
