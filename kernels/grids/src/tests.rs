//! Bit identity: any partition, halo depth, thread count and instruction set gives the same state as a single tile.
mod fluid;
mod fluid3;
mod half;
mod life;
mod scalar;
mod state;

use super::rule::Rule;
use super::testing::{Init, Mesh};
use super::tile::Tile;
use super::{Grid, GridError, Link, Region, links};
use kernels::cpu::Isa;
use kernels::threads::Threads;

/// Partition by planes; `cuts`: the cut positions along each axis.
pub(super) fn planes(grid: &Grid, cuts: [&[usize]; 3]) -> Vec<Region> {
    let bounds: [Vec<usize>; 3] = std::array::from_fn(|axis| [&[0], cuts[axis], &[grid.size()[axis]]].concat());
    let mut regions = Vec::new();
    for z in bounds[2].windows(2) {
        for y in bounds[1].windows(2) {
            regions.extend(bounds[0].windows(2).map(|x| Region { start: [x[0], y[0], z[0]], end: [x[1], y[1], z[1]] }));
        }
    }
    regions
}

/// Partition into `count` boxes by random bisection, so that neighbours share parts of faces. No box is thinner than 8
/// cells.
pub(super) fn halves(grid: &Grid, count: usize, salt: u64) -> Vec<Region> {
    let mut regions = vec![grid.region()];
    for step in 0.. {
        let draw = |salt2: usize, end: usize| (noise([step, salt2, 0], salt) % end as u64) as usize;
        if regions.len() == count || step == 1000 {
            break;
        }
        let (at, axis) = (draw(0, regions.len()), draw(1, grid.dimensions()));
        let (mut low, mut high) = (regions[at], regions[at]);
        let size = low.size()[axis];
        let cut = if axis == 0 { 64 * (1 + draw(2, 4)) } else { 8 + draw(2, size) };
        if cut + 8 <= size {
            (low.end[axis], high.start[axis]) = (low.start[axis] + cut, low.start[axis] + cut);
            regions[at] = low;
            regions.push(high);
        }
    }
    regions
}

/// The state hash after some steps.
pub(super) fn run(
    grid: &Grid,
    rule: &Rule,
    init: Init,
    steps: usize,
    regions: &[Region],
    how: (usize, usize, Isa),
) -> u128 {
    let mut mesh = Mesh::new(grid, rule, regions, how);
    mesh.load(init);
    mesh.advance(steps);
    mesh.hash()
}

/// Compares single-step results of one tile with partitions along one axis, along several, and by random bisection,
/// with halo depths 1 to 8, 1 to 3 threads and all instruction sets.
pub(super) fn same_bits_however_it_is_cut(grid: &Grid, rule: &Rule, init: Init, steps: usize) {
    let one = [grid.region()];
    let mut single = Mesh::new(grid, rule, &one, (1, 1, Isa::detect()));
    single.load(init);
    single.single_steps();
    single.advance(steps);
    let expected = single.hash();
    let before = run(grid, rule, init, 0, &one, (1, 1, Isa::detect()));
    assert_ne!(expected, before, "nothing happens in this test");
    for (threads, isa) in
        (1..=3).map(|threads| (threads, Isa::detect())).chain(Isa::all().into_iter().map(|isa| (2, isa)))
    {
        assert_eq!(run(grid, rule, init, steps, &one, (1, threads, isa)), expected, "{isa:?}, {threads} threads");
    }
    let [_, height, depth] = grid.size();
    let planes = |cuts: [&[usize]; 3]| planes(grid, cuts);
    let some_y = [height / 3];
    let mut cuts = vec![
        planes([&[64], &[], &[]]),
        planes([&[], &some_y, &[]]),
        planes([&[64, 128], &[], &[]]),
        planes([&[128], &some_y, &[]]),
        planes([&[], &[8, 17, 30, height - 9], &[]]),
        halves(grid, 3, 1),
        halves(grid, 5, 2),
        halves(grid, 7, 3),
    ];
    if grid.dimensions() == 3 {
        cuts.push(planes([&[], &[], &[depth / 3]]));
        cuts.push(planes([&[64], &some_y, &[8, depth - 8]]));
        cuts.push(halves(grid, 6, 4));
    }
    let isas = Isa::all();
    for (number, cut) in cuts.iter().enumerate() {
        // In three dimensions, which take longer, each partition is tested with two depths.
        let all: Vec<usize> = (1..=8).collect();
        let some = if grid.dimensions() == 3 { vec![1 + number * 5 % 8, 1 + (number * 3 + 5) % 8] } else { all };
        for k in some.into_iter().filter(|k| k * rule.radius() <= 8) {
            // Vary the number of threads and the instruction set with the partition and the depth.
            let (threads, isa) = (1 + (number + k) % 3, isas[(number + k / 2) % isas.len()]);
            let found = run(grid, rule, init, steps, cut, (k, threads, isa));
            assert_eq!(found, expected, "{} cut as {cut:?}, depth {k}, {threads} threads, {isa:?}", rule.name());
        }
    }
}

