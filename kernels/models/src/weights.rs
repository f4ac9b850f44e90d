//! Model weights files: the header is validated once on opening, tensors are read on demand.
//!
//! [`ModelFile`] is the interface for loaders: configuration, tensors by name, tokenizer, and the byte ranges that a stage
//! needs.
//! Next: `weights/source.rs` (reading bytes), `weights/gguf.rs` (the file format), `weights/config.rs` (its meaning).
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kernels::quant::QuantType;

use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::stage::Activations;
use crate::tokenizer::{Tokenizer, TokenizerError};

pub(crate) mod chunk;
pub mod config;
pub(crate) mod error;
mod gguf;
mod header;
pub mod index;
pub(crate) mod mesh;
pub mod metadata;
pub mod parts;
mod safetensors;
mod source;
mod tensor;
#[doc(hidden)]
pub mod testing;

pub use chunk::{Chunk, Content};
pub use config::{
    Architecture, Experts, HeadNorms, LayerCosts, ModelConfig, ModelCosts, Rope, RopeKind, RopeScaling,
    RotaryFrequencies, SharedExpert, Temperature, Window,
};
pub use error::WeightsError;
pub use index::{IndexError, ShardIndex};
pub use metadata::Metadata;
pub use tensor::{Stored, TensorInfo, TensorView};

use config::QueryKeyOrder;
use gguf::split;
use parts::Files;
use source::Source;

/// An opened model; `Sync`. Its header is in memory, tensors are read on demand.
///
/// A model may be in several files: the parts of a split GGUF file, or the files of a Hugging Face folder. Here, and for peers, it
/// is one file: a header of its own, then the data of all parts. All positions are in that file.
///
/// Replace model files with a rename: the open file then keeps its content. A file that is overwritten or truncated in place is
/// detected ([`Self::check_unchanged`]), and reads past its end are errors.
#[derive(Debug)]
pub struct ModelFile {
    source: Source,
    /// Path that the model was opened from: a file, the first part of several, or the index of a folder. `None` if in memory.
    path: Option<PathBuf>,
    /// Whether the model is a Hugging Face folder.
    folder: bool,
    /// Length of the header and padding before the first tensor's data.
    header_len: u64,
    metadata: Metadata,
    /// In file order; ranges are inside the file and do not overlap.
    tensors: Vec<TensorInfo>,
    by_name: BTreeMap<String, usize>,
    config: ModelConfig,
    /// Row order of the query and key matrices.
    order: QueryKeyOrder,
    /// Hashes of the chunks after the header, if the header records them.
    hashes: Option<Vec<[u8; 32]>>,
}

impl ModelFile {
    /// Opens a complete model: a GGUF file, any part of a split one, a folder with safetensors, or a `.mesh` file. Checks every
    /// count, offset, string and shape in its header, and that all tensors of the architecture are present with the right shapes.
    ///
    /// # Errors
    /// [`WeightsError`]: unreadable, locked, truncated, malformed, or an unsupported model.
    pub fn open(path: &Path) -> Result<Arc<Self>, WeightsError> {
        match Files::of(path)? {
            Files::One(path) => {
                let source = Source::open(&path, false)?;
                let start = source.read(&(0..source.len().min(16)))?;
                if !safetensors::recognise(&start) {
                    return Self::parse(source, Some(path), false);
                }
                let part = safetensors::Part::read(&path, source)?;
                if part.has_config() {
                    return Self::parse(part.source, Some(path), false);
                }
                Self::parse(safetensors::join(&[part], None)?, Some(path), true)
            }
            Files::Gguf(paths) => {
                let parts = paths.iter().enumerate().map(|(number, path)| open_part(path, number, paths.len()));
                let source = split::join(parts.collect::<Result<_, _>>()?)?;
                Self::parse(source, paths.into_iter().next(), false)
            }
            Files::Folder { index, parts, tensors } => {
                let count = parts.len();
                let open = |(number, path): (usize, &PathBuf)| {
                    safetensors::Part::open(path).map_err(|error| missing_part(error, path, number, count))
                };
                let parts: Vec<_> = parts.iter().enumerate().map(open).collect::<Result<_, _>>()?;
                Self::parse(safetensors::join(&parts, Some(&tensors))?, Some(index), true)
            }
        }
    }

