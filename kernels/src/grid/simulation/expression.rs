//! Expressions of a cell's coordinates, used by job files for initial states, masks and rates.
//!
//! The grammar is that of rule files (`grid/rule_file.rs`), with coordinates instead of fields, powers and more
//! functions, in f64. An expression compiles to stack-machine operations, bounded in length and depth. Results must be
//! bit-identical on every node: functions that differ between platform libraries come from `libm`, compiled from Rust
//! source.
use super::evaluate::{NoiseRow, Number, noise};

/// Maximum bytes of an expression: ten times a page of text.
const TEXT_BYTES_MAX: usize = 16 << 10;
/// Maximum operations: each is evaluated for every cell.
const OPERATIONS_MAX: usize = 1000;
/// Maximum nesting of parentheses and calls.
const DEPTH_MAX: usize = 64;
/// Maximum stack depth.
const STACK_MAX: usize = 64;
/// Stack depth that suffices for most expressions.
const STACK_USUAL: usize = 8;
/// Cells of a row that are evaluated together.
const LANES: usize = 64;

/// Names an expression may use, besides x, y, z and functions.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// nx, ny, nz, pi and the job's constants.
    pub(super) constants: Vec<(String, f64)>,
    /// Seed of the noise.
    pub(super) seed: u64,
}

/// A parse error with its position.
#[derive(Debug)]
pub(super) struct Wrong {
    /// In characters, counted from 1.
    pub(super) column: usize,
    pub(super) what: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Operation {
    Number(f64),
    /// x, y or z of the cell's centre.
    Place(u8),
    /// Uniform in 0..1, independent between cells and between streams.
    Noise(u64),
    Unary(Unary),
    Binary(Binary),
    /// The second if the first is not 0, else the third.
    Select,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Unary {
    Negate,
    Not,
    Absolute,
    SquareRoot,
    Exponential,
    Logarithm,
    Sine,
    Cosine,
    Tangent,
    HyperbolicTangent,
    Floor,
    /// A small non-negative integer power, by repeated multiplication.
    Power(u8),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
    Minimum,
    Maximum,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Equal,
    And,
    Or,
}

/// A compiled expression. Invariant: its operations leave exactly one value, and need at most `stack` entries.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Expression {
    operations: Vec<Operation>,
    /// Maximum stack depth, at most [`STACK_MAX`].
    stack: usize,
    seed: u64,
}

impl Expression {
    pub(super) fn number(number: f64) -> Self {
        Self { operations: vec![Operation::Number(number)], stack: 1, seed: 0 }
    }

    pub(super) fn parse(text: &str, names: &Names) -> Result<Self, Wrong> {
        if text.len() > TEXT_BYTES_MAX {
            let what = format!("an expression has at most {TEXT_BYTES_MAX} bytes, this one has {}", text.len());
            return Err(Wrong { column: 1, what });
        }
        let words = words(text)?;
        let end = text.chars().count() + 1;
        let mut parser = Parser { words, at: 0, end, depth: 0, stack: 0, deepest: 0, operations: Vec::new(), names };
        parser.expression()?;
        match parser.peek() {
            (Word::End, _) => Ok(Self { operations: parser.operations, stack: parser.deepest, seed: names.seed }),
            (word, column) => Err(wrong(column, format!("expected an operator or the end, found {}", word.text()))),
        }
    }

    /// The value, if it does not depend on the cell.
    pub(super) fn constant(&self) -> Option<f64> {
        let here = |operation: &Operation| matches!(operation, Operation::Place(_) | Operation::Noise(_));
        (!self.operations.iter().any(here)).then(|| self.at([0; 3]))
    }

    /// The value at a cell's centre, which lies at its index + 0.5.
    pub(super) fn at(&self, cell: [usize; 3]) -> f64 {
        self.of::<f64>(cell)
    }

    /// Whether it is not 0 at a cell.
    pub(super) fn is_true(&self, cell: [usize; 3]) -> bool {
        self.at(cell) != 0.0
    }

