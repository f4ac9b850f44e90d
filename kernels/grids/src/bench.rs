//! CPU benchmarks of grid steps, measured next to the memory bandwidth of the same machine at the same time.
//!
//! An unfused fluid step reads and writes every population once, so its bytes per second relative to a copy with
//! non-temporal stores is the share of the bandwidth used; fused steps (`fused.rs`) can exceed 1. Figures are
//! medians over rounds that interleave all measurements.
use std::time::Instant;

use kernels::cpu::Isa;
use kernels::cpu::simd::{Kernel, Simd};
use kernels::planes::Planes;
use kernels::threads::Threads;
use serde::Serialize;

use crate::error::GridError;
use crate::fused::STEPS_MAX;
use crate::grid::Grid;
use crate::lbm::{Fluid, Fluid3};
use crate::life::Life;
use crate::rule::Rule;
use crate::tile::Tile;

/// Duration of each measurement in a round: short, so that other load on the machine disturbs both alike.
const SECONDS: f64 = 0.05;

/// Performance of a fluid.
#[derive(Clone, Debug, Serialize)]
pub struct FluidFigures {
    /// d2q9 or d3q19.
    pub lattice: &'static str,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set in use.
    pub instruction_set: &'static str,
    /// Cells along each axis.
    pub size: Vec<usize>,
    /// Million lattice updates (cells times steps) per second.
    pub mlups: f64,
    /// Maximum steps per pass over memory.
    pub steps_per_pass: usize,
    /// Bytes read and written per cell and step, unfused.
    pub bytes_per_cell_step: usize,
    /// Bytes read plus bytes written per second by a copy with non-temporal stores between buffers of the same size.
    pub copy_bandwidth: f64,
    /// The fluid's bytes per second (as if unfused) divided by the copy's in the same round: the median over rounds.
    pub share_of_copy_bandwidth: f64,
}

/// Performance of Life.
#[derive(Clone, Debug, Serialize)]
pub struct LifeFigures {
    /// Compute threads.
    pub threads: usize,
    /// Instruction set in use.
    pub instruction_set: &'static str,
    /// Cells along each axis.
    pub size: [usize; 2],
    /// The rule.
    pub rule: String,
    /// Cell updates (cells times steps) per second.
    pub cells_per_s: f64,
}

/// Measures D2Q9 in a periodic box.
///
/// # Errors
/// The box does not fit into memory.
///
/// # Panics
/// The operating system refuses to create threads.
pub fn fluid(fluid: &Fluid, size: [usize; 2], threads: usize, rounds: usize) -> Result<FluidFigures, GridError> {
    let wave = |at: usize, axis: usize| 0.02 * (at as f64 / size[axis] as f64 * std::f64::consts::TAU).sin();
    let load = |[x, y, _]: [usize; 3], cell: &mut [f32]| {
        cell.copy_from_slice(&fluid.cell(1.0, [wave(y, 1), wave(x, 0)], [[0.0; 2]; 2]));
    };
    measure(&Rule::D2q9(fluid.clone()), &size, &load, threads, rounds)
}

/// Measures D3Q19 in a periodic box.
///
/// # Errors
/// The box does not fit into memory.
///
/// # Panics
/// The operating system refuses to create threads.
pub fn fluid3(fluid: &Fluid3, size: [usize; 3], threads: usize, rounds: usize) -> Result<FluidFigures, GridError> {
    let wave = |at: usize, axis: usize| 0.02 * (at as f64 / size[axis] as f64 * std::f64::consts::TAU).sin();
    let load = |[x, y, z]: [usize; 3], cell: &mut [f32]| {
        cell.copy_from_slice(&fluid.cell(1.0, [wave(y, 1), wave(z, 2), wave(x, 0)], [[0.0; 3]; 3]));
    };
    measure(&Rule::D3q19(fluid.clone()), &size, &load, threads, rounds)
}

/// Sets a cell's fields from its global coordinates.
type Load<'a> = &'a dyn Fn([usize; 3], &mut [f32]);

