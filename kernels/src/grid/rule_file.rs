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
//! cells, bounded in length, in which nothing is computed twice. Next: `rule_file/parse.rs`, `rule_file/program.rs`,
//! `rule_file/interpreter.rs`.
use std::fmt;
use std::sync::Arc;

use super::{Grid, GridError, scalar};
pub(crate) use interpreter::Interpreter;
pub use program::{Operation, Program, Value};

mod interpreter;
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

/// The rule of a file, with values for its parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct TextRule {
    program: Arc<Program>,
    parameters: Vec<f32>,
}

impl TextRule {
    /// With the usual values.
    ///
    /// # Errors
    /// As [`parse`].
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let program = parse(text)?;
        let parameters = program.parameters().iter().map(|parameter| parameter.value).collect();
        Ok(Self { program: Arc::new(program), parameters })
    }

    /// The operations.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The parameters' values, in the order of the program.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Sets a parameter.
    ///
    /// # Errors
    /// There is none of that name, or the value is infinite or no number.
    pub fn set(&mut self, name: &str, value: f32) -> Result<(), GridError> {
        let error = |what| Err(GridError::Parameter { rule: NAME, what });
        let known = self.program.parameters();
        let Some(at) = known.iter().position(|parameter| parameter.name == name) else {
            let known: Vec<&str> = known.iter().map(|parameter| parameter.name.as_str()).collect();
            let known = if known.is_empty() { "it has none".into() } else { format!("it has {}", known.join(", ")) };
            return error(format!("there is no parameter `{name}`: {known}"));
        };
        if !value.is_finite() {
            return error(format!("{name} = {value}: a number is needed"));
        }
        self.parameters[at] = value;
        Ok(())
    }

    /// That its formulas are numbers with these parameters.
    ///
    /// # Errors
    /// Where something is divided by zero, infinite or no number, whatever the cells hold.
    pub fn check_numbers(&self) -> Result<(), RuleError> {
        self.program.check(&self.parameters)
    }

    pub(crate) fn check(&self, grid: &Grid) -> Result<(), GridError> {
        self.check_numbers().map_err(|wrong| GridError::Parameter { rule: NAME, what: wrong.to_string() })?;
        let dimensions = self.program.dimensions() as usize;
        if dimensions != grid.dimensions() {
            let what = format!("it is for {dimensions} dimensions (`dimensions`), the grid has {}", grid.dimensions());
            return Err(GridError::Parameter { rule: NAME, what });
        }
        scalar::check_faces(grid, NAME)
    }
}

pub(crate) const NAME: &str = "rule file";

#[cfg(test)]
mod tests;
