//! Matrix products straight from stored blocks: y[m][n] = Σ_k W[n][k] · x[m][k].
//!
//! Whatever the number of rows, each element is summed in one order: 16 lanes run over K group by group, then the tree
//! of `Simd::sum4`. So a row alone, in a batch, or on another thread has the same bits.
use std::marker::PhantomData;
use std::ops::Range;

use super::Isa;
use super::activations::{Group, Rows, group_count};
use super::simd::{Kernel, Simd};
use super::unpack::{Format, GROUP, GROUP_BYTES_MAX, Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0, Unpacked};
use crate::quant::QuantType;

/// A matrix in its stored form: `rows` rows of `cols` weights each.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    kind: QuantType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// `None` unless `bytes` are exactly `rows` rows of whole blocks.
    pub(crate) fn new(kind: QuantType, rows: usize, cols: usize, bytes: &'a [u8]) -> Option<Self> {
        let row_bytes = kind.row_bytes(cols)?;
        (row_bytes.checked_mul(rows)? == bytes.len()).then_some(Self { kind, rows, cols, row_bytes, bytes })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Row `index` as stored.
    pub(crate) fn row(&self, index: usize) -> &'a [u8] {
        &self.bytes[index * self.row_bytes..][..self.row_bytes]
    }

    /// All rows as stored.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) fn kind(&self) -> QuantType {
        self.kind
    }

    /// Where row `index` begins.
    #[inline(always)]
    fn start(&self, index: usize) -> *const u8 {
        debug_assert!(index < self.rows);
        self.bytes.as_ptr().wrapping_add(index * self.row_bytes)
    }
}

/// Some rows of a product, for all rows of activations.
pub(crate) struct Product<'a> {
    pub(crate) weights: Matrix<'a>,
    pub(crate) x: &'a Rows,
    /// Rows of the weights to do.
    pub(crate) rows: Range<usize>,
    /// Whether activations enter as integers; weights that are not quantised take them as they are.
    pub(crate) integers: bool,
    /// Element (m, n) goes to `out[m * weights.rows + n]`.
    pub(crate) out: *mut f32,
}

impl Product<'_> {
    /// Does it.
    ///
    /// # Safety
    /// `isa` was detected, `out` is valid for the elements of `rows`, and nobody else uses those now.
    pub(crate) unsafe fn run(self, isa: Isa) {
        assert!(self.x.cols() == self.weights.cols && self.rows.end <= self.weights.rows, "shapes of a product");
        // SAFETY: rows and columns are in bounds; the rest is the caller's contract.
        unsafe {
            match (self.weights.kind, self.integers) {
                (QuantType::Q4_0, true) => self.by::<Integers<Q4_0>>(isa),
                (QuantType::Q4_1, true) => self.by::<Integers<Q4_1>>(isa),
                (QuantType::Q8_0, true) => self.by::<Integers<Q8_0>>(isa),
                (QuantType::Q4K, true) => self.by::<Integers<Q4K>>(isa),
                (QuantType::Q5K, true) => self.by::<Integers<Q5K>>(isa),
                (QuantType::Q6K, true) => self.by::<Integers<Q6K>>(isa),
                (QuantType::Q4_0, false) => self.by::<Floats<Q4_0>>(isa),
                (QuantType::Q4_1, false) => self.by::<Floats<Q4_1>>(isa),
                (QuantType::Q8_0, false) => self.by::<Floats<Q8_0>>(isa),
                (QuantType::Q4K, false) => self.by::<Floats<Q4K>>(isa),
                (QuantType::Q5K, false) => self.by::<Floats<Q5K>>(isa),
                (QuantType::Q6K, false) => self.by::<Floats<Q6K>>(isa),
                (QuantType::F32, _) => self.by::<Plain<f32>>(isa),
                (QuantType::F16, _) => self.by::<Plain<F16>>(isa),
                (QuantType::Bf16, _) => self.by::<Plain<Bf16>>(isa),
            }
        }
    }

    unsafe fn by<D: Dot>(self, isa: Isa) {
        // SAFETY: the contract of `run`.
        unsafe { isa.run(Tiles::<D> { product: self, by: PhantomData }) }
    }
}

/// A product by one way of multiplying.
struct Tiles<'a, D> {
    product: Product<'a>,
    by: PhantomData<D>,
}