fn measure(
    rule: &Rule,
    size: &[usize],
    load: Load<'_>,
    threads: usize,
    rounds: usize,
) -> Result<FluidFigures, GridError> {
    let grid = Grid::periodic(size)?;
    let mut tile = Tile::new(&grid, rule, grid.region(), 1)?;
    tile.load(&mut |at, cell| load(at, cell));
    let bytes_per_cell_step = 2 * rule.format().bytes() * rule.fields();
    let mut threads = Threads::new(threads).expect("threads");
    let bytes = 4 * rule.fields() * grid.region().cells();
    let (from, mut to) = (Planes::new(1, bytes)?, Planes::new(1, bytes)?);
    let cells = grid.region().cells() as f64;
    let (mut steps, mut copies) = (1, 1);
    let (mut rates, mut bandwidths, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let stepping = seconds(|| tile.advance(&mut threads, steps).expect("a solo tile needs no halo"));
        let copying = seconds(|| (0..copies).for_each(|_| copy(&from, &mut to, bytes / 4, &mut threads)));
        if round > 0 {
            let rate = cells * steps as f64 / stepping;
            let bandwidth = 2.0 * bytes as f64 * copies as f64 / copying;
            rates.push(rate);
            bandwidths.push(bandwidth);
            shares.push(rate * bytes_per_cell_step as f64 / bandwidth);
        }
        // Whole fused passes.
        steps = ((SECONDS * steps as f64 / stepping) as usize).next_multiple_of(STEPS_MAX).max(STEPS_MAX);
        copies = (SECONDS * copies as f64 / copying).max(1.0) as usize;
    }
    Ok(FluidFigures {
        lattice: rule.name(),
        threads: threads.count(),
        instruction_set: Isa::detect().name(),
        size: size.to_vec(),
        mlups: median(rates) / 1e6,
        steps_per_pass: rule.pass_steps(&grid),
        bytes_per_cell_step,
        copy_bandwidth: median(bandwidths),
        share_of_copy_bandwidth: median(shares),
    })
}

/// Measures Life on a periodic grid of random cells.
///
/// # Errors
/// The grid does not fit into memory.
///
/// # Panics
/// The operating system refuses to create threads.
pub fn life(life: Life, size: [usize; 2], threads: usize, rounds: usize) -> Result<LifeFigures, GridError> {
    let grid = Grid::periodic(&size)?;
    let mut tile = Tile::new(&grid, &Rule::Life(life), grid.region(), 1)?;
    tile.load(&mut |[x, y, _], cell| {
        let mixed = (x as u64 | (y as u64) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        cell[0] = ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 63) as f32;
    });
    let mut threads = Threads::new(threads).expect("threads");
    let mut steps = 1;
    let mut rates = Vec::new();
    for round in 0..=rounds {
        let stepping = seconds(|| tile.advance(&mut threads, steps).expect("a solo tile needs no halo"));
        if round > 0 {
            rates.push(grid.region().cells() as f64 * steps as f64 / stepping);
        }
        steps = (SECONDS * steps as f64 / stepping).max(1.0) as usize;
    }
    Ok(LifeFigures {
        threads: threads.count(),
        instruction_set: Isa::detect().name(),
        size,
        rule: life.to_string(),
        cells_per_s: median(rates),
    })
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64().max(1e-9)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Copies `len` values of `f32` with non-temporal stores.
fn copy(from: &Planes, to: &mut Planes, len: usize, threads: &mut Threads) {
    let (isa, from, to) = (Isa::detect(), from.plane::<f32>(0), to.shared());
    threads.pool().run(len / 16, 1 << 12, &|_, blocks| {
        let (start, blocks) = (16 * blocks.start, blocks.len());
        // SAFETY: blocks are within both planes, and each is in one range only.
        unsafe { isa.run(Copy { from: from.as_ptr().add(start), to: to.start::<f32>(0).add(start), blocks }) }
    });
}

struct Copy {
    from: *const f32,
    to: *mut f32,
    blocks: usize,
}

impl Kernel for Copy {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the contract of `copy` holds here too.
        unsafe {
            for i in 0..self.blocks {
                S::stream(S::load(self.from.add(16 * i)), self.to.add(16 * i));
            }
            S::fence();
        }
    }
}
