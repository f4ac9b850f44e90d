//! Rule files: valid rules, rejected rules with positions, and random input.
use kernels::threads::Threads;

use super::*;
use crate::rule::Rule;
use crate::tile::Tile;
use crate::{Face, Grid};

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

/// Runs a rule for some steps on a periodic grid of `width` cells.
fn torus(text: &str, fields: &[Vec<f32>], width: usize, steps: usize) -> Vec<Vec<f32>> {
    let grid = Grid::periodic(&[width, fields[0].len() / width]).unwrap();
    let mut tile = Tile::new(&grid, &Rule::Text(TextRule::parse(text).unwrap()), grid.region(), 1).unwrap();
    tile.load(&mut |[x, y, _], cell| cell.iter_mut().zip(fields).for_each(|(to, field)| *to = field[y * width + x]));
    tile.advance(&mut Threads::new(1).unwrap(), steps).unwrap();
    (0..fields.len()).map(|field| tile.read(field, grid.region()).unwrap()).collect()
}

fn rejected(text: &str, line: usize, column: usize, words: &str) {
    let error = parse(text).expect_err(text);
    assert_eq!((error.line, error.column), (line, column), "{text}: {error}");
    assert!(error.what.contains(words), "{text}: {error}");
}

#[test]
fn gray_scott_matches_a_scalar_reference() {
    let program = parse(GRAY_SCOTT).unwrap();
    assert_eq!((program.fields().len(), program.parameters().len(), program.radius()), (2, 4, 1));
    let (width, height) = (300, 5);
    let cell = |x: usize, y: usize, salt: usize| ((x * 7 + y * 13 + salt) % 17) as f32 / 17.0;
    let grid = |salt| (0..width * height).map(|at| cell(at % width, at / width, salt)).collect::<Vec<f32>>();
    let (u, v) = (grid(0), grid(5));
    let next = torus(GRAY_SCOTT, &[u.clone(), v.clone()], width, 1);
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
    // u = 1, v = 0 is a fixed point, exactly.
    let still = torus(GRAY_SCOTT, &[vec![1.0; 64], vec![0.0; 64]], 8, 1);
    assert_eq!(still, [vec![1.0; 64], vec![0.0; 64]]);
}

#[test]
fn life_as_a_rule_moves_a_glider() {
    let life = "fields alive\nlet n = neighbours(alive)\nalive' = n == 3 || (alive && n == 2)\n";
    let mut grid = vec![vec![0.0; 64]];
    for (x, y) in [(1, 0), (2, 1), (0, 2), (1, 2), (2, 2)] {
        grid[0][y * 8 + x] = 1.0;
    }
    let start = grid.clone();
    grid = torus(life, &grid, 8, 32);
    assert_eq!(grid, start, "a glider is back after 32 generations on a torus of 8");
}

/// Radius 2 with diagonal neighbours; `c` is read at offset 0 only, `d` copies the previous `c`.
const WIDE: &str = "\
fields a b c d
param rate = 0.1
let wide = a[2, 0] + a[-2, 0] + a[0, 2] + a[0, -2] - 4 * a
let bent = b[1, 1] - b[-1, 2]
let calm = exp(-abs(bent)) / (1 + sqrt(c * c))
a' = a + rate * wide / 4 + select(b > 0.5 && !(c < 0.3), 0.01, -0.01) * calm
b' = max(min(b + 0.2 * dx(a) - 0.1 * dy(b), 1), 0)
c' = c * 0.99 + 0.01 * floor(4 * b) / 4
d' = c
";
const SPACE: &str = "\
dimensions 3
fields u v
u' = u + 0.02 * (neighbours(u) - 26 * u) + 0.1 * v
v' = 0.9 * v - 0.05 * u * dz(u) + (u[0, 0, 1] == u[0, 1, 0])
";

