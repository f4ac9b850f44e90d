//! Memory layout of a tile: the owned box, the halo towards neighbours, and ghost cells elsewhere.
//!
//! Coordinates are local: the owned box begins at 0, halo and ghost cells before it are negative. *Halo* cells belong
//! to neighbours and are recomputed here while the halo is valid. *Ghost* cells are outside a face of the grid, or
//! copies of the other end of a periodic axis that the tile owns whole; they are refilled before each step.
use std::ops::Range;

use crate::error::GridError;
use crate::grid::{Face, Grid};
use crate::region::{AXES, RUN, Region, SIZE_MAX};

/// Storage format of the cells in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// One `f32` per cell; rows are aligned to 64 bytes.
    Float,
    /// One half-precision number per cell ([`Half`](crate::number::Half)); rows are aligned to 32 bytes.
    Half,
    /// One bit per cell, 64 in a `u64`, lowest bit first.
    Bit,
}

impl Format {
    /// Cells per element.
    pub fn cells(self) -> usize {
        match self {
            Self::Float | Self::Half => 1,
            Self::Bit => 64,
        }
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Float => 4,
            Self::Half => 2,
            Self::Bit => 8,
        }
    }

    /// Cells per block: kernels round the ends of a row up to multiples of this.
    pub fn block(self) -> usize {
        match self {
            Self::Float | Self::Half => 16,
            Self::Bit => 64,
        }
    }
}

/// A box in local coordinates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span(
    /// Cells along x, y and z.
    pub [Range<isize>; 3],
);

impl Span {
    /// Whether it has no cells.
    pub fn is_empty(&self) -> bool {
        self.0.iter().any(Range::is_empty)
    }

    /// Cells along an axis.
    pub fn len(&self, axis: usize) -> usize {
        self.0[axis].len()
    }

    /// Number of cells.
    pub fn cells(&self) -> usize {
        self.0.iter().map(Range::len).product()
    }

    /// The intersection.
    pub fn meet(&self, other: &Self) -> Self {
        let (a, b) = (&self.0, &other.0);
        Self(std::array::from_fn(|axis| a[axis].start.max(b[axis].start)..a[axis].end.min(b[axis].end)))
    }

    /// All (y, z) pairs, z outermost.
    pub fn rows(&self) -> impl Iterator<Item = (isize, isize)> + use<> {
        let (y, z) = (self.0[1].clone(), self.0[2].clone());
        z.flat_map(move |z| y.clone().map(move |y| (y, z)))
    }
}

/// A tile's geometry.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The global grid.
    pub grid: Grid,
    /// The owned cells in global coordinates.
    pub owned: Region,
    /// Halo depth: steps between halo exchanges.
    pub depth: usize,
    /// Stencil radius of the rule.
    pub radius: usize,
    /// Storage format of the cells.
    pub format: Format,
    /// Owned cells along each axis.
    pub size: [isize; 3],
    /// Halo width in cells at both ends of each axis: `depth · radius` towards a neighbour, else 0.
    pub halo: [[isize; 2]; 3],
    /// Width in cells of the storage around the owned box: the halo, or ghost cells of one radius.
    pub ring: [[isize; 2]; 3],
    /// Periodic axes that the tile owns whole.
    pub wraps: [bool; 3],
    /// Elements between consecutive rows, and between consecutive layers.
    row: usize,
    layer: usize,
    /// Element that holds the cell (0, 0, 0).
    first: usize,
    /// Elements per plane.
    len: usize,
}

impl Frame {
    /// The geometry of a tile that owns `owned`.
    ///
    /// # Errors
    /// No halo depth, a region outside the grid or cut inside a run, or a halo that does not fit beside it.
    pub fn new(grid: &Grid, owned: Region, depth: usize, radius: usize, format: Format) -> Result<Self, GridError> {
        if depth == 0 {
            return Err(GridError::NoHalo);
        }
        if owned.cells() == 0 || !grid.region().contains(&owned) {
            return Err(GridError::Outside { tile: owned, grid: grid.size() });
        }
        for x in [owned.start[0], owned.end[0]] {
            if x % RUN != 0 && x != grid.size()[0] {
                return Err(GridError::Cut { x });
            }
        }
        // A tile without neighbours allows any depth; the bound prevents overflow.
        let depth = depth.min(SIZE_MAX);
        let reach = depth.saturating_mul(radius);
        let halo = Self::halos(grid, owned, reach);
        let (mut ring, mut wraps) = ([[0; 2]; 3], [false; 3]);
        for axis in 0..grid.dimensions() {
            let (start, end, size) = (owned.start[axis], owned.end[axis], grid.size()[axis]);
            wraps[axis] = grid.is_periodic(axis) && end - start == size;
            let deep = |cells| Err(GridError::HaloTooDeep { depth, halo: reach, cells, axis: AXES[axis] });
            if wraps[axis] {
                grid.check_radius(axis, radius)?;
            }
            // A halo ends at a face of the grid and never reaches the owned cells from the other side.
            let there = if grid.is_periodic(axis) { [size - (end - start); 2] } else { [start, size - end] };
            for side in 0..2 {
                if halo[axis][side] > 0 && there[side] < reach {
                    return deep(there[side]);
                }
                ring[axis][side] = halo[axis][side].max(radius as isize);
            }
        }
        let size = owned.size();
        let cells = format.cells();
        // Blocks that begin or end in the halo are computed whole and read one radius further: pad rows for that. No
        // radius exceeds a block.
        let pad = |side: usize| match format {
            Format::Float | Format::Half => (halo[0][side] as usize).next_multiple_of(16) + 16,
            Format::Bit => (ring[0][side] as usize).div_ceil(cells).max(1) + usize::from(ring[0][side] > 1),
        };
        let align = if format == Format::Bit { 1 } else { 16 };
        let (left, right) = (pad(0), pad(1));
        let row = (left + size[0].div_ceil(cells) + right).next_multiple_of(align);
        let layer = row * (size[1] + (ring[1][0] + ring[1][1]) as usize);
        let len = layer * (size[2] + (ring[2][0] + ring[2][1]) as usize);
        let first = left + ring[1][0] as usize * row + ring[2][0] as usize * layer;
        let size = size.map(|size| size as isize);
        Ok(Self { grid: grid.clone(), owned, depth, radius, format, size, halo, ring, wraps, row, layer, first, len })
    }

