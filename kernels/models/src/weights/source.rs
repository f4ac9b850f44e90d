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
use std::sync::Arc;

use bytes::Bytes;

use super::error::WeightsError;

/// The bytes of a model: of one file, or of several pieces that follow each other, such as the parts of a split model.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// Without gaps, from byte 0; only a sole piece may be empty.
    pieces: Vec<Piece>,
}

/// A range of the model's bytes.
#[derive(Clone, Debug)]
struct Piece {
    start: u64,
    len: u64,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Memory(Bytes),
    /// In a file, from byte `at`.
    File {
        file: Arc<OpenFile>,
        at: u64,
    },
}

/// An open file with a shared advisory lock.
///
/// It refers to the open file, not to its name: a rename of another file onto the path has no effect.
#[derive(Debug)]
struct OpenFile {
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
    /// Bytes in memory.
    pub(super) fn memory(bytes: Bytes) -> Self {
        Self { pieces: vec![Piece { start: 0, len: bytes.len() as u64, place: Place::Memory(bytes) }] }
    }

    /// Opens a file. `filling`: chunks from peers are being written into it.
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
        let (len, path) = (opened.bytes, path.to_owned());
        let place = Place::File { file: Arc::new(OpenFile { file, path, filling, opened }), at: 0 };
        Ok(Self { pieces: vec![Piece { start: 0, len, place }] })
    }

    /// Joins sources, in order. Each begins at a multiple of `alignment`, after zeros where necessary.
    pub(super) fn join(sources: impl IntoIterator<Item = Self>, alignment: u64) -> Self {
        let mut joined = Self { pieces: Vec::new() };
        for source in sources {
            let padding = joined.len().next_multiple_of(alignment) - joined.len();
            let zeros = Self::memory(vec![0; padding as usize].into());
            for piece in zeros.pieces.into_iter().chain(source.pieces).filter(|piece| piece.len > 0) {
                let start = joined.len();
                joined.pieces.push(Piece { start, ..piece });
            }
        }
        joined
    }

    /// The bytes from position `start` to the end.
    pub(super) fn after(&self, start: u64) -> Self {
        self.part(&(start..self.len()))
    }

    /// The bytes of a range, as far as they exist.
    pub(super) fn part(&self, range: &Range<u64>) -> Self {
        let inside = |piece: &Piece| {
            let skip = range.start.saturating_sub(piece.start).min(piece.len);
            let len = range.end.saturating_sub(piece.start).min(piece.len).saturating_sub(skip);
            let place = match &piece.place {
                Place::Memory(bytes) => Place::Memory(bytes.slice(skip as usize..(skip + len) as usize)),
                Place::File { file, at } => Place::File { file: file.clone(), at: at + skip },
            };
            Self { pieces: vec![Piece { start: 0, len, place }] }
        };
        Self::join(self.pieces.iter().map(inside), 1)
    }

    fn files(&self) -> impl Iterator<Item = &OpenFile> {
        self.pieces.iter().filter_map(|piece| match &piece.place {
            Place::Memory(_) => None,
            Place::File { file, .. } => Some(&**file),
        })
    }

    /// Paths of the files, as they were opened.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files().map(|file| file.path.as_path())
    }

    /// Whether all bytes are in memory.
    pub(super) fn is_memory(&self) -> bool {
        self.files().next().is_none()
    }

    /// Whether a file may have holes.
    pub(super) fn is_filling(&self) -> bool {
        self.files().any(|file| file.filling)
    }

    /// Length when opened.
    pub(super) fn len(&self) -> u64 {
        self.pieces.last().map_or(0, |piece| piece.start + piece.len)
    }

    /// Hash of the bytes in memory and of each file's length and modification time.
    pub(super) fn stamp(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for piece in &self.pieces {
            match &piece.place {
                Place::Memory(bytes) => _ = hasher.update(bytes),
                Place::File { file, at } => {
                    let (seconds, nanoseconds) = file.opened.written.unwrap_or_default();
                    let [seconds, nanoseconds] = [seconds.to_le_bytes(), nanoseconds.to_le_bytes()];
                    let parts = [at.to_le_bytes(), file.opened.bytes.to_le_bytes(), seconds, nanoseconds];
                    parts.iter().for_each(|part| _ = hasher.update(part));
                }
            }
        }
        hasher.finalize().into()
    }

    /// Reads a byte range. Holes read as zeros.
    ///
    /// # Errors
    /// The range is out of bounds, or a file cannot be read.
    pub(super) fn read(&self, range: &Range<u64>) -> Result<Bytes, WeightsError> {
        let beyond = || {
            let what = format!("the range {}..{}", range.start, range.end);
            WeightsError::Truncated { what, need: range.end, have: self.len() }
        };
        let range = Some(range).filter(|r| r.start <= r.end && r.end <= self.len()).ok_or_else(beyond)?;
        let count = usize::try_from(range.end - range.start).map_err(|_| beyond())?;
        let first = self.pieces.partition_point(|piece| piece.start + piece.len <= range.start);
        match self.pieces.get(first) {
            None => Ok(Bytes::new()),
            Some(piece) if range.end <= piece.start + piece.len => piece.read(range.start - piece.start, count),
            Some(_) => {
                let mut bytes = Vec::with_capacity(count);
                for piece in self.pieces[first..].iter().take_while(|piece| piece.start < range.end) {
                    let skip = range.start.saturating_sub(piece.start);
                    let end = piece.len.min(range.end - piece.start);
                    bytes.extend(piece.read(skip, (end - skip) as usize)?);
                }
                Ok(bytes.into())
            }
        }
    }

    /// Reads the bytes from `start` into `out`, straight from the file.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn read_into(&self, start: u64, out: &mut [u8]) -> Result<(), WeightsError> {
        let end = start.checked_add(out.len() as u64).filter(|end| *end <= self.len()).ok_or_else(|| {
            let what = format!("{} bytes from byte {start}", out.len());
            WeightsError::Truncated { what, need: start.saturating_add(out.len() as u64), have: self.len() }
        })?;
        let first = self.pieces.partition_point(|piece| piece.start + piece.len <= start);
        let mut rest = out;
        for piece in self.pieces[first..].iter().take_while(|piece| piece.start < end) {
            let skip = start.saturating_sub(piece.start);
            let count = piece.len.min(end - piece.start) - skip;
            let (here, behind) = rest.split_at_mut(count as usize);
            piece.read_into(skip, here)?;
            rest = behind;
        }
        Ok(())
    }

    /// See [`super::ModelFile::check_unchanged`].
    pub(super) fn check_unchanged(&self) -> Result<(), WeightsError> {
        self.files().try_for_each(OpenFile::check_unchanged)
    }
}

impl Piece {
    /// Reads `count` bytes from byte `skip` of the piece.
    fn read(&self, skip: u64, count: usize) -> Result<Bytes, WeightsError> {
        match &self.place {
            Place::Memory(bytes) => Ok(bytes.slice(skip as usize..skip as usize + count)),
            Place::File { file, at } => {
                let mut bytes = vec![0; count];
                file.read_into(at + skip, &mut bytes)?;
                Ok(bytes.into())
            }
        }
    }

    /// As [`Self::read`], into `out`.
    fn read_into(&self, skip: u64, out: &mut [u8]) -> Result<(), WeightsError> {
        match &self.place {
            Place::Memory(bytes) => out.copy_from_slice(&bytes[skip as usize..skip as usize + out.len()]),
            Place::File { file, at } => file.read_into(at + skip, out)?,
        }
        Ok(())
    }
}

impl OpenFile {
    fn read_into(&self, start: u64, out: &mut [u8]) -> Result<(), WeightsError> {
        let Err(error) = self.file.read_exact_at(out, start) else { return Ok(()) };
        if error.kind() == ErrorKind::UnexpectedEof {
            self.check_unchanged()?; // a better error: the file was truncated
        }
        Err(self.failed(error))
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
