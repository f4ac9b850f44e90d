//! Invalid job files and packed jobs: each error names its place, and nothing panics.
use std::path::Path;

use super::*;
use crate::initial::Initial;

/// The error for an invalid job file.
fn error(text: &str, files: &[(&str, &[u8])]) -> String {
    let (_folder, path) = written(text, files);
    Simulation::read(&path).map(|_| ()).expect_err(text).to_string()
}

const PLAIN: &str = "name = \"a\"\nsteps = 10\n[grid]\nsize = [64, 16]\n[rule]\nname = \"d2q9\"\ntau = 1\n";

#[test]
fn each_error_names_line_column_and_key() {
    let with = |from: &str, to: &str| PLAIN.replace(from, to);
    let also = |text: &str| format!("{PLAIN}{text}");
    let cases = [
        (with("steps = 10", "steps = "), "line 2, column 9", "not TOML"),
        (with("steps = 10\n", ""), "line 1, column 1", "expected `steps`"),
        (with("steps = 10", "step = 10"), "line 2, column 1 (step)", "did you mean `steps`?): expected `steps`"),
        (with("[grid]", "[gird]"), "line 3, column 2 (gird)", "did you mean `grid`?"),
        (with("tau = 1", "viscosty = 0.1"), "line 7, column 1 (rule.viscosty)", "did you mean `viscosity`?"),
        (also("[intial]\ndensity = 1"), "line 8, column 2 (intial)", "did you mean `initial`?): expected one of"),
        (also("[boundary]\nx = { outlte = 1 }"), "line 9, column 7 (boundary.x.outlte)", "did you mean `outlet`?"),
        (with("steps = 10", "steps = -1"), "(steps)", "a whole number from 1"),
        (with("steps = 10", "steps = 1.5"), "line 2, column 9 (steps)", "found the number 1.5"),
        (with("steps = 10", "steps = 10\nstpes = 5"), "line 3, column 1 (stpes)", "expected one of boundary"),
        (with("\"a\"", "\"\""), "(name)", "1 to 64 characters"),
        (with("\"a\"", "\"\\u0007\""), "(name)", "control"),
        (with("[64, 16]", "[64]"), "line 4, column 8 (grid.size)", "found a list of length 1"),
        (with("[64, 16]", "[64, 0]"), "line 4, column 13 (grid.size[1])", "from 1 to 16777216"),
        (with("[64, 16]", "[64, \"b\"]"), "(grid.size[1])", "found the text \"b\""),
        (with("[64, 16]", "[16777216, 16777216, 16777216]"), "(grid.size)", "cells in total"),
        (with("[64, 16]", "[64, 16, 8]"), "(rule)", "2 dimensions"),
        (with("d2q9", "d2q8"), "line 6, column 8 (rule.name)", "found the text \"d2q8\""),
        (with("tau = 1", ""), "line 5, column 1 (rule)", "expected one of tau"),
        (with("tau = 1", "tau = 0.5"), "(rule)", "above 0.5"),
        (with("tau = 1", "tau = nan"), "(rule.tau)", "found NaN"),
        (with("tau = 1", "viscosity = -0.1"), "(rule)", "above 0.5"),
        (with("tau = 1", "tau = 1\nviscosity = 1"), "(rule)", "expected one of tau"),
        (with("tau = 1", "tau = \"x\""), "line 7, column 7 (rule.tau)", "differs between cells"),
        (with("tau = 1", "tau = \"1 + q\""), "(rule.tau)", "character 5 of the expression: unknown name `q`"),
        (with("tau = 1", "omega = \"3 * x / nx\""), "(rule.omega)", "between 0 and 2"),
        (with("tau = 1", "tau = 1\ncollision = \"mrt\""), "line 8, column 13 (rule.collision)", "\"bgk\" or \"trt\""),
        (with("tau = 1", "tau = 1\ncollision = \"bgk\"\nmagic = 1"), "(rule)", "belongs to"),
        (with("tau = 1", "tau = 1\nstorage = \"f8\""), "line 8, column 11 (rule.storage)", "\"f32\" or \"f16\""),
        (
            with("name = \"d2q9\"\ntau = 1", "name = \"heat\"\nrate = 0.1\nstorage = \"f16\""),
            "(rule.storage)",
            "unknown key",
        ),
        (with("tau = 1", "tau = 1\nmagic = -1"), "(rule)", "must be positive"),
        (with("tau = 1", "tau = 1\nforce = [1]"), "(rule.force)", "a list of 2 numbers"),
        (with("tau = 1", "tau = 1\nsolid = { image = \"gone.png\" }"), "(rule.solid.image)", "gone.png"),
        (with("tau = 1", "tau = 1\nsolid = { image = \"m.png\" }"), "(rule.solid.image)", "expected a PNG"),
        (
            with("tau = 1", "tau = 1\nsolid = { image = \"s.png\" }"),
            "(rule.solid.image)",
            "3 × 2 pixels, the grid 64 × 16",
        ),
        (with("tau = 1", "tau = 1\nsolid = { imgae = \"s.png\" }"), "(rule.solid.imgae)", "expected `image`"),
        (also("[force]"), "line 8, column 1 (force)", "expected solid cells"),
        (also("solid = \"x < 3\"\n[force]\nvelocity = 1"), "(force)", "both `velocity` and `length`"),
        (also("solid = \"x < 3\"\n[force]\nvelocity = 1\nlength = 0"), "(force.length)", "above 0"),
        (also("solid = \"x < 3\"\n[force]\nvelocity = 1\narea = 1"), "(force)", "`length`"),
        (also("solid = \"x < 3\"\n[force]\nof = \"q\""), "(force.of)", "unknown name `q`"),
        (also("solid = \"x < 3\"\n[force]\nwalls = 1"), "(force.walls)", "unknown key"),
        (with("name = \"d2q9\"\ntau = 1\n", "name = \"heat\"\nrate = 0.1\n[force]\n"), "(force)", "only fluids"),
        (also("[boundary]\nx_low = \"wall\""), "(boundary.x_low)", "one face of x is periodic"),
        (also("[boundary]\nx = \"Wall\""), "line 9, column 5 (boundary.x)", "found the text \"Wall\""),
        (also("[boundary]\nw = \"wall\""), "(boundary.w)", "expected one of x, x_high, x_low, y"),
        (also("[boundary]\nz = \"wall\""), "(boundary.z)", "unknown key"),
        (
            also("[boundary]\nx = { fixed = 1 }"),
            "line 9, column 5 (boundary.x)",
            "d2q9 cannot have { fixed = 1 } at x_low: expected \"periodic\", \"wall\"",
        ),
        (
            also("[boundary]\ny = \"wall\"\ny_high = { fixed = [1, 0] }"),
            "line 10, column 10 (boundary.y_high)",
            "{ fixed = [1, 0] } at y_high",
        ),
        (
            also("[boundary]\nx_low = \"wall\"\nx_high = { outlet = 0 }"),
            "line 10, column 10 (boundary.x_high)",
            "d2q9 cannot have { outlet = 0 } at x_high: expected a density above 0",
        ),
        (
            also("[boundary]\ny = { moving = [0.1, 0.1] }"),
            "line 9, column 5 (boundary.y)",
            "{ moving = [0.1, 0.1] } at y_low: expected a wall that moves along itself: the y of its velocity is 0",
        ),
        (
            also("[boundary]\nx = { inlet = [0.5, 0.5], profile = \"parabola\" }"),
            "line 9, column 5 (boundary.x)",
            "{ inlet = [0.5, 0.5], profile = \"parabola\" } at x_low: expected a velocity below the speed of sound",
        ),
        (also("[boundary]\nx = { fixed = 1, outlet = 1 }"), "(boundary.x)", "exactly one kind"),
        (also("[boundary]\nx = { moving = [1, 0, 0] }"), "(boundary.x.moving)", "a list of 2 numbers"),
        (also("[boundary]\ny = { inlet = [0, 0.1], profile = \"round\" }"), "(boundary.y.profile)", "\"parabola\""),
        (also("[initial]\ndensity = \"1 +\""), "(initial.density)", "character 4"),
        (also("[initial]\ndensity = 0"), "line 9, column 11 (initial.density)", "a density above 0 (1 is"),
        (also("[initial]\ndensity = -1"), "(initial.density)", "found -1"),
        (
            also("[initial]\nvelocity = [0.5, 0.5]"),
            "line 9, column 12 (initial.velocity)",
            "sound, 0.577 cells per step, found 0.707",
        ),
        (
            also("[initial]\ndensity = \"log(x - 32.5)\""),
            "(initial.density)",
            "at the cell 0, 0: expected a density above 0",
        ),
        (
            also("[initial]\ndensity = \"select(x > 7 && y > 2 && y < 4, -1, 1)\""),
            "line 9, column 11 (initial.density)",
            "at the cell 7, 2: expected a density above 0 (1 is the fluid at rest), found -1",
        ),
        (
            also("[initial]\nvelocity = [\"select(x > 7 && y > 2 && y < 4, 1, 0)\", 0]"),
            "line 9, column 12 (initial.velocity)",
            "at the cell 7, 2: expected a velocity below the speed of sound",
        ),
        (also("[initial]\nvelocity = [0.1]"), "(initial.velocity)", "a list of 2"),
        (also("[initial]\nu = 1"), "line 9, column 1 (initial.u)", "expected one of density, stress, velocity"),
        (also("[[output]]\nkind = \"gif\""), "(output[0])", "expected `every`"),
        (also("[[output]]\nkind = \"mp4\"\nevery = 1"), "line 9, column 8 (output[0].kind)", "\"png\" or \"gif\""),
        (also("[[output]]\nkind = \"png\"\nevery = 0"), "(output[0].every)", "from 1"),
        (also("[[output]]\nkind = \"gif\"\nevery = 1\nfps = 100"), "(output[0].fps)", "to 50"),
        (also("[[output]]\nkind = \"png\"\nevery = 1\nfps = 20"), "(output[0].fps)", "unknown key"),
        (
            also("[[output]]\nkind = \"png\"\nevery = 1\nquantity = \"u\""),
            "(output[0].quantity)",
            "\"density\" or \"ux\"",
        ),
        (also("[[output]]\nkind = \"png\"\nevery = 1\nfolder = \"../x\""), "(output[0].folder)", "name of a folder"),
        (
            also("[[output]]\nkind = \"png\"\nevery = 1\nfolder = \"Checkpoints\""),
            "line 11, column 10 (output[0].folder)",
            "is reserved for checkpoints",
        ),
        (also("[[output]]\nkind = \"png\"\nevery = 1\nrange = [1, 1]"), "(output[0].range)", "low, high"),
        (also("[[output]]\nkind = \"png\"\nevery = 1\nlayer = 1"), "(output[0].layer)", "unknown key"),
        (also("[[output]]\nkind = \"png\"\nevery = 1\n[[output]]\nkind = \"png\"\nevery = 2"), "(output[1])", "folder"),
        (
            with("steps = 10", "steps = 2147483648") + "[[output]]\nkind = \"gif\"\nevery = 1",
            "(output[0].every)",
            "at most 2000",
        ),
        (with("steps = 10", "steps = 10\nstandby = \"cold\""), "(standby)", "\"warm\" or \"hot\""),
        (with("steps = 10", "steps = 2147483649"), "(steps)", "to 2147483648"),
        (with("steps = 10", "steps = 10\ndepth = 0"), "(depth)", "from 1 to 64"),
        (with("steps = 10", "steps = 10\nconstants = { x = 1 }"), "(constants.x)", "already used"),
        (with("steps = 10", "steps = 10\nconstants = { a = \"b\", b = \"a\" }"), "(constants.a)", "unknown name `b`"),
        (with("steps = 10", "steps = 10\nconstants = { \"a b\" = 1 }"), "(constants.a b)", "letters"),
        (with("steps = 10", "steps = 10\nconstants = { c = \"1/(1-1)\" }"), "(constants.c)", "finite"),
    ];
    let small = png(3, 2, &[0; 6]);
    for (text, place, what) in cases {
        let found = error(&text, &[("m.png", b"GIF89a"), ("s.png", &small)]);
        assert!(found.contains(place) && found.contains(what), "{text}\n{found}\nexpected: {place} … {what}");
        assert!(found.starts_with("job.toml, line "), "{found}");
    }
}

