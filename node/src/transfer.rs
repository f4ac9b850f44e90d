//! Weights by content: what this node can give, and how it gets its share of a model from peers.
//!
//! A model is known by the hash of its shard index. A node that lacks the file keeps a sparse file of the same layout:
//! header and the chunks of its own layers are there, the rest are holes. Every chunk is verified before it is written,
//! and what is there is given to others, also while the rest still comes.
//! Next: `transfer/schedule.rs` (who is asked for what), `transfer/fetch.rs` (asking), `transfer/cache.rs` (the limit).
use crate::disk::{self, NoRoom};
use fetch::Swarm;
use holding::Holding;
use kernels::weights::{ModelFile, ShardIndex};
use ledger::Ledger;
use node_core::id::{ContentId, NodeId};
use request::encode_bitmap;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

pub use cache::Cache;
pub use ledger::{PeerWeights, TransferView};
pub use request::WeightsRequest;

mod cache;
mod fetch;
mod holding;
mod ledger;
mod request;
mod schedule;

/// Largest shard index taken from a peer: 40 bytes a chunk, a terabyte of weights.
pub const INDEX_BYTES_MAX: usize = 64 << 20;
/// Largest chunk taken from a peer, with room for the status byte.
pub const CHUNK_BYTES_MAX: usize = (1 << 20) + 1;

/// Asks a peer for bytes; implemented by the data plane.
pub trait Ask: Send + Sync + 'static {
    /// Sends a request and collects at most `max` bytes of answer.
    fn ask(
        &self,
        node: NodeId,
        request: Vec<u8>,
        max: usize,
    ) -> impl std::future::Future<Output = Result<Vec<u8>, String>> + Send;

    /// What all answers together may take of this node's link at present; `None` is all there is.
    fn bytes_per_second(&self) -> Option<u64> {
        None
    }
}

/// A model on this node's disk, whole or in part. As long as it (or its file) is held, it stays in the cache.
pub struct Held {
    /// Hash of its shard index.
    pub content: ContentId,
    /// The open file.
    pub file: Arc<ModelFile>,
    /// Bytes of weights that came from peers when it was asked for; the header, which every share needs, is not counted.
    pub fetched_bytes: u64,
}

/// Every model this node holds.
pub struct Library {
    cache: Cache,
    held: Mutex<BTreeMap<ContentId, Arc<Holding>>>,
    ledger: Arc<Ledger>,
}

/// What people see of a library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WeightsView {
    /// Where weights from peers are kept.
    pub cache_dir: PathBuf,
    /// Bytes they take.
    pub cache_used: u64,
    /// Bytes they may take.
    pub cache_limit: u64,
    /// Chunks given to peers since the start of this node.
    pub given_chunks: u64,
    /// Their bytes.
    pub given_bytes: u64,
    /// What peers gave since the start of this node.
    pub peers: Vec<PeerWeights>,
    /// What is being fetched.
    pub transfers: Vec<TransferView>,
}

/// Why weights could not be had.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The file is not a model we can read.
    #[error("{0}")]
    Model(String),
    /// The disk or the cache is too full for this node's share. What was fetched before is kept.
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
    /// No peer could give it. What was fetched before is kept.
    #[error("no peer could give {what}: {last}")]
    Peers {
        /// What was asked for.
        what: String,
        /// The last answer.
        last: String,
    },
}

