//! Three-dimensional fluids against known solutions, and bit identity across partitions.
use std::f64::consts::TAU;
use std::sync::Arc;

use super::*;
use crate::Face;
use crate::lbm::{Collision, Fluid3};

const WALLS: [Face; 2] = [Face::Wall; 2];
const PERIODIC: [Face; 2] = [Face::Periodic; 2];
const MAGIC: Collision = Collision::Trt { magic: 3.0 / 16.0 };

/// Density, velocity and velocity gradient.
type Flow = (f64, [f64; 3], [[f64; 3]; 3]);

fn flow(grid: &Grid, fluid: &Fluid3, init: &dyn Fn([f64; 3]) -> Flow) -> Tile {
    let mut tile = Tile::new(grid, &Rule::D3q19(fluid.clone()), grid.region(), 1).unwrap();
    tile.load(&mut |at, cell| {
        let (density, velocity, gradient) = init(at.map(|at| at as f64 + 0.5));
        cell.copy_from_slice(&fluid.cell(density, velocity, gradient));
    });
    tile
}

fn at_rest(_: [f64; 3]) -> Flow {
    (1.0, [0.0; 3], [[0.0; 3]; 3])
}

/// Position, density and velocity of each cell.
fn moments(tile: &Tile, fluid: &Fluid3) -> Vec<([f64; 3], f64, [f64; 3])> {
    let fields: Vec<_> = (0..19).map(|i| tile.read(i, tile.region()).unwrap()).collect();
    let [nx, ny, _] = tile.region().size();
    let cell = |i: usize| {
        let (density, velocity) = fluid.moments(&std::array::from_fn(|field| fields[field][i]));
        ([i % nx, i / nx % ny, i / nx / ny].map(|at| at as f64 + 0.5), density, velocity)
    };
    (0..fields[0].len()).map(cell).collect()
}

fn advance(tile: &mut Tile, steps: usize) {
    tile.advance(&mut Threads::new(1).unwrap(), steps).unwrap();
}

#[test]
fn tiled_runs_match_a_single_tile() {
    let stir = |at: [usize; 3], fluid: &Fluid3, cell: &mut [f32]| {
        let part = |salt| 0.1 * ((noise(at, salt) % 1000) as f64 / 1000.0 - 0.5);
        cell.copy_from_slice(&fluid.cell(1.0 + part(1), [part(2), part(3), part(4)], [[0.0; 3]; 3]));
    };
    let ball: crate::CellMap<bool> = Arc::new(|[x, y, z]| {
        x.abs_diff(63).pow(2) + y.abs_diff(12).pow(2) + z.abs_diff(9).pow(2) < 30 || y < 2 && z > 22
    });
    let lid = Face::Moving { velocity: [0.05, 0.0, 0.02] };
    let inlet = Face::Inlet { velocity: [0.05, 0.01, -0.01], parabola: true };
    let outlet = Face::Outlet { density: 1.0 };
    let plain = Fluid3::new(0.7);
    let trt = Fluid3 { collision: MAGIC, force: [1e-4, -2e-4, 1e-4], ..Fluid3::new(0.6) };
    let varied = Fluid3 { omega: Some(Arc::new(|[x, y, z]| 1.0 + ((x * 3 + y * 7 + z) % 11) as f32 * 0.08)), ..trt };
    let masked = Fluid3 { solid: Some(ball), ..plain.clone() };
    for (faces, fluid) in [
        ([PERIODIC, PERIODIC, PERIODIC], &plain),
        ([WALLS, [Face::Wall, lid], WALLS], &varied),
        ([[inlet, outlet], WALLS, PERIODIC], &masked),
        ([[inlet, outlet], [Face::Wall, outlet], [outlet, inlet]], &masked),
    ] {
        let grid = Grid::new(&[136, 40, 24], &faces).unwrap();
        let init = |at: [usize; 3], cell: &mut [f32]| stir(at, fluid, cell);
        same_bits_however_it_is_cut(&grid, &Rule::D3q19(fluid.clone()), &init, 9);
    }
}

