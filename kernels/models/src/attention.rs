//! Attention of query rows over the visible positions of their sequence, in the order of [`kernels::order::attend`].
//!
//! Keys of a page of positions are stored transposed (`[dim][position]`), so that one chain over the dimensions yields
//! the scores of 16 positions; values are stored as rows. Queries that share a key head are computed together, also
//! those of several rows: each key and value is loaded and converted once for all of them.
use std::array;
use std::ops::Range;

use kernels::cpu::rows::{exp, soft_cap, tree};
use kernels::cpu::simd::{Kernel, Simd};
use kernels::order::{self, LANES, POSITIONS};

use crate::kv_cache::{Cell, Half, HeadPages, PAGE};

/// A row of queries.
pub(crate) struct QueryRow<'a> {
    /// The heads that share the key head: `heads · head_dim`, rotated and scaled.
    pub(crate) queries: &'a [f32],
    /// Visible positions; the row's own is the last.
    pub(crate) seen: Range<usize>,
    /// `heads · head_dim`.
    pub(crate) out: &'a mut [f32],
}

/// Attention of the query heads that share one key head.
pub(crate) struct Attend<'a, 'b> {
    /// Rows of one sequence.
    pub(crate) rows: &'a mut [QueryRow<'b>],
    pub(crate) head_dim: usize,
    /// Keys and values of that head.
    pub(crate) pages: HeadPages<'a>,
    /// Soft cap of the scores, if the model has one.
    pub(crate) cap: Option<f32>,
    /// A score per head that takes part in the softmax, without a value.
    pub(crate) sinks: Option<&'a [f32]>,
    /// Scratch of at least [`scratch_len`] numbers.
    pub(crate) scratch: &'a mut [f32],
}

/// Scratch numbers for `queries` heads of rows whose visible positions lie below `end`.
pub(crate) fn scratch_len(queries: usize, head_dim: usize, end: usize) -> usize {
    let blocks = end.div_ceil(POSITIONS);
    queries.min(QUERIES_MAX) * (head_dim + blocks * (POSITIONS + 1))
}

/// Most queries per pass over the cache: with 12, compilers no longer keep all sums in 32 registers.
pub(crate) const QUERIES_MAX: usize = 8;

/// Queries of the next pass over the cache, if this many are left.
#[inline(always)]
fn at_once<S: Simd>(left: usize) -> usize {
    let fits = |count: &usize| *count <= left && *count <= accumulators::<S>();
    [QUERIES_MAX, 6, 5, 4, 3, 2].into_iter().find(fits).unwrap_or(1)
}

/// Vectors that accumulate sums; the other registers hold what is multiplied.
#[inline(always)]
const fn accumulators<S: Simd>() -> usize {
    S::REGISTERS * 3 / 4
}

impl Kernel for Attend<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if self.pages.half() {
            // SAFETY: the machine has `S`.
            unsafe { self.cells::<S, Half>() }
        } else {
            // SAFETY: the machine has `S`.
            unsafe { self.cells::<S, f32>() }
        }
    }
}

impl Attend<'_, '_> {
    #[inline(always)]
    unsafe fn cells<S: Simd, C: Cell>(self) {
        let size = self.head_dim;
        let heads = self.rows.first().map_or(0, |row| row.queries.len() / size);
        for QueryRow { queries, seen, out } in self.rows.iter() {
            assert!(queries.len() == heads * size && out.len() == queries.len(), "shapes of attention");
            assert!(!seen.is_empty() && self.pages.positions() >= seen.end, "keys of every position");
        }
        let total = self.rows.len() * heads;
        let end = self.rows.iter().map(|row| row.seen.end).max().unwrap_or(0);
        assert!(self.scratch.len() >= scratch_len(total, size, end), "room for scores");
        assert!(self.sinks.is_none_or(|sinks| sinks.len() == heads), "a sink per head");
        let (mut first, pages, cap, sinks) = (0, &self.pages, self.cap, self.sinks);
        while first < total {
            let count = at_once::<S>(total - first);
            let group = Group { rows: &mut *self.rows, first, heads, size, pages, cap, sinks };
            // SAFETY: shapes are checked above.
            unsafe {
                match count {
                    1 => group.attend::<S, C, 1>(self.scratch),
                    2 => group.attend::<S, C, 2>(self.scratch),
                    3 => group.attend::<S, C, 3>(self.scratch),
                    4 if accumulators::<S>() >= 4 => group.attend::<S, C, 4>(self.scratch),
                    5 if accumulators::<S>() >= 5 => group.attend::<S, C, 5>(self.scratch),
                    6 if accumulators::<S>() >= 6 => group.attend::<S, C, 6>(self.scratch),
                    _ if accumulators::<S>() >= QUERIES_MAX => group.attend::<S, C, QUERIES_MAX>(self.scratch),
                    _ => unreachable!("{count} queries at once"),
                }
            }
            first += count;
        }
    }
}

