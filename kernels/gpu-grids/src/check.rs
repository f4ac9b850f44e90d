//! GPU self-test: compares device tiles with the CPU, and partitioned runs with unpartitioned ones. Used by tests and
//! on machines that have the device.
use std::sync::Arc;

use cubecl::prelude::*;
use kernels::threads::Threads;
use kernels_grids::any_tile::Fields;
use kernels_grids::frame::Format;
use kernels_grids::lbm::{Collision, Fluid, Fluid3, Storage};
use kernels_grids::life::Life;
use kernels_grids::rule::Rule;
use kernels_grids::rule_file::TextRule;
use kernels_grids::scalar::{GrayScott, Heat, Wave};
use kernels_grids::tile::Tile;
use kernels_grids::{CellMap, Face, Grid, GridError, Link, Region, links};

use crate::GpuTile;
use crate::bench::GRAY_SCOTT;
use crate::memory::always_wide;

/// A check and its outcome.
#[derive(Clone, Debug)]
pub struct Check {
    /// What was compared.
    pub name: String,
    /// A summary, or the first mismatch.
    pub outcome: Result<String, String>,
}

/// A test case: a rule, a grid and an initial state.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) grid: Grid,
    pub(super) rule: Rule,
    /// Sets a cell's fields from its global coordinates.
    pub(super) init: Init,
    /// Selects the partitions that the case uses, if not all.
    turn: usize,
}

pub(super) type Init = Box<dyn Fn([usize; 3], &mut [f32])>;

/// Steps of each check.
const STEPS: usize = 7;
/// Test grid sizes: three hash runs long, otherwise no larger than partitions and halos need.
const PLANE: [usize; 2] = [192, 44];
const SPACE_SIZE: [usize; 3] = [192, 26, 9];
/// Tolerance relative to the largest value of the field; for 16-bit storage, the size of one rounding.
const TOLERANCE: f32 = 2e-6;
const TOLERANCE_HALF: f32 = 5e-4;

/// Runs all checks; with several clients (one per device) tiles are distributed among them.
pub fn checks<R: Runtime>(clients: &[ComputeClient<R>]) -> Vec<Check> {
    checks_named(clients, "")
}

/// Runs the checks whose names contain `part`.
pub fn checks_named<R: Runtime>(clients: &[ComputeClient<R>], part: &str) -> Vec<Check> {
    let cases: Vec<Case> = cases().into_iter().filter(|case| case.name.contains(part)).collect();
    let outcome = |case: &Case| check(clients, case);
    let mut all: Vec<Check> =
        cases.iter().map(|case| Check { name: case.name.clone(), outcome: outcome(case) }).collect();
    if clients.iter().all(|client| client.properties().supports_address(AddressType::U64)) {
        always_wide(true);
        for case in cases.iter().step_by(4) {
            all.push(Check { name: format!("{}, 64-bit places", case.name), outcome: outcome(case) });
        }
        always_wide(false);
    }
    all
}

