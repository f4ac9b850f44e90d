//! Weights by content: what this node can give, and how it gets its share of a model from peers.
//!
//! A model is known by the hash of its shard index. A node that lacks the file keeps a sparse file of the same layout:
//! header and the chunks of its own layers are there, the rest are holes. Every chunk is verified before it is written.
use crate::disk::{self, NoRoom};
use kernels::weights::{ModelFile, ShardIndex};
use node_core::id::{ContentId, NodeId};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Chunks asked for at once: enough to fill a link of 1 Gbit/s at 20 ms with chunks of 1 MiB.
const CHUNKS_IN_FLIGHT: usize = 8;
/// Largest shard index taken from a peer: 40 bytes a chunk, a terabyte of weights.
pub const INDEX_BYTES_MAX: usize = 64 << 20;
/// Largest chunk taken from a peer, with room for the status byte.
pub const CHUNK_BYTES_MAX: usize = (1 << 20) + 1;
/// How often one chunk is asked for before a stage gives up: each source once, then once more.
const ROUNDS: usize = 2;

/// Asks a peer for bytes; implemented by the data plane.
pub trait Ask: Send + Sync + 'static {
    /// Sends a request and collects at most `max` bytes of answer.
    fn ask(
        &self,
        node: NodeId,
        request: Vec<u8>,
        max: usize,
    ) -> impl std::future::Future<Output = Result<Vec<u8>, String>> + Send;
}

/// A model on this node's disk, whole or in part.
pub struct Held {
    /// Hash of its shard index.
    pub content: ContentId,
    /// The mapped file.
    pub file: Arc<ModelFile>,
    index: Arc<ShardIndex>,
    path: PathBuf,
    /// Chunks that are there; all of them for a whole file.
    have: Mutex<Vec<bool>>,
    whole: bool,
}

impl Held {
    fn have(&self) -> Vec<bool> {
        self.have.lock().expect("no panics under this lock").clone()
    }
}

/// Every model this node holds.
pub struct Library {
    dir: PathBuf,
    held: Mutex<BTreeMap<ContentId, Arc<Held>>>,
}

