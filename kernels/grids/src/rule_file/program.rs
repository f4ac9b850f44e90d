//! The compiled form of a rule: SSA-like operations with common subexpressions merged. Next:
//! `rule_file/interpreter.rs`.
#![expect(clippy::wildcard_enum_match_arm, reason = "each pass handles a few of many operations")]
use std::collections::HashMap;

use super::limits::OPERATIONS_MAX;
use crate::expression::{Place, TextError};

/// A parameter with its default value.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Name in the rule file.
    pub name: String,
    /// Default value.
    pub value: f32,
}

/// Index of the operation that computes a value.
pub type Value = u16;

/// One operation. Constants are stored as bits, so that equal operations can be found by hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// An f32 constant, as its bits.
    Constant(u32),
    /// A parameter, by index.
    Parameter(u16),
    /// A field's value at an offset from the cell.
    Load {
        /// Index of the field.
        field: u16,
        /// Cells along x, y and z.
        offset: [i8; 3],
    },
    /// Sum.
    Add(Value, Value),
    /// Difference.
    Subtract(Value, Value),
    /// Product.
    Multiply(Value, Value),
    /// Fused multiply-add `a · b + c`, rounded once.
    MultiplyAdd(Value, Value, Value),
    /// Quotient.
    Divide(Value, Value),
    /// Negation.
    Negate(Value),
    /// Absolute value.
    Absolute(Value),
    /// Square root.
    SquareRoot(Value),
    /// e to the power of the value.
    Exponential(Value),
    /// The largest integer not above the value.
    Floor(Value),
    /// The smaller value; the second if they are unordered or equal.
    Minimum(Value, Value),
    /// The larger value; the second if they are unordered or equal.
    Maximum(Value, Value),
    /// 1 if the first is less, else 0.
    Less(Value, Value),
    /// 1 if the first is less or equal, else 0.
    LessEqual(Value, Value),
    /// 1 if both are equal, else 0.
    Equal(Value, Value),
    /// 1 if neither is 0, else 0.
    And(Value, Value),
    /// 1 if at least one is not 0, else 0.
    Or(Value, Value),
    /// 1 if the value is 0, else 0.
    Not(Value),
    /// The second if the first is not 0, else the third.
    Select(Value, Value, Value),
}

impl Operation {
    /// The values it reads.
    pub fn operands(&self) -> impl Iterator<Item = Value> {
        let (mut found, mut count) = ([None; 3], 0);
        self.renumbered(|value| {
            found[count] = Some(value);
            count += 1;
            value
        });
        found.into_iter().flatten()
    }

    /// The same operation of other values, by a function of each.
    fn renumbered(self, mut p: impl FnMut(Value) -> Value) -> Self {
        use Operation as O;
        match self {
            O::Constant(_) | O::Parameter(_) | O::Load { .. } => self,
            O::Add(a, b) => O::Add(p(a), p(b)),
            O::Subtract(a, b) => O::Subtract(p(a), p(b)),
            O::Multiply(a, b) => O::Multiply(p(a), p(b)),
            O::MultiplyAdd(a, b, c) => O::MultiplyAdd(p(a), p(b), p(c)),
            O::Divide(a, b) => O::Divide(p(a), p(b)),
            O::Negate(a) => O::Negate(p(a)),
            O::Absolute(a) => O::Absolute(p(a)),
            O::SquareRoot(a) => O::SquareRoot(p(a)),
            O::Exponential(a) => O::Exponential(p(a)),
            O::Floor(a) => O::Floor(p(a)),
            O::Minimum(a, b) => O::Minimum(p(a), p(b)),
            O::Maximum(a, b) => O::Maximum(p(a), p(b)),
            O::Less(a, b) => O::Less(p(a), p(b)),
            O::LessEqual(a, b) => O::LessEqual(p(a), p(b)),
            O::Equal(a, b) => O::Equal(p(a), p(b)),
            O::And(a, b) => O::And(p(a), p(b)),
            O::Or(a, b) => O::Or(p(a), p(b)),
            O::Not(a) => O::Not(p(a)),
            O::Select(a, b, c) => O::Select(p(a), p(b), p(c)),
        }
    }

