//! Shard index: splits a weights file into content-addressed chunks, which peers request by hash when they lack a stage's
//! weights.
//!
//! One index covers any format. It spans the file from end to end, header first, and records which rows of which tensor each
//! chunk holds.
use std::ops::Range;

use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};

use super::ModelFile;
use super::chunk::{self, Chunk, Content};
use super::error::WeightsError;

pub use super::chunk::CHUNK_BYTES_MAX;

/// Maximum bytes of an encoded index: a million chunks, that is a terabyte of weights.
pub const INDEX_BYTES_MAX: usize = 64 << 20;
const MAGIC: [u8; 4] = *b"MNIX";
const VERSION: u32 = 2;
const HEAD_BYTES: usize = 4 + 4 + 8 + 8 + 4;
/// Length, tag, tensor, first row, number of rows, hash.
const CHUNK_RECORD_BYTES: usize = 4 + 1 + 4 + 8 + 8 + 32;

/// The chunks of a file. They always cover `0..file_len` without gaps or overlaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardIndex {
    file_len: u64,
    header_len: u64,
    chunks: Vec<Chunk>,
}

impl ShardIndex {
    /// Hashes a complete file on all cores. `progress` is called with the size of each finished chunk, from several threads.
    ///
    /// # Errors
    /// [`IndexError::Partial`]: the file has holes, so its content is incomplete. [`IndexError::Unreadable`]: it cannot be
    /// read, or was modified while it was hashed. [`IndexError::Damaged`]: a chunk does not match its hash, which the file's header
    /// records.
    pub fn build(file: &ModelFile, progress: impl Fn(u64) + Sync) -> Result<Self, IndexError> {
        if file.is_partial() {
            return Err(IndexError::Partial);
        }
        let unreadable = |e: WeightsError| IndexError::Unreadable(e.to_string());
        let hashed = |(range, content): chunk::Place| {
            let bytes = file.read(&range).map_err(unreadable)?;
            let hash = blake3::hash(&bytes).into();
            progress(bytes.len() as u64);
            Ok(Chunk { range, content, hash })
        };
        let chunks = layout(file).into_par_iter().map(hashed).collect::<Result<Vec<Chunk>, IndexError>>()?;
        file.check_unchanged().map_err(unreadable)?;
        let index = Self { file_len: file.file_len(), header_len: file.header_range().end, chunks };
        match file.recorded_hashes() {
            Some(recorded) => index.agrees(file, recorded).map(|()| index),
            None => Ok(index),
        }
    }

    /// The index that the header of a `.mesh` file records: only the header is read and hashed. `None` for other files.
    ///
    /// # Errors
    /// The header cannot be read.
    pub fn recorded(file: &ModelFile) -> Result<Option<Self>, WeightsError> {
        let Some(recorded) = file.recorded_hashes() else { return Ok(None) };
        let header_len = file.header_range().end;
        let (mut chunks, mut recorded) = (Vec::new(), recorded.iter());
        for (range, content) in layout(file) {
            let hash = match content {
                Content::Header => blake3::hash(&file.read(&range)?).into(),
                Content::Rows { .. } | Content::Padding => *recorded.next().unwrap_or(&[0; 32]),
            };
            chunks.push(Chunk { range, content, hash });
        }
        Ok(Some(Self { file_len: file.file_len(), header_len, chunks }))
    }

    /// Compares the chunks after the header with recorded hashes.
    fn agrees(&self, file: &ModelFile, recorded: &[[u8; 32]]) -> Result<(), IndexError> {
        let chunks = self.chunks.iter().enumerate().filter(|(_, chunk)| chunk.content != Content::Header);
        let Some(((number, chunk), _)) = chunks.zip(recorded).find(|((_, chunk), hash)| chunk.hash != **hash) else {
            return Ok(());
        };
        let place = match &chunk.content {
            Content::Rows { tensor, rows } => {
                format!("tensor {:?}, rows {rows:?}", file.tensors()[*tensor as usize].name)
            }
            Content::Header | Content::Padding => "padding".to_owned(),
        };
        Err(IndexError::Damaged { chunk: number, place, range: chunk.range.clone() })
    }