#[test]
fn life_and_field_rules_report_their_own_errors() {
    let life =
        |rest: &str| format!("name = \"a\"\nsteps = 10\n[grid]\nsize = [64, 16]\n[rule]\nname = \"life\"\n{rest}");
    let heat = |rest: &str| life(rest).replace("\"life\"", "\"heat\"\nrate = 0.1");
    let walls = "[boundary]\nx = \"wall\"\ny = \"wall\"\n";
    for (text, place, what) in [
        (life("notation = \"B9/S\""), "(rule.notation)", "a cell has 8"),
        (life("rate = 1"), "(rule.rate)", "expected one of file, name, notation"),
        (life("[boundary]\nx = { outlet = 1 }"), "(boundary.x)", "\"periodic\" or \"wall\" (dead"),
        (life("[initial]\nnoise = 1.5"), "(initial.noise)", "from 0 to 1"),
        (life("[initial]\npattern = { at = [1, 1] }"), "(initial.pattern)", "either `file`"),
        (life("[initial]\npattern = { file = \"bad.rle\" }"), "(initial.pattern.file)", "bad.rle: pattern, line 2"),
        (life("[initial]\npattern = { file = \"gone.rle\" }"), "(initial.pattern.file)", "gone.rle"),
        (life("[initial]\npattern = { text = \"x = 1\" }"), "(initial.pattern.text)", "needs both x and y"),
        (
            life("[initial]\npattern = { file = \"glider.rle\", at = [64, 0] }"),
            "(initial.pattern.at[0])",
            "from 0 to 63",
        ),
        (
            life(&format!("{walls}[initial]\npattern = [{{ file = \"glider.rle\", at = [62, 0] }}]")),
            "(initial.pattern[0])",
            "reaches x = 64, the grid has 64",
        ),
        (
            heat("[initial]\ntemperature = \"1 / (x - 5.5 + (y - 3.5))\""),
            "(initial.temperature)",
            "at the cell 8, 0: expected a finite 32-bit number, found inf",
        ),
        (heat("[initial]\nheat = 1"), "(initial.heat)", "expected one of temperature"),
        (
            heat("[boundary]\nx = { fixed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17] }"),
            "(boundary.x.fixed)",
            "at most 16",
        ),
        (heat("").replace("rate = 0.1", "rate = -1"), "(rule)", "must not be negative"),
        (heat("").replace("rate = 0.1", ""), "(rule)", "expected `rate`"),
        (heat("").replace("rate = 0.1", "rat = 0.1"), "line 7, column 1 (rule.rat)", "did you mean `rate`?"),
        // A valid key that is present is never suggested as a misspelling of another.
        (
            heat("").replace("\"heat\"\nrate = 0.1", "\"gray-scott\"\ndv = 0.1\nfeed = 0\nkill = 0"),
            "line 5, column 1 (rule)",
            "expected `du`",
        ),
    ] {
        let found = error(&text, &[("bad.rle", b"x = 3, y = 3\nbq!"), ("glider.rle", GLIDER)]);
        assert!(found.contains(place) && found.contains(what), "{text}\n{found}\nexpected: {place} … {what}");
    }
}

