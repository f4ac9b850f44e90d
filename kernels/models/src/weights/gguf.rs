//! Parser for the GGUF container, versions 2 and 3: header, key/values, tensor table, aligned data.
//!
//! Files are untrusted. Each count is checked against the remaining bytes before anything is allocated or iterated, products
//! are checked for overflow, and every tensor lies inside the file and overlaps no other.
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use kernels::quant::{QUANT_TYPES, QuantType};

use super::config::QueryKeyOrder;
use super::error::WeightsError;
use super::metadata::{Array, Element, Metadata, Value};
use super::tensor::{Stored, TensorInfo};

pub(super) mod split;

/// Maximum alignment of tensor data: a huge page; with larger ones padding would dominate. GGUF's default is 32.
pub(super) const ALIGNMENT_MAX: u64 = 2 << 20;
/// Maximum length of a key or tensor name; the specification's limit for keys.
const NAME_MAX: u64 = 65_535;
/// Maximum length of a string value: chat templates and licences are far shorter.
const TEXT_MAX: u64 = 16 << 20;
/// Maximum bytes per row, so that every row fits into one chunk of a shard index (the widest published model needs 0.25 MiB).
pub(super) const ROW_BYTES_MAX: usize = super::chunk::CHUNK_BYTES_MAX as usize;
/// Maximum number of tensors; mixtures with hundreds of experts per layer have about ten thousand.
pub(super) const TENSORS_MAX: u64 = 1 << 17;

/// A validated header.
pub(super) struct Header {
    /// Length of the header and padding before the first tensor's data.
    pub header_len: u64,
    pub metadata: Metadata,
    /// In file order.
    pub tensors: Vec<TensorInfo>,
    /// Row order of the query and key matrices.
    pub layout: QueryKeyOrder,
    /// Hashes of the chunks after the header, if the header records them.
    pub hashes: Option<Vec<[u8; 32]>>,
}

/// Parses and validates the header. `bytes`: the file of `file_len` bytes, or a prefix of it; if the header does not end within
/// it, [`WeightsError::Truncated`] gives the minimum length needed.
pub(super) fn parse(bytes: &Bytes, file_len: u64) -> Result<Header, WeightsError> {
    let mut reader = Reader { bytes, at: 0 };
    let version = read_magic(&mut reader)?;
    if !(2..=3).contains(&version) {
        let hint = if version.swap_bytes() <= 3 { " (a big-endian file)" } else { "" };
        return Err(WeightsError::Unsupported(format!(
            "GGUF version {version}{hint} is not supported; expected 2 or 3, little-endian"
        )));
    }
    let tensor_count = reader.u64("tensor count")?;
    let key_count = reader.u64("metadata count")?;
    // Smallest entry: an 8-byte length with one byte of key, a 4-byte type, one byte of value.
    let entries = read_entries(&mut reader, key_count)?;
    // Copy only this part: the bytes that were read may be far more.
    let metadata = Metadata::new(Bytes::copy_from_slice(&bytes[..reader.at]), entries);
    let alignment = read_alignment(&metadata)?;
    let table = read_table(&mut reader, tensor_count)?;
    let header_len = (reader.at as u64)
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| malformed(reader.at, "an aligned start of data", "an overflow"))?;
    let tensors = place(table, header_len, alignment, file_len)?;
    // If the data would begin past the end of the file, there is no data.
    Ok(Header { header_len: header_len.min(file_len), metadata, tensors, layout: QueryKeyOrder::Gguf, hashes: None })
}

fn read_magic(reader: &mut Reader<'_>) -> Result<u32, WeightsError> {
    match reader.bytes.get(..4) {
        Some(b"GGUF") => {}
        Some(other) => {
            return Err(WeightsError::Unsupported(format!(
                "not a GGUF file: it begins with {:?}, expected \"GGUF\"; fetch it again, or choose another file",
                String::from_utf8_lossy(other)
            )));
        }
        None => return Err(reader.truncated("magic", 4)),
    }
    reader.at = 4;
    reader.u32("version")
}

pub(super) fn read_entries(reader: &mut Reader<'_>, count: u64) -> Result<BTreeMap<String, Value>, WeightsError> {
    const SMALLEST: u64 = 8 + 1 + 4 + 1;
    reader.expect_count("metadata entries", count, SMALLEST)?;
    let mut entries = BTreeMap::new();
    for _ in 0..count {
        let start = reader.at;
        let key = reader.name("metadata key")?;
        let kind = reader.u32(&key)?;
        let value = reader.value(kind, &key)?;
        if entries.insert(key.clone(), value).is_some() {
            return Err(malformed(start, "each metadata key once", &format!("{key:?} again")));
        }
    }
    Ok(entries)
}

