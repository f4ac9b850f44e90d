//! Simulations on a dense grid of cells: a global grid, tiles that own boxes of it, and the rules that move them.
//!
//! A [`Grid`] says how large the world is and what happens at its faces. A [`Tile`](tile::Tile) owns a box of it, keeps a
//! copy of its neighbours' cells around it and advances step by step; what it computes does not depend on where the cuts
//! are, how deep the copies are or how many threads compute, to the last bit. A [`Rule`](rule::Rule) is what a cell
//! becomes next. Next: `grid/tile.rs`, `grid/any_tile.rs`, `grid/rule.rs`, then `grid/life.rs` for the shortest rule.

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

/// Cuts across x fall on multiples of this: the state hash is made of runs of so many cells.
pub const RUN: usize = 64;
/// Cells along one axis, at most: offsets within a tile stay far from the ends of an `isize`.
pub const SIZE_MAX: usize = 1 << 24;

/// The whole world: its size, and what is beyond each face.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// Two or three.
    dimensions: usize,
    /// Cells along x, y and z; z is 1 in two dimensions.
    size: [usize; 3],
    /// By axis, at the low and at the high end.
    faces: [[Face; 2]; 3],
}

/// What is beyond a face of the grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Face {
    /// The opposite face.
    Periodic,
    /// Nothing passes: dead cells, no flux, fluid at rest half a cell beyond the last one.
    Wall,
    /// Scalar rules: cells that keep these values, one a field.
    Fixed([f32; rule_file::FIELDS_MAX]),
    /// Fluids: a wall that moves along itself.
    Moving {
        /// Cells a step.
        velocity: [f32; 3],
    },
    /// Fluids: what comes in, or goes out, has this velocity half a cell beyond the last one, at the density of the outlets (1
    /// where there is none).
    Inlet {
        /// Cells a step; the largest if the profile is a parabola.
        velocity: [f32; 3],
        /// Whether the velocity falls to zero at the ends of the face like that of a channel.
        parabola: bool,
    },
    /// Fluids: what goes out, or comes in, has this density in the last cells.
    Outlet {
        /// 1 is the density of the fluid at rest.
        density: f32,
    },
}

impl Face {
    /// As a job file says it.
    pub(crate) fn written(&self, dimensions: usize) -> String {
        let list = |parts: &[f32]| parts.iter().map(f32::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Periodic => "\"periodic\"".into(),
            Self::Wall => "\"wall\"".into(),
            Self::Fixed(values) if values.iter().all(|value| *value == values[0]) => {
                format!("{{ fixed = {} }}", values[0])
            }
            Self::Fixed(values) => {
                // A list of one would say the same of all fields.
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

    /// A grid without faces.
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

    /// What is beyond the low and the high end of an axis.
    pub fn faces(&self, axis: usize) -> [Face; 2] {
        self.faces[axis]
    }

    /// All of it.
    pub fn region(&self) -> Region {
        Region { start: [0; 3], end: self.size }
    }

    /// That a rule cannot have what is beyond a face, which must be as `expected` says.
    pub(crate) fn bad_face(&self, rule: &'static str, axis: usize, side: usize, expected: &str) -> GridError {
        let face = self.faces[axis][side].written(self.dimensions);
        GridError::Face { rule, face, axis, side, expected: expected.into() }
    }

    fn is_periodic(&self, axis: usize) -> bool {
        self.faces[axis][0] == Face::Periodic
    }

    /// Whether a rule that looks so far sees further round a periodic axis than it is long. No tile of any cut could be: a
    /// halo is no longer than the axis either.
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
    /// One beyond the highest.
    pub end: [usize; 3],
}

impl Region {
    /// Along x, y and z.
    pub fn size(&self) -> [usize; 3] {
        std::array::from_fn(|axis| self.end[axis].saturating_sub(self.start[axis]))
    }

    /// How many there are.
    pub fn cells(&self) -> usize {
        self.size().iter().product()
    }

    /// Whether all cells of `other` are in it.
    pub fn contains(&self, other: &Self) -> bool {
        (0..3).all(|axis| self.start[axis] <= other.start[axis] && other.end[axis] <= self.end[axis])
    }
}

/// What is wrong with a grid, a tile or what one is given.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum GridError {
    #[error("a grid has two or three axes and two faces for each, not {sizes} sizes and faces for {faces} axes")]
    Axes { sizes: usize, faces: usize },
    #[error("{size} cells along {axis}: 1 to {SIZE_MAX} are possible")]
    Size { axis: char, size: usize },
    #[error("one face of {axis} is periodic and the other is not: both or neither")]
    HalfPeriodic { axis: char },
    #[error("the tile {tile:?} is empty or reaches beyond the grid of {grid:?}")]
    Outside { tile: Region, grid: [usize; 3] },
    #[error("a cut at x = {x}: cuts across x fall on multiples of {RUN}")]
    Cut { x: usize },
    #[error("the halo is 0 steps deep: at least 1 is needed")]
    NoHalo,
    #[error(
        "a halo of {depth} steps is {halo} cells deep, but there are only {cells} beside the tile along {axis}: use \
         fewer steps"
    )]
    Deep { depth: usize, halo: usize, cells: usize, axis: char },
    #[error(
        "the rule looks {radius} cells far, but {axis} is periodic and has {cells} only: make it {radius} cells long, or put \
         walls there"
    )]
    Thin { radius: usize, cells: usize, axis: char },
    #[error("{rule} cannot have {face} at {}_{}: expected {expected}", AXES[*.axis], ["low", "high"][*.side])]
    Face { rule: &'static str, face: String, axis: usize, side: usize, expected: String },
    #[error("{rule}: {what}")]
    Parameter { rule: &'static str, what: String },
    #[error("{steps} steps are wanted, but the halo lasts for {left}: exchange it first")]
    Stale { steps: usize, left: usize },
    #[error("only the last step before an exchange is made in two parts; {left} are left")]
    Parts { left: usize },
    #[error("the strips of this step are made and its interior is not: call interior")]
    Half,
    #[error("the link {link:?} cannot be: {what}")]
    Link { link: Link, what: &'static str },
    #[error("nobody is said to own {cells} of the {halo} cells around the tile: all neighbours are needed at once")]
    Uncovered { cells: usize, halo: usize },
    #[error("link {link} is none: the tile has {links}")]
    NoLink { link: usize, links: usize },
    #[error("the strip of link {link} has {found} bytes, {expected} are needed: same rule, depth and cut?")]
    Strip { link: usize, expected: usize, found: usize },
    #[error("the region {region:?} is empty or not within the tile {tile:?}")]
    Region { region: Region, tile: Region },
    #[error("the saved cells have {found} bytes, {expected} are needed: another rule, or cut short?")]
    Saved { expected: usize, found: usize },
    #[error("field {field} is wanted, the rule has {fields}")]
    Field { field: usize, fields: usize },
    #[error("the rule has no fluid that could push anything: only d2q9 and d3q19 know forces")]
    NoForce,
    #[error("no memory for {bytes} bytes")]
    Memory { bytes: usize },
    #[error(
        "the tile needs {needed} bytes of the device's memory, {free} are free: use a smaller tile or another device"
    )]
    DeviceMemory { needed: usize, free: usize },
    #[error("a buffer of {bytes} bytes is needed, the device allows {most}: cut the grid into more tiles")]
    Buffer { bytes: usize, most: usize },
    #[error("the device failed, its tile is lost and must be restored elsewhere: {what}")]
    Device { what: String },
    #[error("pattern, line {line}: {what}")]
    Pattern { line: usize, what: String },
}

pub(crate) const AXES: [char; 3] = ['x', 'y', 'z'];
