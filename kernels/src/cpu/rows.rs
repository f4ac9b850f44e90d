//! Row kernels: RMSNorm, gated activations and rotary embedding, in the order of [`crate::order`].
use super::activations::{Block, Quantise};
use super::simd::{Kernel, Simd};
use crate::order::{
    Activation, CHUNKS, CLAMPED, EXP, EXP_MAX, GELU, LANES, LN_2, RECIPROCAL_GUESS, ROUND, chunk, rms_factor, rotate,
};

/// [`crate::order::exp`] of 16 numbers.
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's contract: the machine has `S`.
    unsafe {
        let x = S::min(S::splat(EXP_MAX), S::max(S::splat(-EXP_MAX), x)); // this operand order propagates NaN
        let t = S::fma(x, S::splat(std::f32::consts::LOG2_E), S::splat(ROUND));
        let n = S::sub(t, S::splat(ROUND));
        let r = S::fma(n, S::splat(LN_2[1]), S::fma(n, S::splat(LN_2[0]), x));
        let mut p = S::splat(EXP[0]);
        for c in &EXP[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        S::scale_pow2(p, t)
    }
}

/// [`crate::order::reciprocal`] of 16 numbers.
#[inline(always)]
unsafe fn reciprocal<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        let (one, minus) = (S::splat(1.0), S::sub(S::splat(0.0), x));
        let mut y = S::reflect(RECIPROCAL_GUESS, x);
        for _ in 0..4 {
            y = S::fma(y, S::fma(minus, y, one), y);
        }
        y
    }
}

/// [`crate::order::sigmoid`] of 16 numbers.
#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's contract.
    unsafe { reciprocal::<S>(S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), x)))) }
}

/// [`crate::order::soft_cap`] of 16 numbers.
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn soft_cap<S: Simd>(x: S::F, cap: f32) -> S::F {
    // SAFETY: the caller's contract.
    unsafe { S::fma(sigmoid::<S>(S::mul(x, S::splat(2.0 / cap))), S::splat(2.0 * cap), S::splat(-cap)) }
}

/// hidden += delta, then x = hidden / rms(hidden) · weight.
pub struct NormRow<'a> {
    /// A row of the residual stream.
    pub hidden: &'a mut [f32],
    /// Added to `hidden`; may be empty.
    pub delta: &'a [f32],
    /// Weights of the norm.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// At least as long as `hidden`.
    pub x: &'a mut [f32],
    /// Receives `x` as integers; empty if not needed.
    pub blocks: &'a mut [Block],
}

impl Kernel for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let width = self.hidden.len();
        if !self.delta.is_empty() {
            self.hidden.iter_mut().zip(self.delta).for_each(|(h, d)| *h += d);
        }
        // SAFETY: the machine has `S`.
        let scale = unsafe { inverse_rms::<S>(self.hidden, self.eps) };
        for ((x, h), w) in self.x.iter_mut().zip(&*self.hidden).zip(self.weight) {
            *x = h * scale * w;
        }
        if !self.blocks.is_empty() {
            // SAFETY: the machine has `S`.
            unsafe { Quantise { floats: &self.x[..width], blocks: self.blocks }.run::<S>() }
        }
    }
}

/// The factor that RMSNorm multiplies a row by.
#[inline(always)]
unsafe fn inverse_rms<S: Simd>(row: &[f32], eps: f32) -> f32 {
    // SAFETY: the caller's contract; lanes beyond the row are not touched.
    unsafe {
        let mut sum = 0.0;
        for index in 0..CHUNKS {
            let mut lanes = [S::splat(0.0); LANES / 16];
            for chunk in row[chunk(row.len(), index)].chunks(LANES) {
                let (near, far) = chunk.split_at(chunk.len().min(16));
                let v = [S::load_first(near.as_ptr(), near.len()), S::load_first(far.as_ptr(), far.len())];
                lanes = [S::fma(v[0], v[0], lanes[0]), S::fma(v[1], v[1], lanes[1])];
            }
            sum += tree::<S>(lanes);
        }
        rms_factor(sum, row.len(), eps)
    }
}

/// [`crate::order::butterfly_sum`].
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn tree<S: Simd>(lanes: [S::F; LANES / 16]) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let zero = S::splat(0.0);
        S::sum4([S::add(lanes[0], lanes[1]), zero, zero, zero])[0]
    }
}

/// In-place RMSNorm of each head of a row.
pub struct NormHeads<'a> {
    /// Whole heads of `weight.len()` each.
    pub row: &'a mut [f32],
    /// Weights of the norm.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

impl Kernel for NormHeads<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for head in self.row.chunks_exact_mut(self.weight.len()) {
            // SAFETY: the machine has `S`.
            let scale = unsafe { inverse_rms::<S>(head, self.eps) };
            head.iter_mut().zip(self.weight).for_each(|(h, w)| *h = *h * scale * w);
        }
    }
}

/// x = activation(gate) · up.
pub struct GateRow<'a> {
    /// The function of the gate.
    pub activation: Activation,
    /// Gates.
    pub gate: &'a [f32],
    /// Factors.
    pub up: &'a [f32],
    /// Padded to whole vectors.
    pub x: &'a mut [f32],
    /// Receives `x` as integers; empty if not needed.
    pub blocks: &'a mut [Block],
}

