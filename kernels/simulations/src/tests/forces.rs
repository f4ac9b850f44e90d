//! Drag and lift as a job reports them: momentum balance, and independence of the partition.
use kernels::cpu::Isa;
use kernels_grids::testing::Mesh;

use super::*;

/// A channel between solid rows, driven by a body force.
const CHANNEL: &str = r#"
    name = "Channel"
    steps = 30000
    [grid]
    size = [128, 26]
    [rule]
    name = "d2q9"
    tau = 1.2
    force = [1e-5, 0]
    solid = "y < 2 || y > 24"
    [force]
    velocity = 0.1
    length = 5
"#;

/// The force summed over all tiles after some steps.
fn force_after(simulation: &Simulation, regions: &[Region], steps: usize) -> Force {
    let mut mesh = Mesh::new(simulation.grid(), simulation.rule(), regions, (2, 1, Isa::detect()));
    mesh.tiles.iter_mut().for_each(|tile| simulation.load(tile).unwrap());
    mesh.advance(steps);
    let mut threads = Threads::new(2).unwrap();
    let parts = mesh.tiles.iter().map(|tile| simulation.check_fields(tile, &mut threads).unwrap().totals);
    let totals = parts.reduce(|all, part| all.iter().zip(part).map(|(a, b)| a + b).collect()).unwrap();
    assert_eq!(totals.len(), simulation.rule().fields() + simulation.grid().dimensions());
    simulation.force_of(&totals).unwrap()
}

#[test]
fn channel_walls_balance_the_body_force() {
    for storage in ["f32", "f16"] {
        let text = CHANNEL.replace("tau = 1.2", &format!("tau = 1.2\nstorage = {storage:?}"));
        let simulation = job(&text, &[]);
        let (whole, cuts) = (simulation.grid().region(), [[0, 64, 128], [0, 12, 26]]);
        let quarter = |x: usize, y: usize| Region {
            start: [cuts[0][x], cuts[1][y], 0],
            end: [cuts[0][x + 1], cuts[1][y + 1], 1],
        };
        let four = [quarter(0, 0), quarter(1, 0), quarter(0, 1), quarter(1, 1)];
        assert_eq!(force_after(&simulation, &[whole], 100), force_after(&simulation, &four, 100));
        if storage == "f16" {
            continue;
        }
        let Force { force, coefficients } = force_after(&simulation, &[whole], 30_000);
        let given = 1e-5 * (128 * 22) as f64;
        assert!((force[0] / given - 1.0).abs() < 1e-5 && force[1].abs() < 1e-7 * given, "{force:?}, {given} given");
        let unit = 0.5 * 0.1 * 0.1 * 5.0;
        assert_eq!(coefficients, Some(vec![force[0] / unit, force[1] / unit]));
    }
}

#[test]
fn the_force_can_cover_a_part_of_the_solid_cells() {
    let with = |rest: &str| CHANNEL.split("velocity").next().map(|text| format!("{text}{rest}")).unwrap();
    let simulation =
        |rest: &str| job(&with(rest), &[("m.png", &png(128, 26, &[[0; 128 * 13], [255; 128 * 13]].concat()))]);
    let whole = Region { start: [0; 3], end: [128, 26, 1] };
    let [all, low, high, drawn] =
        ["", "of = \"y < ny/2\"", "of = \"y > ny/2\"", "of = { image = \"m.png\" }"].map(|rest| {
            let simulation = simulation(rest);
            assert!(simulation.force().is_some());
            force_after(&simulation, &[whole], 50)
        });
    assert_eq!(all.coefficients, None);
    assert!(low.force[0] > 0.0 && high.force[0] > 0.0, "{low:?} {high:?}");
    assert_eq!([low.force[0] + high.force[0], low.force[1] + high.force[1]], all.force[..]);
    assert_eq!(drawn, high);
    // Reporting does not change the checkpoint identity.
    assert_eq!(simulation("").identity(), simulation("of = 1").identity());
    assert_eq!(job(&with("").replace("[force]", ""), &[]).identity(), simulation("").identity());
    let silent = job(&with("").replace("[force]", ""), &[]);
    let totals = silent.check_fields(&loaded(&silent, whole), &mut Threads::new(1).unwrap()).unwrap().totals;
    assert_eq!((totals.len(), silent.force_of(&totals)), (9, None));
}
