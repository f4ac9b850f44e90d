//! Attention of one query row over the visible positions of its sequence, in the order of [`kernels::order::attend`].
//!
//! Keys of a page of positions are stored transposed (`[dim][position]`), so that one chain over the dimensions yields
//! the scores of 16 positions; values are stored as rows.
use std::ops::Range;

use kernels::cpu::rows::{exp, soft_cap, tree};
use kernels::cpu::simd::{Kernel, Simd};
use kernels::order::{self, LANES, POSITIONS};

use crate::kv_cache::{Cell, Half, HeadPages, PAGE};

/// Attention of the query heads that share one key head.
pub(crate) struct Attend<'a> {
    /// `heads · head_dim`, rotated and scaled.
    pub(crate) queries: &'a [f32],
    pub(crate) head_dim: usize,
    /// Keys and values of that head.
    pub(crate) pages: HeadPages<'a>,
    /// Visible positions; the row's own is the last.
    pub(crate) seen: Range<usize>,
    /// Soft cap of the scores, if the model has one.
    pub(crate) cap: Option<f32>,
    /// A score per head that takes part in the softmax, without a value.
    pub(crate) sinks: Option<&'a [f32]>,
    /// Scratch of at least [`scores_len`] numbers.
    pub(crate) scores: &'a mut [f32],
    /// `heads · head_dim`.
    pub(crate) out: &'a mut [f32],
}

/// Scratch numbers for a row whose visible positions lie below `end`.
pub(crate) fn scores_len(heads: usize, end: usize) -> usize {
    let blocks = end.div_ceil(POSITIONS);
    heads.min(HEADS_AT_ONCE) * blocks * (POSITIONS + 1)
}

/// Heads per pass: more would not fit the registers.
const HEADS_AT_ONCE: usize = 4;

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if self.pages.half() {
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
        assert!(self.scores.len() >= scores_len(self.queries.len() / size, self.seen.end), "room for scores");
        assert!(!self.seen.is_empty() && self.pages.positions() >= self.seen.end, "keys of every position");
        let mut sinks = self.sinks.unwrap_or_default();
        assert!(sinks.is_empty() || sinks.len() * size == self.queries.len(), "a sink per head");
        for (queries, out) in self.queries.chunks(each).zip(self.out.chunks_mut(each)) {
            let (here, others) = sinks.split_at(sinks.len().min(HEADS_AT_ONCE));
            sinks = others;
            let (pages, seen) = (&self.pages, self.seen.clone());
            let heads = Heads { queries, size, pages, seen, cap: self.cap, sinks: here };
            // SAFETY: shapes are checked above.
            unsafe {
                match queries.len() / size {
                    1 => heads.attend::<S, C, 1>(self.scores, out),
                    2 => heads.attend::<S, C, 2>(self.scores, out),
                    3 => heads.attend::<S, C, 3>(self.scores, out),
                    _ => heads.attend::<S, C, 4>(self.scores, out),
                }
            }
        }
    }
}

/// Heads computed in one pass.
struct Heads<'a> {
    queries: &'a [f32],
    size: usize,
    pages: &'a HeadPages<'a>,
    seen: Range<usize>,
    cap: Option<f32>,
    /// One per head, or none.
    sinks: &'a [f32],
}

