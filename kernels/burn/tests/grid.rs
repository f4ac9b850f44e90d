//! Compares grid kernels with the oracle in tensor operations.
use std::sync::Arc;

use burn::backend::Flex;
use kernels::threads::Threads;
use kernels_burn::grid::{Field, map, step};
use kernels_grids::lbm::{Collision, Fluid, Fluid3};
use kernels_grids::life::Life;
use kernels_grids::rule::Rule;
use kernels_grids::rule_file::TextRule;
use kernels_grids::scalar::{GrayScott, Heat, Wave};
use kernels_grids::tile::Tile;
use kernels_grids::{Face, Grid};

/// A hash of a cell's position as a number in 0..1.
fn noise([x, y, z]: [usize; 3], salt: usize) -> f32 {
    let mixed = (x * 73 + y * 151 + z * 283 + salt * 31) as u64;
    let mixed = (mixed ^ mixed >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    mixed as f32 / (1u64 << 24) as f32
}

/// The largest difference between kernel and oracle after some steps; solid cells are skipped.
fn difference(grid: &Grid, rule: &Rule, steps: usize, cell: &dyn Fn([usize; 3]) -> Vec<f32>) -> f32 {
    let mut tile = Tile::new(grid, rule, grid.region(), 1).unwrap();
    tile.load(&mut |at, fields| fields.copy_from_slice(&cell(at)));
    tile.advance(&mut Threads::new(1).unwrap(), steps).unwrap();
    let device = Default::default();
    let start = 0..rule.fields();
    let mut fields: Vec<Field<Flex>> = start.map(|field| map(grid, &device, |at| cell(at)[field])).collect();
    for _ in 0..steps {
        fields = step(grid, rule, &fields).unwrap();
    }
    let solid = match rule {
        Rule::D2q9(fluid) => fluid.solid.clone(),
        Rule::D3q19(fluid) => fluid.solid.clone(),
        Rule::Life(_) | Rule::Heat(_) | Rule::Wave(_) | Rule::GrayScott(_) | Rule::Text(_) => None,
    };
    let [width, height, _] = grid.size();
    let mut worst = 0f32;
    for (number, field) in fields.into_iter().enumerate() {
        let found = tile.read(number, grid.region()).unwrap();
        let expected = field.into_data().to_vec::<f32>().unwrap();
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let at = [i % width, i / width % height, i / width / height];
            if !solid.as_ref().is_some_and(|solid| solid(at)) {
                worst = worst.max((found - expected).abs());
            }
        }
    }
    worst
}

const WALLS: [Face; 2] = [Face::Wall; 2];
const PERIODIC: [Face; 2] = [Face::Periodic; 2];

#[test]
fn life_is_the_same() {
    for (rule, faces) in [("B3/S23", [PERIODIC, WALLS]), ("B36/S23", [WALLS, PERIODIC]), ("B2/S", [PERIODIC; 2])] {
        let grid = Grid::new(&[75, 40], &faces).unwrap();
        let soup = |at| vec![f32::from(u8::from(noise(at, 1) < 0.3))];
        let rule = Rule::Life(Life::parse(rule).unwrap());
        assert_eq!(difference(&grid, &rule, 30, &soup), 0.0, "{rule:?}");
    }
}

#[test]
fn fields_are_the_same_to_round_off() {
    let fixed = [Face::Fixed(std::array::from_fn(|field| 0.7 - 0.3 * field as f32)); 2];
    let plane = Grid::new(&[50, 31], &[PERIODIC, fixed]).unwrap();
    let space = Grid::new(&[20, 18, 12], &[WALLS, fixed, PERIODIC]).unwrap();
    for grid in [&plane, &space] {
        for rule in [
            Rule::Heat(Heat { rate: 0.12 }),
            Rule::Wave(Wave { speed: 0.5 }),
            Rule::GrayScott(GrayScott { diffusion: [0.16, 0.08], feed: 0.04, kill: 0.06 }),
        ] {
            let cell = |at| (0..rule.fields()).map(|field| noise(at, field)).collect();
            let error = difference(grid, &rule, 20, &cell);
            assert!(error < 2e-5, "{rule:?}: {error:e}");
        }
    }
}

