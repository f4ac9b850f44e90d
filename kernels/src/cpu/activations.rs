//! Input rows of matrix products: as f32, and quantised to 8 bits in blocks of 32.
use std::ops::Range;

use super::simd::{Kernel, Simd};
use crate::order::{BLOCK, GROUP, QUANTISE_MIN, reciprocal};

/// Rows of activations, padded with zeros to whole groups of 64 columns, in both forms.
#[derive(Default)]
pub struct Rows {
    count: usize,
    cols: usize,
    floats: Vec<Line>,
    blocks: Vec<Block>,
}

/// 16 numbers on a cache line.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// 32 quantised activations.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Block {
    /// Codes within ±127.
    pub codes: [i8; BLOCK],
    /// Value of a code.
    pub scale: f32,
    /// Scale times the sum of the codes: the factor of a weight block's minimum.
    pub total: f32,
    /// Sums of the codes of each half: the factors of a weight offset.
    pub sums: [i32; 2],
}

/// 32 zeros.
pub const ZERO: Block = Block { codes: [0; BLOCK], scale: 0.0, total: 0.0, sums: [0; 2] };

impl Block {
    /// Codes of four columns, packed in one integer.
    #[inline(always)]
    pub fn slot(&self, index: usize) -> i32 {
        let four = [0, 1, 2, 3].map(|i| self.codes[4 * index + i].cast_unsigned());
        i32::from_le_bytes(four)
    }
}

impl Rows {
    /// Makes room for `count` rows of `cols`. Contents are unspecified until written, except that the padding is zero.
    pub fn shape(&mut self, count: usize, cols: usize) {
        let lines = count * line_count(cols);
        if self.cols != cols || self.floats.len() < lines {
            self.floats.clear(); // padding must be zero, and moves with the number of columns
            self.floats.resize(lines, Line::default());
            self.blocks.clear();
            self.blocks.resize(count * block_count(cols), ZERO);
        }
        (self.count, self.cols) = (count, cols);
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Columns, without the padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Write access to all rows, for several threads.
    pub fn rows_mut(&mut self) -> RowsMut<'_> {
        RowsMut { floats: self.floats.as_mut_ptr().cast(), blocks: self.blocks.as_mut_ptr(), rows: self }
    }

    /// Pointer to the floats of a row, zero-padded to whole groups.
    pub fn floats_at(&self, index: usize) -> *const f32 {
        self.floats[index * line_count(self.cols)..].as_ptr().cast()
    }

    /// Pointer to the integer blocks of a row.
    pub fn blocks_at(&self, index: usize) -> *const Block {
        self.blocks[index * block_count(self.cols)..].as_ptr()
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.floats.capacity() * size_of::<Line>() + self.blocks.capacity() * size_of::<Block>()
    }
}

/// Rows that several threads fill, each thread its own rows.
#[derive(Clone, Copy)]
pub struct RowsMut<'a> {
    floats: *mut f32,
    blocks: *mut Block,
    rows: &'a Rows,
}

// SAFETY: `row` hands out disjoint memory for distinct indices, and its contract asks for distinct indices.
unsafe impl Sync for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Send for RowsMut<'_> {}

impl RowsMut<'_> {
    /// Floats (including the padding, which must stay zero) and integer blocks of a row.
    ///
    /// # Safety
    /// No two live borrows of the same index.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row(&self, index: usize) -> (&mut [f32], &mut [Block]) {
        let (lines, blocks) = (line_count(self.rows.cols), block_count(self.rows.cols));
        assert!(index < self.rows.count, "row {index} of {}", self.rows.count);
        // SAFETY: `shape` made room for `count` rows; rows do not overlap.
        unsafe {
            (
                std::slice::from_raw_parts_mut(self.floats.add(index * lines * 16), lines * 16),
                std::slice::from_raw_parts_mut(self.blocks.add(index * blocks), blocks),
            )
        }
    }

    /// Copies row `from` of other rows of the same width to row `index`, in both forms.
    ///
    /// # Safety
    /// No live borrow of row `index`.
    pub unsafe fn copy(&self, index: usize, other: &Rows, from: usize) {
        assert!(self.rows.cols == other.cols && from < other.count, "row {from} of {}", other.count);
        // SAFETY: by contract; a row of `other` has as many floats and blocks, because it is as wide.
        unsafe {
            let (floats, blocks) = self.row(index);
            floats.copy_from_slice(std::slice::from_raw_parts(other.floats_at(from), floats.len()));
            blocks.copy_from_slice(std::slice::from_raw_parts(other.blocks_at(from), blocks.len()));
        }
    }

    /// A range of the floats of a row.
    ///
    /// # Safety
    /// No two live borrows overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, index: usize, part: Range<usize>) -> &mut [f32] {
        assert!(index < self.rows.count && part.end <= self.rows.cols, "{part:?} of row {index}");
        let place = index * line_count(self.rows.cols) * 16 + part.start;
        // SAFETY: in bounds, and disjoint by contract.
        unsafe { std::slice::from_raw_parts_mut(self.floats.add(place), part.len()) }
    }
}

/// Quantises one row: each block of 32 has scale = largest magnitude / 127 ([`crate::order::quantise`]), or NaN if one
/// of its numbers is not finite.
pub struct Quantise<'a> {
    /// The row without padding; zeros up to a whole group follow it in memory.
    pub floats: &'a [f32],
    /// The row's blocks, for whole groups.
    pub blocks: &'a mut [Block],
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (b, block) in self.blocks.iter_mut().enumerate() {
            let from = b * BLOCK;
            let here = self.floats.len().saturating_sub(from);
            if here == 0 {
                *block = ZERO;
                continue;
            }
            // SAFETY: lanes beyond the row are not touched; each half of the codes has 16 bytes.
            unsafe {
                let x = self.floats.as_ptr().add(from);
                let low = S::load_first(x, here.min(16));
                let high = S::load_first(x.wrapping_add(16), here.saturating_sub(16).min(16));
                let largest = S::max_lane(S::max(S::abs(low), S::abs(high)));
                // x - x is 0 if all numbers are finite, else NaN.
                let zero = S::sum4([S::sub(low, low), S::sub(high, high), S::splat(0.0), S::splat(0.0)]);
                let some = largest > QUANTISE_MIN;
                let inverse = S::splat(if some { 127.0 * reciprocal(largest) } else { 0.0 });
                block.scale = if some { largest * (1.0 / 127.0) } else { 0.0 } + zero[0] + zero[1];
                S::store_i8(S::mul(low, inverse), block.codes.as_mut_ptr());
                S::store_i8(S::mul(high, inverse), block.codes.as_mut_ptr().add(16));
            }
            let sum = |half: &[i8]| half.iter().map(|code| i32::from(*code)).sum();
            block.sums = [sum(&block.codes[..16]), sum(&block.codes[16..])];
            block.total = block.scale * (block.sums[0] + block.sums[1]) as f32;
        }
    }
}

/// Blocks per row, for whole groups.
pub fn block_count(cols: usize) -> usize {
    cols.div_ceil(GROUP) * (GROUP / BLOCK)
}

/// Cache lines per row of floats, for whole groups.
fn line_count(cols: usize) -> usize {
    cols.div_ceil(GROUP) * (GROUP / 16)
}