    /// As [`Self::open`] for a sparse file of full length: the header is present, some tensors may be holes.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_partial(path: &Path) -> Result<Arc<Self>, WeightsError> {
        Self::parse(Source::open(path, true)?, Some(path.to_owned()), false)
    }

    /// As [`Self::open`] for bytes in memory.
    ///
    /// # Errors
    /// As [`Self::open`], except for file system errors.
    pub fn from_bytes(bytes: Bytes) -> Result<Arc<Self>, WeightsError> {
        Self::parse(Source::memory(bytes), None, false)
    }

    /// `folder`: the model is a Hugging Face folder, whose tokenizer is beside `path`.
    fn parse(source: Source, path: Option<PathBuf>, folder: bool) -> Result<Arc<Self>, WeightsError> {
        let beside = path.as_deref().filter(|_| folder).and_then(Path::parent);
        let header = header::read(&source, |bytes, len| {
            if mesh::recognise(bytes) {
                mesh::parse(bytes, len)
            } else if safetensors::recognise(bytes) {
                safetensors::parse(bytes, len, beside)
            } else {
                gguf::parse(bytes, len)
            }
        })?;
        if let Some(split) = split::Split::of(&header.metadata)? {
            return Err(WeightsError::Unsupported(format!(
                "this is part {number} of {count} of a split model, but its name does not end in -{number:05}-of-{count:05}.gguf: give \
                 all parts the names of their source, in one folder",
                number = split.number + 1,
                count = split.count
            )));
        }
        let gguf::Header { header_len, metadata, tensors, layout, hashes } = header;
        let by_name: BTreeMap<&str, &TensorInfo> =
            tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let config = ModelConfig::read(&metadata, layout, |name| by_name.get(name).copied())?;
        let tensors = config.split_fused(tensors)?;
        let by_name: BTreeMap<String, usize> = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        if by_name.len() != tensors.len() {
            let what = "expected each matrix once: joined with others in one tensor, or as a tensor of its own";
            return Err(WeightsError::Malformed(what.to_owned()));
        }
        config.check_tensors(&tensors, &by_name)?;
        Ok(Arc::new(Self {
            source,
            path,
            folder,
            header_len,
            metadata,
            tensors,
            by_name,
            config,
            order: layout,
            hashes,
        }))
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
        let TensorInfo { name, quant, rows, cols, stored, range } = info;
        TensorView { name, quant: *quant, rows: *rows, cols: *cols, stored: *stored, source: &self.source, range }
    }

    /// Copies a byte range of the file. Holes of a partial file read as zeros.
    ///
    /// # Errors
    /// The range is not in the file, or the file was truncated or cannot be read.
    pub fn read(&self, range: &Range<u64>) -> Result<Bytes, WeightsError> {
        self.source.read(range)
    }

    /// Path that the model was opened from: a file, the first part of several, or the index of a folder. `None` if in memory.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Changes when a file of the model changes: a hash of each file's length and modification time.
    #[must_use]
    pub fn stamp(&self) -> [u8; 32] {
        self.source.stamp()
    }

    /// Length of the file when it was opened.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.source.len()
    }

    /// The hashes of the chunks after the header that a `.mesh` file records; `None` for other files.
    #[must_use]
    pub fn recorded_hashes(&self) -> Option<&[[u8; 32]]> {
        self.hashes.as_deref()
    }

    /// The files that the model's bytes are in; none if it is in memory.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        self.source.paths()
    }

    /// Row order of the query and key matrices.
    pub(crate) fn query_key_order(&self) -> QueryKeyOrder {
        self.order
    }

    /// The same model with other weights in one tensor: rows in the format `quant`, `[rows, cols]` as before.
    ///
    /// # Panics
    /// If there is no such tensor, or `bytes` are not its rows.
    pub(crate) fn replacing(&self, name: &str, quant: QuantType, bytes: Bytes) -> Arc<Self> {
        let place = self.by_name[name];
        let mut tensors = self.tensors.clone();
        let TensorInfo { rows, cols, .. } = tensors[place];
        assert_eq!(quant.row_bytes(cols).map(|row| row * rows), Some(bytes.len()), "rows of {name}");
        let start = self.source.len();
        let range = start..start + bytes.len() as u64;
        tensors[place] = TensorInfo { name: name.to_owned(), quant, rows, cols, stored: Stored::Rows, range };
        Arc::new(Self {
            source: Source::join([self.source.clone(), Source::memory(bytes)], 1),
            path: None,
            folder: false,
            header_len: self.header_len,
            metadata: self.metadata.clone(),
            tensors,
            by_name: self.by_name.clone(),
            config: self.config.clone(),
            order: self.order,
            hashes: None,
        })
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

    /// Inverse frequencies of a rotary embedding for stages of a context, with the file's per-dimension factors if present.
    ///
    /// # Errors
    /// The factors do not number half the rotary dimensions, are not positive, or cannot be read.
    pub fn rotary_frequencies(&self, rope: &Rope, context: usize) -> Result<RotaryFrequencies, WeightsError> {
        let name = match rope.scaling {
            RopeScaling::Long { original_context, .. } if context > original_context => config::ROPE_FACTORS_LONG,
            RopeScaling::Long { .. } => config::ROPE_FACTORS_SHORT,
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } | RopeScaling::Yarn { .. } => {
                config::ROPE_FACTORS
            }
        };
        let factors = self.tensor(name).map(|t| t.to_f32()).transpose()?;
        rope.frequencies(factors.as_deref().map(|factors| (name, factors)))
    }

    /// The tokenizer described by the header.
    ///
    /// # Errors
    /// [`TokenizerError`]: no vocabulary, an inconsistent one, or an unsupported kind.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        let folder = self.path().filter(|_| self.folder).and_then(Path::parent);
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

fn open_part(path: &Path, number: usize, count: usize) -> Result<split::Part, WeightsError> {
    let source = Source::open(path, false).map_err(|error| missing_part(error, path, number, count))?;
    let header = header::read(&source, gguf::parse)?;
    Ok(split::Part { name: path.display().to_string(), source, header })
}

/// Says which part of a model is missing.
fn missing_part(error: WeightsError, path: &Path, number: usize, count: usize) -> WeightsError {
    if let WeightsError::Io { source, .. } = &error
        && source.kind() == std::io::ErrorKind::NotFound
    {
        return WeightsError::MissingPart { path: path.to_owned(), number: number + 1, count };
    }
    error
}

#[cfg(test)]
mod tests;