/// Compares with the CPU, then with several partitions and halo depths.
pub(super) fn check<R: Runtime>(clients: &[ComputeClient<R>], case: &Case) -> Result<String, String> {
    let text = |error: GridError| error.to_string();
    let mut threads = Threads::new(1).map_err(|error| error.to_string())?;
    let mut exact = Tile::new(&case.grid, &case.rule, case.grid.region(), 1).map_err(text)?;
    exact.load(&mut |at, cell| (case.init)(at, cell));
    let before = exact.state_hash(&mut threads).map_err(text)?;
    exact.advance(&mut threads, STEPS).map_err(text)?;
    let expected = exact.state_hash(&mut threads).map_err(text)?;
    if before == expected {
        return Err("the state does not change in this case".into());
    }
    let mut one = Mesh::new(clients, case, [&[], &[], &[]], 1).map_err(text)?;
    if one.hash().map_err(text)? != before {
        return Err("the loaded state's hash differs from the CPU's".into());
    }
    one.advance(STEPS).map_err(text)?;
    let found = one.hash().map_err(text)?;
    // Populations are stored minus their weights, but rounded where the weights are added to them.
    let least = if matches!(case.rule, Rule::D2q9(_) | Rule::D3q19(_)) { 0.1f32 } else { 1e-3 };
    let tolerance = if case.rule.format() == Format::Half { TOLERANCE_HALF } else { TOLERANCE };
    let mut far = 0f32;
    for field in 0..exact.fields() {
        let (device, host) = (one.tiles[0].read(field, case.grid.region()), exact.read(field, case.grid.region()));
        let (device, host) = (device.map_err(text)?, host.map_err(text)?);
        let largest = host.iter().fold(least, |most, value| most.max(value.abs()));
        for (i, (device, host)) in device.iter().zip(&host).enumerate() {
            let off = (device - host).abs() / largest;
            // NaN counts as too far off.
            if off > tolerance || off.is_nan() {
                let [width, height, _] = case.grid.size();
                let at = [i % width, i / width % height, i / width / height];
                return Err(format!("field {field} at {at:?} is {device}, on the CPU {host}"));
            }
            far = far.max(off);
        }
    }
    if case.rule.format() == Format::Bit && found != expected {
        return Err("the hash differs from the CPU's".into());
    }
    let mut ways = 1;
    // 16-bit cases differ only in storage, for any partition.
    let few = if case.rule.format() == Format::Half { 2 } else { 1 };
    for (cut, depth) in cuts(&case.grid, case.turn).into_iter().rev().step_by(few) {
        let cut = [&cut[0][..], &cut[1], &cut[2]];
        let mut mesh = Mesh::new(clients, case, cut, depth).map_err(text)?;
        mesh.advance(STEPS).map_err(text)?;
        if mesh.hash().map_err(text)? != found {
            return Err(format!("the hash differs from the uncut run's at cuts {cut:?}, halo depth {depth}"));
        }
        if ways == 1 {
            packed(&mut mesh, case).map_err(text)?;
        }
        ways += 1;
    }
    saved(clients, case).map_err(text)?;
    let same = if found == expected { ", bit-identical to the CPU" } else { "" };
    Ok(format!("{ways} partitions bit-identical, {far:.1e} from the CPU{same}"))
}

/// Checks that packed halo strips equal those of CPU tiles with the same state.
fn packed<R: Runtime>(mesh: &mut Mesh<R>, case: &Case) -> Result<(), GridError> {
    for (tile, links) in mesh.tiles.iter_mut().zip(&mesh.links) {
        let mut exact = Tile::new(&case.grid, &case.rule, tile.region(), mesh.depth)?;
        exact.link(&links.iter().map(|(_, link)| *link).collect::<Vec<_>>())?;
        exact.restore(tile.region(), &tile.save(tile.region())?)?;
        for link in 0..links.len() {
            let mut strip = Vec::new();
            tile.pack_into(link, &mut strip)?;
            if strip != exact.pack(link)? {
                return Err(GridError::Device { what: "a halo strip differs from the CPU's".into() });
            }
        }
    }
    Ok(())
}

