//! Lexer of rule files: words with their positions.
use super::RuleError;

/// A position in the text, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) line: usize,
    pub(super) column: usize,
}

impl Place {
    pub(super) fn error(self, what: impl Into<String>) -> RuleError {
        RuleError { line: self.line, column: self.column, what: what.into() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Word {
    /// A name.
    Name(String),
    /// A name with a prime: the next value of a field.
    Next(String),
    Number(f32),
    /// An operator, a bracket, a comma.
    Sign(&'static str),
    /// The end of a line.
    End,
}

impl Word {
    /// Human-readable form, for messages.
    pub(super) fn text(&self) -> String {
        match self {
            Word::Name(name) => format!("`{name}`"),
            Word::Next(name) => format!("`{name}'`"),
            Word::Number(number) => format!("the number {number}"),
            Word::Sign(sign) => format!("`{sign}`"),
            Word::End => "the end of the line".into(),
        }
    }
}

/// Longest first, for greedy matching.
const SIGNS: [&str; 19] =
    ["<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "^", "(", ")", "[", "]", ",", "=", "<", ">"];
const NOT: &str = "!";

/// All words; each line that is not blank ends in [`Word::End`].
pub(super) fn words(text: &str) -> Result<Vec<(Word, Place)>, RuleError> {
    let mut words = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let before = words.len();
        let code = line.split('#').next().unwrap_or_default();
        let mut rest = code;
        while let Some(first) = rest.trim_start().chars().next() {
            rest = rest.trim_start();
            let column = code[..code.len() - rest.len()].chars().count() + 1;
            let place = Place { line: number + 1, column };
            let length = if first.is_ascii_digit() || first == '.' {
                let length = number_length(rest);
                let value: f32 = rest[..length].parse().map_err(|_| {
                    place.error(format!("expected a number such as 0.16 or 2e-3, found `{}`", &rest[..length]))
                })?;
                if !value.is_finite() {
                    return Err(
                        place.error(format!("expected a number within 32-bit floats, found {}", &rest[..length]))
                    );
                }
                words.push((Word::Number(value), place));
                length
            } else if first.is_ascii_alphabetic() || first == '_' {
                let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
                let name = rest[..length].to_owned();
                let prime = rest[length..].starts_with('\'');
                words.push((if prime { Word::Next(name) } else { Word::Name(name) }, place));
                length + usize::from(prime)
            } else if let Some(sign) = SIGNS.into_iter().chain([NOT]).find(|sign| rest.starts_with(sign)) {
                words.push((Word::Sign(sign), place));
                sign.len()
            } else {
                return Err(
                    place.error(format!("expected a name, a number or an operator, found `{}`", first.escape_debug()))
                );
            };
            rest = &rest[length..];
        }
        if words.len() > before {
            let column = code.trim_end().chars().count() + 1;
            words.push((Word::End, Place { line: number + 1, column }));
        }
    }
    Ok(words)
}

/// Length of a number: digits, a decimal point, an exponent with its sign.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let exponent = at > 0 && bytes[at - 1].eq_ignore_ascii_case(&b'e');
        let signed = matches!(bytes[at], b'+' | b'-') && exponent;
        if !(bytes[at].is_ascii_alphanumeric() || bytes[at] == b'.' || signed) {
            break;
        }
        at += 1;
    }
    at
}
