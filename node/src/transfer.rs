//! Weights by content hash: serves them to peers, and fetches this node's share of a model from peers.
//!
//! A model is identified by the hash of its shard index. A node without the file keeps a sparse file of the same
//! layout, with the header and the chunks of its own layers; the rest are holes. Every chunk is verified before it is
//! written, and is served to others at once, even while the transfer continues.
//!
//! Next: `transfer/schedule.rs` (which peer to ask for which chunk), `transfer/fetch.rs` (the requests),
//! `transfer/cache.rs` (the size limit).
use crate::disk::{self, NoRoom};
use cache::Cache;
use error::{TransferError, interrupted};
use fetch::Swarm;
use holding::Holding;
use kernels_models::weights::{ModelFile, ShardIndex, parts};
use ledger::Ledger;
use node_core::id::{ContentId, NodeId};
use parking_lot::{Mutex, MutexGuard};
use request::{Ask, WeightsRequest, encode_bitmap};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use view::WeightsView;

pub(crate) mod cache;
pub(crate) mod endpoint;
pub(crate) mod error;
mod fetch;
mod holding;
mod ledger;
pub(crate) mod request;
mod schedule;
pub(crate) mod view;

/// A model on this node's disk, complete or in part. It stays in the cache while this or its file is held.
pub(crate) struct LocalModel {
    /// Hash of its shard index.
    pub content: ContentId,
    /// The open file.
    pub file: Arc<ModelFile>,
    /// Bytes of weights fetched from peers for this request, without the header, which every share needs.
    pub fetched_bytes: u64,
}

/// All models on this node's disk.
pub(crate) struct Library {
    cache: Cache,
    /// The folder of the user's models.
    models_dir: PathBuf,
    held: Mutex<BTreeMap<ContentId, Arc<Holding>>>,
    ledger: Arc<Ledger>,
}

impl Library {
    /// Opens a library with its files in `cache`, and the user's models in `models_dir`. Contents that it holds from
    /// earlier runs are served to peers from the start.
    ///
    /// # Errors
    /// The cache's folder cannot be created.
    pub(crate) fn open(cache: Cache, models_dir: &Path) -> Result<Self, TransferError> {
        let dir = cache.dir();
        std::fs::create_dir_all(dir).map_err(|cause| TransferError::Disk { path: dir.to_owned(), cause })?;
        let kept = |entry: cache::CachedModel| {
            let path = cache.weights(entry.content);
            let index = cache.kept_index(entry.content).filter(|_| path.is_file())?;
            let holding = Holding::sparse(&path, index).inspect_err(|e| tracing::warn!("{e}")).ok()?;
            Some((entry.content, Arc::new(holding)))
        };
        let held = cache.entries().into_iter().filter_map(kept).collect();
        let library = Self { cache, models_dir: models_dir.to_owned(), held: Mutex::new(held), ledger: Arc::default() };
        library.add_known();
        Ok(library)
    }

    /// Adds a whole file. Its index is read from the side file if the model has not changed since, else built (one pass
    /// over the file) and stored.
    ///
    /// # Errors
    /// The file is not a readable model. A side file that cannot be written only means that the index is built again
    /// next time.
    pub(crate) fn add(&self, path: &Path) -> Result<LocalModel, TransferError> {
        let file = ModelFile::open(path).map_err(|e| TransferError::Model(e.to_string()))?;
        let path = file.path().unwrap_or(path); // the first of several files
        let index = Arc::new(self.index_of(path, &file)?);
        let content = ContentId(index.content_id());
        let mut held = self.lock();
        // A known file that was modified is replaced by the one just read.
        let unchanged = held.get(&content).filter(|known| known.is_there());
        if let Some(file) = unchanged.and_then(|known| known.whole_file()) {
            return Ok(LocalModel { content, file: file.clone(), fetched_bytes: 0 });
        }
        held.insert(content, Arc::new(Holding::whole(path, index, file.clone())));
        Ok(LocalModel { content, file, fetched_bytes: 0 })
    }

    /// Adds every model file of the user's whose index is already stored; others are added on request.
    fn add_known(&self) {
        for entry in std::fs::read_dir(&self.models_dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let path = parts::weights_in(&path).unwrap_or(path);
            if path.extension().is_some_and(|e| e == "gguf" || e == "mesh" || e == "safetensors" || e == "json")
                && self.side_file(&path).exists()
                && let Err(e) = self.add(&path)
            {
                tracing::warn!("{} is not served to peers: {e}", path.display());
            }
        }
    }

    /// Contents on disk: complete ones first, then those with some chunks.
    pub(crate) fn contents(&self) -> Vec<ContentId> {
        let held: Vec<Arc<Holding>> = self.lock().values().cloned().collect();
        let (whole, sparse): (Vec<_>, Vec<_>) = held.into_iter().partition(|h| h.whole_file().is_some());
        let some = sparse.into_iter().filter(|h| h.bitmap().contains(&true));
        whole.into_iter().filter(|h| h.is_there()).chain(some).map(|h| h.content).collect()
    }

    /// The user's file of a content, if it is complete.
    pub(crate) fn path_of(&self, content: ContentId) -> Option<PathBuf> {
        let known = self.lock().get(&content).cloned()?;
        known.whole_file().and_then(|file| file.path()).map(Path::to_owned)
    }

    /// Answers a peer's request: a status byte (1: available), then the bytes.
    pub(crate) fn answer(&self, content: ContentId, what: WeightsRequest) -> Vec<u8> {
        self.find(content, what).map_or_else(|| vec![0], |bytes| [&[1], bytes.as_slice()].concat())
    }

