//! Writes a model as a `.mesh` file, exactly or with fewer bits per weight.
//!
//! [`prepare`] decides the format of each tensor, [`Prepared::write`] writes them one after another. An interrupted file is continued
//! after its last complete tensor. Memory is bounded by a slab per call and a few rows per thread; the sensitivity pass holds one layer.
//! Next: `quantize/formats.rs` (which format), `quantize/sensitivity.rs`, `quantize/output.rs` (the file),
//! `weights/mesh/FORMAT.md`.
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::stage::StageError;
use crate::tokenizer::TokenizerError;
use crate::weights::mesh::{Planned, Sketch};
use crate::weights::{IndexError, ModelFile, ShardIndex, Stored, WeightsError};
use formats::Formats;
use output::Output;

mod encode;
mod formats;
mod output;
mod sensitivity;

/// Bits per weight of a file's matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bits {
    /// The formats of the source: the same weights and the same results, bit for bit.
    Keep,
    /// Q4_Z, found by a search.
    Four,
    /// Q8_0.
    Eight,
    /// F16; BF16 where the source is BF16 or has weights beyond F16.
    Sixteen,
    /// Four, eight or sixteen bits by a measurement of what each tensor needs, within this mean number of bits per weight.
    Auto {
        /// Most bits per weight of all matrices, as they are in the file.
        target: f64,
    },
}

/// Bits per weight of [`Bits::Auto`] if none are named: Q4_Z, and a quarter of the weights in eight bits.
pub const TARGET_DEFAULT: f64 = 5.5;

/// How to write a file.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOptions {
    /// Bits per weight.
    pub bits: Bits,
    /// Whether to replace an existing file.
    pub force: bool,
    /// Threads of the sensitivity pass.
    pub threads: usize,
}

/// Receives progress.
pub trait QuantizeProgress: Sync {
    /// A pass over this number of bytes starts, some of which are done.
    fn start(&self, what: &str, done: u64, total: u64);
    /// Bytes done so far.
    fn at(&self, done: u64);
}

/// A file that can be written.
pub struct Prepared {
    file: Arc<ModelFile>,
    out: PathBuf,
    output: Output,
    /// Relative error of each layer's output if the tensor alone has the fewest bits, where it was measured.
    sensitivities: BTreeMap<String, f64>,
}

/// What was written.
#[derive(Clone, Debug, Serialize)]
pub struct Written {
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub file_bytes: u64,
    /// Content id: the hash of its shard index.
    pub content: String,
    /// Bits per weight of all matrices, as they are in the file.
    pub bits_per_weight: f64,
    /// Bytes by format.
    pub formats: BTreeMap<&'static str, u64>,
    /// Tensors that an earlier, interrupted call had written.
    pub resumed: usize,
    /// All tensors, in file order.
    pub tensors: Vec<WrittenTensor>,
}

/// A tensor that was written.
#[derive(Clone, Debug, Serialize)]
pub struct WrittenTensor {
    /// Its name.
    pub name: String,
    /// Its format.
    pub format: &'static str,
    /// Root of its squared error relative to its weights; 0 if it is exact, `None` if an earlier call wrote it.
    pub relative_error: Option<f64>,
    /// Root of the relative squared error of its layer's output if it alone has the fewest bits; only if it was measured.
    pub sensitivity: Option<f64>,
}

