//! Attention of one query row over the keys and values of its sequence, from position 0 to its own.
//!
//! Keys of a block of positions lie transposed (`[dim][position]`), so that scores of 16 positions come out of one chain
//! over the dimensions; values lie as rows. A score sums over dimensions in order, a result over positions in order: what
//! a row gets depends on its position only.
use super::rows::exp;
use super::simd::{Kernel, Simd};
use crate::kv_cache::{BLOCK, Cell, Half, HeadBlocks};

/// Queries of the heads that share one key head.
pub(crate) struct Attend<'a> {
    /// `heads · head_dim`, rotated and scaled.
    pub(crate) queries: &'a [f32],
    pub(crate) head_dim: usize,
    /// Their keys and values.
    pub(crate) blocks: HeadBlocks<'a>,
    /// Position of the row: positions up to it are seen.
    pub(crate) position: usize,
    /// Working memory; see [`scores_len`].
    pub(crate) scores: &'a mut [f32],
    /// `heads · head_dim`.
    pub(crate) out: &'a mut [f32],
}

/// Numbers of working memory that a row needs.
pub(crate) fn scores_len(heads: usize, position: usize) -> usize {
    heads.min(HEADS_AT_ONCE) * (position + 1).next_multiple_of(BLOCK)
}

/// More would not fit the registers.
const HEADS_AT_ONCE: usize = 4;

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if self.blocks.half() {
            // SAFETY: the machine has `S`.
            unsafe { self.heads::<S, Half>() }
        } else {
            // SAFETY: the machine has `S`.
            unsafe { self.heads::<S, f32>() }
        }
    }
}

impl Attend<'_> {
    #[inline(always)]
    unsafe fn heads<S: Simd, C: Cell>(self) {
        let size = self.head_dim;
        let each = HEADS_AT_ONCE * size;
        assert!(self.queries.len() == self.out.len() && self.queries.len().is_multiple_of(size), "shapes of attention");
        assert!(self.scores.len() >= scores_len(self.queries.len() / size, self.position), "room for scores");
        assert!(self.blocks.positions() > self.position, "keys of every position");
        for (queries, out) in self.queries.chunks(each).zip(self.out.chunks_mut(each)) {
            let (blocks, position, scores) = (&self.blocks, self.position, &mut *self.scores);
            // SAFETY: shapes are checked above.
            unsafe {
                match queries.len() / size {
                    1 => some_heads::<S, C, 1>(queries, size, blocks, position, scores, out),
                    2 => some_heads::<S, C, 2>(queries, size, blocks, position, scores, out),
                    3 => some_heads::<S, C, 3>(queries, size, blocks, position, scores, out),
                    _ => some_heads::<S, C, 4>(queries, size, blocks, position, scores, out),
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn some_heads<S: Simd, C: Cell, const H: usize>(
    queries: &[f32],
    size: usize,
    blocks: &HeadBlocks<'_>,
    position: usize,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let stride = (position + 1).next_multiple_of(BLOCK);
    // SAFETY: `Attend::heads` checked the shapes.
    unsafe {
        for b in 0..stride / BLOCK {
            block_scores::<S, C, H>(queries, size, blocks.keys(b), scores.as_mut_ptr().add(b * BLOCK), stride);
        }
        let mut sums = [0.0; H];
        for (h, sum) in sums.iter_mut().enumerate() {
            *sum = softmax_numerators::<S>(&mut scores[h * stride..][..stride], position + 1);
        }
        let mut d = 0;
        while d + 64 <= size {
            weighted_values::<S, C, H, 4>(scores, stride, blocks, position, &sums, out, size, d);
            d += 64;
        }
        while d < size {
            weighted_values::<S, C, H, 1>(scores, stride, blocks, position, &sums, out, size, d);
            d += 16;
        }
    }
}

/// Scores of one block of positions for `H` heads.
#[inline(always)]
unsafe fn block_scores<S: Simd, C: Cell, const H: usize>(
    queries: &[f32],
    size: usize,
    keys: *const u8,
    scores: *mut f32,
    stride: usize,
) {
    // SAFETY: a block has `size` rows of `BLOCK` keys; the scores have room for `BLOCK` at each stride.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; H];
        for d in 0..size {
            let row = keys.add(d * BLOCK * C::BYTES);
            let (near, far) = (C::load::<S>(row), C::load::<S>(row.add(16 * C::BYTES)));
            for (h, sums) in sums.iter_mut().enumerate() {
                let q = S::splat(*queries.get_unchecked(h * size + d));
                sums[0] = S::fma(q, near, sums[0]);
                sums[1] = S::fma(q, far, sums[1]);
            }
        }
        for (h, [near, far]) in sums.into_iter().enumerate() {
            S::store(near, scores.add(h * stride));
            S::store(far, scores.add(h * stride + 16));
        }
    }
}

/// Scores to e^(score - largest); those from `seen` on to zero. Returns the sum.
#[inline(always)]
unsafe fn softmax_numerators<S: Simd>(scores: &mut [f32], seen: usize) -> f32 {
    // SAFETY: the length is a whole number of vectors.
    unsafe {
        scores[seen..].fill(f32::NEG_INFINITY);
        let mut largest = S::splat(f32::NEG_INFINITY);
        for v in scores.chunks_exact(16) {
            largest = S::max(largest, S::load(v.as_ptr()));
        }
        let largest = S::splat(S::max_lane(largest));
        for v in scores.chunks_exact_mut(16) {
            let e = exp::<S>(S::sub(S::load(v.as_ptr()), largest));
            S::store(e, v.as_mut_ptr());
        }
        scores[seen..].fill(0.0);
        let zero = S::splat(0.0);
        let mut sum = zero;
        for v in scores.chunks_exact(16) {
            sum = S::add(sum, S::load(v.as_ptr()));
        }
        S::sum4([sum, zero, zero, zero])[0]
    }
}

/// Dimensions `d..d + 16 · V` of the weighted mean of the values.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn weighted_values<S: Simd, C: Cell, const H: usize, const V: usize>(
    weights: &[f32],
    stride: usize,
    blocks: &HeadBlocks<'_>,
    position: usize,
    sums: &[f32; H],
    out: &mut [f32],
    size: usize,
    d: usize,
) {
    // SAFETY: rows of values are padded to whole vectors; weights have one number per position and head.
    unsafe {
        let mut means = [[S::splat(0.0); V]; H];
        for b in 0..=position / BLOCK {
            let (values, row_bytes) = blocks.values(b);
            for t in 0..BLOCK.min(position + 1 - b * BLOCK) {
                let row = values.add(t * row_bytes + d * C::BYTES);
                let mut value = [S::splat(0.0); V];
                for (v, value) in value.iter_mut().enumerate() {
                    *value = C::load::<S>(row.add(16 * v * C::BYTES));
                }
                for (h, means) in means.iter_mut().enumerate() {
                    let weight = S::splat(*weights.get_unchecked(h * stride + b * BLOCK + t));
                    for (mean, value) in means.iter_mut().zip(value) {
                        *mean = S::fma(weight, value, *mean);
                    }
                }
            }
        }
        for (h, means) in means.into_iter().enumerate() {
            let inverse = S::splat(1.0 / sums[h]);
            for (v, mean) in means.into_iter().enumerate() {
                let mean = S::mul(mean, inverse);
                let from = d + 16 * v;
                if from + 16 <= size {
                    S::store(mean, out.as_mut_ptr().add(h * size + from));
                } else {
                    let mut lanes = [0.0; 16];
                    S::store(mean, lanes.as_mut_ptr());
                    out[h * size + from..(h + 1) * size].copy_from_slice(&lanes[..size - from]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
