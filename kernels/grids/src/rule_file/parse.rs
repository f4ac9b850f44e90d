//! Compiler of rule files: statement by statement, with each expression lowered from its syntax tree.
use std::collections::HashMap;

use super::limits::{FIELDS_MAX, PARAMETERS_MAX, TEXT_BYTES_MAX};
use super::program::{Builder, Operation, Parameter, Program, Value};
use crate::expression::{Node, Place, TextError, Word, Words, number, shortened, whole};

/// What a name refers to.
#[derive(Clone, Copy)]
enum Meaning {
    Field(u16),
    Parameter(u16),
    Let(Value),
}

#[derive(Default)]
struct Compiler {
    names: HashMap<String, Meaning>,
    builder: Builder,
    /// By field, its next value; `None` until its assignment is parsed.
    next: Vec<Option<Value>>,
}

/// Maximum power: each is expanded to multiplications.
const POWER_MAX: u32 = 16;
/// Reserved words.
const KEYWORDS: [&str; 4] = ["fields", "param", "let", "dimensions"];
/// Functions of one argument, of two, of three.
const FUNCTIONS: [&[&str]; 3] =
    [&["abs", "sqrt", "exp", "floor", "lap", "dx", "dy", "dz", "neighbours"], &["min", "max"], &["select"]];
/// Stencil functions, which take a field.
const STENCILS: [&str; 5] = ["lap", "dx", "dy", "dz", "neighbours"];

pub(super) fn program(text: &str) -> Result<Program, TextError> {
    let mut end = Place { line: 1, column: 1 };
    if text.len() > TEXT_BYTES_MAX {
        return Err(end.error(format!("expected a rule file of at most {TEXT_BYTES_MAX} bytes, found {}", text.len())));
    }
    let mut compiler = Compiler::default();
    for (at, line) in text.lines().enumerate() {
        let mut words = Words::new(line.split('#').next().unwrap_or_default(), at + 1, "line")?;
        if !words.is_empty() {
            compiler.statement(&mut words)?;
            words.end()?;
            end = words.peek().1;
        }
    }
    if compiler.builder.fields.is_empty() {
        return Err(end.error("expected `fields` and their names, found none"));
    }
    let next = compiler.next.iter().zip(&compiler.builder.fields).map(|(value, name)| {
        value.ok_or_else(|| end.error(format!("`{name}` has no update: expected a line `{name}' = …`")))
    });
    let next = next.collect::<Result<_, _>>()?;
    Ok(compiler.builder.finish(next))
}

impl Compiler {
    fn statement(&mut self, words: &mut Words) -> Result<(), TextError> {
        let (first, place) = words.take();
        match first {
            Word::Name("dimensions") => {
                let (word, at) = words.take();
                let number = if let Word::Number(text) = word { whole(text) } else { None };
                let Some(dimensions @ (2 | 3)) = number else {
                    return Err(at.error(format!("expected 2 or 3, found {word}")));
                };
                self.builder.dimensions = dimensions;
                if !self.builder.operations.is_empty() {
                    let expected = "expected `dimensions` before the first expression";
                    return Err(place.error(format!("{expected}, found it after: move it up")));
                }
            }
            Word::Name("fields") => {
                while let (Word::Name(_), _) = words.peek() {
                    let index = self.builder.fields.len();
                    let (name, place) = self.new_name(words)?;
                    if index >= FIELDS_MAX {
                        return Err(place.error(format!("a rule has at most {FIELDS_MAX} fields")));
                    }
                    self.names.insert(name.clone(), Meaning::Field(index as u16));
                    self.builder.fields.push(name);
                    self.next.push(None);
                }
                if let (Word::Sign(","), place) = words.peek() {
                    let expected = "expected the next name or the end of the line, found `,`";
                    return Err(place.error(format!("{expected}: names are separated by spaces, `fields u v`")));
                }
            }
            Word::Name("param") => {
                let (name, place) = self.new_name(words)?;
                words.expect("=")?;
                let negative = words.accept("-");
                let (word, at) = words.take();
                let Word::Number(text) = word else {
                    let what = format!("expected the default value of `{name}`, a number, found {word}");
                    return Err(at.error(what));
                };
                let value: f32 = number(text, at)?;
                let index = self.builder.parameters.len();
                if index >= PARAMETERS_MAX {
                    return Err(place.error(format!("a rule has at most {PARAMETERS_MAX} parameters")));
                }
                self.names.insert(name.clone(), Meaning::Parameter(index as u16));
                self.builder.parameters.push(Parameter { name, value: if negative { -value } else { value } });
            }
            Word::Name("let") => {
                let (name, _) = self.new_name(words)?;
                words.expect("=")?;
                let value = self.expression(words)?;
                self.names.insert(name, Meaning::Let(value));
            }
            Word::Next(name) => {
                let Some(Meaning::Field(field)) = self.names.get(name).copied() else {
                    return Err(place.error(format!("`{name}` is not a field: {}", self.fields_known())));
                };
                words.expect("=")?;
                let value = self.expression(words)?;
                if self.next[usize::from(field)].replace(value).is_some() {
                    return Err(place.error(format!("expected one update of `{name}`, found a second: remove one")));
                }
            }
            Word::Name(_) | Word::Number(_) | Word::Sign(_) | Word::End(_) => {
                let expected = "expected `fields`, `param`, `let`, `dimensions`, or the update of a field (`u' = …`)";
                return Err(place.error(format!("{expected}, found {first}")));
            }
        }
        Ok(())
    }