/// Checks save and restore, hash, totals, force, row access and the NaN check against a CPU tile.
fn saved<R: Runtime>(clients: &[ComputeClient<R>], case: &Case) -> Result<(), GridError> {
    let failed = |what: &str| Err(GridError::Device { what: what.into() });
    let all = case.grid.region();
    let mut one = Mesh::new(clients, case, [&[], &[], &[]], 1)?;
    one.advance(3)?;
    let mut two = Mesh::new(clients, case, [&[], &[], &[]], 1)?;
    let middle = Region { start: [0; 3], end: [64, all.end[1] / 2, all.end[2]] };
    let saved = one.tiles[0].save(all)?;
    two.tiles[0].restore(all, &saved)?;
    let part = one.tiles[0].save(middle)?;
    two.tiles[0].restore(middle, &part)?;
    if two.tiles[0].save(all)? != saved || two.tiles[0].save(middle)? != part {
        return failed("the restored state differs from the saved one");
    }
    let mut exact = Tile::new(&case.grid, &case.rule, all, 1)?;
    exact.restore(all, &saved)?;
    if exact.state_hash(&mut Threads::new(1).map_err(|_| GridError::HalfComputed)?)? != one.tiles[0].state_hash()? {
        return failed("the hash differs from the CPU's for the same state");
    }
    for (field, total) in one.tiles[0].totals()?.into_iter().enumerate() {
        if exact.total(field)? != total {
            return failed("a total differs from the CPU's");
        }
    }
    if exact.force() != one.tiles[0].force() {
        return failed("the force on the mask differs from the CPU's");
    }
    // A sub-region, read by rows and by cells.
    let last = case.rule.fields() - 1;
    let part = Region { start: [5, 1, 0], end: [71, all.end[1], all.end[2]] };
    for every in [1, 3] {
        let mut rows = Vec::new();
        one.tiles[0].rows(&[last, 0], part, every, &mut |at, cells| rows.push((at, cells.to_vec())))?;
        for ([y, z], cells) in &rows {
            let row = Region { start: [5, *y, *z], end: [71, y + 1, z + 1] };
            let thin = |cells: Vec<f32>| (5..71).zip(cells).filter(|(x, _)| x % every == 0).map(|(_, cell)| cell);
            let [one, other] = [one.tiles[0].read(last, row)?, one.tiles[0].read(0, row)?];
            if *cells != [thin(one).collect::<Vec<_>>(), thin(other).collect()] {
                return failed("rows differ from the cells read one by one");
            }
        }
        if one.tiles[0].living(part, 5 * every)? != exact.living(part, 5 * every)? {
            return failed("live cell counts per block differ from the CPU's");
        }
        if rows.len() != all.end[2] * (1..all.end[1]).filter(|y| y % every == 0).count() {
            return failed("rows are missing");
        }
    }
    if one.tiles[0].first_not_finite()?.is_some() {
        return failed("a finite value is reported as not finite");
    }
    let mut broken = |at, cell: &mut [f32]| {
        (case.init)(at, cell);
        cell[last] = if at == [7, 5, 0] { f32::INFINITY } else { cell[last] };
    };
    one.tiles[0].load(&mut broken)?;
    exact.load(&mut broken);
    if one.tiles[0].first_not_finite()? != exact.first_not_finite()? {
        return failed("the first value that is not finite differs from the CPU's");
    }
    Ok(())
}

/// Cut positions and halo depths. In three dimensions, which take longer, consecutive cases use alternate entries; both
/// halves cut along every axis.
fn cuts(grid: &Grid, turn: usize) -> Vec<([Vec<usize>; 3], usize)> {
    let [_, height, deep] = grid.size();
    let mut all = vec![
        ([vec![], vec![height / 3], vec![]], 1),
        ([vec![64], vec![], vec![]], 2),
        ([vec![64, 128], vec![], vec![]], 3),
        ([vec![128], vec![height / 2], vec![]], 4),
        ([vec![], vec![10, 22], vec![]], 2),
    ];
    if deep > 1 {
        all.push(([vec![], vec![], vec![deep / 2]], 2));
        all.push(([vec![64], vec![height / 2], vec![deep / 3 + 1]], 3));
        return all.into_iter().skip(turn % 2).step_by(2).collect();
    }
    all
}

/// Tiles that exchange halo strips as nodes would.
pub(super) struct Mesh<R: Runtime> {
    pub(super) tiles: Vec<GpuTile<R>>,
    links: Vec<Vec<(usize, Link)>>,
    depth: usize,
}

impl<R: Runtime> Mesh<R> {
    pub(super) fn new(
        clients: &[ComputeClient<R>],
        case: &Case,
        cuts: [&[usize]; 3],
        depth: usize,
    ) -> Result<Self, GridError> {
        let mut mesh = Self::empty(clients, &case.grid, &case.rule, cuts, depth)?;
        mesh.tiles.iter_mut().try_for_each(|tile| tile.load(&mut |at, cell| (case.init)(at, cell)))?;
        Ok(mesh)
    }

