//! Single-pass compiler of rule files: lowers each expression as it parses, without building a syntax tree.
use super::lex::{Place, Word, words};
use super::program::{Builder, Operation, Program, Value};
use super::{DEPTH_MAX, FIELDS_MAX, OFFSET_MAX, PARAMETERS_MAX, Parameter, RuleError, TEXT_BYTES_MAX};
use std::collections::HashMap;

/// What a name refers to.
#[derive(Clone, Copy)]
enum Meaning {
    Field(u16),
    Parameter(u16),
    Let(Value),
}

struct Parser {
    words: Vec<(Word, Place)>,
    at: usize,
    depth: usize,
    names: HashMap<String, Meaning>,
    builder: Builder,
    /// By field, its next value; `None` until its assignment is parsed.
    next: Vec<Option<Value>>,
}

/// Maximum power: each is expanded to multiplications.
const POWER_MAX: f32 = 16.0;
/// Reserved words.
const KEYWORDS: [&str; 4] = ["fields", "param", "let", "dimensions"];
/// Functions with their number of arguments.
const FUNCTIONS: [(&str, usize); 7] =
    [("abs", 1), ("sqrt", 1), ("exp", 1), ("floor", 1), ("min", 2), ("max", 2), ("select", 3)];
/// Stencil functions, which take a field.
const STENCILS: [&str; 5] = ["lap", "dx", "dy", "dz", "neighbours"];

pub(super) fn program(text: &str) -> Result<Program, RuleError> {
    let start = Place { line: 1, column: 1 };
    if text.len() > TEXT_BYTES_MAX {
        return Err(
            start.error(format!("expected a rule file of at most {TEXT_BYTES_MAX} bytes, found {}", text.len()))
        );
    }
    let mut parser = Parser {
        words: words(text)?,
        at: 0,
        depth: 0,
        names: HashMap::new(),
        builder: Builder::default(),
        next: Vec::new(),
    };
    while parser.at < parser.words.len() {
        parser.statement()?;
    }
    let end = parser.words.last().map_or(start, |(_, place)| *place);
    if parser.builder.fields.is_empty() {
        return Err(end.error("expected `fields` and their names, found none"));
    }
    let mut next = Vec::new();
    for (name, value) in parser.builder.fields.iter().zip(&parser.next) {
        let missing = || end.error(format!("`{name}` has no update: expected a line `{name}' = …`"));
        next.push(value.ok_or_else(missing)?);
    }
    Ok(parser.builder.finish(next))
}

impl Parser {
    fn peek(&self) -> (&Word, Place) {
        self.words.get(self.at).map_or((&Word::End, Place { line: 1, column: 1 }), |(word, place)| (word, *place))
    }

    fn take(&mut self) -> (Word, Place) {
        let (word, place) = self.peek();
        let taken = (word.clone(), place);
        self.at += 1;
        taken
    }

    fn is(&self, sign: &str) -> bool {
        matches!(self.peek().0, Word::Sign(found) if *found == sign)
    }

    fn accept(&mut self, sign: &str) -> bool {
        let there = self.is(sign);
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, sign: &str) -> Result<(), RuleError> {
        if self.accept(sign) {
            return Ok(());
        }
        let (word, place) = self.peek();
        Err(place.error(format!("expected `{sign}`, found {}", word.text())))
    }

    fn end(&mut self) -> Result<(), RuleError> {
        match self.take() {
            (Word::End, _) => Ok(()),
            (word, place) => {
                Err(place.error(format!("expected an operator or the end of the line, found {}", word.text())))
            }
        }
    }