    /// Length of the file.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Length of the header.
    #[must_use]
    pub fn header_len(&self) -> u64 {
        self.header_len
    }

    /// All chunks, in file order.
    #[must_use]
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Content id of the file: the blake3 hash of [`Self::encode`].
    #[must_use]
    pub fn content_id(&self) -> [u8; 32] {
        blake3::hash(&self.encode()).into()
    }

    /// Content id of each tensor, in the order of [`ModelFile::tensors`]: the blake3 hash of the hashes of its chunks. Equal tensors
    /// have equal ids in every file that stores them in the same way.
    #[must_use]
    pub fn tensor_ids(&self) -> Vec<[u8; 32]> {
        let rows = |chunk: &Chunk| match &chunk.content {
            Content::Rows { tensor, .. } => Some((*tensor, chunk.hash)),
            Content::Header | Content::Padding => None,
        };
        let hashes: Vec<(u32, [u8; 32])> = self.chunks.iter().filter_map(rows).collect();
        let of_tensor = hashes.chunk_by(|a, b| a.0 == b.0);
        let id = |chunks: &[(u32, [u8; 32])]| {
            let mut hasher = blake3::Hasher::new();
            chunks.iter().for_each(|(_, hash)| _ = hasher.update(hash));
            hasher.finalize().into()
        };
        of_tensor.map(id).collect()
    }

    /// Indices of the chunks that overlap any of the ranges, ascending, without padding. The header's chunks are those of
    /// `0..header_len`.
    #[must_use]
    pub fn chunks_for(&self, ranges: &[Range<u64>]) -> Vec<usize> {
        let mut selected = std::collections::BTreeSet::new();
        for range in ranges.iter().filter(|r| r.start < r.end) {
            let first = self.chunks.partition_point(|c| c.range.end <= range.start);
            let end = self.chunks.partition_point(|c| c.range.start < range.end);
            selected.extend((first..end).filter(|&chunk| self.chunks[chunk].content != Content::Padding));
        }
        selected.into_iter().collect()
    }

    /// Whether `bytes` have the length and hash of a chunk.
    #[must_use]
    pub fn verify(&self, chunk: usize, bytes: &[u8]) -> bool {
        self.chunks.get(chunk).is_some_and(|c| {
            c.range.end - c.range.start == bytes.len() as u64 && blake3::hash(bytes) == blake3::Hash::from(c.hash)
        })
    }

