//! Split GGUF files, as llama.cpp's `gguf-split` writes them: each part is a GGUF file with some of the tensors, and the first
//! one has the model's metadata. Joined, they are one file with a header of its own, which peers receive, too.
use bytes::Bytes;

use super::{Header, Reader, TENSORS_MAX, malformed, read_alignment};
use crate::weights::error::WeightsError;
use crate::weights::metadata::Metadata;
use crate::weights::source::Source;

/// Bytes of a header before its key/values: magic, version, both counts.
const FIXED_BYTES: usize = 4 + 4 + 8 + 8;
/// Keys that describe the split; the joined header has none of them.
const PREFIX: &str = "split.";

/// What a header says about the split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::weights) struct Split {
    /// Number of this part, from 0.
    pub number: u64,
    /// Parts of the model.
    pub count: u64,
    /// Tensors in all parts.
    pub tensors: u64,
}

impl Split {
    /// Reads the keys; `None` for a file that is not split.
    pub(in crate::weights) fn of(metadata: &Metadata) -> Result<Option<Self>, WeightsError> {
        let read = |key: &str| {
            // llama.cpp writes the number of tensors as a signed integer.
            metadata.unsigned(&format!("{PREFIX}{key}")).map(|value| value.unwrap_or(0))
        };
        let split = Self { number: read("no")?, count: read("count")?, tensors: read("tensors.count")? };
        Ok((split.count > 1).then_some(split))
    }
}

/// A part of a model.
pub(in crate::weights) struct Part {
    /// Name for errors.
    pub name: String,
    pub source: Source,
    pub header: Header,
}

/// Joins all parts of a model, in order. The result begins with a header that describes all tensors.
///
/// # Errors
/// A part of another model, or one that is not the part that its name says.
pub(in crate::weights) fn join(parts: Vec<Part>) -> Result<Source, WeightsError> {
    let alignment = parts.first().map_or(Ok(32), |first| read_alignment(&first.header.metadata))?;
    let mut tensors: u64 = 0;
    for (number, part) in parts.iter().enumerate() {
        check(part, number as u64, parts.len() as u64)?;
        tensors += part.header.tensors.len() as u64;
    }
    let first = parts.first().ok_or_else(|| WeightsError::Malformed("no parts".to_owned()))?;
    let expected = Split::of(&first.header.metadata)?.map_or(0, |split| split.tensors);
    if tensors != expected || tensors > TENSORS_MAX {
        return Err(WeightsError::Malformed(format!(
            "{}: expected {expected} tensors in {} parts (at most {TENSORS_MAX}), found {tensors}; the parts are not of one model, \
             fetch them again",
            first.name,
            parts.len()
        )));
    }
    let header = header(&parts, alignment)?;
    let data = parts.into_iter().map(|part| part.source.after(part.header.header_len));
    Ok(Source::join([Source::memory(header)].into_iter().chain(data), alignment))
}

fn check(part: &Part, number: u64, count: u64) -> Result<(), WeightsError> {
    let found = match Split::of(&part.header.metadata)? {
        Some(split) if (split.number, split.count) == (number, count) => return Ok(()),
        Some(split) => format!("part {} of {}", split.number + 1, split.count),
        None => "a file that is not split".to_owned(),
    };
    Err(WeightsError::Malformed(format!(
        "{}: expected part {} of {count}, as its name says, found {found}; fetch the parts again, with the names of their source",
        part.name,
        number + 1
    )))
}

/// The header of the joined file: the first part's key/values without those of the split, and all tensors.
fn header(parts: &[Part], alignment: u64) -> Result<Bytes, WeightsError> {
    let first = &parts[0].header;
    let bytes = first.metadata.bytes();
    let mut reader = Reader { bytes, at: FIXED_BYTES };
    let (mut keys, mut count) = (Vec::new(), 0u64);
    while reader.at < bytes.len() {
        let start = reader.at;
        let key = reader.name("metadata key")?;
        let kind = reader.u32(&key)?;
        reader.value(kind, &key)?;
        if !key.starts_with(PREFIX) {
            keys.extend_from_slice(&bytes[start..reader.at]);
            count += 1;
        }
    }
    let tensors: u64 = parts.iter().map(|part| part.header.tensors.len() as u64).sum();
    let mut out = bytes[..8].to_vec();
    out.extend(tensors.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend(keys);
    let mut base = 0u64;
    for part in parts {
        for tensor in &part.header.tensors {
            let offset = base + tensor.range.start - part.header.header_len;
            out.extend((tensor.name.len() as u64).to_le_bytes());
            out.extend(tensor.name.as_bytes());
            // Columns first; a third dimension of the file is folded into the rows.
            out.extend(2u32.to_le_bytes());
            out.extend((tensor.cols as u64).to_le_bytes());
            out.extend((tensor.rows as u64).to_le_bytes());
            out.extend(tensor.quant.ggml_id().to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        let data = part.source.len() - part.header.header_len;
        let end = base.checked_add(data).and_then(|end| end.checked_next_multiple_of(alignment));
        base = end.ok_or_else(|| malformed(0, "parts of fewer than 2^64 bytes", "more"))?;
    }
    // The data begins at the next multiple of the alignment.
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
    Ok(out.into())
}