#[test]
fn tiles_equal_one() {
    use crate::tests::{noise, same_bits_however_it_is_cut};
    let warm = Face::Fixed(std::array::from_fn(|field| 1.0 - 0.25 * field as f32));
    let init = |at: [usize; 3], cell: &mut [f32]| {
        cell.iter_mut().enumerate().for_each(|(i, cell)| *cell = (noise(at, i as u64) % 1000) as f32 / 1000.0);
    };
    let (plane, space) = (&[200, 50][..], &[202, 40, 25][..]);
    for (text, size, faces) in [
        (GRAY_SCOTT, plane, &[Face::Periodic, Face::Wall][..]),
        (GRAY_SCOTT, plane, &[warm, Face::Periodic]),
        (WIDE, plane, &[Face::Periodic, Face::Periodic]),
        (WIDE, plane, &[Face::Wall, warm]),
        (WIDE, plane, &[warm, Face::Wall]),
        (WIDE, plane, &[Face::Wall, Face::Periodic]),
        (SPACE, space, &[Face::Wall, Face::Periodic, warm]),
        (SPACE, space, &[Face::Periodic, warm, Face::Wall]),
    ] {
        let faces: Vec<_> = faces.iter().map(|&face| [face; 2]).collect();
        let rule = Rule::Text(TextRule::parse(text).unwrap());
        same_bits_however_it_is_cut(&Grid::new(size, &faces).unwrap(), &rule, &init, 9);
    }
}

#[test]
fn walls_conserve_the_total_at_any_stencil_radius() {
    let text = "fields u\nlet bent = u[1, 1] + u[-1, 1] + u[1, -1] + u[-1, -1]\n\
                u' = u + 0.05 * (u[3, 0] + u[-3, 0] + u[0, 2] + u[0, -2] + bent - 8 * u)\n";
    let grid = Grid::closed(&[30, 5]).unwrap();
    let mut tile = Tile::new(&grid, &Rule::Text(TextRule::parse(text).unwrap()), grid.region(), 1).unwrap();
    tile.load(&mut |[x, y, _], cell| cell[0] = ((x * 7 + y * 5) % 11) as f32);
    let before = tile.total(0).unwrap();
    tile.advance(&mut Threads::new(1).unwrap(), 100).unwrap();
    let change = Tile::total_value(tile.total(0).unwrap() - before) / Tile::total_value(before);
    assert!(change.abs() < 1e-6, "{change:e}");
}

#[test]
fn parameters_are_set_by_name_and_mismatches_are_named() {
    let mut rule = TextRule::parse(GRAY_SCOTT).unwrap();
    rule.set("kill", 0.06).unwrap();
    assert_eq!(rule.parameters(), [0.16, 0.08, 0.035, 0.06]);
    let error = rule.set("kil", 0.06).unwrap_err().to_string();
    assert!(error.contains("unknown parameter `kil`: expected one of du, dv, feed, kill"), "{error}");
    assert!(rule.set("kill", f32::NAN).unwrap_err().to_string().contains("expected a finite number"));
    let rule = Rule::Text(rule);
    assert_eq!((rule.fields(), rule.radius(), rule.field_names()), (2, 1, vec!["u".to_owned(), "v".to_owned()]));
    let error = rule.check(&Grid::closed(&[8, 8, 8]).unwrap()).unwrap_err().to_string();
    assert!(error.contains("has 2 dimensions"), "{error}");
    let wide = Rule::Text(TextRule::parse(WIDE).unwrap());
    let thin = Grid::periodic(&[64, 1]).unwrap();
    let error = Tile::new(&thin, &wide, thin.region(), 1).map(|_| ()).unwrap_err();
    assert!(matches!(error, GridError::AxisTooShort { radius: 2, cells: 1, axis: 'y' }), "{error}");
}