    /// All cells zero. `cuts`: the cut positions along each axis.
    pub(super) fn empty(
        clients: &[ComputeClient<R>],
        grid: &Grid,
        rule: &Rule,
        cuts: [&[usize]; 3],
        depth: usize,
    ) -> Result<Self, GridError> {
        let bounds: [Vec<usize>; 3] = std::array::from_fn(|axis| [&[0], cuts[axis], &[grid.size()[axis]]].concat());
        let mut regions = Vec::new();
        for z in bounds[2].windows(2) {
            for y in bounds[1].windows(2) {
                regions.extend(
                    bounds[0].windows(2).map(|x| Region { start: [x[0], y[0], z[0]], end: [x[1], y[1], z[1]] }),
                );
            }
        }
        let of = |me| links(grid, &regions, me, depth * rule.radius());
        let links: Vec<Vec<(usize, Link)>> = (0..regions.len()).map(of).collect();
        let mut tiles = Vec::new();
        for (me, &region) in regions.iter().enumerate() {
            let client = &clients[me % clients.len()];
            let mut tile = GpuTile::new(client, grid, rule, region, depth, usize::MAX)?;
            let links: Vec<Link> = links[me].iter().map(|(_, link)| *link).collect();
            tile.link(&links)?;
            tiles.push(tile);
        }
        Ok(Self { tiles, links, depth })
    }

    /// Performs the first halo exchange.
    pub(super) fn begin(&mut self) -> Result<(), GridError> {
        self.exchange()
    }

    /// Runs `count` cycles of `depth` steps, each with its exchange.
    pub(super) fn cycles(&mut self, count: usize) -> Result<(), GridError> {
        if self.tiles.len() == 1 && self.links[0].is_empty() {
            return self.tiles[0].advance(count * self.depth);
        }
        for _ in 0..count {
            for tile in &mut self.tiles {
                tile.advance(self.depth - 1)?;
                tile.strips()?;
            }
            self.tiles.iter_mut().try_for_each(GpuTile::interior)?;
            self.exchange()?;
        }
        Ok(())
    }

    fn exchange(&mut self) -> Result<(), GridError> {
        let mut strips = Vec::new();
        for (me, links) in self.links.iter().enumerate() {
            for (number, (peer, link)) in links.iter().enumerate() {
                let back = link.shift.map(|shift| -shift);
                let me_there = self.tiles[me].region();
                let there = self.links[*peer]
                    .iter()
                    .position(|(other, link)| *other == me && link.shift == back && link.region == me_there);
                let there = there.ok_or(GridError::NoLink { link: number, links: links.len() })?;
                let mut strip = Vec::new();
                self.tiles[me].pack_into(number, &mut strip)?;
                strips.push((*peer, there, strip));
            }
        }
        strips.iter().try_for_each(|(peer, link, strip)| self.tiles[*peer].unpack(*link, strip))
    }

    /// The last step of every cycle is split, boundary strips first.
    pub(super) fn advance(&mut self, steps: usize) -> Result<(), GridError> {
        self.begin()?;
        self.cycles(steps / self.depth)?;
        self.tiles.iter_mut().try_for_each(|tile| tile.advance(steps % self.depth))
    }

    pub(super) fn hash(&self) -> Result<u128, GridError> {
        self.tiles.iter().try_fold(0u128, |sum, tile| Ok(sum.wrapping_add(tile.state_hash()?)))
    }
}