#[test]
fn a_shear_wave_shows_the_viscosity() {
    let n = 96;
    let (k, u0) = (TAU / n as f64, 0.02);
    for fluid in [Fluid3::new(0.8), Fluid3 { collision: MAGIC, ..Fluid3::new(0.65) }] {
        // The velocity component of one axis varies along the next.
        for axis in 0..3 {
            let along = (axis + 1) % 3;
            let mut size = [8; 3];
            size[along] = n;
            let init = |at: [f64; 3]| {
                let (mut velocity, mut gradient) = ([0.0; 3], [[0.0; 3]; 3]);
                velocity[axis] = u0 * (k * at[along]).sin();
                gradient[along][axis] = u0 * k * (k * at[along]).cos();
                (1.0, velocity, gradient)
            };
            let mut tile = flow(&Grid::periodic(&size).unwrap(), &fluid, &init);
            let amplitude = |tile: &Tile| {
                moments(tile, &fluid).iter().map(|(at, _, u)| u[axis] * (k * at[along]).sin()).sum::<f64>()
            };
            let before = amplitude(&tile);
            let steps = (1.0 / (fluid.viscosity() * k * k)) as usize;
            advance(&mut tile, steps);
            let viscosity = (before / amplitude(&tile)).ln() / (k * k * steps as f64);
            let error = viscosity / fluid.viscosity() - 1.0;
            assert!(error.abs() < 0.001, "{:.4} % off along {axis}", 100.0 * error);
        }
    }
}

#[test]
fn poiseuille_between_plates_and_in_a_duct() {
    let (height, top) = (20, 0.05);
    let h = height as f64;
    let fluid = Fluid3 { collision: MAGIC, ..Fluid3::new(0.9) };
    let force = 8.0 * fluid.viscosity() * top / (h * h);
    let fluid = Fluid3 { force: [force as f32, 0.0, 0.0], ..fluid };
    let steps = (1.4 * h * h / fluid.viscosity()) as usize;
    let plates = Grid::new(&[4, 4, height], &[PERIODIC, PERIODIC, WALLS]).unwrap();
    let mut tile = flow(&plates, &fluid, &at_rest);
    advance(&mut tile, steps);
    for ([_, _, z], _, [u, v, w]) in moments(&tile, &fluid) {
        let expected = 4.0 * top * z * (h - z) / (h * h);
        assert!((u - expected).abs() < 0.005 * top && v.abs() < 1e-5 && w.abs() < 1e-5, "{u}, {expected} at {z}");
    }
    // One of the walls as a mask: four solid rows.
    let duct = Grid::new(&[4, height + 4, height], &[PERIODIC, WALLS, WALLS]).unwrap();
    let fluid = Fluid3 { solid: Some(Arc::new(|[_, y, _]| y < 4)), ..fluid };
    let mut tile = flow(&duct, &fluid, &at_rest);
    advance(&mut tile, steps);
    // The series solution for a square duct of side 1, at (y, z) from a corner, in units of force / viscosity.
    let exact = |y: f64, z: f64| {
        let modes = (0..60).map(|n| (2 * n + 1) as f64 * std::f64::consts::PI);
        modes.map(|k| 4.0 / k.powi(3) * (1.0 - (k * (y - 0.5)).cosh() / (0.5 * k).cosh()) * (k * z).sin()).sum::<f64>()
    };
    for ([_, y, z], _, [u, _, _]) in moments(&tile, &fluid).into_iter().filter(|([_, y, _], ..)| *y > 4.0) {
        let expected = force * h * h / fluid.viscosity() * exact((y - 4.0) / h, z / h);
        assert!((u - expected).abs() < 0.005 * top, "{u}, {expected} expected at {y}, {z}");
    }
}

#[test]
fn a_channel_with_an_inlet_and_an_outlet() {
    // Slow: the density falls along the channel, and the velocity rises with it.
    let (height, length, top) = (16, 48, 0.01f32);
    let fluid = Fluid3 { collision: MAGIC, ..Fluid3::new(0.9) };
    let outlet = Face::Outlet { density: 1.0 };
    // The same flow along each axis, between plates across the next.
    for (axis, sign) in [(0, 1.0), (1, -1.0), (2, 1.0)] {
        let across = (axis + 1) % 3;
        let mut velocity = [0.0; 3];
        velocity[axis] = sign * top;
        let inlet = Face::Inlet { velocity, parabola: true };
        let (mut size, mut faces) = ([4; 3], [PERIODIC; 3]);
        (size[axis], size[across]) = (length, height);
        faces[axis] = if sign > 0.0 { [inlet, outlet] } else { [outlet, inlet] };
        faces[across] = WALLS;
        let mut tile = flow(&Grid::new(&size, &faces).unwrap(), &fluid, &at_rest);
        advance(&mut tile, 4000);
        for (at, _, u) in moments(&tile, &fluid) {
            let (y, h) = (at[across], height as f64);
            let expected = 4.0 * f64::from(top) * y * (h - y) / (h * h);
            let error = (f64::from(sign) * u[axis] - expected).abs() / f64::from(top);
            let far = (8.0..length as f64 - 8.0).contains(&at[axis]);
            assert!(error < if far { 0.01 } else { 0.03 }, "{u:?} at {at:?}: {expected} expected along {axis}");
        }
    }
}

