//! The file that is written: `OUT.part` until it is complete, continued after its last complete tensor.
//!
//! It has its final length and layout from the start. Its header begins with other bytes than a finished one, and has the hash of each
//! chunk that is complete. So whatever interrupts the write, a reader rejects the file, and the next call knows and verifies what is
//! there.
use std::fs::{File, TryLockError};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rayon::prelude::*;

use super::encode::Squares;
use super::{QuantizeError, QuantizeProgress};
use crate::weights::WeightsError;
use crate::weights::chunk::Content;
use crate::weights::mesh::{self, Planned, Sketch, Unfinished};

/// Bytes that are encoded and written at a time; a row of tiles may be larger.
const SLAB_BYTES: u64 = if cfg!(test) { 1 << 16 } else { 16 << 20 };
/// Maximum length of a header that is continued; the reader's limit.
const HEADER_BYTES_MAX: u64 = 256 << 20;

pub(super) struct Output {
    file: File,
    path: PathBuf,
    sketch: Sketch,
    /// Of the chunks after the header; zeros for those that are missing.
    hashes: Vec<[u8; 32]>,
    /// Chunks of each tensor.
    chunks: Vec<Range<usize>>,
    /// Number of tensors that are complete, all before the first that is not.
    complete: usize,
}

/// The tensors of an unfinished file that was begun for `key`.
pub(super) fn planned(path: &Path, key: &[u8; 32]) -> Option<Vec<Planned>> {
    let unfinished = begun(&File::open(path).ok()?, key)?;
    let planned = |tensor: crate::weights::TensorInfo| {
        let crate::weights::TensorInfo { name, quant, rows, cols, stored, range: _ } = tensor;
        Planned { name, quant, stored, rows, cols }
    };
    Some(unfinished.tensors.into_iter().map(planned).collect())
}

fn begun(file: &File, key: &[u8; 32]) -> Option<Unfinished> {
    let file_len = file.metadata().ok()?.len();
    let mut start = [0; 24];
    file.read_exact_at(&mut start, 0).ok()?;
    let len = mesh::header_len(&start).filter(|len| *len <= file_len.min(HEADER_BYTES_MAX))?;
    let mut header = vec![0; len as usize];
    file.read_exact_at(&mut header, 0).ok()?;
    mesh::unfinished(&Bytes::from(header), file_len).filter(|unfinished| unfinished.key == *key)
}

impl Output {
    /// Continues the file at `path` if it was begun for the same key and sketch, else begins it.
    ///
    /// # Errors
    /// It cannot be written, or another process writes it.
    pub(super) fn open(path: &Path, sketch: Sketch, key: &[u8; 32]) -> Result<Self, QuantizeError> {
        let failed = |source| QuantizeError::write(path, source);
        let mut chunks = vec![0..0; sketch.tensors.len()];
        for (number, (_, content)) in sketch.chunks.iter().enumerate() {
            if let Content::Rows { tensor, .. } = content {
                let chunks = &mut chunks[*tensor as usize];
                let first = if chunks.start == chunks.end { number } else { chunks.start };
                *chunks = first..number + 1;
            }
        }
        // Not truncated: it may be continued, or another process may be writing it.
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(QuantizeError::Busy { path: path.to_owned() }),
            // Some network file systems have no locks.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let kept = begun(&file, key).filter(|kept| kept.hashes.len() == sketch.chunks.len());
        let same = kept.filter(|kept| kept.tensors == sketch.tensors).map(|kept| kept.hashes);
        let path = path.to_owned();
        match same {
            Some(hashes) => {
                let mut output = Self { file, path, sketch, hashes, chunks, complete: 0 };
                output.complete = output.verified();
                Ok(output)
            }
            None => {
                // Padding is zeros, and never written.
                let hash = |(range, content): &crate::weights::chunk::Place| match content {
                    Content::Padding => blake3::hash(&vec![0; (range.end - range.start) as usize]).into(),
                    Content::Header | Content::Rows { .. } => [0; 32],
                };
                let hashes = sketch.chunks.iter().map(hash).collect();
                file.set_len(0).and_then(|()| file.set_len(sketch.file_len)).map_err(failed)?;
                let output = Self { file, path, sketch, hashes, chunks, complete: 0 };
                output.write(&output.sketch.unfinished(key, &output.hashes), 0)?;
                Ok(output)
            }
        }
    }