/// A deterministic pseudo-random number between 0 and 1 for a cell.
fn noise([x, y, z]: [usize; 3], salt: u64) -> f32 {
    let mut v = x as u64 ^ (y as u64) << 20 ^ (z as u64) << 40 ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..3 {
        v = (v ^ v >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ v >> 27;
    }
    (v >> 40) as f32 / (1u64 << 24) as f32
}

pub(super) fn cases() -> Vec<Case> {
    let random: fn() -> Init =
        || Box::new(|at, cell| cell.iter_mut().zip(0..).for_each(|(cell, salt)| *cell = noise(at, salt)));
    // Small values keep the reaction stable.
    let little: fn() -> Init =
        || Box::new(|at, cell| cell.iter_mut().zip(0..).for_each(|(cell, salt)| *cell = 0.4 * noise(at, salt)));
    let soup: fn() -> Init = || Box::new(|at, cell| cell[0] = f32::from(noise(at, 1) < 0.4));
    let (plane, space) = (PLANE, SPACE_SIZE);
    let wall = [Face::Wall; 2];
    let given = |values: [f32; 2]| Face::Fixed(std::array::from_fn(|field| values[field % 2]));
    let fixed = [given([1.0, 0.25]), given([-0.5, 0.75])];
    let mixed = [fixed, [Face::Periodic; 2], wall];
    let new = |size: &[usize], faces: &[[Face; 2]]| Grid::new(size, faces).expect("a valid grid");
    let periodic = |size: &[usize]| Grid::periodic(size).expect("a valid grid");
    let high_life = Life::parse("B36/S23").unwrap_or(Life::CONWAY);
    let odd = Life::parse("B0123478/S34678").unwrap_or(Life::CONWAY);
    let (heat, wave) = (Rule::Heat(Heat { rate: 0.11 }), Rule::Wave(Wave { speed: 0.4 }));
    let reaction = Rule::GrayScott(GrayScott { diffusion: [0.12, 0.06], feed: 0.04, kill: 0.06 });
    let mut all = Vec::new();
    let mut add = |name: &str, grid: Grid, rule: &Rule, init: Init| {
        let turn = all.len();
        all.push(Case { name: name.into(), grid, rule: rule.clone(), init, turn });
    };
    add("life, periodic", periodic(&[200, 44]), &Rule::Life(Life::CONWAY), soup());
    add("life, whole words", periodic(&[192, 44]), &Rule::Life(Life::CONWAY), soup());
    add("life B36/S23, walls", new(&[230, 44], &[wall; 2]), &Rule::Life(high_life), soup());
    add("life B0123478/S34678", new(&[224, 44], &[wall, [Face::Periodic; 2]]), &Rule::Life(odd), soup());
    for (name, rule, random) in [("heat", &heat, random), ("wave", &wave, random), ("gray-scott", &reaction, little)] {
        add(&format!("{name}, periodic"), periodic(&plane), rule, random());
        add(&format!("{name}, faces"), new(&[200, 44], &mixed[..2]), rule, random());
        add(&format!("{name}, walls"), new(&plane, &[wall; 2]), rule, random());
        add(&format!("{name}, periodic, 3-D"), periodic(&space), rule, random());
        add(&format!("{name}, faces, 3-D"), new(&space, &mixed), rule, random());
    }
    for (name, text, size, faces) in [
        ("gray-scott, ", GRAY_SCOTT, &plane[..], &[[Face::Periodic; 2], wall][..]),
        ("gray-scott, fixed", GRAY_SCOTT, &plane, &[fixed, [Face::Periodic; 2]]),
        ("far", FAR, &plane, &[[Face::Periodic; 2]; 2]),
        ("far, walls", FAR, &plane, &[wall, fixed]),
        ("far, more walls", FAR, &plane, &[fixed, wall]),
        ("3-D", SPACE, &space, &[wall, [Face::Periodic; 2], fixed]),
        ("3-D, turned", SPACE, &space, &[[Face::Periodic; 2], fixed, wall]),
    ] {
        let rule = Rule::Text(TextRule::parse(text).expect("a valid rule"));
        add(&format!("text, {name}"), new(size, faces), &rule, little());
    }
    let stored = |name: &str, both: &str| match name {
        "odd rows" => vec![Storage::Half],
        name if name == both => vec![Storage::Single, Storage::Half],
        _ => vec![Storage::Single],
    };
    let flows = fluids().into_iter().flat_map(|(name, grid, fluid)| {
        stored(name, "mask and walls")
            .into_iter()
            .map(move |storage| (name, grid.clone(), Fluid { storage, ..fluid.clone() }))
    });
    for (name, grid, fluid) in flows {
        let exact = fluid.clone();
        let init: Init = Box::new(move |at, cell| {
            let some = |salt| f64::from(noise(at, salt)) - 0.5;
            cell.copy_from_slice(&exact.cell(1.0 + 0.02 * some(1), [0.1 * some(2), 0.1 * some(3)], [[0.0; 2]; 2]));
        });
        add(&format!("d2q9{}, {name}", bits(fluid.storage)), grid, &Rule::D2q9(fluid), init);
    }
    let flows = fluids_in_space().into_iter().flat_map(|(name, grid, fluid)| {
        stored(name, "channel, the other way")
            .into_iter()
            .map(move |storage| (name, grid.clone(), Fluid3 { storage, ..fluid.clone() }))
    });
    for (name, grid, fluid) in flows {
        let exact = fluid.clone();
        let init: Init = Box::new(move |at, cell| {
            let some = |salt| f64::from(noise(at, salt)) - 0.5;
            let velocity = [2, 3, 4].map(|salt| 0.1 * some(salt));
            cell.copy_from_slice(&exact.cell(1.0 + 0.02 * some(1), velocity, [[0.0; 3]; 3]));
        });
        add(&format!("d3q19{}, {name}", bits(fluid.storage)), grid, &Rule::D3q19(fluid), init);
    }
    all
}

fn bits(storage: Storage) -> &'static str {
    match storage {
        Storage::Single => "",
        Storage::Half => " of 16 bits",
    }
}