#[test]
fn common_and_dead_subexpressions_are_removed() {
    let program = parse("fields u\nlet a = lap(u)\nlet unused = u / 3\nu' = a + lap(u) * 2\n").unwrap();
    let loads = program.operations().iter().filter(|o| matches!(o, Operation::Load { .. })).count();
    assert_eq!(loads, 5);
    assert!(!program.operations().iter().any(|o| matches!(o, Operation::Divide(..))));
    let constant = parse("fields u\nu' = u * (2 + 3 * 4 - 14 / 7)\n").unwrap();
    assert!(constant.operations().contains(&Operation::Constant(12.0f32.to_bits())));
}

#[test]
fn errors_name_their_position_and_what_was_expected() {
    rejected("u' = 1\n", 1, 1, "not a field");
    rejected("fields u\n", 2 - 1, 9, "`u` has no update");
    rejected("u' = 1\n", 1, 1, "such as `fields u v`");
    rejected("let a = lap(u)\n", 1, 13, "such as `fields u v`");
    rejected("let a = 2 * u\n", 1, 13, "begin with `fields u`");
    rejected("fields u, v\n", 1, 9, "separated by spaces, `fields u v`");
    rejected("fields u\nu' = u^0.5\n", 2, 8, "a whole number from 0 to 16");
    rejected("fields u\nu' = u^u\n", 2, 8, "found `u`: write products");
    rejected("fields u\nu' = u^2^2\n", 2, 9, "use parentheses");
    rejected("fields u\nu' = u + sqrt(0 - 1)\n", 2, 10, "NaN");
    rejected("fields u\nu' = u * exp(100)\n", 2, 10, "infinite");
    rejected("fields u\nu' = w\n", 2, 6, "unknown name `w`");
    rejected("fields u\nu' = u +\n", 2, 9, "expected a number");
    rejected("fields u\nu' = (u + 1\n", 2, 12, "expected `)`");
    rejected("fields u\nu' = u[9, 0]\n", 2, 8, "at most 8 cells");
    rejected("fields u\nu' = u[1]\n", 2, 9, "expected `,`");
    rejected("fields u\nu' = u[1, 0, 0]\n", 2, 12, "dimensions 3");
    rejected("fields u\nu' = u[0.5, 0]\n", 2, 8, "whole number");
    rejected("fields u\nu' = u / (2 - 2)\n", 2, 8, "division by zero");
    rejected("fields u\nu' = sin(u)\n", 2, 6, "unknown function `sin`");
    rejected("fields u\nu' = min(u)\n", 2, 11, "expected `,`");
    rejected("fields u\nu' = dz(u)\n", 2, 6, "dimensions 3");
    rejected("fields u\nu' = lap(u*u)\n", 2, 11, "the name of a field and nothing else, found `*` after it");
    rejected("fields u\nu' = lap(u[1, 0])\n", 2, 10, "the name of a field and nothing else, found `[` after it");
    rejected("fields u\nu' = lap(u\n", 2, 11, "expected `)`");
    rejected("fields u\nu' = u \u{1b}[31m\n", 2, 8, "found `\\u{1b}`");
    rejected("fields u u\n", 1, 10, "already used");
    rejected("fields u\nparam lap = 1\n", 2, 7, "already used");
    rejected("fields u\nparam a = u\n", 2, 11, "a number");
    rejected("fields u\nu' = u\nu' = u\n", 3, 1, "found a second");
    rejected("fields u\nu' = u' + 1\n", 2, 6, "expected `u`");
    rejected("fields u\nu' = u ? 1\n", 2, 8, "found `?`");
    rejected("fields u\nu' = 1e99\n", 2, 6, "32-bit floats");
    rejected("fields u\nu' = 1.2.3\n", 2, 6, "1.2.3");
    rejected("fields u\nu' = u u\n", 2, 8, "end of the line");
    rejected("", 1, 1, "fields");
}

