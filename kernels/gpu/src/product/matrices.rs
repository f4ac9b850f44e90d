//! Multiplies one tile by activations with the 8-bit matrix instruction m16n8k32.
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use kernels::quant::QuantType;
use kernels::tile::{Layout, Scales};

use crate::arithmetic::{Features, biased, from_biased, fused};
use crate::tiles::{fragment, lane_block_scales};

/// The sum of the codes of a block, or of one of its halves if `split`.
#[cube]
fn code_sum(scales: Vector<f32, Const<4>>, #[comptime] half: usize, #[comptime] split: bool) -> i32 {
    let (total, first) = (i32::reinterpret(scales[2]), i32::reinterpret(scales[3]));
    if comptime!(!split) {
        total
    } else if comptime!(half == 0) {
        first
    } else {
        total - first
    }
}

/// Adds the products of a block of a tile to the sums of a lane: rows 2 g and 2 g + 1 of the tile, columns 2 t and 2 t + 1 of the
/// activations, whose scales are `left` and `right`. `one`: there is only one column.
#[cube]
pub(super) fn multiply(
    codes: &Array<Vector<u32, Const<2>>>,
    scales: &Array<u32>,
    x: Vector<u32, Const<4>>,
    left: Vector<f32, Const<4>>,
    right: Vector<f32, Const<4>>,
    nibbles: u32,
    lane: usize,
    sums: &mut Array<f32>,
    #[comptime] at: usize,
    #[comptime] sums_at: usize,
    #[comptime] block: usize,
    #[comptime] one: bool,
    #[comptime] kind: QuantType,
    #[comptime] able: Features,
) {
    let layout = comptime!(Layout::of(kind));
    let split = comptime!(layout.scales == Scales::Sixteens);
    let definition = MmaDefinition::<u8, i8, i32>::new(16usize, 8usize, 32usize);
    let mut a = Array::<Vector<u8, Const<4>>>::new(4usize);
    let mut b = Array::<Vector<i8, Const<4>>>::new(2usize);
    let mut s = Array::<f32>::new(6usize);
    fragment(codes, nibbles, lane, at, block, kind, &mut a);
    lane_block_scales(scales, lane, at, block, kind, able, &mut s);
    b[0] = Vector::<i8, Const<4>>::reinterpret(x[comptime!(2 * block)]);
    b[1] = Vector::<i8, Const<4>>::reinterpret(x[comptime!(2 * block + 1)]);
    #[unroll]
    for half in 0..comptime!(if split { 2usize } else { 1usize }) {
        let mut start = Array::<Vector<i32, Const<2>>>::new(2usize);
        let mut begin = Vector::<i32, Const<2>>::empty();
        let mut bias = biased(0i32);
        if comptime!(layout.offset > 0) {
            bias = biased(-(comptime!(layout.offset) * code_sum(left, half, split)));
        }
        // With one column the bias is added after the instruction, which saves registers for its initial sums.
        begin[0] = if comptime!(one) { 0i32.runtime() } else { bias };
        begin[1] = begin[0];
        if comptime!(!one && layout.offset > 0) {
            begin[1] = biased(-(comptime!(layout.offset) * code_sum(right, half, split)));
        }
        start[0] = begin;
        start[1] = begin;
        let mut part = Array::<Vector<u8, Const<4>>>::new(4usize);
        let zero = RuntimeCell::<u32>::new(0u32); // a literal cannot be reinterpreted
        #[unroll]
        for i in 0..4usize {
            if comptime!(split && i / 2 != half) {
                part[i] = Vector::<u8, Const<4>>::reinterpret(zero.read());
            } else {
                part[i] = a[i];
            }
        }
        let dots = definition.execute(&part, &b, &start);
        #[unroll]
        for row in 0..2usize {
            let (to, weight) = (comptime!(sums_at + 2 * row), s[comptime!(2 * half + row)]);
            let dot = if comptime!(one) { dots[row][0] + bias } else { dots[row][0] };
            sums[to] = fused(from_biased(dot), weight * left[0], sums[to], able);
            if comptime!(!one) {
                sums[to + 1] = fused(from_biased(dots[row][1]), weight * right[0], sums[to + 1], able);
            }
        }
    }
    if comptime!(layout.scales.minimum()) {
        #[unroll]
        for row in 0..2usize {
            let to = comptime!(sums_at + 2 * row);
            sums[to] = fused(s[comptime!(4 + row)], left[1], sums[to], able);
            if comptime!(!one) {
                sums[to + 1] = fused(s[comptime!(4 + row)], right[1], sums[to + 1], able);
            }
        }
    }
}
