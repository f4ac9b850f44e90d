//! One tile and many: whatever the cuts, the depth of halos, the threads and the instruction set, the same bits.
mod fluid;
mod life;
mod scalar;
mod state;

use std::collections::BTreeMap;

use super::rule::Rule;
use super::tile::{Threads, Tile};
use super::{Grid, GridError, Region};
use crate::cpu::Isa;

/// Sets a cell's fields from its place in the grid.
pub(super) type Init<'a> = &'a dyn Fn([usize; 3], &mut [f32]);

/// Tiles in one process that exchange strips as nodes would.
pub(super) struct Mesh {
    pub(super) tiles: Vec<Tile>,
    counts: [usize; 3],
    depth: usize,
    threads: Threads,
}

impl Mesh {
    /// `cuts`: where each axis is cut.
    pub(super) fn new(grid: &Grid, rule: &Rule, cuts: [&[usize]; 3], depth: usize, threads: usize, isa: Isa) -> Self {
        let bounds: [Vec<usize>; 3] = std::array::from_fn(|axis| [&[0], cuts[axis], &[grid.size()[axis]]].concat());
        let counts = std::array::from_fn(|axis| cuts[axis].len() + 1);
        let mut tiles = Vec::new();
        for z in 0..counts[2] {
            for y in 0..counts[1] {
                for x in 0..counts[0] {
                    let place = [x, y, z];
                    let start = std::array::from_fn(|axis| bounds[axis][place[axis]]);
                    let end = std::array::from_fn(|axis| bounds[axis][place[axis] + 1]);
                    tiles.push(Tile::with_isa(grid, rule, Region { start, end }, depth, isa).unwrap());
                }
            }
        }
        Self { tiles, counts, depth, threads: Threads::new(threads).unwrap() }
    }

    pub(super) fn load(&mut self, init: Init) {
        self.tiles.iter_mut().for_each(|tile| tile.load(&mut |at, cell| init(at, cell)));
    }

    /// The tile that one has in a direction.
    fn neighbour(&self, tile: usize, direction: [i8; 3]) -> usize {
        let [nx, ny, _] = self.counts;
        let place = [tile % nx, tile / nx % ny, tile / nx / ny];
        let [x, y, z] = std::array::from_fn(|axis| {
            (place[axis] as isize + direction[axis] as isize).rem_euclid(self.counts[axis] as isize) as usize
        });
        x + nx * (y + ny * z)
    }

    fn packed(&self) -> BTreeMap<(usize, [i8; 3]), Vec<u8>> {
        let all = self.tiles.iter().enumerate();
        all.flat_map(|(i, tile)| tile.neighbours().into_iter().map(move |to| ((i, to), tile.pack(to).unwrap())))
            .collect()
    }

    fn unpack(&mut self, strips: &BTreeMap<(usize, [i8; 3]), Vec<u8>>) {
        for i in 0..self.tiles.len() {
            for from in self.tiles[i].neighbours() {
                let strip = &strips[&(self.neighbour(i, from), from.map(|step| -step))];
                self.tiles[i].unpack(from, strip).unwrap();
            }
        }
    }

    /// Every cycle's last step in two parts, strips first.
    pub(super) fn advance(&mut self, steps: usize) {
        if self.tiles.len() == 1 && self.tiles[0].neighbours().is_empty() {
            return self.tiles[0].advance(&mut self.threads, steps).unwrap();
        }
        self.unpack(&self.packed());
        let mut done = 0;
        while done < steps {
            let now = self.depth.min(steps - done);
            done += now;
            if now < self.depth {
                self.tiles.iter_mut().for_each(|tile| tile.advance(&mut self.threads, now).unwrap());
                break;
            }
            for tile in &mut self.tiles {
                tile.advance(&mut self.threads, now - 1).unwrap();
                tile.strips(&mut self.threads).unwrap();
            }
            let strips = self.packed();
            self.tiles.iter_mut().for_each(|tile| tile.interior(&mut self.threads).unwrap());
            self.unpack(&strips);
        }
    }

