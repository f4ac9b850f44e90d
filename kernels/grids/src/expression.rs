//! Expressions as text: one lexer and one grammar for rule files and job files, which compile the syntax tree in
//! their own ways.
//!
//! By precedence, lowest first: `||`, `&&`, comparisons, `+ -`, `* /`, signs (`- ! +`), `^` (to the right of which
//! signs are allowed). Operators of one level associate to the left, `^` to the right. A tree is a list in postfix
//! order, operands before their operator: a long sum or row of signs takes no recursion, here or in a compiler.
use std::fmt;
use std::str::FromStr;

/// Maximum nesting of parentheses, calls and powers.
pub const DEPTH_MAX: usize = 64;
/// Maximum offset of a neighbour in cells along each axis.
pub const OFFSET_MAX: u32 = 8;

/// A position in a text, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Line of the text.
    pub line: usize,
    /// Character of the line.
    pub column: usize,
}

impl Place {
    /// An error at this position.
    pub fn error(self, what: impl Into<String>) -> TextError {
        TextError { line: self.line, column: self.column, what: what.into() }
    }
}

/// Why and where a text was rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {what}")]
pub struct TextError {
    /// Counted from 1.
    pub line: usize,
    /// In characters, counted from 1.
    pub column: usize,
    /// What was expected and what was found.
    pub what: String,
}

/// A word of a text. Its display form is for messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Word<'a> {
    /// A name.
    Name(&'a str),
    /// A name with a prime: the next value of a field.
    Next(&'a str),
    /// A number as it is written.
    Number(&'a str),
    /// An operator, a bracket, a comma.
    Sign(&'static str),
    /// The end of a text, named for messages.
    End(&'static str),
}

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "`{}`", shortened(name)),
            Self::Next(name) => write!(f, "`{}'`", shortened(name)),
            Self::Number(number) => write!(f, "the number {}", shortened(number)),
            Self::Sign(sign) => write!(f, "`{sign}`"),
            Self::End(text) => write!(f, "the end of the {text}"),
        }
    }
}

/// A node of a syntax tree. Its display form is for messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Node<'a> {
    /// A number as it is written, for [`number`] and [`whole`].
    Number(&'a str),
    /// A name, with the offset `[x, y, z]` after it if there is one.
    Name(&'a str, Option<[i8; 3]>),
    /// An operator or a function, and the number of its operands: the nodes before it.
    Apply(&'a str, usize),
}

impl fmt::Display for Node<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Number(number) => Word::Number(number).fmt(f),
            Self::Name(name, _) | Self::Apply(name, _) => Word::Name(name).fmt(f),
        }
    }
}

/// The value of a number, as `f32` or `f64`.
///
/// # Errors
/// It is beyond the type's range.
pub fn number<N: FromStr + Into<f64> + Copy>(text: &str, place: Place) -> Result<N, TextError> {
    let finite = text.parse().ok().filter(|number: &N| (*number).into().is_finite());
    finite.ok_or_else(|| {
        let (bits, found) = (8 * size_of::<N>(), shortened(text));
        place.error(format!("expected a number within the range of {bits}-bit floats, found {found}"))
    })
}

/// The value of a number if it is whole and at most `u32::MAX`.
pub fn whole(text: &str) -> Option<u32> {
    let number: f64 = text.parse().ok()?;
    (number.fract() == 0.0 && number <= u32::MAX.into()).then_some(number as u32)
}

/// Truncates a text to keep messages readable.
pub fn shortened(text: &str) -> String {
    const SHOWN: usize = 60;
    let mut short: String = text.chars().take(SHOWN).collect();
    if text.chars().nth(SHOWN).is_some() {
        short.push('…');
    }
    short
}