/// Decides the formats, and opens the unfinished file of an earlier call with the same source and bits, if there is one.
///
/// # Errors
/// [`QuantizeError`]: the two files are one, `out` exists, the source cannot be read, or there is no file of that many bits.
pub fn prepare(
    file: &Arc<ModelFile>,
    out: &Path,
    options: &QuantizeOptions,
    progress: &dyn QuantizeProgress,
) -> Result<Prepared, QuantizeError> {
    check_paths(file, out, options.force)?;
    if let Err(error @ TokenizerError::NoFile { .. }) = file.tokenizer() {
        return Err(error.into());
    }
    verify(file, progress)?;
    let (part, key) = (part_of(out), key(file, options.bits));
    let order = order(file);
    let mut sensitivities = BTreeMap::new();
    let planned = match output::planned(&part, &key).filter(|planned| agree(file, &order, planned)) {
        Some(planned) => planned,
        None => {
            let formats = match options.bits {
                Bits::Auto { target } => {
                    formats::check_target(file, target)?;
                    sensitivities = sensitivity::measure(file, options.threads, progress)?;
                    Formats::within(file, &sensitivities, target)?
                }
                Bits::Keep | Bits::Four | Bits::Eight | Bits::Sixteen => Formats::fixed(file, options.bits)?,
            };
            order.iter().map(|&number| formats.planned(file, number)).collect()
        }
    };
    let sketch = Sketch::of(file.metadata(), file.query_key_order(), planned)?;
    let output = Output::open(&part, sketch, &key)?;
    Ok(Prepared { file: file.clone(), out: out.to_owned(), output, sensitivities })
}

impl Prepared {
    /// Length of the finished file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.output.sketch().file_len
    }

    /// Bytes that are not on disk yet.
    #[must_use]
    pub fn bytes_left(&self) -> u64 {
        self.output.bytes_left()
    }

    /// Writes the file and gives it its name.
    ///
    /// # Errors
    /// [`QuantizeError`]: a weight is not finite, the disk is full, the source changed. What was written stays, and the next call
    /// with the same source and bits continues it.
    pub fn write(mut self, progress: &dyn QuantizeProgress) -> Result<Written, QuantizeError> {
        let resumed = self.output.complete();
        progress.start("writing", self.output.bytes_done(), self.file_bytes());
        let mut errors = BTreeMap::new();
        for number in resumed..self.output.sketch().tensors.len() {
            let tensor = self.output.sketch().tensors[number].clone();
            let source = self.file.tensor(&tensor.name).expect("planned from this file");
            let error = self.output.put(number, |rows, out| encode::encode(&source, &tensor, rows, out), progress)?;
            errors.insert(tensor.name, error);
        }
        self.file.check_unchanged()?;
        self.output.finish(&self.out)?;
        let written = ModelFile::open(&self.out)?;
        let index = ShardIndex::recorded(&written)?.expect("a .mesh file records its index");
        let mut formats = BTreeMap::new();
        for tensor in written.tensors() {
            *formats.entry(tensor.quant.name()).or_insert(0) += tensor.range.end - tensor.range.start;
        }
        let tensors = written.tensors().iter().map(|tensor| WrittenTensor {
            name: tensor.name.clone(),
            format: tensor.quant.name(),
            relative_error: errors.get(&tensor.name).copied(),
            sensitivity: self.sensitivities.get(&tensor.name).map(|square| square.sqrt()),
        });
        Ok(Written {
            path: self.out.clone(),
            file_bytes: written.file_len(),
            content: blake3::Hash::from_bytes(index.content_id()).to_hex().to_string(),
            bits_per_weight: bits_per_weight(&written),
            formats,
            resumed,
            tensors: tensors.collect(),
        })
    }
}

/// Mean bits per weight of a file's matrices, as they are stored.
#[must_use]
pub fn bits_per_weight(file: &ModelFile) -> f64 {
    let matrices = file.tensors().iter().filter(|tensor| !formats::is_vector(tensor));
    let (bytes, weights) = matrices.fold((0, 0), |(bytes, weights), tensor| {
        (bytes + tensor.range.end - tensor.range.start, weights + tensor.rows as u64 * tensor.cols as u64)
    });
    8.0 * bytes as f64 / weights.max(1) as f64
}

/// Compares a `.mesh` file with the hashes that it records: the new file would record those of damaged chunks.
fn verify(file: &ModelFile, progress: &dyn QuantizeProgress) -> Result<(), QuantizeError> {
    if file.recorded_hashes().is_none() {
        return Ok(());
    }
    progress.start("verifying", 0, file.file_len());
    let done = AtomicU64::new(0);
    ShardIndex::build(file, |bytes| progress.at(done.fetch_add(bytes, Ordering::Relaxed) + bytes))?;
    Ok(())
}

