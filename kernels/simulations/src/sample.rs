//! Sampling of quantities: computed from a tile's fields, downsampled for images, and assembled from many tiles.
use kernels_grids::any_tile::{Fields, blocks};
use kernels_grids::{Face, GridError, Region};

use crate::error::SimulationError;
use crate::output::OutputSpec;
use crate::physics::Kind;
use crate::simulation::Simulation;

/// The quantities that a kind of rule offers.
pub(super) fn quantities(kind: &Kind) -> Vec<String> {
    let all: Vec<&str> = match kind {
        Kind::Life => vec!["alive"],
        Kind::Fluid(_) => vec!["density", "ux", "uy", "speed", "vorticity"],
        Kind::Fluid3(_) => vec!["density", "ux", "uy", "uz", "speed", "vorticity"],
        Kind::Fields(names) if names == &["height", "before"] => vec!["height"],
        Kind::Fields(names) => names.iter().map(String::as_str).collect(),
    };
    all.into_iter().map(str::to_owned).collect()
}

/// The quantity shown by default.
pub(super) fn default_quantity<'a>(kind: &Kind, quantities: &'a [String]) -> &'a str {
    let name = match kind {
        Kind::Fluid(_) | Kind::Fluid3(_) => "speed",
        // In Gray-Scott the patterns are in v.
        Kind::Fields(names) if names == &["u", "v"] => "v",
        Kind::Life | Kind::Fields(_) => "",
    };
    let found = quantities.iter().find(|quantity| *quantity == name).or(quantities.first());
    found.map_or("", String::as_str)
}

/// Values of a quantity over a box of cells, or of blocks of cells, in row-major order with x innermost.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Number of values along x, y and z.
    pub size: [usize; 3],
    /// One value per cell or block.
    pub values: Vec<f32>,
}

impl Simulation {
    /// The quantities that tiles must sample to compute `quantity`: itself, or those whose derivatives it needs. Empty
    /// if it is unknown.
    pub fn source_quantities(&self, quantity: &str) -> Vec<&str> {
        if quantity == VORTICITY && matches!(self.physics.kind, Kind::Fluid(_) | Kind::Fluid3(_)) {
            return vec!["ux", "uy"];
        }
        self.quantities.iter().map(String::as_str).filter(|known| *known == quantity).collect()
    }

    /// The region that an output shows, and its sampling stride in cells.
    pub fn output_view(&self, output: &OutputSpec) -> (Region, usize) {
        if output.kind.is_picture() { self.view(output.layer, output.size_max) } else { (self.grid.region(), 1) }
    }

    /// One z layer, and the stride at which it has at most `size_max` samples along x and y.
    pub fn view(&self, layer: usize, size_max: usize) -> (Region, usize) {
        let mut region = self.grid.region();
        let [nx, ny, nz] = self.grid.size();
        let layer = layer.min(nz - 1);
        (region.start[2], region.end[2]) = (layer, layer + 1);
        (region, nx.max(ny).div_ceil(size_max.max(1)))
    }

    /// A quantity over the blocks that a region of a tile touches, as [`blocks`] counts them: the value of each block's
    /// first cell, or 0 if the region does not contain it; for Life the number of live cells in the intersection of
    /// region and block. [`Mosaic`] adds the values of blocks shared by several tiles, so the result does not depend on
    /// the partition.
    ///
    /// # Errors
    /// A single tile cannot compute the quantity (see [`Self::source_quantities`]), or the tile does not own the region.
    pub fn sample(
        &self,
        tile: &dyn Fields,
        quantity: &str,
        region: Region,
        stride: usize,
    ) -> Result<Vec<f32>, SimulationError> {
        let stride = stride.max(1);
        let whole = tile.region();
        if region.cells() == 0 || !whole.contains(&region) {
            return Err(GridError::Region { region, tile: whole }.into());
        }
        match &self.physics.kind {
            Kind::Life if quantity == "alive" => Ok(tile.living(region, stride)?),
            Kind::Fluid(fluid) => {
                let part = self.part(quantity)?;
                let of = |cell: &[f32]| cell.try_into().map_or(0.0, |cell| part.of(fluid.moments(cell)));
                flowing(tile, region, stride, part, &of)
            }
            Kind::Fluid3(fluid) => {
                let part = self.part(quantity)?;
                let of = |cell: &[f32]| cell.try_into().map_or(0.0, |cell| part.of(fluid.moments(cell)));
                flowing(tile, region, stride, part, &of)
            }
            Kind::Fields(names) => {
                let field = names.iter().position(|name| name == quantity);
                let field = field.ok_or_else(|| self.no_such(quantity))?;
                pick(tile, &[field], region, stride, &mut |cell| cell[0])
            }
            Kind::Life => Err(self.no_such(quantity)),
        }
    }