impl Kernel for GateRow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let width = self.gate.len();
        assert!(self.up.len() == width && self.x.len() >= width.next_multiple_of(16), "shapes of a gated row");
        for i in (0..width).step_by(16) {
            let here = (width - i).min(16);
            // SAFETY: lanes beyond the rows are not read, and `x` has room for them (they are zero).
            unsafe {
                let gate = S::load_first(self.gate.as_ptr().add(i), here);
                let up = S::load_first(self.up.as_ptr().add(i), here);
                let (gate, argument, up) = match self.activation {
                    Activation::Silu => (gate, gate, up),
                    Activation::Gelu => {
                        let inner = S::fma(S::mul(gate, gate), S::splat(GELU[1]), S::splat(GELU[0]));
                        (gate, S::mul(gate, inner), up)
                    }
                    // This operand order propagates NaN.
                    Activation::Clamped => {
                        let limit = S::splat(CLAMPED[1]);
                        let gate = S::min(limit, gate);
                        let up = S::min(limit, S::max(S::splat(-CLAMPED[1]), up));
                        (gate, S::mul(gate, S::splat(CLAMPED[0])), S::add(up, S::splat(1.0)))
                    }
                };
                S::store(S::mul(S::mul(gate, sigmoid::<S>(argument)), up), self.x.as_mut_ptr().add(i));
            }
        }
        if !self.blocks.is_empty() {
            // SAFETY: the machine has `S`.
            unsafe { Quantise { floats: &self.x[..width], blocks: self.blocks }.run::<S>() }
        }
    }
}

/// Turns scores into e^(score - largest score); the result is their sum, in the order of [`crate::order::experts::route`].
pub struct Shares<'a> {
    /// Scores of the experts.
    pub scores: &'a mut [f32],
}

impl Kernel for Shares<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let largest = self.scores.iter().fold(f32::NEG_INFINITY, |largest, score| largest.max(*score));
        let mut lanes = [[0.0f32; 16]; LANES / 16];
        for (index, scores) in self.scores.chunks_mut(16).enumerate() {
            let mut shares = [0.0f32; 16];
            // SAFETY: the machine has `S`; lanes beyond the scores are not read.
            unsafe {
                let x = S::load_first(scores.as_ptr(), scores.len());
                S::store(exp::<S>(S::sub(x, S::splat(largest))), shares.as_mut_ptr());
            }
            for ((lane, score), share) in lanes[index % (LANES / 16)].iter_mut().zip(scores).zip(shares) {
                *lane += share;
                *score = share;
            }
        }
        // SAFETY: the machine has `S`; each load reads 16 numbers.
        unsafe { tree::<S>(lanes.map(|lanes| S::load_first(lanes.as_ptr(), 16))) }
    }
}

/// Turns each number into its sigmoid ([`crate::order::sigmoid`]).
pub struct Sigmoids<'a> {
    /// The numbers.
    pub numbers: &'a mut [f32],
}

impl Kernel for Sigmoids<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for part in self.numbers.chunks_mut(16) {
            let mut lanes = [0.0f32; 16];
            // SAFETY: the machine has `S`; lanes beyond the numbers are not read.
            unsafe { S::store(sigmoid::<S>(S::load_first(part.as_ptr(), part.len())), lanes.as_mut_ptr()) }
            part.copy_from_slice(&lanes[..part.len()]);
        }
    }
}

/// The sum of rows times their factors ([`crate::order::experts::combine`]).
pub struct Combine<'a> {
    /// Factors and rows, each as long as `out`.
    pub parts: &'a [(f32, &'a [f32])],
    /// The sum.
    pub out: &'a mut [f32],
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        self.out.fill(0.0);
        for (factor, row) in self.parts {
            self.out.iter_mut().zip(*row).for_each(|(sum, x)| *sum = factor.mul_add(*x, *sum));
        }
    }
}

/// Rotary embedding: rotates the first `2 · cos.len()` elements of each head by the angles of a position.
pub struct RotateHeads<'a> {
    /// Whole heads.
    pub row: &'a mut [f32],
    /// Elements per head.
    pub head_dim: usize,
    /// Whether pairs are (i, i + pairs) instead of (2i, 2i + 1).
    pub halves: bool,
    /// Cosines, one per pair.
    pub cos: &'a [f32],
    /// Sines, one per pair.
    pub sin: &'a [f32],
    /// Factor applied after the rotation: the attention scale for queries, 1 for keys.
    pub scale: f32,
}

impl Kernel for RotateHeads<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let pairs = self.cos.len();
        for head in self.row.chunks_exact_mut(self.head_dim) {
            let (turning, _) = head.split_at_mut(2 * pairs);
            if self.halves {
                let (a, b) = turning.split_at_mut(pairs);
                for (((a, b), &c), &s) in a.iter_mut().zip(b).zip(self.cos).zip(self.sin) {
                    (*a, *b) = rotate(*a, *b, c, s);
                }
            } else {
                for ((pair, &c), &s) in turning.chunks_exact_mut(2).zip(self.cos).zip(self.sin) {
                    (pair[0], pair[1]) = rotate(pair[0], pair[1], c, s);
                }
            }
            if self.scale != 1.0 {
                head.iter_mut().for_each(|v| *v *= self.scale);
            }
        }
    }
}

#[cfg(test)]
mod tests;
