//! The initial state in bulk: evaluated by rows on several threads, in the format of a saved state.
use kernels_grids::frame::Format;
use kernels_grids::lbm::is_subsonic;
use kernels_grids::number::{Half, Number};
use kernels_grids::rule::Rule;
use kernels_grids::{AXES, Grid, Region};

use super::{Flow, Initial, Living, Source, wrong_density, wrong_velocity};
use crate::evaluate::{NOISE_UNITS, NoiseRow};

/// Bytes per part: enough work for all threads, and small enough to load one part while the next is computed.
const PART_BYTES: usize = 4 << 20;

/// Splits a region into boxes that span it along x.
pub(crate) fn parts(region: Region, rule: &Rule) -> Vec<Region> {
    let [width, height, depth] = region.size();
    let rows = (PART_BYTES / (rule.fields() * row_bytes(rule.format(), width)).max(1)).max(1);
    let (rows, layers) = (rows.min(height).max(1), (rows / height.max(1)).max(1));
    let mut parts = Vec::new();
    for z in (0..depth).step_by(layers) {
        for y in (0..height).step_by(rows) {
            let [x, low, near] = region.start;
            let end = [region.end[0], low + height.min(y + rows), near + depth.min(z + layers)];
            parts.push(Region { start: [x, low + y, near + z], end });
        }
    }
    parts
}

/// Bytes of one row of a saved field.
fn row_bytes(format: Format, width: usize) -> usize {
    match format {
        Format::Float | Format::Half => format.bytes() * width,
        Format::Bit => width.div_ceil(8),
    }
}

/// Writes values in the saved format, one after the other.
fn save(format: Format, values: impl Iterator<Item = f32>, places: &mut [u8]) {
    if format == Format::Half {
        let places = places.chunks_exact_mut(2);
        places.zip(values).for_each(|(place, value)| place.copy_from_slice(bytemuck::bytes_of(&Half::of(value))));
    } else {
        places.chunks_exact_mut(4).zip(values).for_each(|(place, value)| place.copy_from_slice(&value.to_le_bytes()));
    }
}

impl Initial {
    /// The cells of a box in the saved format: field by field, rows along x.
    pub(crate) fn cells(&self, region: Region, rule: &Rule, threads: usize) -> Vec<u8> {
        let [width, height, depth] = region.size();
        let (rows, bytes) = (height * depth, row_bytes(rule.format(), width));
        let mut cells = vec![0; rule.fields() * rows * bytes];
        if cells.is_empty() {
            return cells;
        }
        // Each thread gets a contiguous share of the rows of every field.
        let each = rows.div_ceil(threads.max(1));
        let mut shares: Vec<Vec<&mut [u8]>> = (0..rows.div_ceil(each)).map(|_| Vec::new()).collect();
        for field in cells.chunks_mut(rows * bytes) {
            shares.iter_mut().zip(field.chunks_mut(each * bytes)).for_each(|(share, rows)| share.push(rows));
        }
        let make = |number: usize, share: Vec<&mut [u8]>| {
            let mut fields: Vec<_> = share.into_iter().map(|rows| rows.chunks_mut(bytes)).collect();
            let mut row = number * each;
            loop {
                let mut of_row: Vec<&mut [u8]> = fields.iter_mut().filter_map(Iterator::next).collect();
                if of_row.is_empty() {
                    break;
                }
                let at = [region.start[0], region.start[1] + row % height, region.start[2] + row / height];
                self.row(rule.format(), at, width, &mut of_row);
                row += 1;
            }
        };
        std::thread::scope(|scope| {
            let mut shares = shares.into_iter().enumerate();
            let own = shares.next();
            for (number, share) in shares {
                scope.spawn(move || make(number, share));
            }
            if let Some((number, share)) = own {
                make(number, share);
            }
        });
        cells
    }

    /// Writes one row of each field.
    fn row(&self, format: Format, at: [usize; 3], width: usize, fields: &mut [&mut [u8]]) {
        match self {
            Self::Life(living) => living.row(at, width, fields[0]),
            Self::Fluid(flow) if flow.is_even() => self.same(format, at, fields),
            Self::Fluid3(flow) if flow.is_even() => self.same(format, at, fields),
            Self::Fluid(_) | Self::Fluid3(_) => {
                let mut cell = vec![0.0; fields.len()];
                for x in 0..width {
                    self.set([at[0] + x, at[1], at[2]], &mut cell);
                    let bytes = format.bytes();
                    let places = fields.iter_mut().map(|field| &mut field[bytes * x..bytes * (x + 1)]);
                    places.zip(&cell).for_each(|(place, value)| save(format, [*value].into_iter(), place));
                }
            }
            Self::Fields(sources) => {
                let mut values = vec![0.0; width];
                for (field, source) in fields.iter_mut().zip(sources) {
                    match source {
                        Source::Expression(expression) => expression.row(at[0], [at[1], at[2]], &mut values),
                        Source::Image(..) => {
                            let pixels = values.iter_mut().zip(at[0]..);
                            pixels.for_each(|(value, x)| *value = source.at([x, at[1], at[2]]));
                        }
                    }
                    save(format, values.iter().map(|value| *value as f32), field);
                }
            }
        }
    }