/// Longest first, for greedy matching.
const SIGNS: [&str; 20] =
    ["<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "^", "(", ")", "[", "]", ",", "=", "<", ">", "!"];
/// Binary operators by precedence, lowest first.
const LEVELS: [&[&str]; 5] = [&["||"], &["&&"], &["<", "<=", ">", ">=", "==", "!="], &["+", "-"], &["*", "/"]];

/// The words of a text, read one after the other.
pub struct Words<'a> {
    /// Invariant: the last word is [`Word::End`], and the only one.
    words: Vec<(Word<'a>, Place)>,
    at: usize,
}

impl<'a> Words<'a> {
    /// Splits a text, which is the given line and is called `kind` in messages.
    ///
    /// # Errors
    /// A character belongs to no word, or a number is malformed.
    pub fn new(text: &'a str, line: usize, kind: &'static str) -> Result<Self, TextError> {
        let place = |rest: &str| Place { line, column: text[..text.len() - rest.len()].chars().count() + 1 };
        let mut words = Vec::new();
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let name = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let (word, length) = if first.is_ascii_digit() || first == '.' {
                let number = &rest[..number_length(rest)];
                if number.parse::<f64>().is_err() {
                    let what = format!("expected a number such as 0.16 or 2e-3, found `{}`", shortened(number));
                    return Err(place(rest).error(what));
                }
                (Word::Number(number), number.len())
            } else if rest[name..].starts_with('\'') && name > 0 {
                (Word::Next(&rest[..name]), name + 1)
            } else if name > 0 {
                (Word::Name(&rest[..name]), name)
            } else if let Some(sign) = SIGNS.into_iter().find(|sign| rest.starts_with(sign)) {
                (Word::Sign(sign), sign.len())
            } else {
                let what = format!("expected a name, a number or an operator, found `{}`", first.escape_debug());
                return Err(place(rest).error(what));
            };
            words.push((word, place(rest)));
            rest = rest[length..].trim_start();
        }
        words.push((Word::End(kind), place(&text[text.trim_end().len()..])));
        Ok(Self { words, at: 0 })
    }

    /// The next word.
    pub fn peek(&self) -> (Word<'a>, Place) {
        self.words[self.at]
    }

    /// Takes the next word.
    pub fn take(&mut self) -> (Word<'a>, Place) {
        let taken = self.peek();
        self.at = (self.at + 1).min(self.words.len() - 1);
        taken
    }

    /// Takes the next word if it is this sign.
    pub fn accept(&mut self, sign: &str) -> bool {
        let there = matches!(self.peek().0, Word::Sign(next) if next == sign);
        self.at += usize::from(there);
        there
    }

    /// Takes this sign.
    ///
    /// # Errors
    /// Another word is next.
    pub fn expect(&mut self, sign: &str) -> Result<(), TextError> {
        if self.accept(sign) {
            return Ok(());
        }
        let (word, place) = self.peek();
        Err(place.error(format!("expected `{sign}`, found {word}")))
    }

    /// Whether all words are taken.
    pub fn is_empty(&self) -> bool {
        self.at + 1 == self.words.len()
    }

    /// Checks that all words are taken, after an expression.
    ///
    /// # Errors
    /// A word is left.
    pub fn end(&self) -> Result<(), TextError> {
        if self.is_empty() {
            return Ok(());
        }
        let ((word, place), (end, _)) = (self.peek(), self.words[self.words.len() - 1]);
        Err(place.error(format!("expected an operator or {end}, found {word}")))
    }

    /// Takes an expression: its syntax tree in postfix order. `functions` are those with one argument, with two, and so
    /// on; a name may have an offset of `axes` numbers, none if that is 0.
    ///
    /// # Errors
    /// The words are no expression, or it is too deep.
    pub fn expression(&mut self, functions: &[&[&str]], axes: usize) -> Result<Vec<(Node<'a>, Place)>, TextError> {
        let mut parser = Parser { words: self, functions, axes, depth: 0, nodes: Vec::new() };
        parser.chain(0)?;
        Ok(parser.nodes)
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

struct Parser<'a, 'w> {
    words: &'w mut Words<'a>,
    functions: &'w [&'w [&'w str]],
    axes: usize,
    depth: usize,
    nodes: Vec<(Node<'a>, Place)>,
}

impl Parser<'_, '_> {
    /// A chain of operators of one precedence level.
    fn chain(&mut self, level: usize) -> Result<(), TextError> {
        let Some(signs) = LEVELS.get(level) else { return self.signed() };
        self.chain(level + 1)?;
        while let (Word::Sign(sign), place) = self.words.peek()
            && signs.contains(&sign)
        {
            self.words.take();
            self.chain(level + 1)?;
            self.nodes.push((Node::Apply(sign, 2), place));
        }
        Ok(())
    }

    /// Signs before an operand and a power after it, which binds tighter.
    fn signed(&mut self) -> Result<(), TextError> {
        let mut signs = Vec::new();
        while let (Word::Sign(sign @ ("-" | "!" | "+")), place) = self.words.peek() {
            self.words.take();
            signs.push((Node::Apply(sign, 1), place));
        }
        self.operand()?;
        let place = self.words.peek().1;
        if self.words.accept("^") {
            self.nested(LEVELS.len())?;
            self.nodes.push((Node::Apply("^", 2), place));
        }
        self.nodes.extend(signs.into_iter().rev().filter(|(sign, _)| *sign != Node::Apply("+", 1)));
        Ok(())
    }

    /// What a parenthesis, a call or a power contains.
    fn nested(&mut self, level: usize) -> Result<(), TextError> {
        if self.depth == DEPTH_MAX {
            let what = format!("more than {DEPTH_MAX} nested parentheses or powers: use fewer");
            return Err(self.words.peek().1.error(what));
        }
        self.depth += 1;
        self.chain(level)?;
        self.depth -= 1;
        Ok(())
    }

    fn operand(&mut self) -> Result<(), TextError> {
        let (word, place) = self.words.take();
        match word {
            Word::Number(number) => self.nodes.push((Node::Number(number), place)),
            Word::Name(name) if self.words.accept("(") => {
                let Some(count) = self.functions.iter().position(|names| names.contains(&name)) else {
                    let mut known = self.functions.concat();
                    known.sort_unstable();
                    let known = known.join(", ");
                    return Err(place.error(format!("unknown function {word}: expected one of {known}")));
                };
                for _ in 0..count {
                    self.nested(0)?;
                    self.words.expect(",")?;
                }
                self.nested(0)?;
                self.words.expect(")")?;
                self.nodes.push((Node::Apply(name, count + 1), place));
            }
            Word::Name(name) => {
                let offset = self.offset()?;
                self.nodes.push((Node::Name(name, offset), place));
            }
            Word::Sign("(") => {
                self.nested(0)?;
                self.words.expect(")")?;
            }
            Word::Next(name) => {
                let what =
                    format!("{word} is the next value, which expressions cannot read: expected {}", Word::Name(name));
                return Err(place.error(what));
            }
            Word::Sign(_) | Word::End(_) => {
                return Err(place.error(format!("expected a number, a name, a function or `(`, found {word}")));
            }
        }
        Ok(())
    }

    /// A neighbour's offset after a name.
    fn offset(&mut self) -> Result<Option<[i8; 3]>, TextError> {
        if self.axes == 0 || !self.words.accept("[") {
            return Ok(None);
        }
        let mut offset = [0i8; 3];
        for (axis, cells) in offset.iter_mut().enumerate().take(self.axes) {
            if axis > 0 {
                self.words.expect(",")?;
            }
            let sign = if self.words.accept("-") { -1 } else { 1 };
            let (word, place) = self.words.take();
            let number = if let Word::Number(number) = word { whole(number) } else { None };
            *cells = match number {
                Some(number @ 0..=OFFSET_MAX) => sign * number as i8,
                Some(_) => {
                    return Err(place.error(format!("expected an offset of at most {OFFSET_MAX} cells, found {word}")));
                }
                None => return Err(place.error(format!("expected a whole number of cells, found {word}"))),
            };
        }
        let place = self.words.peek().1;
        if self.words.accept(",") {
            let axes = self.axes;
            return Err(
                place.error(format!("expected {axes} offsets, found more: a third needs the line `dimensions 3`"))
            );
        }
        self.words.expect("]")?;
        Ok(Some(offset))
    }
}
