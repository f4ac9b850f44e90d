//! Rows that enter a matrix product: as they are, and rounded to 8 bits in blocks of 32.
use std::ops::Range;

use super::simd::{Kernel, Simd};
use super::unpack::GROUP;

/// Rows of activations, padded with zeros to whole groups, in both forms.
#[derive(Default)]
pub(crate) struct Rows {
    count: usize,
    cols: usize,
    floats: Vec<Line>,
    groups: Vec<Group>,
}

/// 16 numbers on a cache line.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [f32; 16]);

/// 128 activations as integers, in the order of unpacked weights: first halves of four blocks of 32, then second halves.
/// Lane i of the rest belongs to the bytes 4i to 4i+3 of both.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Group {
    pub(crate) low: [i8; 64],
    pub(crate) high: [i8; 64],
    /// Scale of the lane's block.
    pub(crate) scale: [f32; 16],
    /// Scale times the sum of the lane's eight integers: what a block's minimum multiplies.
    pub(crate) sums: [f32; 16],
    /// Minus the sum of the lane's eight integers: what an offset of the weights multiplies.
    pub(crate) neg_sums: [i32; 16],
}

const ZERO: Group = Group { low: [0; 64], high: [0; 64], scale: [0.0; 16], sums: [0.0; 16], neg_sums: [0; 16] };

impl Rows {
    /// Makes room for `count` rows of `cols`; what they hold is undefined until written, except that the padding is zero.
    pub(crate) fn shape(&mut self, count: usize, cols: usize) {
        let lines = count * line_count(cols);
        if self.cols != cols || self.floats.len() < lines {
            self.floats.clear(); // padding must be zero, and moves with the number of columns
            self.floats.resize(lines, Line::default());
            self.groups.clear();
            self.groups.resize(count * group_count(cols), ZERO);
        }
        (self.count, self.cols) = (count, cols);
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Every row for writing.
    pub(crate) fn rows_mut(&mut self) -> RowsMut<'_> {
        RowsMut { floats: self.floats.as_mut_ptr().cast(), groups: self.groups.as_mut_ptr(), rows: self }
    }

    /// First of the numbers of a row; whole groups of zeros pad it.
    pub(crate) fn floats_at(&self, index: usize) -> *const f32 {
        self.floats[index * line_count(self.cols)..].as_ptr().cast()
    }

    /// First of the integer groups of a row.
    pub(crate) fn groups_at(&self, index: usize) -> *const Group {
        self.groups[index * group_count(self.cols)..].as_ptr()
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.floats.capacity() * size_of::<Line>() + self.groups.capacity() * size_of::<Group>()
    }
}

/// Rows that several threads fill, each its own.
#[derive(Clone, Copy)]
pub(crate) struct RowsMut<'a> {
    floats: *mut f32,
    groups: *mut Group,
    rows: &'a Rows,
}

// SAFETY: `row` hands out disjoint memory for distinct indices, and its contract asks for distinct indices.
unsafe impl Sync for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Send for RowsMut<'_> {}

impl RowsMut<'_> {
    /// Numbers (with the padding, which must stay zero) and integers of a row.
    ///
    /// # Safety
    /// No two live borrows of the same index.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn row(&self, index: usize) -> (&mut [f32], &mut [Group]) {
        let (lines, groups) = (line_count(self.rows.cols), group_count(self.rows.cols));
        assert!(index < self.rows.count, "row {index} of {}", self.rows.count);
        // SAFETY: `shape` made room for `count` rows; rows do not overlap.
        unsafe {
            (
                std::slice::from_raw_parts_mut(self.floats.add(index * lines * 16), lines * 16),
                std::slice::from_raw_parts_mut(self.groups.add(index * groups), groups),
            )
        }
    }

    /// Some numbers of a row.
    ///
    /// # Safety
    /// No two live borrows overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, index: usize, part: Range<usize>) -> &mut [f32] {
        assert!(index < self.rows.count && part.end <= self.rows.cols, "{part:?} of row {index}");
        let place = index * line_count(self.rows.cols) * 16 + part.start;
        // SAFETY: in bounds, and disjoint by contract.
        unsafe { std::slice::from_raw_parts_mut(self.floats.add(place), part.len()) }
    }
}

/// Rounds one row to integers: each block of 32 has scale = largest magnitude / 127.
pub(crate) struct Quantise<'a> {
    /// The row, without padding; behind it zeros up to a whole group.
    pub(crate) floats: &'a [f32],
    /// `ceil(floats.len() / 128)` groups.
    pub(crate) groups: &'a mut [Group],
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (g, group) in self.groups.iter_mut().enumerate() {
            let mut scales = [0.0; 4];
            for (b, scale) in scales.iter_mut().enumerate() {
                let from = g * GROUP + b * 32;
                let here = self.floats.len().saturating_sub(from);
                if here == 0 {
                    group.low[16 * b..16 * b + 16].fill(0);
                    group.high[16 * b..16 * b + 16].fill(0);
                    continue;
                }
                // SAFETY: lanes beyond the row are not touched; each half block of integers has 16 bytes.
                unsafe {
                    let x = self.floats.as_ptr().add(from);
                    let low = S::load_first(x, here.min(16));
                    let high = S::load_first(x.wrapping_add(16), here.saturating_sub(16).min(16));
                    let largest = S::max_lane(S::max(S::abs(low), S::abs(high)));
                    // Below this its reciprocal overflows, and nothing in a model is this small but a zero.
                    let inverse = if largest > 1e-30 { 127.0 / largest } else { 0.0 };
                    *scale = if largest > 1e-30 { largest / 127.0 } else { 0.0 };
                    S::store_i8(S::mul(low, S::splat(inverse)), group.low.as_mut_ptr().add(16 * b));
                    S::store_i8(S::mul(high, S::splat(inverse)), group.high.as_mut_ptr().add(16 * b));
                }
            }
            // SAFETY: all arrays of a group have the width of a vector.
            unsafe {
                let x = (S::load_bytes(group.low.as_ptr().cast()), S::load_bytes(group.high.as_ptr().cast()));
                let ones = S::halves(1, 1);
                let sums = S::dot::<0>((ones, ones), x, std::ptr::null());
                let scale = S::expand(scales.as_ptr());
                S::store(scale, group.scale.as_mut_ptr());
                S::store(S::mul(scale, S::to_f32(sums)), group.sums.as_mut_ptr());
                S::store_i32(sums, group.neg_sums.as_mut_ptr());
            }
            group.neg_sums = group.neg_sums.map(|sum| -sum);
        }
    }
}

/// Groups of a row.
pub(crate) fn group_count(cols: usize) -> usize {
    cols.div_ceil(GROUP)
}

/// Cache lines of a row's numbers: whole groups.
fn line_count(cols: usize) -> usize {
    group_count(cols) * (GROUP / 16)
}