    /// Fills the row with its first cell, for uniform fluids.
    fn same(&self, format: Format, at: [usize; 3], fields: &mut [&mut [u8]]) {
        let mut cell = vec![0.0; fields.len()];
        self.set(at, &mut cell);
        for (field, value) in fields.iter_mut().zip(&cell) {
            save(format, std::iter::repeat(*value), field);
        }
    }
}

/// A cell with an invalid initial state, and the key that sets it.
pub(crate) struct Impossible {
    pub(crate) key: String,
    pub(crate) what: String,
}

impl Initial {
    /// The first invalid cell: among all cells of small grids, else among evenly spread rows, so that parsing stays
    /// fast. `names` are the field names.
    pub(crate) fn first_impossible(&self, grid: &Grid, names: &[String]) -> Option<Impossible> {
        let [width, height, depth] = grid.size();
        let width = width.min(CHECKED_MAX);
        let stride = (height * depth).div_ceil(CHECKED_MAX / width);
        let found = |x: usize, [y, z]: [usize; 2], key: &str, what: String| {
            let cell = if grid.dimensions() == 2 { format!("{x}, {y}") } else { format!("{x}, {y}, {z}") };
            Some(Impossible { key: key.into(), what: format!("at the cell {cell}: {what}") })
        };
        let mut values = vec![vec![0.0; width]; 1 + AXES.len()];
        for row in (0..height * depth).step_by(stride) {
            let at = [row % height, row / height];
            let wrong = match self {
                Self::Life(_) => return None,
                Self::Fluid(flow) => flow.impossible(at, &mut values),
                Self::Fluid3(flow) => flow.impossible(at, &mut values),
                Self::Fields(sources) => {
                    let expressions = sources.iter().zip(names).filter_map(|(source, name)| match source {
                        Source::Expression(expression) => Some((expression, name)),
                        Source::Image(..) => None,
                    });
                    let mut first: Option<(usize, &str, String)> = None;
                    for (expression, name) in expressions {
                        expression.row(0, at, &mut values[0]);
                        let place = values[0].iter().position(|value| !(*value as f32).is_finite());
                        if let Some(x) = place.filter(|x| first.as_ref().is_none_or(|(first, ..)| x < first)) {
                            first = Some((x, name, format!("expected a finite 32-bit number, found {}", values[0][x])));
                        }
                    }
                    first
                }
            };
            if let Some((x, key, what)) = wrong {
                return found(x, at, key, what);
            }
        }
        None
    }
}

/// Maximum cells to check before a job begins.
const CHECKED_MAX: usize = 1 << 18;

impl<const D: usize> Flow<D> {
    /// The first invalid cell of a row, the key that sets it, and the error. `values` is scratch for the row.
    fn impossible(&self, at: [usize; 2], values: &mut [Vec<f64>]) -> Option<(usize, &'static str, String)> {
        let [y, z] = at;
        let (density, velocity) = values.split_first_mut()?;
        self.density.row(0, at, density);
        self.velocity.iter().zip(velocity.iter_mut()).for_each(|(part, values)| part.row(0, at, values));
        (0..density.len()).find_map(|x| {
            let here = velocity[..D].iter().map(|part| part[x]);
            let fits = density[x] as f32 > 0.0 && is_subsonic(here.clone().map(|part| part * part).sum::<f64>().sqrt());
            if fits && density[x].is_finite() || self.is_solid([x, y, z]) {
                return None;
            }
            let wrong = wrong_density(density[x]).map(|what| ("density", what));
            let wrong = wrong.or_else(|| wrong_velocity(here.collect()).map(|what| ("velocity", what)));
            wrong.map(|(key, what)| (x, key, what))
        })
    }

    /// Whether all cells have the same populations.
    fn is_even(&self) -> bool {
        let moving = self.velocity.iter().any(|part| part.constant().is_none());
        self.omega.is_none() && self.density.constant().is_some() && !moving
    }
}

impl Living {
    /// Writes a row of bits, beginning at a byte boundary.
    fn row(&self, [x, y, z]: [usize; 3], width: usize, bits: &mut [u8]) {
        // Exact comparison with the share: noise is an integer number of units.
        let share = (self.share * NOISE_UNITS).ceil() as u64;
        let noise = NoiseRow::new(self.seed, 0, [y, z]);
        let mut values = [0.0; 64];
        for (word, bytes) in bits.chunks_mut(8).enumerate() {
            let x = x + 64 * word;
            let count = (width - 64 * word).min(64);
            let mut found = 0u64;
            if share > 0 {
                (0..64).for_each(|i| found |= u64::from(noise.units(x + i) < share) << i);
            }
            if let Some(expression) = &self.expression {
                expression.row(x, [y, z], &mut values[..count]);
                values[..count].iter().zip(0..).for_each(|(value, i)| found |= u64::from(*value != 0.0) << i);
            }
            if let Some(mask) = &self.mask {
                (0..count).for_each(|i| found |= u64::from(mask.at([x + i, y, z])) << i);
            }
            found &= u64::MAX >> (64 - count);
            bytes.copy_from_slice(&found.to_le_bytes()[..bytes.len()]);
        }
        for run in self.near(y) {
            let (start, end) = ((run.start as usize).max(x), (run.end as usize).min(x + width));
            (start..end).for_each(|at| bits[(at - x) / 8] |= 1 << ((at - x) % 8));
        }
    }
}
