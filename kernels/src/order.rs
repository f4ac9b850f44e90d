//! The reference order of every floating-point operation of a model, in plain Rust. All kernels must match these functions bit
//! for bit.
//!
//! A result depends on values and their places in a row, never on the number of rows, threads, lanes or devices that compute
//! it. Four rules guarantee that:
//!
//! - An inner product over [`BLOCK`] columns of integers is exact.
//! - A row of K columns is split into [`CHUNKS`] chunks of whole [`GROUP`]s ([`chunk`]). Within a chunk, one chain of fused
//!   multiply-adds runs over the columns in order; then the chunk sums are added in order. So any lane, thread block or rank
//!   can compute a chunk.
//! - Sums of squares use [`LANES`] partial sums per chunk, which a butterfly reduces ([`butterfly_sum`]).
//! - Attention runs over blocks of [`POSITIONS`] positions, counted from position 0; the blocks are combined in order.
//!
//! A non-finite number makes everything computed from it non-finite, through integers and exponentials too: it reaches the
//! logits, and the sampler rejects them. How it spreads may differ between devices.
//!
//! A device must provide only IEEE addition, multiplication and fused multiply-add in f32, rounded to nearest even. Division,
//! roots and exponentials are built from these here. No expression has the form `a * b + c`, which some compilers fuse.
//! Next: `tile.rs`.
use std::ops::Range;

pub mod experts;

/// Columns per exact integer sum; one activation scale each.
pub const BLOCK: usize = 32;
/// Columns of a weight tile. Chunks consist of whole groups.
pub const GROUP: usize = 64;
/// Chunks per row; their sums are added in order.
pub const CHUNKS: usize = 8;
/// Lanes (partial sums) for a sum of squares and for the weights of an attention block.
pub const LANES: usize = 32;
/// Positions per attention block.
pub const POSITIONS: usize = 128;

/// Columns of chunk `index` of a row of `cols`. The chunks partition the row in order; some chunks of a short row are empty.
#[inline]
#[must_use]
pub fn chunk(cols: usize, index: usize) -> Range<usize> {
    let groups = cols.div_ceil(GROUP);
    let bound = |index: usize| (index * groups / CHUNKS * GROUP).min(cols);
    bound(index)..bound(index + 1)
}

/// Activations quantised to 8 bits in blocks of 32. The scale of a block is its largest magnitude / 127.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// One per column, within ±127. Columns are padded with zeros to whole groups.
    pub codes: Vec<i8>,
    /// One per block; NaN if the block contains a non-finite number.
    pub scales: Vec<f32>,
}

/// Largest magnitude that is quantised to zero: the reciprocal of a smaller one would overflow.
pub const QUANTISE_MIN: f32 = 1e-30;

/// Quantises a row of activations, rounding to nearest even.
#[must_use]
pub fn quantise(row: &[f32]) -> Quantised {
    let padded = row.len().next_multiple_of(GROUP);
    let mut quantised = Quantised { codes: vec![0; padded], scales: vec![0.0; padded / BLOCK] };
    for (b, block) in row.chunks(BLOCK).enumerate() {
        let largest = block.iter().fold(0.0f32, |largest, x| if x.abs() > largest { x.abs() } else { largest });
        if !block.iter().all(|x| x.is_finite()) {
            quantised.scales[b] = f32::NAN;
        } else if largest > QUANTISE_MIN {
            let inverse = 127.0 * reciprocal(largest);
            quantised.scales[b] = largest * (1.0 / 127.0);
            for (code, x) in quantised.codes[b * BLOCK..].iter_mut().zip(block) {
                *code = (x * inverse).round_ties_even() as i8;
            }
        }
    }
    quantised
}

/// One block of a row of weights: `scale · (code - offset) + minimum`, with one scale per 16 columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightBlock {
    /// Unsigned codes.
    pub codes: [u8; BLOCK],
    /// Subtracted from each code.
    pub offset: i32,
    /// Scales of the first and the second half.
    pub scales: [f32; 2],
    /// Whether the halves have different scales, and so contribute one term each.
    pub split: bool,
    /// Added to each weight; `None` if the format has no minimum.
    pub minimum: Option<f32>,
}

impl WeightBlock {
    /// The weight of a column as f32, rounded once.
    #[must_use]
    pub fn weight(&self, column: usize) -> f32 {
        let code = (i32::from(self.codes[column]) - self.offset) as f32;
        code.mul_add(self.scales[2 * column / BLOCK], self.minimum.unwrap_or(0.0))
    }
}

/// Inner product of a row of weights with a row of quantised activations. Blocks at or after `cols` are not read.
#[must_use]
pub fn dot(weights: &[WeightBlock], x: &Quantised, cols: usize) -> f32 {
    in_chunks(cols, |columns| {
        let blocks = columns.start / BLOCK..columns.end.div_ceil(BLOCK);
        blocks.fold(0.0, |sum, b| block_dot(&weights[b], &x.codes[b * BLOCK..][..BLOCK], x.scales[b], sum))
    })
}