    /// The value in a number type, such as [`Slope`](super::evaluate::Slope) with its gradient.
    pub(super) fn of<N: Number>(&self, cell: [usize; 3]) -> N {
        // Zeroing the full stack would take longer than evaluating most expressions.
        if self.stack <= STACK_USUAL { self.on::<N, STACK_USUAL>(cell) } else { self.on::<N, STACK_MAX>(cell) }
    }

    fn on<N: Number, const STACK: usize>(&self, cell: [usize; 3]) -> N {
        let mut stack = [N::number(0.0); STACK];
        let mut top = 0;
        for operation in &self.operations {
            match *operation {
                Operation::Number(number) => {
                    stack[top] = N::number(number);
                    top += 1;
                }
                Operation::Place(axis) => {
                    stack[top] = N::place(cell[usize::from(axis)] as f64 + 0.5, usize::from(axis));
                    top += 1;
                }
                Operation::Noise(stream) => {
                    stack[top] = N::number(noise(self.seed, stream, cell));
                    top += 1;
                }
                Operation::Unary(unary) => stack[top - 1] = stack[top - 1].unary(unary),
                Operation::Binary(binary) => {
                    top -= 1;
                    stack[top - 1] = stack[top - 1].binary(binary, stack[top]);
                }
                Operation::Select => {
                    top -= 2;
                    stack[top - 1] = if stack[top - 1].value() != 0.0 { stack[top] } else { stack[top + 1] };
                }
            }
        }
        stack[0]
    }

    /// The values of a row of cells from `x` on, bit-identical to [`Self::at`].
    pub(super) fn row(&self, x: usize, [y, z]: [usize; 2], values: &mut [f64]) {
        if let Some(value) = self.constant() {
            return values.fill(value);
        }
        let mut stack = vec![[0.0; LANES]; self.stack.max(1)];
        for (block, values) in values.chunks_mut(LANES).enumerate() {
            let x = x + block * LANES;
            let mut top = 0;
            for operation in &self.operations {
                match *operation {
                    Operation::Number(number) => {
                        stack[top] = [number; LANES];
                        top += 1;
                    }
                    Operation::Place(axis) => {
                        let along = |i| f64::place([x + i, y, z][usize::from(axis)] as f64 + 0.5, usize::from(axis));
                        stack[top] = std::array::from_fn(along);
                        top += 1;
                    }
                    Operation::Noise(stream) => {
                        let row = NoiseRow::new(self.seed, stream, [y, z]);
                        stack[top] = std::array::from_fn(|i| row.at(x + i));
                        top += 1;
                    }
                    Operation::Unary(unary) => {
                        stack[top - 1].iter_mut().for_each(|value| *value = value.unary(unary));
                    }
                    Operation::Binary(binary) => {
                        top -= 1;
                        let (before, after) = stack.split_at_mut(top);
                        let pairs = before[top - 1].iter_mut().zip(&after[0]);
                        pairs.for_each(|(value, other)| *value = value.binary(binary, *other));
                    }
                    Operation::Select => {
                        top -= 2;
                        let (before, after) = stack.split_at_mut(top);
                        for (i, value) in before[top - 1].iter_mut().enumerate() {
                            *value = if *value != 0.0 { after[0][i] } else { after[1][i] };
                        }
                    }
                }
            }
            values.copy_from_slice(&stack[0][..values.len()]);
        }
    }

