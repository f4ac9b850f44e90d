//! Life against known patterns, and against a naive implementation.
use super::*;
use crate::life::{Life, Pattern};
use crate::{Face, SIZE_MAX};

const GUN: &str = "#N Gosper glider gun
x = 36, y = 9, rule = B3/S23
24bo11b$22bobo11b$12b2o6b2o12b2o$11bo3bo4b2o12b2o$2o8bo5bo3b2o14b$2o8b
o3bob2o4bobo11b$10bo5bo7bo11b$11bo3bo20b$12b2o!";

fn life(rule: &str) -> Rule {
    Rule::Life(Life::parse(rule).unwrap())
}

/// A single tile with a pattern at a position.
fn world(grid: &Grid, pattern: &Pattern, [left, top]: [usize; 2]) -> Tile {
    let mut tile = Tile::new(grid, &life("B3/S23"), grid.region(), 1).unwrap();
    let alive: std::collections::BTreeSet<_> = pattern.alive().map(|[x, y]| [x + left, y + top]).collect();
    tile.load(&mut |[x, y, _], cell| cell[0] = f32::from(u8::from(alive.contains(&[x, y]))));
    tile
}

fn alive(tile: &Tile) -> Vec<[usize; 2]> {
    let width = tile.region().size()[0];
    let cells = tile.read(0, tile.region()).unwrap();
    (0..cells.len()).filter(|&i| cells[i] == 1.0).map(|i| [i % width, i / width]).collect()
}

#[test]
fn matches_a_naive_implementation() {
    let step = |cells: &[bool], [w, h]: [usize; 2], periodic: bool, birth: u16, survival: u16| -> Vec<bool> {
        let at = |x: isize, y: isize| {
            let inside = (0..w as isize).contains(&x) && (0..h as isize).contains(&y);
            (inside || periodic) && cells[x.rem_euclid(w as isize) as usize + w * y.rem_euclid(h as isize) as usize]
        };
        (0..w * h)
            .map(|i| {
                let (x, y) = ((i % w) as isize, (i / w) as isize);
                let around = (0..9).filter(|&n| n != 4 && at(x + n % 3 - 1, y + n / 3 - 1)).count();
                (if at(x, y) { survival } else { birth }) >> around & 1 == 1
            })
            .collect()
    };
    let mut threads = Threads::new(1).unwrap();
    for (rule, birth, survival) in
        [("B3/S23", 1 << 3, 0b1100), ("B36/S23", 0b100_1000, 0b1100), ("B0128/S0178", 0b1_0000_0111, 0b1_1000_0011)]
    {
        for (size, periodic) in
            [([1, 1], true), ([5, 3], true), ([63, 9], true), ([64, 4], false), ([65, 6], true), ([700, 5], false)]
        {
            let grid = if periodic { Grid::periodic(&size) } else { Grid::closed(&size) }.unwrap();
            let mut cells: Vec<bool> =
                (0..size[0] * size[1]).map(|i| noise([i % size[0], i / size[0], 0], 1) & 1 == 1).collect();
            let mut tile = Tile::new(&grid, &life(rule), grid.region(), 1).unwrap();
            tile.load(&mut |[x, y, _], cell| cell[0] = f32::from(u8::from(cells[x + y * size[0]])));
            for generation in 0..10 {
                let found: Vec<bool> = tile.read(0, grid.region()).unwrap().into_iter().map(|c| c == 1.0).collect();
                assert_eq!(found, cells, "{rule}, {size:?}, generation {generation}");
                tile.advance(&mut threads, 1).unwrap();
                cells = step(&cells, size, periodic, birth, survival);
            }
        }
    }
}

#[test]
fn tiled_runs_match_a_single_tile() {
    let soup = |at: [usize; 3], cell: &mut [f32]| cell[0] = f32::from(u8::from(noise(at, 7).is_multiple_of(3)));
    for grid in [
        Grid::periodic(&[320, 60]).unwrap(),
        Grid::closed(&[300, 61]).unwrap(),
        Grid::new(&[257, 60], &[[Face::Wall; 2], [Face::Periodic; 2]]).unwrap(),
        Grid::new(&[320, 57], &[[Face::Periodic; 2], [Face::Wall; 2]]).unwrap(),
    ] {
        same_bits_however_it_is_cut(&grid, &life("B3/S23"), &soup, 21);
        same_bits_however_it_is_cut(&grid, &life("B36/S23"), &soup, 9);
    }
}

#[test]
fn a_halo_deeper_than_a_word() {
    let soup = |at: [usize; 3], cell: &mut [f32]| cell[0] = f32::from(u8::from(noise(at, 8).is_multiple_of(3)));
    let (grid, rule) = (Grid::periodic(&[640, 200]).unwrap(), life("B3/S23"));
    let expected = run(&grid, &rule, &soup, 130, &[grid.region()], (1, 1, Isa::detect()));
    for depth in [63, 64, 65, 96] {
        let found =
            run(&grid, &rule, &soup, 130, &planes(&grid, [&[128, 256, 448], &[99], &[]]), (depth, 2, Isa::detect()));
        assert_eq!(found, expected, "depth {depth}");
    }
}

