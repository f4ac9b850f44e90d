//! Stream and collide in two dimensions on a device: a unit a cell, the arithmetic of `grid/lbm/d2q9.rs` in the same order.
use cubecl::prelude::*;

use super::collision::{Form, Numbers, Shared, get, launched, put, relax, relax_plain, rest};
use super::flow::weights;
use super::memory::{Buffer, address};
use super::place::{Beyond, Memory, Place, next_to, unit_row};
use crate::grid::frame::Span;
use crate::grid::lbm::d2q9::{DIAGONAL, REST, STRAIGHT};

/// `S`: `f32`, or `f16` if numbers are enlarged; `len`: of these.
#[expect(clippy::too_many_arguments, reason = "those of the kernel")]
pub(super) fn launch<R: Runtime, S: Float>(
    client: &ComputeClient<R>,
    memory: &Memory,
    span: &Span,
    [from, to]: [&Buffer; 2],
    len: usize,
    halves: &Buffer,
    numbers: &[f32; 15],
    form: Form,
    cube: CubeDim,
) {
    // SAFETY: `span` and a cell around it are in memory; units beyond it do nothing.
    unsafe {
        d2q9_step::launch_unchecked::<S, R>(
            client,
            memory.cubes(span, cube, 1),
            cube,
            address(client, len),
            ArrayArg::from_raw_parts(from.handle.clone(), len),
            ArrayArg::from_raw_parts(to.handle.clone(), len),
            halves.arg(),
            memory.place(span),
            launched(numbers),
            form,
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn d2q9_step<S: Float>(
    from: &Array<S>,
    to: &mut Array<S>,
    halves: &Array<f32>,
    place: &Place,
    numbers: &Numbers,
    #[comptime] form: Form,
) {
    let x = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let row = unit_row();
    if x < place.nx && row < place.rows {
        let (x, y) = (place.x + x, place.y + row);
        // Columns to the left and right, rows below and above, as offsets from the beginning of a plane.
        let at = x as usize;
        let (ends_x, ends_y) = comptime!((form.ends.0[0], form.ends.0[1]));
        let left = next_to(at, x, place.left, place.right, 1usize, comptime!(ends_x[0]), false);
        let right = next_to(at, x, place.left, place.right, 1usize, comptime!(ends_x[1]), true);
        let here = y as usize * place.row;
        let low = next_to(here, y, place.low, place.high, place.row, comptime!(ends_y[0]), false);
        let high = next_to(here, y, place.low, place.high, place.row, comptime!(ends_y[1]), true);
        let plane = place.plane;
        let small = comptime!(form.enlarged);

        let f0 = get::<S>(from, here + at, small);
        let f1 = get::<S>(from, plane + here + left, small);
        let f3 = get::<S>(from, 3 * plane + here + right, small);
        let f2 = get::<S>(from, 2 * plane + low + at, small);
        let f4 = get::<S>(from, 4 * plane + high + at, small);
        let f5 = get::<S>(from, 5 * plane + low + left, small);
        let f7 = get::<S>(from, 7 * plane + high + right, small);
        let f6 = get::<S>(from, 6 * plane + low + right, small);
        let f8 = get::<S>(from, 8 * plane + high + left, small);
        let (s1, d1) = (f1 + f3, f1 - f3);
        let (s2, d2) = (f2 + f4, f2 - f4);
        let (s5, d5) = (f5 + f7, f5 - f7);
        let (s6, d6) = (f6 + f8, f6 - f8);
        let excess = f0 + ((s1 + s2) + (s5 + s6));
        let (mut jx, mut jy) = (d1 + (d5 - d6), d2 + (d5 + d6));
        if comptime!(form.force) {
            jx = fma(0.5f32, numbers.fx, jx);
            jy = fma(0.5f32, numbers.fy, jy);
        }
        let per_density = 1.0f32 / (1.0f32 + excess);
        let (ux, uy) = (jx * per_density, jy * per_density);
        let energy_less = fma(-1.5f32, fma(uy, jy, ux * jx), excess);
        let put_at = here + at;
        if comptime!(form.field || form.force) {
            let (mut even, mut odd) = (numbers.half_even, numbers.half_odd);
            if comptime!(form.field) {
                even = halves[put_at];
                odd = halves[plane + put_at];
            }
            let mut work = 0.0f32;
            if comptime!(form.force) {
                work = fma(uy, numbers.fy, ux * numbers.fx);
            }
            let shared = Shared { even, odd, rest: energy_less, work };
            let (fx, fy) = (numbers.fx, numbers.fy);
            let (straight, diagonal) = comptime!((weights(&STRAIGHT), weights(&DIAGONAL)));
            put::<S>(to, put_at, rest(&shared, f0, REST, form.force), small);
            let (a, b) = relax(&shared, s1, d1, jx, ux, fx, straight, form.force);
            put::<S>(to, plane + put_at, f1 - (a + b), small);
            put::<S>(to, 3 * plane + put_at, f3 - (a - b), small);
            let (a, b) = relax(&shared, s2, d2, jy, uy, fy, straight, form.force);
            put::<S>(to, 2 * plane + put_at, f2 - (a + b), small);
            put::<S>(to, 4 * plane + put_at, f4 - (a - b), small);
            let (a, b) = relax(&shared, s5, d5, jx + jy, ux + uy, fx + fy, diagonal, form.force);
            put::<S>(to, 5 * plane + put_at, f5 - (a + b), small);
            put::<S>(to, 7 * plane + put_at, f7 - (a - b), small);
            let (a, b) = relax(&shared, s6, d6, jy - jx, uy - ux, fy - fx, diagonal, form.force);
            put::<S>(to, 6 * plane + put_at, f6 - (a + b), small);
            put::<S>(to, 8 * plane + put_at, f8 - (a - b), small);
        } else {
            put::<S>(to, put_at, fma(numbers.keep_rest, f0, numbers.rest * energy_less), small);
            let shared = numbers.even_straight * energy_less;
            let (a, b) = relax_plain(numbers, s1, d1, jx, ux, shared, false);
            put::<S>(to, plane + put_at, a + b, small);
            put::<S>(to, 3 * plane + put_at, a - b, small);
            let (a, b) = relax_plain(numbers, s2, d2, jy, uy, shared, false);
            put::<S>(to, 2 * plane + put_at, a + b, small);
            put::<S>(to, 4 * plane + put_at, a - b, small);
            let shared = numbers.even_diagonal * energy_less;
            let (a, b) = relax_plain(numbers, s5, d5, jx + jy, ux + uy, shared, true);
            put::<S>(to, 5 * plane + put_at, a + b, small);
            put::<S>(to, 7 * plane + put_at, a - b, small);
            let (a, b) = relax_plain(numbers, s6, d6, jy - jx, uy - ux, shared, true);
            put::<S>(to, 6 * plane + put_at, a + b, small);
            put::<S>(to, 8 * plane + put_at, a - b, small);
        }
    }
}

// The ends of a fluid's tile are closed upon themselves or in memory, nothing else.
const _: fn(Beyond) -> bool = |end| matches!(end, Beyond::Cells | Beyond::Wrap);