    fn statement(&mut self) -> Result<(), RuleError> {
        match self.take() {
            (Word::Name(word), place) if word == "dimensions" => {
                match self.take() {
                    (Word::Number(number), _) if number == 2.0 || number == 3.0 => {
                        self.builder.dimensions = number as u32;
                    }
                    (word, place) => return Err(place.error(format!("expected 2 or 3, found {}", word.text()))),
                }
                if !self.builder.operations.is_empty() {
                    return Err(
                        place.error("expected `dimensions` before the first expression, found it after: move it up")
                    );
                }
            }
            (Word::Name(word), _) if word == "fields" => {
                while let Word::Name(_) = self.peek().0 {
                    let index = self.builder.fields.len();
                    let (name, place) = self.new_name()?;
                    if index >= FIELDS_MAX {
                        return Err(place.error(format!("a rule has at most {FIELDS_MAX} fields")));
                    }
                    self.names.insert(name.clone(), Meaning::Field(index as u16));
                    self.builder.fields.push(name);
                    self.next.push(None);
                }
                if let (Word::Sign(","), place) = self.peek() {
                    return Err(place.error(
                        "expected the next name or the end of the line, found `,`: names are \
                                            separated by spaces, `fields u v`",
                    ));
                }
            }
            (Word::Name(word), _) if word == "param" => {
                let (name, place) = self.new_name()?;
                self.expect("=")?;
                let negative = self.accept("-");
                let value = match self.take() {
                    (Word::Number(number), _) => {
                        if negative {
                            -number
                        } else {
                            number
                        }
                    }
                    (word, place) => {
                        return Err(place.error(format!(
                            "expected the default value of `{name}`, a number, found {}",
                            word.text()
                        )));
                    }
                };
                let index = self.builder.parameters.len();
                if index >= PARAMETERS_MAX {
                    return Err(place.error(format!("a rule has at most {PARAMETERS_MAX} parameters")));
                }
                self.names.insert(name.clone(), Meaning::Parameter(index as u16));
                self.builder.parameters.push(Parameter { name, value });
            }
            (Word::Name(word), _) if word == "let" => {
                let (name, _) = self.new_name()?;
                self.expect("=")?;
                let value = self.expression()?;
                self.names.insert(name, Meaning::Let(value));
            }
            (Word::Next(name), place) => {
                let Some(Meaning::Field(field)) = self.names.get(&name).copied() else {
                    return Err(place.error(format!("`{name}` is not a field: {}", self.fields_known())));
                };
                self.expect("=")?;
                let value = self.expression()?;
                if self.next[usize::from(field)].replace(value).is_some() {
                    return Err(place.error(format!("expected one update of `{name}`, found a second: remove one")));
                }
            }
            (word, place) => {
                let expected = "expected `fields`, `param`, `let`, `dimensions`, or the update of a field (`u' = …`)";
                return Err(place.error(format!("{expected}, found {}", word.text())));
            }
        }
        self.end()
    }

    /// For messages: the declared fields, or how to declare them.
    fn fields_known(&self) -> String {
        let fields = &self.builder.fields;
        if fields.is_empty() {
            "expected a line `fields` with their names before this, such as `fields u v`, found none".into()
        } else {
            format!("expected one of {}", fields.join(", "))
        }
    }

    fn new_name(&mut self) -> Result<(String, Place), RuleError> {
        match self.take() {
            (Word::Name(name), place) => {
                let taken = KEYWORDS.contains(&name.as_str())
                    || STENCILS.contains(&name.as_str())
                    || FUNCTIONS.iter().any(|(function, _)| *function == name);
                if taken || self.names.contains_key(&name) {
                    return Err(place.error(format!("the name `{name}` is taken: choose another")));
                }
                Ok((name, place))
            }
            (word, place) => Err(place.error(format!("expected a name, found {}", word.text()))),
        }
    }

    // ---- expressions, by precedence, lowest first

