//! Chooses the kernels of a rule and launches them for each step of a tile.
use cubecl::prelude::*;
use kernels_grids::frame::{Frame, Span};
use kernels_grids::lbm::{self, Lattice, LatticeFluid};
use kernels_grids::rule::Rule;
use kernels_grids::stepper::Stepper;
use kernels_grids::{Face, GridError};

use crate::flow::Flow;
use crate::life::{Counts, Life};
use crate::memory::{Buffer, units};
use crate::place::{Ends, Memory};
use crate::scalar::{Kind, Scalar};
use crate::text::Text;

/// A rule on a GPU tile.
pub(super) enum Motion {
    Life(Life),
    Scalar(Scalar),
    Fluid(Box<Flow>),
    Text(Box<Text>),
}

/// A Life tile of more bytes than this has enough rows to occupy all threads of a device.
const LARGE: usize = 16 << 20;

impl Motion {
    /// Also returns the CPU form of the rule, which provides hidden cells and streaming directions.
    pub(super) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        rule: &Rule,
        frame: &Frame,
        memory: &Memory,
    ) -> Result<(Self, Box<dyn Stepper>), GridError> {
        let (ends, three) = (Ends::new(frame), frame.grid.dimensions() == 3);
        let cube = CubeDim::new_2d(units(client, 256) / 2, 2);
        let scalar = |kind, parameters| Self::Scalar(Scalar { kind, parameters, ends, three, cube });
        let motion = match rule {
            Rule::Life(life) => {
                let (birth, survival) = life.counts();
                let valid = (frame.size[0] as u32 - 1) % 32 + 1;
                // Rows of a thread share sums, but on a small tile many rows per thread leave too few threads.
                let each = if frame.plane_bytes() > LARGE { 16 } else { 4 };
                let cube = CubeDim::new_2d(128, 1);
                Self::Life(Life { counts: Counts { birth, survival }, ends, valid, cube, each })
            }
            Rule::Heat(heat) => scalar(Kind::Heat, [heat.rate, 0.0, 0.0, 0.0]),
            Rule::Wave(wave) => scalar(Kind::Wave, [wave.speed * wave.speed, 0.0, 0.0, 0.0]),
            Rule::GrayScott(rule) => {
                let [u, v] = rule.diffusion;
                scalar(Kind::GrayScott, [u, v, rule.feed, -(rule.feed + rule.kill)])
            }
            Rule::Text(text) => Self::Text(Box::new(Text::new(client, text, frame)?)),
            Rule::D2q9(fluid) => return Self::fluid(client, fluid, frame, memory),
            Rule::D3q19(fluid) => return Self::fluid(client, fluid, frame, memory),
        };
        Ok((motion, rule.stepper(frame)?))
    }

    fn fluid<R: Runtime, const D: usize>(
        client: &ComputeClient<R>,
        fluid: &LatticeFluid<D>,
        frame: &Frame,
        memory: &Memory,
    ) -> Result<(Self, Box<dyn Stepper>), GridError>
    where
        LatticeFluid<D>: Lattice,
    {
        // The storage format affects only CPU steps, which are never run here.
        let flow = lbm::Flow::<D, f32>::new(fluid, frame)?;
        Ok((Self::Fluid(Box::new(Flow::new(client, &flow, frame, memory)?)), Box::new(flow)))
    }

    /// Sets the shape of cubes, and the rows (fluids: adjacent cells) per thread; this affects only speed.
    pub(super) fn shape(&mut self, cube: [u32; 2], rows: usize) {
        let cube_dim = CubeDim::new_2d(cube[0], cube[1]);
        match self {
            Self::Life(life) => (life.cube, life.each) = (cube_dim, rows),
            Self::Scalar(scalar) => scalar.cube = cube_dim,
            Self::Fluid(flow) => (flow.cube, flow.each) = (cube_dim, rows),
            Self::Text(text) => text.cube = cube_dim,
        }
    }

    /// Bytes on the device besides the two states.
    pub(super) fn bytes(rule: &Rule, frame: &Frame) -> usize {
        let (rates, solid) = match rule {
            Rule::D2q9(fluid) => (fluid.omega.is_some(), fluid.solid.is_some()),
            Rule::D3q19(fluid) => (fluid.omega.is_some(), fluid.solid.is_some()),
            Rule::Life(_) | Rule::Heat(_) | Rule::Wave(_) | Rule::GrayScott(_) | Rule::Text(_) => return 0,
        };
        let ends = (0..3).flat_map(|axis| [0, 1].map(|side| frame.face(axis, side)));
        let walls = ends.flatten().any(|face| matches!(face, Face::Wall | Face::Moving { .. }));
        let links = if solid || walls { frame.elements() / 4 } else { 0 };
        links + if rates { 8 * frame.elements() } else { 0 }
    }

    /// Prepares a state for the next step.
    pub(super) fn prepare<R: Runtime>(&self, client: &ComputeClient<R>, state: &Buffer, memory: &Memory) {
        match self {
            Self::Fluid(flow) => flow.prepare(client, state, memory),
            Self::Life(_) | Self::Scalar(_) | Self::Text(_) => {}
        }
    }

    /// Launches the computation of cells of the next state.
    pub(super) fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        memory: &Memory,
        span: &Span,
        states: [&Buffer; 2],
    ) {
        match self {
            Self::Life(life) => life.launch(client, memory, span, states),
            Self::Scalar(scalar) => scalar.launch(client, memory, span, states),
            Self::Fluid(flow) => flow.launch(client, memory, span, states),
            Self::Text(text) => text.launch(client, memory, span, states),
        }
    }
}