    /// The complete file of a content: one that is already open, or the user's model of that name if it has this content.
    /// The latter takes a pass over the file the first time, which is faster than fetching it.
    async fn whole_file(self: &Arc<Self>, content: ContentId, name: &str) -> Option<Arc<ModelFile>> {
        let known = self.lock().get(&content).and_then(|known| known.whole_file().cloned());
        if known.is_some() || !crate::pull::is_cached(name, &self.models_dir) {
            return known;
        }
        let path = crate::pull::locate(name, &self.models_dir)?;
        let library = self.clone();
        let added = tokio::task::spawn_blocking(move || {
            library.add(&path).inspect_err(|e| tracing::warn!("{} is not used: {e}", path.display()))
        });
        added.await.ok()?.ok().filter(|held| held.content == content).map(|held| held.file)
    }

    /// The human-readable state.
    pub(crate) fn view(&self) -> WeightsView {
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

    /// This node's share of a model for the given layers. If the user has no such file, missing chunks are fetched from
    /// all sources that have some of them. A file that was modified since it was opened is no longer used.
    ///
    /// # Errors
    /// No source has a chunk, the disk or the cache is full, or the data is not a model. For a modified file, the text
    /// says what was expected and found.
    pub(crate) async fn share(
        self: &Arc<Self>,
        content: ContentId,
        name: &str,
        layers: Range<usize>,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<LocalModel, TransferError> {
        let Some(file) = self.whole_file(content, name).await else {
            return self.fetched(content, name, layers, sources, ask).await;
        };
        let Err(changed) = file.check_unchanged() else { return Ok(LocalModel { content, file, fetched_bytes: 0 }) };
        tracing::warn!("{changed}");
        let fetched = self.fetched(content, name, layers, sources, ask).await;
        fetched.map_err(|e| TransferError::Model(format!("{changed}. Fetching it from peers failed too: {e}")))
    }

    /// The header of a model, which contains its vocabulary; fetched if it is missing.
    ///
    /// # Errors
    /// Those of [`Self::share`].
    pub(crate) async fn header(
        self: &Arc<Self>,
        content: ContentId,
        name: &str,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<Arc<ModelFile>, TransferError> {
        if let Some(file) = self.whole_file(content, name).await {
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

    /// [`Self::share`] for a model without a complete file here.
    async fn fetched(
        self: &Arc<Self>,
        content: ContentId,
        name: &str,
        layers: Range<usize>,
        sources: &[NodeId],
        ask: &Arc<impl Ask>,
    ) -> Result<LocalModel, TransferError> {
        // From here on the content is not evicted.
        let ongoing = self.ledger.begin(content, name, layers.clone());
        let mut swarm = Swarm::new(content, sources, ask.clone(), self.ledger.clone(), ongoing.progress.clone());
        let (holding, file) = self.with_header(&mut swarm).await?;
        let needed = holding.index.chunks_for(&file.stage_ranges(layers));
        let fetched_bytes = self.complete(&holding, needed, &mut swarm).await?;
        self.cache.touch(content);
        if let Some(line) = ongoing.progress.summary(Instant::now()) {
            tracing::info!("{line}");
        }
        Ok(LocalModel { content, file, fetched_bytes })
    }

    /// The local state of a content; fetches its index from a peer if it is unknown.
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
        // Another job may have created it meanwhile.
        if let Some(known) = held.get(&content).filter(|known| known.is_there()) {
            return Ok(known.clone());
        }
        let holding = Arc::new(Holding::sparse(&self.cache.weights(content), index)?);
        held.insert(content, holding.clone());
        Ok(holding)
    }

    /// Verifies these chunks on disk, makes room for the missing ones and fetches them; returns their bytes.
    async fn complete(
        self: &Arc<Self>,
        holding: &Arc<Holding>,
        chunks: Vec<usize>,
        swarm: &mut Swarm<impl Ask>,
    ) -> Result<u64, TransferError> {
        let (library, local, progress) = (self.clone(), holding.clone(), swarm.progress.clone());
        let missing = tokio::task::spawn_blocking(move || {
            let missing = local.missing(&chunks);
            progress.needs(local.bytes(&missing));
            library.make_room(&local.path).map(|()| missing)
        });
        let missing = missing.await.map_err(interrupted)??;
        if !missing.is_empty() {
            swarm.fetch(holding, &missing).await?;
        }
        Ok(holding.bytes(&missing))
    }

    /// Evicts the least recently used contents that are not in use, until all transfers in progress fit.
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
        let stamp = file.stamp();
        let side = self.side_file(path);
        if let Ok(bytes) = std::fs::read(&side)
            && let Some(encoded) = bytes.strip_prefix(&stamp)
            && let Ok(index) = ShardIndex::decode(encoded)
        {
            return Ok(index);
        }
        let index = ShardIndex::build(file, |_bytes| {}).map_err(|e| TransferError::Model(e.to_string()))?;
        if let Err(e) = write(&side, &[&stamp[..], &index.encode()].concat()) {
            tracing::warn!("the index of {} could not be stored: {e}", path.display());
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
        self.held.lock()
    }
}

/// Writes a temporary file and renames it, so that a reader never sees a partial file.
fn write(path: &Path, bytes: &[u8]) -> Result<(), TransferError> {
    // Two transfers may write the same file at once.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let beside = path.with_extension(format!("tmp{}-{number}", std::process::id()));
    std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path)).map_err(|cause| {
        let _ = std::fs::remove_file(&beside);
        TransferError::Disk { path: path.to_owned(), cause }
    })
}

#[cfg(test)]
mod tests;
