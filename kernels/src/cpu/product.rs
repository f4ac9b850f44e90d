//! Matrix products from tiled weights: y[m][n] = Σ_k W[n][k] · x[m][k], in the order of [`crate::order::dot`].
//!
//! A vector holds one column or slot of 16 weight rows, so no sum crosses lanes: each lane is the accumulation chain of
//! its row.
use std::marker::PhantomData;
use std::ops::Range;

use super::Isa;
use super::activations::{Block, Rows, block_count};
use super::simd::{Kernel, Simd};
use crate::order::{BLOCK, CHUNKS, GROUP};
use crate::quant::QuantType;
use crate::tile::{Layout, ROWS, Scales, Tiles};

/// A range of the output rows of a product, for all rows of activations.
pub struct Product<'a> {
    /// The weights.
    pub weights: Tiles<'a>,
    /// The activations.
    pub x: &'a Rows,
    /// Weight rows to compute; must begin at the first row of a tile.
    pub rows: Range<usize>,
    /// Whether activations are used as integers; weights that are not quantised always use floats.
    pub integers: bool,
    /// Element (m, n) goes to `out[m * weights.rows() + n]`.
    pub out: *mut f32,
}

impl Product<'_> {
    /// Computes the rows.
    ///
    /// # Safety
    /// `isa` was detected, `out` is valid for the elements of `rows`, and no other thread accesses those during the
    /// call.
    pub unsafe fn run(self, isa: Isa) {
        assert!(self.x.cols() == self.weights.cols() && self.rows.end <= self.weights.rows(), "shapes of a product");
        assert!(self.rows.start.is_multiple_of(ROWS), "rows of whole tiles");
        // SAFETY: rows and columns are in bounds; the rest is the caller's contract.
        unsafe {
            match (self.weights.kind(), self.integers) {
                (QuantType::Q4_0, true) => self.by::<Integers<Q4_0>>(isa),
                (QuantType::Q4_1, true) => self.by::<Integers<Q4_1>>(isa),
                (QuantType::Q5_0, true) => self.by::<Integers<Q5_0>>(isa),
                (QuantType::Q5_1, true) => self.by::<Integers<Q5_1>>(isa),
                (QuantType::Q8_0, true) => self.by::<Integers<Q8_0>>(isa),
                (QuantType::Q3K, true) => self.by::<Integers<Q3K>>(isa),
                (QuantType::Q4K, true) => self.by::<Integers<Q4K>>(isa),
                (QuantType::Q5K, true) => self.by::<Integers<Q5K>>(isa),
                (QuantType::Q6K, true) => self.by::<Integers<Q6K>>(isa),
                (QuantType::Iq4Nl, true) => self.by::<Integers<Iq4Nl>>(isa),
                (QuantType::Iq2Xxs, true) => self.by::<Integers<Iq2Xxs>>(isa),
                (QuantType::Iq2Xs, true) => self.by::<Integers<Iq2Xs>>(isa),
                (QuantType::Iq2S, true) => self.by::<Integers<Iq2S>>(isa),
                (QuantType::Iq3Xxs, true) => self.by::<Integers<Iq3Xxs>>(isa),
                (QuantType::Iq3S, true) => self.by::<Integers<Iq3S>>(isa),
                (QuantType::Iq4Xs, true) => self.by::<Integers<Iq4Xs>>(isa),
                (QuantType::Q4Z, true) => self.by::<Integers<Q4Z>>(isa),
                (QuantType::Mxfp4, true) => self.by::<Integers<Mxfp4>>(isa),
                (QuantType::Q4_0, false) => self.by::<Floats<Q4_0>>(isa),
                (QuantType::Q4_1, false) => self.by::<Floats<Q4_1>>(isa),
                (QuantType::Q5_0, false) => self.by::<Floats<Q5_0>>(isa),
                (QuantType::Q5_1, false) => self.by::<Floats<Q5_1>>(isa),
                (QuantType::Q8_0, false) => self.by::<Floats<Q8_0>>(isa),
                (QuantType::Q3K, false) => self.by::<Floats<Q3K>>(isa),
                (QuantType::Q4K, false) => self.by::<Floats<Q4K>>(isa),
                (QuantType::Q5K, false) => self.by::<Floats<Q5K>>(isa),
                (QuantType::Q6K, false) => self.by::<Floats<Q6K>>(isa),
                (QuantType::Iq4Nl, false) => self.by::<Floats<Iq4Nl>>(isa),
                (QuantType::Iq2Xxs, false) => self.by::<Floats<Iq2Xxs>>(isa),
                (QuantType::Iq2Xs, false) => self.by::<Floats<Iq2Xs>>(isa),
                (QuantType::Iq2S, false) => self.by::<Floats<Iq2S>>(isa),
                (QuantType::Iq3Xxs, false) => self.by::<Floats<Iq3Xxs>>(isa),
                (QuantType::Iq3S, false) => self.by::<Floats<Iq3S>>(isa),
                (QuantType::Iq4Xs, false) => self.by::<Floats<Iq4Xs>>(isa),
                (QuantType::Q4Z, false) => self.by::<Floats<Q4Z>>(isa),
                (QuantType::Mxfp4, false) => self.by::<Floats<Mxfp4>>(isa),
                (QuantType::F32, _) => self.by::<Plain<f32>>(isa),
                (QuantType::F16, _) => self.by::<Plain<F16>>(isa),
                (QuantType::Bf16, _) => self.by::<Plain<Bf16>>(isa),
            }
        }
    }

    unsafe fn by<D: Dot>(self, isa: Isa) {
        // SAFETY: the contract of `run`.
        unsafe { isa.run(Panels::<D> { product: self, by: PhantomData }) }
    }
}