/// Queries computed in one pass over the cache.
struct Group<'a, 'b> {
    rows: &'a mut [QueryRow<'b>],
    /// The first query, counted over the heads of all rows.
    first: usize,
    /// Heads per row.
    heads: usize,
    size: usize,
    pages: &'a HeadPages<'a>,
    cap: Option<f32>,
    /// One per head, or none.
    sinks: Option<&'a [f32]>,
}

impl Group<'_, '_> {
    /// Row and head of a query of the group.
    #[inline(always)]
    fn place(&self, query: usize) -> (usize, usize) {
        ((self.first + query) / self.heads, (self.first + query) % self.heads)
    }

    #[inline(always)]
    unsafe fn attend<S: Simd, C: Cell, const Q: usize>(mut self, scratch: &mut [f32]) {
        let size = self.size;
        let (queries, scratch) = scratch.split_at_mut(Q * size);
        for query in 0..Q {
            let (row, head) = self.place(query);
            let numbers = &self.rows[row].queries[head * size..(head + 1) * size];
            for (d, number) in numbers.iter().enumerate() {
                queries[d * Q + query] = *number;
            }
        }
        let seen: [Range<usize>; Q] = array::from_fn(|query| self.rows[self.place(query).0].seen.clone());
        let first = seen.iter().map(|seen| seen.start).min().unwrap_or(0);
        let end = seen.iter().map(|seen| seen.end).max().unwrap_or(0);
        let blocks = Blocks { first: first / POSITIONS, end: end.div_ceil(POSITIONS) };
        let (scores, factors) = scratch.split_at_mut(Q * (blocks.end - blocks.first) * POSITIONS);
        // SAFETY: `Attend::cells` checked the shapes; pages exist for every visible position.
        unsafe {
            for page in first / PAGE..end.div_ceil(PAGE) {
                let (block, within) = (page * PAGE / POSITIONS, page * PAGE % POSITIONS);
                let at = scores.as_mut_ptr().add((block - blocks.first) * Q * POSITIONS + within);
                page_scores::<S, C, Q>(queries, size, self.pages.keys(page), at);
            }
            let mut inverses = [0.0; Q];
            for (query, inverse) in inverses.iter_mut().enumerate() {
                let sink = self.sinks.map(|sinks| sinks[self.place(query).1]);
                *inverse = weights::<S, Q>(scores, factors, (query, blocks.first), &seen[query], (self.cap, sink));
            }
            let weights = Weights { scores, factors, inverses, seen, blocks };
            let mut d = 0;
            while accumulators::<S>() >= 4 * Q && d + 64 <= size {
                self.values::<S, C, Q, 4>(&weights, d);
                d += 64;
            }
            while accumulators::<S>() >= 2 * Q && d + 32 <= size {
                self.values::<S, C, Q, 2>(&weights, d);
                d += 32;
            }
            while d < size {
                self.values::<S, C, Q, 1>(&weights, d);
                d += 16;
            }
        }
    }

