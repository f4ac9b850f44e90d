//! The `.mesh` container: its tensors are the tiles that engines compute with, so loading copies bytes and converts nothing.
//!
//! `mesh/FORMAT.md` specifies the file byte by byte. Files are untrusted, and checked as those of `gguf.rs` are. `crate::quantize`
//! writes them.
use bytes::Bytes;
use kernels::quant::QuantType;

use super::chunk::{self, Content};
use super::config::QueryKeyOrder;
use super::error::WeightsError;
use super::gguf::{self, Header, Reader, TableEntry};
use super::metadata::Metadata;
use super::tensor::{Stored, TensorInfo, stored_bytes};

/// Alignment of the header's end and of every tensor: the page size of most systems.
pub(crate) const PAGE: u64 = 4096;
/// Bytes before the metadata.
pub(super) const HEAD_BYTES: usize = 96;
/// Bytes of the head before the header's hash.
const HASHED_HEAD_BYTES: usize = 64;
/// The line ends and the byte 0x1a are damaged by transfers that convert text.
const MAGIC: [u8; 8] = *b"MESH\r\n\x1a\n";
/// Begins a file that is being written.
pub(crate) const UNFINISHED: [u8; 8] = *b"MESHpart";
const VERSION: u32 = 1;

/// Whether the bytes look like this format, finished or not.
pub(super) fn recognise(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC) || bytes.starts_with(&UNFINISHED)
}

/// Parses and validates the header. `bytes`: the file of `file_len` bytes, or a prefix of it; if the header does not end within
/// it, [`WeightsError::Truncated`] gives the length needed.
pub(super) fn parse(bytes: &Bytes, file_len: u64) -> Result<Header, WeightsError> {
    if bytes.starts_with(&UNFINISHED) {
        return Err(WeightsError::Unsupported(
            "the .mesh file is not complete: run the same `meshnode quantize` again, which continues it".to_owned(),
        ));
    }
    let (header, hash) = read(bytes, file_len)?;
    if hash != hash_of(&bytes[..header.header_len as usize]) {
        return Err(WeightsError::Malformed(
            "the header of the .mesh file does not match the hash in it; fetch the file again".to_owned(),
        ));
    }
    Ok(header)
}

/// The hash of a header: of all its bytes but the hash itself.
fn hash_of(header: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header[..HASHED_HEAD_BYTES]).update(&header[HEAD_BYTES..]);
    hasher.finalize().into()
}

/// Gives a header its hash.
///
/// # Panics
/// If it is shorter than the head.
pub(super) fn seal(header: &mut [u8]) {
    let hash = hash_of(header);
    header[HASHED_HEAD_BYTES..HEAD_BYTES].copy_from_slice(&hash);
}