/// Deterministic pseudo-random bits for a cell.
pub(super) fn noise([x, y, z]: [usize; 3], salt: u64) -> u64 {
    let mut v = x as u64 ^ (y as u64) << 20 ^ (z as u64) << 40 ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..3 {
        v = (v ^ v >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ v >> 27;
    }
    v ^ v >> 32
}

#[test]
fn invalid_input_is_rejected_with_its_reason() {
    let life = Rule::Life(super::life::Life::CONWAY);
    let grid = Grid::periodic(&[200, 40]).unwrap();
    let region = |x: [usize; 2], y: [usize; 2]| Region { start: [x[0], y[0], 0], end: [x[1], y[1], 1] };
    let new = |region, depth| Tile::new(&grid, &life, region, depth).map(|_| ()).unwrap_err();
    assert_eq!(new(region([0, 100], [0, 40]), 1), GridError::Cut { x: 100 });
    assert_eq!(new(region([0, 200], [0, 32]), 9), GridError::HaloTooDeep { depth: 9, halo: 9, cells: 8, axis: 'y' });
    assert_eq!(new(region([0, 200], [0, 8]), 0), GridError::NoHalo);
    assert!(matches!(new(region([0, 201], [0, 8]), 1), GridError::Outside { .. }));
    assert!(matches!(Grid::new(&[4], &[]), Err(GridError::Axes { .. })));
    assert!(matches!(Grid::periodic(&[4, 0]), Err(GridError::Size { axis: 'y', size: 0 })));
    let half = [[super::Face::Periodic, super::Face::Wall], [super::Face::Wall; 2]];
    assert_eq!(Grid::new(&[4, 4], &half), Err(GridError::HalfPeriodic { axis: 'x' }));

    let mut threads = Threads::new(1).unwrap();
    let mut tile = Tile::new(&grid, &life, region([64, 128], [10, 20]), 2).unwrap();
    assert_eq!(tile.advance(&mut threads, 1), Err(GridError::HaloStale { steps: 1, left: 0 }));
    assert_eq!(tile.pack(0), Err(GridError::NoLink { link: 0, links: 0 }));
    let regions = planes(&grid, [&[64, 128], &[10, 20], &[]]);
    let found: Vec<Link> = links(&grid, &regions, 4, 2).into_iter().map(|(_, link)| link).collect();
    assert_eq!(found.len(), 8);
    assert_eq!(tile.link(&found[1..]), Err(GridError::Uncovered { cells: 4, halo: 14 * 68 - 640 }));
    let refused = |result| match result {
        Err(GridError::Link { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(tile.link(&[found[0], found[0]])), "another tile owns cells of it");
    assert_eq!(refused(tile.link(&[Link { shift: [1, 0, 0], ..found[0] }])), "it is out of reach");
    assert_eq!(refused(tile.link(&[Link { shift: [0, 0, 1], ..found[0] }])), "it is not in the grid");
    tile.link(&found).unwrap();
    let expected = tile.bytes_in(0).unwrap();
    assert_eq!(
        tile.unpack(0, &vec![0; expected + 1]),
        Err(GridError::StripLength { link: 0, expected, found: expected + 1 })
    );
    for link in 0..found.len() {
        assert_eq!(tile.left(), 0);
        tile.unpack(link, &vec![0; tile.bytes_in(link).unwrap()]).unwrap();
    }
    assert_eq!(tile.left(), 2);
    assert_eq!(tile.strips(&mut threads), Err(GridError::NotLastPass { left: 2 }));
    tile.advance(&mut threads, 1).unwrap();
    assert_eq!(tile.interior(&mut threads), Err(GridError::NotLastPass { left: 1 }));
    tile.strips(&mut threads).unwrap();
    assert_eq!(tile.advance(&mut threads, 1), Err(GridError::HalfComputed));
    tile.interior(&mut threads).unwrap();
    assert_eq!((tile.left(), tile.steps()), (0, 2));
    assert!(matches!(tile.read(0, grid.region()), Err(GridError::Region { .. })));
    assert!(matches!(tile.read(1, tile.region()), Err(GridError::Field { field: 1, fields: 1 })));
}

#[test]
fn halos_wider_than_a_neighbour_reach_the_tiles_behind_it() {
    use super::scalar::Heat;
    let rule = Rule::Heat(Heat { rate: 0.1 });
    let init = |at: [usize; 3], cell: &mut [f32]| cell[0] = (noise(at, 5) % 100) as f32;
    let grid = Grid::periodic(&[128, 40]).unwrap();
    let thin = planes(&grid, [&[64], &[3, 5, 6, 20], &[]]);
    let expected = run(&grid, &rule, &init, 17, &[grid.region()], (1, 1, Isa::detect()));
    for depth in [1, 4, 7, 13] {
        assert_eq!(run(&grid, &rule, &init, 17, &thin, (depth, 1, Isa::detect())), expected, "depth {depth}");
    }
    // At a face of the grid the halo cannot be filled from further tiles.
    let closed = Grid::closed(&[128, 40]).unwrap();
    assert!(matches!(Tile::new(&closed, &rule, thin[2], 4), Err(GridError::HaloTooDeep { cells: 3, .. })));
}

#[test]
fn both_ends_of_a_link_agree_on_the_strip_size() {
    use super::lbm::{Fluid, Fluid3};
    use super::scalar::Wave;
    let plane = Grid::new(&[320, 60], &[[super::Face::Wall; 2], [super::Face::Periodic; 2]]).unwrap();
    let space =
        Grid::new(&[192, 40, 30], &[[super::Face::Periodic; 2], [super::Face::Wall; 2], [super::Face::Periodic; 2]]);
    let space = space.unwrap();
    for (grid, rule) in [
        (&plane, Rule::D2q9(Fluid::new(0.8))),
        (&space, Rule::Wave(Wave { speed: 0.5 })),
        (&space, Rule::D3q19(Fluid3::new(0.8))),
    ] {
        for (salt, depth) in [(1, 1), (2, 3), (3, 8)] {
            let regions = halves(grid, 6, salt);
            let mesh = Mesh::new(grid, &rule, &regions, (depth, 1, Isa::detect()));
            for (me, links) in mesh.links.iter().enumerate() {
                assert!(links.is_sorted(), "{links:?}");
                for (number, &(peer, shift)) in links.iter().enumerate() {
                    let back = (me, shift.map(|shift| -shift));
                    let there = mesh.links[peer].iter().position(|link| *link == back).expect("links have two ends");
                    assert_eq!(mesh.tiles[me].bytes_out(number), mesh.tiles[peer].bytes_in(there));
                }
            }
        }
    }
}

#[test]
fn face_and_cell_costs_match_the_strip_sizes() {
    use super::lbm::{Fluid, Storage};
    use super::rule_file::TextRule;
    use super::scalar::{GrayScott, Heat, Wave};
    let grid = Grid::periodic(&[64, 60]).unwrap();
    let regions = planes(&grid, [&[], &[30], &[]]);
    let text = TextRule::parse("fields u v w\nu' = u[0, 2] + v[1, 0]\nv' = w\nw' = u\n").unwrap();
    for (rule, costs) in [
        (Rule::Life(super::life::Life::CONWAY), [2, 2, 1, 1]),
        (Rule::D2q9(Fluid::new(0.8)), [576, 576, 96, 288]),
        (Rule::D2q9(Fluid { storage: Storage::Half, ..Fluid::new(0.8) }), [288, 288, 48, 144]),
        (Rule::Heat(Heat { rate: 0.1 }), [64, 64, 32, 32]),
        (Rule::Wave(Wave { speed: 0.1 }), [128, 128, 32, 64]),
        (Rule::GrayScott(GrayScott { diffusion: [0.1; 2], feed: 0.1, kill: 0.1 }), [128, 128, 64, 64]),
        (Rule::Text(text), [192, 192, 64, 96]),
    ] {
        let found = rule.costs();
        assert_eq!([found.state_bits, found.traffic_bits, found.face_bits, found.cell_bits], costs, "{rule:?}");
        for depth in 1..4 {
            let mesh = Mesh::new(&grid, &rule, &regions, (depth, 1, Isa::detect()));
            // Two links: to the tile above and to the tile below.
            let sent = (0..2).map(|link| mesh.tiles[0].bytes_out(link).unwrap()).sum::<usize>();
            let layers = found.face_bits + (depth as u64 - 1) * found.cell_bits;
            assert_eq!(sent as u64 * 8, 2 * 64 * rule.radius() as u64 * layers, "{rule:?} {depth}");
        }
    }
}

#[test]
fn unstable_parameters_produce_a_warning() {
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
    assert!(Rule::D2q9(Fluid::new(0.8)).warning(&cavity).is_some_and(|warning| warning.contains("0.3 cells per step")));
}
