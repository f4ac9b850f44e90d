//! GPU benchmarks of grid steps: cell updates per second of each rule, relative to a plain copy measured in the same
//! run.
use std::sync::Arc;
use std::time::Instant;

use cubecl::prelude::*;
use kernels_grids::frame::Format;
use kernels_grids::lbm::{Collision, Fluid, Fluid3, Storage};
use kernels_grids::life::Life;
use kernels_grids::rule::Rule;
use kernels_grids::rule_file::TextRule;
use kernels_grids::scalar::{GrayScott, Heat, Wave};
use kernels_grids::{CellMap, Face, Grid, GridError};
use serde::Serialize;

use crate::GpuTile;
use crate::check::Mesh;
use crate::memory::{address, check, element, failed, over};

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// The rule and its variant, or `copy`.
    pub what: String,
    /// Cells along x, y and z.
    pub size: [usize; 3],
    /// Threads per cube, and rows (fluids: adjacent cells) per thread.
    pub shape: String,
    /// Number of tiles.
    pub tiles: usize,
    /// Number of devices.
    pub devices: usize,
    /// Median time of a step.
    pub microseconds: f64,
    /// Million cell updates per second.
    pub mlups: f64,
    /// Bytes that a step must move per cell.
    pub bytes_a_cell: f64,
    /// Gigabytes per second.
    pub gb_per_s: f64,
    /// Bandwidth relative to the copy.
    pub share_of_copy: f64,
}

/// Repetitions; the median counts.
const REPEATS: usize = 5;
/// Minimum duration of one measurement, in seconds.
const SECONDS: f64 = 0.08;
/// Bytes copied: far larger than any cache.
const COPY_BYTES: usize = 1 << 30;

/// A rule on a grid, and the bytes that a step must move per cell.
struct Subject {
    what: &'static str,
    grid: Grid,
    rule: Rule,
    bytes: f64,
}

/// Runs all benchmarks and reports each figure. `scale`: factor on the usual sizes (a power of two, 1 for a large GPU).
///
/// # Errors
/// A device error.
pub fn figures<R: Runtime>(
    clients: &[ComputeClient<R>],
    scale: f64,
    only: &str,
    report: &mut dyn FnMut(&Figure),
) -> Result<(), String> {
    let client = &clients[0];
    let copy = copy(client, ((COPY_BYTES as f64 * scale.min(1.0)) as usize).max(1 << 22))?;
    report(&copy);
    for subject in subjects(scale).into_iter().filter(|subject| subject.what.contains(only)) {
        match one_tile(client, &subject, copy.gb_per_s) {
            Ok(all) => all.iter().for_each(&mut *report),
            Err(error) => report(&failure(&subject, &error)),
        }
    }
    for subject in meshed(scale).into_iter().filter(|subject| subject.what.contains(only)) {
        for (tiles, devices) in [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (8, 8)] {
            if devices <= clients.len() {
                for depth in [1, 4] {
                    match several(&clients[..devices], &subject, tiles, depth, copy.gb_per_s) {
                        Ok(figure) => report(&figure),
                        Err(error) => report(&failure(&subject, &error)),
                    }
                }
            }
        }
    }
    Ok(())
}

fn failure(subject: &Subject, error: &GridError) -> Figure {
    let what = format!("FAILED {}: {error}", subject.what);
    let (size, nan) = (subject.grid.size(), f64::NAN);
    let shape = String::new();
    Figure {
        what,
        size,
        shape,
        tiles: 0,
        devices: 0,
        microseconds: nan,
        mlups: nan,
        bytes_a_cell: subject.bytes,
        gb_per_s: nan,
        share_of_copy: nan,
    }
}

/// Copies `bytes` bytes, 16 per thread.
fn copy<R: Runtime>(client: &ComputeClient<R>, bytes: usize) -> Result<Figure, String> {
    let text = |error: GridError| error.to_string();
    let bytes = bytes / 4096 * 4096;
    let (from, to) = (client.empty(bytes), client.empty(bytes));
    let seconds = timed(client, &mut |times| {
        (0..times).for_each(|_| crate::transfer::copy(client, &from, &to, bytes / 4));
        Ok(())
    });
    let seconds = seconds.map_err(text)?;
    let gb_per_s = 2e-9 * bytes as f64 / seconds;
    let (size, shape) = ([bytes / 4, 1, 1], String::new());
    Ok(Figure {
        what: "copy".into(),
        size,
        shape,
        tiles: 1,
        devices: 1,
        microseconds: 1e6 * seconds,
        mlups: 1e-6 * size[0] as f64 / seconds,
        bytes_a_cell: 8.0,
        gb_per_s,
        share_of_copy: 1.0,
    })
}