    pub(super) fn hash(&mut self) -> u128 {
        let threads = &mut self.threads;
        self.tiles.iter().fold(0, |sum: u128, tile| sum.wrapping_add(tile.state_hash(threads).unwrap()))
    }
}

/// The hash after some steps.
pub(super) fn run(
    grid: &Grid,
    rule: &Rule,
    init: Init,
    steps: usize,
    cuts: [&[usize]; 3],
    (depth, threads, isa): (usize, usize, Isa),
) -> u128 {
    let mut mesh = Mesh::new(grid, rule, cuts, depth, threads, isa);
    mesh.load(init);
    mesh.advance(steps);
    mesh.hash()
}

/// 1, 2, 3, 5 and more tiles, cut along each axis and along several, depths 1 to 8, 1 to 3 threads, all instruction sets.
pub(super) fn same_bits_however_it_is_cut(grid: &Grid, rule: &Rule, init: Init, steps: usize) {
    let one: [&[usize]; 3] = [&[], &[], &[]];
    let expected = run(grid, rule, init, steps, one, (1, 1, Isa::detect()));
    let before = run(grid, rule, init, 0, one, (1, 1, Isa::detect()));
    assert_ne!(expected, before, "nothing happens in this test");
    for isa in Isa::all() {
        for threads in 1..=3 {
            assert_eq!(run(grid, rule, init, steps, one, (1, threads, isa)), expected, "{isa:?}, {threads} threads");
        }
    }
    let [_, height, depth] = grid.size();
    let (some_y, all_y) = ([height / 3], [8, 17, 30, height - 9]);
    let mut cuts: Vec<[&[usize]; 3]> = vec![
        [&[64], &[], &[]],
        [&[], &some_y, &[]],
        [&[64, 192], &[], &[]],
        [&[128], &some_y, &[]],
        [&[], &all_y, &[]],
    ];
    let (some_z, all_z) = ([depth / 3], [8, depth.saturating_sub(8)]);
    if grid.dimensions() == 3 {
        cuts.push([&[], &[], &some_z]);
        cuts.push([&[64], &some_y, &all_z]);
    }
    let isas = Isa::all();
    for (number, cut) in cuts.into_iter().enumerate() {
        let some = if grid.dimensions() == 3 { &[1, 3, 8][..] } else { &[1, 2, 3, 4, 5, 6, 7, 8] };
        for &k in some {
            // Each cut and depth meets some number of threads and some instruction set.
            let (threads, isa) = (1 + (number + k) % 3, isas[(number + k / 2) % isas.len()]);
            let found = run(grid, rule, init, steps, cut, (k, threads, isa));
            assert_eq!(found, expected, "{} cut at {cut:?}, depth {k}, {threads} threads, {isa:?}", rule.name());
        }
    }
}

