//! A model's weights as they lie in a file: every count and offset checked once, tensors read when they are wanted.
//!
//! [`ModelFile`] is what loaders see: configuration, tensors by name, tokenizer, and which byte ranges a stage needs.
//! Next: `weights/source.rs` (how bytes are read), `weights/gguf.rs` (the file format), `weights/config.rs` (what the numbers in
//! it mean).
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::quant::QuantType;
use crate::stage::{Activations, StageError};
use crate::tile::{self, Layout};
use crate::tokenizer::{Tokenizer, TokenizerError};

pub mod config;
mod gguf;
pub mod index;
pub mod metadata;
mod safetensors;
mod source;
#[doc(hidden)]
pub mod testing;

pub use config::{Architecture, LayerCosts, ModelConfig, ModelCosts, Rope, RopeKind, RopeScaling, RotaryFrequencies};
pub use index::{Chunk, Content, IndexError, ShardIndex};
pub use metadata::Metadata;

use source::Source;

/// An opened weights file; `Sync`. Its header is in memory, tensors are read when they are asked for.
///
/// Model files are to be replaced by a rename: then the open one stays what it is. One that is written or cut in place is
/// noticed ([`Self::check_unchanged`]), and reads behind its end are errors.
#[derive(Debug)]
pub struct ModelFile {
    source: Source,
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

/// A tensor of an opened file; shape `[rows, cols]`, row-major.
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
    source: &'a Source,
    range: &'a Range<u64>,
}

/// Bytes that are converted at once: few reads, and little beside what they become. A row of tiles may be larger.
const PIECE_BYTES: usize = 1 << 20;

impl TensorView<'_> {
    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        (self.range.end - self.range.start) as usize / self.rows
    }

    /// Some rows as stored, `rows.len() × quant.row_bytes(cols)` bytes.
    ///
    /// # Errors
    /// There are no such rows, or the file was cut or cannot be read.
    pub fn read(&self, rows: Range<usize>) -> Result<Bytes, WeightsError> {
        let place = |row: usize| (row as u64).checked_mul(self.row_bytes() as u64)?.checked_add(self.range.start);
        let range = Some(&rows).filter(|rows| rows.end <= self.rows).and_then(|r| Some(place(r.start)?..place(r.end)?));
        let range = range.ok_or_else(|| {
            WeightsError::Malformed(format!(
                "tensor {:?}: expected rows of 0..{}, found {rows:?}",
                self.name, self.rows
            ))
        })?;
        self.source.read(&range)
    }

    /// Reads rows, of which the first begins a tile, and converts them: `out` takes whole rows of tiles.
    ///
    /// # Errors
    /// As [`Self::read`]; or a scale, a minimum or a number is not finite.
    ///
    /// # Panics
    /// If `out` is not as long as the tiles of `rows`, or the first does not begin a tile.
    pub fn tiles(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), WeightsError> {
        let layout = Layout::of(self.quant);
        assert_eq!(out.len(), layout.matrix_bytes(rows.len(), self.cols), "room for the tiles of {rows:?}");
        let strips = (PIECE_BYTES / (tile::ROWS * self.row_bytes())).max(1);
        let pieces = out.chunks_mut(strips * layout.matrix_bytes(1, self.cols));
        for (out, first) in pieces.zip(rows.clone().step_by(strips * tile::ROWS)) {
            let piece = first..rows.end.min(first + strips * tile::ROWS);
            let stored = self.read(piece.clone())?;
            let damaged = |what: tile::NotFinite| WeightsError::NotFinite {
                tensor: self.name.to_owned(),
                what: what.to_string(),
            };
            tile::convert(self.quant, self.cols, piece, &stored, out).map_err(damaged)?;
        }
        Ok(())
    }

    /// All weights as f32, by the scalar reference.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn to_f32(&self) -> Result<Vec<f32>, WeightsError> {
        let mut out = vec![0.0; self.rows * self.cols];
        self.quant.dequantize(&self.read(0..self.rows)?, &mut out);
        Ok(out)
    }

    /// As [`Self::to_f32`] for weights that must be finite: norms and biases.
    ///
    /// # Errors
    /// As [`Self::read`]; or one is not finite.
    pub fn to_finite_f32(&self) -> Result<Vec<f32>, WeightsError> {
        let numbers = self.to_f32()?;
        match numbers.iter().position(|number| !number.is_finite()) {
            None => Ok(numbers),
            Some(at) => {
                let what = format!("element {at} is {}; the file is damaged", numbers[at]);
                Err(WeightsError::NotFinite { tensor: self.name.to_owned(), what })
            }
        }
    }
}

