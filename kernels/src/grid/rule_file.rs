//! Rules as text: fields, parameters and update expressions over neighbours, read once and run fused.
//!
//! ```text
//! # Gray-Scott: two substances that react and spread
//! fields u v
//! param du = 0.16
//! param dv = 0.08
//! param feed = 0.035
//! param kill = 0.065
//! let reaction = u * v * v
//! u' = u + du * lap(u) - reaction + feed * (1 - u)
//! v' = v + dv * lap(v) + reaction - (feed + kill) * v
//! ```
//!
//! A field's name alone is the cell itself, `u[1, 0]` its neighbour (x, y and, in three dimensions, z). Comparisons are 1 or
//! 0. All cells are updated at once, from the state before. A file becomes a [`Program`]: a list of operations on rows of
//! cells, bounded in length, in which nothing is computed twice. Next: `rule_file/parse.rs`, `rule_file/program.rs`.
use std::fmt;

pub use program::{Operation, Program, Scratch, Value};

mod lex;
mod parse;
mod program;

/// Bytes of a rule file at most: a page of formulas is a hundredth of it.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Fields of a rule at most: each is a grid of its own.
pub const FIELDS_MAX: usize = 16;
/// Parameters at most.
pub const PARAMETERS_MAX: usize = 64;
/// Operations at most: what a compiler for GPUs takes in a reasonable time.
pub const OPERATIONS_MAX: usize = 1000;
/// Parentheses and calls inside each other at most.
pub const DEPTH_MAX: usize = 64;
/// How far a rule may look along each axis.
pub const OFFSET_MAX: i32 = 8;

/// A parameter and its usual value.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// What it is where nobody says otherwise.
    pub value: f32,
}

/// Why a rule file was refused, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct RuleError {
    /// Counted from 1.
    pub line: usize,
    /// Character in the line, counted from 1.
    pub column: usize,
    /// What was expected and what was found.
    pub what: String,
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.what)
    }
}

/// Reads a rule file.
///
/// # Errors
/// What is wrong with it, where, and what was expected there.
pub fn parse(text: &str) -> Result<Program, RuleError> {
    parse::program(text)
}

#[cfg(test)]
mod tests;