/// Radius 2, with diagonal offsets; `c` is read only at the cell itself, `d` becomes the old `c`.
const FAR: &str = "\
fields a b c d
param rate = 0.1
let wide = a[2, 0] + a[-2, 0] + a[0, 2] + a[0, -2] - 4 * a
let bent = b[1, 1] - b[-1, 2]
let calm = exp(-abs(bent)) / (1 + sqrt(c * c))
a' = a + rate * wide / 4 + select(d > 0.2 && !(c < 0.1), 0.01, -0.01) * calm
b' = max(min(b + 0.2 * dx(a) - 0.1 * dy(b), 1), 0)
c' = c * 0.5
d' = c + (floor(4 * d) == 1) / 8
";
/// Three-dimensional, with all 26 neighbours.
const SPACE: &str = "\
dimensions 3
fields u v
u' = u + 0.02 * (neighbours(u) - 26 * u) + 0.1 * v
v' = 0.9 * v - 0.05 * u * dz(u) + 0.01 * u[0, 1, 1]
";

fn fluids() -> Vec<(&'static str, Grid, Fluid)> {
    let new = |faces: [[Face; 2]; 2]| Grid::new(&PLANE, &faces).expect("a valid grid");
    let (wall, open) = ([Face::Wall; 2], [Face::Periodic; 2]);
    let trt = |tau| Fluid { collision: Collision::Trt { magic: 3.0 / 16.0 }, ..Fluid::new(tau) };
    let omega = Some(Arc::new(|at| 1.2 + 0.6 * noise(at, 9)) as CellMap<f32>);
    let disc = |[x, y, _]: [usize; 3]| (x as i64 - 70).pow(2) + (y as i64 - 20).pow(2) < 60;
    let corner = move |[x, y, z]: [usize; 3]| disc([x, y, z]) || (x > 180 && y > 30) || (x < 3 && y > 36);
    let lid = [Face::Wall, Face::Moving { velocity: [0.1, 0.0, 0.0] }];
    let side = [Face::Moving { velocity: [0.0, -0.05, 0.0] }, Face::Wall];
    let flow = [Face::Inlet { velocity: [0.08, 0.01, 0.0], parabola: true }, Face::Outlet { density: 1.0 }];
    let even = [Face::Outlet { density: 0.99 }, Face::Inlet { velocity: [-0.05, 0.0, 0.0], parabola: false }];
    let up = [Face::Inlet { velocity: [0.0, 0.04, 0.0], parabola: false }, Face::Outlet { density: 1.0 }];
    let down = [Face::Outlet { density: 1.0 }, Face::Inlet { velocity: [0.01, -0.04, 0.0], parabola: true }];
    let force = [1e-4, 2e-5];
    vec![
        ("periodic", new([open; 2]), Fluid::new(0.7)),
        ("periodic, two rates", new([open; 2]), trt(0.6)),
        ("rates by cell", new([open; 2]), Fluid { omega: omega.clone(), ..trt(0.8) }),
        ("force", new([open, wall]), Fluid { force, ..trt(0.8) }),
        ("force, rates by cell", new([wall, open]), Fluid { force, omega: omega.clone(), ..Fluid::new(0.8) }),
        ("cavity", new([side, lid]), Fluid::new(0.6)),
        ("mask", new([open; 2]), Fluid { solid: Some(Arc::new(corner)), ..trt(0.6) }),
        ("mask and walls", new([wall, lid]), Fluid { solid: Some(Arc::new(corner)), force, ..trt(0.6) }),
        ("channel", new([flow, wall]), Fluid { solid: Some(Arc::new(disc)), ..trt(0.6) }),
        ("channel, the other way", new([even, open]), Fluid { omega, ..Fluid::new(0.9) }),
        ("upwards", new([open, up]), Fluid::new(0.7)),
        ("downwards", new([wall, down]), trt(0.7)),
        ("odd rows", Grid::periodic(&[199, 44]).expect("a valid grid"), trt(0.7)),
        ("open corners", new([flow, down]), trt(0.7)),
    ]
}