fn read_alignment(metadata: &Metadata) -> Result<u64, WeightsError> {
    let alignment = metadata.unsigned("general.alignment")?.unwrap_or(32);
    if !alignment.is_power_of_two() || !(8..=ALIGNMENT_MAX).contains(&alignment) {
        return Err(WeightsError::Malformed(format!(
            "general.alignment: expected a power of two from 8 to {ALIGNMENT_MAX}, found {alignment}"
        )));
    }
    Ok(alignment)
}

/// An entry of the tensor table, with its offset into the data.
pub(super) struct TableEntry {
    pub name: String,
    pub quant: QuantType,
    pub rows: usize,
    pub cols: usize,
    pub stored: Stored,
    pub offset: u64,
    pub size: u64,
}

fn read_table(reader: &mut Reader<'_>, count: u64) -> Result<Vec<TableEntry>, WeightsError> {
    // An 8-byte length with one byte of name, dimension count, one dimension, type, offset.
    const SMALLEST: u64 = 8 + 1 + 4 + 8 + 4 + 8;
    reader.expect_count("tensors", count, SMALLEST)?;
    if count > TENSORS_MAX {
        return Err(malformed(reader.at, &format!("at most {TENSORS_MAX} tensors"), &format!("{count}")));
    }
    let mut names = BTreeSet::new();
    let mut table = Vec::new();
    for _ in 0..count {
        let start = reader.at;
        let entry = read_table_row(reader)?;
        if !names.insert(entry.name.clone()) {
            return Err(malformed(start, "each tensor name once", &format!("{:?} again", entry.name)));
        }
        table.push(entry);
    }
    Ok(table)
}

fn read_table_row(reader: &mut Reader<'_>) -> Result<TableEntry, WeightsError> {
    let start = reader.at;
    let name = reader.name("tensor name")?;
    let dims = reader.u32(&name)?;
    if !(1..=4).contains(&dims) {
        return Err(malformed(start, &format!("1 to 4 dimensions of tensor {name:?}"), &format!("{dims}")));
    }
    let cols = reader.u64(&name)?;
    let mut rows = 1u64;
    let mut shape = vec![cols];
    for _ in 1..dims {
        let dim = reader.u64(&name)?;
        shape.push(dim);
        rows = rows
            .checked_mul(dim)
            .ok_or_else(|| malformed(start, &format!("a shape of {name:?} that fits 64 bit"), &format!("{shape:?}")))?;
    }
    let kind = reader.u32(&name)?;
    let offset = reader.u64(&name)?;
    let quant = QuantType::from_ggml(kind).ok_or_else(|| unsupported_type(&name, kind))?;
    let bad = |what: &str| malformed(start, what, &format!("tensor {name:?} of shape {shape:?} in {}", quant.name()));
    let (cols, rows) = (usize::try_from(cols), usize::try_from(rows));
    let (Ok(cols @ 1..), Ok(rows @ 1..)) = (cols, rows) else {
        return Err(bad("dimensions of at least 1 that fit the address space"));
    };
    let row_bytes = quant.row_bytes(cols).ok_or_else(|| bad("rows of whole blocks"))?;
    if row_bytes > ROW_BYTES_MAX {
        return Err(bad(&format!("rows of at most {ROW_BYTES_MAX} bytes")));
    }
    let size = (row_bytes as u64).checked_mul(rows as u64).ok_or_else(|| bad("a size that fits 64 bit"))?;
    Ok(TableEntry { name, quant, rows, cols, stored: Stored::Rows, offset, size })
}

/// Converts offsets to file ranges, sorted by position. Checks that they are aligned, inside the file and do not overlap.
pub(super) fn place(
    table: Vec<TableEntry>,
    data: u64,
    alignment: u64,
    file_len: u64,
) -> Result<Vec<TensorInfo>, WeightsError> {
    let mut tensors = Vec::with_capacity(table.len());
    for TableEntry { name, quant, rows, cols, stored, offset, size } in table {
        if !offset.is_multiple_of(alignment) {
            let found = format!("tensor {name:?} at {offset}");
            return Err(WeightsError::Malformed(format!(
                "expected offsets in multiples of {alignment}, found {found}"
            )));
        }
        let range = data.checked_add(offset).and_then(|start| Some(start..start.checked_add(size)?));
        let Some(range) = range else {
            return Err(WeightsError::Malformed(format!("tensor {name:?}: offset {offset} and {size} bytes overflow")));
        };
        if range.end > file_len {
            return Err(WeightsError::Truncated { what: format!("tensor {name:?}"), need: range.end, have: file_len });
        }
        tensors.push(TensorInfo { name, quant, rows, cols, stored, range });
    }
    tensors.sort_by(|a, b| (a.range.start, &a.name).cmp(&(b.range.start, &b.name)));
    for pair in tensors.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            return Err(WeightsError::Malformed(format!(
                "tensors {:?} ({:?}) and {:?} ({:?}) overlap",
                pair[0].name, pair[0].range, pair[1].name, pair[1].range
            )));
        }
    }
    Ok(tensors)
}