fn block_dot(w: &WeightBlock, codes: &[i8], scale: f32, sum: f32) -> f32 {
    let exact = |columns: Range<usize>| -> i32 {
        columns.map(|i| (i32::from(w.codes[i]) - w.offset) * i32::from(codes[i])).sum()
    };
    let term = |sum: f32, weight_scale: f32, dot: i32| (dot as f32).mul_add(weight_scale * scale, sum);
    let sum = if w.split {
        let first = term(sum, w.scales[0], exact(0..BLOCK / 2));
        term(first, w.scales[1], exact(BLOCK / 2..BLOCK))
    } else {
        term(sum, w.scales[0], exact(0..BLOCK))
    };
    let total: i32 = codes.iter().map(|&code| i32::from(code)).sum();
    w.minimum.map_or(sum, |minimum| minimum.mul_add(scale * total as f32, sum))
}

/// Inner product of f32 weights with f32 activations: one chain per chunk.
#[must_use]
pub fn dot_f32(weights: &[f32], x: &[f32]) -> f32 {
    in_chunks(x.len(), |columns| columns.fold(0.0, |sum, i| weights[i].mul_add(x[i], sum)))
}

/// Adds the sums of all chunks in order; the sum of an empty chunk is zero.
fn in_chunks(cols: usize, sum_of: impl Fn(Range<usize>) -> f32) -> f32 {
    (0..CHUNKS).fold(0.0, |sum, index| sum + sum_of(chunk(cols, index)))
}

/// Sum of squares of a row. Within a chunk, column i belongs to lane i mod [`LANES`].
#[must_use]
pub fn square_sum(row: &[f32]) -> f32 {
    in_chunks(row.len(), |columns| {
        let mut lanes = [0.0f32; LANES];
        columns.for_each(|i| lanes[i % LANES] = row[i].mul_add(row[i], lanes[i % LANES]));
        butterfly_sum(lanes)
    })
}

/// Butterfly reduction: adds lanes (i, i + 16), (i, i + 8), … (i, i + 1).
#[must_use]
pub fn butterfly_sum(mut lanes: [f32; LANES]) -> f32 {
    let mut apart = LANES / 2;
    while apart > 0 {
        for i in 0..apart {
            lanes[i] += lanes[i + apart];
        }
        apart /= 2;
    }
    lanes[0]
}

/// `x = row / rms(row) · weight`: (x · factor) · weight with factor = 1 / √(square sum · (1 / n) + eps).
#[must_use]
pub fn rms_norm(row: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let factor = rms_factor(square_sum(row), row.len(), eps);
    row.iter().zip(weight).map(|(x, w)| x * factor * w).collect()
}

/// The factor of RMSNorm for a row of `cols`: 1 / rms.
#[inline]
#[must_use]
pub fn rms_factor(square_sum: f32, cols: usize, eps: f32) -> f32 {
    inverse_sqrt(square_sum.mul_add(1.0 / cols as f32, eps))
}

/// Activation function of a gated feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x · sigmoid(x)
    Silu,
    /// The tanh form of GELU, which is x · sigmoid(2 √(2/π) (x + 0.044715 x³)).
    Gelu,
    /// gpt-oss: x · sigmoid(1.702 x) for x of at most 7; the factor is limited to ±7, plus 1.
    Clamped,
}

/// Constants of [`Activation::Clamped`]: the factor of the sigmoid's argument, and the limit (`swiglu` of gpt-oss's reference
/// implementation, 2025).
pub const CLAMPED: [f32; 2] = [1.702, 7.0];

/// Constants of GELU's tanh form: 2 √(2/π), and that times 0.044715 (Hendrycks and Gimpel, arXiv 1606.08415).
pub const GELU: [f32; 2] = [1.595_769_2, 0.071_354_814];

impl Activation {
    /// activation(gate) · up
    #[must_use]
    pub fn gate(self, gate: f32, up: f32) -> f32 {
        let argument = match self {
            Self::Silu => gate,
            Self::Gelu => gate * (gate * gate).mul_add(GELU[1], GELU[0]),
            Self::Clamped => {
                // NaN passes each comparison.
                let [factor, limit] = CLAMPED;
                let gate = if gate > limit { limit } else { gate };
                let up = if up < -limit { -limit } else { up };
                let up = if up > limit { limit } else { up };
                return gate * sigmoid(gate * factor) * (up + 1.0);
            }
        };
        gate * sigmoid(argument) * up
    }
}

/// 1 / (1 + e^-x)
#[inline]
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    reciprocal(1.0 + exp(-x))
}

/// cap · tanh(x / cap), as 2 cap · sigmoid(2 x / cap) - cap.
#[inline]
#[must_use]
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    sigmoid(x * (2.0 / cap)).mul_add(2.0 * cap, -cap)
}

/// Rotates a RoPE pair by an angle.
#[inline]
#[must_use]
pub fn rotate(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos))
}