/// Density and velocity of an arbitrary flow.
fn stirred(at: [usize; 3]) -> (f64, [f64; 3]) {
    let part = |salt| f64::from(noise(at, salt)) * 0.1 - 0.05;
    (1.0 + part(0), [1, 2, 3].map(part))
}

#[test]
fn fluids_are_the_same_to_round_off() {
    let collision = Collision::Trt { magic: 3.0 / 16.0 };
    let plain = Fluid::new(0.7);
    let forced = Fluid { collision, force: [1e-3, -5e-4], ..Fluid::new(0.9) };
    let masked = Fluid {
        solid: Some(Arc::new(|[x, y, _]| x.abs_diff(20) + y.abs_diff(12) < 6 || x < 3 && y > 27)),
        omega: Some(Arc::new(|[x, ..]| 1.0 + (x % 7) as f32 / 10.0)),
        ..forced.clone()
    };
    let lid = [Face::Wall, Face::Moving { velocity: [0.1, 0.0, 0.0] }];
    let side = [Face::Moving { velocity: [0.0, -0.05, 0.0] }, Face::Wall];
    for faces in [[PERIODIC; 2], [PERIODIC, WALLS], [side, lid]] {
        let plane = Grid::new(&[50, 31], &faces).unwrap();
        for fluid in [&plain, &forced, &masked] {
            let cell = |at| {
                let (density, [u, v, _]) = stirred(at);
                fluid.cell(density, [u, v], [[0.0; 2]; 2]).to_vec()
            };
            let error = difference(&plane, &Rule::D2q9(fluid.clone()), 20, &cell);
            assert!(error < 5e-7, "{faces:?} {fluid:?}: {error:e}");
        }
    }
}

#[test]
fn fluids_in_space_are_the_same_to_round_off() {
    let plain = Fluid3::new(0.7);
    let masked = Fluid3 {
        collision: Collision::Trt { magic: 3.0 / 16.0 },
        force: [1e-3, -5e-4, 2e-4],
        solid: Some(Arc::new(|[x, y, z]| x.abs_diff(9) + y.abs_diff(8) + z.abs_diff(5) < 5 || y < 2 && z > 9)),
        ..Fluid3::new(0.9)
    };
    let varied = Fluid3 { omega: Some(Arc::new(|[x, y, z]| 0.9 + ((x + y + z) % 7) as f32 / 10.0)), ..masked.clone() };
    let lid = [Face::Wall, Face::Moving { velocity: [0.1, 0.02, 0.0] }];
    for faces in [[WALLS, PERIODIC, PERIODIC], [PERIODIC, WALLS, lid]] {
        let space = Grid::new(&[20, 18, 12], &faces).unwrap();
        for fluid in [&plain, &masked, &varied] {
            let cell = |at| {
                let (density, velocity) = stirred(at);
                fluid.cell(density, velocity, [[0.0; 3]; 3]).to_vec()
            };
            let error = difference(&space, &Rule::D3q19(fluid.clone()), 20, &cell);
            assert!(error < 5e-7, "{faces:?} {fluid:?}: {error:e}");
        }
    }
}

#[test]
fn rules_and_faces_without_a_version_are_rejected() {
    let stream = [Face::Inlet { velocity: [0.1, 0.0, 0.0], parabola: false }, Face::Outlet { density: 1.0 }];
    let channel = Grid::new(&[16, 16], &[stream, WALLS]).unwrap();
    let fields: Vec<Field<Flex>> = (0..9).map(|_| map(&channel, &Default::default(), |_| 0.0)).collect();
    assert!(step(&channel, &Rule::D2q9(Fluid::new(0.8)), &fields).unwrap_err().contains("Inlet"));
    let text = Rule::Text(TextRule::parse("fields a\na' = a\n").unwrap());
    let closed = Grid::periodic(&[16, 16]).unwrap();
    assert!(step(&closed, &text, &fields[..1]).unwrap_err().contains("no version"));
}
