//! Encodings of the rows between stages: as users name them, as jobs and frames carry them, and which of them
//! `--boundary auto` may use for a model, which `meshnode gate` measures and records.
use kernels::boundary::Codec;
use kernels_models::gate::Quality;
use node_core::id::ContentId;
use node_core::work::serve::{ModelSpec, RowCodec, RowFormat};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use transport::frame::Dtype;

/// The option `--boundary`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Boundary {
    /// The rows as they are
    Lossless,
    /// 16 bits per element
    F16,
    /// 8 bits per element, outliers apart
    Q8,
    /// 4.5 bits per element, outliers apart
    Q4,
    /// What pays on the links between the nodes, of the encodings that `meshnode gate` allows for the model
    Auto,
}

impl Boundary {
    /// The option with which a model is served.
    pub(crate) fn of(spec: &ModelSpec) -> Self {
        if spec.boundary.len() > 1 { Boundary::Auto } else { Boundary::from(spec.row().codec) }
    }

    /// The encodings to choose from, the most precise first. `allowed` reads those that [`Gate`] allows.
    pub(crate) fn codecs<E>(self, allowed: impl FnOnce() -> Result<Vec<Codec>, E>) -> Result<Vec<Codec>, E> {
        Ok(match self {
            Boundary::Lossless => vec![Codec::Lossless],
            Boundary::F16 => vec![Codec::F16],
            Boundary::Q8 => vec![Codec::Q8],
            Boundary::Q4 => vec![Codec::Q4],
            Boundary::Auto => {
                let allowed = allowed()?;
                let precise_first = Codec::ALL.into_iter();
                precise_first.filter(|codec| *codec == Codec::Lossless || allowed.contains(codec)).collect()
            }
        })
    }
}

impl From<RowCodec> for Boundary {
    fn from(codec: RowCodec) -> Self {
        match codec {
            RowCodec::Lossless => Boundary::Lossless,
            RowCodec::F16 => Boundary::F16,
            RowCodec::Q8 => Boundary::Q8,
            RowCodec::Q4 => Boundary::Q4,
        }
    }
}

/// Lets plans of a model choose from these encodings, the most precise first. Those that take no fewer bytes than one
/// before are left out.
pub(crate) fn offer(spec: &mut ModelSpec, codecs: &[Codec]) {
    let mut formats: Vec<RowFormat> = Vec::new();
    for codec in codecs {
        let bytes = codec.row_bytes(spec.width as usize).and_then(|bytes| u32::try_from(bytes).ok());
        let Some(bytes) = bytes else { continue };
        if formats.last().is_none_or(|before| bytes < before.bytes) {
            formats.push(RowFormat { codec: in_job(*codec), bytes });
        }
    }
    if let Some((first, coarser)) = formats.split_first() {
        spec.work.activation_bytes = first.bytes.into();
        spec.work.coarser_bytes = coarser.iter().map(|row| row.bytes.into()).collect();
    }
    spec.boundary = formats;
}

fn in_job(codec: Codec) -> RowCodec {
    match codec {
        Codec::Lossless => RowCodec::Lossless,
        Codec::F16 => RowCodec::F16,
        Codec::Q8 => RowCodec::Q8,
        Codec::Q4 => RowCodec::Q4,
    }
}

/// The codec of a job's rows.
pub(crate) fn codec(row: RowCodec) -> Codec {
    match row {
        RowCodec::Lossless => Codec::Lossless,
        RowCodec::F16 => Codec::F16,
        RowCodec::Q8 => Codec::Q8,
        RowCodec::Q4 => Codec::Q4,
    }
}

/// The element type of frames.
pub(crate) fn dtype(codec: Codec) -> Dtype {
    match codec {
        Codec::Lossless => Dtype::F32,
        Codec::F16 => Dtype::Rows16,
        Codec::Q8 => Dtype::Rows8,
        Codec::Q4 => Dtype::Rows4,
    }
}

/// Checks that an order's rows have the bytes that this version gives them.
///
/// # Errors
/// They have not.
pub(crate) fn check(row: RowFormat, width: u32) -> Result<(), String> {
    let codec = codec(row.codec);
    match codec.row_bytes(width as usize) {
        Some(bytes) if bytes == row.bytes as usize => Ok(()),
        Some(bytes) => Err(format!(
            "rows of {} bytes as {} for a width of {width}, expected {bytes}: run one version of meshnode on all nodes",
            row.bytes,
            codec.name()
        )),
        None => Err(format!("no encoding has rows of {width} elements: serve the model on one node")),
    }
}