#[test]
fn large_grids_are_checked_by_sampling_rows() {
    for size in ["[16777216, 16]", "[16777216, 65536]", "[4096, 4096]", "[64, 16777216]"] {
        let found = error(&(PLAIN.replace("[64, 16]", size) + "[initial]\ndensity = \"1 - x\""), &[]);
        assert!(found.contains("at the cell 1, 0: expected a density above 0"), "{found}");
    }
}

#[test]
fn unreadable_and_oversized_files_are_rejected() {
    let error = |path: &Path| Simulation::read(path).map(|_| ()).unwrap_err().to_string();
    let (folder, path) = written(PLAIN, &[]);
    assert!(error(&folder.path().join("none.toml")).contains("none.toml"));
    assert!(error(folder.path()).contains("found a folder"));
    std::fs::write(&path, [0xff, 0xfe, 0]).unwrap();
    assert!(error(&path).contains("not UTF-8 text"));
    std::fs::write(&path, vec![b'#'; SIMULATION_MAX + 1]).unwrap();
    assert!(error(&path).contains("at most 67108864"));
    std::fs::write(&path, PLAIN.to_owned() + &"#".repeat(JOB_TEXT_MAX - PLAIN.len() + 1)).unwrap();
    assert!(error(&path).contains("a job file of at most 2097152 bytes"), "{}", error(&path));
    let rest = "[initial]\npattern = { file = \"big.rle\" }\n";
    let life = PLAIN.replace("d2q9", "life").replace("tau = 1", "") + rest;
    let (_folder, path) = written(&life, &[("big.rle", &vec![b'#'; SIMULATION_MAX])]);
    assert!(error(&path).contains("with big.rle the job exceeds"), "{}", error(&path));
}