/// Why weights could not be had.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The file is not a model we can read.
    #[error("{0}")]
    Model(String),
    /// The disk is too full for this node's share. What was fetched before is kept.
    #[error(transparent)]
    Full(#[from] NoRoom),
    /// The disk refused. What was fetched before is kept.
    #[error("cannot write {path}: {cause}", path = .path.display(), cause = disk::explain(.cause, disk::FREE_CACHE))]
    Disk {
        /// Where.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// No peer could give it.
    #[error("no peer could give {what}: {last}")]
    Peers {
        /// What was asked for.
        what: String,
        /// The last answer.
        last: String,
    },
}

impl Library {
    /// A library that keeps indices and partial files under `dir`.
    ///
    /// # Errors
    /// `dir` cannot be made.
    pub fn open(dir: &Path) -> Result<Self, TransferError> {
        std::fs::create_dir_all(dir).map_err(|cause| TransferError::Disk { path: dir.to_owned(), cause })?;
        Ok(Self { dir: dir.to_owned(), held: Mutex::new(BTreeMap::new()) })
    }

    /// Takes a whole file in. Its index is read from the side file if the model has not changed since, else made (one
    /// pass over the file) and kept.
    ///
    /// # Errors
    /// The file is not a model we can read. A side file that cannot be written only costs time the next time.
    pub fn add(&self, path: &Path) -> Result<Arc<Held>, TransferError> {
        let file = ModelFile::open(path).map_err(|e| TransferError::Model(e.to_string()))?;
        let index = Arc::new(self.index_of(path, &file)?);
        let content = ContentId(index.content_id());
        let mut held = self.lock();
        if let Some(known) = held.get(&content)
            && known.whole
        {
            return Ok(known.clone());
        }
        let have = Mutex::new(vec![true; index.chunks().len()]);
        let entry = Arc::new(Held { content, file, index, path: path.to_owned(), have, whole: true });
        held.insert(content, entry.clone());
        Ok(entry)
    }

    /// Takes every model file of a folder in whose index is already known; others wait until they are asked for.
    pub fn add_known(&self, models_dir: &Path) {
        for entry in std::fs::read_dir(models_dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|e| e == "gguf")
                && self.side_file(&path).exists()
                && let Err(e) = self.add(&path)
            {
                tracing::warn!("{} is not served to peers: {e}", path.display());
            }
        }
    }

    /// Contents held whole.
    pub fn contents(&self) -> Vec<ContentId> {
        self.lock().values().filter(|h| h.whole).map(|h| h.content).collect()
    }

    /// Answers a peer's request: a status byte (1: here it is), then the bytes.
    pub fn answer(&self, request: &[u8]) -> Vec<u8> {
        self.find(request).map_or_else(|| vec![0], |bytes| [&[1], bytes.as_slice()].concat())
    }

    /// This node's share of a model for the given layers, fetched where it is missing.
    ///
    /// # Errors
    /// No source has it, the disk is full, or what came is not a model.
    pub async fn share(
        &self,
        content: ContentId,
        layers: Range<usize>,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<Arc<Held>, TransferError> {
        let known = self.lock().get(&content).cloned();
        if let Some(held) = known.filter(|h| h.whole) {
            return Ok(held);
        }
        let partial = self.partial(content, sources, ask).await?;
        let header: Vec<usize> = partial.index.chunks_for(&[partial.header()]);
        partial.fetch(&header, sources, ask).await?;
        let file = partial.open()?;
        let needed = partial.index.chunks_for(&file.stage_ranges(layers));
        partial.fetch(&needed, sources, ask).await?;
        let mut have = partial.have.lock().expect("no panics under this lock").clone();
        let file = partial.open()?;
        let mut library = self.lock();
        // What another job fetched of it at the same time is in the same file.
        if let Some(known) = library.get(&content) {
            have.iter_mut().zip(&known.have()).for_each(|(mine, theirs)| *mine |= theirs);
        }
        let (index, path, have) = (partial.index.clone(), partial.path.clone(), Mutex::new(have));
        let held = Arc::new(Held { content, file, index, path, have, whole: false });
        library.insert(content, held.clone());
        Ok(held)
    }

    async fn partial(
        &self,
        content: ContentId,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<Arc<Partial>, TransferError> {
        let name = blake3::Hash::from_bytes(content.0).to_hex();
        let side = self.dir.join(format!("{name}.index"));
        let kept = std::fs::read(&side).ok().and_then(|b| ShardIndex::decode(&b).ok());
        let index = match kept.filter(|i| i.content_id() == content.0) {
            Some(index) => index,
            None => {
                let index = fetch_index(content, sources, ask).await?;
                write(&side, &index.encode())?;
                index
            }
        };
        let path = self.dir.join(format!("{name}.gguf"));
        let disk = |cause| TransferError::Disk { path: path.clone(), cause };
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(disk)?;
        let known = self.lock().get(&content).map(|held| held.have());
        let fits = file.metadata().map_err(disk)?.len() == index.file_len();
        if !fits {
            file.set_len(0).and_then(|()| file.set_len(index.file_len())).map_err(disk)?;
        }
        let partial = tokio::task::spawn_blocking(move || {
            // What this life has seen of the file already is not hashed again: a stage that moves waits for this.
            let have = Mutex::new(known.filter(|_| fits).unwrap_or_else(|| present(&file, &index)));
            Partial { index: Arc::new(index), path, file, have }
        });
        partial.await.map(Arc::new).map_err(interrupted)
    }

    fn index_of(&self, path: &Path, file: &Arc<ModelFile>) -> Result<ShardIndex, TransferError> {
        let disk = |cause| TransferError::Disk { path: path.to_owned(), cause };
        let stat = std::fs::metadata(path).map_err(disk)?;
        let stamp = [stat.len().to_le_bytes(), stat.mtime().to_le_bytes(), stat.mtime_nsec().to_le_bytes()].concat();
        let side = self.side_file(path);
        if let Ok(bytes) = std::fs::read(&side)
            && let Some(encoded) = bytes.strip_prefix(stamp.as_slice())
            && let Ok(index) = ShardIndex::decode(encoded)
        {
            return Ok(index);
        }
        let index = ShardIndex::build(file, |_bytes| {}).map_err(|e| TransferError::Model(e.to_string()))?;
        if let Err(e) = write(&side, &[stamp, index.encode()].concat()) {
            tracing::warn!("the index of {} is not kept: {e}", path.display());
        }
        Ok(index)
    }

    fn side_file(&self, path: &Path) -> PathBuf {
        let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        self.dir.join(format!("{}.side", blake3::hash(canonical.as_os_str().as_encoded_bytes()).to_hex()))
    }

    fn find(&self, request: &[u8]) -> Option<Vec<u8>> {
        let (content, what) = Request::decode(request)?;
        let held = self.lock().get(&content).cloned()?;
        match what {
            Request::Index => Some(held.index.encode()),
            Request::Chunk(number) => {
                let number = number as usize;
                if !*held.have.lock().expect("no panics under this lock").get(number)? {
                    return None;
                }
                read_chunk(&File::open(&held.path).ok()?, &held.index.chunks().get(number)?.range)
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<ContentId, Arc<Held>>> {
        self.held.lock().expect("no panics under this lock")
    }
}

/// A sparse file that is being filled.
struct Partial {
    index: Arc<ShardIndex>,
    path: PathBuf,
    file: File,
    have: Mutex<Vec<bool>>,
}

impl Partial {
    /// Writes a chunk in its place, if it is the right one.
    fn keep(&self, chunk: usize, bytes: &[u8]) -> Result<bool, TransferError> {
        if !self.index.verify(chunk, bytes) {
            return Ok(false);
        }
        let disk = |cause| TransferError::Disk { path: self.path.clone(), cause };
        self.file.write_all_at(bytes, self.index.chunks()[chunk].range.start).map_err(disk)?;
        self.have.lock().expect("no panics under this lock")[chunk] = true;
        Ok(true)
    }

    fn header(&self) -> Range<u64> {
        0..self.index.header_len()
    }

    fn open(&self) -> Result<Arc<ModelFile>, TransferError> {
        ModelFile::open_partial(&self.path).map_err(|e| TransferError::Model(e.to_string()))
    }

    /// Fetches the chunks that are missing, several at a time, each from the first source that gives it intact.
    async fn fetch(
        self: &Arc<Self>,
        chunks: &[usize],
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<(), TransferError> {
        let missing: Vec<usize> = {
            let have = self.have.lock().expect("no panics under this lock");
            chunks.iter().copied().filter(|&c| !have[c]).collect()
        };
        let bytes = |&chunk: &usize| {
            let range = &self.index.chunks()[chunk].range;
            range.end - range.start
        };
        let need = missing.iter().map(bytes).sum();
        disk::require(disk::free_bytes(&self.path), need, "weights from peers", &self.path, disk::FREE_CACHE)?;
        let mut running = tokio::task::JoinSet::new();
        let mut waiting = missing.into_iter();
        loop {
            while running.len() < CHUNKS_IN_FLIGHT
                && let Some(chunk) = waiting.next()
            {
                let (partial, ask, sources) = (self.clone(), ask.clone(), sources.to_vec());
                running.spawn(async move { partial.fetch_one(chunk, &sources, &*ask).await });
            }
            match running.join_next().await {
                None => return Ok(()),
                Some(result) => result.map_err(interrupted)??,
            }
        }
    }

    async fn fetch_one(
        self: &Arc<Self>,
        chunk: usize,
        sources: &[NodeId],
        ask: &impl Ask,
    ) -> Result<(), TransferError> {
        let mut last = "there is no source".to_owned();
        let request = Request::Chunk(chunk as u32).encode(ContentId(self.index.content_id()));
        for source in sources.iter().cycle().take(sources.len() * ROUNDS) {
            match ask.ask(*source, request.clone(), CHUNK_BYTES_MAX).await {
                Ok(answer) if answer.first() == Some(&1) => {
                    let partial = self.clone();
                    let kept = tokio::task::spawn_blocking(move || partial.keep(chunk, &answer[1..]));
                    if kept.await.map_err(interrupted)?? {
                        return Ok(());
                    }
                    last = format!("{source} gave bytes whose hash is wrong");
                }
                Ok(_) => last = format!("{source} does not hold it"),
                Err(e) => last = format!("{source}: {e}"),
            }
        }
        Err(TransferError::Peers { what: format!("chunk {chunk} of {}", self.index.chunks().len()), last })
    }
}

/// A task that hashes or writes did not end: the node is going down.
fn interrupted(error: tokio::task::JoinError) -> TransferError {
    TransferError::Peers { what: "the weights".into(), last: format!("fetching was interrupted: {error}") }
}

/// Which chunks of a partial file are there and intact: what a former life fetched is kept, torn writes are not.
fn present(file: &File, index: &ShardIndex) -> Vec<bool> {
    let blocks = file.metadata().map_or(0, |m| m.blocks());
    if blocks == 0 {
        return vec![false; index.chunks().len()];
    }
    let intact = |c: usize| read_chunk(file, &index.chunks()[c].range).is_some_and(|bytes| index.verify(c, &bytes));
    (0..index.chunks().len()).map(|c| has_data(file, &index.chunks()[c].range) && intact(c)).collect()
}

/// Whether anything was ever written there: holes of a large file need not be read.
fn has_data(file: &File, range: &Range<u64>) -> bool {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(range.start)) {
        Ok(data) => data < range.end,
        Err(rustix::io::Errno::NXIO) => false, // nothing from here to the end
        Err(_) => true,                        // this file system does not tell
    }
}

async fn fetch_index(content: ContentId, sources: &[NodeId], ask: &Arc<impl Ask>) -> Result<ShardIndex, TransferError> {
    let mut last = "there is no source".to_owned();
    for source in sources {
        match ask.ask(*source, Request::Index.encode(content), INDEX_BYTES_MAX).await {
            Ok(answer) => match answer.split_first() {
                Some((1, bytes)) => match ShardIndex::decode(bytes) {
                    Ok(index) if index.content_id() == content.0 => return Ok(index),
                    Ok(_) => last = format!("{source} gave another model's index"),
                    Err(e) => last = format!("{source} gave a damaged index: {e}"),
                },
                _ => last = format!("{source} does not hold it"),
            },
            Err(e) => last = format!("{source}: {e}"),
        }
    }
    Err(TransferError::Peers { what: format!("the index of model {content:?}"), last })
}

fn read_chunk(file: &File, range: &Range<u64>) -> Option<Vec<u8>> {
    let len = usize::try_from(range.end - range.start).ok().filter(|&n| n < CHUNK_BYTES_MAX)?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, range.start).ok()?;
    Some(bytes)
}

/// Writes beside and renames, so that a reader never sees half a file.
fn write(path: &Path, bytes: &[u8]) -> Result<(), TransferError> {
    let beside = path.with_extension(format!("tmp{}", std::process::id()));
    std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path)).map_err(|cause| {
        let _ = std::fs::remove_file(&beside);
        TransferError::Disk { path: path.to_owned(), cause }
    })
}

/// What one node asks another: a tag, the content, and for a chunk its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Index,
    Chunk(u32),
}

impl Request {
    fn encode(self, content: ContentId) -> Vec<u8> {
        let (tag, number) = match self {
            Request::Index => (1, 0),
            Request::Chunk(number) => (2, number),
        };
        [&[tag], content.0.as_slice(), &number.to_le_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<(ContentId, Request)> {
        let bytes: &[u8; 37] = bytes.try_into().ok()?;
        let content = ContentId(bytes[1..33].try_into().ok()?);
        let number = u32::from_le_bytes(bytes[33..].try_into().ok()?);
        match bytes[0] {
            1 => Some((content, Request::Index)),
            2 => Some((content, Request::Chunk(number))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
