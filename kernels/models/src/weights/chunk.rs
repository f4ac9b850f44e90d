//! Chunks of a weights file: what peers request by hash.
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::tensor::TensorInfo;

/// Maximum bytes per chunk: a fraction of a second on a slow link, and 40 thousand chunks for 40 GB.
pub const CHUNK_BYTES_MAX: u64 = 1 << 20;

/// A contiguous piece of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Byte range; 1 to [`CHUNK_BYTES_MAX`] bytes.
    pub range: Range<u64>,
    /// What the bytes belong to.
    pub content: Content,
    /// blake3 hash of the bytes.
    pub hash: [u8; 32],
}

/// What a chunk holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Part of the header.
    Header,
    /// Rows of one tensor.
    Rows {
        /// Index into [`crate::weights::ModelFile::tensors`].
        tensor: u32,
        /// Row range.
        rows: Range<u64>,
    },
    /// Bytes outside all tensors, which no stage needs.
    Padding,
}

/// Where a chunk is, and what it holds.
pub(crate) type Place = (Range<u64>, Content);

/// The chunks of a file, derived from its header alone. A chunk has whole rows, or whole rows of tiles; a row of tiles that is longer
/// than a chunk is in several, which all name its rows.
pub(super) fn layout(header_len: u64, file_len: u64, tensors: &[TensorInfo]) -> Vec<Place> {
    let mut chunks = Vec::new();
    split(&mut chunks, 0..header_len, &Content::Header);
    let data = tensors.first().map_or(file_len, |tensor| tensor.range.start);
    split(&mut chunks, header_len..data, &Content::Padding);
    let starts = tensors.iter().skip(1).map(|tensor| tensor.range.start).chain([file_len]);
    for ((number, tensor), next) in tensors.iter().enumerate().zip(starts) {
        let ((unit_rows, unit_bytes), rows) = (tensor.unit(), tensor.rows as u64);
        let units = (CHUNK_BYTES_MAX / unit_bytes).max(1);
        let step = units * unit_rows as u64;
        for first in (0..rows).step_by(step as usize) {
            let last = rows.min(first + step);
            let start = tensor.range.start + first / unit_rows as u64 * unit_bytes;
            let end = tensor.range.end.min(start + units * unit_bytes);
            split(&mut chunks, start..end, &Content::Rows { tensor: number as u32, rows: first..last });
        }
        split(&mut chunks, tensor.range.end..next, &Content::Padding);
    }
    chunks
}

fn split(chunks: &mut Vec<Place>, range: Range<u64>, content: &Content) {
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + CHUNK_BYTES_MAX);
        chunks.push((start..end, content.clone()));
        start = end;
    }
}
