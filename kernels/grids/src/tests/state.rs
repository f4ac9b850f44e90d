//! Save and restore across partitions, conservation sums and the NaN check.
use super::*;
use crate::lbm::Fluid;
use crate::life::Life;
use crate::scalar::Heat;

#[test]
fn a_saved_state_continues_on_another_partition() {
    let grid = Grid::closed(&[300, 60]).unwrap();
    let fluid = Fluid::new(0.7);
    let stir = |at: [usize; 3], cell: &mut [f32]| {
        let part = |salt| (noise(at, salt) % 1000) as f64 / 1e4;
        cell.copy_from_slice(&fluid.cell(1.0, [part(1), part(2)], [[0.0; 2]; 2]));
    };
    let soup = |at: [usize; 3], cell: &mut [f32]| cell[0] = f32::from(u8::from(noise(at, 7).is_multiple_of(3)));
    let rules: [(Rule, Init); 2] = [(Rule::D2q9(fluid.clone()), &stir), (Rule::Life(Life::CONWAY), &soup)];
    for (rule, init) in rules {
        let mut all = Mesh::new(&grid, &rule, &planes(&grid, [&[64], &[20], &[]]), (3, 1, Isa::detect()));
        all.load(init);
        all.advance(10);
        let saved: Vec<_> = all.tiles.iter().map(|tile| (tile.region(), tile.save(tile.region()).unwrap())).collect();
        all.advance(7);
        let mut other = Mesh::new(&grid, &rule, &planes(&grid, [&[128, 192], &[33], &[]]), (2, 2, Isa::detect()));
        // The cells that both the old and the new tile own.
        for tile in &mut other.tiles {
            tile.resume(10);
            for (region, _) in &saved {
                let own = tile.region();
                let start = std::array::from_fn(|axis| region.start[axis].max(own.start[axis]));
                let end = std::array::from_fn(|axis| region.end[axis].min(own.end[axis]));
                let common = Region { start, end };
                if common.cells() > 0 {
                    let mut old = Tile::new(&grid, &rule, *region, 1).unwrap();
                    old.restore(*region, &saved.iter().find(|(r, _)| r == region).unwrap().1).unwrap();
                    tile.restore(common, &old.save(common).unwrap()).unwrap();
                }
            }
        }
        other.advance(7);
        assert_eq!(other.hash(), all.hash());
        assert!(other.tiles.iter().all(|tile| tile.steps() == 17));
        let tile = &mut other.tiles[0];
        let short = vec![0; tile.saved_len(tile.region()) - 1];
        assert!(matches!(tile.restore(tile.region(), &short), Err(GridError::SavedLength { .. })));
        assert!(matches!(tile.save(grid.region()), Err(GridError::Region { .. })));
    }
}

#[test]
fn totals_do_not_depend_on_the_partition() {
    let grid = Grid::periodic(&[300, 50, 9]).unwrap();
    let rule = Rule::Heat(Heat { rate: 0.1 });
    let init = |at: [usize; 3], cell: &mut [f32]| cell[0] = (noise(at, 1) % 100_000) as f32 / 7.0 - 5000.0;
    let total = |cuts: [&[usize]; 3]| {
        let mut mesh = Mesh::new(&grid, &rule, &planes(&grid, cuts), (1, 1, Isa::detect()));
        mesh.load(&init);
        mesh.advance(5);
        mesh.tiles.iter().map(|tile| tile.total(0).unwrap()).fold(0i128, i128::wrapping_add)
    };
    let one = total([&[], &[], &[]]);
    assert_eq!(total([&[64, 256], &[20], &[3]]), one);
    let before: f64 = (0..9 * 50 * 300)
        .map(|i| {
            let mut cell = [0.0];
            init([i % 300, i / 300 % 50, i / 15000], &mut cell);
            f64::from(cell[0])
        })
        .sum();
    assert!((Tile::total_value(one) / before - 1.0).abs() < 1e-7, "{} {before}", Tile::total_value(one));
}

#[test]
fn a_field_check_matches_the_single_queries() {
    let masked = Fluid { solid: Some(std::sync::Arc::new(|[x, y, _]| x < 70 && y == 3)), ..Fluid::new(0.8) };
    let half = Fluid { storage: crate::lbm::Storage::Half, ..masked.clone() };
    for rule in [Rule::D2q9(masked), Rule::D2q9(half), Rule::Heat(Heat { rate: 0.1 }), Rule::Life(Life::CONWAY)] {
        let grid = Grid::periodic(&[300, 37]).unwrap();
        for region in [
            grid.region(),
            Region { start: [64, 5, 0], end: [192, 30, 1] },
            Region { start: [256, 0, 0], end: [300, 9, 1] },
        ] {
            let mut tile = Tile::new(&grid, &rule, region, 1).unwrap();
            let bit = matches!(rule, Rule::Life(_));
            tile.load(&mut |at, cell| {
                cell.iter_mut().zip(0..).for_each(|(value, field)| {
                    let noise = noise(at, field) % 1000;
                    *value = if bit { f32::from(u8::from(noise < 400)) } else { noise as f32 / 700.0 - 0.7 };
                });
            });
            for threads in [1, 3] {
                let look = tile.look(&mut Threads::new(threads).unwrap()).unwrap();
                let totals: Vec<i128> = (0..rule.fields()).map(|field| tile.total(field).unwrap()).collect();
                assert_eq!((look.totals, look.not_finite), (totals, None), "{rule:?} {region:?}");
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_are_found() {
    let grid = Grid::periodic(&[100, 20]).unwrap();
    let mut tile = Tile::new(&grid, &Rule::Heat(Heat { rate: 0.3 }), grid.region(), 1).unwrap();
    tile.load(&mut |[x, y, _], cell| cell[0] = if [x, y] == [70, 11] { f32::MAX } else { 0.0 });
    assert_eq!(tile.first_not_finite().unwrap(), None);
    tile.advance(&mut Threads::new(1).unwrap(), 1).unwrap();
    // Four times `f32::MAX` overflows to infinity.
    assert_eq!(tile.first_not_finite().unwrap(), Some(([70, 11, 0], 0)));
    tile.advance(&mut Threads::new(1).unwrap(), 1).unwrap();
    assert_eq!(tile.first_not_finite().unwrap(), Some(([70, 10, 0], 0)));
    assert_eq!(tile.look(&mut Threads::new(2).unwrap()).unwrap().not_finite, Some(([70, 10, 0], 0)));
}
