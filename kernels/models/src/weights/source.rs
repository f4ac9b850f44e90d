//! Source of a model's bytes: memory, or a file that is read in pieces.
//!
//! Files are not memory-mapped: accessing a page of a mapping past the end of a truncated file kills the process (SIGBUS),
//! whereas a read returns an error.
use std::fmt;
use std::fs::{File, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::error::WeightsError;

/// The bytes of a model.
#[derive(Debug)]
pub(super) enum Source {
    /// In memory.
    Memory(Bytes),
    /// In a file.
    File(OpenFile),
}

/// An open file with a shared advisory lock.
///
/// It refers to the open file, not to its name: a rename of another file onto the path has no effect.
#[derive(Debug)]
pub(super) struct OpenFile {
    file: File,
    path: PathBuf,
    /// Chunks from peers are being written into the file: its modification time changes, its length does not.
    filling: bool,
    opened: Stamp,
}

/// Detects whether a file was modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    /// Modification time in seconds and nanoseconds; `None` for a file that is being filled.
    written: Option<(i64, i64)>,
}

impl Source {
    /// Opens a file.
    ///
    /// # Errors
    /// It cannot be opened, or another program holds an exclusive lock.
    pub(super) fn open(path: &Path, filling: bool) -> Result<Self, WeightsError> {
        let failed = |source| WeightsError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => return Err(WeightsError::Locked { path: path.to_owned() }),
            // Some network file systems do not support locks; length and modification time are still compared.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let opened = Stamp::of(&file.metadata().map_err(failed)?, filling);
        Ok(Self::File(OpenFile { file, path: path.to_owned(), filling, opened }))
    }

    /// Path of the file; `None` if in memory.
    pub(super) fn path(&self) -> Option<&Path> {
        match self {
            Self::Memory(_) => None,
            Self::File(open) => Some(&open.path),
        }
    }

    /// Whether the file may have holes.
    pub(super) fn is_filling(&self) -> bool {
        match self {
            Self::Memory(_) => false,
            Self::File(open) => open.filling,
        }
    }

    /// Length when opened.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::File(open) => open.opened.bytes,
        }
    }

    /// Reads a byte range. Holes read as zeros.
    ///
    /// # Errors
    /// The range is out of bounds, or the file cannot be read.
    pub(super) fn read(&self, range: &Range<u64>) -> Result<Bytes, WeightsError> {
        let beyond = || {
            let what = format!("the range {}..{}", range.start, range.end);
            WeightsError::Truncated { what, need: range.end, have: self.len() }
        };
        let range = Some(range).filter(|r| r.start <= r.end && r.end <= self.len()).ok_or_else(beyond)?;
        let (Ok(start), Ok(end)) = (usize::try_from(range.start), usize::try_from(range.end)) else {
            return Err(beyond());
        };
        match self {
            Self::Memory(bytes) => Ok(bytes.slice(start..end)),
            Self::File(open) => open.read(range.start, end - start),
        }
    }

    /// See [`super::ModelFile::check_unchanged`].
    pub(super) fn check_unchanged(&self) -> Result<(), WeightsError> {
        match self {
            Self::Memory(_) => Ok(()),
            Self::File(open) => open.check_unchanged(),
        }
    }
}

impl OpenFile {
    fn read(&self, start: u64, count: usize) -> Result<Bytes, WeightsError> {
        let mut bytes = vec![0; count];
        match self.file.read_exact_at(&mut bytes, start) {
            Ok(()) => Ok(bytes.into()),
            Err(error) => {
                if error.kind() == ErrorKind::UnexpectedEof {
                    self.check_unchanged()?; // a better error: the file was truncated
                }
                Err(self.failed(error))
            }
        }
    }

    fn check_unchanged(&self) -> Result<(), WeightsError> {
        let found = Stamp::of(&self.file.metadata().map_err(|error| self.failed(error))?, self.filling);
        if found == self.opened {
            return Ok(());
        }
        let (expected, found) = (self.opened.to_string(), found.to_string());
        Err(WeightsError::Changed { path: self.path.clone(), expected, found })
    }

    fn failed(&self, source: io::Error) -> WeightsError {
        WeightsError::Io { path: self.path.clone(), source }
    }
}

impl Stamp {
    fn of(file: &Metadata, filling: bool) -> Self {
        Self { bytes: file.len(), written: (!filling).then(|| (file.mtime(), file.mtime_nsec())) }
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes)?;
        let Some((seconds, nanoseconds)) = self.written else { return Ok(()) };
        match time::OffsetDateTime::from_unix_timestamp_nanos(
            i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds),
        ) {
            Ok(at) => write!(f, ", written on {} at {} UTC", at.date(), at.time()),
            Err(_) => write!(f, ", written {seconds} s after 1970"),
        }
    }
}

#[cfg(test)]
mod tests;