#[test]
fn corners_of_open_faces_stay_stable() {
    let inlet = |velocity: [f32; 3]| Face::Inlet { velocity, parabola: false };
    let (along, outlet) = (inlet([0.05, 0.0, 0.0]), Face::Outlet { density: 1.0 });
    let up = inlet([0.0, 0.0, 0.03]);
    for tau in [0.55, 0.8, 1.0] {
        for faces in [
            [[along, outlet], [outlet; 2], [along; 2]],
            [[along, outlet], [Face::Wall, outlet], [up, Face::Wall]],
            [[along, outlet], [outlet; 2], [outlet; 2]],
        ] {
            let fluid = Fluid3::new(tau);
            let mut tile = flow(&Grid::new(&[30, 20, 20], &faces).unwrap(), &fluid, &at_rest);
            advance(&mut tile, 3000);
            for (at, density, u) in moments(&tile, &fluid) {
                let speed = u.iter().map(|u| u * u).sum::<f64>().sqrt();
                assert!((0.8..1.25).contains(&density) && speed < 0.3, "{density}, {u:?} at {at:?}, {tau}, {faces:?}");
            }
        }
    }
}

#[test]
fn mass_is_conserved_in_closed_and_periodic_boxes() {
    let solid: crate::CellMap<bool> = Arc::new(|[x, y, z]| x.abs_diff(8) + y.abs_diff(7) + z.abs_diff(6) < 5);
    let lid = Face::Moving { velocity: [0.08, 0.03, 0.0] };
    for faces in [[PERIODIC; 3], [WALLS, WALLS, [Face::Wall, lid]]] {
        for solid in [None, Some(Arc::clone(&solid))] {
            let fluid = Fluid3 { solid, ..Fluid3::new(0.6) };
            let n = 16;
            let mut tile = flow(&Grid::new(&[n, n, n], &faces).unwrap(), &fluid, &|at| {
                let [x, y, z] = at.map(|at| (TAU * at / n as f64).sin());
                (1.0 + 0.01 * x * y, [0.05 * y, -0.03 * z, 0.04 * x], [[0.0; 3]; 3])
            });
            let mass = |tile: &Tile| moments(tile, &fluid).iter().map(|(_, density, _)| density).sum::<f64>();
            let before = mass(&tile);
            advance(&mut tile, 10_000);
            let change = mass(&tile) / before - 1.0;
            assert!(change.abs() < 1e-6, "{change:e} of the mass, {faces:?}, mask {}", fluid.solid.is_some());
        }
    }
}

#[test]
fn a_ball_and_walls_balance_the_body_force() {
    let solid: crate::CellMap<bool> =
        Arc::new(|[x, y, z]| x.abs_diff(10).pow(2) + y.abs_diff(9).pow(2) + z.abs_diff(10).pow(2) < 20 || z == 0);
    let given = [1e-5, -2e-5, 0.0];
    let fluid = Fluid3 { solid: Some(Arc::clone(&solid)), force: given, ..Fluid3::new(0.9) };
    let grid = Grid::periodic(&[20, 20, 20]).unwrap();
    let mut tile = flow(&grid, &fluid, &at_rest);
    advance(&mut tile, 10_000);
    let cells = (0..8000).filter(|i| !solid([i % 20, i / 20 % 20, i / 400])).count() as f64;
    let force = tile.force().unwrap().map(Tile::total_value);
    for axis in 0..3 {
        let error = force[axis] - cells * f64::from(given[axis]);
        assert!(error.abs() < 2e-3 * cells * 1e-5, "{force:?}, {given:?} for each of {cells}");
    }
}
