//! Expressions of a cell's coordinates, used by job files for initial states, masks and rates.
//!
//! The grammar is that of rule files (`kernels/grids/src/expression.rs`), with coordinates instead of fields, any powers
//! and more functions, in f64. An expression compiles to stack-machine operations, bounded in length and depth. Results
//! must be bit-identical on every node: functions that differ between platform libraries come from `libm`, compiled
//! from Rust source.
use kernels_grids::expression::{Node, Place, TextError, Words, number, whole};

use crate::evaluate::{Lanes, Number};

/// Maximum bytes of an expression: ten times a page of text.
const TEXT_BYTES_MAX: usize = 16 << 10;
/// Maximum operations: each is evaluated for every cell.
const OPERATIONS_MAX: usize = 1000;
/// Maximum stack depth.
const STACK_MAX: usize = 64;
/// Stack depth that suffices for most expressions.
const STACK_USUAL: usize = 8;

/// Names an expression may use, besides x, y, z and functions.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// nx, ny, nz, pi and the job's constants.
    pub(super) constants: Vec<(String, f64)>,
    /// Seed of the noise.
    pub(super) seed: u64,
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

impl Operation {
    /// Entries that it takes from the stack.
    fn operands(&self) -> usize {
        match self {
            Self::Number(_) | Self::Place(_) | Self::Noise(_) => 0,
            Self::Unary(_) => 1,
            Self::Binary(_) => 2,
            Self::Select => 3,
        }
    }
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

