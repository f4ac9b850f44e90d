//! Expressions: values, gradients, noise and parse errors.
use crate::evaluate::{Slope, noise};
use crate::expression::{Expression, Names};

fn names() -> Names {
    let constants = [("pi", std::f64::consts::PI), ("nx", 64.0), ("a", 3.0)];
    Names { constants: constants.map(|(name, value)| (name.to_owned(), value)).to_vec(), seed: 5 }
}

fn parsed(text: &str) -> Expression {
    Expression::parse(text, &names()).unwrap_or_else(|wrong| panic!("{text}: {wrong:?}"))
}

#[test]
fn values() {
    for (text, expected) in [
        ("1 + 2 * 3 - 4 / 2", 5.0),
        ("2 ^ 3 ^ 2", 512.0),
        ("-2 ^ 2", -4.0),
        ("2 ^ -1", 0.5),
        ("2 ^ 0.5", std::f64::consts::SQRT_2),
        ("- - 3", 3.0),
        ("1 < 2 && 2 <= 2 && 3 > 2 && 3 >= 3 && 1 == 1 && 1 != 2", 1.0),
        ("1 > 2 || !(3 == 3)", 0.0),
        ("min(1, 2) + max(3, 4) + abs(-5)", 10.0),
        ("select(a > 2, 10, 20)", 10.0),
        ("floor(-1.5) + sqrt(16)", 2.0),
        ("pow(2, 10)", 1024.0),
        ("sin(0) + cos(0) + tan(0) + tanh(0) + exp(0) + log(1)", 2.0),
        ("x + 10*y + 100*z", 1.5 + 25.0 + 350.0),
        ("2e-1 + 1E+1 + .5", 10.7),
        ("nx * pi / a", 64.0 * std::f64::consts::PI / 3.0),
    ] {
        assert_eq!(parsed(text).at([1, 2, 3]), expected, "{text}");
    }
    // Pinned: results are bit-identical on every machine.
    let bits = parsed("exp(sin(x) * tanh(y)) ^ 1.3").at([1, 2, 3]).to_bits();
    assert_eq!(bits, 4615276357513664454, "{bits}");
}

#[test]
fn gradients_match_finite_differences() {
    for text in [
        "sin(x) * cos(y) + z",
        "exp(-x*x/9) / (1 + y^2)",
        "sqrt(x + y) - log(x*z)",
        "tanh(x - y) * tan(y/9)",
        "x ^ 2.5 + 2 ^ y",
        "abs(x - 3) + max(x, y) + min(y, z)",
        "select(x > y, x*x, y*y*y)",
        "x ^ 7",
    ] {
        let expression = parsed(text);
        let cell = [4, 2, 1];
        let slope: Slope = expression.of(cell);
        assert_eq!(slope.value.to_bits(), expression.at(cell).to_bits(), "{text}");
        for (axis, name) in ["x", "y", "z"].into_iter().enumerate() {
            let at = |shift: f64| {
                let moved =
                    text.replace("exp", "EXP").replace("max", "MAX").replace(name, &format!("({name}+{shift:.7})"));
                parsed(&moved.replace("EXP", "exp").replace("MAX", "max")).at(cell)
            };
            let expected = (at(1e-5) - at(-1e-5)) / 2e-5;
            let error = (slope.along[axis] - expected).abs();
            assert!(error < 1e-5 * (1.0 + expected.abs()), "{text} along {name}: {} {expected}", slope.along[axis]);
        }
    }
}

#[test]
fn noise_is_uniform_and_uncorrelated_between_cells() {
    let expression = parsed("noise(3)");
    let values: Vec<f64> = (0..64).flat_map(|y| (0..64).map(move |x| [x, y, 0])).map(|at| expression.at(at)).collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    assert!((mean - 0.5).abs() < 0.02 && values.iter().all(|value| (0.0..1.0).contains(value)), "{mean}");
    let neighbours = values.windows(2).map(|pair| (pair[0] - 0.5) * (pair[1] - 0.5)).sum::<f64>() / 4096.0;
    assert!(neighbours.abs() < 0.005, "{neighbours}");
    assert_ne!(noise(5, 3, [1, 2, 0]), noise(6, 3, [1, 2, 0]));
    assert_ne!(noise(5, 3, [1, 2, 0]), noise(5, 4, [1, 2, 0]));
    assert_ne!(noise(5, 3, [1, 2, 0]), noise(5, 3, [2, 1, 0]));
    // Pinned: a job's seed gives the same noise in all versions.
    assert_eq!(noise(5, 3, [1, 2, 0]).to_bits(), 4602679760368455620, "{}", noise(5, 3, [1, 2, 0]).to_bits());
}

#[test]
fn parse_errors_name_their_column() {
    let deep = format!("{}1{}", "(".repeat(65), ")".repeat(65));
    assert_eq!(parsed(&deep[1..130]).at([0; 3]), 1.0);
    let powers = "2^".repeat(70) + "2";
    let long = "1+".repeat(1001) + "1";
    let waiting = "1+2*(".repeat(33) + "1" + &")".repeat(33);
    for (text, column, what) in [
        ("", 1, "found the end of the expression"),
        ("1 +", 4, "found the end of the expression"),
        ("1 2", 3, "expected an operator or the end of the expression, found the number 2"),
        ("(1", 3, "expected `)`"),
        ("x + zz", 5, "unknown name `zz`: expected one of x, y, z, pi, nx, a"),
        ("sine(x)", 1, "unknown function `sine`"),
        ("min(1)", 6, "expected `,`"),
        ("1 / 0", 3, "division by zero"),
        ("1..2", 1, "expected a number such as 0.16"),
        ("1e999", 1, "range of 64-bit floats"),
        ("a = 3", 3, "expected an operator or the end of the expression, found `=`"),
        ("ü", 1, "found `ü`"),
        ("1 $ 2", 3, "found `$`"),
        ("noise(x)", 7, "a stream number"),
        ("noise(1.5)", 7, "a stream number"),
        (&deep, 65, "more than 64 nested parentheses"),
        (&powers, 130, "more than 64 nested parentheses or powers"),
        (&long, 1000, "at most 1000 operations"),
        (&waiting, 161, "64 pending operands"),
    ] {
        let wrong = Expression::parse(text, &names()).unwrap_err();
        assert!(wrong.what.contains(what), "{text}: {wrong:?}");
        assert!(wrong.column.abs_diff(column) <= 2, "{text}: {wrong:?}");
    }
    let vast = "1".repeat(20 << 10);
    assert!(Expression::parse(&vast, &names()).unwrap_err().what.contains("bytes"));
}
