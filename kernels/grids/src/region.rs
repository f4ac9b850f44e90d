//! Boxes of cells, properties of cells, and neighbours of a tile: what grids, tiles, rules and error messages share.
use std::sync::Arc;

/// Cuts across x must be at multiples of this number of cells: the state hash is computed over runs of this length.
pub const RUN: usize = 64;
/// Maximum number of cells along one axis: offsets within a tile stay far from the limits of `isize`.
pub const SIZE_MAX: usize = 1 << 24;

/// The names of the axes.
pub const AXES: [char; 3] = ['x', 'y', 'z'];

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

/// A neighbour: the region its tile owns, and its displacement in whole grids along each periodic axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The cells that its tile owns.
    pub region: Region,
    /// Displacement in whole grids along x, y and z.
    pub shift: [i8; 3],
}

/// A property of cells by global coordinates.
pub type CellMap<T> = Arc<dyn Fn([usize; 3]) -> T + Send + Sync>;
