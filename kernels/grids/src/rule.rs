//! Cell update rules with their parameters, costs and limits.
use crate::error::GridError;
use crate::frame::{Format, Frame};
use crate::fused::STEPS_MAX;
use crate::grid::Grid;
use crate::lbm::{Fluid, Fluid3};
use crate::life::Life;
use crate::rule_file::{self, Interpreter, TextRule};
use crate::scalar::{GrayScott, Heat, Local, Scalar, Wave};
use crate::stepper::Stepper;

/// A rule with its parameters.
#[derive(Clone, Debug)]
pub enum Rule {
    /// Life-like cellular automata.
    Life(Life),
    /// Two-dimensional lattice Boltzmann; [`Fluid::cell`] makes the fields of a cell, [`Fluid::moments`] reads them.
    D2q9(Fluid),
    /// Three-dimensional lattice Boltzmann; fields as in two dimensions.
    D3q19(Fluid3),
    /// The heat equation.
    Heat(Heat),
    /// The wave equation.
    Wave(Wave),
    /// Gray-Scott reaction-diffusion.
    GrayScott(GrayScott),
    /// A rule defined by a rule file.
    Text(TextRule),
}

/// Cost of a cell, in the planner's units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Bits in memory per cell, both time levels included.
    pub state_bits: u64,
    /// Bits read and written per cell and step.
    pub traffic_bits: u64,
    /// Bits sent per cell in the outermost layers of a halo; less than `cell_bits` if the rule needs only the fields
    /// that move inwards.
    pub face_bits: u64,
    /// Bits sent per cell in the other layers of a halo.
    pub cell_bits: u64,
    /// Approximate arithmetic operations per cell and step, for rules that are compute-bound.
    pub operations: u64,
}

