//! Errors of grids, rules and tiles.
use kernels::planes::NoMemory;
use thiserror::Error;

use crate::region::{AXES, Link, RUN, Region, SIZE_MAX};

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
    HaloTooDeep { depth: usize, halo: usize, cells: usize, axis: char },
    #[error(
        "the rule reads up to {radius} cells away, but {axis} is periodic and has {cells}: give it at least \
         {radius} cells, or walls"
    )]
    AxisTooShort { radius: usize, cells: usize, axis: char },
    #[error("{rule} cannot have {face} at {}_{}: expected {expected}", AXES[*.axis], ["low", "high"][*.side])]
    Face { rule: &'static str, face: String, axis: usize, side: usize, expected: String },
    #[error("{rule}: {what}")]
    Parameter { rule: &'static str, what: String },
    #[error("{steps} steps are requested, but the halo is valid for {left}: exchange halos first")]
    HaloStale { steps: usize, left: usize },
    #[error("only the last pass before a halo exchange is split, boundary strips first; {left} steps are left")]
    NotLastPass { left: usize },
    #[error("the boundary strips of this step are computed and its interior is not: call interior")]
    HalfComputed,
    #[error("invalid link {link:?}: {what}")]
    Link { link: Link, what: &'static str },
    #[error("no link covers {cells} of the {halo} halo cells: pass all neighbours in one call")]
    Uncovered { cells: usize, halo: usize },
    #[error("no link {link}: the tile has {links}")]
    NoLink { link: usize, links: usize },
    #[error("the halo strip of link {link} has {found} bytes, expected {expected}: same rule, halo depth and cuts?")]
    StripLength { link: usize, expected: usize, found: usize },
    #[error("the region {region:?} is empty or not within the tile {tile:?}")]
    Region { region: Region, tile: Region },
    #[error("the saved cells have {found} bytes, expected {expected}: saved by another rule, or truncated?")]
    SavedLength { expected: usize, found: usize },
    #[error("no field {field}: the rule has {fields}")]
    Field { field: usize, fields: usize },
    #[error("the rule is not a fluid: only d2q9 and d3q19 compute forces")]
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

impl From<NoMemory> for GridError {
    fn from(NoMemory { bytes }: NoMemory) -> Self {
        Self::Memory { bytes }
    }
}
