//! Downloads a model of several files: the parts of a split GGUF file, or a Hugging Face folder. The server is asked for all
//! files first, so that a missing one or a full disk is reported before anything is downloaded.
use super::http::{self, Remote};
use super::{Progress, PullError, Sources, require_space};
use kernels_models::weights::parts::{FOLDER_INDEX, FOLDER_WEIGHTS, index_names};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Files downloaded at once: the hub limits each connection to a fraction of a fast line.
const AT_ONCE: usize = 4;
/// Files of a folder besides the weights, and whether the model does not work without them.
const BESIDE: [(&str, bool); 4] =
    [("config.json", true), ("tokenizer.json", true), ("tokenizer_config.json", false), ("chat_template.jinja", false)];

/// Where the files come from and where they go: `{url}/NAME` becomes `dir/NAME`.
pub(super) struct Place<'a> {
    pub(super) url: String,
    pub(super) dir: PathBuf,
    pub(super) sources: &'a Sources,
    pub(super) progress: &'a dyn Progress,
}

/// A file to download.
struct Wanted {
    remote: Remote,
    target: PathBuf,
}

impl Place<'_> {
    /// Downloads all parts of a split file.
    pub(super) fn parts(&self, names: &[String]) -> Result<(), PullError> {
        let ask = |name: &String| self.ask(name)?.ok_or_else(|| http::not_found(&self.url_of(name)));
        let wanted = self.absent(names).map(ask).collect::<Result<Vec<_>, _>>()?;
        self.download(&wanted)
    }

    /// Downloads a model folder; returns the file that describes its weights.
    pub(super) fn folder(&self) -> Result<PathBuf, PullError> {
        let mut wanted = Vec::new();
        for (name, required) in BESIDE {
            if self.dir.join(name).is_file() {
                continue;
            }
            match self.ask(name)? {
                Some(file) => wanted.push(file),
                None if required => return Err(PullError::NoFolder { url: self.url.clone(), missing: name }),
                None => {}
            }
        }
        // The index first: it names the other files.
        let index = self.dir.join(FOLDER_INDEX);
        if !index.is_file()
            && let Some(file) = self.ask(FOLDER_INDEX)?
        {
            self.download(&[file])?;
        }
        let (weights, names) = if index.is_file() {
            let text = std::fs::read(&index).map_err(|e| PullError::storage(&index, e))?;
            let names = index_names(&text);
            let names = names.map_err(|e| PullError::Http { url: self.url_of(FOLDER_INDEX), what: e.to_string() })?;
            (index, names)
        } else {
            (self.dir.join(FOLDER_WEIGHTS), vec![FOLDER_WEIGHTS.to_owned()])
        };
        for name in self.absent(&names) {
            let missing = || PullError::NoFolder { url: self.url.clone(), missing: FOLDER_WEIGHTS };
            wanted.push(self.ask(name)?.ok_or_else(missing)?);
        }
        self.download(&wanted)?;
        Ok(weights)
    }

    fn url_of(&self, name: &str) -> String {
        format!("{}/{}", self.url, http::encode_path(name))
    }

    fn absent<'a>(&'a self, names: &'a [String]) -> impl Iterator<Item = &'a String> {
        names.iter().filter(|name| !self.dir.join(name).is_file())
    }

    fn ask(&self, name: &str) -> Result<Option<Wanted>, PullError> {
        let remote = Remote::ask(&self.url_of(name), self.sources.hub_token.as_deref(), None)?;
        Ok(remote.map(|remote| Wanted { remote, target: self.dir.join(name) }))
    }

    /// Downloads files in parallel. After an error no further file is begun; the partial files stay.
    fn download(&self, files: &[Wanted]) -> Result<(), PullError> {
        let kept: Vec<u64> = files.iter().map(|file| file.remote.kept(&file.target)).collect();
        let total = files.iter().map(|file| file.remote.bytes()).sum::<Option<u64>>();
        let have: u64 = kept.iter().sum();
        if let Some(total) = total {
            require_space(&self.dir, total.saturating_sub(have))?;
        }
        let what = match files {
            [] => return Ok(()),
            [only] => only.target.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            [first, ..] => format!("{} and {} more", name_of(&first.target), files.len() - 1),
        };
        self.progress.start(&what, have, total);
        let (next, failed, error) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let done = Mutex::new(kept);
        std::thread::scope(|scope| {
            for _ in 0..AT_ONCE.min(files.len()) {
                scope.spawn(|| {
                    while !failed.load(Ordering::Relaxed)
                        && let number = next.fetch_add(1, Ordering::Relaxed)
                        && let Some(Wanted { remote, target }) = files.get(number)
                    {
                        let progress = Share { whole: self.progress, done: &done, number };
                        let token = self.sources.hub_token.as_deref();
                        if let Err(cause) = remote.download(token, target, &progress) {
                            failed.store(true, Ordering::Relaxed);
                            error.lock().get_or_insert(cause);
                        }
                    }
                });
            }
        });
        error.into_inner().map_or(Ok(()), Err)
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The progress of one of several files, reported as that of all.
struct Share<'a> {
    whole: &'a dyn Progress,
    done: &'a Mutex<Vec<u64>>,
    number: usize,
}

impl Progress for Share<'_> {
    fn start(&self, _: &str, from: u64, _: Option<u64>) {
        self.at(from);
    }

    fn at(&self, bytes: u64) {
        let mut done = self.done.lock();
        done[self.number] = bytes;
        self.whole.at(done.iter().sum());
    }

    fn note(&self, text: &str) {
        self.whole.note(text);
    }
}
