//! What a cell becomes next: the rules there are, and what a tile asks of each.
use std::ops::Range;
use std::sync::Arc;

use super::frame::{Format, Frame};
use super::fused::{RowWise, STEPS_MAX};
use super::planes::{Planes, Shared};
use super::{Grid, GridError};
use crate::cpu::Isa;
use crate::grid::lbm::{Fluid, Fluid3};
use crate::grid::life::Life;
use crate::grid::rule_file::{self, Interpreter, TextRule};
use crate::grid::scalar::{GrayScott, Heat, Local, Scalar, Wave};

/// A rule with its parameters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// Cells that live and die by the number of their neighbours.
    Life(Life),
    /// A fluid in two dimensions; the fields of a cell come from [`Fluid::cell`] and go to [`Fluid::moments`].
    D2q9(Fluid),
    /// A fluid in three dimensions; fields as in two.
    D3q19(Fluid3),
    /// Heat that spreads.
    Heat(Heat),
    /// Waves.
    Wave(Wave),
    /// Two substances that react and spread.
    GrayScott(GrayScott),
    /// Whatever a text says.
    Text(TextRule),
}

/// What a cell costs, as planners of grids count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Bits in memory, all copies.
    pub state_bits: u64,
    /// Bits read and written in a step.
    pub traffic_bits: u64,
    /// Bits sent of a cell in the outermost layers of a halo: only what moves inwards, if the rule knows.
    pub face_bits: u64,
    /// Bits sent of a cell in the other layers.
    pub cell_bits: u64,
    /// Arithmetic operations in a step, about: of use where a rule computes more than it reads.
    pub operations: u64,
}

/// A property of cells by global coordinates.
pub type CellMap<T> = Arc<dyn Fn([usize; 3]) -> T + Send + Sync>;

impl Rule {
    /// How it is called in messages.
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

    /// Numbers of a cell.
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

    /// What these numbers are called.
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

    /// How far a cell looks in a step.
    pub fn radius(&self) -> usize {
        match self {
            Self::Life(_) | Self::D2q9(_) | Self::D3q19(_) | Self::Heat(_) | Self::Wave(_) | Self::GrayScott(_) => 1,
            Self::Text(text) => text.program().radius() as usize,
        }
    }

    /// What a cell costs.
    pub fn costs(&self) -> Costs {
        let fields = self.fields() as u64;
        // Numbers of a cell: `f32` kept beside the fields, fields sent of the outermost layers, and operations.
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
                let alone = (0..program.fields().len()).filter(|&field| program.is_alone(field)).count() as u64;
                // A rule all of whose fields are alone sends them, too.
                let crossing = if alone == fields { fields } else { fields - alone };
                (0, crossing, program.operations().len() as u64)
            }
        };
        let bits = 8 * self.format().bytes() as u64;
        let all = 2 * bits * fields + 32 * beside;
        Costs { state_bits: all, traffic_bits: all, face_bits: bits * crossing, cell_bits: bits * fields, operations }
    }

    /// Most steps that a processor makes in one pass over the memory of a tile (`grid/fused.rs`).
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

    pub(crate) fn format(&self) -> Format {
        match self {
            Self::Life(_) => Format::Bit,
            Self::D2q9(Fluid { storage, .. }) | Self::D3q19(Fluid3 { storage, .. }) => storage.format(),
            Self::Heat(_) | Self::Wave(_) | Self::GrayScott(_) | Self::Text(_) => Format::Float,
        }
    }

    /// Whether the rule fits the grid: dimensions, faces, parameters.
    ///
    /// # Errors
    /// What does not fit.
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

    /// What is possible and yet likely to end badly: parameters at which the rule is unstable.
    pub fn warning(&self, grid: &Grid) -> Option<String> {
        let dimensions = grid.dimensions() as f32;
        let spread = 0.5 / dimensions;
        match self {
            Self::Life(_) | Self::Text(_) => None,
            Self::D2q9(fluid) => fluid.warning(grid),
            Self::D3q19(fluid) => fluid.warning(grid),
            Self::Heat(heat) => (heat.rate > spread)
                .then(|| format!("heat with rate {} is unstable: {spread} is the most in this grid", heat.rate)),
            Self::Wave(wave) => {
                let most = dimensions.sqrt().recip();
                let fast = wave.speed.abs() > most;
                fast.then(|| format!("waves of speed {} are unstable: {most} is the most in this grid", wave.speed))
            }
            Self::GrayScott(reaction) => {
                let most = reaction.diffusion[0].max(reaction.diffusion[1]);
                (most > spread).then(|| format!("diffusion {most} is unstable: {spread} is the most in this grid"))
            }
        }
    }

    /// What moves a tile of that geometry.
    pub(crate) fn stepper(&self, frame: &Frame) -> Result<Box<dyn Stepper>, GridError> {
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

/// Cells of some rows: one layer, a range of rows, a part of each.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) z: isize,
    pub(crate) y: Range<isize>,
    pub(crate) x: Range<isize>,
}

/// The sum of a field of the state over elements of its plane, in units of 2^-40.
pub(crate) type SumOf<'a> = &'a mut dyn FnMut(usize, &[usize]) -> Result<i128, GridError>;

/// A rule at work on one tile.
pub(crate) trait Stepper: Send + Sync {
    /// Makes the ghosts of a state before so many steps are computed from it in one pass.
    fn fill(&self, frame: &Frame, state: &mut Planes, steps: usize);

    /// Computes rows of the next state, and at most the rest of their blocks.
    ///
    /// # Safety
    /// `rows` and what is a radius around them are within the frame; nobody else reads or writes these rows of `next`.
    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows);

    /// The same by single rows, if it can.
    fn row_wise(&self) -> Option<&dyn RowWise> {
        None
    }

    /// Where a field moves to in a step if it moves with every step: of the outermost layer of a halo only what moves
    /// inwards is needed. `None`: all of it is.
    fn travels(&self, _field: usize) -> Option<[i8; 3]> {
        None
    }

    /// What the next step gives the cells that the rule hides, if it moves anything, in units of 2^-40. `sum`: see there.
    fn force(&self, _sum: SumOf<'_>) -> Result<Option<[i128; 3]>, GridError> {
        Ok(None)
    }

    /// Which of the 64 cells from a multiple of 64 on are no part of the state, the lowest bit first.
    fn hidden(&self, _at: [usize; 3]) -> u64 {
        0
    }
}

/// Called in a kernel, sees to it that registers are saved at aligned places: the compiler aligns a frame only if there is
/// something aligned in it before it knows what it has to save. Else, depending on where the stack happens to be, such a
/// place may lie across a page boundary, and all of the kernel is three times slower.
#[inline(always)]
pub(crate) fn aligned_frame() {
    #[repr(align(64))]
    struct Aligned(#[expect(dead_code, reason = "only its place matters")] [u8; 64]);
    std::hint::black_box(&mut Aligned([0; 64]));
}
