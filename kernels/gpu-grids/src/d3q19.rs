//! D3Q19 stream-collide kernel: one thread per cell, or per few adjacent cells. Same arithmetic as `kernels/grids/src/lbm/d3q19.rs`,
//! in the same order; storage is 32 or 16 bits, arithmetic 32 bits.
use cubecl::prelude::*;
use kernels_grids::frame::Span;
use kernels_grids::lbm::D3Q19;
use kernels_grids::lbm::d3q19::{DIAGONAL, REST, STRAIGHT};

use crate::collision::{
    Cells, Form, Numbers, Shared, bounced, columns, launched, pulled, put, relax, relax_plain, rest,
};
use crate::flow::{Flow, weights};
use crate::memory::{Buffer, address};
use crate::place::{Memory, Place, next_to, unit_row};

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
        d3q19_step::launch_unchecked::<S, R>(
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
fn d3q19_step<S: Float, N: Size>(
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
        let x = place.x + x;
        let y = place.y + row % place.ny;
        let z = place.z + row / place.ny;
        let (ends_x, ends_y, ends_z) = comptime!((form.ends.0[0], form.ends.0[1], form.ends.0[2]));
        let columns = columns::<N>(x, place.left, place.right, ends_x);
        let line = y as usize * place.row;
        let layer = z as usize * place.layer;
        let around = Around {
            line,
            low: next_to(line, y, place.low, place.high, place.row, comptime!(ends_y[0]), false),
            high: next_to(line, y, place.low, place.high, place.row, comptime!(ends_y[1]), true),
            layer,
            near: next_to(layer, z, place.near, place.far, place.layer, comptime!(ends_z[0]), false),
            far: next_to(layer, z, place.near, place.far, place.layer, comptime!(ends_z[1]), true),
        };
        let small = comptime!(form.enlarged);
        let mut f = Sequence::<Cells<N>>::new();
        #[unroll]
        for i in 0..19usize {
            let c = comptime!(D3Q19.c[i]);
            f.push(pulled::<S, N>(from, i * place.plane + around.pulled(c), &columns, comptime!(c[0]), small));
        }
        let here = layer + line + x as usize;
        let f =
            if comptime!(form.linked) { bounced::<S, N>(from, links, &f, here, place.plane, true, small) } else { f };
        let f0 = *f.index(0usize);
        // Sums and differences of opposite populations.
        let mut s = Sequence::<Cells<N>>::new();
        let mut d = Sequence::<Cells<N>>::new();
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
            let half = Cells::<N>::new(0.5f32);
            jx = fma(half, Cells::<N>::new(numbers.fx), jx);
            jy = fma(half, Cells::<N>::new(numbers.fy), jy);
            jz = fma(half, Cells::<N>::new(numbers.fz), jz);
        }
        let one = Cells::<N>::new(1.0f32);
        let per_density = one / (one + excess);
        let (ux, uy, uz) = (jx * per_density, jy * per_density, jz * per_density);
        let energy_less = fma(Cells::<N>::new(-1.5f32), fma(uz, jz, fma(uy, jy, ux * jx)), excess);
        if comptime!(form.field || form.force) {
            let mut even = Cells::<N>::new(numbers.half_even);
            let mut odd = Cells::<N>::new(numbers.half_odd);
            if comptime!(form.field) {
                even = halves[here / N::value()];
                odd = halves[(place.plane + here) / N::value()];
            }
            let (fx, fy, fz) = (numbers.fx, numbers.fy, numbers.fz);
            let mut work = Cells::<N>::new(0.0f32);
            if comptime!(form.force) {
                let (x, y, z) = (Cells::<N>::new(fx), Cells::<N>::new(fy), Cells::<N>::new(fz));
                work = fma(uz, z, fma(uy, y, ux * x));
            }
            let shared = Shared::<N> { even, odd, rest: energy_less, work };
            put::<S, N>(to, here, rest::<N>(&shared, f0, REST, form.force), small);
            #[unroll]
            for pair in 0..9usize {
                let c = comptime!(D3Q19.c[1 + 2 * pair]);
                let weights = comptime!(weights(if pair < 3 { &STRAIGHT } else { &DIAGONAL }));
                let (j, u) = (along::<Cells<N>>(jx, jy, jz, c), along::<Cells<N>>(ux, uy, uz, c));
                let force = along::<f32>(fx, fy, fz, c);
                let (a, b) = relax::<N>(&shared, *s.index(pair), *d.index(pair), j, u, force, weights, form.force);
                let first = comptime!(1 + 2 * pair);
                let second = comptime!(2 + 2 * pair);
                put::<S, N>(to, first * place.plane + here, *f.index(first) - (a + b), small);
                put::<S, N>(to, second * place.plane + here, *f.index(second) - (a - b), small);
            }
        } else {
            let rest = Cells::<N>::new(numbers.rest) * energy_less;
            put::<S, N>(to, here, fma(Cells::<N>::new(numbers.keep_rest), f0, rest), small);
            let straight = Cells::<N>::new(numbers.even_straight) * energy_less;
            let diagonal = Cells::<N>::new(numbers.even_diagonal) * energy_less;
            #[unroll]
            for pair in 0..9usize {
                let c = comptime!(D3Q19.c[1 + 2 * pair]);
                let (j, u) = (along::<Cells<N>>(jx, jy, jz, c), along::<Cells<N>>(ux, uy, uz, c));
                let shared = if comptime!(pair < 3) { straight } else { diagonal };
                let slanted = comptime!(pair >= 3);
                let (a, b) = relax_plain::<N>(numbers, *s.index(pair), *d.index(pair), j, u, shared, slanted);
                put::<S, N>(to, comptime!(1 + 2 * pair) * place.plane + here, a + b, small);
                put::<S, N>(to, comptime!(2 + 2 * pair) * place.plane + here, a - b, small);
            }
        }
    }
}

/// Component of a vector along the first direction of a pair.
#[cube]
fn along<F: CubePrimitive + std::ops::Add<Output = F> + std::ops::Sub<Output = F>>(
    x: F,
    y: F,
    z: F,
    #[comptime] c: [i8; 3],
) -> F {
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

/// Offsets of rows and layers around a cell, from the start of a plane.
#[derive(CubeType, Clone, Copy)]
struct Around {
    line: usize,
    low: usize,
    high: usize,
    layer: usize,
    near: usize,
    far: usize,
}

#[cube]
impl Around {
    /// Start of the row from which a population with velocity `c` is pulled.
    fn pulled(&self, #[comptime] c: [i8; 3]) -> usize {
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
        layer + line
    }
}