#[test]
fn a_short_pattern_of_long_runs_takes_little_memory() {
    // Each line is a row of 4096 live cells: at 16 bytes per cell the pattern would take 256 MiB.
    let rows = "4096o$".repeat(4096);
    let life = "name = \"t\"\nsteps = 1\n[grid]\nsize = [4096, 4096]\n[rule]\nname = \"life\"\n[initial]\npattern = { file = \"p.rle\" }\n";
    let (_folder, path) = written(life, &[("p.rle", format!("x = 4096, y = 4096\n{rows}!").as_bytes())]);
    let simulation = Simulation::read(&path).unwrap();
    let Initial::Life(living) = &simulation.initial else { panic!("a pattern") };
    assert_eq!(living.runs(), 4096);
    let corner = Region { start: [4032, 4095, 0], end: [4096, 4096, 1] };
    assert_eq!(simulation.initial(corner, 1), [0xff; 8]);
    // A run that wraps around a periodic axis becomes two, and covers a row at most once.
    let around = life.replace("[4096, 4096]", "[64, 64]").replace("p.rle\" }", "p.rle\", at = [60, 63] }");
    let (_folder, path) = written(&around, &[("p.rle", b"8o$16777215o!")]);
    let simulation = Simulation::read(&path).unwrap();
    let bits = simulation.initial(simulation.grid().region(), 1);
    assert_eq!(bits[63 * 8..], [0x0f, 0, 0, 0, 0, 0, 0, 0xf0]);
    assert_eq!(bits[..8], [0xff; 8]);
    assert!(bits[8..63 * 8].iter().all(|byte| *byte == 0));
}