/// A product, monomorphised for one weight format.
struct Panels<'a, D> {
    product: Product<'a>,
    by: PhantomData<D>,
}

impl<D: Dot> Kernel for Panels<'_, D> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let product = &self.product;
        let (count, cols) = (product.x.count(), product.weights.cols());
        let panel_bytes = D::LAYOUT.matrix_bytes(1, cols);
        for first in product.rows.clone().step_by(ROWS) {
            let rows = (product.rows.end - first).min(ROWS);
            let panel = product.weights.bytes().as_ptr().wrapping_add(first / ROWS * panel_bytes);
            let mut m = 0;
            // SAFETY: the contract of `Product::run`; the panel has all tiles of its rows, `m..m + M` are rows of `x`.
            // (Loops, because a closure that is not inlined lacks the instruction set.)
            unsafe {
                while D::EIGHT && m + 8 <= count {
                    product.panel::<S, D, 8>(panel, first, rows, m);
                    m += 8;
                }
                while m + 4 <= count {
                    product.panel::<S, D, 4>(panel, first, rows, m);
                    m += 4;
                }
                while m < count {
                    product.panel::<S, D, 1>(panel, first, rows, m);
                    m += 1;
                }
            }
        }
    }
}

impl Product<'_> {
    /// The product of one panel (16 weight rows) with `M` rows of activations.
    #[inline(always)]
    unsafe fn panel<S: Simd, D: Dot, const M: usize>(&self, panel: *const u8, first: usize, rows: usize, m: usize) {
        // SAFETY: the contract of `run`.
        unsafe {
            let groups = self.weights.cols().div_ceil(GROUP);
            let mut totals = [S::splat(0.0); M];
            for index in 0..CHUNKS {
                let chunk = index * groups / CHUNKS..(index + 1) * groups / CHUNKS;
                let sums = D::chunk::<S, M>(panel, chunk, self.x, m);
                for (total, sum) in totals.iter_mut().zip(sums) {
                    *total = S::add(*total, sum);
                }
            }
            for (i, total) in totals.into_iter().enumerate() {
                let out = self.out.add((m + i) * self.weights.rows() + first);
                if rows == ROWS {
                    S::store(total, out);
                } else {
                    let mut lanes = [0.0; ROWS];
                    S::store(total, lanes.as_mut_ptr());
                    std::ptr::copy_nonoverlapping(lanes.as_ptr(), out, rows);
                }
            }
        }
    }
}

/// How to multiply weights of one format with activations.
trait Dot {
    /// Memory layout of a tile.
    const LAYOUT: Layout;
    /// Whether activation rows are processed eight at a time, and then four at a time; the remaining ones run singly. Each
    /// further size would be another copy of the kernel, which takes seconds to compile.
    const EIGHT: bool = false;
    /// The sums of one chunk of columns, for `M` rows of activations.
    ///
    /// # Safety
    /// The machine has `S`; the panel has tiles for all columns of `x`; `x` has the rows `m..m + M`.
    unsafe fn chunk<S: Simd, const M: usize>(panel: *const u8, groups: Range<usize>, x: &Rows, m: usize) -> [S::F; M];
}

/// A quantised weight format.
trait Format {
    const KIND: QuantType;
    const LAYOUT: Layout = Layout::of(Self::KIND);
}

macro_rules! formats {
    ($($kind:ident;)*) => {$(
        struct $kind;
        impl Format for $kind {
            const KIND: QuantType = QuantType::$kind;
        }
    )*};
}

