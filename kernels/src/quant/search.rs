//! Quantises weights to four bits, as Q4_Z, with the least squared error that a search finds.
//!
//! A block's codes follow from its scale and minimum, and the best scale and minimum for given codes are a linear least-squares
//! problem. So the search alternates between the two, from several starting scales, as ggml's `make_qkx2_quants` does. It differs in
//! three ways: the error is not weighted; every start is refined several times; and the scales and zeros next to the result, which
//! have few bits, are compared by their error.
//!
//! All operations are f32 without fusing, so every instruction set gives the same blocks.
use half::f16;

use super::{BLOCK, scale_and_zero};
use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};

/// Quantises whole blocks of finite weights to [`QuantType::Q4Z`](super::QuantType::Q4Z).
///
/// # Panics
/// If `weights` is not a whole number of blocks.
#[must_use]
pub fn q4_z(isa: Isa, weights: &[f32]) -> Vec<u8> {
    let (blocks, rest) = weights.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "{} weights are not whole blocks", weights.len());
    let mut out = vec![0; blocks.len() * BYTES];
    // SAFETY: the instruction set was detected; the kernel has no contract of its own.
    unsafe { isa.run(Search { blocks, out: &mut out }) };
    out
}

/// Bytes of a block.
const BYTES: usize = 2 + BLOCK / 2;

struct Search<'a> {
    blocks: &'a [Group],
    out: &'a mut [u8],
}

impl Kernel for Search<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (weights, out) in self.blocks.iter().zip(self.out.chunks_exact_mut(BYTES)) {
            block(weights, out);
        }
    }
}

type Group = [f32; BLOCK];

/// Lanes of a sum: the compiler makes vectors of them.
const LANES: usize = BLOCK / 2;

/// The sum of a function of each index of a group, in [`LANES`] partial sums.
#[inline(always)]
fn sum(term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane = term(i) + term(i + LANES);
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Rounds a number of 0 to 127 to an integer, ties to even: the sum has no bits for fractions.
#[inline(always)]
fn round(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23
    (x + SHIFT) - SHIFT
}

/// Codes of four bits, as numbers, for `scale · code - minimum`.
#[inline(always)]
fn codes(weights: &Group, scale: f32, minimum: f32) -> Group {
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut codes = [0.0; BLOCK];
    for i in 0..BLOCK {
        codes[i] = round(((weights[i] + minimum) * inverse).clamp(0.0, 15.0));
    }
    codes
}

#[inline(always)]
fn error(weights: &Group, codes: &Group, scale: f32, minimum: f32) -> f32 {
    sum(|i| {
        let off = weights[i] - (codes[i] * scale - minimum);
        off * off
    })
}

/// Steps between the least and the greatest weight at which the search starts. With 15 the codes just span them; more clip the
/// greatest.
const STARTS: [f32; 14] = [12.0, 12.7, 13.4, 14.0, 14.6, 15.2, 15.8, 16.4, 17.0, 17.7, 18.4, 19.2, 20.0, 21.0];
/// Refinements of each start.
const REFINEMENTS: usize = 3;

/// The scale and the minimum of a group that give the least error; neither is negative.
#[inline(always)]
fn affine(weights: &Group) -> (f32, f32) {
    let least = weights.iter().fold(0.0f32, |least, w| least.min(*w));
    let greatest = weights.iter().fold(0.0f32, |greatest, w| greatest.max(*w));
    let mut best = (0.0, 0.0, f32::INFINITY);
    for steps in STARTS {
        let (mut scale, mut minimum) = ((greatest - least) / steps, -least);
        for _ in 0..=REFINEMENTS {
            let q = codes(weights, scale, minimum);
            let error = error(weights, &q, scale, minimum);
            if error < best.2 {
                best = (scale, minimum, error);
            }
            let (q1, q2) = (sum(|i| q[i]), sum(|i| q[i] * q[i]));
            let (w, qw) = (sum(|i| weights[i]), sum(|i| q[i] * weights[i]));
            let n = BLOCK as f32;
            let determinant = n * q2 - q1 * q1;
            if determinant <= 0.0 {
                break; // all codes are equal
            }
            scale = (n * qw - q1 * w) / determinant;
            minimum = (scale * q1 - w) / n;
            if minimum < 0.0 {
                (scale, minimum) = (qw / q2, 0.0);
            }
            if scale <= 0.0 {
                break;
            }
        }
    }
    (best.0, best.1)
}

/// Searches the scale and the zero among those next to the best real numbers.
#[inline(always)]
fn block(weights: &Group, out: &mut [u8]) {
    let (wanted, minimum) = affine(weights);
    let wanted = f16::from_f32(wanted);
    let near = wanted.to_bits() >> 6;
    if wanted.is_infinite() {
        out[..2].copy_from_slice(&(near << 7).to_le_bytes()); // tiles reject it
        return;
    }
    let mut best = (0u16, f32::INFINITY);
    for scale_bits in [near, near.saturating_sub(1), near + 1, near + 2] {
        let scale = scale_and_zero(scale_bits << 7).0.to_f32();
        if scale == 0.0 || !scale.is_finite() {
            continue;
        }
        let q = codes(weights, scale, minimum);
        // The zero with the least error for these codes.
        let fitted = sum(|i| q[i] - weights[i] / scale) / BLOCK as f32;
        for zero in [minimum / scale, fitted] {
            let nearest = round_zero(8.0 * zero);
            for eighths in [nearest, nearest - 1.0, nearest + 1.0] {
                let eighths = eighths.clamp(0.0, ZERO_MAX);
                let minimum = scale * (eighths / 8.0);
                let error = error(weights, &codes(weights, scale, minimum), scale, minimum);
                if error < best.1 {
                    best = (scale_bits << 7 | eighths as u16, error);
                }
            }
        }
    }
    out[..2].copy_from_slice(&best.0.to_le_bytes());
    let (scale, zero) = scale_and_zero(best.0);
    let codes = codes(weights, scale.to_f32(), scale.to_f32() * zero);
    for (j, byte) in out[2..].iter_mut().enumerate() {
        *byte = codes[j] as u8 | (codes[BLOCK / 2 + j] as u8) << 4;
    }
}

/// The greatest zero, in eighths of a code.
const ZERO_MAX: f32 = 127.0;

#[inline(always)]
fn round_zero(eighths: f32) -> f32 {
    round(eighths.clamp(0.0, ZERO_MAX))
}

#[cfg(test)]
mod tests;