    /// Canonical encoding: equal indexes have equal bytes on every machine.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.chunks.len() * CHUNK_RECORD_BYTES);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.file_len.to_le_bytes());
        out.extend(self.header_len.to_le_bytes());
        out.extend((self.chunks.len() as u32).to_le_bytes());
        for chunk in &self.chunks {
            out.extend(((chunk.range.end - chunk.range.start) as u32).to_le_bytes());
            let (tag, tensor, rows) = match &chunk.content {
                Content::Header => (0, 0, 0..0),
                Content::Rows { tensor, rows } => (1, *tensor, rows.clone()),
                Content::Padding => (2, 0, 0..0),
            };
            out.push(tag);
            out.extend(tensor.to_le_bytes());
            out.extend(rows.start.to_le_bytes());
            out.extend((rows.end - rows.start).to_le_bytes());
            out.extend(chunk.hash);
        }
        out
    }

    /// Decodes an index from an untrusted peer: bounded, exact, canonical.
    ///
    /// # Errors
    /// [`IndexError::Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, IndexError> {
        let wrong = |what: &str| IndexError::Malformed(what.to_owned());
        if bytes.len() > INDEX_BYTES_MAX {
            return Err(wrong(&format!("expected at most {INDEX_BYTES_MAX} bytes, found {}", bytes.len())));
        }
        let (head, records) = bytes.split_at_checked(HEAD_BYTES).ok_or_else(|| wrong("shorter than its header"))?;
        if head[..4] != MAGIC || u32_at(head, 4) != VERSION {
            return Err(wrong(&format!("expected the magic bytes and version {VERSION}")));
        }
        let (file_len, header_len, count) = (u64_at(head, 8), u64_at(head, 16), u32_at(head, 24) as usize);
        if count.checked_mul(CHUNK_RECORD_BYTES) != Some(records.len()) {
            return Err(wrong(&format!("{count} chunks declared, but {} bytes of records", records.len())));
        }
        let mut chunks = Vec::with_capacity(count);
        let mut at = 0u64;
        for record in records.chunks_exact(CHUNK_RECORD_BYTES) {
            let len = u64::from(u32_at(record, 0));
            if !(1..=CHUNK_BYTES_MAX).contains(&len) {
                return Err(wrong(&format!("a chunk of {len} bytes")));
            }
            let (tensor, first, rows) = (u32_at(record, 5), u64_at(record, 9), u64_at(record, 17));
            let content = match record[4] {
                0 if at < header_len && (tensor, first, rows) == (0, 0, 0) => Content::Header,
                // A row has at least one byte.
                1 if at >= header_len && (1..=len).contains(&rows) => {
                    let end = first.checked_add(rows).ok_or_else(|| wrong("a row range exceeds 64 bits"))?;
                    Content::Rows { tensor, rows: first..end }
                }
                2 if at >= header_len && (tensor, first, rows) == (0, 0, 0) => Content::Padding,
                tag => return Err(wrong(&format!("invalid chunk record with tag {tag} at byte {at}"))),
            };
            let hash = record[25..].try_into().map_err(|_| wrong("truncated hash"))?;
            // Fewer than 2^32 chunks of 2^20 bytes cannot overflow.
            chunks.push(Chunk { range: at..at + len, content, hash });
            at += len;
            if chunks.last().is_some_and(|c| c.content == Content::Header && at > header_len) {
                return Err(wrong("a header chunk extends past the header"));
            }
        }
        if at != file_len || header_len > file_len {
            return Err(wrong(&format!("chunks cover {at} bytes, the file has {file_len}, its header {header_len}")));
        }
        Ok(Self { file_len, header_len, chunks })
    }

    /// Whether this index describes the layout of `file`: lengths, and the row range of every chunk.
    #[must_use]
    pub fn matches(&self, file: &ModelFile) -> bool {
        self.file_len == file.file_len()
            && self.header_len == file.header_range().end
            && layout(file).into_iter().eq(self.chunks.iter().map(|c| (c.range.clone(), c.content.clone())))
    }
}

/// Serialised in the canonical encoding, so that deserialising validates it with [`ShardIndex::decode`].
impl Serialize for ShardIndex {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.encode().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ShardIndex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::decode(&Vec::<u8>::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

fn layout(file: &ModelFile) -> Vec<chunk::Place> {
    chunk::layout(file.header_range().end, file.file_len(), file.tensors())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Why an index could not be built or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// The file has holes.
    #[error("a file with holes cannot be indexed; expected the complete file")]
    Partial,
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// A chunk does not match its hash in the header.
    #[error(
        "the file is damaged: chunk {chunk} ({place}, bytes {}..{}) does not match its hash in the header; fetch the file again, \
         or write it again with `meshnode quantize`", range.start, range.end
    )]
    Damaged {
        /// Number of the chunk.
        chunk: usize,
        /// What it holds.
        place: String,
        /// Its bytes in the file.
        range: Range<u64>,
    },
    /// The bytes are not a valid index.
    #[error("malformed shard index: {0}")]
    Malformed(String),
}

#[cfg(test)]
mod tests;