    /// Dimensions `d..d + 16 · V` of the weighted means of the values.
    #[inline(always)]
    unsafe fn values<S: Simd, C: Cell, const Q: usize, const V: usize>(&mut self, weights: &Weights<'_, Q>, d: usize) {
        let size = self.size;
        // SAFETY: rows of values are padded to whole vectors; weights have one number per position of a block and query.
        unsafe {
            let mut means = [[S::splat(0.0); V]; Q];
            for block in weights.blocks.first..weights.blocks.end {
                let at = (block - weights.blocks.first) * Q;
                let numerators = weights.scores.as_ptr().add(at * POSITIONS);
                let seen = seen_of(block, &weights.seen[0]);
                if !seen.is_empty() && weights.seen[1..].iter().all(|other| seen_of(block, other) == seen) {
                    let sums = block_sums::<S, C, Q, V>(self.pages, seen, numerators, d);
                    for (query, (means, sums)) in means.iter_mut().zip(sums).enumerate() {
                        add_block::<S, V>(means, sums, weights.factors[at + query]);
                    }
                    continue;
                }
                // The first and the last blocks, of which each row sees other positions.
                for (query, means) in means.iter_mut().enumerate() {
                    let seen = seen_of(block, &weights.seen[query]);
                    if !seen.is_empty() {
                        let numerators = numerators.add(query * POSITIONS);
                        let [sums] = block_sums::<S, C, 1, V>(self.pages, seen, numerators, d);
                        add_block::<S, V>(means, sums, weights.factors[at + query]);
                    }
                }
            }
            for (query, means) in means.into_iter().enumerate() {
                let (row, head) = self.place(query);
                let out = &mut self.rows[row].out[head * size..(head + 1) * size];
                for (v, mean) in means.into_iter().enumerate() {
                    let mean = S::mul(mean, S::splat(weights.inverses[query]));
                    let from = d + 16 * v;
                    if from + 16 <= size {
                        S::store(mean, out[from..].as_mut_ptr());
                    } else {
                        let mut lanes = [0.0; 16];
                        S::store(mean, lanes.as_mut_ptr());
                        out[from..].copy_from_slice(&lanes[..size - from]);
                    }
                }
            }
        }
    }
}

/// Blocks of positions that a query of a group sees, at least in part.
#[derive(Clone, Copy)]
struct Blocks {
    first: usize,
    end: usize,
}

/// Weights of a group's positions, before the division by their sums.
struct Weights<'a, const Q: usize> {
    /// `[block][query][position]`: e^(score - the block's largest), zero where hidden.
    scores: &'a [f32],
    /// `[block][query]`: e^(the block's largest - the largest of all).
    factors: &'a [f32],
    /// Reciprocals of the sums of all weights.
    inverses: [f32; Q],
    /// Visible positions.
    seen: [Range<usize>; Q],
    blocks: Blocks,
}

/// Visible positions of a block; empty if there are none.
#[inline(always)]
fn seen_of(block: usize, seen: &Range<usize>) -> Range<usize> {
    let start = (block * POSITIONS).max(seen.start);
    start..((block + 1) * POSITIONS).min(seen.end).max(start)
}

/// Block-wise softmax of one query of a group: replaces scores by numerators relative to their block's maximum, zero where
/// hidden; fills the blocks' `factors`; returns the reciprocal of the sum of all weights. `first`: the first block of `scores`.
#[inline(always)]
unsafe fn weights<S: Simd, const Q: usize>(
    scores: &mut [f32],
    factors: &mut [f32],
    (query, first): (usize, usize),
    seen: &Range<usize>,
    (cap, sink): (Option<f32>, Option<f32>),
) -> f32 {
    let blocks = seen.start / POSITIONS..seen.end.div_ceil(POSITIONS);
    // Of a block: its place in `factors`, and its visible positions, relative to its first.
    let place = |block: usize| {
        let (seen, start) = (seen_of(block, seen), block * POSITIONS);
        ((block - first) * Q + query, seen.start - start..seen.end - start)
    };
    // SAFETY: the machine has `S`; blocks are whole vectors.
    unsafe {
        let mut largest_of_all = sink.unwrap_or(f32::NEG_INFINITY);
        for block in blocks.clone() {
            let (at, within) = place(block);
            factors[at] = largest::<S>(&mut scores[at * POSITIONS..][..POSITIONS], within, cap);
            largest_of_all = largest_of_all.max(factors[at]);
        }
        let mut total = sink.map_or(0.0, |sink| order::exp(sink - largest_of_all));
        for block in blocks {
            let (at, within) = place(block);
            let sum = numerators::<S>(&mut scores[at * POSITIONS..][..POSITIONS], within, factors[at]);
            factors[at] = order::exp(factors[at] - largest_of_all);
            total = sum.mul_add(factors[at], total);
        }
        order::reciprocal(total)
    }
}