/// One tile, with several cube shapes.
fn one_tile<R: Runtime>(client: &ComputeClient<R>, subject: &Subject, copy: f64) -> Result<Vec<Figure>, GridError> {
    let Subject { grid, rule, .. } = subject;
    let mut tile = GpuTile::new(client, grid, rule, grid.region(), 1, usize::MAX)?;
    stir(client, &tile);
    let mut figures = Vec::new();
    for (cube, rows) in shapes(rule) {
        tile.motion.shape(cube, rows);
        let seconds = timed(client, &mut |times| tile.advance(times))?;
        figures.push(subject.figure(seconds, format!("{}x{} {rows}", cube[0], cube[1]), (1, 1), copy));
    }
    drop(tile);
    client.memory_cleanup();
    Ok(figures)
}

/// Several tiles in a row along y, with a halo exchange every `depth` steps.
fn several<R: Runtime>(
    clients: &[ComputeClient<R>],
    subject: &Subject,
    tiles: usize,
    depth: usize,
    copy: f64,
) -> Result<Figure, GridError> {
    let [_, height, _] = subject.grid.size();
    let cuts: Vec<usize> = (1..tiles).map(|i| height * i / tiles).collect();
    let mut mesh = Mesh::empty(clients, &subject.grid, &subject.rule, [&[], &cuts, &[]], depth)?;
    mesh.tiles.iter().for_each(|tile| stir(&tile.client, tile));
    mesh.begin()?;
    let seconds = timed_all(clients, &mut |times| mesh.cycles(times.div_ceil(depth)), depth)?;
    clients.iter().for_each(ComputeClient::memory_cleanup);
    Ok(subject.figure(seconds, format!("halo {depth}"), (tiles, clients.len()), copy))
}

/// The median time per step, after a warm-up that compiles the kernels.
fn timed<R: Runtime>(
    client: &ComputeClient<R>,
    steps: &mut dyn FnMut(usize) -> Result<(), GridError>,
) -> Result<f64, GridError> {
    timed_all(std::slice::from_ref(client), steps, 1)
}

fn timed_all<R: Runtime>(
    clients: &[ComputeClient<R>],
    steps: &mut dyn FnMut(usize) -> Result<(), GridError>,
    multiple: usize,
) -> Result<f64, GridError> {
    let mut run = |count: usize| -> Result<f64, GridError> {
        let start = Instant::now();
        steps(count)?;
        for client in clients {
            check(client)?;
            cubecl::future::block_on(client.sync()).map_err(failed)?;
        }
        Ok(start.elapsed().as_secs_f64())
    };
    run(2 * multiple)?;
    let (mut count, mut seconds) = (multiple, 0.0);
    while seconds < SECONDS / 4.0 && count < 1 << 16 {
        count *= 2;
        seconds = run(count)?;
    }
    let count = ((SECONDS / seconds * count as f64).ceil() as usize).next_multiple_of(multiple);
    let mut all = Vec::new();
    for _ in 0..REPEATS {
        all.push(run(count)? / count as f64);
    }
    all.sort_by(f64::total_cmp);
    Ok(all[REPEATS / 2])
}

impl Subject {
    fn figure(&self, seconds: f64, shape: String, (tiles, devices): (usize, usize), copy: f64) -> Figure {
        let size = self.grid.size();
        let mlups = 1e-6 * size.iter().product::<usize>() as f64 / seconds;
        let gb_per_s = 1e-3 * mlups * self.bytes;
        Figure {
            what: self.what.into(),
            size,
            shape,
            tiles,
            devices,
            microseconds: 1e6 * seconds,
            mlups,
            bytes_a_cell: self.bytes,
            gb_per_s,
            share_of_copy: gb_per_s / copy / devices as f64,
        }
    }
}