/// Reads a header and the hash that it records, which is not checked.
fn read(bytes: &Bytes, file_len: u64) -> Result<(Header, [u8; 32]), WeightsError> {
    let truncated = |what: &str, need: u64| WeightsError::Truncated { what: what.to_owned(), need, have: file_len };
    if bytes.len() < HEAD_BYTES {
        return Err(truncated("the head of the .mesh file", HEAD_BYTES as u64));
    }
    let mut head = Reader { bytes, at: MAGIC.len() };
    let (version, page) = (head.u32("version")?, head.u32("page size")?);
    if version != VERSION {
        return Err(WeightsError::Unsupported(format!(
            "the .mesh file has version {version}, expected {VERSION}; update meshnode, or write the file again with this version's \
             `meshnode quantize`"
        )));
    }
    let (header_len, stated_len) = (head.u64("header length")?, head.u64("file length")?);
    let (metadata_len, tensor_count) = (head.u64("metadata length")?, head.u32("tensor count")?);
    let (chunk_count, order, key_count) = (head.u32("chunk count")?, head.u32("row order")?, head.u32("key count")?);
    let layout = match order {
        0 => QueryKeyOrder::Gguf,
        1 => QueryKeyOrder::HuggingFace,
        other => return Err(gguf::malformed(48, "0 or 1 as the order of query and key rows", &other.to_string())),
    };
    if u64::from(page) != PAGE || !header_len.is_multiple_of(PAGE) || header_len == 0 || stated_len < header_len {
        let found = format!("pages of {page}, a header of {header_len} bytes, a file of {stated_len}");
        return Err(gguf::malformed(12, &format!("a header of whole pages of {PAGE} bytes in a longer file"), &found));
    }
    if file_len > stated_len {
        return Err(gguf::malformed(24, &format!("the file's length, {file_len} bytes"), &stated_len.to_string()));
    }
    if (bytes.len() as u64) < header_len {
        return Err(truncated("the header of the .mesh file", header_len));
    }
    if file_len < stated_len {
        return Err(truncated("the tail of the .mesh file", stated_len));
    }
    let header = &bytes[..header_len as usize];
    let mut reader = Reader { bytes: header, at: HEAD_BYTES };
    let entries = gguf::read_entries(&mut reader, key_count.into())?;
    if reader.at as u64 - HEAD_BYTES as u64 != metadata_len {
        let found = format!("{} of them", reader.at - HEAD_BYTES);
        return Err(gguf::malformed(32, &format!("{metadata_len} bytes of metadata"), &found));
    }
    let metadata = Metadata::new(Bytes::copy_from_slice(&header[..reader.at]), entries);
    let table = read_table(&mut reader, tensor_count)?;
    let tensors = gguf::place(table, 0, PAGE, file_len)?;
    if let Some(early) = tensors.first().filter(|tensor| tensor.range.start < header_len) {
        let found = format!("tensor {:?} at byte {}", early.name, early.range.start);
        return Err(WeightsError::Malformed(format!(
            "expected tensors after the header of {header_len} bytes, found {found}"
        )));
    }
    let hashes = read_hashes(header, reader.at, chunk_count)?;
    // The header bounds the count, and the count the chunks of a file, which may be one hole of any length.
    if (file_len - header_len) / chunk::CHUNK_BYTES_MAX > chunk_count.into() {
        return Err(gguf::malformed(44, &format!("the chunks of {file_len} bytes"), &chunk_count.to_string()));
    }
    let expected = recorded(header_len, file_len, &tensors).count();
    if expected != hashes.len() {
        return Err(gguf::malformed(44, &format!("the hashes of {expected} chunks"), &format!("{chunk_count}")));
    }
    let hash = head.bytes[HASHED_HEAD_BYTES..HEAD_BYTES].try_into().expect("32 bytes");
    Ok((Header { header_len, metadata, tensors, layout, hashes: Some(hashes) }, hash))
}

fn read_table(reader: &mut Reader<'_>, count: u32) -> Result<Vec<TableEntry>, WeightsError> {
    // An 8-byte length with one byte of name, format, layout, rows, columns, offset, length.
    const SMALLEST: u64 = 8 + 1 + 4 + 4 + 8 + 8 + 8 + 8;
    reader.expect_count("tensors", count.into(), SMALLEST)?;
    if u64::from(count) > gguf::TENSORS_MAX {
        return Err(gguf::malformed(40, &format!("at most {} tensors", gguf::TENSORS_MAX), &count.to_string()));
    }
    let mut names = std::collections::BTreeSet::new();
    let mut table = Vec::new();
    for _ in 0..count {
        let start = reader.at;
        let name = reader.name("tensor name")?;
        let (kind, layout) = (reader.u32(&name)?, reader.u32(&name)?);
        let [rows, cols] = [reader.u64(&name)?, reader.u64(&name)?];
        let (offset, size) = (reader.u64(&name)?, reader.u64(&name)?);
        if !names.insert(name.clone()) {
            return Err(gguf::malformed(start, "each tensor name once", &format!("{name:?} again")));
        }
        let quant = QuantType::from_ggml(kind).ok_or_else(|| gguf::unsupported_type(&name, kind))?;
        let stored = match layout {
            0 => Stored::Rows,
            1 => Stored::Tiles,
            other => {
                return Err(WeightsError::Unsupported(format!(
                    "tensor {name:?} has layout {other}, expected 0 (rows) or 1 (tiles); update meshnode"
                )));
            }
        };
        let shape = format!("tensor {name:?} of {rows} rows and {cols} columns in {}", quant.name());
        let (Ok(rows @ 1..), Ok(cols @ 1..)) = (usize::try_from(rows), usize::try_from(cols)) else {
            return Err(gguf::malformed(start, "dimensions of at least 1 that fit the address space", &shape));
        };
        let expected = stored_bytes(quant, stored, [rows, cols], gguf::ROW_BYTES_MAX).ok_or_else(|| {
            let blocks = format!(
                "rows of whole blocks of {} weights and at most {} bytes",
                quant.block_len(),
                gguf::ROW_BYTES_MAX
            );
            gguf::malformed(start, &blocks, &shape)
        })?;
        if size != expected {
            return Err(gguf::malformed(start, &format!("{expected} bytes of {shape}"), &size.to_string()));
        }
        table.push(TableEntry { name, quant, rows, cols, stored, offset, size });
    }
    Ok(table)
}

