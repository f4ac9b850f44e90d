//! Typed access to a job file's TOML. Every error has line, column and key, and says what was expected and found.
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use kernels_grids::expression::shortened;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::SimulationError;
use crate::expression::{Expression, Names};

/// The text of a job file, and the names its expressions may use.
pub(super) struct Document<'a> {
    /// The file's name in messages.
    pub(super) file: &'a str,
    pub(super) text: &'a str,
    pub(super) names: Names,
}

impl Document<'_> {
    /// An error at a byte offset of the text.
    pub(super) fn error(&self, byte: usize, key: &str, what: impl Into<String>) -> SimulationError {
        let before = self.text.get(..byte.min(self.text.len())).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        SimulationError::Key { file: self.file.into(), line, column, key: key.into(), what: what.into() }
    }

    /// Parses the text as TOML.
    pub(super) fn parse<'a>(&self, text: &'a str) -> Result<DeTable<'a>, SimulationError> {
        DeTable::parse(text).map(Spanned::into_inner).map_err(|error| {
            self.error(error.span().map_or(0, |span| span.start), "", format!("not TOML: {}", error.message()))
        })
    }
}

/// A table that tracks which keys were read; [`Keys::done`] rejects the others.
pub(super) struct Keys<'a> {
    document: &'a Document<'a>,
    table: &'a DeTable<'a>,
    path: String,
    start: usize,
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub(super) fn root(document: &'a Document<'a>, table: &'a DeTable<'a>) -> Self {
        Self { document, table, path: String::new(), start: 0, asked: RefCell::default() }
    }

    /// The value of a key, if present.
    pub(super) fn get(&self, key: &str) -> Option<Item<'a>> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.any(key)
    }

    /// The value of a key, without marking it as read.
    fn any(&self, key: &str) -> Option<Item<'a>> {
        let (_, value) = self.table.iter().find(|(name, _)| name.get_ref() == key)?;
        Some(Item { document: self.document, value, path: joined(&self.path, key) })
    }

    /// All keys with their values.
    pub(super) fn all(&self) -> Vec<(&'a str, Item<'a>)> {
        let keys = self.table.iter().map(|(name, _)| name.get_ref().as_ref());
        keys.filter_map(|name: &'a str| Some((name, self.any(name)?))).collect()
    }

    /// The value of a required key.
    pub(super) fn need(&self, key: &str, expected: &str) -> Result<Item<'a>, SimulationError> {
        self.get(key).ok_or_else(|| self.missing(&[key], format!("expected `{key}`, {expected}, found none")))
    }

    /// The error that none of `keys` is present: located at an unread key with a similar name if there is one, else at
    /// the table.
    pub(super) fn missing(&self, keys: &[&str], what: impl Into<String>) -> SimulationError {
        let asked = self.asked.borrow();
        let strays = self.table.iter().filter(|(name, _)| !asked.contains(name.get_ref().as_ref()));
        for (name, _) in strays {
            if let Some(key) = nearest(name.get_ref(), keys.iter().copied()) {
                let what = format!("unknown key (did you mean `{key}`?): {}", what.into());
                return self.document.error(name.span().start, &joined(&self.path, name.get_ref()), what);
            }
        }
        self.error(what)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// An error about the table as a whole.
    pub(super) fn error(&self, what: impl Into<String>) -> SimulationError {
        self.document.error(self.start, &self.path, what)
    }

    /// Rejects keys that were not read.
    pub(super) fn done(self) -> Result<(), SimulationError> {
        let asked = self.asked.into_inner();
        let unknown = self.table.iter().find(|(name, _)| !asked.contains(name.get_ref().as_ref()));
        let Some((name, _)) = unknown else { return Ok(()) };
        let known: Vec<&str> = asked.iter().map(String::as_str).collect();
        let path = joined(&self.path, name.get_ref());
        let there = |key: &str| self.table.iter().any(|(name, _)| name.get_ref() == key);
        let meant = nearest(name.get_ref(), known.iter().copied().filter(|key| !there(key)));
        let meant = meant.map_or_else(String::new, |key| format!(" (did you mean `{key}`?)"));
        let what = format!("unknown key{meant}: expected one of {}", known.join(", "));
        Err(self.document.error(name.span().start, &path, what))
    }
}

/// Writes a value in canonical form, without positions, comments and whitespace: equal values give equal text.
pub(super) fn write(value: &DeValue<'_>, to: &mut String) {
    use std::fmt::Write;
    match value {
        DeValue::Table(table) => {
            for (name, value) in table {
                let _ = write!(to, "{{{:?}:", name.get_ref());
                write(value.get_ref(), to);
                to.push('}');
            }
        }
        DeValue::Array(items) => {
            for item in items.iter() {
                to.push('[');
                write(item.get_ref(), to);
                to.push(']');
            }
        }
        DeValue::String(text) => {
            let _ = write!(to, "{text:?}");
        }
        DeValue::Integer(number) => to.push_str(number.as_str()),
        DeValue::Float(number) => to.push_str(number.as_str()),
        DeValue::Boolean(yes) => to.push_str(if *yes { "true" } else { "false" }),
        DeValue::Datetime(time) => {
            let _ = write!(to, "{time}");
        }
    }
}

/// A value with its position in the file.
#[derive(Clone)]
pub(super) struct Item<'a> {
    document: &'a Document<'a>,
    value: &'a Spanned<DeValue<'a>>,
    path: String,
}