    /// Evaluates the operation on f32 operands.
    #[inline(always)]
    pub(super) fn of(&self, a: f32, b: f32, c: f32) -> f32 {
        let pick = |yes: bool, one: f32, other: f32| if yes { one } else { other };
        let truth = |yes: bool| pick(yes, 1.0, 0.0);
        match *self {
            Operation::Constant(bits) => f32::from_bits(bits),
            Operation::Parameter(_) | Operation::Load { .. } => a,
            Operation::Add(..) => a + b,
            Operation::Subtract(..) => a - b,
            Operation::Multiply(..) => a * b,
            Operation::MultiplyAdd(..) => a.mul_add(b, c),
            Operation::Divide(..) => a / b,
            Operation::Negate(_) => -a,
            Operation::Absolute(_) => a.abs(),
            Operation::SquareRoot(_) => a.sqrt(),
            Operation::Exponential(_) => exponential(a),
            Operation::Floor(_) => a.floor(),
            // Not `f32::min`: its result for zeros of different sign depends on the machine.
            Operation::Minimum(..) => pick(a < b, a, b),
            Operation::Maximum(..) => pick(a > b, a, b),
            Operation::Less(..) => truth(a < b),
            Operation::LessEqual(..) => truth(a <= b),
            Operation::Equal(..) => truth(a == b),
            Operation::And(..) => truth(a != 0.0 && b != 0.0),
            Operation::Or(..) => truth(a != 0.0 || b != 0.0),
            Operation::Not(_) => truth(a == 0.0),
            Operation::Select(..) => pick(a != 0.0, b, c),
        }
    }
}

/// e to the power of `x`, bit-identical on every machine because it calls no math library. Relative error below 3e-7.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; e^r by its Taylor series to degree 7; 2^n through the exponent bits.
#[inline(always)]
pub(super) fn exponential(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_359_4; // exact in 12 bits, so that n times it is exact
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, clamped));
    let mut series = 1.0 / 5040.0f32;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series.mul_add(r, factor);
    }
    let power = f32::from_bits(((n as i32 + 127) as u32) << 23);
    let value = series * power;
    if x.is_nan() {
        x
    } else if x > 88.0 {
        f32::INFINITY
    } else if x < -87.0 {
        0.0
    } else {
        value
    }
}

/// A compiled rule, built by [`parse`](super::parse).
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    fields: Vec<String>,
    parameters: Vec<Parameter>,
    dimensions: u32,
    /// Invariant: each operation reads the results of earlier ones only.
    operations: Vec<Operation>,
    /// By operation, its first position in the text.
    places: Vec<Place>,
    /// By field, its next value.
    next: Vec<Value>,
}

impl Program {
    /// Field names.
    pub fn fields(&self) -> &[String] {
        &self.fields
    }

    /// Parameters with their default values.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Number of dimensions, 2 or 3.
    pub fn dimensions(&self) -> u32 {
        self.dimensions
    }

    /// All operations, in evaluation order.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// By field, the operation that computes its next value.
    pub fn next(&self) -> &[Value] {
        &self.next
    }

    /// Checks that with these parameters no operation that a field needs is a division by zero, NaN or infinite in all
    /// cells.
    pub(super) fn check(&self, parameters: &[f32]) -> Result<(), TextError> {
        let known = self.known(parameters);
        let needed = self.needed(&known);
        for (at, operation) in self.operations.iter().enumerate().filter(|(at, _)| needed[*at]) {
            let wrong = match (*operation, known[at]) {
                (Operation::Divide(_, by), _) if known[usize::from(by)] == Some(0.0) => "division by zero",
                (_, Some(number)) if !number.is_finite() => "NaN or infinite",
                _ => continue,
            };
            let of: Vec<String> = self
                .parameters_of(at)
                .into_iter()
                .map(|at| format!("{} = {}", self.parameters[at].name, parameters[at]))
                .collect();
            let with = if of.is_empty() { String::new() } else { format!(" with {}", of.join(", ")) };
            return Err(self.places[at].error(format!("{wrong}{with}: choose other numbers")));
        }
        Ok(())
    }