    fn expression(&mut self) -> Result<Value, RuleError> {
        let place = self.peek().1;
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(place.error(format!("more than {DEPTH_MAX} nested parentheses: name a part of it with `let`")));
        }
        let value = self.chain(0);
        self.depth -= 1;
        value
    }

    /// A left-associative chain of operators of one precedence level.
    fn chain(&mut self, level: usize) -> Result<Value, RuleError> {
        const LEVELS: [&[&str]; 5] = [&["||"], &["&&"], &["<", "<=", ">", ">=", "==", "!="], &["+", "-"], &["*", "/"]];
        if level == LEVELS.len() {
            return self.unary();
        }
        let mut left = self.chain(level + 1)?;
        while let (Word::Sign(sign), place) = self.peek() {
            let sign = *sign;
            if !LEVELS[level].contains(&sign) {
                break;
            }
            self.at += 1;
            let right = self.chain(level + 1)?;
            left = self.binary(sign, left, right, place)?;
        }
        Ok(left)
    }

    fn binary(&mut self, sign: &str, left: Value, right: Value, place: Place) -> Result<Value, RuleError> {
        if sign == "/" && self.builder.constant(right) == Some(0.0) {
            return Err(place.error("division by zero"));
        }
        let operation = match sign {
            "||" => Operation::Or(left, right),
            "&&" => Operation::And(left, right),
            "<" => Operation::Less(left, right),
            "<=" => Operation::LessEqual(left, right),
            ">" => Operation::Less(right, left),
            ">=" => Operation::LessEqual(right, left),
            "==" => Operation::Equal(left, right),
            "!=" => {
                let equal = self.push(Operation::Equal(left, right), place)?;
                Operation::Not(equal)
            }
            "+" => Operation::Add(left, right),
            "-" => Operation::Subtract(left, right),
            "*" => Operation::Multiply(left, right),
            _ => Operation::Divide(left, right),
        };
        self.push(operation, place)
    }

    fn push(&mut self, operation: Operation, place: Place) -> Result<Value, RuleError> {
        self.builder.push(operation, place)
    }

    fn unary(&mut self) -> Result<Value, RuleError> {
        // A loop, not recursion: a long row of signs must not overflow the stack.
        let mut signs = Vec::new();
        while let (Word::Sign(sign @ ("-" | "!" | "+")), place) = self.peek() {
            signs.push((*sign, place));
            self.at += 1;
        }
        let mut value = self.power()?;
        for (sign, place) in signs.into_iter().rev() {
            value = match sign {
                "-" => self.push(Operation::Negate(value), place)?,
                "!" => self.push(Operation::Not(value), place)?,
                _ => value,
            };
        }
        Ok(value)
    }

    /// An integer power, which binds tighter than signs before it: expanded to multiplications, left-associative.
    fn power(&mut self) -> Result<Value, RuleError> {
        let value = self.primary()?;
        if !self.accept("^") {
            return Ok(value);
        }
        let (power, place) = match self.take() {
            (Word::Number(power), place) if power.fract() == 0.0 && (0.0..=POWER_MAX).contains(&power) => {
                (power as usize, place)
            }
            (word, place) => {
                let expected = format!("expected a whole number from 0 to {POWER_MAX} as the power");
                return Err(
                    place.error(format!("{expected}, found {}: write products, `x * x`, or `sqrt`", word.text()))
                );
            }
        };
        if self.is("^") {
            return Err(self.peek().1.error("expected one power, found another: use parentheses, `(x^2)^3`"));
        }
        if power == 0 {
            return self.push(Operation::Constant(1.0f32.to_bits()), place);
        }
        (1..power).try_fold(value, |product, _| self.push(Operation::Multiply(product, value), place))
    }

    fn primary(&mut self) -> Result<Value, RuleError> {
        match self.take() {
            (Word::Number(number), place) => self.push(Operation::Constant(number.to_bits()), place),
            (Word::Sign("("), _) => {
                let value = self.expression()?;
                self.expect(")")?;
                Ok(value)
            }
            (Word::Name(name), place) if STENCILS.contains(&name.as_str()) && self.is("(") => {
                self.stencil(&name, place)
            }
            (Word::Name(name), place) if self.is("(") => self.call(&name, place),
            (Word::Name(name), place) => match self.names.get(&name).copied() {
                Some(Meaning::Field(field)) => {
                    let offset = if self.accept("[") { self.offset()? } else { [0; 3] };
                    self.push(Operation::Load { field, offset }, place)
                }
                Some(Meaning::Parameter(index)) => self.push(Operation::Parameter(index), place),
                Some(Meaning::Let(value)) => Ok(value),
                None => {
                    let mut known: Vec<&str> = self.names.keys().map(String::as_str).collect();
                    if known.is_empty() {
                        let first = format!("begin with `fields {name}` if it is a field, `param {name} = 1` if not");
                        return Err(place.error(format!("unknown name `{name}`: {first}")));
                    }
                    known.sort_unstable();
                    Err(place.error(format!("unknown name `{name}`: expected one of {}", known.join(", "))))
                }
            },
            (Word::Next(name), place) => {
                Err(place
                    .error(format!("`{name}'` is the next value, which expressions cannot read: expected `{name}`")))
            }
            (word, place) => {
                Err(place.error(format!("expected a number, a name, a function or `(`, found {}", word.text())))
            }
        }
    }

    /// An offset `[x, y]` or `[x, y, z]`, after its opening bracket.
    fn offset(&mut self) -> Result<[i8; 3], RuleError> {
        let mut offset = [0i8; 3];
        let dimensions = self.builder.dimensions as usize;
        for (axis, cells) in offset.iter_mut().enumerate().take(dimensions) {
            if axis > 0 {
                self.expect(",")?;
            }
            let negative = self.accept("-");
            match self.take() {
                (Word::Number(number), place) if number.fract() == 0.0 => {
                    if number > OFFSET_MAX as f32 {
                        return Err(
                            place.error(format!("expected an offset of at most {OFFSET_MAX} cells, found {number}"))
                        );
                    }
                    *cells = if negative { -(number as i8) } else { number as i8 };
                }
                (word, place) => {
                    return Err(place.error(format!("expected a whole number of cells, found {}", word.text())));
                }
            }
        }
        if self.is(",") {
            let place = self.peek().1;
            return Err(
                place.error(format!("expected {dimensions} offsets, found more: for 3D say `dimensions 3` first"))
            );
        }
        self.expect("]")?;
        Ok(offset)
    }

    fn call(&mut self, name: &str, place: Place) -> Result<Value, RuleError> {
        let Some(&(_, count)) = FUNCTIONS.iter().find(|(function, _)| *function == name) else {
            let mut known: Vec<&str> = FUNCTIONS.iter().map(|(name, _)| *name).chain(STENCILS).collect();
            known.sort_unstable();
            return Err(place.error(format!("unknown function `{name}`: expected one of {}", known.join(", "))));
        };
        self.expect("(")?;
        let mut values = Vec::with_capacity(count);
        for at in 0..count {
            if at > 0 {
                self.expect(",")?;
            }
            values.push(self.expression()?);
        }
        self.expect(")")?;
        let operation = match name {
            "abs" => Operation::Absolute(values[0]),
            "sqrt" => Operation::SquareRoot(values[0]),
            "exp" => Operation::Exponential(values[0]),
            "floor" => Operation::Floor(values[0]),
            "min" => Operation::Minimum(values[0], values[1]),
            "max" => Operation::Maximum(values[0], values[1]),
            _ => Operation::Select(values[0], values[1], values[2]),
        };
        self.push(operation, place)
    }

    /// A stencil function. The order of summation is fixed: per axis, the lower neighbour, then the upper one.
    fn stencil(&mut self, name: &str, place: Place) -> Result<Value, RuleError> {
        self.expect("(")?;
        let field = match self.take() {
            (Word::Name(field), at) => match self.names.get(&field) {
                Some(Meaning::Field(index)) => *index,
                _ => {
                    return Err(at.error(format!("`{name}` takes a field: {}", self.fields_known())));
                }
            },
            (word, at) => return Err(at.error(format!("`{name}` takes a field, found {}", word.text()))),
        };
        if !matches!(self.peek().0, Word::Sign(")") | Word::End) {
            let (word, at) = self.peek();
            return Err(at.error(format!(
                "`{name}` takes the name of a field and nothing else, found {} after it: let a field become the expression, \
                 and take `{name}` of that field",
                word.text()
            )));
        }
        self.expect(")")?;
        let dimensions = self.builder.dimensions as usize;
        let beside = |axis: usize, step: i8| {
            let mut offset = [0; 3];
            offset[axis] = step;
            Operation::Load { field, offset }
        };
        match name {
            "lap" => {
                let mut sum = None;
                for axis in 0..dimensions {
                    for step in [-1, 1] {
                        let value = self.push(beside(axis, step), place)?;
                        sum = Some(match sum {
                            None => value,
                            Some(sum) => self.push(Operation::Add(sum, value), place)?,
                        });
                    }
                }
                let centre = self.push(beside(0, 0), place)?;
                let weight = self.push(Operation::Constant((-2.0 * dimensions as f32).to_bits()), place)?;
                let weighted = self.push(Operation::Multiply(weight, centre), place)?;
                let sum = sum.unwrap_or(centre);
                self.push(Operation::Add(weighted, sum), place)
            }
            "neighbours" => {
                let mut sum = None;
                let span = |axis: usize| if axis < dimensions { -1..=1i8 } else { 0..=0 };
                for z in span(2) {
                    for y in span(1) {
                        for x in span(0) {
                            if [x, y, z] == [0; 3] {
                                continue;
                            }
                            let value = self.push(Operation::Load { field, offset: [x, y, z] }, place)?;
                            sum = Some(match sum {
                                None => value,
                                Some(sum) => self.push(Operation::Add(sum, value), place)?,
                            });
                        }
                    }
                }
                sum.ok_or_else(|| place.error("a cell without neighbours"))
            }
            _ => {
                let axis = ["dx", "dy", "dz"].iter().position(|function| *function == name).unwrap_or(0);
                if axis >= dimensions {
                    return Err(place.error("`dz` needs three dimensions: say `dimensions 3` first"));
                }
                let after = self.push(beside(axis, 1), place)?;
                let before = self.push(beside(axis, -1), place)?;
                let difference = self.push(Operation::Subtract(after, before), place)?;
                let half = self.push(Operation::Constant(0.5f32.to_bits()), place)?;
                self.push(Operation::Multiply(half, difference), place)
            }
        }
    }
}
