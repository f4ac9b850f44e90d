//! Job files: parsing, packing, identity, warnings, and sampling across tiles.
use std::path::PathBuf;

use kernels::threads::Threads;
use kernels_grids::rule::Rule;
use kernels_grids::tile::Tile;
use kernels_grids::{Grid, Region};

use super::*;

mod bad;
mod expressions;
mod forces;
mod initial;

/// Writes a job file and the files it names to a temporary folder.
pub(super) fn written(text: &str, files: &[(&str, &[u8])]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let path = folder.path().join("job.toml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

fn job(text: &str, files: &[(&str, &[u8])]) -> Simulation {
    let (_folder, path) = written(text, files);
    Simulation::read(&path).unwrap_or_else(|error| panic!("{error}"))
}

fn loaded(simulation: &Simulation, region: Region) -> Tile {
    let mut tile = Tile::new(simulation.grid(), simulation.rule(), region, 1).unwrap();
    simulation.load(&mut tile).unwrap();
    tile
}

/// A PNG with one grey value per pixel, the top row first.
pub(super) fn png(width: u32, height: u32, grey: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().unwrap().write_image_data(grey).unwrap();
    bytes
}

const GLIDER: &[u8] = b"x = 3, y = 3, rule = B3/S23\nbob$2bo$3o!\n";

const LIFE: &str = r#"
    name = "A glider"
    steps = 100
    checkpoint_every = 50
    standby = "hot"
    depth = 4
    check_every = 10
    [grid]
    size = [128, 40]
    [rule]
    name = "life"
    [initial]
    pattern = [{ file = "glider.rle", at = [5, 7] }, { text = "x = 2, y = 2\n2o$2o!", at = [127, 39] }]
    [[output]]
    kind = "gif"
    every = 2
"#;

#[test]
fn a_job_is_parsed_and_survives_packing() {
    let simulation = job(LIFE, &[("glider.rle", GLIDER)]);
    assert_eq!(simulation.name(), "A glider");
    assert_eq!((simulation.steps(), simulation.checkpoint_every(), simulation.check_every()), (100, Some(50), 10));
    assert_eq!((simulation.standby(), simulation.depth()), (StandbyTier::Hot, Some(4)));
    assert_eq!(simulation.warnings(), [""; 0]);
    let output = &simulation.outputs()[0];
    assert_eq!((output.kind, output.quantity.as_str(), output.every), (OutputKind::Gif, "alive", 2));
    assert_eq!(output.folder, "alive-gif");
    // As on another node, without the folder.
    let bytes = simulation.to_bytes();
    let there = Simulation::from_bytes(&bytes).unwrap();
    assert_eq!(there.to_bytes(), bytes);
    assert_eq!((there.identity(), there.outputs()), (simulation.identity(), simulation.outputs()));
    let tile = loaded(&there, there.grid().region());
    let alive = |tile: &Tile| tile.read(0, tile.region()).unwrap().iter().sum::<f32>();
    assert_eq!(alive(&tile), 9.0, "a glider, and a block across both faces");
    let cell = |x, y| tile.read(0, Region { start: [x, y, 0], end: [x + 1, y + 1, 1] }).unwrap()[0];
    assert_eq!(
        [cell(6, 7), cell(5, 7), cell(5, 9), cell(0, 0), cell(127, 0), cell(1, 1)],
        [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    );
}

#[test]
fn a_pattern_made_for_another_rule_gives_a_warning() {
    let warnings = |rule: &str| {
        job(&LIFE.replace("[initial]", &format!("{rule}\n[initial]")), &[("glider.rle", GLIDER)]).warnings()
    };
    assert_eq!(warnings("notation = \"23/3\""), [""; 0], "the same rule in another notation");
    let found = warnings("notation = \"b36s23\"");
    assert!(
        found.len() == 1 && found[0].contains("glider.rle is a pattern of B3/S23 and the job's rule is B36/S23"),
        "{found:?}"
    );
}

#[test]
fn large_grids_are_checked_more_often() {
    let every = |size: &str| {
        job(&format!("name = \"a\"\nsteps = 1\n[grid]\nsize = {size}\n[rule]\nname = \"heat\"\nrate = 0.1"), &[])
    };
    assert_eq!(["[8, 8]", "[400, 400]", "[4096, 4096]"].map(|size| every(size).check_every()), [1000, 419, 300]);
}

#[test]
fn an_output_interval_longer_than_the_run_gives_a_warning() {
    let warnings = |every: &str| job(&LIFE.replace("every = 2\n", every), &[("glider.rle", GLIDER)]).warnings();
    assert_eq!(warnings("every = 100\n"), [""; 0]);
    let found = warnings("every = 101\n");
    assert!(found.len() == 1 && found[0].contains("every 101 steps and the job has 100"), "{found:?}");
}

#[test]
fn identity_covers_the_rule_and_the_initial_state_but_not_the_run() {
    let fluid = |rule: &str, rest: &str| {
        let text = format!(
            "name = \"a\"\nsteps = 10\nseed = 3\n{rest}\n[grid]\nsize = [64, 32]\n[boundary]\ny = \"wall\"\n[rule]\n\
             name = \"d2q9\"\n{rule}"
        );
        job(&text, &[("m.png", &png(64, 32, &[255; 64 * 32])), ("n.png", &png(64, 32, &[0; 64 * 32]))]).identity()
    };
    let usual = fluid("viscosity = 0.1", "");
    assert_eq!(usual, fluid("tau = \"0.5 + 3*0.1\"", "check_every = 5"), "the same rule in other parameters");
    assert_eq!(usual, fluid("viscosity = 0.1\nstorage = \"f32\"", ""));
    assert_eq!(usual, fluid("viscosity = 0.1\n[[output]]\nkind = \"vtk\"\nevery = 1", ""));
    assert_eq!(
        fluid("viscosity = 0.1\n[initial]\ndensity = 1.1", ""),
        fluid("viscosity = 0.1\n[initial] # so\ndensity =   1.1", "")
    );
    let others = [
        fluid("viscosity = 0.2", ""),
        fluid("viscosity = 0.1\ncollision = \"bgk\"", ""),
        fluid("viscosity = 0.1\nforce = [1e-6, 0]", ""),
        fluid("viscosity = 0.1\nsolid = \"x < 3\"", ""),
        fluid("viscosity = 0.1\nsolid = \"x < 4\"", ""),
        fluid("viscosity = 0.1\nsolid = \"noise(1) < 0.1\"", ""),
        fluid("viscosity = 0.1\nsolid = { image = \"m.png\" }", ""),
        fluid("viscosity = 0.1\nsolid = { image = \"n.png\" }", ""),
        fluid("omega = \"1 + 0.001*x\"", ""),
        fluid("viscosity = 0.1\nstorage = \"f16\"", ""),
        fluid("viscosity = 0.1\n[initial]\ndensity = 1.1", ""),
        fluid("viscosity = 0.1\n[initial]\ndensity = \"1 + 0.1*noise(1)\"", ""),
        fluid("viscosity = 0.1\n[initial]\ndensity = \"1 + a*noise(1)\"", "constants = { a = 0.1 }"),
        fluid("viscosity = 0.1\n[initial]\ndensity = \"1 + a*noise(1)\"", "constants = { a = 0.2 }"),
    ];
    for (at, other) in others.iter().enumerate() {
        assert_ne!(usual, *other, "{at}");
        assert!(!others[..at].contains(other), "{at}");
    }
}

const VORTICES: &str = r#"
    name = "Vortices"
    steps = 10
    [constants]
    u0 = 0.02
    k = "2*pi/n"
    n = "nx"
    [grid]
    size = [64, 64]
    [rule]
    name = "d2q9"
    tau = 0.8
    [initial]
    density = "1 - 0.75*u0^2*(cos(2*k*x) + cos(2*k*y))"
    velocity = ["-u0*cos(k*x)*sin(k*y)", "u0*sin(k*x)*cos(k*y)"]
"#;

#[test]
fn the_initial_flow_includes_its_viscous_stress() {
    let simulation = job(VORTICES, &[]);
    let tile = loaded(&simulation, simulation.grid().region());
    let Rule::D2q9(fluid) = simulation.rule() else { panic!("{simulation:?}") };
    let (k, u0) = (std::f64::consts::TAU / 64.0, 0.02);
    for at in [[0, 0, 0], [13, 50, 0], [63, 31, 0]] {
        let [x, y] = [at[0] as f64 + 0.5, at[1] as f64 + 0.5];
        let (cx, sx, cy, sy) = ((k * x).cos(), (k * x).sin(), (k * y).cos(), (k * y).sin());
        let density = 1.0 - 0.75 * u0 * u0 * ((2.0 * k * x).cos() + (2.0 * k * y).cos());
        let gradient = [[u0 * k * sx * sy, u0 * k * cx * cy], [-u0 * k * cx * cy, -u0 * k * sx * sy]];
        let expected = fluid.cell(density, [-u0 * cx * sy, u0 * sx * cy], gradient);
        for (field, expected) in expected.into_iter().enumerate() {
            let region = Region { start: at, end: at.map(|at| at + 1) };
            let found = tile.read(field, region).unwrap()[0];
            assert!((found - expected).abs() < 1e-8, "field {field} at {at:?}: {found}, {expected} expected");
        }
    }
}

/// A quantity of the whole grid, assembled from the samples of `tiles`.
fn framed(simulation: &Simulation, tiles: &[Tile], quantity: &str, stride: usize) -> Field {
    let mut mosaic = Mosaic::new(simulation, quantity, (simulation.grid().region(), stride)).unwrap();
    for need in simulation.source_quantities(quantity) {
        for tile in tiles {
            let values = simulation.sample(tile, need, tile.region(), stride).unwrap();
            mosaic.add(need, tile.region(), &values).unwrap();
        }
    }
    assert!(mosaic.is_whole());
    mosaic.finish()
}

#[test]
fn frames_do_not_depend_on_the_partition() {
    let life = r#"
        name = "Soup"
        steps = 10
        seed = 7
        [grid]
        size = [200, 50]
        [rule]
        name = "life"
        notation = "B36/S23"
        [initial]
        noise = 0.4
    "#;
    let closed = VORTICES.replace("[rule]", "[boundary]\ny = \"wall\"\n[rule]\nsolid = \"(x-30)^2+(y-30)^2 < 30\"");
    for text in [life, VORTICES, &closed] {
        let simulation = job(text, &[]);
        let whole = simulation.grid().region();
        let [nx, ny, _] = simulation.grid().size();
        let one = [loaded(&simulation, whole)];
        let rows = [0, 7, 23, ny];
        let row = |y: usize| Region { start: [0, rows[y], 0], end: [nx, rows[y + 1], 1] };
        let mut many: Vec<Tile> = (0..3).map(|y| loaded(&simulation, row(y))).collect();
        if nx > 64 {
            let last = many.pop().unwrap().region();
            let (left, right) = (Region { end: [128, ny, 1], ..last }, Region { start: [128, 23, 0], ..last });
            many.extend([left, right].map(|region| loaded(&simulation, region)));
        }
        let mut seen = 0;
        for quantity in simulation.quantities() {
            for stride in [1, 2, 3, 7, 64] {
                let (expected, found) =
                    (framed(&simulation, &one, quantity, stride), framed(&simulation, &many, quantity, stride));
                assert_eq!(expected, found, "{quantity} by {stride}");
                assert_eq!(expected.size, [nx.div_ceil(stride), ny.div_ceil(stride), 1]);
                seen += usize::from(expected.values.iter().any(|value| *value != 0.0));
            }
        }
        assert!(seen >= 5, "some samples are not 0");
    }
}

#[test]
fn life_shares_and_vorticity_match_exact_values() {
    let text =
        "name = \"a\"\nsteps = 1\n[grid]\nsize = [64, 10]\n[rule]\nname = \"life\"\n[initial]\nalive = \"x < 3\"";
    let simulation = job(text, &[]);
    let share = framed(&simulation, &[loaded(&simulation, simulation.grid().region())], "alive", 4);
    assert_eq!(share.values[..2], [0.75, 0.0]);
    assert_eq!(share.values[32], 0.75, "a share of the cells that the truncated last block has");

    // Solid-body rotation about the centre: the vorticity is twice the angular rate everywhere, also at the walls.
    let text = VORTICES
        .replace("[rule]", "[boundary]\nx = \"wall\"\ny = \"wall\"\n[rule]")
        .replace("-u0*cos(k*x)*sin(k*y)", "-1e-3*(y-32)")
        .replace("u0*sin(k*x)*cos(k*y)", "1e-3*(x-32)");
    let simulation = job(&text, &[]);
    for stride in [1, 2] {
        let field = framed(&simulation, &[loaded(&simulation, simulation.grid().region())], "vorticity", stride);
        assert!(field.values.iter().all(|value| (value - 2e-3).abs() < 2e-6), "{:?}", &field.values[..8]);
    }
}

#[test]
fn vorticity_ignores_the_velocity_in_outlet_cells() {
    let text = "name = \"t\"\nsteps = 1\n[grid]\nsize = [64, 16]\n[rule]\nname = \"d2q9\"\ntau = 0.8\n\
                [boundary]\nx_low = { inlet = [0.02, 0] }\nx_high = { outlet = 1.0 }\n";
    let simulation = job(text, &[]);
    let whole = simulation.grid().region();
    let mut mosaic = Mosaic::new(&simulation, "vorticity", (whole, 1)).unwrap();
    // v rises by 0.001 per cell, except in the outlet cells.
    let v: Vec<f32> = (0..64 * 16).map(|at| if at % 64 == 63 { 5.0 } else { 0.001 * (at % 64) as f32 }).collect();
    mosaic.add("ux", whole, &vec![0.0; 64 * 16]).unwrap();
    mosaic.add("uy", whole, &v).unwrap();
    let field = mosaic.finish();
    assert!(field.values.iter().all(|value| (value - 0.001).abs() < 1e-6), "{:?}", &field.values[60..64]);
}

#[test]
fn masks_and_images_have_the_orientation_of_frames() {
    // Dark in the upper left corner.
    let mut grey = vec![255; 64 * 16];
    (grey[0], grey[1], grey[64]) = (0, 100, 200);
    let picture = png(64, 16, &grey);
    let fluid = "name = \"a\"\nsteps = 1\n[grid]\nsize = [64, 16]\n[rule]\nname = \"d2q9\"\ntau = 1\n\
                 solid = { image = \"m.png\", threshold = 0.5 }";
    let simulation = job(fluid, &[("m.png", &picture)]);
    let solid = |at: [usize; 2]| simulation.is_solid([at[0], at[1], 0]);
    assert_eq!([solid([0, 15]), solid([1, 15]), solid([0, 14]), solid([0, 0])], [true, true, false, false]);
    assert!(Simulation::from_bytes(&simulation.to_bytes()).unwrap().is_solid([1, 15, 0]));

    let life = "name = \"a\"\nsteps = 1\n[grid]\nsize = [64, 16]\n[rule]\nname = \"life\"\n[initial]\n\
                alive = { image = \"m.png\" }";
    let tile = loaded(&job(life, &[("m.png", &picture)]), Region { start: [0; 3], end: [64, 16, 1] });
    assert_eq!(tile.read(0, Region { start: [0; 3], end: [3, 1, 1] }).unwrap(), [1.0, 1.0, 0.0]);

    let heat = "name = \"a\"\nsteps = 1\n[grid]\nsize = [64, 16]\n[rule]\nname = \"heat\"\nrate = 0.2\n[initial]\n\
                temperature = { image = \"m.png\", black = 51, white = 306 }";
    let tile = loaded(&job(heat, &[("m.png", &picture)]), Region { start: [0; 3], end: [64, 16, 1] });
    let top = tile.read(0, Region { start: [0, 15, 0], end: [3, 16, 1] }).unwrap();
    assert_eq!(top, [51.0, 151.0, 306.0]);
}

#[test]
fn all_png_colour_types_are_read() {
    let kinds = [
        (png::ColorType::Rgb, png::BitDepth::Eight, vec![0, 0, 0, 255, 255, 255]),
        (png::ColorType::Rgba, png::BitDepth::Eight, vec![0, 0, 0, 255, 0, 0, 0, 0]),
        (png::ColorType::Grayscale, png::BitDepth::Sixteen, vec![0x10, 0, 0xf0, 0]),
        (png::ColorType::GrayscaleAlpha, png::BitDepth::Sixteen, vec![0, 0, 255, 255, 0, 0, 0, 0]),
        (png::ColorType::Grayscale, png::BitDepth::One, vec![0b0100_0000]),
    ];
    for (colour, depth, row) in kinds {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, 2, 1);
        encoder.set_color(colour);
        encoder.set_depth(depth);
        encoder.write_header().unwrap().write_image_data(&row).unwrap();
        let grid = Grid::periodic(&[2, 1]).unwrap();
        let mask = |bright| image::Mask::read(&bytes, &grid, true, 0.5, bright).unwrap();
        assert!(mask(false).at([0, 0, 0]) && !mask(false).at([1, 0, 0]), "{colour:?} {depth:?}");
        assert!(!mask(true).at([0, 0, 0]) && mask(true).at([1, 0, 0]));
    }
}

#[test]
fn every_built_in_rule_runs_from_a_job_file() {
    for (rule, boundary, initial, quantity) in [
        ("name = \"heat\"\nrate = 0.1", "x_low = { fixed = 1 }\nx_high = \"wall\"", "temperature = 0.5", "temperature"),
        ("name = \"wave\"\nspeed = 0.5", "", "height = \"exp(-((x-32)^2 + (y-8)^2)/20)\"", "height"),
        (
            "name = \"gray-scott\"\ndu = 0.16\ndv = 0.08\nfeed = 0.035\nkill = 0.065",
            "",
            "u = \"1 - 0.5*(noise(1) < 0.1)\"\nv = \"0.25*(noise(1) < 0.1)\"",
            "v",
        ),
        (
            "name = \"d2q9\"\ntau = 0.6\ncollision = \"trt\"\nmagic = 0.25\nforce = [1e-6, 0]",
            "x_low = { inlet = [0.1, 0], profile = \"parabola\" }\nx_high = { outlet = 1 }\ny = \"wall\"\n\
             y_high = { moving = [0.05, 0] }",
            "velocity = [0.1, \"1e-3*sin(2*pi*x/nx)\"]",
            "vorticity",
        ),
    ] {
        let text = format!(
            "name = \"a\"\nsteps = 5\n[grid]\nsize = [64, 16]\n[boundary]\n{boundary}\n[rule]\n{rule}\n[initial]\n\
             {initial}\n[[output]]\nkind = \"png\"\nevery = 1\nquantity = \"{quantity}\""
        );
        let simulation = job(&text, &[]);
        assert_eq!(simulation.warnings(), [""; 0]);
        let mut tile = loaded(&simulation, simulation.grid().region());
        let before = framed(&simulation, std::slice::from_ref(&tile), quantity, 1);
        tile.advance(&mut Threads::new(1).unwrap(), 5).unwrap();
        assert_eq!(tile.first_not_finite().unwrap(), None);
        assert!(before != framed(&simulation, &[tile], quantity, 1), "{rule}");
    }
}

#[test]
fn warnings_name_unstable_settings() {
    let text = VORTICES.replace("u0 = 0.02", "u0 = 0.3").replace("tau = 0.8", "tau = 0.501");
    let warnings = job(&text, &[]).warnings();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    let forced = VORTICES.replace("tau = 0.8", "tau = 0.8\nforce = [1e-5, 0]\nstorage = \"f16\"");
    assert!(job(&forced, &[]).warnings()[0].contains("16-bit storage"));
    assert!(warnings[0].contains("tau = 0.501") && warnings[1].contains("0.29"), "{warnings:?}");
}

#[test]
fn fluids_in_three_dimensions() {
    let text = "name = \"a\"\nsteps = 5\n[grid]\nsize = [64, 12, 10]\n[boundary]\nz_low = \"wall\"\n\
                z_high = { moving = [0.05, 0.01, 0] }\n[rule]\nname = \"d3q19\"\nviscosity = 0.1\nforce = [0, 1e-6, 0]\n\
                solid = \"(x-20)^2 + (y-6)^2 + (z-5)^2 < 9\"\n[initial]\nvelocity = [\"0.05*z/nz\", 0, \"1e-3*sin(2*pi*x/nx)\"]\n\
                [[output]]\nkind = \"png\"\nquantity = \"vorticity\"\nevery = 1\nlayer = 3";
    let simulation = job(text, &[]);
    assert_eq!(simulation.quantities(), ["density", "ux", "uy", "uz", "speed", "vorticity"]);
    assert!(simulation.is_solid([20, 6, 5]) && !simulation.is_solid([30, 6, 5]));
    let whole = simulation.grid().region();
    let tiles = [Region { end: [64, 12, 4], ..whole }, Region { start: [0, 0, 4], ..whole }]
        .map(|region| loaded(&simulation, region));
    let mut one = [loaded(&simulation, whole)];
    for quantity in simulation.quantities() {
        assert_eq!(framed(&simulation, &one, quantity, 2), framed(&simulation, &tiles, quantity, 2), "{quantity}");
    }
    let uz = framed(&simulation, &one, "uz", 1).values[15];
    let expected = 1e-3 * (std::f64::consts::TAU * 15.5 / 64.0).sin();
    assert!((f64::from(uz) - expected).abs() < 1e-7, "{uz}");
    assert_eq!(framed(&simulation, &one, "uy", 1).values[(5 * 12 + 6) * 64 + 20], 0.0, "solid");
    assert_eq!(simulation.output_view(&simulation.outputs()[0]), (Region { start: [0, 0, 3], end: [64, 12, 4] }, 1));
    one[0].advance(&mut Threads::new(1).unwrap(), 5).unwrap();
    assert_eq!(one[0].first_not_finite().unwrap(), None);
}

#[test]
fn a_rule_file_works_like_a_built_in_rule() {
    const RULE: &str = "fields a b\nparam rate = 0.1\nparam gain = 2\na' = a + rate * lap(a)\nb' = gain * b[1, 0]\n";
    let text = "name = \"a\"\nsteps = 5\n[grid]\nsize = [64, 16]\n[rule]\nfile = \"r.rule\"\nparameters = { gain = 0.5 }\n\
                [initial]\nb = \"x == 10.5\"\n[[output]]\nkind = \"png\"\nevery = 1\nquantity = \"b\"";
    let simulation = job(text, &[("r.rule", RULE.as_bytes())]);
    assert_eq!(simulation.quantities(), ["a", "b"]);
    let again = Simulation::from_bytes(&simulation.to_bytes()).unwrap();
    assert_eq!(again.identity(), simulation.identity());
    let mut tile = loaded(&again, again.grid().region());
    tile.advance(&mut Threads::new(1).unwrap(), 2).unwrap();
    let field = framed(&again, &[tile], "b", 1);
    assert_eq!(field.values[7..10], [0.0, 0.25, 0.0]);

    let spaced = RULE.replace("lap(a)", "lap( a )  # spread");
    assert_eq!(job(text, &[("r.rule", spaced.as_bytes())]).identity(), simulation.identity());
    let (stronger, other) = (text.replace("0.5", "0.6"), RULE.replace("b[1, 0]", "b[-1, 0]"));
    assert_ne!(job(&stronger, &[("r.rule", RULE.as_bytes())]).identity(), simulation.identity());
    assert_ne!(job(text, &[("r.rule", other.as_bytes())]).identity(), simulation.identity());
}