pub(super) fn unsupported_type(name: &str, kind: u32) -> WeightsError {
    let known = match kind {
        9 => " (Q8_1)",
        10 => " (Q2_K)",
        15 => " (Q8_K)",
        19 => " (IQ1_S)",
        24 => " (I8)",
        25 => " (I16)",
        26 => " (I32)",
        27 => " (I64)",
        28 => " (F64)",
        29 => " (IQ1_M)",
        34 => " (TQ1_0)",
        35 => " (TQ2_0)",
        40 => " (NVFP4)",
        41 => " (Q1_0)",
        _ => "",
    };
    // Only `.mesh` files have Q4_Z.
    let supported: Vec<_> = QUANT_TYPES.iter().filter(|&&q| q != QuantType::Q4Z).map(|q| q.name()).collect();
    WeightsError::Unsupported(format!(
        "tensor {name:?} is stored as ggml type {kind}{known}; supported: {}; get the file in a supported format, or convert it: \
         llama-quantize --allow-requantize IN OUT Q4_K_M",
        supported.join(", ")
    ))
}

/// A cursor in the file. Reads past the end report what was being read.
pub(super) struct Reader<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], WeightsError> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| self.truncated(what, len as u64))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, WeightsError> {
        let b = self.take(4, what)?;
        Ok(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, WeightsError> {
        let b = self.take(8, what)?;
        Ok(u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
    }

    /// A length-prefixed string of 1 to `NAME_MAX` bytes.
    pub(super) fn name(&mut self, what: &str) -> Result<String, WeightsError> {
        let start = self.at;
        let len = self.u64(what)?;
        if !(1..=NAME_MAX).contains(&len) {
            return Err(malformed(start, &format!("a {what} of 1 to {NAME_MAX} bytes"), &format!("{len}")));
        }
        let raw = self.take(len as usize, what)?;
        String::from_utf8(raw.to_vec()).map_err(|_| malformed(start, &format!("a {what} in UTF-8"), "other bytes"))
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value, WeightsError> {
        let start = self.at;
        if kind == Element::ARRAY {
            let kind = self.u32(key)?;
            let element = Element::from_gguf(kind).ok_or_else(|| {
                malformed(start, &format!("an array of scalars or strings in {key:?}"), &kind_name(kind))
            })?;
            let count = self.u64(key)?;
            return Ok(Value::Array(self.array(element, count, key)?));
        }
        let element = Element::from_gguf(kind)
            .ok_or_else(|| malformed(start, &format!("a type of value for {key:?}"), &kind_name(kind)))?;
        let Some(size) = element.size() else {
            let len = self.u64(key)?;
            if len > TEXT_MAX {
                return Err(malformed(
                    start,
                    &format!("a string of at most {TEXT_MAX} bytes in {key:?}"),
                    &format!("{len}"),
                ));
            }
            let raw = self.take(len as usize, key)?;
            // Free text such as a licence may have any encoding; everything that is compared or parsed is ASCII.
            return Ok(Value::Text(String::from_utf8_lossy(raw).into_owned()));
        };
        let raw = self.take(size, key)?;
        element.value(raw).ok_or_else(|| malformed(start, &format!("0 or 1 for {key:?}"), &format!("{raw:?}")))
    }

    /// Skips an array without storing its elements.
    fn array(&mut self, element: Element, count: u64, key: &str) -> Result<Array, WeightsError> {
        let smallest = element.size().unwrap_or(8);
        self.expect_count(key, count, smallest as u64)?;
        let (start, len) = (self.at, count as usize);
        if element.size().is_some() {
            self.take(len * smallest, key)?;
        } else {
            for _ in 0..len {
                let bytes = self.u64(key)?;
                let bytes = usize::try_from(bytes).map_err(|_| self.truncated(key, bytes))?;
                self.take(bytes, key)?;
            }
        }
        Ok(Array { element, len, range: start..self.at })
    }

    /// Rejects a count that the rest of the file cannot hold, before looping `count` times.
    pub(super) fn expect_count(&self, what: &str, count: u64, smallest: u64) -> Result<(), WeightsError> {
        let left = (self.bytes.len() - self.at) as u64;
        match count.checked_mul(smallest) {
            Some(bytes) if bytes <= left => Ok(()),
            Some(_) | None => Err(self.truncated(&format!("{what} ({count} of them)"), count.saturating_mul(smallest))),
        }
    }

    fn truncated(&self, what: &str, len: u64) -> WeightsError {
        let need = (self.at as u64).saturating_add(len);
        WeightsError::Truncated { what: what.to_owned(), need, have: self.bytes.len() as u64 }
    }
}

fn kind_name(kind: u32) -> String {
    if kind == Element::ARRAY { "an array in an array".to_owned() } else { format!("type {kind}") }
}

pub(super) fn malformed(at: usize, expected: &str, found: &str) -> WeightsError {
    WeightsError::Malformed(format!("at byte {at}: expected {expected}, found {found}"))
}
