//! A lattice Boltzmann fluid bound to one GPU tile: everything around the kernels that the lattices share.
use cubecl::prelude::*;
use half::f16;
use kernels_grids::GridError;
use kernels_grids::frame::{Format, Frame, Span};
use kernels_grids::lbm::{self, Lattice, LatticeFluid};

use crate::collision::{Form, Weights};
use crate::edges::Edges;
use crate::memory::{Buffer, units};
use crate::place::{Ends, Memory, in_groups};
use crate::{d2q9, d3q19};

/// Launch state of a fluid.
pub(super) struct Flow {
    pub(super) form: Form,
    /// In the order of [`super::collision::Numbers`].
    pub(super) numbers: [f32; 15],
    /// Half the relaxation rates per cell, even and odd; a small dummy if uniform.
    pub(super) halves: Buffer,
    edges: Edges,
    three: bool,
    /// Preferred number of adjacent cells per thread: 1, 2 or 4.
    pub(super) each: usize,
    /// Maximum for `each`: rows of the grid are whole groups of this many cells, so those of all tiles are too.
    each_max: usize,
    /// Threads per cube.
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
        // 16-bit numbers are grouped into whole words. Measured on an H200: four cells per thread take 1 % less time in
        // FP32 and 4 to 18 % less in FP16 than fewer cells, with cubes of this size.
        let (each, most) = match (flow.halves.is_some(), frame.format) {
            (true, format) => (4 / format.bytes(), 256),
            (false, Format::Half) => (4, 128),
            (false, _) => (4, 256),
        };
        let most = units(client, most);
        // Long rows per cube, so that reads are adjacent; several short rows, so that threads are not idle.
        let across = (frame.size[0] as u32).div_ceil(each.min(each_max) as u32).next_power_of_two().clamp(32, most);
        let cube = CubeDim::new_2d(across, most / across);
        Ok(Self { form, numbers, halves, edges, three: D == 3, each, each_max, cube })
    }

    pub(super) fn each(&self) -> usize {
        self.each.min(self.each_max)
    }

    /// Bounce-back links of the tile, or a small dummy.
    pub(super) fn links(&self) -> &Buffer {
        self.edges.links.as_ref().unwrap_or(&self.halves)
    }

    /// Applies the boundary conditions to `state` before a step.
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
        // Cells computed outside the span are in a halo, and nothing reads them before the next exchange.
        launch(self, client, memory, &in_groups(span, self.each()), states);
    }
}

/// Weights in the form that kernels take.
pub(super) const fn weights(of: &lbm::collision::Weights) -> Weights {
    (of.two, of.six, of.nine)
}
