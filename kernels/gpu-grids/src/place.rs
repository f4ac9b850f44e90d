//! Addressing of GPU tiles: which cells a launch computes, where they are in memory, and boundary conditions at the
//! ends.
//!
//! Kernels count cells from the start of memory along each axis, halo and padding included, so indices are never
//! negative. Ghost cells are not stored: kernels resolve neighbours outside the tile by index arithmetic (`Boundary`).
use cubecl::prelude::*;
use kernels_grids::Face;
use kernels_grids::frame::{Format, Frame, Span};
use kernels_grids::rule_file::FIELDS_MAX;

/// What a cell at an end of the tile reads outside it. A compile-time parameter of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Boundary {
    /// Cells in memory: a halo.
    Cells,
    /// The other end of the axis.
    Wrap,
    /// The cell itself: no flux. For Life: dead cells.
    Wall,
    /// Fixed values, as bits, one per field.
    Fixed([u32; FIELDS_MAX]),
}

/// By axis; low end first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ends(pub(super) [[Boundary; 2]; 3]);

impl Ends {
    pub(super) fn new(frame: &Frame) -> Self {
        let end = |axis: usize, side: usize| match frame.face(axis, side) {
            Some(Face::Fixed(values)) => Boundary::Fixed(values.map(f32::to_bits)),
            Some(Face::Periodic | Face::Wall | Face::Moving { .. } | Face::Inlet { .. } | Face::Outlet { .. }) => {
                Boundary::Wall
            }
            None if frame.wraps[axis] => Boundary::Wrap,
            None => Boundary::Cells,
        };
        Self(std::array::from_fn(|axis| [end(axis, 0), end(axis, 1)]))
    }

    /// Keeps only periodic wrap-around: for rules whose boundary conditions are applied before the step.
    pub(super) fn wraps_only(self) -> Self {
        let keep = |end: Boundary| if end == Boundary::Wrap { end } else { Boundary::Cells };
        Self(self.0.map(|ends| ends.map(keep)))
    }
}

/// The cells of a launch and the owned box around them; elements along x, rows and layers of memory along y and z.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Place {
    /// The first cell.
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) z: u32,
    /// Extent: elements per row, rows per layer, rows in all layers.
    pub(super) nx: u32,
    pub(super) ny: u32,
    pub(super) rows: u32,
    /// Elements between consecutive rows, layers and planes.
    pub(super) row: usize,
    pub(super) layer: usize,
    pub(super) plane: usize,
    /// The first and the last owned element along each axis.
    pub(super) left: u32,
    pub(super) right: u32,
    pub(super) low: u32,
    pub(super) high: u32,
    pub(super) near: u32,
    pub(super) far: u32,
}

/// Memory layout of a tile in kernels: elements of 32 or 16 bits; bits are packed 32 per word.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// Elements of a row before the first owned cell.
    pub(super) left: usize,
    pub(super) row: usize,
    pub(super) layer: usize,
    /// Elements per field.
    pub(super) plane: usize,
    /// Cells per element.
    pub(super) cells: usize,
    /// Elements per 32-bit word. Rows, and the owned cells in them, begin at word boundaries.
    pub(super) of_word: usize,
    ring: [[isize; 2]; 3],
    size: [isize; 3],
}

impl Memory {
    pub(super) fn new(frame: &Frame) -> Self {
        // A `u64` is two words here, low word first.
        let (words, cells, of_word) = match frame.format {
            Format::Float => (1, 1, 1),
            Format::Half => (1, 1, 2),
            Format::Bit => (2, 32, 1),
        };
        let [row, layer] = frame.strides().map(|stride| stride as usize * words);
        let [_, low, near] = frame.ring.map(|[low, _]| low);
        let left = frame.at([0, -low, -near]) * words;
        let plane = frame.elements() * words;
        Self { left, row, layer, plane, cells, of_word, ring: frame.ring, size: frame.size }
    }

    /// The element of a field that holds a cell.
    pub(super) fn at(&self, [x, y, z]: [isize; 3]) -> usize {
        let x = self.left as isize + x.div_euclid(self.cells as isize);
        (x + (y + self.ring[1][0]) * self.row as isize + (z + self.ring[2][0]) * self.layer as isize) as usize
    }