impl Heads<'_> {
    /// Blocks of positions that are visible, at least in part.
    #[inline(always)]
    fn blocks(&self) -> Range<usize> {
        self.seen.start / POSITIONS..self.seen.end.div_ceil(POSITIONS)
    }

    /// Visible positions of a block.
    #[inline(always)]
    fn seen_of(&self, block: usize) -> Range<usize> {
        (block * POSITIONS).max(self.seen.start)..((block + 1) * POSITIONS).min(self.seen.end)
    }

    #[inline(always)]
    unsafe fn attend<S: Simd, C: Cell, const H: usize>(&self, scores: &mut [f32], out: &mut [f32]) {
        let stride = self.blocks().end * POSITIONS;
        let (scores, factors) = scores.split_at_mut(H * stride);
        // SAFETY: `Attend::heads` checked the shapes; pages exist for every visible position.
        unsafe {
            for page in self.seen.start / PAGE..self.seen.end.div_ceil(PAGE) {
                let at = scores.as_mut_ptr().add(page * PAGE);
                page_scores::<S, C, H>(self.queries, self.size, self.pages.keys(page), at, stride);
            }
            let mut inverses = [0.0; H];
            for (h, inverse) in inverses.iter_mut().enumerate() {
                let factors = &mut factors[h * self.blocks().end..][..self.blocks().end];
                let sink = self.sinks.get(h).copied();
                *inverse = self.weights::<S>(&mut scores[h * stride..][..stride], factors, sink);
            }
            let mut d = 0;
            while d + 64 <= self.size {
                self.values::<S, C, H, 4>(scores, factors, &inverses, out, d);
                d += 64;
            }
            while d < self.size {
                self.values::<S, C, H, 1>(scores, factors, &inverses, out, d);
                d += 16;
            }
        }
    }

    /// Block-wise softmax of one head: replaces scores by numerators relative to their block's maximum, zero where
    /// hidden; fills the blocks' `factors`; returns the reciprocal of the sum of all weights.
    #[inline(always)]
    unsafe fn weights<S: Simd>(&self, scores: &mut [f32], factors: &mut [f32], sink: Option<f32>) -> f32 {
        // SAFETY: the machine has `S`; blocks are whole vectors.
        unsafe {
            let mut sums = [0.0f32; 2]; // running sum of the blocks, and their largest score
            sums[1] = sink.unwrap_or(f32::NEG_INFINITY);
            for b in self.blocks() {
                let block = &mut scores[b * POSITIONS..][..POSITIONS];
                factors[b] = largest::<S>(block, self.within(b), self.cap);
                sums[1] = sums[1].max(factors[b]);
            }
            sums[0] = sink.map_or(0.0, |sink| order::exp(sink - sums[1]));
            for b in self.blocks() {
                let block = &mut scores[b * POSITIONS..][..POSITIONS];
                let sum = numerators::<S>(block, self.within(b), factors[b]);
                factors[b] = order::exp(factors[b] - sums[1]);
                sums[0] = sum.mul_add(factors[b], sums[0]);
            }
            order::reciprocal(sums[0])
        }
    }

    /// Visible positions of a block, relative to its first.
    #[inline(always)]
    fn within(&self, block: usize) -> Range<usize> {
        let seen = self.seen_of(block);
        seen.start - block * POSITIONS..seen.end - block * POSITIONS
    }

    /// Dimensions `d..d + 16 · V` of the weighted mean of the values.
    #[inline(always)]
    unsafe fn values<S: Simd, C: Cell, const H: usize, const V: usize>(
        &self,
        weights: &[f32],
        factors: &[f32],
        inverses: &[f32; H],
        out: &mut [f32],
        d: usize,
    ) {
        let (size, blocks) = (self.size, self.blocks().end);
        // SAFETY: rows of values are padded to whole vectors; weights have one number per position and head.
        unsafe {
            let mut means = [[S::splat(0.0); V]; H];
            for b in self.blocks() {
                let mut sums = [[S::splat(0.0); V]; H];
                for position in self.seen_of(b) {
                    let (values, row_bytes) = self.pages.values(position / PAGE);
                    let row = values.add(position % PAGE * row_bytes + d * C::BYTES);
                    let mut value = [S::splat(0.0); V];
                    for (v, value) in value.iter_mut().enumerate() {
                        *value = C::load::<S>(row.add(16 * v * C::BYTES));
                    }
                    for (h, sums) in sums.iter_mut().enumerate() {
                        let weight = S::splat(*weights.get_unchecked(h * blocks * POSITIONS + position));
                        for (sum, value) in sums.iter_mut().zip(value) {
                            *sum = S::fma(weight, value, *sum);
                        }
                    }
                }
                for (h, (means, sums)) in means.iter_mut().zip(sums).enumerate() {
                    let factor = S::splat(*factors.get_unchecked(h * blocks + b));
                    for (mean, sum) in means.iter_mut().zip(sums) {
                        *mean = S::fma(sum, factor, *mean);
                    }
                }
            }
            for (h, means) in means.into_iter().enumerate() {
                for (v, mean) in means.into_iter().enumerate() {
                    let mean = S::mul(mean, S::splat(inverses[h]));
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
}

/// Caps the scores of a block, masks hidden positions with -∞, and returns the largest score.
#[inline(always)]
unsafe fn largest<S: Simd>(scores: &mut [f32], seen: Range<usize>, cap: Option<f32>) -> f32 {
    // SAFETY: a block is whole vectors.
    unsafe {
        if let Some(cap) = cap {
            for v in scores[seen.start / 16 * 16..seen.end.next_multiple_of(16)].chunks_exact_mut(16) {
                S::store(soft_cap::<S>(S::load(v.as_ptr()), cap), v.as_mut_ptr());
            }
        }
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);
        let mut largest = S::splat(f32::NEG_INFINITY);
        for v in scores.chunks_exact(16) {
            largest = S::max(largest, S::load(v.as_ptr()));
        }
        S::max_lane(largest)
    }
}

/// Replaces the scores of a block by e^(score - largest), zero where hidden. Returns their sum.
#[inline(always)]
unsafe fn numerators<S: Simd>(scores: &mut [f32], seen: Range<usize>, largest: f32) -> f32 {
    // SAFETY: a block is whole vectors.
    unsafe {
        let largest = S::splat(largest);
        for v in scores.chunks_exact_mut(16) {
            S::store(exp::<S>(S::sub(S::load(v.as_ptr()), largest)), v.as_mut_ptr());
        }
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let mut lanes = [S::splat(0.0); LANES / 16];
        for both in scores.chunks_exact(LANES) {
            lanes = [S::add(lanes[0], S::load(both.as_ptr())), S::add(lanes[1], S::load(both[16..].as_ptr()))];
        }
        tree::<S>(lanes)
    }
}

/// Scores of one page of positions for `H` heads.
#[inline(always)]
unsafe fn page_scores<S: Simd, C: Cell, const H: usize>(
    queries: &[f32],
    size: usize,
    keys: *const u8,
    scores: *mut f32,
    stride: usize,
) {
    // SAFETY: a page has `size` rows of `PAGE` keys; the scores have room for `PAGE` at each stride.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; H];
        for d in 0..size {
            let row = keys.add(d * PAGE * C::BYTES);
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

#[cfg(test)]
mod tests;