    /// Halo width in cells at both ends of each axis of a region: `reach`, or 0 at a face or if the region spans the
    /// axis.
    pub fn halos(grid: &Grid, owned: Region, reach: usize) -> [[isize; 2]; 3] {
        // Longer than any grid: prevents overflow.
        let reach = reach.min(2 * SIZE_MAX) as isize;
        std::array::from_fn(|axis| {
            let (start, end) = (owned.start[axis], owned.end[axis]);
            let whole = start == 0 && end == grid.size()[axis];
            let beyond = !whole && grid.is_periodic(axis);
            [start > 0, end < grid.size()[axis]].map(|inside| if inside || beyond { reach } else { 0 })
        })
    }

    /// Bytes per plane.
    pub fn plane_bytes(&self) -> usize {
        self.len * self.format.bytes()
    }

    /// Elements per plane.
    pub fn elements(&self) -> usize {
        self.len
    }

    /// Elements between consecutive rows, and between consecutive layers.
    pub fn strides(&self) -> [isize; 2] {
        [self.row as isize, self.layer as isize]
    }

    /// The element that holds a cell.
    pub fn at(&self, [x, y, z]: [isize; 3]) -> usize {
        let x = x.div_euclid(self.format.cells() as isize);
        (self.first as isize + x + y * self.row as isize + z * self.layer as isize) as usize
    }

    /// The owned cells and the part of the halo needed for `steps` further steps.
    pub fn span(&self, steps: usize) -> Span {
        let reach = (steps * self.radius) as isize;
        Span(std::array::from_fn(|axis| {
            let [low, high] = self.halo[axis];
            -low.min(reach)..self.size[axis] + high.min(reach)
        }))
    }

    /// Splits the owned cells into boundary strips along neighbours, in whole blocks, and the interior.
    pub fn cut(&self) -> (Vec<Span>, Span) {
        let mut rest = self.span(0);
        let mut strips = Vec::new();
        for axis in [2, 1, 0] {
            let block = if axis == 0 { self.format.block() as isize } else { 1 };
            let (size, [low, high]) = (self.size[axis], self.halo[axis]);
            let start = ((low + block - 1) / block * block).min(size);
            let end = ((size - high) / block * block).max(start);
            for range in [0..start, end..size] {
                let mut strip = rest.clone();
                strip.0[axis] = range;
                if !strip.is_empty() {
                    strips.push(strip);
                }
            }
            rest.0[axis] = start..end;
        }
        (strips, rest)
    }

    /// All stored cells.
    pub fn whole(&self) -> Span {
        Span(std::array::from_fn(|axis| -self.ring[axis][0]..self.size[axis] + self.ring[axis][1]))
    }

    /// Global coordinates of a local cell; `None` outside the grid.
    pub fn global(&self, at: [isize; 3]) -> Option<[usize; 3]> {
        let mut global = [0; 3];
        for axis in 0..3 {
            let (size, place) = (self.grid.size()[axis] as isize, self.owned.start[axis] as isize + at[axis]);
            let inside = (0..size).contains(&place);
            if !inside && !self.grid.is_periodic(axis) {
                return None;
            }
            global[axis] = place.rem_euclid(size) as usize;
        }
        Some(global)
    }

    /// Local coordinates of an owned global cell.
    pub fn local(&self, at: [usize; 3]) -> [isize; 3] {
        std::array::from_fn(|axis| at[axis] as isize - self.owned.start[axis] as isize)
    }

    /// A region of owned cells in local coordinates.
    pub fn within(&self, region: Region) -> Span {
        let (start, end) = (self.local(region.start), self.local(region.end));
        Span(std::array::from_fn(|axis| start[axis]..end[axis]))
    }

    /// The boundary condition at an end of an axis, if the tile touches that face and the axis is not periodic.
    pub fn face(&self, axis: usize, side: usize) -> Option<Face> {
        let reached =
            if side == 0 { self.owned.start[axis] == 0 } else { self.owned.end[axis] == self.grid.size()[axis] };
        (axis < self.grid.dimensions() && reached && !self.grid.is_periodic(axis)).then(|| self.grid.faces(axis)[side])
    }
}