#[test]
fn deeply_nested_toml_is_rejected_without_a_stack_overflow() {
    for (open, close) in [("[", "]"), ("{a=", "}")] {
        let deep = format!("a = {}{}", open.repeat(100_000), close.repeat(100_000));
        let found = error(&deep, &[]);
        assert!(found.starts_with("job.toml, line 1"), "{found}");
    }
    let found = error(&format!("{}=1", "a.".repeat(50_000) + "a"), &[]);
    assert!(found.starts_with("job.toml, line 1"), "{found}");
}

#[test]
fn invalid_packed_jobs_are_rejected_without_a_panic() {
    let simulation = job(LIFE, &[("glider.rle", GLIDER)]);
    let bytes = simulation.to_bytes();
    for len in 0..bytes.len() {
        assert!(Simulation::from_bytes(&bytes[..len]).is_err(), "cut after {len}");
    }
    assert!(Simulation::from_bytes(&[&bytes[..], b"\0"].concat()).is_err());
    for at in 0..bytes.len() {
        for flip in [0x01, 0x20, 0x80, 0xff] {
            let mut other = bytes.clone();
            other[at] ^= flip;
            // Either another valid job or an error, but no panic.
            let _ = Simulation::from_bytes(&other);
        }
    }
    let mut newer = bytes.clone();
    newer[7] += 1;
    let found = Simulation::from_bytes(&newer).map(|_| ()).unwrap_err().to_string();
    assert!(found.contains("another format version"), "{found}");
    let gone = LIFE.replace("glider.rle", "elsewhere.rle");
    let text = String::from_utf8_lossy(&bytes).into_owned().replace(LIFE, &gone);
    let mut other = text.into_bytes();
    let len = u32::from_le_bytes(other[8 + 4 + 8..][..4].try_into().unwrap()) + 3;
    other[8 + 4 + 8..][..4].copy_from_slice(&len.to_le_bytes());
    let found = Simulation::from_bytes(&other).map(|_| ()).unwrap_err().to_string();
    assert!(found.contains("elsewhere.rle is missing from the packed job"), "{found}");
}