    /// Tensors whose chunks all have the recorded hashes, before the first that has not.
    fn verified(&self) -> usize {
        let intact = |chunk: usize| {
            let range = &self.sketch.chunks[chunk].0;
            let mut bytes = vec![0; (range.end - range.start) as usize];
            self.hashes[chunk] != [0; 32]
                && self.file.read_exact_at(&mut bytes, range.start).is_ok()
                && blake3::hash(&bytes) == self.hashes[chunk]
        };
        self.chunks.iter().take_while(|chunks| (*chunks).clone().into_par_iter().all(intact)).count()
    }

    pub(super) fn sketch(&self) -> &Sketch {
        &self.sketch
    }

    pub(super) fn complete(&self) -> usize {
        self.complete
    }

    /// Position up to which the file is complete.
    pub(super) fn bytes_done(&self) -> u64 {
        self.sketch.tensors.get(self.complete).map_or(self.sketch.file_len, |next| next.range.start)
    }

    /// Bytes that the disk has not yet given to the file.
    pub(super) fn bytes_left(&self) -> u64 {
        let given = self.file.metadata().map_or(0, |found| found.blocks() * 512);
        self.sketch.file_len.saturating_sub(given)
    }

    /// Writes a tensor, slab by slab, then its hashes. `encode` writes rows from a row of tiles on. Returns the root of the relative
    /// squared error.
    pub(super) fn put(
        &mut self,
        number: usize,
        encode: impl Fn(Range<usize>, &mut [u8]) -> Result<Squares, WeightsError>,
        progress: &dyn QuantizeProgress,
    ) -> Result<f64, QuantizeError> {
        let tensor = &self.sketch.tensors[number];
        let ((unit_rows, unit_bytes), start) = (tensor.unit(), tensor.range.start);
        // Whole chunks.
        let chunk_units = (crate::weights::index::CHUNK_BYTES_MAX / unit_bytes).max(1);
        let units = chunk_units * (SLAB_BYTES / (chunk_units * unit_bytes)).max(1);
        let (mut slab, mut squares) = (Vec::new(), Squares::default());
        let mut chunk = self.chunks[number].start;
        for (step, first) in (0..tensor.rows).step_by(units as usize * unit_rows).enumerate() {
            let rows = first..tensor.rows.min(first + units as usize * unit_rows);
            let at = start + step as u64 * units * unit_bytes;
            let len = (rows.len().div_ceil(unit_rows) as u64 * unit_bytes) as usize;
            slab.resize(len, 0);
            squares = squares.plus(encode(rows, &mut slab)?);
            let end = at + len as u64;
            let last = self.sketch.chunks.partition_point(|(range, _)| range.end <= end).min(self.chunks[number].end);
            let bytes = |range: &Range<u64>| &slab[(range.start - at) as usize..(range.end - at) as usize];
            let chunks = &self.sketch.chunks[chunk..last];
            let hashes =
                chunks.par_iter().map(|(range, _)| blake3::hash(bytes(range)).into()).collect::<Vec<[u8; 32]>>();
            self.write(&slab, at)?;
            self.hashes[chunk..last].copy_from_slice(&hashes);
            chunk = last;
            progress.at(end);
        }
        let chunks = self.chunks[number].clone();
        self.write(self.hashes[chunks.clone()].as_flattened(), self.sketch.hash_at(chunks.start))?;
        self.complete = number + 1;
        Ok(squares.relative().sqrt())
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), QuantizeError> {
        self.file.write_all_at(bytes, at).map_err(|source| QuantizeError::write(&self.path, source))
    }

    /// Writes the final header, and renames the file to `out`.
    pub(super) fn finish(self, out: &Path) -> Result<(), QuantizeError> {
        let failed = |source| QuantizeError::write(&self.path, source);
        // The chunks first: a finished header never describes bytes that are not on disk.
        self.file.sync_data().map_err(failed)?;
        self.write(&self.sketch.header(&self.hashes), 0)?;
        self.file.sync_all().map_err(failed)?;
        std::fs::rename(&self.path, out).map_err(failed)?;
        let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The name is on disk only with its folder; not every file system can sync a folder.
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        Ok(())
    }
}