impl Library {
    /// A library that keeps indices and what comes from peers in `cache`; what it holds from former lives is given to
    /// peers from the start.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn open(cache: Cache) -> Result<Self, TransferError> {
        let dir = cache.dir();
        std::fs::create_dir_all(dir).map_err(|cause| TransferError::Disk { path: dir.to_owned(), cause })?;
        let kept = |entry: cache::Entry| {
            let path = cache.weights(entry.content);
            let index = cache.kept_index(entry.content).filter(|_| path.is_file())?;
            let holding = Holding::sparse(&path, index).inspect_err(|e| tracing::warn!("{e}")).ok()?;
            Some((entry.content, Arc::new(holding)))
        };
        let held = cache.entries().into_iter().filter_map(kept).collect();
        Ok(Self { cache, held: Mutex::new(held), ledger: Arc::default() })
    }

    /// Takes a whole file in. Its index is read from the side file if the model has not changed since, else made (one
    /// pass over the file) and kept.
    ///
    /// # Errors
    /// The file is not a model we can read. A side file that cannot be written only costs time the next time.
    pub fn add(&self, path: &Path) -> Result<Held, TransferError> {
        let file = ModelFile::open(path).map_err(|e| TransferError::Model(e.to_string()))?;
        let path = file.path().unwrap_or(path); // of a folder the weights in it
        let index = Arc::new(self.index_of(path, &file)?);
        let content = ContentId(index.content_id());
        let mut held = self.lock();
        // One that was written meanwhile gives way to the one that was just read.
        let sound = held.get(&content).filter(|known| known.is_there());
        if let Some(file) = sound.and_then(|known| known.whole_file()) {
            return Ok(Held { content, file: file.clone(), fetched_bytes: 0 });
        }
        held.insert(content, Arc::new(Holding::whole(path, index, file.clone())));
        Ok(Held { content, file, fetched_bytes: 0 })
    }

    /// Takes every model file of a folder in whose index is already known; others wait until they are asked for.
    pub fn add_known(&self, models_dir: &Path) {
        for entry in std::fs::read_dir(models_dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let weights = path.join(crate::pull::FOLDER_WEIGHTS);
            let path = if weights.is_file() { weights } else { path };
            if path.extension().is_some_and(|e| e == "gguf" || e == "safetensors")
                && self.side_file(&path).exists()
                && let Err(e) = self.add(&path)
            {
                tracing::warn!("{} is not served to peers: {e}", path.display());
            }
        }
    }

    /// Contents held, those held whole first, then those of which there is something.
    pub fn contents(&self) -> Vec<ContentId> {
        let held: Vec<Arc<Holding>> = self.lock().values().cloned().collect();
        let (whole, sparse): (Vec<_>, Vec<_>) = held.into_iter().partition(|h| h.whole_file().is_some());
        let some = sparse.into_iter().filter(|h| h.bitmap().contains(&true));
        whole.into_iter().filter(|h| h.is_there()).chain(some).map(|h| h.content).collect()
    }

    /// The user's file of a content, if it is held whole.
    pub fn path_of(&self, content: ContentId) -> Option<PathBuf> {
        let known = self.lock().get(&content).cloned()?;
        known.whole_file().and_then(|file| file.path()).map(Path::to_owned)
    }

    /// Answers a peer's request: a status byte (1: here it is), then the bytes.
    pub fn answer(&self, content: ContentId, what: WeightsRequest) -> Vec<u8> {
        self.find(content, what).map_or_else(|| vec![0], |bytes| [&[1], bytes.as_slice()].concat())
    }

    /// What people see.
    pub fn view(&self) -> WeightsView {
        let (given_chunks, given_bytes) = self.ledger.given();
        WeightsView {
            cache_dir: self.cache.dir().to_owned(),
            cache_used: self.cache.used(),
            cache_limit: self.cache.limit(),
            given_chunks,
            given_bytes,
            peers: self.ledger.peers(),
            transfers: self.ledger.transfers(),
        }
    }

    /// This node's share of a model for the given layers, fetched where it is missing, from all sources that have some of
    /// it. A file of the user's that was written since it was opened is not used any more.
    ///
    /// # Errors
    /// No source has it, the disk or the cache is full, or what came is not a model. Of a file that was written, what was
    /// expected and found.
    pub async fn share(
        self: &Arc<Self>,
        content: ContentId,
        name: &str,
        layers: Range<usize>,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<Held, TransferError> {
        let whole = self.lock().get(&content).and_then(|known| known.whole_file().cloned());
        let Some(file) = whole else { return self.fetched(content, name, layers, sources, ask).await };
        let Err(changed) = file.check_unchanged() else { return Ok(Held { content, file, fetched_bytes: 0 }) };
        tracing::warn!("{changed}");
        let fetched = self.fetched(content, name, layers, sources, ask).await;
        fetched.map_err(|e| TransferError::Model(format!("{changed}. Nor can it be fetched: {e}")))
    }

    /// The header of a model, which has its vocabulary, fetched where it is missing.
    ///
    /// # Errors
    /// As for [`Self::share`].
    pub async fn header(
        self: &Arc<Self>,
        content: ContentId,
        name: &str,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<Arc<ModelFile>, TransferError> {
        let whole = self.lock().get(&content).and_then(|known| known.whole_file().cloned());
        if let Some(file) = whole {
            return Ok(file);
        }
        let ongoing = self.ledger.begin(content, name, 0..0);
        let mut swarm = Swarm::new(content, sources, ask.clone(), self.ledger.clone(), ongoing.progress.clone());
        Ok(self.with_header(&mut swarm).await?.1)
    }

    async fn with_header(
        self: &Arc<Self>,
        swarm: &mut Swarm<impl Ask>,
    ) -> Result<(Arc<Holding>, Arc<ModelFile>), TransferError> {
        let holding = self.holding(swarm).await?;
        let header = holding.index.chunks_for(&[0..holding.index.header_len()]);
        self.complete(&holding, header, swarm).await?;
        let file = holding.open()?;
        Ok((holding, file))
    }

    /// As [`Self::share`] of a model that is not here as a whole.
    async fn fetched(
        self: &Arc<Self>,
        content: ContentId,
        name: &str,
        layers: Range<usize>,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<Held, TransferError> {
        // From here on it is not removed to make room.
        let ongoing = self.ledger.begin(content, name, layers.clone());
        let mut swarm = Swarm::new(content, sources, ask.clone(), self.ledger.clone(), ongoing.progress.clone());
        let (holding, file) = self.with_header(&mut swarm).await?;
        let needed = holding.index.chunks_for(&file.stage_ranges(layers));
        let fetched_bytes = self.complete(&holding, needed, &mut swarm).await?;
        self.cache.touch(content);
        if let Some(line) = ongoing.progress.summary(Instant::now()) {
            tracing::info!("{line}");
        }
        Ok(Held { content, file, fetched_bytes })
    }

    /// What is here of a content; its index from a peer if it was not heard of before.
    async fn holding(&self, swarm: &mut Swarm<impl Ask>) -> Result<Arc<Holding>, TransferError> {
        let content = swarm.content;
        if let Some(known) = self.lock().get(&content).filter(|known| known.is_there()) {
            return Ok(known.clone());
        }
        let index = match self.cache.kept_index(content) {
            Some(index) => index,
            None => {
                let index = swarm.index().await?;
                write(&self.cache.index(content), &index.encode())?;
                index
            }
        };
        let mut held = self.lock();
        // Another job may have begun with it meanwhile.
        if let Some(known) = held.get(&content).filter(|known| known.is_there()) {
            return Ok(known.clone());
        }
        let holding = Arc::new(Holding::sparse(&self.cache.weights(content), index)?);
        held.insert(content, holding.clone());
        Ok(holding)
    }

    /// Hashes what is there of these chunks, makes room for the others and fetches them; returns the bytes of those.
    async fn complete(
        self: &Arc<Self>,
        holding: &Arc<Holding>,
        chunks: Vec<usize>,
        swarm: &mut Swarm<impl Ask>,
    ) -> Result<u64, TransferError> {
        let (library, looked_at, progress) = (self.clone(), holding.clone(), swarm.progress.clone());
        let missing = tokio::task::spawn_blocking(move || {
            let missing = looked_at.missing(&chunks);
            progress.needs(looked_at.bytes(&missing));
            library.make_room(&looked_at.path).map(|()| missing)
        });
        let missing = missing.await.map_err(interrupted)??;
        if !missing.is_empty() {
            swarm.fetch(holding, &missing).await?;
        }
        Ok(holding.bytes(&missing))
    }

    /// Removes what was not used for longest and is not in use, until all that is on its way fits.
    fn make_room(&self, path: &Path) -> Result<(), TransferError> {
        let mut held = self.lock();
        let may_go = |content| {
            let used = |known: &Arc<Holding>| known.whole_file().is_none() && known.is_used();
            !self.ledger.is_fetched(content) && !held.get(&content).is_some_and(used)
        };
        let coming = self.ledger.reserved();
        let victims = self.cache.victims(coming, disk::free_bytes(self.cache.dir()), may_go);
        for victim in victims.map_err(|error| NoRoom { path: path.to_owned(), ..error })? {
            if let Err(cause) = self.cache.remove(victim.content) {
                return Err(TransferError::Disk { path: self.cache.weights(victim.content), cause });
            }
            held.retain(|content, known| *content != victim.content || known.whole_file().is_some());
            let name = blake3::Hash::from_bytes(victim.content.0).to_hex();
            tracing::info!("removed model {name} from the cache to make room: {}", crate::config::Size(victim.bytes));
        }
        Ok(())
    }

    fn index_of(&self, path: &Path, file: &Arc<ModelFile>) -> Result<ShardIndex, TransferError> {
        let disk = |cause| TransferError::Disk { path: path.to_owned(), cause };
        let stat = std::fs::metadata(path).map_err(disk)?;
        let mut stamp =
            [stat.len().to_le_bytes(), stat.mtime().to_le_bytes(), stat.mtime_nsec().to_le_bytes()].concat();
        if let Some(header) = file.served_header() {
            stamp.extend(blake3::hash(header).as_bytes());
        }
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
        self.cache.dir().join(format!("{}.side", blake3::hash(canonical.as_os_str().as_encoded_bytes()).to_hex()))
    }

    fn find(&self, content: ContentId, what: WeightsRequest) -> Option<Vec<u8>> {
        let held = self.lock().get(&content).cloned()?;
        match what {
            WeightsRequest::Index => Some(held.index.encode()),
            WeightsRequest::Have => Some(encode_bitmap(&held.bitmap())),
            WeightsRequest::Chunk(number) => {
                let bytes = held.read(number as usize)?;
                self.ledger.served(bytes.len() as u64);
                Some(bytes)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ContentId, Arc<Holding>>> {
        self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A task that hashes or writes did not end: the node is going down.
fn interrupted(error: tokio::task::JoinError) -> TransferError {
    TransferError::Peers { what: "the weights".into(), last: format!("fetching was interrupted: {error}") }
}

/// Writes beside and renames, so that a reader never sees half a file.
fn write(path: &Path, bytes: &[u8]) -> Result<(), TransferError> {
    let beside = path.with_extension(format!("tmp{}", std::process::id()));
    std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path)).map_err(|cause| {
        let _ = std::fs::remove_file(&beside);
        TransferError::Disk { path: path.to_owned(), cause }
    })
}

#[cfg(test)]
mod tests;
