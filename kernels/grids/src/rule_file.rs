//! Rule files: a small language of fields, parameters and stencil update expressions, compiled once and run fused.
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
//! A field's name alone is the cell itself, `u[1, 0]` its neighbour (x, y and, in 3D, z). Comparisons give 1 or 0. All
//! cells are updated simultaneously from the previous state. A file compiles to a [`Program`]: a list of operations on
//! rows of cells, bounded in length, with common subexpressions merged. Next: `rule_file/parse.rs`,
//! `rule_file/program.rs`, `rule_file/interpreter.rs`.
use std::sync::Arc;

use crate::error::GridError;
use crate::expression::TextError;
use crate::grid::Grid;
use crate::scalar;

pub(crate) use interpreter::Interpreter;
pub use limits::{FIELDS_MAX, OPERATIONS_MAX, PARAMETERS_MAX, TEXT_BYTES_MAX};
pub use program::{Operation, Parameter, Program, Value};

mod interpreter;
pub(crate) mod limits;
mod parse;
mod program;

/// Parses and compiles a rule file.
///
/// # Errors
/// The file is invalid; with line, column, and what was expected and found.
pub fn parse(text: &str) -> Result<Program, TextError> {
    parse::program(text)
}

/// A compiled rule file with values for its parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct TextRule {
    program: Arc<Program>,
    parameters: Vec<f32>,
}

impl TextRule {
    /// Parses a rule file, with the default parameter values.
    ///
    /// # Errors
    /// As [`parse`].
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let program = parse(text)?;
        let parameters = program.parameters().iter().map(|parameter| parameter.value).collect();
        Ok(Self { program: Arc::new(program), parameters })
    }

    /// The compiled program.
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
    /// There is no parameter of that name, or the value is NaN or infinite.
    pub fn set(&mut self, name: &str, value: f32) -> Result<(), GridError> {
        let error = |what| Err(GridError::Parameter { rule: NAME, what });
        let known = self.program.parameters();
        let Some(at) = known.iter().position(|parameter| parameter.name == name) else {
            let known: Vec<&str> = known.iter().map(|parameter| parameter.name.as_str()).collect();
            let known = if known.is_empty() {
                "the rule has none".into()
            } else {
                format!("expected one of {}", known.join(", "))
            };
            return error(format!("unknown parameter `{name}`: {known}"));
        };
        if !value.is_finite() {
            return error(format!("expected a finite number, found {name} = {value}"));
        }
        self.parameters[at] = value;
        Ok(())
    }

    /// Checks that with these parameters every formula can be finite.
    ///
    /// # Errors
    /// A needed subexpression is a division by zero, NaN or infinite whatever the cells hold; with its position.
    pub fn check_numbers(&self) -> Result<(), TextError> {
        self.program.check(&self.parameters)
    }

    pub(crate) fn check(&self, grid: &Grid) -> Result<(), GridError> {
        self.check_numbers().map_err(|wrong| GridError::Parameter { rule: NAME, what: wrong.to_string() })?;
        let dimensions = self.program.dimensions() as usize;
        if dimensions != grid.dimensions() {
            let what =
                format!("the rule has {dimensions} dimensions, the grid {}: set `dimensions`", grid.dimensions());
            return Err(GridError::Parameter { rule: NAME, what });
        }
        scalar::check_faces(grid, NAME)
    }
}

/// The rule's name in messages.
pub const NAME: &str = "rule file";

#[cfg(test)]
mod tests;