/// Sums of weight · value over `seen`, which lies within one block: dimensions `d..d + 16 · V` for `Q` queries, whose weights of the
/// block begin at `weights`, [`POSITIONS`] apart.
#[inline(always)]
unsafe fn block_sums<S: Simd, C: Cell, const Q: usize, const V: usize>(
    pages: &HeadPages<'_>,
    seen: Range<usize>,
    weights: *const f32,
    d: usize,
) -> [[S::F; V]; Q] {
    // SAFETY: rows of values are padded to whole vectors; weights have one number per position and query.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; Q];
        for page in seen.start / PAGE..seen.end.div_ceil(PAGE) {
            let (values, row_bytes) = pages.values(page);
            for position in (page * PAGE).max(seen.start)..((page + 1) * PAGE).min(seen.end) {
                let row = values.add(position % PAGE * row_bytes + d * C::BYTES);
                let mut value = [S::splat(0.0); V];
                for (v, value) in value.iter_mut().enumerate() {
                    *value = C::load::<S>(row.add(16 * v * C::BYTES));
                }
                let weight = weights.add(position % POSITIONS);
                for (query, sums) in sums.iter_mut().enumerate() {
                    let weight = S::splat(*weight.add(query * POSITIONS));
                    for (sum, value) in sums.iter_mut().zip(value) {
                        *sum = S::fma(weight, value, *sum);
                    }
                }
            }
        }
        sums
    }
}

/// means += sums · factor.
#[inline(always)]
unsafe fn add_block<S: Simd, const V: usize>(means: &mut [S::F; V], sums: [S::F; V], factor: f32) {
    // SAFETY: the machine has `S`.
    unsafe {
        let factor = S::splat(factor);
        for (mean, sum) in means.iter_mut().zip(sums) {
            *mean = S::fma(sum, factor, *mean);
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

/// Scores of one page of positions for `Q` queries, whose numbers are at `[dim][query]`. Those of each query begin [`POSITIONS`] apart.
#[inline(always)]
unsafe fn page_scores<S: Simd, C: Cell, const Q: usize>(
    queries: &[f32],
    size: usize,
    keys: *const u8,
    scores: *mut f32,
) {
    // SAFETY: a page has `size` rows of `PAGE` keys, and every dimension has `Q` numbers.
    unsafe {
        if accumulators::<S>() >= 2 * Q {
            some_scores::<S, C, Q, 2>(queries, size, keys, scores);
        } else {
            some_scores::<S, C, Q, 1>(queries, size, keys, scores);
            some_scores::<S, C, Q, 1>(queries, size, keys.add(16 * C::BYTES), scores.add(16));
        }
    }
}

/// Scores of the first `16 · V` positions from `keys` on.
#[inline(always)]
unsafe fn some_scores<S: Simd, C: Cell, const Q: usize, const V: usize>(
    queries: &[f32],
    size: usize,
    keys: *const u8,
    scores: *mut f32,
) {
    // SAFETY: the contract of `page_scores`.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; Q];
        for d in 0..size {
            let row = keys.add(d * PAGE * C::BYTES);
            let mut key = [S::splat(0.0); V];
            for (v, key) in key.iter_mut().enumerate() {
                *key = C::load::<S>(row.add(16 * v * C::BYTES));
            }
            for (query, sums) in sums.iter_mut().enumerate() {
                let number = S::splat(*queries.get_unchecked(d * Q + query));
                for (sum, key) in sums.iter_mut().zip(key) {
                    *sum = S::fma(number, key, *sum);
                }
            }
        }
        for (query, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                S::store(sum, scores.add(query * POSITIONS + 16 * v));
            }
        }
    }
}

#[cfg(test)]
mod tests;
