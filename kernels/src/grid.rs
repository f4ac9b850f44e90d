//! Stencil simulations on a dense grid: the global grid, the tiles that partition it, and the rules that advance its
//! cells.
//!
//! A [`Grid`] gives the size of the domain and its boundary conditions. A [`Tile`](tile::Tile) owns a box of the grid,
//! keeps a halo of its neighbours' cells around it and advances step by step. Its results are bit-identical for any
//! partition, halo depth and number of threads. A [`Rule`](rule::Rule) computes the next state of a cell. Next:
//! `grid/tile.rs`, `grid/any_tile.rs`, `grid/rule.rs`, then `grid/life.rs` for the shortest rule.

pub mod any_tile;
pub mod bench;
pub mod lbm;
pub mod life;
pub mod rule;
pub mod rule_file;
pub mod scalar;
pub mod simulation;
pub mod tile;

pub(crate) mod frame;
pub(crate) mod fused;
mod ghosts;
pub(crate) mod halo;
pub(crate) mod hash;
pub(crate) mod number;
pub(crate) mod planes;
pub(crate) mod state;
#[cfg(test)]
mod tests;

pub use halo::{Link, links};
pub use state::Look;
use thiserror::Error;

/// Cuts across x must be at multiples of this number of cells: the state hash is computed over runs of this length.
pub const RUN: usize = 64;
/// Maximum number of cells along one axis: offsets within a tile stay far from the limits of `isize`.
pub const SIZE_MAX: usize = 1 << 24;

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
    Fixed([f32; rule_file::FIELDS_MAX]),
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

    fn is_periodic(&self, axis: usize) -> bool {
        self.faces[axis][0] == Face::Periodic
    }

    /// Fails if a periodic axis is shorter than the rule's radius. No partition could help: a halo is never wider than
    /// the axis either.
    pub(crate) fn check_radius(&self, axis: usize, radius: usize) -> Result<(), GridError> {
        let cells = self.size[axis];
        if self.is_periodic(axis) && cells < radius {
            return Err(GridError::Thin { radius, cells, axis: AXES[axis] });
        }
        Ok(())
    }
}

/// A box of cells in global coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    /// The lowest x, y and z.
    pub start: [usize; 3],
    /// The highest x, y and z, exclusive.
    pub end: [usize; 3],
}

impl Region {
    /// Cells along x, y and z.
    pub fn size(&self) -> [usize; 3] {
        std::array::from_fn(|axis| self.end[axis].saturating_sub(self.start[axis]))
    }

    /// Number of cells.
    pub fn cells(&self) -> usize {
        self.size().iter().product()
    }

    /// Whether `other` lies within this region.
    pub fn contains(&self, other: &Self) -> bool {
        (0..3).all(|axis| self.start[axis] <= other.start[axis] && other.end[axis] <= self.end[axis])
    }
}

/// Errors of grids and tiles and of their inputs.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum GridError {
    #[error("a grid has two or three axes and two faces per axis: found {sizes} sizes and faces for {faces} axes")]
    Axes { sizes: usize, faces: usize },
    #[error("{size} cells along {axis}: expected 1 to {SIZE_MAX}")]
    Size { axis: char, size: usize },
    #[error("one face of {axis} is periodic and the other is not: make both periodic or neither")]
    HalfPeriodic { axis: char },
    #[error("the tile {tile:?} is empty or extends outside the grid of {grid:?}")]
    Outside { tile: Region, grid: [usize; 3] },
    #[error("a cut at x = {x}: cuts across x must be at multiples of {RUN}")]
    Cut { x: usize },
    #[error("halo depth 0: expected at least 1 step")]
    NoHalo,
    #[error(
        "a halo depth of {depth} steps needs {halo} cells, but only {cells} are beside the tile along {axis}: reduce \
         the depth"
    )]
    Deep { depth: usize, halo: usize, cells: usize, axis: char },
    #[error(
        "the rule looks {radius} cells far, but {axis} is periodic and has {cells} only: make it at least {radius} \
         cells long, or put walls there"
    )]
    Thin { radius: usize, cells: usize, axis: char },
    #[error("{rule} cannot have {face} at {}_{}: expected {expected}", AXES[*.axis], ["low", "high"][*.side])]
    Face { rule: &'static str, face: String, axis: usize, side: usize, expected: String },
    #[error("{rule}: {what}")]
    Parameter { rule: &'static str, what: String },
    #[error("{steps} steps are requested, but the halo is valid for {left}: exchange halos first")]
    Stale { steps: usize, left: usize },
    #[error("only the last pass before a halo exchange is split, boundary strips first; {left} steps are left")]
    Parts { left: usize },
    #[error("the boundary strips of this step are computed and its interior is not: call interior")]
    Half,
    #[error("invalid link {link:?}: {what}")]
    Link { link: Link, what: &'static str },
    #[error("no link covers {cells} of the {halo} halo cells: pass all neighbours in one call")]
    Uncovered { cells: usize, halo: usize },
    #[error("no link {link}: the tile has {links}")]
    NoLink { link: usize, links: usize },
    #[error("the halo strip of link {link} has {found} bytes, expected {expected}: same rule, halo depth and cuts?")]
    Strip { link: usize, expected: usize, found: usize },
    #[error("the region {region:?} is empty or not within the tile {tile:?}")]
    Region { region: Region, tile: Region },
    #[error("the saved cells have {found} bytes, expected {expected}: saved by another rule, or truncated?")]
    Saved { expected: usize, found: usize },
    #[error("no field {field}: the rule has {fields}")]
    Field { field: usize, fields: usize },
    #[error("the rule is no fluid: only d2q9 and d3q19 compute forces")]
    NoForce,
    #[error("cannot allocate {bytes} bytes")]
    Memory { bytes: usize },
    #[error("the tile needs {needed} bytes of device memory, {free} are free: use a smaller tile or another device")]
    DeviceMemory { needed: usize, free: usize },
    #[error("the tile needs a buffer of {bytes} bytes, the device allows {most}: cut the grid into more tiles")]
    Buffer { bytes: usize, most: usize },
    #[error("the device failed; its tile is lost and must be restored on another device: {what}")]
    Device { what: String },
    #[error("pattern, line {line}: {what}")]
    Pattern { line: usize, what: String },
}

pub(crate) const AXES: [char; 3] = ['x', 'y', 'z'];