/// The hashes begin at a multiple of 32 after byte `at`.
fn read_hashes(header: &[u8], at: usize, count: u32) -> Result<Vec<[u8; 32]>, WeightsError> {
    let start = at.next_multiple_of(32);
    let hashes = header.get(start..).and_then(|rest| rest.get(..(count as usize).checked_mul(32)?));
    let hashes = hashes
        .ok_or_else(|| gguf::malformed(start, "the hashes of all chunks in the header", &format!("{count} chunks")))?;
    Ok(hashes.chunks_exact(32).map(|hash| hash.try_into().expect("32 bytes")).collect())
}

/// The chunks whose hashes a header records: all after the header.
fn recorded(header_len: u64, file_len: u64, tensors: &[TensorInfo]) -> impl Iterator<Item = chunk::Place> {
    chunk::layout(header_len, file_len, tensors).into_iter().filter(|(_, content)| *content != Content::Header)
}

/// A tensor of a file to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) name: String,
    pub(crate) quant: QuantType,
    pub(crate) stored: Stored,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// A file to be written: what its header says before the hashes are known.
#[derive(Clone, Debug)]
pub(crate) struct Sketch {
    pub(crate) header_len: u64,
    pub(crate) file_len: u64,
    /// In file order.
    pub(crate) tensors: Vec<TensorInfo>,
    /// The chunks after the header.
    pub(crate) chunks: Vec<chunk::Place>,
    /// The header up to the hashes; its own hash is zero.
    start: Vec<u8>,
}

impl Sketch {
    /// Lays out a file.
    ///
    /// # Errors
    /// More tensors or keys than a header holds, or a shape that no file holds.
    pub(crate) fn of(metadata: &Metadata, order: QueryKeyOrder, planned: Vec<Planned>) -> Result<Self, WeightsError> {
        let too_many = || WeightsError::Unsupported("the model has too many tensors for a .mesh file".to_owned());
        let keys = metadata.encode();
        let name_bytes: usize = planned.iter().map(|tensor| tensor.name.len()).sum();
        let table_bytes = planned.len() * (8 + 4 + 4 + 8 + 8 + 8 + 8) + name_bytes;
        let hashes_at = (HEAD_BYTES + keys.len() + table_bytes).next_multiple_of(32);
        // The number of chunks does not depend on where the data begins.
        let mut sketch =
            Self { header_len: 0, file_len: 0, tensors: Vec::new(), chunks: Vec::new(), start: Vec::new() };
        sketch.place(0, &planned)?;
        let header_len = (hashes_at as u64 + 32 * sketch.chunks.len() as u64).next_multiple_of(PAGE);
        sketch.place(header_len, &planned)?;
        let mut out = MAGIC.to_vec();
        let count = |count: usize| u32::try_from(count).map_err(|_| too_many());
        if planned.len() as u64 > gguf::TENSORS_MAX {
            return Err(too_many());
        }
        out.extend(VERSION.to_le_bytes());
        out.extend((PAGE as u32).to_le_bytes());
        out.extend(header_len.to_le_bytes());
        out.extend(sketch.file_len.to_le_bytes());
        out.extend((keys.len() as u64).to_le_bytes());
        out.extend(count(planned.len())?.to_le_bytes());
        out.extend(count(sketch.chunks.len())?.to_le_bytes());
        out.extend(match order {
            QueryKeyOrder::Gguf => 0u32.to_le_bytes(),
            QueryKeyOrder::HuggingFace => 1u32.to_le_bytes(),
        });
        out.extend(count(metadata.len())?.to_le_bytes());
        out.resize(HEAD_BYTES, 0);
        out.extend(keys);
        for TensorInfo { name, quant, rows, cols, stored, range } in &sketch.tensors {
            out.extend((name.len() as u64).to_le_bytes());
            out.extend(name.as_bytes());
            out.extend(quant.ggml_id().to_le_bytes());
            out.extend(match stored {
                Stored::Rows => 0u32.to_le_bytes(),
                Stored::Tiles => 1u32.to_le_bytes(),
            });
            for number in [*rows as u64, *cols as u64, range.start, range.end - range.start] {
                out.extend(number.to_le_bytes());
            }
        }
        out.resize(hashes_at, 0);
        sketch.start = out;
        Ok(sketch)
    }