impl<'a> Item<'a> {
    pub(super) fn error(&self, what: impl Into<String>) -> SimulationError {
        self.document.error(self.value.span().start, &self.path, what)
    }

    /// The error that something else was found than `expected`.
    pub(super) fn expected(&self, expected: &str) -> SimulationError {
        self.error(format!("expected {expected}, found {}", self.found()))
    }

    fn found(&self) -> String {
        match self.value.get_ref() {
            DeValue::String(text) => format!("the text {:?}", shortened(text)),
            DeValue::Integer(number) => format!("the number {}", shortened(&number.to_string())),
            DeValue::Float(number) => format!("the number {}", shortened(number.as_str())),
            DeValue::Boolean(flag) => flag.to_string(),
            DeValue::Datetime(_) => "a date".into(),
            DeValue::Array(list) => format!("a list of length {}", list.len()),
            DeValue::Table(_) => "a table".into(),
        }
    }

    pub(super) fn as_text(&self) -> Option<&'a str> {
        self.value.get_ref().as_str()
    }

    pub(super) fn text(&self, expected: &str) -> Result<&'a str, SimulationError> {
        self.as_text().ok_or_else(|| self.expected(expected))
    }

    /// The meaning of a keyword, one of `words`.
    pub(super) fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T, SimulationError> {
        let found = self.as_text().and_then(|text| words.iter().find(|(word, _)| *word == text));
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let all: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
            self.expected(&all.join(" or "))
        })
    }

    pub(super) fn flag(&self) -> Result<bool, SimulationError> {
        self.value.get_ref().as_bool().ok_or_else(|| self.expected("true or false"))
    }

    fn as_number(&self) -> Option<f64> {
        match self.value.get_ref() {
            DeValue::Integer(number) => {
                i64::from_str_radix(number.as_str(), number.radix()).ok().map(|number| number as f64)
            }
            DeValue::Float(number) => number.as_str().parse().ok(),
            DeValue::String(_) | DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
                None
            }
        }
    }

    /// A finite number, or an expression of constants that is one.
    pub(super) fn number(&self, expected: &str) -> Result<f64, SimulationError> {
        if let Some(text) = self.as_text() {
            let expression = self.parsed(text, &self.document.names)?;
            let Some(number) = expression.constant() else {
                return Err(self.error(format!("expected {expected}, found an expression that differs between cells")));
            };
            return self.finite(number, expected);
        }
        let number = self.as_number().ok_or_else(|| self.expected(expected))?;
        self.finite(number, expected)
    }

    fn finite(&self, number: f64, expected: &str) -> Result<f64, SimulationError> {
        let fits = number.is_finite() && (number as f32).is_finite();
        if fits { Ok(number) } else { Err(self.error(format!("expected {expected}, found {number}"))) }
    }

    /// A number, or an expression of the coordinates.
    pub(super) fn expression(&self) -> Result<Expression, SimulationError> {
        match self.as_text() {
            Some(text) => self.parsed(text, &self.document.names),
            None => self.number("a number, or an expression such as \"sin(2*pi*x/nx)\"").map(Expression::number),
        }
    }

    /// An expression of these names.
    pub(super) fn parsed(&self, text: &str, names: &Names) -> Result<Expression, SimulationError> {
        Expression::parse(text, names)
            .map_err(|wrong| self.error(format!("character {} of the expression: {}", wrong.column, wrong.what)))
    }

    /// An integer within bounds.
    pub(super) fn whole(&self, range: RangeInclusive<u64>) -> Result<u64, SimulationError> {
        let expected = || {
            let (low, high) = (range.start(), range.end());
            self.expected(&format!("a whole number from {low} to {high}"))
        };
        let DeValue::Integer(number) = self.value.get_ref() else { return Err(expected()) };
        let number = u64::from_str_radix(number.as_str(), number.radix()).ok();
        number.filter(|number| range.contains(number)).ok_or_else(expected)
    }

    pub(super) fn list(&self, expected: &str) -> Result<Vec<Self>, SimulationError> {
        let list = self.value.get_ref().as_array().ok_or_else(|| self.expected(expected))?;
        let item = |(at, value)| Self { document: self.document, value, path: format!("{}[{at}]", self.path) };
        Ok(list.iter().enumerate().map(item).collect())
    }

    pub(super) fn table(&self, expected: &str) -> Result<Keys<'a>, SimulationError> {
        self.as_table().ok_or_else(|| self.expected(expected))
    }

    pub(super) fn as_table(&self) -> Option<Keys<'a>> {
        let table = self.value.get_ref().as_table()?;
        let start = self.value.span().start;
        Some(Keys { document: self.document, table, path: self.path.clone(), start, asked: RefCell::default() })
    }
}

/// The most similar word to a misspelt one, if any is similar enough.
fn nearest<'w>(found: &str, words: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    let near = words.map(|word| (distance(found, word), word)).min()?;
    // Words of one or two letters are all similar to each other.
    let most = if near.1.len() < 3 { 0 } else { (near.1.len() / 3).max(1) };
    (near.0 <= most).then_some(near.1)
}

/// Damerau-Levenshtein distance (optimal string alignment): insertions, deletions, substitutions and adjacent swaps.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len().abs_diff(b.len()) > LETTERS_APART_MAX {
        return usize::MAX;
    }
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = changed.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// Words whose lengths differ by more are never similar, because keys are short.
const LETTERS_APART_MAX: usize = 8;

fn joined(path: &str, key: &str) -> String {
    let key = shortened(key);
    if path.is_empty() { key } else { format!("{path}.{key}") }
}