    /// Appends bytes that identify the expression.
    pub(super) fn describe(&self, to: &mut Vec<u8>) {
        let noisy = self.operations.iter().any(|operation| matches!(operation, Operation::Noise(_)));
        let seed = if noisy { self.seed } else { 0 };
        to.extend_from_slice(&(self.operations.len() as u64).to_le_bytes());
        to.extend_from_slice(&seed.to_le_bytes());
        for operation in &self.operations {
            let bits = if let Operation::Number(number) = operation { number.to_bits() } else { 0 };
            to.extend_from_slice(format!("{operation:?}").as_bytes());
            to.extend_from_slice(&bits.to_le_bytes());
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Word {
    Name(String),
    Number(f64),
    Sign(&'static str),
    End,
}

impl Word {
    fn text(&self) -> String {
        match self {
            Self::Name(name) => format!("`{}`", super::keys::shortened(name)),
            Self::Number(number) => format!("the number {number}"),
            Self::Sign(sign) => format!("`{sign}`"),
            Self::End => "the end of the expression".into(),
        }
    }
}

/// Longest first, for greedy matching.
const SIGNS: [&str; 18] =
    ["<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "^", "(", ")", ",", "<", ">", "!", "="];

fn wrong(column: usize, what: impl Into<String>) -> Wrong {
    Wrong { column, what: what.into() }
}

fn words(text: &str) -> Result<Vec<(Word, usize)>, Wrong> {
    let mut words = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let column = text[..text.len() - rest.len()].chars().count() + 1;
        let Some(first) = rest.chars().next() else { return Ok(words) };
        let length = if first.is_ascii_digit() || first == '.' {
            let length = number_length(rest);
            let number: f64 = rest[..length].parse().map_err(|_| {
                let found = super::keys::shortened(&rest[..length]);
                wrong(column, format!("expected a number such as 0.16 or 2e-3, found `{found}`"))
            })?;
            if !number.is_finite() {
                return Err(wrong(column, "expected a number within the range of 64-bit floats, found a larger one"));
            }
            words.push((Word::Number(number), column));
            length
        } else if first.is_ascii_alphabetic() || first == '_' {
            let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            words.push((Word::Name(rest[..length].into()), column));
            length
        } else if let Some(sign) = SIGNS.into_iter().find(|sign| rest.starts_with(sign)) {
            words.push((Word::Sign(sign), column));
            sign.len()
        } else {
            return Err(wrong(column, format!("expected a name, a number or an operator, found `{first}`")));
        };
        rest = &rest[length..];
    }
}

/// Length of a number: digits, a decimal point, an exponent with its sign.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let part = |at: usize| {
        let exponent = at > 0 && bytes[at - 1].eq_ignore_ascii_case(&b'e');
        bytes[at].is_ascii_alphanumeric() || bytes[at] == b'.' || matches!(bytes[at], b'+' | b'-') && exponent
    };
    (0..bytes.len()).find(|&at| !part(at)).unwrap_or(bytes.len())
}

struct Parser<'a> {
    words: Vec<(Word, usize)>,
    at: usize,
    end: usize,
    depth: usize,
    /// Current stack depth.
    stack: usize,
    deepest: usize,
    operations: Vec<Operation>,
    names: &'a Names,
}

const UNARY: [(&str, Unary); 9] = [
    ("abs", Unary::Absolute),
    ("sqrt", Unary::SquareRoot),
    ("exp", Unary::Exponential),
    ("log", Unary::Logarithm),
    ("sin", Unary::Sine),
    ("cos", Unary::Cosine),
    ("tan", Unary::Tangent),
    ("tanh", Unary::HyperbolicTangent),
    ("floor", Unary::Floor),
];
const BINARY: [(&str, Binary); 3] = [("min", Binary::Minimum), ("max", Binary::Maximum), ("pow", Binary::Power)];
/// The other functions.
const OTHERS: [&str; 2] = ["select", "noise"];
/// Binary operators by precedence, lowest first.
const LEVELS: [&[&str]; 5] = [&["||"], &["&&"], &["<", "<=", ">", ">=", "==", "!="], &["+", "-"], &["*", "/"]];

/// Whether a name is reserved for a coordinate or a function.
pub(super) fn is_taken(name: &str) -> bool {
    ["x", "y", "z"].contains(&name) || functions().contains(&name)
}

fn functions() -> Vec<&'static str> {
    let mut all: Vec<&str> = UNARY.iter().map(|(name, _)| *name).chain(BINARY.iter().map(|(name, _)| *name)).collect();
    all.extend(OTHERS);
    all.sort_unstable();
    all
}

impl Parser<'_> {
    fn peek(&self) -> (Word, usize) {
        self.words.get(self.at).cloned().unwrap_or((Word::End, self.end))
    }