#[test]
fn rule_file_errors_are_located_in_the_job_file_and_the_rule_file() {
    let job = "name = \"a\"\nsteps = 10\n[grid]\nsize = [64, 16]\n[rule]\nfile = \"r.rule\"\n";
    let rule = "fields u\nparam k = 1\nu' = k * u\n";
    for (rest, rule, place, what) in [
        ("", "fields u\nu' = v\n", "line 6, column 8 (rule.file)", "r.rule, line 2, column 6: unknown name `v`"),
        ("", "fields u\nu' = u / 0\n", "(rule.file)", "division by zero"),
        ("", "fields u\nu' = u[9, 0]\n", "(rule.file)", "at most 8"),
        (
            "parameters = { k = 0 }",
            "fields u\nparam k = 1\nu' = u / k\n",
            "line 6, column 8 (rule.file)",
            "r.rule, line 3, column 8: division by zero with k = 0",
        ),
        ("", "dimensions 3\nfields u\nu' = u\n", "(rule)", "dimensions"),
        ("parameters = { q = 1 }", rule, "(rule.parameters.q)", "unknown parameter `q`: expected one of k"),
        ("name = \"heat\"", rule, "(rule.name)", "expected one of file, parameters"),
        ("[boundary]\nx = { outlet = 1 }", rule, "(boundary.x)", "rule file cannot have { outlet = 1 } at x_low"),
        ("[initial]\nv = 1", rule, "(initial.v)", "expected one of u"),
    ] {
        let found = error(&format!("{job}{rest}"), &[("r.rule", rule.as_bytes())]);
        assert!(found.contains(place) && found.contains(what), "{found}\nexpected: {place} … {what}");
    }
    // No partition could fit it, so it must be rejected before planning.
    let far = "fields u\nu' = u[8, 0] + u[0, -8]\n";
    let found = error(&job.replace("[64, 16]", "[64, 7]"), &[("r.rule", far.as_bytes())]);
    assert!(
        found.contains("(rule)") && found.contains("reads up to 8 cells away, but y is periodic and has 7"),
        "{found}"
    );
    self::job(&job.replace("[64, 16]", "[8, 8]"), &[("r.rule", far.as_bytes())]);
    self::job(
        &format!("{}[boundary]\ny = \"wall\"\n", job.replace("[64, 16]", "[64, 7]")),
        &[("r.rule", far.as_bytes())],
    );
    let long = format!("fields {0}\n{0}' = {0}\n", "u".repeat(65));
    assert!(error(job, &[("r.rule", long.as_bytes())]).contains("more than 64 letters"));
    assert!(error(job, &[]).contains("r.rule"));
    assert!(error(job, &[("r.rule", &[0xff])]).contains("not UTF-8 text"));
}