formats! {
    Q4_0; Q4_1; Q5_0; Q5_1; Q8_0; Iq2Xxs; Iq2Xs; Iq2S; Iq3Xxs; Iq3S; Q3K; Q4K; Q5K; Q6K; Iq4Nl; Iq4Xs; Mxfp4; Q4Z;
}

/// Prefetch distance in bytes: measured 25 % faster for a single row of activations than the hardware prefetcher, which stops
/// at page boundaries. Later rows find the weights in the cache.
const AHEAD: usize = 4096;

/// Quantised weights times integer activations.
struct Integers<T>(T);

impl<T: Format> Dot for Integers<T> {
    const LAYOUT: Layout = T::LAYOUT;
    const EIGHT: bool = true;

    #[inline(always)]
    unsafe fn chunk<S: Simd, const M: usize>(panel: *const u8, groups: Range<usize>, x: &Rows, m: usize) -> [S::F; M] {
        // SAFETY: the caller's contract; a row of `x` has two blocks for each tile.
        unsafe {
            let mut sums = [S::splat(0.0); M];
            let (first, stride) = (x.blocks_at(m), block_count(x.cols()));
            for g in groups {
                let tile = panel.add(g * T::LAYOUT.tile_bytes);
                if m == 0 {
                    for line in (0..T::LAYOUT.tile_bytes).step_by(64) {
                        S::prefetch(tile.wrapping_add(line + AHEAD));
                    }
                }
                integer_block::<S, T, M, 0>(tile, first.add(2 * g), stride, &mut sums);
                integer_block::<S, T, M, 1>(tile, first.add(2 * g + 1), stride, &mut sums);
            }
            sums
        }
    }
}

/// Block `B` of a tile times the blocks of `M` rows of activations, `stride` blocks apart.
#[inline(always)]
unsafe fn integer_block<S: Simd, T: Format, const M: usize, const B: usize>(
    tile: *const u8,
    x: *const Block,
    stride: usize,
    sums: &mut [S::F; M],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let slots = slots::<S, T, B>(tile);
        let scale = scale::<S, T, B, 0>(tile);
        let split = matches!(T::LAYOUT.scales, Scales::Sixteens);
        let second = if split { self::scale::<S, T, B, 1>(tile) } else { scale };
        let minimum = if T::LAYOUT.scales.minimum() { minimum::<S, T, B>(tile) } else { scale };
        for (m, sum) in sums.iter_mut().enumerate() {
            let x = &*x.add(m * stride);
            let x_scale = S::splat(x.scale);
            if split {
                let first = half_dot::<S, T, 0>(&slots, x);
                *sum = S::fma(S::to_f32(first), S::mul(scale, x_scale), *sum);
                let other = half_dot::<S, T, 1>(&slots, x);
                *sum = S::fma(S::to_f32(other), S::mul(second, x_scale), *sum);
            } else {
                let dot = whole_dot::<S, T>(&slots, x);
                *sum = S::fma(S::to_f32(dot), S::mul(scale, x_scale), *sum);
            }
            if T::LAYOUT.scales.minimum() {
                *sum = S::fma(minimum, S::splat(x.total), *sum);
            }
        }
    }
}

#[inline(always)]
unsafe fn whole_dot<S: Simd, T: Format>(w: &[S::U; 8], x: &Block) -> S::I {
    // Dispatch over the few possible offsets makes `OFFSET` a compile-time constant.
    // SAFETY: the machine has `S`.
    unsafe {
        match T::LAYOUT.offset {
            0 => eight_slots::<S, 0>(w, x),
            8 => eight_slots::<S, 8>(w, x),
            12 => eight_slots::<S, 12>(w, x),
            15 => eight_slots::<S, 15>(w, x),
            16 => eight_slots::<S, 16>(w, x),
            _ => eight_slots::<S, 128>(w, x),
        }
    }
}

#[inline(always)]
unsafe fn eight_slots<S: Simd, const OFFSET: i32>(w: &[S::U; 8], x: &Block) -> S::I {
    // SAFETY: the machine has `S`.
    unsafe {
        let mut sum = S::begin::<OFFSET>(x.sums[0] + x.sums[1]);
        for t in 0..4 {
            sum = S::dot::<OFFSET>(sum, (w[t], w[t + 4]), (x.slot(t), x.slot(t + 4)));
        }
        sum
    }
}