/// Bytes of a file that are looked at first for its header: those of most models are within.
const HEADER_BYTES_FIRST: u64 = 4 << 20;
/// Bytes of a header at most: the largest vocabularies with scores and merges take some 30 MiB.
const HEADER_BYTES_MAX: u64 = 256 << 20;

impl ModelFile {
    /// Opens a complete file (GGUF, or safetensors in a model's folder) and checks every count, offset, string and shape in
    /// its header, and that the architecture's tensors are all there with the right shapes.
    ///
    /// # Errors
    /// [`WeightsError`]: unreadable, locked, truncated, malformed, or a model that is not computed here.
    pub fn open(path: &Path) -> Result<Arc<Self>, WeightsError> {
        Self::open_file(path, false)
    }

    /// As [`Self::open`] for a sparse file of full length: the header is there, some tensors' ranges are holes.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_partial(path: &Path) -> Result<Arc<Self>, WeightsError> {
        Self::open_file(path, true)
    }

    /// As [`Self::open`] for bytes in memory.
    ///
    /// # Errors
    /// As [`Self::open`], without those of the file system.
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

    /// Whether the file is still the one that was opened: its length, and unless chunks from peers are written into it the time
    /// of the last write. Bytes that were read before a check that succeeds are the ones that the header describes.
    ///
    /// # Errors
    /// [`WeightsError::Changed`] with what was expected and found, or the file cannot be asked.
    pub fn check_unchanged(&self) -> Result<(), WeightsError> {
        self.source.check_unchanged()
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

    /// Some of the file's bytes, copied: callers ask for pieces. Holes of a partial file read as zeros.
    ///
    /// # Errors
    /// The file has no such range, was cut, or cannot be read.
    pub fn read(&self, range: &Range<u64>) -> Result<Bytes, WeightsError> {
        self.source.read(range)
    }

    /// Where it was opened from.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.source.path()
    }

    /// Length of the file when it was opened.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.source.len()
    }

    /// Opened with holes.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.source.is_filling()
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
    /// Factors of another length than half the rotary dimensions, or not positive, or that cannot be read.
    pub fn rotary_frequencies(&self, rope: &Rope) -> Result<RotaryFrequencies, WeightsError> {
        let factors = self.tensor(config::ROPE_FACTORS).map(|t| t.to_f32()).transpose()?;
        rope.frequencies(factors.as_deref())
    }

    /// The tokenizer that the header describes.
    ///
    /// # Errors
    /// [`TokenizerError`]: no vocabulary, an inconsistent one, or a kind that is not supported.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        // Only a folder on this disk has a header of its own for peers.
        let folder = self.path().filter(|_| self.served_header.is_some()).and_then(Path::parent);
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

/// Reads and checks the header, which says itself where it ends: more of the file is read as long as it does not.
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
    /// Another program has an exclusive lock on the file.
    #[error("{path} is locked by a program that writes it, expected a file at rest; try again when that is done")]
    Locked {
        /// Which.
        path: PathBuf,
    },
    /// The file was written after it was opened.
    #[error(
        "{path} changed after it was opened: expected {expected}; found {found}. Nothing more is loaded from it; stages that are \
         loaded go on. Put a sound file in its place by a rename, as `meshnode pull` does, and serve it again"
    )]
    Changed {
        /// Which.
        path: PathBuf,
        /// Length and time when it was opened.
        expected: String,
        /// Length and time now.
        found: String,
    },
    /// A weight is infinite or no number.
    #[error("tensor {tensor:?}, {what}")]
    NotFinite {
        /// Which tensor.
        tensor: String,
        /// Where in it.
        what: String,
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

impl From<WeightsError> for StageError {
    fn from(error: WeightsError) -> Self {
        Self::Input(error.to_string())
    }
}

#[cfg(test)]
mod tests;