/// What `meshnode gate` found for one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Gate {
    /// [`Gate::FORMAT`].
    pub(crate) format: u32,
    /// Content id of the model, hex.
    pub(crate) content: String,
    /// Its name when it was measured.
    pub(crate) model: String,
    /// The encodings that may be chosen automatically.
    pub(crate) allowed: Vec<String>,
    /// The measurements: each encoding with one cut and with two.
    pub(crate) measured: Vec<Quality>,
}

/// Why there is no usable measurement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GateError {
    /// There is none.
    #[error(
        "`--boundary auto` needs a measurement of {model}, found none at {path}: run `meshnode gate {model}` first",
        path = .path.display()
    )]
    Missing {
        /// The model.
        model: String,
        /// Where it was expected.
        path: PathBuf,
    },
    /// The file is of another model, of another version, or damaged.
    #[error("{path} is no measurement of {model}: {why}; delete it, and run `meshnode gate {model}`", path = .path.display())]
    Unusable {
        /// The model.
        model: String,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A system call failed.
    #[error("{path}: {source}; check the path, its permissions and the free space", path = .path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Gate {
    /// Version of the file.
    pub(crate) const FORMAT: u32 = 1;
    /// Bytes of a file: some hundred per measurement.
    const BYTES_MAX: u64 = 64 << 10;

    /// What was measured, and so what is allowed: encodings that pass with one cut and with two.
    pub(crate) fn new(content: ContentId, model: String, measured: Vec<Quality>) -> Self {
        let passes = |codec: &Codec| {
            let mut of_it = measured.iter().filter(|quality| quality.codec == codec.name()).peekable();
            of_it.peek().is_some() && of_it.all(Quality::passes)
        };
        let allowed = Codec::ALL.into_iter().filter(passes).map(|codec| codec.name().to_owned()).collect();
        Self { format: Self::FORMAT, content: hex(content), model, allowed, measured }
    }

    /// Where the measurement of a model is, in the folder of cached models: nodes of a machine share it.
    pub(crate) fn path(models: &Path, content: ContentId) -> PathBuf {
        models.join("gates").join(format!("{}.json", hex(content)))
    }

    /// Writes it atomically: after a crash the file is the old one or the new one.
    ///
    /// # Errors
    /// [`GateError::System`].
    pub(crate) fn write(&self, models: &Path, content: ContentId) -> Result<PathBuf, GateError> {
        let path = Self::path(models, content);
        let beside = path.with_extension("new");
        let written = || {
            std::fs::create_dir_all(path.parent().unwrap_or(models))?;
            let mut file = std::fs::File::create(&beside)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            std::fs::rename(&beside, &path)
        };
        match written() {
            Ok(()) => Ok(path),
            Err(source) => Err(GateError::System { path, source }),
        }
    }

    /// Reads the measurement of a model.
    ///
    /// # Errors
    /// There is none, or what is there is not one of this model.
    pub(crate) fn read(models: &Path, content: ContentId, model: &str) -> Result<Self, GateError> {
        let (path, model) = (Self::path(models, content), model.to_owned());
        let mut bytes = Vec::new();
        let read = std::fs::File::open(&path).and_then(|file| file.take(Self::BYTES_MAX + 1).read_to_end(&mut bytes));
        match read {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(GateError::Missing { model, path }),
            Err(source) => return Err(GateError::System { path, source }),
        }
        let unusable = |why: String| GateError::Unusable { model: model.clone(), path: path.clone(), why };
        if bytes.len() as u64 > Self::BYTES_MAX {
            return Err(unusable(format!("expected at most {} bytes, found more", Self::BYTES_MAX)));
        }
        let gate: Gate = serde_json::from_slice(&bytes).map_err(|e| unusable(e.to_string()))?;
        let expected = hex(content);
        if gate.format != Self::FORMAT {
            return Err(unusable(format!("expected format {}, found {}", Self::FORMAT, gate.format)));
        }
        if gate.content != expected {
            return Err(unusable(format!("expected content {expected}, found that of {}", gate.model)));
        }
        if let Some(name) = gate.allowed.iter().find(|name| Codec::from_name(name).is_none()) {
            return Err(unusable(format!("expected names of encodings, found `{name}`")));
        }
        Ok(gate)
    }

    /// The encodings that may be chosen automatically.
    pub(crate) fn codecs(&self) -> Vec<Codec> {
        self.allowed.iter().filter_map(|name| Codec::from_name(name)).collect()
    }
}

fn hex(content: ContentId) -> String {
    content.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
