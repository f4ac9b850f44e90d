//! Why a weights file was rejected.
use std::path::PathBuf;

use crate::stage::StageError;

/// Why a weights file was rejected. No part of it is used then.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A part of a model in several files is not there.
    #[error("part {number} of {count} of the model is missing: expected {path}; fetch all parts (`meshnode pull`)")]
    MissingPart {
        /// Expected path of the part.
        path: PathBuf,
        /// Number of the part, from 1.
        number: usize,
        /// Parts of the model.
        count: usize,
    },
    /// Another program has an exclusive lock on the file.
    #[error("{path} is locked by a program that is writing it; try again when that program is done")]
    Locked {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file was modified after it was opened.
    #[error(
        "{path} changed after it was opened: expected {expected}; found {found}. Nothing more is loaded from it; loaded stages \
         keep running. Replace it with an intact file by a rename, as `meshnode pull` does, and serve it again"
    )]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Length and modification time when it was opened.
        expected: String,
        /// Length and modification time now.
        found: String,
    },
    /// A weight or a scale is NaN or infinite, or a scale is out of range.
    #[error("tensor {tensor:?}, {what}")]
    BadWeights {
        /// Name of the tensor.
        tensor: String,
        /// Position in the tensor, and what is wrong.
        what: String,
    },
    /// The file is shorter than its header requires.
    #[error(
        "the file is truncated: {what} needs bytes up to {need}, the file has {have}; fetch it again (`meshnode pull`)"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// End of the missing data: first byte position after it.
        need: u64,
        /// Length of the file.
        have: u64,
    },
    /// The file contradicts itself or violates its format.
    #[error("malformed weights file: {0}")]
    Malformed(String),
    /// A valid file with an unsupported feature.
    #[error("{0}")]
    Unsupported(String),
}

impl From<WeightsError> for StageError {
    fn from(error: WeightsError) -> Self {
        Self::Input(error.to_string())
    }
}