    /// For messages: the declared fields, or how to declare them.
    fn fields_known(&self) -> String {
        let fields = &self.builder.fields;
        if fields.is_empty() {
            "expected a line `fields` with the fields' names before this, such as `fields u v`, found none".into()
        } else {
            format!("expected one of {}", fields.join(", "))
        }
    }

    fn new_name(&self, words: &mut Words) -> Result<(String, Place), TextError> {
        let (word, place) = words.take();
        let Word::Name(name) = word else { return Err(place.error(format!("expected a name, found {word}"))) };
        if KEYWORDS.contains(&name) || FUNCTIONS.concat().contains(&name) || self.names.contains_key(name) {
            return Err(place.error(format!("the name {word} is already used: choose another")));
        }
        Ok((name.to_owned(), place))
    }

    fn expression(&mut self, words: &mut Words) -> Result<Value, TextError> {
        let nodes = words.expression(&FUNCTIONS, self.builder.dimensions as usize)?;
        let mut values: Vec<Value> = Vec::new();
        for (at, &(node, place)) in nodes.iter().enumerate() {
            let after = nodes.get(at + 1).map(|(node, _)| node);
            // Powers and stencils take the number or name before them as it is written, not as a value.
            let written = matches!(after, Some(Node::Apply(name, _)) if *name == "^" || STENCILS.contains(name));
            let value = match node {
                Node::Number(_) | Node::Name(..) if written => 0,
                Node::Number(text) => {
                    self.builder.push(Operation::Constant(number::<f32>(text, place)?.to_bits()), place)?
                }
                Node::Name(name, offset) => self.named(name, offset, place)?,
                Node::Apply(name, count) => {
                    let operands = values.split_off(values.len() - count);
                    match name {
                        "^" => self.power(operands[0], nodes[at - 1])?,
                        _ if STENCILS.contains(&name) => self.stencil(name, nodes[at - 1], place)?,
                        _ => self.apply(name, &operands, place)?,
                    }
                }
            };
            values.push(value);
        }
        Ok(values[0])
    }

    fn named(&mut self, name: &str, offset: Option<[i8; 3]>, place: Place) -> Result<Value, TextError> {
        match self.names.get(name).copied() {
            Some(Meaning::Field(field)) => {
                self.builder.push(Operation::Load { field, offset: offset.unwrap_or_default() }, place)
            }
            Some(_) if offset.is_some() => {
                Err(place.error(format!("`{name}` has no neighbours, only a field has: {}", self.fields_known())))
            }
            Some(Meaning::Parameter(index)) => self.builder.push(Operation::Parameter(index), place),
            Some(Meaning::Let(value)) => Ok(value),
            None => {
                let (name, mut known) = (shortened(name), Vec::from_iter(self.names.keys().map(String::as_str)));
                known.sort_unstable();
                let expected = if known.is_empty() {
                    format!("begin with `fields {name}` if it is a field, `param {name} = 1` if not")
                } else {
                    format!("expected one of {}; a line `param {name} = 1` defines a parameter", known.join(", "))
                };
                Err(place.error(format!("unknown name `{name}`: {expected}")))
            }
        }
    }

    /// An operator or a function of values.
    fn apply(&mut self, name: &str, operands: &[Value], place: Place) -> Result<Value, TextError> {
        let [a, b, c] = std::array::from_fn(|at| operands.get(at).copied().unwrap_or_default());
        let operation = match name {
            "/" if self.builder.constant(b) == Some(0.0) => return Err(place.error("division by zero")),
            "||" => Operation::Or(a, b),
            "&&" => Operation::And(a, b),
            "<" => Operation::Less(a, b),
            "<=" => Operation::LessEqual(a, b),
            ">" => Operation::Less(b, a),
            ">=" => Operation::LessEqual(b, a),
            "==" => Operation::Equal(a, b),
            "!=" => Operation::Not(self.builder.push(Operation::Equal(a, b), place)?),
            "+" => Operation::Add(a, b),
            "-" if operands.len() == 1 => Operation::Negate(a),
            "-" => Operation::Subtract(a, b),
            "*" => Operation::Multiply(a, b),
            "/" => Operation::Divide(a, b),
            "!" => Operation::Not(a),
            "abs" => Operation::Absolute(a),
            "sqrt" => Operation::SquareRoot(a),
            "exp" => Operation::Exponential(a),
            "floor" => Operation::Floor(a),
            "min" => Operation::Minimum(a, b),
            "max" => Operation::Maximum(a, b),
            _ => Operation::Select(a, b, c),
        };
        self.builder.push(operation, place)
    }

