//! Rules that work, rules that are refused and where, and noise.
use super::*;

const GRAY_SCOTT: &str = "\
# Gray-Scott: two substances that react and spread
fields u v
param du = 0.16
param dv = 0.08
param feed = 0.035
param kill = 0.065
let reaction = u * v * v
u' = u + du * lap(u) - reaction + feed * (1 - u)
v' = v + dv * lap(v) + reaction - (feed + kill) * v
";

/// One step of a torus of `width` × `height`, each field with a ring of `radius`.
fn step(program: &Program, fields: &[Vec<f32>], width: usize, height: usize) -> Vec<Vec<f32>> {
    let radius = program.radius() as usize;
    let stride = width + 2 * radius;
    let padded: Vec<Vec<f32>> = fields
        .iter()
        .map(|field| {
            let mut grid = Vec::with_capacity(stride * (height + 2 * radius));
            for y in 0..height + 2 * radius {
                for x in 0..stride {
                    let at = |place: usize, extent: usize| (place + radius * (extent - 1)) % extent;
                    grid.push(field[at(y, height) * width + at(x, width)]);
                }
            }
            grid
        })
        .collect();
    let views: Vec<&[f32]> = padded.iter().map(Vec::as_slice).collect();
    let parameters: Vec<f32> = program.parameters().iter().map(|parameter| parameter.value).collect();
    let mut next = vec![vec![0.0; width * height]; fields.len()];
    let mut scratch = Scratch::default();
    for y in 0..height {
        let mut rows: Vec<&mut [f32]> = next.iter_mut().map(|field| &mut field[y * width..(y + 1) * width]).collect();
        program.run(&views, (y + radius) * stride + radius, [stride, 0], &parameters, &mut rows, &mut scratch);
    }
    next
}

fn refused(text: &str, line: usize, column: usize, words: &str) {
    let error = parse(text).expect_err(text);
    assert_eq!((error.line, error.column), (line, column), "{text}: {error}");
    assert!(error.what.contains(words), "{text}: {error}");
}

#[test]
fn gray_scott_in_ten_lines_computes_what_it_says() {
    let program = parse(GRAY_SCOTT).unwrap();
    assert_eq!((program.fields().len(), program.parameters().len(), program.radius()), (2, 4, 1));
    let (width, height) = (300, 5);
    let cell = |x: usize, y: usize, salt: usize| ((x * 7 + y * 13 + salt) % 17) as f32 / 17.0;
    let grid = |salt| (0..width * height).map(|at| cell(at % width, at / width, salt)).collect::<Vec<f32>>();
    let (u, v) = (grid(0), grid(5));
    let next = step(&program, &[u.clone(), v.clone()], width, height);
    for y in 0..height {
        for x in 0..width {
            let at = |f: &[f32], dx: usize, dy: usize| {
                f64::from(f[(y + height + dy - 1) % height * width + (x + width + dx - 1) % width])
            };
            let lap = |f: &[f32]| at(f, 0, 1) + at(f, 2, 1) + at(f, 1, 0) + at(f, 1, 2) - 4.0 * at(f, 1, 1);
            let (a, b) = (at(&u, 1, 1), at(&v, 1, 1));
            let reaction = a * b * b;
            let expected_u = a + 0.16 * lap(&u) - reaction + 0.035 * (1.0 - a);
            let expected_v = b + 0.08 * lap(&v) + reaction - 0.1 * b;
            let place = y * width + x;
            assert!((f64::from(next[0][place]) - expected_u).abs() < 1e-6, "{x} {y}");
            assert!((f64::from(next[1][place]) - expected_v).abs() < 1e-6, "{x} {y}");
        }
    }
    // u = 1, v = 0 stays as it is, exactly.
    let still = step(&program, &[vec![1.0; 64], vec![0.0; 64]], 8, 8);
    assert_eq!(still, [vec![1.0; 64], vec![0.0; 64]]);
}

#[test]
fn life_as_a_rule_moves_a_glider() {
    let life = "fields alive\nlet n = neighbours(alive)\nalive' = n == 3 || (alive && n == 2)\n";
    let program = parse(life).unwrap();
    let mut grid = vec![vec![0.0; 64]];
    for (x, y) in [(1, 0), (2, 1), (0, 2), (1, 2), (2, 2)] {
        grid[0][y * 8 + x] = 1.0;
    }
    let start = grid.clone();
    for _ in 0..32 {
        grid = step(&program, &grid, 8, 8);
    }
    assert_eq!(grid, start, "a glider is back after 32 generations on a torus of 8");
}

#[test]
fn nothing_is_computed_twice_or_for_nobody() {
    let program = parse("fields u\nlet a = lap(u)\nlet unused = u / 3\nu' = a + lap(u) * 2\n").unwrap();
    let loads = program.operations().iter().filter(|o| matches!(o, Operation::Load { .. })).count();
    assert_eq!(loads, 5);
    assert!(!program.operations().iter().any(|o| matches!(o, Operation::Divide(..))));
    let constant = parse("fields u\nu' = u * (2 + 3 * 4 - 14 / 7)\n").unwrap();
    assert!(constant.operations().contains(&Operation::Constant(12.0f32.to_bits())));
}