/// The name of an unfinished file.
fn part_of(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    out.with_file_name(name)
}

fn check_paths(file: &ModelFile, out: &Path, force: bool) -> Result<(), QuantizeError> {
    let Ok(there) = std::fs::metadata(out) else { return Ok(()) };
    let is_out = |path: &Path| {
        std::fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (there.dev(), there.ino()))
    };
    if file.files().any(is_out) {
        return Err(QuantizeError::Same { path: out.to_owned() });
    }
    if there.is_dir() || !force {
        return Err(QuantizeError::Exists { path: out.to_owned() });
    }
    Ok(())
}

/// Names what is written: the source and the bits.
fn key(file: &ModelFile, bits: Bits) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&file.stamp()).update(format!("{bits:?}").as_bytes());
    hasher.finalize().into()
}

/// The order of the tensors in the file: the embedding, the layers, the output, so that each stage is one range of bytes.
fn order(file: &ModelFile) -> Vec<usize> {
    let place = |name: &str| match name {
        "output.weight" | "output_norm.weight" => (2, 0),
        name => crate::weights::config::layer_of(name).map_or((0, 0), |layer| (1, layer)),
    };
    let mut order: Vec<usize> = (0..file.tensors().len()).collect();
    order.sort_by_key(|&number| (place(&file.tensors()[number].name), number));
    order
}

/// Whether an unfinished file has these tensors.
fn agree(file: &ModelFile, order: &[usize], planned: &[Planned]) -> bool {
    let same = |(&number, planned): (&usize, &Planned)| {
        let tensor = &file.tensors()[number];
        let stored = if formats::is_vector(tensor) { Stored::Rows } else { Stored::Tiles };
        (&tensor.name, tensor.rows, tensor.cols, stored) == (&planned.name, planned.rows, planned.cols, planned.stored)
    };
    order.len() == planned.len() && order.iter().zip(planned).all(same)
}

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// Source and target are one file.
    #[error("{path} is the model that is read: choose another name for the file to write")]
    Same {
        /// The file.
        path: PathBuf,
    },
    /// The target exists.
    #[error("{path} exists: choose another name, or replace it with --force")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Another process writes the file.
    #[error("{path} is being written by another process: wait until it is done, or choose another name")]
    Busy {
        /// The unfinished file.
        path: PathBuf,
    },
    /// The target cannot be written.
    #[error("cannot write {path}: {source}; what is written is kept in it, and the same command continues it")]
    Write {
        /// The unfinished file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The disk is full.
    #[error(
        "the disk is full: {path} cannot be written; free some space and run the same command again, which continues it, or choose \
         another folder"
    )]
    DiskFull {
        /// The unfinished file.
        path: PathBuf,
    },
    /// There is no file of that many bits.
    #[error("expected --target-bpw of at least {least:.2} for this model, found {target:.2}")]
    Target {
        /// The fewest bits per weight.
        least: f64,
        /// What was asked for.
        target: f64,
    },
    /// The source cannot be read, or is damaged.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The source is damaged.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The source has no vocabulary.
    #[error(transparent)]
    Words(#[from] TokenizerError),
    /// The model cannot be computed, so its tensors cannot be measured.
    #[error("the sensitivity of {what} cannot be measured: {source}; choose --bits 4 or --bits 8")]
    Measure {
        /// Name of the tensor, or the layer.
        what: String,
        /// Cause.
        source: StageError,
    },
}

impl QuantizeError {
    /// Maps an error of the file system.
    fn write(path: &Path, source: std::io::Error) -> Self {
        let path = path.to_owned();
        if matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
            return Self::DiskFull { path };
        }
        Self::Write { path, source }
    }
}

#[cfg(test)]
mod tests;