/// Cube shapes, and rows or adjacent cells per thread, worth measuring.
fn shapes(rule: &Rule) -> Vec<([u32; 2], usize)> {
    let plain = |cubes: &[[u32; 2]]| cubes.iter().map(|&cube| (cube, 1)).collect();
    match rule {
        Rule::Life(_) => {
            let cubes = [[32, 8], [64, 4], [128, 1], [256, 1]];
            cubes.into_iter().flat_map(|cube| [4, 8, 16].map(|rows| (cube, rows))).collect()
        }
        Rule::D2q9(_) | Rule::D3q19(_) => {
            let cubes = [[64, 4], [128, 1], [128, 2], [256, 1], [512, 1], [1024, 1]];
            [1, 2, 4].iter().flat_map(|each| cubes.map(|cube| (cube, *each))).collect()
        }
        Rule::Heat(_) | Rule::Wave(_) | Rule::GrayScott(_) | Rule::Text(_) => {
            plain(&[[32, 8], [64, 4], [128, 2], [256, 1], [64, 8]])
        }
    }
}

fn subjects(scale: f64) -> Vec<Subject> {
    let side = |cells: usize| ((cells as f64 * scale.sqrt()) as usize).max(256).next_multiple_of(64);
    let edge = |cells: usize| ((cells as f64 * scale.cbrt()) as usize).max(64).next_multiple_of(64);
    let plane = |cells: usize| Grid::periodic(&[side(cells); 2]).expect("a valid size");
    let space = |cells: usize| Grid::periodic(&[edge(cells); 3]).expect("a valid size");
    let new = |what, grid, rule, bytes| Subject { what, grid, rule, bytes };
    let (life, heat) = (Rule::Life(Life::CONWAY), Rule::Heat(Heat { rate: 0.1 }));
    let wave = Rule::Wave(Wave { speed: 0.4 });
    let reaction = Rule::GrayScott(GrayScott { diffusion: [0.12, 0.06], feed: 0.04, kill: 0.06 });
    let text = TextRule::parse(GRAY_SCOTT).map_or_else(|_| reaction.clone(), Rule::Text);
    let trt = Fluid { collision: Collision::Trt { magic: 3.0 / 16.0 }, ..Fluid::new(0.6) };
    let omega = Some(Arc::new(|at: [usize; 3]| 1.2 + 1e-3 * (at[0] % 64) as f32) as CellMap<f32>);
    let posts = |[x, y, _]: [usize; 3]| (x % 64).abs_diff(32).pow(2) + (y % 64).abs_diff(32).pow(2) < 100;
    let channel = |cells: usize| {
        let flow = [Face::Inlet { velocity: [0.05, 0.0, 0.0], parabola: true }, Face::Outlet { density: 1.0 }];
        Grid::new(&[side(cells); 2], &[flow, [Face::Wall; 2]]).expect("a valid grid")
    };
    let trt3 = Fluid3 { collision: trt.collision, ..Fluid3::new(0.6) };
    let balls = |at: [usize; 3]| at.iter().map(|at| (at % 64).abs_diff(32).pow(2)).sum::<usize>() < 100;
    let flow = [Face::Inlet { velocity: [0.05, 0.0, 0.0], parabola: true }, Face::Outlet { density: 1.0 }];
    let duct = Grid::new(&[edge(512); 3], &[flow, [Face::Wall; 2], [Face::Wall; 2]]).expect("a valid grid");
    let with = |fluid: Fluid| Rule::D2q9(fluid);
    let small = Rule::D2q9(Fluid { storage: Storage::Half, ..trt.clone() });
    let small3 = Rule::D3q19(Fluid3 { storage: Storage::Half, ..trt3.clone() });
    let mut all = vec![
        new("d2q9 plain", plane(8192), with(trt.clone()), 72.0),
        new("d2q9 plain", plane(4096), with(trt.clone()), 72.0),
        new("d2q9 plain", plane(1024), with(trt.clone()), 72.0),
        new("d2q9 force", plane(8192), with(Fluid { force: [1e-6, 0.0], ..trt.clone() }), 72.0),
        new("d2q9 rates by cell", plane(8192), with(Fluid { omega, ..trt.clone() }), 80.0),
        new("d2q9 mask of posts", plane(8192), with(Fluid { solid: Some(Arc::new(posts)), ..trt.clone() }), 72.0),
        new("d2q9 channel", channel(8192), with(trt.clone()), 72.0),
        new("d2q9 channel", channel(1024), with(trt), 72.0),
        new("d2q9, 16 bits", plane(8192), small.clone(), 36.0),
        new("d2q9, 16 bits", plane(4096), small, 36.0),
        new("d3q19, 16 bits", space(512), small3.clone(), 76.0),
        new("d3q19, 16 bits", space(256), small3, 76.0),
        new("d3q19", space(512), Rule::D3q19(trt3.clone()), 152.0),
        new("d3q19", space(256), Rule::D3q19(trt3.clone()), 152.0),
        new(
            "d3q19 mask of balls",
            space(512),
            Rule::D3q19(Fluid3 { solid: Some(Arc::new(balls)), ..trt3.clone() }),
            152.0,
        ),
        new("d3q19 channel", duct, Rule::D3q19(trt3), 152.0),
        new("heat 2-D", plane(16384), heat.clone(), 8.0),
        new("heat 3-D", space(768), heat, 8.0),
        new("wave 2-D", plane(16384), wave.clone(), 16.0),
        new("wave 3-D", space(640), wave, 16.0),
        new("gray-scott 2-D", plane(16384), reaction.clone(), 16.0),
        new("gray-scott 2-D from text", plane(16384), text, 16.0),
        new("gray-scott 3-D", space(640), reaction, 16.0),
    ];
    all.extend([4096, 16384, 65536, 131_072].map(|cells| new("life", plane(cells), life.clone(), 0.25)));
    all
}