/// Pseudo-random bits of a place, the same everywhere.
pub(super) fn noise([x, y, z]: [usize; 3], salt: u64) -> u64 {
    let mut v = x as u64 ^ (y as u64) << 20 ^ (z as u64) << 40 ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..3 {
        v = (v ^ v >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ v >> 27;
    }
    v ^ v >> 32
}

#[test]
fn what_cannot_be_is_named() {
    let life = Rule::Life(super::life::Life::CONWAY);
    let grid = Grid::periodic(&[200, 40]).unwrap();
    let region = |x: [usize; 2], y: [usize; 2]| Region { start: [x[0], y[0], 0], end: [x[1], y[1], 1] };
    let new = |region, depth| Tile::new(&grid, &life, region, depth).map(|_| ()).unwrap_err();
    assert_eq!(new(region([0, 100], [0, 40]), 1), GridError::Cut { x: 100 });
    assert_eq!(new(region([0, 200], [0, 8]), 9), GridError::Deep { depth: 9, halo: 9, cells: 8, axis: 'y' });
    assert_eq!(new(region([0, 200], [0, 8]), 0), GridError::NoHalo);
    assert!(matches!(new(region([0, 201], [0, 8]), 1), GridError::Outside { .. }));
    assert!(matches!(Grid::new(&[4], &[]), Err(GridError::Axes { .. })));
    assert!(matches!(Grid::periodic(&[4, 0]), Err(GridError::Size { axis: 'y', size: 0 })));
    let half = [[super::Face::Periodic, super::Face::Wall], [super::Face::Wall; 2]];
    assert_eq!(Grid::new(&[4, 4], &half), Err(GridError::HalfPeriodic { axis: 'x' }));

    let mut threads = Threads::new(1).unwrap();
    let mut tile = Tile::new(&grid, &life, region([64, 128], [10, 20]), 2).unwrap();
    assert_eq!(tile.neighbours().len(), 8);
    assert_eq!(tile.advance(&mut threads, 1), Err(GridError::Stale { steps: 1, left: 0 }));
    assert_eq!(tile.pack([0, 0, 1]), Err(GridError::NoNeighbour([0, 0, 1])));
    let expected = tile.strip_len([1, 0, 0]).unwrap();
    assert_eq!(
        tile.unpack([1, 0, 0], &vec![0; expected + 1]),
        Err(GridError::Strip { direction: [1, 0, 0], expected, found: expected + 1 })
    );
    for from in tile.neighbours() {
        assert_eq!(tile.left(), 0);
        tile.unpack(from, &vec![0; tile.strip_len(from).unwrap()]).unwrap();
    }
    assert_eq!(tile.left(), 2);
    assert_eq!(tile.strips(&mut threads), Err(GridError::Parts { left: 2 }));
    tile.advance(&mut threads, 1).unwrap();
    assert_eq!(tile.interior(&mut threads), Err(GridError::Parts { left: 1 }));
    tile.strips(&mut threads).unwrap();
    assert_eq!(tile.advance(&mut threads, 1), Err(GridError::Half));
    tile.interior(&mut threads).unwrap();
    assert_eq!((tile.left(), tile.steps()), (0, 2));
    assert!(matches!(tile.read(0, grid.region()), Err(GridError::Region { .. })));
    assert!(matches!(tile.read(1, tile.region()), Err(GridError::Field { field: 1, fields: 1 })));
}

#[test]
fn what_is_likely_to_end_badly_is_warned_of() {
    use super::lbm::Fluid;
    use super::scalar::{GrayScott, Heat, Wave};
    let gray_scott = |most| Rule::GrayScott(GrayScott { diffusion: [most, 0.1], feed: 0.04, kill: 0.06 });
    let (plane, space) = (Grid::periodic(&[8, 8]).unwrap(), Grid::periodic(&[8, 8, 8]).unwrap());
    for (rule, in_plane, in_space) in [
        (Rule::Life(super::life::Life::CONWAY), false, false),
        (Rule::Heat(Heat { rate: 0.2 }), false, true),
        (Rule::Heat(Heat { rate: 0.26 }), true, true),
        (Rule::Wave(Wave { speed: 0.6 }), false, true),
        (gray_scott(0.2), false, true),
        (Rule::D2q9(Fluid::new(0.51)), false, false),
        (Rule::D2q9(Fluid::new(0.501)), true, true),
    ] {
        let found = [&plane, &space].map(|grid| rule.warning(grid).is_some());
        assert_eq!(found, [in_plane, in_space], "{rule:?}: {:?}", rule.warning(&plane));
    }
    let lid = [super::Face::Wall, super::Face::Moving { velocity: [0.3, 0.0, 0.0] }];
    let cavity = Grid::new(&[8, 8], &[[super::Face::Wall; 2], lid]).unwrap();
    assert!(Rule::D2q9(Fluid::new(0.8)).warning(&cavity).is_some_and(|warning| warning.contains("0.3 cells a step")));
}