fn fluids_in_space() -> Vec<(&'static str, Grid, Fluid3)> {
    let new = |faces: [[Face; 2]; 3]| Grid::new(&SPACE_SIZE, &faces).expect("a valid grid");
    let (wall, open) = ([Face::Wall; 2], [Face::Periodic; 2]);
    let trt = |tau| Fluid3 { collision: Collision::Trt { magic: 3.0 / 16.0 }, ..Fluid3::new(tau) };
    let omega = Some(Arc::new(|at| 1.2 + 0.6 * noise(at, 9)) as CellMap<f32>);
    let ball = |[x, y, z]: [usize; 3]| (x as i64 - 70).pow(2) + (y as i64 - 14).pow(2) + (z as i64 - 4).pow(2) < 14;
    let corner = move |[x, y, z]: [usize; 3]| ball([x, y, z]) || (x > 180 && y > 20 && z > 5) || (x < 3 && z < 3);
    let lid = [Face::Wall, Face::Moving { velocity: [0.1, 0.02, 0.0] }];
    let side = [Face::Moving { velocity: [0.0, -0.05, 0.03] }, Face::Wall];
    let flow = [Face::Inlet { velocity: [0.08, 0.01, -0.02], parabola: true }, Face::Outlet { density: 1.0 }];
    let even = [Face::Outlet { density: 0.99 }, Face::Inlet { velocity: [-0.05, 0.0, 0.0], parabola: false }];
    let across = [Face::Inlet { velocity: [0.01, 0.04, 0.0], parabola: false }, Face::Outlet { density: 1.0 }];
    let up = [Face::Outlet { density: 1.0 }, Face::Inlet { velocity: [0.01, 0.02, -0.04], parabola: true }];
    let force = [1e-4, 2e-5, -3e-5];
    let solid: Option<CellMap<bool>> = Some(Arc::new(corner));
    vec![
        ("periodic", new([open; 3]), Fluid3::new(0.7)),
        ("periodic, two rates", new([open; 3]), trt(0.6)),
        ("rates by cell", new([open; 3]), Fluid3 { omega: omega.clone(), ..trt(0.8) }),
        ("force, rates by cell", new([wall, open, open]), Fluid3 { force, omega: omega.clone(), ..trt(0.8) }),
        ("cavity", new([side, wall, lid]), Fluid3::new(0.6)),
        ("mask", new([open; 3]), Fluid3 { solid: solid.clone(), ..trt(0.6) }),
        ("mask and walls", new([open, wall, lid]), Fluid3 { solid: solid.clone(), force, ..trt(0.6) }),
        ("channel", new([flow, wall, wall]), Fluid3 { solid, ..trt(0.6) }),
        ("channel, the other way", new([even, open, wall]), Fluid3 { omega, ..Fluid3::new(0.9) }),
        ("across", new([open, across, open]), Fluid3::new(0.7)),
        ("upwards", new([wall, open, up]), trt(0.7)),
        ("open corners", new([flow, across, up]), trt(0.7)),
    ]
}
