//! A fluid on one tile of a device: what both lattices share around their kernels.
use cubecl::prelude::*;
use half::f16;

use super::collision::{Form, Weights};
use super::edges::Edges;
use super::memory::{Buffer, units};
use super::place::{Ends, Memory};
use super::{d2q9, d3q19};
use crate::grid::GridError;
use crate::grid::frame::{Format, Frame, Span};
use crate::grid::lbm::{self, Lattice, LatticeFluid};

/// What moves a fluid.
pub(super) struct Flow {
    pub(super) form: Form,
    /// In the order of [`super::collision::Numbers`].
    pub(super) numbers: [f32; 15],
    /// Half the rates of the even and of the odd parts, by cell; something small if they are the same everywhere.
    pub(super) halves: Buffer,
    edges: Edges,
    three: bool,
    /// Cells of a unit, beside each other, that are worth most: 1, 2 or 4.
    pub(super) each: usize,
    /// At most: rows of the grid are whole groups of them, so that all its tiles' are.
    each_max: usize,
    /// Units of a cube.
    pub(super) cube: CubeDim,
}

impl Flow {
    pub(super) fn new<R: Runtime, const D: usize>(
        client: &ComputeClient<R>,
        flow: &lbm::Flow<D, f32>,
        frame: &Frame,
        memory: &Memory,
    ) -> Result<Self, GridError>
    where
        LatticeFluid<D>: Lattice,
    {
        let halves = match &flow.halves {
            None => Buffer::from_elements(client, &[0; 4])?,
            Some(planes) => {
                let halves = Buffer::new(client, 2 * memory.plane)?;
                for half in 0..2 {
                    halves.write(client, half * memory.plane, bytemuck::cast_slice(planes.plane::<f32>(half)));
                }
                halves
            }
        };
        let plain = &flow.plain;
        let [[e0, e1], [n0, n1], [o0, o1]] = [plain.even, plain.energy, plain.odd];
        let ([even, odd], [fx, fy, fz]) = (flow.half, flow.force);
        let (keep_rest, rest, keep_even, keep_odd) = (plain.keep_rest, plain.rest, plain.keep_even, plain.keep_odd);
        let numbers = [keep_rest, rest, keep_even, e0, e1, n0, n1, keep_odd, o0, o1, even, odd, fx, fy, fz];
        let edges = Edges::new(client, &flow.edges, LatticeFluid::<D>::DIRECTIONS, frame, memory)?;
        let form = Form {
            field: flow.halves.is_some(),
            force: flow.force != [0.0; 3],
            linked: edges.links.is_some(),
            enlarged: frame.format == Format::Half,
            ends: Ends::new(frame).wraps_only(),
        };
        let each_max = 1 << frame.grid.size()[0].trailing_zeros().min(2);
        // Those of 16 bits make whole words together. Measured on an H200: four at a time take 1 % less of FP32 and 4 to 18 % less
        // of FP16 than fewer, in cubes of so many units.
        let (each, most) = match (flow.halves.is_some(), frame.format) {
            (true, format) => (4 / format.bytes(), 256),
            (false, Format::Half) => (4, 128),
            (false, _) => (4, 256),
        };
        let most = units(client, most);
        // Long rows: what is read of one is next to what is read of the next. Of short ones several, or units are idle.
        let across = (frame.size[0] as u32).div_ceil(each.min(each_max) as u32).next_power_of_two().clamp(32, most);
        let cube = CubeDim::new_2d(across, most / across);
        Ok(Self { form, numbers, halves, edges, three: D == 3, each, each_max, cube })
    }

    pub(super) fn each(&self) -> usize {
        self.each.min(self.each_max)
    }

    /// Of the tile's edges, or something small.
    pub(super) fn links(&self) -> &Buffer {
        self.edges.links.as_ref().unwrap_or(&self.halves)
    }

    /// Makes what is pulled from beyond the tile's edges.
    pub(super) fn prepare<R: Runtime>(&self, client: &ComputeClient<R>, state: &Buffer, memory: &Memory) {
        if self.form.enlarged {
            self.edges.fill::<R, f16>(client, (state, 2 * state.len, true), memory);
        } else {
            self.edges.fill::<R, f32>(client, (state, state.len, false), memory);
        }
    }

    pub(super) fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        memory: &Memory,
        span: &Span,
        states: [&Buffer; 2],
    ) {
        let launch = match (self.three, self.form.enlarged) {
            (false, false) => d2q9::launch::<R, f32>,
            (false, true) => d2q9::launch::<R, f16>,
            (true, false) => d3q19::launch::<R, f32>,
            (true, true) => d3q19::launch::<R, f16>,
        };
        // What is computed beyond a span is in a halo: nobody reads it there before it comes anew.
        launch(self, client, memory, &span.in_groups(self.each()), states);
    }
}

/// As kernels take them.
pub(super) const fn weights(of: &lbm::collision::Weights) -> Weights {
    (of.two, of.six, of.nine)
}