#[inline(always)]
unsafe fn half_dot<S: Simd, T: Format, const HALF: usize>(w: &[S::U; 8], x: &Block) -> S::I {
    // SAFETY: the machine has `S`.
    unsafe {
        match T::LAYOUT.offset {
            4 => four_slots::<S, 4, HALF>(w, x),
            128 => four_slots::<S, 128, HALF>(w, x),
            _ => four_slots::<S, 32, HALF>(w, x),
        }
    }
}

#[inline(always)]
unsafe fn four_slots<S: Simd, const OFFSET: i32, const HALF: usize>(w: &[S::U; 8], x: &Block) -> S::I {
    // SAFETY: the machine has `S`.
    unsafe {
        let mut sum = S::begin::<OFFSET>(x.sums[HALF]);
        for t in [4 * HALF, 4 * HALF + 2] {
            sum = S::dot::<OFFSET>(sum, (w[t], w[t + 1]), (x.slot(t), x.slot(t + 1)));
        }
        sum
    }
}

/// Codes of the eight slots of block `B`.
#[inline(always)]
unsafe fn slots<S: Simd, T: Format, const B: usize>(tile: *const u8) -> [S::U; 8] {
    // SAFETY: the caller's contract.
    unsafe {
        let codes = tile.add(B * T::LAYOUT.block_bytes);
        let vector = |index: usize| S::load_bytes(codes.add(64 * index));
        if T::LAYOUT.bits == 8 {
            return [vector(0), vector(1), vector(2), vector(3), vector(4), vector(5), vector(6), vector(7)];
        }
        let words = [vector(0), vector(1), vector(2), vector(3)];
        let low =
            [S::low_nibbles(words[0]), S::low_nibbles(words[1]), S::low_nibbles(words[2]), S::low_nibbles(words[3])];
        let high = [
            S::high_nibbles(words[0]),
            S::high_nibbles(words[1]),
            S::high_nibbles(words[2]),
            S::high_nibbles(words[3]),
        ];
        match T::LAYOUT.bits {
            5 => {
                let plane = vector(4);
                [
                    S::join_bit::<0>(low[0], plane),
                    S::join_bit::<1>(low[1], plane),
                    S::join_bit::<2>(low[2], plane),
                    S::join_bit::<3>(low[3], plane),
                    S::join_bit::<4>(high[0], plane),
                    S::join_bit::<5>(high[1], plane),
                    S::join_bit::<6>(high[2], plane),
                    S::join_bit::<7>(high[3], plane),
                ]
            }
            6 => {
                let planes = [vector(4), vector(5)];
                [
                    S::join_two_bits::<0>(low[0], planes[0]),
                    S::join_two_bits::<2>(low[1], planes[0]),
                    S::join_two_bits::<4>(low[2], planes[0]),
                    S::join_two_bits::<6>(low[3], planes[0]),
                    S::join_two_bits::<0>(high[0], planes[1]),
                    S::join_two_bits::<2>(high[1], planes[1]),
                    S::join_two_bits::<4>(high[2], planes[1]),
                    S::join_two_bits::<6>(high[3], planes[1]),
                ]
            }
            _ => {
                let mut slots = [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]];
                if let Some(table) = T::LAYOUT.table {
                    for slot in &mut slots {
                        *slot = S::look_up(table, *slot);
                    }
                }
                slots
            }
        }
    }
}

/// Scales of the 16 rows in half `HALF` of block `B`.
#[inline(always)]
unsafe fn scale<S: Simd, T: Format, const B: usize, const HALF: usize>(tile: *const u8) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        let at = tile.add(2 * T::LAYOUT.block_bytes);
        match T::LAYOUT.scales {
            Scales::Half | Scales::HalfAndMinimum => S::load_f16(at.add(2 * B * ROWS).cast()),
            Scales::HalfAndZero => S::load_scales(at.add(2 * B * ROWS).cast()),
            Scales::Bytes => S::mul(S::load_f16(at.cast()), S::load_u8(at.add((4 + B) * ROWS))),
            Scales::SignedBytes => signed::<S, T>(at, at.add((2 + B) * ROWS)),
            Scales::Sixteens => signed::<S, T>(at, at.add((2 + 2 * B + HALF) * ROWS)),
            Scales::None => S::splat(0.0),
        }
    }
}

/// Factors times signed bytes, in units of the layout: exact, because a product has at most 19 bits.
#[inline(always)]
unsafe fn signed<S: Simd, T: Format>(factors: *const u8, bytes: *const u8) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        let scales = S::mul(S::load_f16(factors.cast()), S::load_i8(bytes));
        if T::LAYOUT.shift == 0 { scales } else { S::mul(scales, S::splat(T::LAYOUT.unit())) }
    }
}