    fn take(&mut self) -> (Word, usize) {
        let taken = self.peek();
        self.at += 1;
        taken
    }

    /// Consumes the next operator if it is one of `signs`.
    fn accept(&mut self, signs: &[&str]) -> Option<(&'static str, usize)> {
        match self.words.get(self.at) {
            Some((Word::Sign(sign), column)) if signs.contains(sign) => {
                self.at += 1;
                Some((sign, *column))
            }
            Some(_) | None => None,
        }
    }

    fn expect(&mut self, sign: &'static str) -> Result<(), Wrong> {
        if self.accept(&[sign]).is_some() {
            return Ok(());
        }
        let (word, column) = self.peek();
        Err(wrong(column, format!("expected `{sign}`, found {}", word.text())))
    }

    fn push(&mut self, operation: Operation, column: usize) -> Result<(), Wrong> {
        if self.operations.len() >= OPERATIONS_MAX {
            return Err(wrong(
                column,
                format!("expected at most {OPERATIONS_MAX} operations, found more: simplify it"),
            ));
        }
        match operation {
            Operation::Number(_) | Operation::Place(_) | Operation::Noise(_) => self.stack += 1,
            Operation::Unary(_) => {}
            Operation::Binary(_) => self.stack -= 1,
            Operation::Select => self.stack -= 2,
        }
        self.deepest = self.deepest.max(self.stack);
        if self.stack > STACK_MAX {
            return Err(wrong(column, format!("more than {STACK_MAX} pending operands: use fewer parentheses")));
        }
        self.operations.push(operation);
        Ok(())
    }

