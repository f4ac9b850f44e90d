//! Stream and collide in three dimensions on a device: a unit a cell, the arithmetic of `grid/lbm/d3q19.rs` in the same order;
//! numbers are stored as 32 or 16 bits, arithmetic has 32.
use cubecl::prelude::*;

use super::collision::{Form, Numbers, Shared, get, launched, put, relax, relax_plain, rest};
use super::flow::weights;
use super::memory::{Buffer, address};
use super::place::{Memory, Place, next_to, unit_row};
use crate::grid::frame::Span;
use crate::grid::lbm::D3Q19;
use crate::grid::lbm::d3q19::{DIAGONAL, REST, STRAIGHT};

/// `S`: `f32`, or `f16` if numbers are enlarged; `len`: of these. `halves`: half the rates by cell, or something small.
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
        d3q19_step::launch_unchecked::<S, R>(
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
fn d3q19_step<S: Float>(
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
        let x = place.x + x;
        let y = place.y + row % place.ny;
        let z = place.z + row / place.ny;
        let (ends_x, ends_y, ends_z) = comptime!((form.ends.0[0], form.ends.0[1], form.ends.0[2]));
        let column = x as usize;
        let line = y as usize * place.row;
        let layer = z as usize * place.layer;
        let around = Around {
            column,
            left: next_to(column, x, place.left, place.right, 1usize, comptime!(ends_x[0]), false),
            right: next_to(column, x, place.left, place.right, 1usize, comptime!(ends_x[1]), true),
            line,
            low: next_to(line, y, place.low, place.high, place.row, comptime!(ends_y[0]), false),
            high: next_to(line, y, place.low, place.high, place.row, comptime!(ends_y[1]), true),
            layer,
            near: next_to(layer, z, place.near, place.far, place.layer, comptime!(ends_z[0]), false),
            far: next_to(layer, z, place.near, place.far, place.layer, comptime!(ends_z[1]), true),
        };
        let small = comptime!(form.enlarged);
        let mut f = Sequence::<f32>::new();
        #[unroll]
        for i in 0..19usize {
            f.push(get::<S>(from, i * place.plane + around.pulled(comptime!(D3Q19.c[i])), small));
        }
        let f0 = *f.index(0usize);
        // Sums and differences of opposites.
        let mut s = Sequence::<f32>::new();
        let mut d = Sequence::<f32>::new();
        #[unroll]
        for pair in 0..9usize {
            let (a, b) = (*f.index(comptime!(1 + 2 * pair)), *f.index(comptime!(2 + 2 * pair)));
            s.push(a + b);
            d.push(a - b);
        }
        let straight = (*s.index(0usize) + *s.index(1usize)) + *s.index(2usize);
        let diagonal = ((*s.index(3usize) + *s.index(6usize)) + (*s.index(4usize) + *s.index(7usize)))
            + (*s.index(5usize) + *s.index(8usize));
        let excess = f0 + (straight + diagonal);
        let (xy, xz, yz) = (*d.index(3usize), *d.index(4usize), *d.index(5usize));
        let (xy_down, xz_down, yz_down) = (*d.index(6usize), *d.index(7usize), *d.index(8usize));
        let mut jx = *d.index(0usize) + ((xy + xy_down) + (xz + xz_down));
        let mut jy = *d.index(1usize) + ((xy - xy_down) + (yz + yz_down));
        let mut jz = *d.index(2usize) + ((xz - xz_down) + (yz - yz_down));
        if comptime!(form.force) {
            jx = fma(0.5f32, numbers.fx, jx);
            jy = fma(0.5f32, numbers.fy, jy);
            jz = fma(0.5f32, numbers.fz, jz);
        }
        let per_density = 1.0f32 / (1.0f32 + excess);
        let (ux, uy, uz) = (jx * per_density, jy * per_density, jz * per_density);
        let energy_less = fma(-1.5f32, fma(uz, jz, fma(uy, jy, ux * jx)), excess);
        let here = layer + line + column;
        if comptime!(form.field || form.force) {
            let (mut even, mut odd) = (numbers.half_even, numbers.half_odd);
            if comptime!(form.field) {
                even = halves[here];
                odd = halves[place.plane + here];
            }
            let (fx, fy, fz) = (numbers.fx, numbers.fy, numbers.fz);
            let mut work = 0.0f32;
            if comptime!(form.force) {
                work = fma(uz, fz, fma(uy, fy, ux * fx));
            }
            let shared = Shared { even, odd, rest: energy_less, work };
            put::<S>(to, here, rest(&shared, f0, REST, form.force), small);
            #[unroll]
            for pair in 0..9usize {
                let c = comptime!(D3Q19.c[1 + 2 * pair]);
                let weights = comptime!(weights(if pair < 3 { &STRAIGHT } else { &DIAGONAL }));
                let (j, u, force) = (along(jx, jy, jz, c), along(ux, uy, uz, c), along(fx, fy, fz, c));
                let (a, b) = relax(&shared, *s.index(pair), *d.index(pair), j, u, force, weights, form.force);
                let first = comptime!(1 + 2 * pair);
                let second = comptime!(2 + 2 * pair);
                put::<S>(to, first * place.plane + here, *f.index(first) - (a + b), small);
                put::<S>(to, second * place.plane + here, *f.index(second) - (a - b), small);
            }
        } else {
            put::<S>(to, here, fma(numbers.keep_rest, f0, numbers.rest * energy_less), small);
            let (straight, diagonal) = (numbers.even_straight * energy_less, numbers.even_diagonal * energy_less);
            #[unroll]
            for pair in 0..9usize {
                let c = comptime!(D3Q19.c[1 + 2 * pair]);
                let (j, u) = (along(jx, jy, jz, c), along(ux, uy, uz, c));
                let shared = if comptime!(pair < 3) { straight } else { diagonal };
                let (a, b) = relax_plain(numbers, *s.index(pair), *d.index(pair), j, u, shared, comptime!(pair >= 3));
                put::<S>(to, comptime!(1 + 2 * pair) * place.plane + here, a + b, small);
                put::<S>(to, comptime!(2 + 2 * pair) * place.plane + here, a - b, small);
            }
        }
    }
}

