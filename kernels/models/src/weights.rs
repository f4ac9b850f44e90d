//! Model weights files: the header is validated once on opening, tensors are read on demand.
//!
//! [`ModelFile`] is the interface for loaders: configuration, tensors by name, tokenizer, and the byte ranges that a stage
//! needs.
//! Next: `weights/source.rs` (reading bytes), `weights/gguf.rs` (the file format), `weights/config.rs` (its meaning).
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::stage::Activations;
use crate::tokenizer::{Tokenizer, TokenizerError};

mod chunk;
pub mod config;
pub(crate) mod error;
mod gguf;
pub mod index;
pub mod metadata;
mod safetensors;
mod source;
mod tensor;
#[doc(hidden)]
pub mod testing;

pub use chunk::{Chunk, Content};
pub use config::{Architecture, LayerCosts, ModelConfig, ModelCosts, Rope, RopeKind, RopeScaling, RotaryFrequencies};
pub use error::WeightsError;
pub use index::{IndexError, ShardIndex};
pub use metadata::Metadata;
pub use tensor::{TensorInfo, TensorView};

use source::Source;

/// An opened weights file; `Sync`. Its header is in memory, tensors are read on demand.
///
/// Replace model files with a rename: the open file then keeps its content. A file that is overwritten or truncated in place is
/// detected ([`Self::check_unchanged`]), and reads past its end are errors.
#[derive(Debug)]
pub struct ModelFile {
    source: Source,
    /// Length of the header and padding before the first tensor's data.
    header_len: u64,
    /// Header sent to peers instead of the file's own.
    served_header: Option<Bytes>,
    metadata: Metadata,
    /// In file order; ranges are inside the file and do not overlap.
    tensors: Vec<TensorInfo>,
    by_name: BTreeMap<String, usize>,
    config: ModelConfig,
}

/// Location of bytes requested by peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServedBytes<'a> {
    /// In memory: part of the served header.
    Header(&'a [u8]),
    /// At this range of the file.
    File(Range<u64>),
}

/// Bytes of the first read of a header; most headers fit.
const HEADER_BYTES_FIRST: u64 = 4 << 20;
/// Maximum header length: the largest vocabularies with scores and merges need about 30 MiB.
const HEADER_BYTES_MAX: u64 = 256 << 20;

impl ModelFile {
    /// Opens a complete file (GGUF, or safetensors in a model folder). Checks every count, offset, string and shape in its
    /// header, and that all tensors of the architecture are present with the right shapes.
    ///
    /// # Errors
    /// [`WeightsError`]: unreadable, locked, truncated, malformed, or an unsupported model.
    pub fn open(path: &Path) -> Result<Arc<Self>, WeightsError> {
        Self::open_file(path, false)
    }