#[test]
fn powers_are_products() {
    let program = |formula: &str| parse(&format!("fields u\nparam k = 2\nu' = {formula}\n")).unwrap();
    for (power, product) in [
        ("u^3", "u*u*u"),
        ("-u^2", "-(u*u)"),
        ("2*u^2/k", "2*(u*u)/k"),
        ("u + u^0", "u + 1"),
        ("u^1", "u"),
        ("(u + k)^2", "(u + k)*(u + k)"),
    ] {
        let (power, product) = (program(power), program(product));
        assert_eq!((power.operations(), power.next()), (product.operations(), product.next()));
    }
}

#[test]
fn parameters_that_divide_by_zero_or_overflow_are_located() {
    let rule = |formula: &str, value: f32| {
        let mut rule = TextRule::parse(&format!("fields u\nparam k = 1\nparam q = 2\nu' = {formula}\n")).unwrap();
        rule.check_numbers().unwrap();
        rule.set("k", value).unwrap();
        rule
    };
    for (formula, value, column, what) in [
        ("u / k", 0.0, 8, "division by zero with k = 0: choose"),
        ("u / (k - 3)", 3.0, 8, "with k = 3"),
        ("u + u[1, 0] / (k*q)", 0.0, 18, "with k = 0, q = 2"),
        ("1 + k * (u + sqrt(k))", -1.0, 19, "NaN or infinite with k = -1"),
        ("u * exp(10 * k)", 1e3, 10, "infinite"),
        ("select(u > 0, u / k, 0)", 0.0, 22, "division by zero"),
    ] {
        let rule = rule(formula, value);
        let error = rule.check_numbers().unwrap_err();
        assert_eq!((error.line, error.column), (4, column), "{formula}: {error}");
        assert!(error.what.contains(what), "{formula}: {error}");
        let error = Rule::Text(rule).check(&Grid::closed(&[8, 8]).unwrap()).unwrap_err().to_string();
        assert!(error.contains(&format!("line 4, column {column}")), "{error}");
    }
    // A parameter that decides a condition excludes the other branch.
    for (formula, value) in [
        ("select(k > 0, u / k, u)", 0.0),
        ("select(k == 0, u, u / k)", 0.0),
        ("u * (k != 0 && u / k > 1)", 0.0),
        ("u * (k == 0 || u / k > 1)", 0.0),
        ("u * select(k < 0, 0, sqrt(k))", -1.0),
        ("k / u", 0.0),
    ] {
        rule(formula, value).check_numbers().unwrap_or_else(|error| panic!("{formula}: {error}"));
    }
}

#[test]
fn text_nesting_and_operations_are_bounded() {
    rejected(&" ".repeat(TEXT_BYTES_MAX + 1), 1, 1, "bytes");
    let deep = format!("fields u\nu' = {}u{}\n", "(".repeat(30_000), ")".repeat(30_000));
    assert!(parse(&deep).expect_err("too deep").what.contains("nested parentheses"));
    let nested = |count| format!("fields u\nu' = {}lap(u){}\n", "(".repeat(count), ")".repeat(count));
    assert!(parse(&nested(63)).is_ok() && parse(&nested(64)).is_err());
    let signs = format!("fields u\nu' = {}u\n", "-".repeat(60_000));
    assert!(parse(&signs).is_ok(), "a long row of signs is a loop");
    let mut long = String::from("fields u\nlet a0 = u\n");
    for at in 1..1200 {
        long.push_str(&format!("let a{at} = a{} * u + {at}\n", at - 1));
    }
    long.push_str("u' = a1199\n");
    assert!(parse(&long).expect_err("too long").what.contains("at most 1000 operations"));
    let fields: Vec<String> = (0..17).map(|at| format!("f{at}")).collect();
    rejected(&format!("fields {}\n", fields.join(" ")), 1, 62, "at most 16 fields");
}

#[test]
fn the_exponential_is_accurate_and_handles_infinities_and_nan() {
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
    let pieces =
        "fields param let u v ' = + - * / ( ) ^ [ ] , 1 0.5 lap min select < == && ! \n # é 1e5 dimensions 3 \"";
    let pieces: Vec<&str> = pieces.split(' ').collect();
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