    fn place(&mut self, header_len: u64, planned: &[Planned]) -> Result<(), WeightsError> {
        self.tensors.clear();
        let mut at = header_len;
        for Planned { name, quant, stored, rows, cols } in planned {
            let size = stored_bytes(*quant, *stored, [*rows, *cols], gguf::ROW_BYTES_MAX);
            let end = size.and_then(|size| at.checked_add(size)).filter(|end| *end < u64::MAX - PAGE);
            let end = end.ok_or_else(|| {
                WeightsError::Unsupported(format!(
                    "tensor {name:?} of {rows} rows and {cols} columns cannot be stored as {}: expected rows of whole blocks of {} \
                     weights",
                    quant.name(),
                    quant.block_len()
                ))
            })?;
            let (name, quant, stored) = (name.clone(), *quant, *stored);
            self.tensors.push(TensorInfo { name, quant, rows: *rows, cols: *cols, stored, range: at..end });
            at = end.next_multiple_of(PAGE);
        }
        (self.header_len, self.file_len) = (header_len, at);
        self.chunks = recorded(header_len, at, &self.tensors).collect();
        Ok(())
    }

    /// Where the hash of a chunk is in the file.
    pub(crate) fn hash_at(&self, chunk: usize) -> u64 {
        (self.start.len() + 32 * chunk) as u64
    }

    /// The header of the finished file.
    ///
    /// # Panics
    /// If there is not one hash per chunk.
    pub(crate) fn header(&self, hashes: &[[u8; 32]]) -> Vec<u8> {
        assert_eq!(hashes.len(), self.chunks.len(), "hashes of all chunks");
        let mut out = [&self.start, hashes.as_flattened()].concat();
        out.resize(self.header_len as usize, 0);
        seal(&mut out);
        out
    }

    /// The header of a file that is being written, with the hashes of the chunks that are in it, and zeros for the others. `key`
    /// names what is written: only the same is continued.
    pub(crate) fn unfinished(&self, key: &[u8; 32], hashes: &[[u8; 32]]) -> Vec<u8> {
        let mut out = self.header(hashes);
        out[..UNFINISHED.len()].copy_from_slice(&UNFINISHED);
        out[HASHED_HEAD_BYTES..HEAD_BYTES].copy_from_slice(key);
        out
    }
}

/// What the header of an unfinished file says.
pub(crate) struct Unfinished {
    /// What is being written.
    pub(crate) key: [u8; 32],
    /// Its tensors, in file order.
    pub(crate) tensors: Vec<TensorInfo>,
    /// Hashes of the chunks after the header; zeros for those that are missing.
    pub(crate) hashes: Vec<[u8; 32]>,
}

/// Reads the header of an unfinished file; `None` if it is none.
pub(crate) fn unfinished(bytes: &Bytes, file_len: u64) -> Option<Unfinished> {
    let (header, key) = read(bytes, file_len).ok().filter(|_| bytes.starts_with(&UNFINISHED))?;
    Some(Unfinished { key, tensors: header.tensors, hashes: header.hashes? })
}

/// Length of the header that a file begins with, from its first bytes.
pub(crate) fn header_len(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?))
}

#[cfg(test)]
mod tests;