    pub(super) fn parse(text: &str, names: &Names) -> Result<Self, TextError> {
        if text.len() > TEXT_BYTES_MAX {
            let what = format!("an expression has at most {TEXT_BYTES_MAX} bytes, this one has {}", text.len());
            return Err(Place { line: 1, column: 1 }.error(what));
        }
        let mut words = Words::new(text, 1, "expression")?;
        let nodes = words.expression(&FUNCTIONS, 0)?;
        words.end()?;
        let mut compiler = Compiler::default();
        for at in 0..nodes.len() {
            compiler.node(&nodes[..=at], names)?;
        }
        Ok(Self { operations: compiler.operations, stack: compiler.deepest, seed: names.seed })
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

    /// The value in a number type, such as [`Slope`](crate::evaluate::Slope) with its gradient.
    pub(super) fn of<N: Number>(&self, cell: [usize; 3]) -> N {
        // Zeroing the full stack would take longer than evaluating most expressions.
        if self.stack <= STACK_USUAL { self.on::<N, STACK_USUAL>(cell) } else { self.on::<N, STACK_MAX>(cell) }
    }

    fn on<N: Number, const STACK: usize>(&self, cell: [usize; 3]) -> N {
        let mut stack = [N::number(0.0); STACK];
        let mut top = 0;
        for operation in &self.operations {
            top -= operation.operands();
            stack[top] = match *operation {
                Operation::Number(number) => N::number(number),
                Operation::Place(axis) => N::place(cell, usize::from(axis)),
                Operation::Noise(stream) => N::noise(self.seed, stream, cell),
                Operation::Unary(unary) => stack[top].unary(unary),
                Operation::Binary(binary) => stack[top].binary(binary, stack[top + 1]),
                Operation::Select => stack[top].select(stack[top + 1], stack[top + 2]),
            };
            top += 1;
        }
        stack[0]
    }

    /// The values of a row of cells from `x` on, bit-identical to [`Self::at`].
    pub(super) fn row(&self, x: usize, [y, z]: [usize; 2], values: &mut [f64]) {
        if let Some(value) = self.constant() {
            return values.fill(value);
        }
        for (block, values) in values.chunks_mut(Lanes::COUNT).enumerate() {
            values.copy_from_slice(&self.of::<Lanes>([x + block * Lanes::COUNT, y, z]).0[..values.len()]);
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

/// Operations in the order of evaluation, on a stack.
#[derive(Default)]
struct Compiler {
    operations: Vec<Operation>,
    /// Current stack depth.
    stack: usize,
    deepest: usize,
}

impl Compiler {
    /// Compiles the last of some nodes, after the others.
    fn node(&mut self, nodes: &[(Node, Place)], names: &Names) -> Result<(), TextError> {
        let (node, place) = nodes[nodes.len() - 1];
        let operation = match (node, self.operations.last().copied()) {
            (Node::Number(text), _) => Operation::Number(number(text, place)?),
            (Node::Name(name, _), _) => {
                let axis = COORDINATES.iter().position(|axis| *axis == name);
                let constant = names.constants.iter().find(|(known, _)| known == name);
                match (axis, constant) {
                    (Some(axis), _) => Operation::Place(axis as u8),
                    (None, Some((_, number))) => Operation::Number(*number),
                    (None, None) => {
                        let constants = names.constants.iter().map(|(name, _)| name.as_str());
                        let known: Vec<&str> = COORDINATES.into_iter().chain(constants).collect();
                        return Err(place.error(format!("unknown name {node}: expected one of {}", known.join(", "))));
                    }
                }
            }
            (Node::Apply("/", _), Some(Operation::Number(0.0))) => return Err(place.error("division by zero")),
            (Node::Apply("!=", _), _) => {
                self.push(Operation::Binary(Binary::Equal), place)?;
                Operation::Unary(Unary::Not)
            }
            (Node::Apply("^", _), Some(Operation::Number(power))) if (0..=POWER_MAX).any(|n| f64::from(n) == power) => {
                self.pop();
                Operation::Unary(Unary::Power(power as u8))
            }
            (Node::Apply("noise", _), _) => {
                self.pop();
                let (argument, place) = nodes[nodes.len() - 2];
                let stream = if let Node::Number(text) = argument { whole(text) } else { None };
                let wrong = || format!("noise takes a stream number, an integer of at least 0, found {argument}");
                Operation::Noise(stream.ok_or_else(|| place.error(wrong()))?.into())
            }
            (Node::Apply(name, count), _) => applied(name, count),
        };
        self.push(operation, place)
    }

    fn push(&mut self, operation: Operation, place: Place) -> Result<(), TextError> {
        if self.operations.len() >= OPERATIONS_MAX {
            let what = format!("expected at most {OPERATIONS_MAX} operations, found more: simplify it");
            return Err(place.error(what));
        }
        self.stack = self.stack + 1 - operation.operands();
        self.deepest = self.deepest.max(self.stack);
        if self.stack > STACK_MAX {
            return Err(place.error(format!("more than {STACK_MAX} pending operands: use fewer parentheses")));
        }
        self.operations.push(operation);
        Ok(())
    }

    /// Takes back a number, which the next operation contains.
    fn pop(&mut self) {
        self.operations.pop();
        self.stack -= 1;
    }
}

/// Functions of one argument, of two, of three.
const FUNCTIONS: [&[&str]; 3] = [
    &["abs", "sqrt", "exp", "log", "sin", "cos", "tan", "tanh", "floor", "noise"],
    &["min", "max", "pow"],
    &["select"],
];

/// Names of a cell's coordinates.
const COORDINATES: [&str; 3] = ["x", "y", "z"];

/// Whether a name is reserved for a coordinate or a function.
pub(super) fn is_taken(name: &str) -> bool {
    COORDINATES.contains(&name) || FUNCTIONS.concat().contains(&name)
}

/// The operation of an operator or a function.
fn applied(name: &str, count: usize) -> Operation {
    let (unary, binary) = (Operation::Unary, Operation::Binary);
    match name {
        "-" if count == 1 => unary(Unary::Negate),
        "!" => unary(Unary::Not),
        "abs" => unary(Unary::Absolute),
        "sqrt" => unary(Unary::SquareRoot),
        "exp" => unary(Unary::Exponential),
        "log" => unary(Unary::Logarithm),
        "sin" => unary(Unary::Sine),
        "cos" => unary(Unary::Cosine),
        "tan" => unary(Unary::Tangent),
        "tanh" => unary(Unary::HyperbolicTangent),
        "floor" => unary(Unary::Floor),
        "||" => binary(Binary::Or),
        "&&" => binary(Binary::And),
        "<" => binary(Binary::Less),
        "<=" => binary(Binary::LessEqual),
        ">" => binary(Binary::Greater),
        ">=" => binary(Binary::GreaterEqual),
        "==" => binary(Binary::Equal),
        "+" => binary(Binary::Add),
        "-" => binary(Binary::Subtract),
        "*" => binary(Binary::Multiply),
        "/" => binary(Binary::Divide),
        "^" | "pow" => binary(Binary::Power),
        "min" => binary(Binary::Minimum),
        "max" => binary(Binary::Maximum),
        _ => Operation::Select,
    }
}

/// The highest power computed by repeated multiplication.
const POWER_MAX: u8 = 16;