    /// Maps an element outside the end of a periodic axis that the tile owns whole to the owned element.
    pub(super) fn wrapped(&self, frame: &Frame, place: usize) -> usize {
        let [_, low, near] = self.ring.map(|[low, _]| low);
        let (z, rest) = (place / self.layer, place % self.layer);
        let (y, x) = (rest / self.row, rest % self.row);
        let mut at = [x as isize - self.left as isize, y as isize - low, z as isize - near];
        for (axis, at) in at.iter_mut().enumerate().filter(|(axis, _)| frame.wraps[*axis]) {
            *at = at.rem_euclid(self.size[axis]);
        }
        self.at(at)
    }

    /// Launch arguments for these cells, rounded to whole elements.
    pub(super) fn place<R: Runtime>(&self, span: &Span) -> PlaceLaunch<R> {
        let cells = self.cells as isize;
        let element = |x: isize| (self.left as isize + x.div_euclid(cells)) as u32;
        let [low, near] = [self.ring[1][0], self.ring[2][0]];
        let [x, y, z] = &span.0;
        let first = element(x.start);
        PlaceLaunch::new(
            first,
            (y.start + low) as u32,
            (z.start + near) as u32,
            element(x.end - 1) + 1 - first,
            y.len() as u32,
            (y.len() * z.len()) as u32,
            self.row,
            self.layer,
            self.plane,
            element(0),
            element(self.size[0] - 1),
            low as u32,
            (self.size[1] - 1 + low) as u32,
            near as u32,
            (self.size[2] - 1 + near) as u32,
        )
    }

    /// As [`Self::cubes`], for threads that compute `each` adjacent cells; the span consists of whole groups.
    pub(super) fn cubes_of(&self, span: &Span, dim: CubeDim, each: usize) -> CubeCount {
        let (mut groups, each) = (span.clone(), each as isize);
        groups.0[0] = span.0[0].start / each..span.0[0].end / each;
        self.cubes(&groups, dim, 1)
    }

    /// Cubes of `dim` threads for a launch over these cells, `each` rows per thread; rows past the limit of the y axis
    /// of the launch grid continue along z.
    pub(super) fn cubes(&self, span: &Span, dim: CubeDim, each: usize) -> CubeCount {
        let cells = self.cells as isize;
        let [x, y, z] = &span.0;
        let across = (x.end - 1).div_euclid(cells) + 1 - x.start.div_euclid(cells);
        let rows = (y.len() * z.len()).div_ceil(each).div_ceil(dim.y as usize);
        let down = rows.min(ROWS_MAX);
        CubeCount::Static((across as u32).div_ceil(dim.x), down as u32, rows.div_ceil(down) as u32)
    }
}

/// A span, extended along x to whole groups of `each` cells.
pub(super) fn in_groups(span: &Span, each: usize) -> Span {
    let (mut all, each) = (span.clone(), each as isize);
    let [x, ..] = &mut all.0;
    *x = x.start.div_euclid(each) * each..(x.end + each - 1).div_euclid(each) * each;
    all
}

/// Cubes along y: Vulkan guarantees only 65,535.
const ROWS_MAX: usize = 32_768;

/// The row that a thread computes, or the first of its `each` rows.
#[cube]
pub(super) fn unit_row() -> u32 {
    (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * CUBE_DIM_Y + UNIT_POS_Y
}

/// The adjacent element along an axis, towards the high end (`up`) or the low end.
#[cube]
pub(super) fn next_to(
    at: usize,
    position: u32,
    first: u32,
    last: u32,
    stride: usize,
    #[comptime] beyond: Boundary,
    #[comptime] up: bool,
) -> usize {
    let end = if comptime!(up) { last } else { first };
    let onwards = if comptime!(up) { at + stride } else { at - stride };
    match beyond {
        Boundary::Cells => onwards,
        Boundary::Fixed(_) => onwards,
        Boundary::Wall => select(position == end, at, onwards),
        Boundary::Wrap => {
            let across = (last - first) as usize * stride;
            let other = if comptime!(up) { at - across } else { at + across };
            select(position == end, other, onwards)
        }
    }
}

/// A value read from the adjacent element, or the fixed value if that element is outside a face that has one.
#[cube]
pub(super) fn or_fixed(
    value: f32,
    position: u32,
    end: u32,
    #[comptime] beyond: Boundary,
    #[comptime] field: usize,
) -> f32 {
    match beyond {
        Boundary::Fixed(bits) => {
            let fixed = comptime!(f32::from_bits(bits[field]));
            select(position == end, fixed.runtime(), value)
        }
        Boundary::Cells => value,
        Boundary::Wall => value,
        Boundary::Wrap => value,
    }
}
