//! The global grid: its size, and the boundary conditions at its faces.
use crate::error::GridError;
use crate::region::{AXES, Region, SIZE_MAX};
use crate::rule_file::limits::FIELDS_MAX;

/// The global domain: its size and its boundary conditions.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// Two or three.
    dimensions: usize,
    /// Cells along x, y and z; z is 1 in two dimensions.
    size: [usize; 3],
    /// Boundary conditions, by axis; low end first.
    faces: [[Face; 2]; 3],
}

/// The boundary condition at one face of the grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Face {
    /// Wraps around to the opposite face.
    Periodic,
    /// No flux: dead cells for Life, a mirror image for scalar rules, no slip half a cell outside the last cell for
    /// fluids.
    Wall,
    /// Scalar rules: ghost cells keep these values, one per field.
    Fixed([f32; FIELDS_MAX]),
    /// Fluids: a wall that moves along itself.
    Moving {
        /// Cells per step.
        velocity: [f32; 3],
    },
    /// Fluids: fluid enters or leaves with this velocity, imposed half a cell outside the last cell, at the density of
    /// the outlets (1 without an outlet).
    Inlet {
        /// Cells per step; the maximum of a parabolic profile.
        velocity: [f32; 3],
        /// Parabolic profile: the velocity falls to zero at the ends of the face, as in a channel.
        parabola: bool,
    },
    /// Fluids: fluid leaves or enters at this density, imposed in the last cells.
    Outlet {
        /// 1 is the density of the fluid at rest.
        density: f32,
    },
}

impl Face {
    /// Formats the boundary condition in job file syntax.
    pub(crate) fn written(&self, dimensions: usize) -> String {
        let list = |parts: &[f32]| parts.iter().map(f32::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Periodic => "\"periodic\"".into(),
            Self::Wall => "\"wall\"".into(),
            Self::Fixed(values) if values.iter().all(|value| *value == values[0]) => {
                format!("{{ fixed = {} }}", values[0])
            }
            Self::Fixed(values) => {
                // A list of one value would read as "the same for all fields".
                let fields = values.iter().rposition(|value| *value != 0.0).map_or(2, |last| (last + 1).max(2));
                format!("{{ fixed = [{}] }}", list(&values[..fields]))
            }
            Self::Moving { velocity } => format!("{{ moving = [{}] }}", list(&velocity[..dimensions])),
            Self::Inlet { velocity, parabola } => {
                let profile = if *parabola { ", profile = \"parabola\"" } else { "" };
                format!("{{ inlet = [{}]{profile} }}", list(&velocity[..dimensions]))
            }
            Self::Outlet { density } => format!("{{ outlet = {density} }}"),
        }
    }
}

impl Grid {
    /// A grid of two or three dimensions, each axis with its low and its high face.
    ///
    /// # Errors
    /// Sizes that are zero or too large, another number of axes, one periodic face without the other.
    pub fn new(size: &[usize], faces: &[[Face; 2]]) -> Result<Self, GridError> {
        if !(2..=3).contains(&size.len()) || faces.len() != size.len() {
            return Err(GridError::Axes { sizes: size.len(), faces: faces.len() });
        }
        let mut grid = Self { dimensions: size.len(), size: [1; 3], faces: [[Face::Wall; 2]; 3] };
        for (axis, (&size, &faces)) in size.iter().zip(faces).enumerate() {
            if !(1..=SIZE_MAX).contains(&size) {
                return Err(GridError::Size { axis: AXES[axis], size });
            }
            if (faces[0] == Face::Periodic) != (faces[1] == Face::Periodic) {
                return Err(GridError::HalfPeriodic { axis: AXES[axis] });
            }
            grid.size[axis] = size;
            grid.faces[axis] = faces;
        }
        Ok(grid)
    }

    /// A grid that is periodic along every axis.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn periodic(size: &[usize]) -> Result<Self, GridError> {
        Self::new(size, &vec![[Face::Periodic; 2]; size.len()])
    }

    /// A grid whose faces are all walls.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn closed(size: &[usize]) -> Result<Self, GridError> {
        Self::new(size, &vec![[Face::Wall; 2]; size.len()])
    }

    /// Two or three.
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// Cells along x, y and z; z is 1 in two dimensions.
    pub fn size(&self) -> [usize; 3] {
        self.size
    }

    /// The boundary conditions at the low and the high end of an axis.
    pub fn faces(&self, axis: usize) -> [Face; 2] {
        self.faces[axis]
    }

    /// All cells of the grid.
    pub fn region(&self) -> Region {
        Region { start: [0; 3], end: self.size }
    }

    /// The error for a boundary condition that a rule does not support; `expected` describes the supported ones.
    pub(crate) fn bad_face(&self, rule: &'static str, axis: usize, side: usize, expected: &str) -> GridError {
        let face = self.faces[axis][side].written(self.dimensions);
        GridError::Face { rule, face, axis, side, expected: expected.into() }
    }

    /// Whether an axis is periodic.
    pub(crate) fn is_periodic(&self, axis: usize) -> bool {
        self.faces[axis][0] == Face::Periodic
    }

    /// Fails if a periodic axis is shorter than the rule's radius. No partition could help: a halo is never wider than
    /// the axis either.
    pub(crate) fn check_radius(&self, axis: usize, radius: usize) -> Result<(), GridError> {
        let cells = self.size[axis];
        if self.is_periodic(axis) && cells < radius {
            return Err(GridError::AxisTooShort { radius, cells, axis: AXES[axis] });
        }
        Ok(())
    }
}
