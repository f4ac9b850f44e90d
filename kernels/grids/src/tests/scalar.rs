//! Heat and wave against exact solutions of the discrete equations, Gray-Scott against double precision.
use std::f64::consts::PI;

use super::*;
use crate::scalar::{GrayScott, Heat, Wave};
use crate::{Face, Grid};

/// A mode along one axis: its wave number and its value in a cell.
type Mode = (f64, Box<dyn Fn(usize) -> f64>);

/// The modes of a boundary condition: sines over a periodic axis, cosines between walls, sines between fixed zeros.
fn mode(face: Face, cells: usize, waves: usize) -> Mode {
    let (n, m) = (cells as f64, waves as f64);
    match face {
        Face::Wall => {
            let k = PI * m / n;
            (k, Box::new(move |x| (k * (x as f64 + 0.5)).cos()))
        }
        Face::Fixed(_) => {
            let k = PI * m / (n + 1.0);
            (k, Box::new(move |x| (k * (x as f64 + 1.0)).sin()))
        }
        Face::Periodic | Face::Moving { .. } | Face::Inlet { .. } | Face::Outlet { .. } => {
            let k = 2.0 * PI * m / n;
            (k, Box::new(move |x| (k * (x as f64 + 0.3)).sin()))
        }
    }
}

/// The grid, a product of modes, and the sum of sin²(k/2).
fn world(size: &[usize], faces: &[Face]) -> (Grid, impl Fn([usize; 3]) -> f64 + use<>, f64) {
    let grid = Grid::new(size, &faces.iter().map(|&face| [face; 2]).collect::<Vec<_>>()).unwrap();
    let modes: Vec<Mode> = size.iter().zip(faces).enumerate().map(|(i, (&n, &f))| mode(f, n, i + 2)).collect();
    let squares = modes.iter().map(|(k, _)| (k / 2.0).sin().powi(2)).sum();
    (grid, move |at| modes.iter().zip(at).map(|((_, value), x)| value(x)).product(), squares)
}

fn deviation(tile: &Tile, expected: impl Fn([usize; 3]) -> f64) -> f64 {
    let [nx, ny, _] = tile.region().size();
    let cells = tile.read(0, tile.region()).unwrap();
    let at = |i: usize| [i % nx, i / nx % ny, i / nx / ny];
    cells.iter().enumerate().map(|(i, cell)| (f64::from(*cell) - expected(at(i))).abs()).fold(0.0, f64::max)
}

const ZERO: Face = Face::Fixed([0.0; 16]);
const WORLDS: [(&[usize], &[Face]); 5] = [
    (&[70, 48], &[Face::Periodic, Face::Periodic]),
    (&[64, 33], &[Face::Wall, ZERO]),
    (&[33, 40], &[ZERO, Face::Periodic]),
    (&[40, 20, 24], &[Face::Periodic, Face::Wall, ZERO]),
    (&[30, 20, 24], &[Face::Wall, ZERO, Face::Periodic]),
];

#[test]
fn heat_modes_decay_at_the_exact_discrete_rate() {
    for (size, faces) in WORLDS {
        let (grid, shape, squares) = world(size, faces);
        let (rate, steps) = (0.125, 400);
        let mut tile = Tile::new(&grid, &Rule::Heat(Heat { rate }), grid.region(), 1).unwrap();
        tile.load(&mut |at, cell| cell[0] = shape(at) as f32);
        tile.advance(&mut Threads::new(1).unwrap(), steps).unwrap();
        let decay = (1.0 - 4.0 * f64::from(rate) * squares).powi(steps as i32);
        let error = deviation(&tile, |at| decay * shape(at));
        assert!(error < 2e-6, "{error:e} in {size:?}");
    }
}

#[test]
fn wave_modes_oscillate_at_the_exact_discrete_frequency() {
    for (size, faces) in WORLDS {
        let (grid, shape, squares) = world(size, faces);
        let (speed, steps) = (0.5f32, 300);
        let turn = 2.0 * (f64::from(speed) * squares.sqrt()).asin();
        let mut tile = Tile::new(&grid, &Rule::Wave(Wave { speed }), grid.region(), 1).unwrap();
        tile.load(&mut |at, cell| {
            cell[0] = shape(at) as f32;
            cell[1] = (turn.cos() * shape(at)) as f32;
        });
        tile.advance(&mut Threads::new(1).unwrap(), steps).unwrap();
        let error = deviation(&tile, |at| (turn * steps as f64).cos() * shape(at));
        // Rounding an initial value acts like a change of velocity, whose effect grows with time.
        assert!(error < 1e-4, "{error:e} in {size:?}");
    }
}

const WORMS: GrayScott = GrayScott { diffusion: [0.2, 0.1], feed: 0.046, kill: 0.061 };