/// A vector's part along a direction, the first of a pair.
#[cube]
fn along(x: f32, y: f32, z: f32, #[comptime] c: [i8; 3]) -> f32 {
    let (first, second) = if comptime!(c[0] > 0) {
        (x, if comptime!(c[1] != 0) { y } else { z })
    } else {
        (if comptime!(c[1] > 0) { y } else { z }, z)
    };
    if comptime!(c.iter().map(|c| *c as i32 * *c as i32).sum::<i32>() == 1) {
        first
    } else if comptime!(c.iter().map(|c| *c as i32).sum::<i32>() == 2) {
        first + second
    } else {
        first - second
    }
}

/// Offsets of columns, rows and layers around a cell, from the beginning of a plane.
#[derive(CubeType, Clone, Copy)]
struct Around {
    column: usize,
    left: usize,
    right: usize,
    line: usize,
    low: usize,
    high: usize,
    layer: usize,
    near: usize,
    far: usize,
}

#[cube]
impl Around {
    /// Where a population that moves that way comes from.
    fn pulled(&self, #[comptime] c: [i8; 3]) -> usize {
        let column = if comptime!(c[0] > 0) {
            self.left
        } else if comptime!(c[0] < 0) {
            self.right
        } else {
            self.column
        };
        let line = if comptime!(c[1] > 0) {
            self.low
        } else if comptime!(c[1] < 0) {
            self.high
        } else {
            self.line
        };
        let layer = if comptime!(c[2] > 0) {
            self.near
        } else if comptime!(c[2] < 0) {
            self.far
        } else {
            self.layer
        };
        layer + line + column
    }
}