impl<D: Dot> Kernel for Tiles<'_, D> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the contract of `Product::run`.
        unsafe { self.product.tiles::<S, D>() }
    }
}

/// Rows of weights that stay in the first cache levels while the rows of activations pass over them.
const ROWS_AT_ONCE: usize = 32;

impl Product<'_> {
    #[inline(always)]
    unsafe fn tiles<S: Simd, D: Dot>(&self) {
        let count = self.x.count();
        let mut first = self.rows.start;
        while first < self.rows.end {
            let end = if count == 1 { self.rows.end } else { (first + ROWS_AT_ONCE).min(self.rows.end) };
            let mut m = 0;
            // SAFETY: the contract of `run`; every tile stays within `first..end` and `0..count`. (Loops, because a closure
            // that is not inlined lacks the instruction set.)
            unsafe {
                while D::EIGHT && m + 8 <= count {
                    for n in first..end {
                        self.tile::<S, D, 1, 8, 2>(n, m);
                    }
                    m += 8;
                }
                while m + 4 <= count {
                    for n in first..end {
                        self.tile::<S, D, 1, 4, 1>(n, m);
                    }
                    m += 4;
                }
                while m < count {
                    let mut n = first;
                    while n + 4 <= end {
                        self.tile::<S, D, 4, 1, 1>(n, m);
                        n += 4;
                    }
                    for n in n..end {
                        self.single::<S, D>(n, m);
                    }
                    m += 1;
                }
            }
            first = end;
        }
    }

    /// `R` rows of weights by `M` rows of activations, `Q` = R · M / 4.
    #[inline(always)]
    unsafe fn tile<S: Simd, D: Dot, const R: usize, const M: usize, const Q: usize>(&self, n: usize, m: usize) {
        // SAFETY: the contract of `run`.
        unsafe {
            let mut lanes = [[S::splat(0.0); M]; R];
            for (r, lanes) in lanes.iter_mut().enumerate() {
                *lanes = D::dot::<S, M>(&self.weights, n + r, self.x, m);
            }
            for q in 0..Q {
                let mut four = [S::splat(0.0); 4];
                for (i, four) in four.iter_mut().enumerate() {
                    *four = lanes[(4 * q + i) / M][(4 * q + i) % M];
                }
                let sums = S::sum4(four);
                for (i, sum) in sums.into_iter().enumerate() {
                    let (r, c) = ((4 * q + i) / M, (4 * q + i) % M);
                    *self.out.add((m + c) * self.weights.rows + n + r) = sum;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn single<S: Simd, D: Dot>(&self, n: usize, m: usize) {
        // SAFETY: the contract of `run`.
        unsafe {
            let [lanes] = D::dot::<S, 1>(&self.weights, n, self.x, m);
            let zero = S::splat(0.0);
            *self.out.add(m * self.weights.rows + n) = S::sum4([lanes, zero, zero, zero])[0];
        }
    }
}

/// One row of weights by `M` rows of activations, before the lanes are added up.
trait Dot {
    /// Whether eight rows of activations at once pay.
    const EIGHT: bool = false;
    /// # Safety
    /// The machine has `S`; row `n` exists and has `x.cols()` weights; `x` has the rows `m..m + M`.
    unsafe fn dot<S: Simd, const M: usize>(weights: &Matrix<'_>, n: usize, x: &Rows, m: usize) -> [S::F; M];
}

/// Bytes by which a single row of activations asks for weights before it needs them: measured a quarter faster than
/// leaving it to the hardware, which stops at every page.
const AHEAD: usize = 4096;

/// Quantised weights by activations as integers.
struct Integers<T>(T);

impl<T: Format> Dot for Integers<T> {
    const EIGHT: bool = true;

    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(weights: &Matrix<'_>, n: usize, x: &Rows, m: usize) -> [S::F; M] {
        // SAFETY: the caller's contract; every group of a row exists in `x`.
        unsafe {
            let (row, blocks, groups) = (weights.start(n), x.cols() / 32, group_count(x.cols()));
            let first = x.groups_at(m);
            let mut lanes = [S::splat(0.0); M];
            for g in 0..blocks / 4 {
                if M == 1 {
                    for line in (0..T::GROUP_BYTES).step_by(64) {
                        S::prefetch(row.wrapping_add(g * T::GROUP_BYTES + line + AHEAD));
                    }
                }
                integer_groups::<S, T, M>(&T::group::<S>(row, g, 4), first.add(g), groups, &mut lanes);
            }
            if T::SHORT && blocks % 4 > 0 {
                let w = short_group::<S, T>(weights, n, blocks);
                integer_groups::<S, T, M>(&w, first.add(groups - 1), groups, &mut lanes);
            }
            lanes
        }
    }
}

/// The last group of a row, which has only `blocks % 4` blocks. What follows in the matrix is read with it and then
/// hidden; only behind the last rows, where nothing follows, a copy is made.
#[inline(always)]
unsafe fn short_group<S: Simd, T: Format>(weights: &Matrix<'_>, n: usize, blocks: usize) -> Unpacked<S> {
    let at = n * weights.row_bytes + blocks / 4 * T::GROUP_BYTES;
    let padded;
    let from = if at + T::GROUP_BYTES <= weights.bytes.len() {
        &weights.bytes[at..]
    } else {
        padded = with_zeros(&weights.bytes[at..]);
        &padded[..]
    };
    // SAFETY: the caller's contract; a whole group can be read.
    unsafe { T::group::<S>(from.as_ptr(), 0, blocks % 4) }
}

#[cold]
#[inline(never)]
fn with_zeros(bytes: &[u8]) -> [u8; GROUP_BYTES_MAX] {
    let mut padded = [0; GROUP_BYTES_MAX];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}

/// A group of weights by the groups of `M` rows of activations, which lie `stride` apart.
#[inline(always)]
unsafe fn integer_groups<S: Simd, T: Format, const M: usize>(
    w: &Unpacked<S>,
    x: *const Group,
    stride: usize,
    lanes: &mut [S::F; M],
) {
    for (m, lanes) in lanes.iter_mut().enumerate() {
        // SAFETY: the caller's contract.
        unsafe { *lanes = integer_group::<S, T>(w, &*x.add(m * stride), *lanes) }
    }
}

#[inline(always)]
unsafe fn integer_group<S: Simd, T: Format>(w: &Unpacked<S>, x: &Group, lanes: S::F) -> S::F {
    // SAFETY: the arrays of a group have the width of a vector.
    unsafe {
        let (low, high) = (S::load_bytes(x.low.as_ptr().cast()), S::load_bytes(x.high.as_ptr().cast()));
        let scale = S::load(x.scale.as_ptr());
        if T::SPLIT {
            let (a, b) = (S::dot_half::<32>(w.low, low), S::dot_half::<32>(w.high, high));
            let lanes = S::fma(S::mul(w.scale, scale), S::to_f32(a), lanes);
            return S::fma(S::mul(w.scale_high, scale), S::to_f32(b), lanes);
        }
        // `OFFSET` is one of a few; naming each lets it be a constant.
        let dot = match T::OFFSET {
            0 => S::dot::<0>((w.low, w.high), (low, high), x.neg_sums.as_ptr()),
            8 => S::dot::<8>((w.low, w.high), (low, high), x.neg_sums.as_ptr()),
            _ => S::dot::<128>((w.low, w.high), (low, high), x.neg_sums.as_ptr()),
        };
        let lanes = S::fma(S::mul(w.scale, scale), S::to_f32(dot), lanes);
        if T::MIN { S::fma(w.min, S::load(x.sums.as_ptr()), lanes) } else { lanes }
    }
}

/// Quantised weights by activations as they are: each weight is rounded once, each product with its sum once.
struct Floats<T>(T);

impl<T: Format> Dot for Floats<T> {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(weights: &Matrix<'_>, n: usize, x: &Rows, m: usize) -> [S::F; M] {
        // SAFETY: the caller's contract; rows of `x` are padded to whole groups.
        unsafe {
            let (row, blocks, stride) = (weights.start(n), x.cols() / 32, group_count(x.cols()) * GROUP);
            let first = x.floats_at(m);
            let mut lanes = [[S::splat(0.0); 2]; M];
            for g in 0..blocks / 4 {
                float_group::<S, T, M>(&T::group::<S>(row, g, 4), first.add(g * GROUP), stride, &mut lanes);
            }
            if T::SHORT && blocks % 4 > 0 {
                let w = short_group::<S, T>(weights, n, blocks);
                float_group::<S, T, M>(&w, first.add(blocks / 4 * GROUP), stride, &mut lanes);
            }
            both::<S, M>(lanes)
        }
    }
}

#[inline(always)]
unsafe fn float_group<S: Simd, T: Format, const M: usize>(
    w: &Unpacked<S>,
    x: *const f32,
    stride: usize,
    lanes: &mut [[S::F; 2]; M],
) {
    // SAFETY: the caller's contract.
    unsafe {
        float_block::<S, T, M, 0>(w, x, stride, lanes);
        float_block::<S, T, M, 1>(w, x, stride, lanes);
        float_block::<S, T, M, 2>(w, x, stride, lanes);
        float_block::<S, T, M, 3>(w, x, stride, lanes);
    }
}

/// Block `B` of a group: first half to the first lanes, second half to the second.
#[inline(always)]
unsafe fn float_block<S: Simd, T: Format, const M: usize, const B: i32>(
    w: &Unpacked<S>,
    x: *const f32,
    stride: usize,
    lanes: &mut [[S::F; 2]; M],
) {
    // SAFETY: the caller's contract; a group of `x` has 128 numbers.
    unsafe {
        let (scale, scale_high) = (S::spread::<B>(w.scale), S::spread::<B>(w.scale_high));
        let offset = S::splat(-T::OFFSET as f32);
        let min = if T::MIN { S::spread::<B>(w.min) } else { S::mul(offset, scale) };
        let min_high = if T::SPLIT { S::mul(offset, scale_high) } else { min };
        let low = S::fma(scale, S::widen::<B>(w.low), min);
        let high = S::fma(scale_high, S::widen::<B>(w.high), min_high);
        for (m, lanes) in lanes.iter_mut().enumerate() {
            let x = x.add(m * stride + 32 * B as usize);
            lanes[0] = S::fma(low, S::load(x), lanes[0]);
            lanes[1] = S::fma(high, S::load(x.add(16)), lanes[1]);
        }
    }
}

/// First lanes plus second lanes. (A loop, because vectors do not survive closures that are not inlined.)
#[inline(always)]
unsafe fn both<S: Simd, const M: usize>(lanes: [[S::F; 2]; M]) -> [S::F; M] {
    // SAFETY: the machine has `S`.
    unsafe {
        let mut sums = [S::splat(0.0); M];
        for (sum, lanes) in sums.iter_mut().zip(lanes) {
            *sum = S::add(lanes[0], lanes[1]);
        }
        sums
    }
}

/// Weights that are numbers already.
struct Plain<T>(T);

/// A stored number.
trait Number {
    const BYTES: usize;
    /// # Safety
    /// The machine has `S`; 16 numbers lie at `from`.
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;
}

struct F16;
struct Bf16;

impl Number for f32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load(from.cast()) }
    }
}

impl Number for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_f16(from.cast()) }
    }
}