fn spots([x, y, z]: [usize; 3]) -> [f32; 2] {
    let inside = x.abs_diff(30) < 6 && y.abs_diff(20) < 5 && z < 9;
    let grain = (noise([x, y, z], 3) % 100) as f32 / 2000.0;
    if inside { [0.5 + grain, 0.25 + grain] } else { [1.0, 0.0] }
}

#[test]
fn gray_scott_matches_double_precision() {
    let [nx, ny] = [70, 40];
    let grid = Grid::new(&[nx, ny], &[[Face::Periodic; 2], [Face::Wall; 2]]).unwrap();
    let mut tile = Tile::new(&grid, &Rule::GrayScott(WORMS), grid.region(), 1).unwrap();
    tile.load(&mut |at, cell| cell.copy_from_slice(&spots(at)));
    tile.advance(&mut Threads::new(1).unwrap(), 200).unwrap();
    let mut cells: Vec<[f64; 2]> = (0..nx * ny).map(|i| spots([i % nx, i / nx, 0]).map(f64::from)).collect();
    let [du, dv, feed, kill] = [0.2f32, 0.1, 0.046, 0.061].map(f64::from);
    for _ in 0..200 {
        let next = |i: usize| {
            let (x, y) = (i % nx, i / nx);
            let around = [
                y * nx + (x + 1) % nx,
                y * nx + (x + nx - 1) % nx,
                x + nx * (y + 1).min(ny - 1),
                x + nx * y.saturating_sub(1),
            ];
            let spread = |field: usize| around.iter().map(|&n| cells[n][field]).sum::<f64>() - 4.0 * cells[i][field];
            let [u, v] = cells[i];
            let reaction = u * v * v;
            [u + du * spread(0) - reaction + feed * (1.0 - u), v + dv * spread(1) + reaction - (feed + kill) * v]
        };
        cells = (0..nx * ny).map(next).collect();
    }
    let error = deviation(&tile, |[x, y, _]| cells[x + nx * y][0]);
    assert!(error < 1e-4, "{error:e}");
    assert!(cells.iter().any(|[_, v]| *v > 0.2), "nothing lives in this test");
}

#[test]
fn the_trivial_gray_scott_state_is_a_fixed_point() {
    let grid = Grid::periodic(&[40, 30, 5]).unwrap();
    let mut tile = Tile::new(&grid, &Rule::GrayScott(WORMS), grid.region(), 1).unwrap();
    tile.load(&mut |_, cell| cell.copy_from_slice(&[1.0, 0.0]));
    let mut threads = Threads::new(1).unwrap();
    let before = tile.state_hash(&mut threads).unwrap();
    tile.advance(&mut threads, 100).unwrap();
    assert_eq!(tile.state_hash(&mut threads).unwrap(), before);
}

#[test]
fn tiled_runs_match_a_single_tile() {
    let warm = Face::Fixed(std::array::from_fn(|field| 1.0 - 0.5 * field as f32));
    let noisy = |at: [usize; 3], cell: &mut [f32]| {
        cell.iter_mut().enumerate().for_each(|(i, cell)| *cell = (noise(at, i as u64) % 1000) as f32 / 1000.0);
    };
    let spotted = |at: [usize; 3], cell: &mut [f32]| cell.copy_from_slice(&spots(at));
    let rules: [(Rule, Init); 3] = [
        (Rule::Heat(Heat { rate: 0.11 }), &noisy),
        (Rule::Wave(Wave { speed: 0.5 }), &noisy),
        (Rule::GrayScott(WORMS), &spotted),
    ];
    for (rule, init) in rules {
        for (size, faces) in [
            (&[256, 50][..], &[Face::Periodic, Face::Wall][..]),
            (&[200, 50], &[warm, Face::Periodic]),
            (&[202, 50, 25], &[Face::Wall, Face::Periodic, warm]),
            (&[202, 50, 25], &[warm, Face::Wall, Face::Periodic]),
        ] {
            let faces: Vec<_> = faces.iter().map(|&face| [face; 2]).collect();
            let steps = if size.len() == 2 { 13 } else { 9 };
            same_bits_however_it_is_cut(&Grid::new(size, &faces).unwrap(), &rule, init, steps);
        }
    }
}

#[test]
fn invalid_scalar_parameters_and_faces_are_rejected() {
    let new = |faces: [Face; 2], rule: Rule| {
        let grid = Grid::new(&[32, 32], &[faces, [Face::Wall; 2]]).unwrap();
        Tile::new(&grid, &rule, grid.region(), 1).map(|_| ()).unwrap_err().to_string()
    };
    let error = new([Face::Wall; 2], Rule::Heat(Heat { rate: -1.0 }));
    assert!(error.contains("heat: rate = -1"), "{error}");
    let error = new([Face::Wall; 2], Rule::Wave(Wave { speed: f32::NAN }));
    assert!(error.contains("wave: speed = NaN"), "{error}");
    let error = new([Face::Outlet { density: 1.0 }, Face::Wall], Rule::Heat(Heat { rate: 0.1 }));
    assert!(error.contains("heat cannot have"), "{error}");
}
