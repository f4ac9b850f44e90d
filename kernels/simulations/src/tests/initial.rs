//! The row-wise initial state equals the cell-wise one, and its parts cover a region.
use super::*;

#[test]
fn rows_equal_cell_by_cell_evaluation() {
    let picture = png(130, 12, &(0..130 * 12).map(|i| (i * 7 % 256) as u8).collect::<Vec<_>>());
    let grid = "name = \"t\"\nsteps = 1\n[grid]\nsize = [130, 12]\n";
    let life = "[rule]\nname = \"life\"\n[initial]\n";
    let heat = "[rule]\nname = \"heat\"\nrate = 0.1\n[initial]\n";
    let fluid = "[rule]\nname = \"d2q9\"\ntau = 0.8\n[initial]\n";
    let half = "[rule]\nname = \"d2q9\"\ntau = 0.8\nstorage = \"f16\"\n[initial]\n";
    let space = "name = \"t\"\nsteps = 1\n[grid]\nsize = [70, 5, 4]\n[rule]\nname = \"d3q19\"\ntau = 0.7\n[initial]\n";
    let all = [
        format!("{grid}{life}noise = 0.3"),
        format!("{grid}{life}noise = 1"),
        format!("{grid}{life}alive = \"x < 70 && noise(3) < y / ny\"\npattern = {{ file = \"g.rle\", at = [125, 3] }}"),
        format!("{grid}{life}noise = 0.1\nalive = {{ image = \"p.png\" }}"),
        format!("{grid}{heat}temperature = 0.25"),
        format!("{grid}{heat}temperature = \"noise(1)\""),
        format!(
            "{grid}{heat}temperature = \"select(x > 64.25, sin(x * y) ^ 2, -max(noise(2), y / nx) + floor(x / 3))\""
        ),
        format!("{grid}{heat}temperature = {{ image = \"p.png\", black = -1, white = 3 }}"),
        format!("{grid}{fluid}density = 1.01\nvelocity = [0.02, 0.01]"),
        format!("{grid}{fluid}velocity = [\"0.04 * cos(2 * pi * x / nx)\", \"0.01 * noise(1)\"]"),
        format!("{grid}{half}velocity = [0.02, 0.01]"),
        format!("{grid}{half}velocity = [\"0.04 * cos(2 * pi * x / nx)\", \"0.01 * noise(1)\"]"),
        format!("{space}velocity = [0.01, 0.02, \"0.01 * sin(z)\"]"),
    ];
    for text in &all {
        let simulation = job(text, &[("g.rle", GLIDER), ("p.png", &picture)]);
        let region = simulation.grid().region();
        let mut one = Tile::new(simulation.grid(), simulation.rule(), region, 1).unwrap();
        one.load(&mut |at, cell| simulation.initial.set(at, cell));
        for threads in [1, 3, 64] {
            assert!(one.save(region).unwrap() == simulation.initial(region, threads), "{threads} threads: {text}");
        }
        let part = Region { start: [64, 1, 0], end: region.end };
        assert!(one.save(part).unwrap() == simulation.initial(part, 2), "a part: {text}");
    }
}

#[test]
fn parts_cover_a_region_once() {
    let simulation = job(LIFE, &[("glider.rle", GLIDER)]);
    let (small, plane) = (simulation.grid().region(), Region { start: [64, 3, 0], end: [70_000, 30_003, 1] });
    assert_eq!(simulation.initial_parts(small), [small]);
    let parts = simulation.initial_parts(plane);
    assert!(parts.len() > 10 && parts.iter().map(Region::cells).sum::<usize>() == plane.cells());
    assert!(parts.windows(2).all(|two| two[0].end[1] == two[1].start[1] && two[0].start[0] == 64));
    let space = Region { start: [0; 3], end: [640, 640, 640] };
    let parts = simulation.initial_parts(space);
    assert_eq!(parts.iter().map(Region::cells).sum::<usize>(), space.cells());
    assert!(parts.windows(2).all(|two| two[0].end[2] == two[1].start[2]), "whole layers where they are small");
}

#[test]
fn solid_cells_may_have_any_initial_values() {
    let text = "name = \"t\"\nsteps = 1\n[grid]\nsize = [64, 16]\n[rule]\nname = \"d2q9\"\ntau = 0.8\nsolid = \"x < 3\"\n\
                [initial]\ndensity = \"select(x < 3, sqrt(0 - 1), 1)\"\nvelocity = [\"0.01 / (x - 2.5)\", 0]";
    let simulation = job(text, &[]);
    let mut tile = loaded(&simulation, simulation.grid().region());
    tile.advance(&mut Threads::new(1).unwrap(), 20).unwrap();
    assert_eq!(tile.first_not_finite().unwrap(), None);
    let mass = Tile::total_value((0..9).map(|field| tile.total(field).unwrap()).sum());
    assert!(mass.abs() < 1e-3, "{mass}: no mass leaves the solid cells");
}