/// Minima of the 16 rows in block `B`.
#[inline(always)]
unsafe fn minimum<S: Simd, T: Format, const B: usize>(tile: *const u8) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        let at = tile.add(2 * T::LAYOUT.block_bytes);
        match T::LAYOUT.scales {
            Scales::HalfAndMinimum => S::load_f16(at.add((4 + 2 * B) * ROWS).cast()),
            Scales::HalfAndZero => {
                let (words, eighth) = (at.add(2 * B * ROWS).cast(), S::splat(0.125));
                let subtracted = S::mul(S::load_scales(words), S::mul(S::load_zeros(words), eighth));
                S::sub(S::splat(0.0), subtracted)
            }
            Scales::Bytes => {
                let subtracted = S::mul(S::load_f16(at.add(2 * ROWS).cast()), S::load_u8(at.add((6 + B) * ROWS)));
                S::sub(S::splat(0.0), subtracted)
            }
            Scales::Half | Scales::SignedBytes | Scales::Sixteens | Scales::None => S::splat(0.0),
        }
    }
}

/// Quantised weights times float activations: each dequantised weight is rounded once, each multiply-add once.
struct Floats<T>(T);

impl<T: Format> Dot for Floats<T> {
    const LAYOUT: Layout = T::LAYOUT;

    #[inline(always)]
    unsafe fn chunk<S: Simd, const M: usize>(panel: *const u8, groups: Range<usize>, x: &Rows, m: usize) -> [S::F; M] {
        // SAFETY: the caller's contract; rows of `x` are padded to whole groups.
        unsafe {
            let mut sums = [S::splat(0.0); M];
            let (first, stride) = (x.floats_at(m), x.cols().next_multiple_of(GROUP));
            for g in groups {
                let tile = panel.add(g * T::LAYOUT.tile_bytes);
                float_block::<S, T, M, 0>(tile, first.add(g * GROUP), stride, &mut sums);
                float_block::<S, T, M, 1>(tile, first.add(g * GROUP + BLOCK), stride, &mut sums);
            }
            sums
        }
    }
}

#[inline(always)]
unsafe fn float_block<S: Simd, T: Format, const M: usize, const B: usize>(
    tile: *const u8,
    x: *const f32,
    stride: usize,
    sums: &mut [S::F; M],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let slots = slots::<S, T, B>(tile);
        let scales = [scale::<S, T, B, 0>(tile), scale::<S, T, B, 1>(tile)];
        let minimum = minimum::<S, T, B>(tile);
        for (slot, codes) in slots.into_iter().enumerate() {
            let scale = scales[slot / 4];
            let columns = [S::byte::<0>(codes), S::byte::<1>(codes), S::byte::<2>(codes), S::byte::<3>(codes)];
            for (i, codes) in columns.into_iter().enumerate() {
                let w = S::fma(S::sub(codes, S::splat(T::LAYOUT.offset as f32)), scale, minimum);
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(w, S::splat(*x.add(m * stride + 4 * slot + i)), *sum);
                }
            }
        }
    }
}

/// Weights that are not quantised.
struct Plain<T>(T);

/// A float format of stored weights.
trait Number {
    const KIND: QuantType;
    /// # Safety
    /// The machine has `S`; 16 numbers are readable at `from`.
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;
}

struct F16;
struct Bf16;

impl Number for f32 {
    const KIND: QuantType = QuantType::F32;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load(from.cast()) }
    }
}

impl Number for F16 {
    const KIND: QuantType = QuantType::F16;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_f16(from.cast()) }
    }
}

impl Number for Bf16 {
    const KIND: QuantType = QuantType::Bf16;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_bf16(from.cast()) }
    }
}

impl<T: Number> Dot for Plain<T> {
    const LAYOUT: Layout = Layout::of(T::KIND);

    #[inline(always)]
    unsafe fn chunk<S: Simd, const M: usize>(panel: *const u8, groups: Range<usize>, x: &Rows, m: usize) -> [S::F; M] {
        // SAFETY: the caller's contract; rows of `x` are padded to whole groups.
        unsafe {
            let mut sums = [S::splat(0.0); M];
            let (first, stride) = (x.floats_at(m), x.cols().next_multiple_of(GROUP));
            let column_bytes = Self::LAYOUT.tile_bytes / GROUP;
            for column in groups.start * GROUP..groups.end * GROUP {
                let from = panel.add(column * column_bytes);
                if m == 0 {
                    S::prefetch(from.wrapping_add(AHEAD));
                }
                let w = T::load::<S>(from);
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(w, S::splat(*first.add(m * stride + column)), *sum);
                }
            }
            sums
        }
    }
}

#[cfg(test)]
mod tests;
