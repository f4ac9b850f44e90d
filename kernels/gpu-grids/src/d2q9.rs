//! D2Q9 stream-collide kernel: one thread per cell, or per few adjacent cells. Same arithmetic as `kernels/grids/src/lbm/d2q9.rs`,
//! in the same order; storage is 32 or 16 bits, arithmetic 32 bits.
use cubecl::prelude::*;
use kernels_grids::frame::Span;
use kernels_grids::lbm::D2Q9;
use kernels_grids::lbm::d2q9::{DIAGONAL, REST, STRAIGHT};

use crate::collision::{
    Cells, Form, Numbers, Shared, bounced, columns, launched, pulled, put, relax, relax_plain, rest,
};
use crate::flow::{Flow, weights};
use crate::memory::{Buffer, address};
use crate::place::{Boundary, Memory, Place, next_to, unit_row};

/// `S`: `f32`, or `f16` if numbers are stored scaled. `span` consists of whole groups of the cells of a thread.
pub(super) fn launch<R: Runtime, S: Float>(
    flow: &Flow,
    client: &ComputeClient<R>,
    memory: &Memory,
    span: &Span,
    [from, to]: [&Buffer; 2],
) {
    let (len, each, cube) = (from.len * memory.of_word, flow.each(), flow.cube);
    // SAFETY: `span` and one cell around it are in memory; threads outside it do nothing.
    unsafe {
        d2q9_step::launch_unchecked::<S, R>(
            client,
            memory.cubes_of(span, cube, each),
            cube,
            address(client, len),
            each,
            ArrayArg::from_raw_parts(from.handle.clone(), len),
            ArrayArg::from_raw_parts(to.handle.clone(), len),
            flow.halves.arg(),
            flow.links().arg(),
            memory.place(span),
            launched(&flow.numbers),
            flow.form,
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn d2q9_step<S: Float, N: Size>(
    from: &Array<Vector<S, N>>,
    to: &mut Array<Vector<S, N>>,
    halves: &Array<Vector<f32, N>>,
    links: &Array<u32>,
    place: &Place,
    numbers: &Numbers,
    #[comptime] form: Form,
) {
    let x = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) * N::value() as u32;
    let row = unit_row();
    if x < place.nx && row < place.rows {
        let (x, y) = (place.x + x, place.y + row);
        // Columns to the left and right, rows below and above, as offsets from the start of a plane.
        let (ends_x, ends_y) = comptime!((form.ends.0[0], form.ends.0[1]));
        let columns = columns::<N>(x, place.left, place.right, ends_x);
        let here = y as usize * place.row;
        let low = next_to(here, y, place.low, place.high, place.row, comptime!(ends_y[0]), false);
        let high = next_to(here, y, place.low, place.high, place.row, comptime!(ends_y[1]), true);
        let plane = place.plane;
        let small = comptime!(form.enlarged);

        let mut f = Sequence::<Cells<N>>::new();
        #[unroll]
        for i in 0..9usize {
            let c = comptime!(D2Q9.c[i]);
            let line = if comptime!(c[1] > 0) {
                low
            } else if comptime!(c[1] < 0) {
                high
            } else {
                here
            };
            f.push(pulled::<S, N>(from, i * plane + line, &columns, comptime!(c[0]), small));
        }
        let put_at = here + x as usize;
        let f = if comptime!(form.linked) { bounced::<S, N>(from, links, &f, put_at, plane, false, small) } else { f };
        let (f0, f1, f2) = (*f.index(0usize), *f.index(1usize), *f.index(2usize));
        let (f3, f4, f5) = (*f.index(3usize), *f.index(4usize), *f.index(5usize));
        let (f6, f7, f8) = (*f.index(6usize), *f.index(7usize), *f.index(8usize));
        let (s1, d1) = (f1 + f3, f1 - f3);
        let (s2, d2) = (f2 + f4, f2 - f4);
        let (s5, d5) = (f5 + f7, f5 - f7);
        let (s6, d6) = (f6 + f8, f6 - f8);
        let excess = f0 + ((s1 + s2) + (s5 + s6));
        let (mut jx, mut jy) = (d1 + (d5 - d6), d2 + (d5 + d6));
        if comptime!(form.force) {
            let half = Cells::<N>::new(0.5f32);
            jx = fma(half, Cells::<N>::new(numbers.fx), jx);
            jy = fma(half, Cells::<N>::new(numbers.fy), jy);
        }
        let one = Cells::<N>::new(1.0f32);
        let per_density = one / (one + excess);
        let (ux, uy) = (jx * per_density, jy * per_density);
        let energy_less = fma(Cells::<N>::new(-1.5f32), fma(uy, jy, ux * jx), excess);
        if comptime!(form.field || form.force) {
            let mut even = Cells::<N>::new(numbers.half_even);
            let mut odd = Cells::<N>::new(numbers.half_odd);
            if comptime!(form.field) {
                even = halves[put_at / N::value()];
                odd = halves[(plane + put_at) / N::value()];
            }
            let mut work = Cells::<N>::new(0.0f32);
            if comptime!(form.force) {
                work = fma(uy, Cells::<N>::new(numbers.fy), ux * Cells::<N>::new(numbers.fx));
            }
            let shared = Shared::<N> { even, odd, rest: energy_less, work };
            let (fx, fy) = (numbers.fx, numbers.fy);
            let (straight, diagonal) = comptime!((weights(&STRAIGHT), weights(&DIAGONAL)));
            put::<S, N>(to, put_at, rest::<N>(&shared, f0, REST, form.force), small);
            let (a, b) = relax::<N>(&shared, s1, d1, jx, ux, fx, straight, form.force);
            put::<S, N>(to, plane + put_at, f1 - (a + b), small);
            put::<S, N>(to, 3 * plane + put_at, f3 - (a - b), small);
            let (a, b) = relax::<N>(&shared, s2, d2, jy, uy, fy, straight, form.force);
            put::<S, N>(to, 2 * plane + put_at, f2 - (a + b), small);
            put::<S, N>(to, 4 * plane + put_at, f4 - (a - b), small);
            let (a, b) = relax::<N>(&shared, s5, d5, jx + jy, ux + uy, fx + fy, diagonal, form.force);
            put::<S, N>(to, 5 * plane + put_at, f5 - (a + b), small);
            put::<S, N>(to, 7 * plane + put_at, f7 - (a - b), small);
            let (a, b) = relax::<N>(&shared, s6, d6, jy - jx, uy - ux, fy - fx, diagonal, form.force);
            put::<S, N>(to, 6 * plane + put_at, f6 - (a + b), small);
            put::<S, N>(to, 8 * plane + put_at, f8 - (a - b), small);
        } else {
            let rest = Cells::<N>::new(numbers.rest) * energy_less;
            put::<S, N>(to, put_at, fma(Cells::<N>::new(numbers.keep_rest), f0, rest), small);
            let shared = Cells::<N>::new(numbers.even_straight) * energy_less;
            let (a, b) = relax_plain::<N>(numbers, s1, d1, jx, ux, shared, false);
            put::<S, N>(to, plane + put_at, a + b, small);
            put::<S, N>(to, 3 * plane + put_at, a - b, small);
            let (a, b) = relax_plain::<N>(numbers, s2, d2, jy, uy, shared, false);
            put::<S, N>(to, 2 * plane + put_at, a + b, small);
            put::<S, N>(to, 4 * plane + put_at, a - b, small);
            let shared = Cells::<N>::new(numbers.even_diagonal) * energy_less;
            let (a, b) = relax_plain::<N>(numbers, s5, d5, jx + jy, ux + uy, shared, true);
            put::<S, N>(to, 5 * plane + put_at, a + b, small);
            put::<S, N>(to, 7 * plane + put_at, a - b, small);
            let (a, b) = relax_plain::<N>(numbers, s6, d6, jy - jx, uy - ux, shared, true);
            put::<S, N>(to, 6 * plane + put_at, a + b, small);
            put::<S, N>(to, 8 * plane + put_at, a - b, small);
        }
    }
}

// A fluid tile's ends are periodic or in memory, nothing else.
const _: fn(Boundary) -> bool = |end| matches!(end, Boundary::Cells | Boundary::Wrap);