/// The built-in rule with the same parameters.
pub(super) const GRAY_SCOTT: &str = "fields u v
param du = 0.12
param dv = 0.06
param feed = 0.04
param kill = 0.06
let reaction = u * v * v
u' = u + du * lap(u) - reaction + feed * (1 - u)
v' = v + dv * lap(v) + reaction - (feed + kill) * v
";

/// Benchmarks that are split into tiles.
fn meshed(scale: f64) -> Vec<Subject> {
    let side = |cells: usize| ((cells as f64 * scale.sqrt()) as usize).max(256).next_multiple_of(64);
    let plane = |cells: usize| Grid::periodic(&[side(cells); 2]).expect("a valid size");
    vec![
        Subject { what: "d2q9 in tiles", grid: plane(8192), rule: Rule::D2q9(Fluid::new(0.6)), bytes: 72.0 },
        Subject { what: "d2q9 in tiles", grid: plane(2048), rule: Rule::D2q9(Fluid::new(0.6)), bytes: 72.0 },
        Subject { what: "life in tiles", grid: plane(65536), rule: Rule::Life(Life::CONWAY), bytes: 0.25 },
    ]
}

/// Fills a tile with noise on the device; values are small for float formats.
fn stir<R: Runtime>(client: &ComputeClient<R>, tile: &GpuTile<R>) {
    let len = tile.state.len;
    let (cubes, dim) = over(len);
    // SAFETY: threads past the last element do nothing.
    unsafe {
        noise::launch_unchecked::<R>(
            client,
            cubes,
            dim,
            address(client, len),
            tile.state.arg(),
            len,
            tile.frame.format,
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn noise(to: &mut Array<u32>, len: usize, #[comptime] format: Format) {
    let i = element();
    if i < len {
        let mut v = u32::cast_from(i) * 0x9e37_79b9u32;
        v = (v ^ (v >> 16u32)) * 0x85eb_ca6bu32;
        v = (v ^ (v >> 13u32)) * 0xc2b2_ae35u32;
        v = v ^ (v >> 16u32);
        match format {
            Format::Bit => to[i] = v,
            // Between -1e-3 and 1e-3.
            Format::Float => {
                let number = (f32::cast_from(v >> 8u32) - 8_388_608.0f32) * 1.2e-10f32;
                to[i] = u32::reinterpret(number);
            }
            // Two values of magnitude 1e-3 to 2e-3.
            Format::Half => to[i] = (v & 0x83ff_83ffu32) | 0x5000_5000u32,
        }
    }
}
