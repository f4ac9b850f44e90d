//! Why a job was rejected.
use std::path::PathBuf;

use kernels_grids::GridError;
use thiserror::Error;

/// Why a job was rejected.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs)]
pub enum SimulationError {
    #[error("{}: {what}", .path.display())]
    File { path: PathBuf, what: String },
    #[error("{file}, line {line}, column {column}{}: {what}", if .key.is_empty() { String::new() } else { format!(" ({key})") })]
    Key { file: String, line: usize, column: usize, key: String, what: String },
    #[error("invalid packed simulation: {what}")]
    Packed { what: String },
    #[error("unknown quantity {found:?}: expected one of {known}")]
    Quantity { found: String, known: String },
    #[error(transparent)]
    Grid(#[from] GridError),
}