impl Number for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_bf16(from.cast()) }
    }
}

impl<T: Number> Dot for Plain<T> {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(weights: &Matrix<'_>, n: usize, x: &Rows, m: usize) -> [S::F; M] {
        // SAFETY: the caller's contract; rows of `x` are padded to whole groups, a short tail of weights is copied.
        unsafe {
            let row = weights.start(n);
            let (cols, stride) = (x.cols(), group_count(x.cols()) * GROUP);
            let first = x.floats_at(m);
            let mut lanes = [[S::splat(0.0); 2]; M];
            for k in 0..cols.div_ceil(16) {
                let (from, here) = (row.add(k * 16 * T::BYTES), (cols - 16 * k).min(16));
                let w = if here == 16 {
                    T::load::<S>(from)
                } else {
                    let mut tail = [0u8; 64];
                    std::ptr::copy_nonoverlapping(from, tail.as_mut_ptr(), here * T::BYTES);
                    T::load::<S>(tail.as_ptr())
                };
                for (m, lanes) in lanes.iter_mut().enumerate() {
                    lanes[k % 2] = S::fma(w, S::load(first.add(m * stride + 16 * k)), lanes[k % 2]);
                }
            }
            both::<S, M>(lanes)
        }
    }
}

#[cfg(test)]
mod tests;
