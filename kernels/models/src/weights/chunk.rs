//! Chunks of a weights file: what peers request by hash.
use std::ops::Range;

use serde::{Deserialize, Serialize};

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
