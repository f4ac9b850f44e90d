//! What a cell becomes next: the rules there are, and what a tile asks of each.
use std::ops::Range;
use std::sync::Arc;

use super::frame::{Format, Frame};
use super::planes::{Planes, Shared};
use super::{Grid, GridError};
use crate::cpu::Isa;
use crate::grid::life::Life;

/// A rule with its parameters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// Cells that live and die by the number of their neighbours.
    Life(Life),
}

/// A property of cells by global coordinates.
pub type CellMap<T> = Arc<dyn Fn([usize; 3]) -> T + Send + Sync>;

impl Rule {
    /// How it is called in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Life(_) => "life",
        }
    }

    /// Numbers of a cell.
    pub fn fields(&self) -> usize {
        match self {
            Self::Life(_) => 1,
        }
    }

    /// How far a cell looks in a step.
    pub fn radius(&self) -> usize {
        1
    }

    pub(crate) fn format(&self) -> Format {
        match self {
            Self::Life(_) => Format::Bit,
        }
    }

    /// Whether the rule fits the grid: dimensions, faces, parameters.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self, grid: &Grid) -> Result<(), GridError> {
        match self {
            Self::Life(life) => life.check(grid),
        }
    }

    /// What moves a tile of that geometry.
    pub(crate) fn stepper(&self, _frame: &Frame) -> Box<dyn Stepper> {
        match self {
            Self::Life(life) => Box::new(*life),
        }
    }
}

/// Cells of some rows: one layer, a range of rows, a part of each.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) z: isize,
    pub(crate) y: Range<isize>,
    pub(crate) x: Range<isize>,
}

/// A rule at work on one tile.
pub(crate) trait Stepper: Send + Sync {
    /// Makes the ghosts of a state before a step is computed from it.
    fn fill(&self, frame: &Frame, state: &mut Planes);

    /// Computes rows of the next state, and at most the rest of their blocks.
    ///
    /// # Safety
    /// `rows` and what is a radius around them are within the frame; nobody else reads or writes these rows of `next`.
    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows);

    /// Where a field moves to in a step if it moves with every step: of the outermost layer of a halo only what moves
    /// inwards is needed. `None`: all of it is.
    fn travels(&self, _field: usize) -> Option<[i8; 3]> {
        None
    }

    /// Which of the 64 cells from a multiple of 64 on are no part of the state, the lowest bit first.
    fn hidden(&self, _at: [usize; 3]) -> u64 {
        0
    }
}