#[test]
fn a_glider_returns_to_its_start_on_a_torus() {
    let glider = Pattern::parse("x = 3, y = 3\nbob$2bo$3o!").unwrap();
    let grid = Grid::periodic(&[100, 100]).unwrap();
    let mut tile = world(&grid, &glider, [90, 95]);
    let start = alive(&tile);
    let mut threads = Threads::new(1).unwrap();
    tile.advance(&mut threads, 4).unwrap();
    let mut moved: Vec<_> = start.iter().map(|[x, y]| [(x + 1) % 100, (y + 1) % 100]).collect();
    moved.sort_by_key(|&[x, y]| [y, x]);
    assert_eq!(alive(&tile), moved);
    tile.advance(&mut threads, 396).unwrap();
    assert_eq!(alive(&tile), start);
}

#[test]
fn a_gun_fires_every_thirty_generations() {
    let gun = Pattern::parse(GUN).unwrap();
    assert_eq!((gun.width, gun.height, gun.alive().count(), gun.rule), (36, 9, 36, Some(Life::CONWAY)));
    let mut tile = world(&Grid::closed(&[400, 400]).unwrap(), &gun, [10, 10]);
    let mut threads = Threads::new(1).unwrap();
    for gliders in 0..8 {
        assert_eq!(alive(&tile).len(), 36 + 5 * gliders);
        tile.advance(&mut threads, 30).unwrap();
    }
}

#[test]
fn the_r_pentomino_is_stable_at_generation_1103() {
    let pattern = Pattern::parse("x = 3, y = 3\nb2o$2o$bo!").unwrap();
    let mut tile = world(&Grid::closed(&[1024, 1024]).unwrap(), &pattern, [510, 510]);
    let mut threads = Threads::new(2).unwrap();
    tile.advance(&mut threads, 1103).unwrap();
    assert_eq!(alive(&tile).len(), 116);
    // Blinkers have period two, gliders period four.
    let before = alive(&tile);
    tile.advance(&mut threads, 4).unwrap();
    let after = alive(&tile);
    assert_eq!(after.len(), 116);
    let kept =
        before.iter().filter(|cell| after.binary_search_by_key(&[cell[1], cell[0]], |c| [c[1], c[0]]).is_ok()).count();
    // Six gliders of five cells moved by one cell: each retains at most two of its cells.
    assert!((116 - 30..=116 - 18).contains(&kept), "{kept} cells are where they were");
}

#[test]
fn rules_parse_and_format() {
    for (text, same) in [
        ("B3/S23", "B3/S23"),
        ("23/3", "B3/S23"),
        ("b36/s23", "B36/S23"),
        ("S/B2", "B2/S"),
        (" B0/S8 ", "B0/S8"),
        ("b36s23", "B36/S23"),
        ("B3S23", "B3/S23"),
        ("S23B36", "B36/S23"),
        ("B2S", "B2/S"),
    ] {
        assert_eq!(Life::parse(text).unwrap().to_string(), same, "{text}");
    }
    for (text, says) in [
        ("B3", "not a rule"),
        ("B9/S2", "9 neighbours"),
        ("B3/23", "not a rule"),
        ("Bx/S2", "not a rule"),
        ("", "not a rule"),
        ("Life", "not a rule"),
        ("é", "not a rule"),
        ("23b3", "not a rule"),
        ("b3b3", "not a rule"),
    ] {
        let error = Life::parse(text).unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}

#[test]
fn patterns_parse_without_a_header_and_with_a_bounded_grid() {
    let pattern = Pattern::parse("#C a glider\nbob$\n2bo$3o!").unwrap();
    assert_eq!((pattern.width, pattern.height, pattern.rule), (3, 3, None));
    assert_eq!(pattern.runs, Pattern::parse("x = 3, y = 3\nbob$2bo$3o!").unwrap().runs);
    let pattern = Pattern::parse("x = 1, y = 1, rule = b36s23:T100,100\no!").unwrap();
    assert_eq!(pattern.rule.unwrap().to_string(), "B36/S23");
    assert_eq!(Pattern::parse("!").unwrap().alive().count(), 0);
}

#[test]
fn bad_patterns_are_rejected_with_their_line() {
    let huge = format!("x = {}, y = 1\nb!", SIZE_MAX + 1);
    for (text, says) in [
        ("", "line 1: it is empty"),
        ("#C only a comment", "it is empty"),
        ("bo$", "line 1: the pattern does not end"),
        ("x 3\nb!", "line 1: expected b, o, $ or !, found 'x'"),
        ("16777216b2o!", "line 1: row 1 reaches column 16777218"),
        ("x = 3\nb!", "line 1: the header needs both"),
        ("x = 3, y = no\nb!", "y = \"no\""),
        (&huge, "expected 1 to"),
        ("x = 3, y = 3, z = 3\nb!", "\"z\" in the header"),
        ("x = 3, y = 3, rule = B9/S1\nb!", "line 1: life: 9 neighbours"),
        ("x = 3, y = 3\nbo$\n4o!", "line 3: row 2 reaches column 4 of 3 × 3"),
        ("x = 3, y = 1\n$$o!", "line 2: row 3"),
        ("x = 3, y = 1\nbq!", "line 2: expected b, o, $ or !, found 'q'"),
        ("x = 3, y = 1\nbo", "line 2: the pattern does not end"),
        ("x = 3, y = 1\n99999999999999999999999b!", "a run of"),
    ] {
        let error = Pattern::parse(text).unwrap_err().to_string();
        assert!(error.contains(says), "{text:?}: {error}");
    }
}