impl Rule {
    /// The rule's name in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Life(_) => "life",
            Self::D2q9(_) => Fluid::NAME,
            Self::D3q19(_) => Fluid3::NAME,
            Self::Heat(_) => Heat::NAME,
            Self::Wave(_) => Wave::NAME,
            Self::GrayScott(_) => GrayScott::NAME,
            Self::Text(_) => rule_file::NAME,
        }
    }

    /// Values per cell.
    pub fn fields(&self) -> usize {
        match self {
            Self::Life(_) => 1,
            Self::D2q9(_) => 9,
            Self::D3q19(_) => 19,
            Self::Heat(_) => Heat::FIELDS,
            Self::Wave(_) => Wave::FIELDS,
            Self::GrayScott(_) => GrayScott::FIELDS,
            Self::Text(text) => text.program().fields().len(),
        }
    }

    /// The names of the fields.
    pub fn field_names(&self) -> Vec<String> {
        let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        match self {
            Self::Life(_) => own(&["alive"]),
            Self::D2q9(_) | Self::D3q19(_) => (0..self.fields()).map(|i| format!("f{i}")).collect(),
            Self::Heat(_) => own(&["temperature"]),
            Self::Wave(_) => own(&["height", "before"]),
            Self::GrayScott(_) => own(&["u", "v"]),
            Self::Text(text) => text.program().fields().to_vec(),
        }
    }

    /// The stencil radius: the farthest cell that one step reads, along any axis.
    pub fn radius(&self) -> usize {
        match self {
            Self::Life(_) | Self::D2q9(_) | Self::D3q19(_) | Self::Heat(_) | Self::Wave(_) | Self::GrayScott(_) => 1,
            Self::Text(text) => text.program().radius() as usize,
        }
    }

    /// The cost of a cell.
    pub fn costs(&self) -> Costs {
        let fields = self.fields() as u64;
        // `f32` values per cell stored beside the fields, fields sent per cell of the outermost layers, and operations.
        let (beside, crossing, operations) = match self {
            Self::Life(_) => {
                return Costs { state_bits: 2, traffic_bits: 2, face_bits: 1, cell_bits: 1, operations: 1 };
            }
            Self::D2q9(fluid) => (if fluid.omega.is_some() { 2 } else { 0 }, 3, 75),
            Self::D3q19(fluid) => (if fluid.omega.is_some() { 2 } else { 0 }, 5, 160),
            Self::Heat(_) => (0, 1, 6),
            Self::Wave(_) => (0, 1, 8),
            Self::GrayScott(_) => (0, 2, 18),
            Self::Text(text) => {
                let program = text.program();
                let alone = (0..program.fields().len()).filter(|&field| program.is_pointwise(field)).count() as u64;
                // A rule whose fields are all local still sends them.
                let crossing = if alone == fields { fields } else { fields - alone };
                (0, crossing, program.operations().len() as u64)
            }
        };
        let bits = 8 * self.format().bytes() as u64;
        let all = 2 * bits * fields + 32 * beside;
        Costs { state_bits: all, traffic_bits: all, face_bits: bits * crossing, cell_bits: bits * fields, operations }
    }

    /// Maximum number of steps that a CPU tile computes in one pass over its memory (`fused.rs`).
    pub fn pass_steps(&self, grid: &Grid) -> usize {
        match self {
            Self::D2q9(_) if grid.dimensions() == 2 => STEPS_MAX,
            Self::D2q9(_)
            | Self::Life(_)
            | Self::D3q19(_)
            | Self::Heat(_)
            | Self::Wave(_)
            | Self::GrayScott(_)
            | Self::Text(_) => 1,
        }
    }

    /// The storage format of the rule's fields.
    pub fn format(&self) -> Format {
        match self {
            Self::Life(_) => Format::Bit,
            Self::D2q9(Fluid { storage, .. }) | Self::D3q19(Fluid3 { storage, .. }) => storage.format(),
            Self::Heat(_) | Self::Wave(_) | Self::GrayScott(_) | Self::Text(_) => Format::Float,
        }
    }

    /// Checks that the rule fits the grid: dimensions, boundary conditions, parameters.
    ///
    /// # Errors
    /// The first mismatch.
    pub fn check(&self, grid: &Grid) -> Result<(), GridError> {
        match self {
            Self::Life(life) => life.check(grid),
            Self::D2q9(fluid) => fluid.check(grid),
            Self::D3q19(fluid) => fluid.check(grid),
            Self::Heat(heat) => heat.check(grid),
            Self::Wave(wave) => wave.check(grid),
            Self::GrayScott(reaction) => reaction.check(grid),
            Self::Text(text) => text.check(grid),
        }?;
        (0..grid.dimensions()).try_for_each(|axis| grid.check_radius(axis, self.radius()))
    }

    /// Warns about parameters that are valid but make the rule unstable.
    pub fn warning(&self, grid: &Grid) -> Option<String> {
        let dimensions = grid.dimensions() as f32;
        let spread = 0.5 / dimensions;
        match self {
            Self::Life(_) | Self::Text(_) => None,
            Self::D2q9(fluid) => fluid.warning(grid),
            Self::D3q19(fluid) => fluid.warning(grid),
            Self::Heat(heat) => (heat.rate > spread)
                .then(|| format!("heat with rate {} is unstable: the limit in this grid is {spread}", heat.rate)),
            Self::Wave(wave) => {
                let most = dimensions.sqrt().recip();
                let fast = wave.speed.abs() > most;
                fast.then(|| format!("waves of speed {} are unstable: the limit in this grid is {most}", wave.speed))
            }
            Self::GrayScott(reaction) => {
                let most = reaction.diffusion[0].max(reaction.diffusion[1]);
                (most > spread).then(|| format!("diffusion {most} is unstable: the limit in this grid is {spread}"))
            }
        }
    }

    /// The rule, prepared for a tile of this geometry.
    ///
    /// # Errors
    /// No memory.
    pub fn stepper(&self, frame: &Frame) -> Result<Box<dyn Stepper>, GridError> {
        Ok(match self {
            Self::Life(life) => Box::new(*life),
            Self::D2q9(fluid) => fluid.stepper(frame)?,
            Self::D3q19(fluid) => fluid.stepper(frame)?,
            Self::Heat(heat) => Box::new(Scalar::new(*heat, frame)),
            Self::Wave(wave) => Box::new(Scalar::new(*wave, frame)),
            Self::GrayScott(reaction) => Box::new(Scalar::new(*reaction, frame)),
            Self::Text(text) => Box::new(Interpreter::new(text, frame)),
        })
    }
}
