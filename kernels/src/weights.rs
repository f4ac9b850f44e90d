//! A model's weights as they lie in a file: opened by mmap, every count and offset checked once, never copied.
//!
//! [`ModelFile`] is what loaders see: configuration, tensors by name, tokenizer, and which byte ranges a stage needs.
//! Next: `weights/gguf.rs` (the file format), `weights/config.rs` (what the numbers in it mean).
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::quant::QuantType;
use crate::stage::Activations;
use crate::tokenizer::{Tokenizer, TokenizerError};

pub mod config;
mod gguf;
pub mod index;
pub mod metadata;
mod safetensors;
#[doc(hidden)]
pub mod testing;

pub use config::{Architecture, LayerCosts, ModelConfig, ModelCosts, Rope, RopeKind, RopeScaling, RotaryFrequencies};
pub use index::{Chunk, Content, IndexError, ShardIndex};
pub use metadata::Metadata;

/// An opened weights file. Cheap to share, `Sync`: tensors are views into the mapping.
///
/// The mapping stays valid as long as nobody truncates the file beneath it; a store must replace files by rename.
#[derive(Debug)]
pub struct ModelFile {
    /// The whole file.
    bytes: Bytes,
    path: Option<PathBuf>,
    partial: bool,
    /// Bytes before the first tensor's data.
    header_len: u64,
    /// What peers get in their place.
    served_header: Option<Bytes>,
    metadata: Metadata,
    /// In file order; ranges are inside the file and do not overlap.
    tensors: Vec<TensorInfo>,
    by_name: BTreeMap<String, usize>,
    config: ModelConfig,
}

/// Where bytes are that peers may ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served<'a> {
    /// Here: they are in no file.
    Header(&'a [u8]),
    /// At this range of the file.
    File(Range<u64>),
}

/// Where a tensor lies. Rows are contiguous, each a whole number of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name as in the file.
    pub name: String,
    /// How its rows are stored.
    pub quant: QuantType,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Weights in a row.
    pub cols: usize,
    /// Its bytes in the file.
    pub range: Range<u64>,
}

impl TensorInfo {
    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        (self.range.end - self.range.start) / self.rows as u64
    }
}

/// A tensor's bytes with what they mean; shape `[rows, cols]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Name as in the file.
    pub name: &'a str,
    /// How its rows are stored.
    pub quant: QuantType,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Weights in a row.
    pub cols: usize,
    /// `rows × quant.row_bytes(cols)` bytes; aligned only as the file is.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.bytes.len() / self.rows
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// If `row` is not below `rows`.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        let len = self.row_bytes();
        &self.bytes[row * len..(row + 1) * len]
    }

    /// All weights as f32, by the scalar reference: for norms, biases and tests.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        self.quant.dequantize(self.bytes, &mut out);
        out
    }
}

impl ModelFile {
    /// Maps a complete file (GGUF, or safetensors in a model's folder) and checks every count, offset, string and shape in it, and that the architecture's tensors
    /// are all there with the right shapes.
    ///
    /// # Errors
    /// [`WeightsError`]: unreadable, truncated, malformed, or a model that is not computed here.
    pub fn open(path: &Path) -> Result<Arc<Self>, WeightsError> {
        Self::map(path, false)
    }