    /// As [`Self::open`] for a sparse file of full length: the header is present, some tensors may be holes.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_partial(path: &Path) -> Result<Arc<Self>, WeightsError> {
        Self::open_file(path, true)
    }

    /// As [`Self::open`] for bytes in memory.
    ///
    /// # Errors
    /// As [`Self::open`], except for file system errors.
    pub fn from_bytes(bytes: Bytes) -> Result<Arc<Self>, WeightsError> {
        Self::parse(Source::Memory(bytes))
    }

    fn open_file(path: &Path, partial: bool) -> Result<Arc<Self>, WeightsError> {
        let metadata = std::fs::metadata(path);
        if metadata.map_err(|source| WeightsError::Io { path: path.to_owned(), source })?.is_dir() {
            let inner = path.join("model.safetensors");
            if inner.is_file() {
                return Self::open_file(&inner, partial);
            }
            let what = "is a folder without model.safetensors: expected that file, in one part, beside config.json and \
                        tokenizer.json, or the path of a .gguf file";
            return Err(WeightsError::Unsupported(format!("{} {what}", path.display())));
        }
        Self::parse(Source::open(path, partial)?)
    }

    fn parse(source: Source) -> Result<Arc<Self>, WeightsError> {
        let header = header(&source)?;
        let by_name: BTreeMap<String, usize> =
            header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let config =
            ModelConfig::read(&header.metadata, header.layout, |name| by_name.get(name).map(|&i| &header.tensors[i]))?;
        config.check_tensors(&header.tensors, &by_name)?;
        let gguf::Header { header_len, metadata, tensors, layout: _, served: served_header } = header;
        Ok(Arc::new(Self { source, header_len, served_header, metadata, tensors, by_name, config }))
    }

    /// Checks that the file is unchanged since it was opened: its length, and its modification time unless it is being filled
    /// with chunks from peers. After success, all bytes read before are the ones described by the header.
    ///
    /// # Errors
    /// [`WeightsError::Changed`] with what was expected and found, or the file cannot be queried.
    pub fn check_unchanged(&self) -> Result<(), WeightsError> {
        self.source.check_unchanged()
    }

    /// The model's configuration: sizes, rotary embedding, options of its architecture.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// All metadata of the header.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// A tensor by its name in the file.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.by_name.get(name).map(|&i| self.view(&self.tensors[i]))
    }

    /// Every tensor, in file order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> TensorView<'a> {
        let TensorInfo { name, quant, rows, cols, range } = info;
        TensorView { name, quant: *quant, rows: *rows, cols: *cols, source: &self.source, range }
    }

    /// Copies a byte range of the file. Holes of a partial file read as zeros.
    ///
    /// # Errors
    /// The range is not in the file, or the file was truncated or cannot be read.
    pub fn read(&self, range: &Range<u64>) -> Result<Bytes, WeightsError> {
        self.source.read(range)
    }

    /// Path that the file was opened from; `None` if in memory.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.source.path()
    }

    /// Length of the file when it was opened.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.source.len()
    }

    /// Whether the file was opened with holes.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.source.is_filling()
    }

    /// Range of the header, which every holder of a shard needs.
    #[must_use]
    pub fn header_range(&self) -> Range<u64> {
        0..self.header_len
    }

    /// The header sent to peers, if it differs from the file's own: peers receive a single file, but part of this model's
    /// metadata is in other files of its folder. The tensor data follows it as it follows the file's own header.
    #[must_use]
    pub fn served_header(&self) -> Option<&Bytes> {
        self.served_header.as_ref()
    }

    /// Locates a byte range of the file as peers see it. The range must lie entirely in the header or entirely after it.
    #[must_use]
    pub fn locate_served(&self, range: &Range<u64>) -> ServedBytes<'_> {
        let Some(header) = &self.served_header else { return ServedBytes::File(range.clone()) };
        let len = header.len() as u64;
        if range.end <= len {
            return ServedBytes::Header(&header[range.start as usize..range.end as usize]);
        }
        let at_home = |at: u64| at.saturating_sub(len) + self.header_len;
        ServedBytes::File(at_home(range.start)..at_home(range.end))
    }

    /// The byte ranges that a stage of these layers needs besides the header: sorted, with adjacent tensors merged.
    #[must_use]
    pub fn stage_ranges(&self, layers: Range<usize>) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut previous = None;
        for (i, tensor) in self.tensors.iter().enumerate() {
            if !self.config.belongs_to(&tensor.name, &layers) {
                continue;
            }
            match ranges.last_mut() {
                // Only alignment padding lies between neighbours in the file.
                Some(last) if previous == i.checked_sub(1) => last.end = tensor.range.end,
                Some(_) | None => ranges.push(tensor.range.clone()),
            }
            previous = Some(i);
        }
        ranges
    }

    /// Memory and compute costs of each part of the model with these activations.
    #[must_use]
    pub fn costs(&self, activations: Activations) -> ModelCosts {
        self.config.costs(&self.tensors, activations)
    }

    /// Inverse frequencies of a rotary embedding, with the file's per-dimension factors if present.
    ///
    /// # Errors
    /// The factors do not number half the rotary dimensions, are not positive, or cannot be read.
    pub fn rotary_frequencies(&self, rope: &Rope) -> Result<RotaryFrequencies, WeightsError> {
        let factors = self.tensor(config::ROPE_FACTORS).map(|t| t.to_f32()).transpose()?;
        rope.frequencies(factors.as_deref())
    }

    /// The tokenizer described by the header.
    ///
    /// # Errors
    /// [`TokenizerError`]: no vocabulary, an inconsistent one, or an unsupported kind.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        // Only a model folder on this disk has a separate header for peers.
        let folder = self.path().filter(|_| self.served_header.is_some()).and_then(Path::parent);
        if let Some(folder) = folder
            && self.metadata.text("tokenizer.ggml.model")?.is_none()
        {
            return Err(TokenizerError::NoFile { folder: folder.to_owned() });
        }
        Tokenizer::from_metadata(&self.metadata)
    }

    /// The model's own chat template, or ChatML if it has none ([`ChatTemplate::is_fallback`]).
    ///
    /// # Errors
    /// A template that is not valid Jinja.
    pub fn chat_template(&self) -> Result<ChatTemplate, ChatTemplateError> {
        ChatTemplate::from_metadata(&self.metadata)
    }
}

/// Reads and parses the header. Its length is only known from parsing, so the read grows until the header is complete.
fn header(source: &Source) -> Result<gguf::Header, WeightsError> {
    let (len, first) = match source {
        Source::Memory(bytes) => (source.len(), bytes.len() as u64),
        Source::File(_) => (source.len(), HEADER_BYTES_FIRST),
    };
    let mut part = source.read(&(0..len.min(first)))?;
    loop {
        let parsed = if safetensors::recognise(&part) {
            safetensors::parse(&part, len, source.path())
        } else {
            gguf::parse(&part, len)
        };
        let here = part.len() as u64;
        match parsed {
            Err(WeightsError::Truncated { what, need, .. }) if here < len => {
                if need > len {
                    return Err(WeightsError::Truncated { what, need, have: len });
                }
                if need > HEADER_BYTES_MAX {
                    return Err(WeightsError::Malformed(format!(
                        "expected a header of at most {HEADER_BYTES_MAX} bytes, found that {what} reaches byte {need}"
                    )));
                }
                part = source.read(&(0..need.max(2 * here).min(HEADER_BYTES_MAX).min(len)))?;
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests;