/// Attention of one query over the positions `seen`. Keys and values are cache rows, indexed by position.
///
/// In each block of [`POSITIONS`]: scores are chains over the dimensions; their weights e^(score - block maximum) are summed by
/// lane (position mod [`LANES`]) and [`butterfly_sum`]; values are chains over the positions. The blocks are then combined in order by
/// e^(block maximum - overall maximum). A sink is one more score whose value is zero, before all blocks.
#[must_use]
pub fn attend(
    query: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    seen: Range<usize>,
    cap: Option<f32>,
    sink: Option<f32>,
) -> Vec<f32> {
    let blocks: Vec<AttendedBlock> = (seen.start / POSITIONS..seen.end.div_ceil(POSITIONS))
        .map(|b| {
            let positions = (b * POSITIONS).max(seen.start)..((b + 1) * POSITIONS).min(seen.end);
            attend_block(query, keys, values, positions, cap)
        })
        .collect();
    let largest = blocks.iter().fold(sink.unwrap_or(f32::NEG_INFINITY), |largest, block| largest.max(block.largest));
    let (mut sum, mut out) = (sink.map_or(0.0, |sink| exp(sink - largest)), vec![0.0f32; query.len()]);
    for block in &blocks {
        let factor = exp(block.largest - largest);
        sum = block.sum.mul_add(factor, sum);
        out.iter_mut().zip(&block.values).for_each(|(out, value)| *out = value.mul_add(factor, *out));
    }
    let inverse = reciprocal(sum);
    out.iter().map(|out| out * inverse).collect()
}

/// One attended block: the largest score, the sum of weights, the weighted sum of values.
struct AttendedBlock {
    largest: f32,
    sum: f32,
    values: Vec<f32>,
}

fn attend_block(
    query: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    positions: Range<usize>,
    cap: Option<f32>,
) -> AttendedBlock {
    let score = |position: usize| {
        let score = query.iter().zip(keys[position]).fold(0.0f32, |sum, (q, k)| q.mul_add(*k, sum));
        cap.map_or(score, |cap| soft_cap(score, cap))
    };
    let scores: Vec<f32> = positions.clone().map(score).collect();
    let largest = scores.iter().fold(f32::NEG_INFINITY, |largest, score| largest.max(*score));
    let (mut lanes, mut sums) = ([0.0f32; LANES], vec![0.0f32; query.len()]);
    for (position, score) in positions.zip(scores) {
        let weight = exp(score - largest);
        lanes[position % LANES] += weight;
        sums.iter_mut().zip(values[position]).for_each(|(sum, value)| *sum = weight.mul_add(*value, *sum));
    }
    AttendedBlock { largest, sum: butterfly_sum(lanes), values: sums }
}

/// 1 / x for normal x between 2^-125 and 2^125, within one unit in the last place: four Newton steps from a linear guess.
#[inline]
#[must_use]
pub fn reciprocal(x: f32) -> f32 {
    let mut y = f32::from_bits(RECIPROCAL_GUESS.wrapping_sub(x.to_bits()));
    for _ in 0..4 {
        y = y.mul_add((-x).mul_add(y, 1.0), y);
    }
    y
}

/// The bit pattern of 1 / x is about this minus the bit pattern of x: relative error at most 0.125 (Blinn, "Floating-Point
/// Tricks", 1997).
pub const RECIPROCAL_GUESS: u32 = 0x7ef3_11c7;

/// 1 / √x for normal positive x, within two units in the last place: four Newton steps.
#[inline]
#[must_use]
pub fn inverse_sqrt(x: f32) -> f32 {
    let half = 0.5 * x;
    let mut y = f32::from_bits(INVERSE_SQRT_GUESS.wrapping_sub(x.to_bits() >> 1));
    for _ in 0..4 {
        y *= (-(half * y)).mul_add(y, 1.5);
    }
    y
}

/// The bit pattern of 1 / √x is about this minus half that of x (Lomont, "Fast Inverse Square Root", 2003).
pub const INVERSE_SQRT_GUESS: u32 = 0x5f37_5a86;

/// e^x, relative error below 2e-7 for x in ±[`EXP_MAX`], clamped outside; NaN for NaN. x = n ln 2 + r, and a polynomial in r
/// (coefficients of Cephes `expf`).
#[inline]
#[must_use]
pub fn exp(x: f32) -> f32 {
    let x = if x < -EXP_MAX { -EXP_MAX } else { x };
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let t = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(LN_2[1], n.mul_add(LN_2[0], x));
    let p = EXP.iter().skip(1).fold(EXP[0], |p, c| p.mul_add(r, *c));
    p * f32::from_bits((t.to_bits() << 23).wrapping_add(1.0f32.to_bits()))
}

/// Keeps e^x and its reciprocal normal with room for the Newton steps: a device may flush subnormals to zero.
pub const EXP_MAX: f32 = 86.0;
/// Adding this to a number of small magnitude leaves its nearest integer in the low bits of the pattern.
pub const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
/// Minus ln 2, split into its leading bits (0.693359375) and the remainder.
pub const LN_2: [f32; 2] = [-0.693_359_4, 2.121_944_4e-4];
/// Polynomial coefficients of e^r, from the highest power down.
pub const EXP: [f32; 8] = [1.987_569_2e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0];

#[cfg(test)]
mod tests;
