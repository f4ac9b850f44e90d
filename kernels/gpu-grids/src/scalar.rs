//! Heat, wave and Gray-Scott kernels: one thread per cell, same arithmetic as `kernels/grids/src/scalar.rs`, in the same order.
use cubecl::prelude::*;
use kernels_grids::frame::Span;

use crate::memory::{Buffer, address};
use crate::place::{Boundary, Ends, Memory, Place, next_to, or_fixed, unit_row};

/// The rule: a compile-time parameter of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Heat,
    Wave,
    GrayScott,
}

/// A rule of one or two fields, with its parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalar {
    pub(super) kind: Kind,
    pub(super) parameters: [f32; 4],
    pub(super) ends: Ends,
    pub(super) three: bool,
    /// Threads per cube.
    pub(super) cube: CubeDim,
}

impl Scalar {
    pub(super) fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        memory: &Memory,
        span: &Span,
        [from, to]: [&Buffer; 2],
    ) {
        let dim = self.cube;
        let [a, b, c, d] = self.parameters;
        // SAFETY: `span` and one cell around it are in memory; threads outside it do nothing.
        unsafe {
            scalar_step::launch_unchecked::<R>(
                client,
                memory.cubes(span, dim, 1),
                dim,
                address(client, from.len),
                from.arg(),
                to.arg(),
                memory.place(span),
                a,
                b,
                c,
                d,
                self.kind,
                self.ends,
                self.three,
            );
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scalar_step(
    from: &Array<f32>,
    to: &mut Array<f32>,
    place: &Place,
    a: f32,
    b: f32,
    c: f32,
    d: f32,
    #[comptime] kind: Kind,
    #[comptime] ends: Ends,
    #[comptime] three: bool,
) {
    let x = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let row = unit_row();
    if x < place.nx && row < place.rows {
        let here = Here::new(place, x, row, three);
        match kind {
            Kind::Heat => {
                let u = from[here.at];
                to[here.at] = fma(a, here.laplacian(from, place, 0usize, ends, three), u);
            }
            Kind::Wave => {
                let now = from[here.at];
                let onwards = (now + now) - from[here.at + place.plane];
                to[here.at] = fma(a, here.laplacian(from, place, 0usize, ends, three), onwards);
                to[here.at + place.plane] = now;
            }
            Kind::GrayScott => {
                let (u, v) = (from[here.at], from[here.at + place.plane]);
                let reaction = u * (v * v);
                let fed = fma(c, 1.0f32 - u, 0.0f32 - reaction);
                let lost = fma(d, v, reaction);
                to[here.at] = u + fma(a, here.laplacian(from, place, 0usize, ends, three), fed);
                to[here.at + place.plane] = v + fma(b, here.laplacian(from, place, 1usize, ends, three), lost);
            }
        }
    }
}

/// The cell of a thread.
#[derive(CubeType, Clone, Copy)]
struct Here {
    x: u32,
    y: u32,
    z: u32,
    at: usize,
}

#[cube]
impl Here {
    fn new(place: &Place, x: u32, row: u32, #[comptime] three: bool) -> Here {
        let x = place.x + x;
        let mut y = place.y + row;
        let mut z = place.z;
        if comptime!(three) {
            y = place.y + row % place.ny;
            z = place.z + row / place.ny;
        }
        let at = z as usize * place.layer + y as usize * place.row + x as usize;
        Here { x, y, z, at }
    }

    /// The sum of the neighbours minus the cell times their number.
    fn laplacian(
        &self,
        from: &Array<f32>,
        place: &Place,
        #[comptime] field: usize,
        #[comptime] ends: Ends,
        #[comptime] three: bool,
    ) -> f32 {
        let plane = field * place.plane;
        let (x, y, z) = comptime!((ends.0[0], ends.0[1], ends.0[2]));
        let across = pair(from, plane, self.at, self.x, place.left, place.right, 1usize, x, field);
        let mut sum = across + pair(from, plane, self.at, self.y, place.low, place.high, place.row, y, field);
        if comptime!(three) {
            sum += pair(from, plane, self.at, self.z, place.near, place.far, place.layer, z, field);
        }
        let count = if comptime!(three) { -6.0f32 } else { -4.0f32 };
        fma(count, from[plane + self.at], sum)
    }
}

/// The sum of both neighbours along an axis.
#[cube]
fn pair(
    from: &Array<f32>,
    plane: usize,
    at: usize,
    position: u32,
    first: u32,
    last: u32,
    stride: usize,
    #[comptime] ends: [Boundary; 2],
    #[comptime] field: usize,
) -> f32 {
    let before = from[plane + next_to(at, position, first, last, stride, comptime!(ends[0]), false)];
    let after = from[plane + next_to(at, position, first, last, stride, comptime!(ends[1]), true)];
    let before = or_fixed(before, position, first, comptime!(ends[0]), field);
    let after = or_fixed(after, position, last, comptime!(ends[1]), field);
    before + after
}