    /// Constant propagation: by operation, its value if it is the same in all cells.
    fn known(&self, parameters: &[f32]) -> Vec<Option<f32>> {
        let mut known: Vec<Option<f32>> = Vec::with_capacity(self.operations.len());
        for operation in &self.operations {
            let of = |value: Value| known[usize::from(value)];
            let operands: Vec<Option<f32>> = operation.operands().map(of).collect();
            let operand = |at: usize| operands.get(at).copied().flatten().unwrap_or(0.0);
            known.push(match *operation {
                Operation::Load { .. } => None,
                Operation::Parameter(which) => Some(parameters[usize::from(which)]),
                Operation::And(a, b) if of(a) == Some(0.0) || of(b) == Some(0.0) => Some(0.0),
                Operation::Or(a, b) if [a, b].into_iter().any(|value| of(value).is_some_and(|n| n != 0.0)) => Some(1.0),
                Operation::Select(condition, then, other) if of(condition).is_some() => {
                    of(if of(condition) == Some(0.0) { other } else { then })
                }
                _ if operands.iter().all(Option::is_some) => Some(operation.of(operand(0), operand(1), operand(2))),
                _ => None,
            });
        }
        known
    }

    /// By operation, whether a field depends on it, ignoring branches that a constant condition excludes.
    fn needed(&self, known: &[Option<f32>]) -> Vec<bool> {
        let mut needed = vec![false; self.operations.len()];
        self.next.iter().for_each(|&value| needed[usize::from(value)] = true);
        for at in (0..self.operations.len()).rev() {
            if !needed[at] {
                continue;
            }
            let of = |value: Value| known[usize::from(value)];
            let decides = |value: &Value, zero: bool| of(*value).is_some_and(|number| (number == 0.0) == zero);
            let by: Vec<Value> = match self.operations[at] {
                Operation::And(a, b) => {
                    [a, b].into_iter().find(|value| decides(value, true)).map_or(vec![a, b], |v| vec![v])
                }
                Operation::Or(a, b) => {
                    [a, b].into_iter().find(|value| decides(value, false)).map_or(vec![a, b], |v| vec![v])
                }
                Operation::Select(condition, then, other) => match of(condition) {
                    Some(number) => vec![condition, if number == 0.0 { other } else { then }],
                    None => vec![condition, then, other],
                },
                operation => operation.operands().collect(),
            };
            by.into_iter().for_each(|value| needed[usize::from(value)] = true);
        }
        needed
    }

    /// The parameters that an operation depends on, sorted.
    fn parameters_of(&self, at: usize) -> Vec<usize> {
        let mut found = Vec::new();
        let mut needed = vec![false; at + 1];
        needed[at] = true;
        for at in (0..=at).rev() {
            if !needed[at] {
                continue;
            }
            if let Operation::Parameter(which) = self.operations[at] {
                found.push(usize::from(which));
            }
            self.operations[at].operands().for_each(|value| needed[usize::from(value)] = true);
        }
        found.sort_unstable();
        found
    }

    /// Stencil radius: the largest offset along any axis, at least 1.
    pub fn radius(&self) -> u32 {
        let reach = |operation: &Operation| match operation {
            Operation::Load { offset, .. } => offset.iter().map(|cells| cells.unsigned_abs().into()).max().unwrap_or(0),
            _ => 0,
        };
        self.operations.iter().map(reach).max().unwrap_or(0).max(1)
    }

    /// Whether a field is read at offset 0 only.
    pub fn is_pointwise(&self, field: usize) -> bool {
        let outside = |operation: &Operation| match operation {
            Operation::Load { field: loaded, offset } => usize::from(*loaded) == field && *offset != [0; 3],
            _ => false,
        };
        !self.operations.iter().any(outside)
    }

    /// Whether diagonal neighbours are read, with an offset along more than one axis.
    pub fn reads_diagonals(&self) -> bool {
        self.operations.iter().any(|operation| match operation {
            Operation::Load { offset, .. } => offset.iter().filter(|cells| **cells != 0).count() > 1,
            _ => false,
        })
    }
}

