//! What is done to one row at a time: RMSNorm, SwiGLU, rotary embedding.
use super::activations::{Group, Quantise};
use super::simd::{Kernel, ROUND, Simd};

/// e^x by range reduction and a polynomial; relative error below 2e-7 within ±87, clamped beyond.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's contract: the machine has `S`.
    unsafe {
        let x = S::min(S::max(x, S::splat(-87.0)), S::splat(88.0));
        let t = S::fma(x, S::splat(std::f32::consts::LOG2_E), S::splat(ROUND));
        let n = S::sub(t, S::splat(ROUND));
        let r = S::fma(n, S::splat(-0.693_359_4), x); // ln 2, its first bits: 0.693359375
        let r = S::fma(n, S::splat(2.121_944_4e-4), r); // and the rest
        let mut p = S::splat(1.987_569_2e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0] {
            p = S::fma(p, r, S::splat(c));
        }
        S::scale_pow2(p, t)
    }
}

/// hidden += delta, then x = hidden / rms(hidden) · weight.
pub(crate) struct NormRow<'a> {
    pub(crate) hidden: &'a mut [f32],
    /// Empty: nothing is added.
    pub(crate) delta: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    /// At least as long as `hidden`.
    pub(crate) x: &'a mut [f32],
    /// Where `x` goes as integers; empty if not wanted.
    pub(crate) groups: &'a mut [Group],
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
        if !self.groups.is_empty() {
            // SAFETY: the machine has `S`.
            unsafe { Quantise { floats: &self.x[..width], groups: self.groups }.run::<S>() }
        }
    }
}

/// 1 / sqrt(mean of squares + eps).
#[inline(always)]
unsafe fn inverse_rms<S: Simd>(row: &[f32], eps: f32) -> f32 {
    // SAFETY: the caller's contract; lanes beyond the row are not touched.
    unsafe {
        let mut squares = [S::splat(0.0); 4];
        for (i, chunk) in row.chunks(16).enumerate() {
            let v = S::load_first(chunk.as_ptr(), chunk.len());
            squares[i % 4] = S::fma(v, v, squares[i % 4]);
        }
        let [a, b, c, d] = S::sum4(squares);
        1.0 / (((a + c) + (b + d)) / row.len() as f32 + eps).sqrt()
    }
}

/// RMSNorm of each head of a row, in place.
pub(crate) struct NormHeads<'a> {
    /// Whole heads of `weight.len()` each.
    pub(crate) row: &'a mut [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
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

/// x = gate · sigmoid(gate) · up.
pub(crate) struct SwigluRow<'a> {
    pub(crate) gate: &'a [f32],
    pub(crate) up: &'a [f32],
    /// Padded to whole vectors.
    pub(crate) x: &'a mut [f32],
    /// Where `x` goes as integers; empty if not wanted.
    pub(crate) groups: &'a mut [Group],
}

impl Kernel for SwigluRow<'_> {
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
                let one = S::splat(1.0);
                let below = S::add(one, exp::<S>(S::sub(S::splat(0.0), gate)));
                S::store(S::mul(S::div(gate, below), up), self.x.as_mut_ptr().add(i));
            }
        }
        if !self.groups.is_empty() {
            // SAFETY: the machine has `S`.
            unsafe { Quantise { floats: &self.x[..width], groups: self.groups }.run::<S>() }
        }
    }
}

/// Turns the first `2 · cos.len()` elements of each head by the angles of a position.
pub(crate) struct RotateHeads<'a> {
    /// Whole heads.
    pub(crate) row: &'a mut [f32],
    pub(crate) head_dim: usize,
    /// Pairs are (i, i + pairs) instead of (2i, 2i + 1).
    pub(crate) halves: bool,
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    /// Multiplied in afterwards: the scale of attention for queries, 1 for keys.
    pub(crate) scale: f32,
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
                    (*a, *b) = turn(*a, *b, c, s);
                }
            } else {
                for ((pair, &c), &s) in turning.chunks_exact_mut(2).zip(self.cos).zip(self.sin) {
                    (pair[0], pair[1]) = turn(pair[0], pair[1], c, s);
                }
            }
            if self.scale != 1.0 {
                head.iter_mut().for_each(|v| *v *= self.scale);
            }
        }
    }
}

#[inline(always)]
fn turn(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos))
}

#[cfg(test)]
mod tests;