    fn expression(&mut self) -> Result<(), Wrong> {
        let (_, column) = self.peek();
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(wrong(column, format!("more than {DEPTH_MAX} nested parentheses: use fewer")));
        }
        self.chain(0)?;
        self.depth -= 1;
        Ok(())
    }

    /// A left-associative chain of operators of one precedence level.
    fn chain(&mut self, level: usize) -> Result<(), Wrong> {
        if level == LEVELS.len() {
            return self.unary();
        }
        self.chain(level + 1)?;
        while let Some((sign, column)) = self.accept(LEVELS[level]) {
            self.chain(level + 1)?;
            self.binary(sign, column)?;
        }
        Ok(())
    }

    fn binary(&mut self, sign: &str, column: usize) -> Result<(), Wrong> {
        if sign == "/" && self.operations.last() == Some(&Operation::Number(0.0)) {
            return Err(wrong(column, "division by zero"));
        }
        let (binary, not) = match sign {
            "||" => (Binary::Or, false),
            "&&" => (Binary::And, false),
            "<" => (Binary::Less, false),
            "<=" => (Binary::LessEqual, false),
            ">" => (Binary::Greater, false),
            ">=" => (Binary::GreaterEqual, false),
            "==" => (Binary::Equal, false),
            "!=" => (Binary::Equal, true),
            "+" => (Binary::Add, false),
            "-" => (Binary::Subtract, false),
            "*" => (Binary::Multiply, false),
            _ => (Binary::Divide, false),
        };
        self.push(Operation::Binary(binary), column)?;
        if not { self.push(Operation::Unary(Unary::Not), column) } else { Ok(()) }
    }

    fn unary(&mut self) -> Result<(), Wrong> {
        // A loop, not recursion: a long row of signs must not overflow the stack.
        let mut signs = Vec::new();
        while let Some(sign) = self.accept(&["-", "!", "+"]) {
            signs.push(sign);
        }
        self.power()?;
        for (sign, column) in signs.into_iter().rev() {
            match sign {
                "-" => self.push(Operation::Unary(Unary::Negate), column)?,
                "!" => self.push(Operation::Unary(Unary::Not), column)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Powers bind tighter than signs before them, and are right-associative.
    fn power(&mut self) -> Result<(), Wrong> {
        self.primary()?;
        let Some((_, column)) = self.accept(&["^"]) else { return Ok(()) };
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(wrong(column, format!("more than {DEPTH_MAX} nested powers and parentheses: use fewer")));
        }
        let before = self.operations.len();
        self.unary()?;
        self.depth -= 1;
        match self.operations[before..] {
            [Operation::Number(power)] if power.fract() == 0.0 && (0.0..=POWER_MAX).contains(&power) => {
                self.operations.pop();
                self.stack -= 1;
                self.push(Operation::Unary(Unary::Power(power as u8)), column)
            }
            _ => self.push(Operation::Binary(Binary::Power), column),
        }
    }

    fn primary(&mut self) -> Result<(), Wrong> {
        match self.take() {
            (Word::Number(number), column) => self.push(Operation::Number(number), column),
            (Word::Sign("("), _) => {
                self.expression()?;
                self.expect(")")
            }
            (Word::Name(name), column) if self.accept(&["("]).is_some() => self.call(&name, column),
            (Word::Name(name), column) => {
                if let Some(axis) = ["x", "y", "z"].iter().position(|axis| *axis == name) {
                    return self.push(Operation::Place(axis as u8), column);
                }
                let constant = self.names.constants.iter().find(|(known, _)| *known == name);
                let Some((_, number)) = constant else {
                    let own = self.names.constants.iter().map(|(name, _)| name.as_str());
                    let known: Vec<&str> = ["x", "y", "z"].into_iter().chain(own).collect();
                    let name = super::keys::shortened(&name);
                    let what = format!("unknown name `{name}`: expected one of {}", known.join(", "));
                    return Err(wrong(column, what));
                };
                self.push(Operation::Number(*number), column)
            }
            (word @ (Word::Sign(_) | Word::End), column) => {
                Err(wrong(column, format!("expected a number, a name, a function or `(`, found {}", word.text())))
            }
        }
    }

    /// A function call, after its opening parenthesis.
    fn call(&mut self, name: &str, column: usize) -> Result<(), Wrong> {
        if name == "noise" {
            return self.noise(column);
        }
        let unary = UNARY.iter().find(|(known, _)| *known == name).map(|(_, unary)| (1, Operation::Unary(*unary)));
        let binary = BINARY.iter().find(|(known, _)| *known == name).map(|(_, two)| (2, Operation::Binary(*two)));
        let select = (name == "select").then_some((3, Operation::Select));
        let Some((count, operation)) = unary.or(binary).or(select) else {
            let (name, known) = (super::keys::shortened(name), functions().join(", "));
            return Err(wrong(column, format!("unknown function `{name}`: expected one of {known}")));
        };
        for at in 0..count {
            if at > 0 {
                self.expect(",")?;
            }
            self.expression()?;
        }
        self.expect(")")?;
        self.push(operation, column)
    }

    fn noise(&mut self, column: usize) -> Result<(), Wrong> {
        let stream = match self.take() {
            (Word::Number(stream), _) if stream.fract() == 0.0 && (0.0..=STREAM_MAX).contains(&stream) => stream as u64,
            (word, column) => {
                let what = format!("noise takes a stream number, an integer of at least 0, found {}", word.text());
                return Err(wrong(column, what));
            }
        };
        self.expect(")")?;
        self.push(Operation::Noise(stream), column)
    }
}

/// The highest power computed by repeated multiplication.
const POWER_MAX: f64 = 16.0;
/// The highest noise stream: integers up to it are exact in f64.
const STREAM_MAX: f64 = 4_294_967_295.0;