    /// An integer power, expanded to multiplications, left-associative.
    fn power(&mut self, value: Value, (exponent, place): (Node, Place)) -> Result<Value, TextError> {
        let power = match exponent {
            Node::Number(text) => whole(text).filter(|power| *power <= POWER_MAX),
            Node::Apply("^", _) => {
                return Err(place.error("expected one power, found another: use parentheses, `(x^2)^3`"));
            }
            Node::Name(..) | Node::Apply(..) => None,
        };
        let Some(power) = power else {
            let expected = format!("expected a whole number from 0 to {POWER_MAX} as the power");
            return Err(place.error(format!("{expected}, found {exponent}: write products, `x * x`, or `sqrt`")));
        };
        if power == 0 {
            return self.builder.push(Operation::Constant(1.0f32.to_bits()), place);
        }
        (1..power).try_fold(value, |product, _| self.builder.push(Operation::Multiply(product, value), place))
    }

    /// A stencil function. The order of summation is fixed: per axis, the lower neighbour, then the upper one.
    fn stencil(&mut self, name: &str, (argument, at): (Node, Place), place: Place) -> Result<Value, TextError> {
        let field = match argument {
            Node::Name(field, None) => match self.names.get(field) {
                Some(Meaning::Field(field)) => *field,
                _ => return Err(at.error(format!("`{name}` takes a field: {}", self.fields_known()))),
            },
            Node::Name(..) | Node::Number(_) | Node::Apply(..) => {
                let found = match argument {
                    Node::Name(..) => "`[` after it".into(),
                    Node::Apply(sign, 2) if !FUNCTIONS[1].contains(&sign) => format!("{argument} after it"),
                    Node::Apply(..) | Node::Number(_) => argument.to_string(),
                };
                return Err(at.error(format!(
                    "`{name}` takes the name of a field and nothing else, found {found}: add a field whose update is \
                     the expression, and take `{name}` of that field"
                )));
            }
        };
        let dimensions = self.builder.dimensions as usize;
        let beside = |axis: usize, step: i8| std::array::from_fn(|other| if other == axis { step } else { 0 });
        match name {
            "lap" => {
                let around = (0..dimensions).flat_map(|axis| [beside(axis, -1), beside(axis, 1)]);
                let sum = self.sum(field, around, place)?;
                let centre = self.builder.push(Operation::Load { field, offset: [0; 3] }, place)?;
                let weight = self.builder.push(Operation::Constant((-2.0 * dimensions as f32).to_bits()), place)?;
                let weighted = self.builder.push(Operation::Multiply(weight, centre), place)?;
                self.builder.push(Operation::Add(weighted, sum), place)
            }
            "neighbours" => {
                let layers = if dimensions == 3 { -1..=1 } else { 0..=0 };
                let rows = layers.flat_map(|z| (-1..=1).map(move |y| (y, z)));
                let around = rows.flat_map(|(y, z)| (-1..=1).map(move |x| [x, y, z]));
                self.sum(field, around.filter(|offset| *offset != [0; 3]), place)
            }
            _ => {
                let axis = ["dx", "dy", "dz"].iter().position(|function| *function == name).unwrap_or(0);
                if axis >= dimensions {
                    return Err(place.error("`dz` needs three dimensions: put the line `dimensions 3` first"));
                }
                let after = self.builder.push(Operation::Load { field, offset: beside(axis, 1) }, place)?;
                let before = self.builder.push(Operation::Load { field, offset: beside(axis, -1) }, place)?;
                let difference = self.builder.push(Operation::Subtract(after, before), place)?;
                let half = self.builder.push(Operation::Constant(0.5f32.to_bits()), place)?;
                self.builder.push(Operation::Multiply(half, difference), place)
            }
        }
    }

    /// The sum of a field's values at some offsets, at least one.
    fn sum(&mut self, field: u16, offsets: impl Iterator<Item = [i8; 3]>, place: Place) -> Result<Value, TextError> {
        let mut sum = None;
        for offset in offsets {
            let value = self.builder.push(Operation::Load { field, offset }, place)?;
            sum = Some(match sum {
                None => value,
                Some(sum) => self.builder.push(Operation::Add(sum, value), place)?,
            });
        }
        sum.ok_or_else(|| place.error("a cell without neighbours"))
    }
}