/// A program under construction.
pub(super) struct Builder {
    pub(super) fields: Vec<String>,
    pub(super) parameters: Vec<Parameter>,
    pub(super) dimensions: u32,
    pub(super) operations: Vec<Operation>,
    places: Vec<Place>,
    known: HashMap<Operation, Value>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            fields: Vec::new(),
            parameters: Vec::new(),
            dimensions: 2,
            operations: Vec::new(),
            places: Vec::new(),
            known: HashMap::new(),
        }
    }
}

impl Builder {
    /// Adds an operation and returns its value: reuses an equal one, and folds one of constants.
    pub(super) fn push(&mut self, operation: Operation, place: Place) -> Result<Value, TextError> {
        let operation = self.folded(operation);
        if let Operation::Constant(bits) = operation
            && !f32::from_bits(bits).is_finite()
        {
            return Err(place.error("NaN or infinite: choose other numbers"));
        }
        if let Operation::Negate(value) = operation
            && let Operation::Negate(inner) = self.operations[usize::from(value)]
        {
            return Ok(inner);
        }
        if let Some(&value) = self.known.get(&operation) {
            return Ok(value);
        }
        if self.operations.len() >= OPERATIONS_MAX {
            return Err(
                place.error(format!("expected at most {OPERATIONS_MAX} operations, found more: simplify the rule"))
            );
        }
        let value = self.operations.len() as Value;
        self.operations.push(operation);
        self.places.push(place);
        self.known.insert(operation, value);
        Ok(value)
    }

    /// The number, if a value is a constant.
    pub(super) fn constant(&self, value: Value) -> Option<f32> {
        match self.operations[usize::from(value)] {
            Operation::Constant(bits) => Some(f32::from_bits(bits)),
            _ => None,
        }
    }

    fn folded(&self, operation: Operation) -> Operation {
        let operands: Vec<Option<f32>> = operation.operands().map(|value| self.constant(value)).collect();
        let number = |at: usize| operands.get(at).copied().flatten().unwrap_or(0.0);
        if operands.is_empty() || operands.iter().any(Option::is_none) {
            return operation;
        }
        Operation::Constant(operation.of(number(0), number(1), number(2)).to_bits())
    }

    /// Removes dead operations, and fuses products used only in one sum into multiply-adds.
    pub(super) fn finish(self, next: Vec<Value>) -> Program {
        let mut operations = self.operations;
        let mut uses = vec![0u32; operations.len()];
        let count = |uses: &mut Vec<u32>, operations: &[Operation]| {
            uses.iter_mut().for_each(|uses| *uses = 0);
            next.iter().for_each(|&value| uses[usize::from(value)] += 1);
            for at in (0..operations.len()).rev() {
                if uses[at] > 0 {
                    operations[at].operands().for_each(|value| uses[usize::from(value)] += 1);
                }
            }
        };
        count(&mut uses, &operations);
        for at in 0..operations.len() {
            if let Operation::Add(a, b) = operations[at] {
                let product = |value: Value| match operations[usize::from(value)] {
                    Operation::Multiply(x, y) if uses[usize::from(value)] == 1 => Some((x, y)),
                    _ => None,
                };
                if let Some((x, y)) = product(a) {
                    operations[at] = Operation::MultiplyAdd(x, y, b);
                } else if let Some((x, y)) = product(b) {
                    operations[at] = Operation::MultiplyAdd(x, y, a);
                }
            }
        }
        count(&mut uses, &operations);
        let mut places = vec![0 as Value; operations.len()];
        let mut kept: Vec<Operation> = Vec::with_capacity(operations.len());
        let mut positions = Vec::with_capacity(operations.len());
        for (at, operation) in operations.iter().enumerate().filter(|(at, _)| uses[*at] > 0) {
            places[at] = kept.len() as Value;
            kept.push(operation.renumbered(|value| places[usize::from(value)]));
            positions.push(self.places[at]);
        }
        let next: Vec<Value> = next.into_iter().map(|value| places[usize::from(value)]).collect();
        Program {
            fields: self.fields,
            parameters: self.parameters,
            dimensions: self.dimensions,
            operations: kept,
            places: positions,
            next,
        }
    }
}