    fn part(&self, quantity: &str) -> Result<Part, SimulationError> {
        let axis = ["ux", "uy", "uz"].iter().take(self.grid.dimensions()).position(|known| *known == quantity);
        match (quantity, axis) {
            ("density", _) => Ok(Part::Density),
            ("speed", _) => Ok(Part::Speed),
            (_, Some(axis)) => Ok(Part::Velocity(axis)),
            (_, None) => Err(self.no_such(quantity)),
        }
    }

    fn no_such(&self, quantity: &str) -> SimulationError {
        let known = self.quantities.join(", ");
        SimulationError::Quantity { found: kernels_grids::expression::shortened(quantity), known }
    }

    /// Totals to monitor, most of them conserved while no flux crosses the boundary: name, and the fields whose totals
    /// ([`Tile::total`](kernels_grids::tile::Tile::total)) sum to it. A fluid's mass is counted relative to density 1.
    pub fn totals(&self) -> Vec<(String, Vec<usize>)> {
        match &self.physics.kind {
            Kind::Life => vec![("population".into(), vec![0])],
            Kind::Fluid(_) | Kind::Fluid3(_) => vec![("mass".into(), (0..self.rule().fields()).collect())],
            Kind::Fields(names) => names.iter().zip(0..).map(|(name, field)| (name.clone(), vec![field])).collect(),
        }
    }
}

const VORTICITY: &str = "vorticity";

/// A quantity of a fluid that one cell's populations determine.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Density,
    Speed,
    Velocity(usize),
}

impl Part {
    fn of<const D: usize>(self, (density, velocity): (f64, [f64; D])) -> f32 {
        match self {
            Self::Density => density as f32,
            Self::Speed => velocity.iter().map(|part| part * part).sum::<f64>().sqrt() as f32,
            Self::Velocity(axis) => velocity.get(axis).copied().unwrap_or(0.0) as f32,
        }
    }
}

/// A fluid quantity in the first cell of each block.
fn flowing(
    tile: &dyn Fields,
    region: Region,
    stride: usize,
    part: Part,
    of: &dyn Fn(&[f32]) -> f32,
) -> Result<Vec<f32>, SimulationError> {
    let fields: Vec<usize> = (0..tile.fields()).collect();
    let rest = if part == Part::Density { 1.0 } else { 0.0 };
    pick(tile, &fields, region, stride, &mut |cell| {
        // Solid cells read as zeros: report them at rest, even under a body force.
        if cell.iter().all(|population| *population == 0.0) { rest } else { of(cell) }
    })
}

/// A value computed from the first cell of each block.
fn pick(
    tile: &dyn Fields,
    fields: &[usize],
    region: Region,
    stride: usize,
    value: &mut dyn FnMut(&[f32]) -> f32,
) -> Result<Vec<f32>, SimulationError> {
    let to = blocks(region, stride);
    let mut values = vec![0.0; to.cells()];
    let mut cell = vec![0.0; fields.len()];
    tile.rows(fields, region, stride, &mut |[y, z], rows| {
        let start = place(to, [0, y / stride, z]);
        let start = start + region.start[0].div_ceil(stride) - to.start[0];
        for x in 0..rows.first().map_or(0, Vec::len) {
            cell.iter_mut().zip(rows).for_each(|(cell, row)| *cell = row[x]);
            values[start + x] = value(&cell);
        }
    })?;
    Ok(values)
}

/// Index of the first value of a block's row within a box.
fn place(within: Region, [_, y, z]: [usize; 3]) -> usize {
    let [width, height, _] = within.size();
    ((z - within.start[2]) * height + y - within.start[1]) * width
}

/// Assembles a quantity over a region from the samples of its tiles.
pub struct Mosaic {
    region: Region,
    stride: usize,
    /// The region in blocks.
    to: Region,
    quantity: String,
    /// Whether values are counts of live cells.
    counts: bool,
    /// One entry per needed quantity: name, sums per block, cells added so far.
    parts: Vec<(String, Vec<f32>, usize)>,
    periodic: [bool; 2],
    /// Per axis, whether the first and the last block begin with an outlet cell.
    outlets: [[bool; 2]; 2],
}

impl Mosaic {
    /// An empty mosaic of a quantity, over the region and at the stride of [`Simulation::output_view`] or
    /// [`Simulation::view`].
    ///
    /// # Errors
    /// The quantity is unknown, or there is not enough memory.
    pub fn new(
        simulation: &Simulation,
        quantity: &str,
        (region, stride): (Region, usize),
    ) -> Result<Self, SimulationError> {
        let needs = simulation.source_quantities(quantity);
        if needs.is_empty() {
            return Err(simulation.no_such(quantity));
        }
        let to = blocks(region, stride);
        let mut parts = Vec::with_capacity(needs.len());
        for need in needs {
            let mut values = Vec::new();
            let bytes = to.cells().saturating_mul(4);
            values.try_reserve_exact(to.cells()).map_err(|_| GridError::Memory { bytes })?;
            values.resize(to.cells(), 0.0);
            parts.push((need.to_owned(), values, 0));
        }
        let periodic = [0, 1].map(|axis| {
            let whole = region.size()[axis] == simulation.grid.size()[axis] && region.size()[axis] % stride == 0;
            whole && simulation.grid.faces(axis)[0] == Face::Periodic
        });
        let outlets = [0, 1].map(|axis| {
            let size = simulation.grid.size()[axis];
            let ends = [to.start[axis] * stride == 0, (to.end[axis] - 1) * stride == size - 1];
            let faces = simulation.grid.faces(axis).map(|face| matches!(face, Face::Outlet { .. }));
            [ends[0] && faces[0], ends[1] && faces[1]]
        });
        let counts = matches!(simulation.physics.kind, Kind::Life);
        Ok(Self { region, stride, to, quantity: quantity.into(), counts, parts, periodic, outlets })
    }