#[test]
fn each_refusal_says_where_and_what_was_expected() {
    refused("u' = 1\n", 1, 1, "no field");
    refused("fields u\n", 2 - 1, 9, "nothing says what `u` becomes");
    refused("fields u\nu' = w\n", 2, 6, "nothing is named `w`");
    refused("fields u\nu' = u +\n", 2, 9, "expected a number");
    refused("fields u\nu' = (u + 1\n", 2, 12, "expected `)`");
    refused("fields u\nu' = u[9, 0]\n", 2, 8, "at most 8 cells");
    refused("fields u\nu' = u[1]\n", 2, 9, "expected `,`");
    refused("fields u\nu' = u[1, 0, 0]\n", 2, 12, "dimensions 3");
    refused("fields u\nu' = u[0.5, 0]\n", 2, 8, "whole number");
    refused("fields u\nu' = u / (2 - 2)\n", 2, 8, "division by zero");
    refused("fields u\nu' = sin(u)\n", 2, 6, "there is no function `sin`");
    refused("fields u\nu' = min(u)\n", 2, 11, "expected `,`");
    refused("fields u\nu' = dz(u)\n", 2, 6, "dimensions 3");
    refused("fields u u\n", 1, 10, "taken");
    refused("fields u\nparam lap = 1\n", 2, 7, "taken");
    refused("fields u\nparam a = u\n", 2, 11, "a number");
    refused("fields u\nu' = u\nu' = u\n", 3, 1, "said before");
    refused("fields u\nu' = u' + 1\n", 2, 6, "expected `u`");
    refused("fields u\nu' = u ? 1\n", 2, 8, "found `?`");
    refused("fields u\nu' = 1e99\n", 2, 6, "32 bits");
    refused("fields u\nu' = 1.2.3\n", 2, 6, "1.2.3");
    refused("fields u\nu' = u u\n", 2, 8, "end of the line");
    refused("", 1, 1, "fields");
}

#[test]
fn size_and_depth_are_bounded() {
    refused(&" ".repeat(TEXT_BYTES_MAX + 1), 1, 1, "bytes");
    let deep = format!("fields u\nu' = {}u{}\n", "(".repeat(30_000), ")".repeat(30_000));
    assert!(parse(&deep).expect_err("too deep").what.contains("inside each other"));
    let signs = format!("fields u\nu' = {}u\n", "-".repeat(60_000));
    assert!(parse(&signs).is_ok(), "a long row of signs is a loop");
    let mut long = String::from("fields u\nlet a0 = u\n");
    for at in 1..1200 {
        long.push_str(&format!("let a{at} = a{} * u + {at}\n", at - 1));
    }
    long.push_str("u' = a1199\n");
    assert!(parse(&long).expect_err("too long").what.contains("at most 1000 operations"));
    let fields: Vec<String> = (0..17).map(|at| format!("f{at}")).collect();
    refused(&format!("fields {}\n", fields.join(" ")), 1, 62, "at most 16 fields");
}

#[test]
fn the_exponential_is_exact_to_its_last_bits_and_has_no_surprises() {
    let mut worst = 0.0f64;
    for step in -8700..8800 {
        let x = step as f32 / 100.0;
        let (found, exact) = (f64::from(program::exponential(x)), f64::from(x).exp());
        worst = worst.max(((found - exact) / exact).abs());
    }
    assert!(worst < 3e-7, "{worst}");
    assert_eq!(program::exponential(0.0), 1.0);
    assert_eq!(program::exponential(f32::NEG_INFINITY), 0.0);
    assert_eq!(program::exponential(1000.0), f32::INFINITY);
    assert!(program::exponential(f32::NAN).is_nan());
}

#[test]
fn noise_never_panics() {
    let pieces = [
        "fields",
        "param",
        "let",
        "u",
        "v",
        "'",
        "=",
        "+",
        "-",
        "*",
        "/",
        "(",
        ")",
        "[",
        "]",
        ",",
        "1",
        "0.5",
        "lap",
        "min",
        "select",
        "<",
        "==",
        "&&",
        "!",
        "\n",
        "#",
        "é",
        "1e5",
        "dimensions",
        "3",
        "\"",
    ];
    let mut state = 1u64;
    let mut draw = |end: usize| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 33) as usize % end
    };
    for _ in 0..50_000 {
        let length = draw(40);
        let mut text = String::from(if draw(2) == 0 { "fields u v\nu' = " } else { "" });
        for _ in 0..length {
            text.push_str(pieces[draw(pieces.len())]);
            if draw(3) > 0 {
                text.push(' ');
            }
        }
        let _ = parse(&text);
    }
}
