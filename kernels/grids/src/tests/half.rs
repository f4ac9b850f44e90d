//! Fluids stored in half precision: the loss of accuracy, and bit identity across partitions.
use std::sync::Arc;

use super::fluid::{MAGIC, PERIODIC, WALLS, advance, at_rest, flow, moments};
use super::*;
use crate::lbm::{Fluid, Fluid3, Storage};
use crate::region::CellMap;
use crate::{Face, Grid};

fn half() -> Fluid {
    Fluid { storage: Storage::Half, collision: MAGIC, ..Fluid::new(0.8) }
}

#[test]
fn half_precision_storage_preserves_the_flow() {
    let half = half();
    let single = Fluid { storage: Storage::Single, ..half.clone() };
    let [small, large] = [&half, &single].map(|fluid| Rule::D2q9(fluid.clone()).costs());
    assert_eq!([2 * small.state_bits, 2 * small.traffic_bits], [large.state_bits, large.traffic_bits]);
    assert_eq!([2 * small.face_bits, 2 * small.cell_bits], [large.face_bits, large.cell_bits]);
    // A lid-driven cavity: the same flow to three digits of the lid's speed.
    let lid = Face::Moving { velocity: [0.1, 0.0, 0.0] };
    let cavity = Grid::new(&[64, 64], &[WALLS, [Face::Wall, lid]]).unwrap();
    let run = |fluid: &Fluid| {
        let mut tile = flow(&cavity, fluid, &at_rest);
        advance(&mut tile, 10_000);
        moments(&tile, fluid)
    };
    for ((_, found), (_, expected)) in run(&half).into_iter().zip(run(&single)) {
        let error = (0..2).map(|axis| (found[axis] - expected[axis]).abs()).fold(0.0, f64::max);
        assert!(error < 3e-4, "{found:?}, {expected:?}");
    }
}

/// Relative loss of velocity per step, by rounding, in a force-driven flow; documented in docs/job-files.md.
const LOST: f64 = 1.2e-4;

#[test]
fn a_force_driven_flow_loses_a_ten_thousandth_per_step() {
    let width = 16;
    for (height, top, tau) in [(40, 0.05, 0.6), (40, 0.1, 0.8), (40, 0.05, 1.7), (16, 0.1, 0.8), (16, 0.1, 1.7)] {
        let channel = Grid::new(&[width, height], &[PERIODIC, WALLS]).unwrap();
        let fluid = Fluid { tau, ..half() };
        let force = 8.0 * fluid.viscosity() * top / (height * height) as f64;
        let fluid = Fluid { force: [force as f32, 0.0], ..fluid };
        let exact = |y: f64| 4.0 * top * y * (height as f64 - y) / (height * height) as f64;
        let shear = |y: f64| 4.0 * top * (height as f64 - 2.0 * y) / (height * height) as f64;
        let developed = |[_, y]: [f64; 2]| (1.0, [exact(y), 0.0], [[0.0; 2], [shear(y), 0.0]]);
        let worst = |init: &dyn Fn([f64; 2]) -> super::fluid::Flow| {
            let mut tile = flow(&channel, &fluid, init);
            advance(&mut tile, (1.4 * (height * height) as f64 / fluid.viscosity()) as usize);
            let error = |(i, (_, [u, v])): (usize, (f64, [f64; 2]))| {
                (u - exact((i / width) as f64 + 0.5)).abs().max(v.abs()) / top
            };
            moments(&tile, &fluid).into_iter().enumerate().map(error).fold(0.0, f64::max)
        };
        let (from_rest, from_there) = (worst(&at_rest), worst(&developed));
        assert!(from_rest < LOST * top / force, "{height}, tau {tau}: {from_rest} from rest");
        assert!(from_there < 0.002, "{height}, tau {tau}: {from_there} from the exact profile");
    }
}

#[test]
fn tiled_runs_match_a_single_tile() {
    let part = |at: [usize; 3], salt| (noise(at, salt) % 1000) as f64 / 5000.0 - 0.1;
    let disc: CellMap<bool> = Arc::new(|[x, y, _]| x.abs_diff(63) + y.abs_diff(20) < 7);
    let omega: CellMap<f32> = Arc::new(|[x, ..]| 1.0 + (x % 7) as f32 / 10.0);
    let masked = Fluid { solid: Some(disc), omega: Some(omega), ..half() };
    let inlet = Face::Inlet { velocity: [0.05, 0.01, 0.0], parabola: true };
    let lid = Face::Moving { velocity: [0.05, 0.0, 0.0] };
    let open = Grid::new(&[200, 50], &[[inlet, Face::Outlet { density: 1.0 }], PERIODIC]).unwrap();
    let stir = |at: [usize; 3], cell: &mut [f32]| {
        cell.copy_from_slice(&masked.cell(1.0, [part(at, 1), part(at, 2)], [[0.0; 2]; 2]));
    };
    same_bits_however_it_is_cut(&open, &Rule::D2q9(masked.clone()), &stir, 9);

    let ball: CellMap<bool> = Arc::new(|[x, y, z]| x.abs_diff(63) + y.abs_diff(12) + z.abs_diff(9) < 6);
    let fluid = Fluid3 { storage: Storage::Half, solid: Some(ball), force: [1e-4, -2e-4, 1e-4], ..Fluid3::new(0.7) };
    let space = Grid::new(&[136, 40, 24], &[PERIODIC, WALLS, [Face::Wall, lid]]).unwrap();
    let stir = |at: [usize; 3], cell: &mut [f32]| {
        cell.copy_from_slice(&fluid.cell(1.0, [1, 2, 3].map(|salt| part(at, salt)), [[0.0; 3]; 3]));
    };
    same_bits_however_it_is_cut(&space, &Rule::D3q19(fluid.clone()), &stir, 9);

    // Save, and restore on another partition.
    let mut tile = Tile::new(&open, &Rule::D2q9(masked.clone()), open.region(), 1).unwrap();
    tile.load(&mut |at, cell| cell.copy_from_slice(&masked.cell(1.0, [part(at, 1), part(at, 2)], [[0.0; 2]; 2])));
    let (region, mut threads) = (Region { start: [0; 3], end: [128, 50, 1] }, Threads::new(1).unwrap());
    let saved = tile.save(region).unwrap();
    assert_eq!(saved.len(), 128 * 50 * 9 * 2);
    let mut other = Tile::new(&open, &Rule::D2q9(masked), region, 1).unwrap();
    other.restore(region, &saved).unwrap();
    assert_eq!(other.save(region).unwrap(), saved);
    assert_ne!(tile.state_hash(&mut threads).unwrap(), other.state_hash(&mut threads).unwrap());
}

#[test]
fn values_out_of_16_bit_range_are_found() {
    let mut tile = flow(&Grid::periodic(&[32, 16]).unwrap(), &half(), &at_rest);
    assert_eq!(tile.first_not_finite().unwrap(), None);
    tile.load(&mut |at, cell| cell[3] = if at == [7, 5, 0] { 3.0 } else { 0.0 });
    assert_eq!(tile.first_not_finite().unwrap(), Some(([7, 5, 0], 3)));
}