    /// Adds a tile's samples of `part`, one of the needed quantities, over a region. Each cell must be added once.
    ///
    /// # Errors
    /// The quantity does not need `part`, the region lies outside, or the number of values is not its number of blocks.
    pub fn add(&mut self, part: &str, region: Region, values: &[f32]) -> Result<(), SimulationError> {
        let (from, to) = (blocks(region, self.stride), self.to);
        let known = self.parts.iter_mut().find(|(name, ..)| name == part);
        let Some((_, sum, cells)) = known else {
            return Err(SimulationError::Quantity { found: part.into(), known: self.quantity.clone() });
        };
        if region.cells() == 0 || !self.region.contains(&region) {
            return Err(GridError::Region { region, tile: self.region }.into());
        }
        if values.len() != from.cells() {
            return Err(GridError::SavedLength { expected: 4 * from.cells(), found: 4 * values.len() }.into());
        }
        let width = from.size()[0];
        let mut rows = values.chunks_exact(width);
        for z in from.start[2]..from.end[2] {
            for y in from.start[1]..from.end[1] {
                let start = place(to, [0, y, z]) + from.start[0] - to.start[0];
                let row = rows.next().unwrap_or_default();
                sum[start..start + width].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
        }
        *cells += region.cells();
        Ok(())
    }

    /// Whether every needed quantity was added for every cell.
    pub fn is_whole(&self) -> bool {
        self.parts.iter().all(|(_, _, cells)| *cells == self.region.cells())
    }

    /// The assembled field; for Life the share of live cells per block.
    pub fn finish(mut self) -> Field {
        let size = self.to.size();
        if self.quantity == VORTICITY && self.parts.len() == 2 {
            return Field { size, values: self.vorticity() };
        }
        let mut values = self.parts.pop().map(|(_, values, _)| values).unwrap_or_default();
        if self.counts && self.stride > 1 {
            let cells = |axis: usize, block: usize| {
                let start = (block + self.to.start[axis]) * self.stride;
                (start + self.stride).min(self.region.end[axis]) - start.max(self.region.start[axis])
            };
            for (at, value) in values.iter_mut().enumerate() {
                *value /= (cells(0, at % size[0]) * cells(1, at / size[0] % size[1])) as f32;
            }
        }
        Field { size, values }
    }

    /// The first and last block along an axis without outlet blocks; all blocks if nothing else is left.
    fn flowing(&self, axis: usize, size: usize) -> [usize; 2] {
        let [low, high] = self.outlets[axis].map(usize::from);
        if size > low + high { [low, size - 1 - high] } else { [0, size - 1] }
    }

    /// z component of the vorticity, by central differences between blocks, one-sided at the ends of non-periodic axes.
    /// The velocity in outlet cells is set by their boundary condition, not by the flow, so they repeat the value of
    /// their neighbours.
    fn vorticity(&self) -> Vec<f32> {
        let [width, height, layers] = self.to.size();
        let (u, v) = (&self.parts[0].1, &self.parts[1].1);
        // The neighbouring blocks along an axis, and their distance in cells.
        let beside = |axis: usize, at: usize, size: usize| {
            let (before, after) = if self.periodic[axis] {
                ((at + size - 1) % size, (at + 1) % size)
            } else {
                let [low, high] = self.flowing(axis, size);
                let at = at.clamp(low, high);
                (at.saturating_sub(1).max(low), (at + 1).min(high))
            };
            let between = if self.periodic[axis] { 2 } else { after - before };
            (before, after, (between.max(1) * self.stride) as f32)
        };
        let mut turning = Vec::with_capacity(u.len());
        let ([left_most, right_most], [lowest, highest]) = (self.flowing(0, width), self.flowing(1, height));
        for layer in 0..layers {
            for y in 0..height {
                let (below, above, dy) = beside(1, y, height);
                let y = y.clamp(lowest, highest);
                for x in 0..width {
                    let (left, right, dx) = beside(0, x, width);
                    let x = x.clamp(left_most, right_most);
                    let at = |x: usize, y: usize| (layer * height + y) * width + x;
                    let across = (v[at(right, y)] - v[at(left, y)]) / dx;
                    turning.push(across - (u[at(x, above)] - u[at(x, below)]) / dy);
                }
            }
        }
        turning
    }
}