    /// As [`Self::open`] for a sparse file of full length: the header is there, some tensors' ranges are holes.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_partial(path: &Path) -> Result<Arc<Self>, WeightsError> {
        Self::map(path, true)
    }

    /// As [`Self::open`] for bytes in memory.
    ///
    /// # Errors
    /// As [`Self::open`], without those of the file system.
    pub fn from_bytes(bytes: Bytes) -> Result<Arc<Self>, WeightsError> {
        Self::parse(bytes, None, false)
    }

    fn map(path: &Path, partial: bool) -> Result<Arc<Self>, WeightsError> {
        let io = |source| WeightsError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.is_dir() {
            let inner = path.join("model.safetensors");
            if inner.is_file() {
                return Self::map(&inner, partial);
            }
            let what = "is a folder without model.safetensors: expected that file, in one part, beside config.json and \
                        tokenizer.json, or the path of a .gguf file";
            return Err(WeightsError::Unsupported(format!("{} {what}", path.display())));
        }
        // SAFETY: the mapping is read-only and private to this process's view; the documented condition on `ModelFile`
        // (files are replaced, never truncated in place) keeps its pages backed.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Self::parse(Bytes::from_owner(map), Some(path.to_owned()), partial)
    }

    fn parse(bytes: Bytes, path: Option<PathBuf>, partial: bool) -> Result<Arc<Self>, WeightsError> {
        let header = if safetensors::recognise(&bytes) {
            safetensors::parse(&bytes, path.as_deref())?
        } else {
            gguf::parse(&bytes)?
        };
        let by_name: BTreeMap<String, usize> =
            header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let config =
            ModelConfig::read(&header.metadata, header.layout, |name| by_name.get(name).map(|&i| &header.tensors[i]))?;
        config.check_tensors(&header.tensors, &by_name)?;
        let gguf::Header { header_len, metadata, tensors, layout: _, served: served_header } = header;
        Ok(Arc::new(Self { bytes, path, partial, header_len, served_header, metadata, tensors, by_name, config }))
    }

    /// What the model is: sizes, rotary embedding, options of its architecture.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Everything the header says.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Gives the pages of a tensor back to the system: it was copied, and is read again from the disk if it is wanted.
    pub fn release(&self, name: &str) {
        #[cfg(target_os = "linux")]
        if let (Some(_), Some(tensor)) = (&self.path, self.tensor(name)) {
            const PAGE: usize = 4096;
            let start = (tensor.bytes.as_ptr() as usize).next_multiple_of(PAGE);
            let end = (tensor.bytes.as_ptr_range().end as usize) / PAGE * PAGE;
            if start < end {
                // SAFETY: whole pages of a shared read-only mapping of a file, which stay what they are.
                let given =
                    unsafe { rustix::mm::madvise(start as *mut _, end - start, rustix::mm::Advice::LinuxDontNeed) };
                // Pages may be larger than assumed: then they stay.
                let _ = given;
            }
        }
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
        // The range was checked against the file's length when it was opened.
        let bytes = &self.bytes[info.range.start as usize..info.range.end as usize];
        TensorView { name: &info.name, quant: info.quant, rows: info.rows, cols: info.cols, bytes }
    }

    /// The file's bytes; holes of a partial file read as zeros.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Where it was opened from.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Length of the file.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Opened with holes.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.partial
    }

    /// Bytes before the first tensor's data: what every holder of a shard needs.
    #[must_use]
    pub fn header_range(&self) -> Range<u64> {
        0..self.header_len
    }

    /// The header that peers get, where that is another than the file's: all they get is one file, and this one's meaning
    /// lies beside it. The tensors' data follows it as it follows the file's own.
    #[must_use]
    pub fn served_header(&self) -> Option<&Bytes> {
        self.served_header.as_ref()
    }

    /// Where a range of the file that peers get is found; it is of the header, or of what follows, not of both.
    #[must_use]
    pub fn served(&self, range: &Range<u64>) -> Served<'_> {
        let Some(header) = &self.served_header else { return Served::File(range.clone()) };
        let len = header.len() as u64;
        if range.end <= len {
            return Served::Header(&header[range.start as usize..range.end as usize]);
        }
        let at_home = |at: u64| at.saturating_sub(len) + self.header_len;
        Served::File(at_home(range.start)..at_home(range.end))
    }

    /// The byte ranges a stage of these layers needs besides the header, sorted, touching ones merged.
    #[must_use]
    pub fn stage_ranges(&self, layers: Range<usize>) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut previous = None;
        for (i, tensor) in self.tensors.iter().enumerate() {
            if !self.config.belongs_to(&tensor.name, &layers) {
                continue;
            }
            match ranges.last_mut() {
                // Between neighbours in the file lies nothing but alignment padding.
                Some(last) if previous == i.checked_sub(1) => last.end = tensor.range.end,
                Some(_) | None => ranges.push(tensor.range.clone()),
            }
            previous = Some(i);
        }
        ranges
    }

    /// What holding and running each part costs with these activations.
    #[must_use]
    pub fn costs(&self, activations: Activations) -> ModelCosts {
        self.config.costs(&self.tensors, activations)
    }

    /// Inverse frequencies of a rotary embedding, with the file's own factors where it carries them.
    ///
    /// # Errors
    /// Factors of another length than half the rotary dimensions, or not positive.
    pub fn rotary_frequencies(&self, rope: &Rope) -> Result<RotaryFrequencies, WeightsError> {
        let factors = self.tensor(config::ROPE_FACTORS).map(|t| t.to_f32());
        rope.frequencies(factors.as_deref())
    }

    /// The tokenizer that the header describes.
    ///
    /// # Errors
    /// [`TokenizerError`]: no vocabulary, an inconsistent one, or a kind that is not supported.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        // Only a folder on this disk has a header of its own for peers.
        let folder = self.path.as_deref().filter(|_| self.served_header.is_some()).and_then(Path::parent);
        if let Some(folder) = folder
            && self.metadata.text("tokenizer.ggml.model")?.is_none()
        {
            return Err(TokenizerError::NoFile { folder: folder.to_owned() });
        }
        Tokenizer::from_metadata(&self.metadata)
    }

    /// The model's own chat template, ChatML where it has none ([`ChatTemplate::is_fallback`] tells).
    ///
    /// # Errors
    /// A template that is not valid Jinja.
    pub fn chat_template(&self) -> Result<ChatTemplate, ChatTemplateError> {
        ChatTemplate::from_metadata(&self.metadata)
    }
}

/// Why a weights file was refused. Nothing of it is used then.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file ends before what its header promises.
    #[error(
        "the file is truncated: {what} needs bytes up to {need}, the file has {have}; fetch it again (`meshnode pull`)"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// First byte position beyond it.
        need: u64,
        /// Length of the file.
        have: u64,
    },
    /// The file contradicts itself or its format.
    #[error("malformed weights file: {0}")]
    Malformed(String),
    /// A sound file of something that is not computed here.
    #[error("{0}")]
    Unsupported(String),
}

#[cfg(test)]
mod tests;
