//! One content on this node's disk: the user's own file, or a sparse file of the same layout that peers fill.
//!
//! What a former life (or another process) left in a sparse file is hashed before it is used or given away.
use super::TransferError;
use kernels::weights::{ModelFile, Served, ShardIndex};
use node_core::id::ContentId;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// A model's chunks, those that are here.
pub(super) struct Holding {
    pub(super) content: ContentId,
    pub(super) index: Arc<ShardIndex>,
    pub(super) path: PathBuf,
    kind: Kind,
}

enum Kind {
    /// A file of the user's, which is never written.
    Whole(Arc<ModelFile>),
    /// A file of the cache.
    Sparse { file: File, chunks: Mutex<Vec<Presence>>, model: Mutex<Option<Arc<ModelFile>>> },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Missing,
    /// Something is there, which this life has not hashed.
    Unproven,
    Intact,
}

impl Holding {
    pub(super) fn whole(path: &Path, index: Arc<ShardIndex>, file: Arc<ModelFile>) -> Self {
        let content = ContentId(index.content_id());
        Self { content, index, path: path.to_owned(), kind: Kind::Whole(file) }
    }

    /// Opens the sparse file, or begins it.
    pub(super) fn sparse(path: &Path, index: ShardIndex) -> Result<Self, TransferError> {
        let disk = |cause| TransferError::Disk { path: path.to_owned(), cause };
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(disk);
        let mut file = open()?;
        let len = file.metadata().map_err(disk)?.len();
        if len != index.file_len() {
            if len != 0 {
                // A stage that has it open keeps the old content: nothing is cut in place.
                std::fs::remove_file(path).map_err(disk)?;
                file = open()?;
            }
            file.set_len(index.file_len()).map_err(disk)?;
        }
        let seen = |chunk: &kernels::weights::Chunk| {
            if has_data(&file, &chunk.range) { Presence::Unproven } else { Presence::Missing }
        };
        let chunks = Mutex::new(index.chunks().iter().map(seen).collect());
        let content = ContentId(index.content_id());
        let kind = Kind::Sparse { file, chunks, model: Mutex::new(None) };
        Ok(Self { content, index: Arc::new(index), path: path.to_owned(), kind })
    }

    /// The user's whole file.
    pub(super) fn whole_file(&self) -> Option<&Arc<ModelFile>> {
        match &self.kind {
            Kind::Whole(file) => Some(file),
            Kind::Sparse { .. } => None,
        }
    }

    /// Somebody computes with it.
    pub(super) fn is_used(&self) -> bool {
        match &self.kind {
            Kind::Whole(_) => true,
            Kind::Sparse { model, .. } => lock(model).as_ref().is_some_and(|model| Arc::strong_count(model) > 1),
        }
    }

    /// A file of the user's is what it was when it was opened; a file of the cache still has its name and its length: nobody
    /// removed it to make room.
    pub(super) fn is_there(&self) -> bool {
        match &self.kind {
            Kind::Whole(model) => model.check_unchanged().is_ok(),
            Kind::Sparse { file, .. } => {
                let (Ok(named), Ok(opened)) = (std::fs::metadata(&self.path), file.metadata()) else { return false };
                (named.dev(), named.ino(), named.len()) == (opened.dev(), opened.ino(), self.index.file_len())
            }
        }
    }

    /// Which chunks a peer may ask for.
    pub(super) fn bitmap(&self) -> Vec<bool> {
        match &self.kind {
            Kind::Whole(_) => vec![self.is_there(); self.index.chunks().len()],
            Kind::Sparse { chunks, .. } => lock(chunks).iter().map(|c| *c != Presence::Missing).collect(),
        }
    }

    /// The bytes of a chunk, for a peer. A sparse file's are hashed first if this life has not done so; those of a file of the user's
    /// are given as long as nobody has written it.
    pub(super) fn read(&self, chunk: usize) -> Option<Vec<u8>> {
        let range = &self.index.chunks().get(chunk)?.range;
        match &self.kind {
            Kind::Whole(model) => match model.served(range) {
                Served::Header(bytes) => Some(bytes.to_vec()),
                Served::File(range) => {
                    let bytes = model.read(&range).and_then(|bytes| model.check_unchanged().map(|()| bytes));
                    bytes
                        .inspect_err(|e| tracing::warn!("chunk {chunk} is not given to a peer: {e}"))
                        .ok()
                        .map(Vec::from)
                }
            },
            Kind::Sparse { file, chunks, .. } => match *lock(chunks).get(chunk)? {
                Presence::Missing => None,
                Presence::Intact => read(file, range),
                Presence::Unproven => read(file, range).filter(|bytes| self.index.verify(chunk, bytes)),
            },
        }
    }

    /// Hashes what may be there of these chunks; returns those that are missing. Reads from the disk.
    pub(super) fn missing(&self, wanted: &[usize]) -> Vec<usize> {
        let Kind::Sparse { file, chunks, .. } = &self.kind else { return Vec::new() };
        let intact = |&chunk: &usize| {
            if lock(chunks)[chunk] == Presence::Intact {
                return true;
            }
            let range = &self.index.chunks()[chunk].range;
            // Also where nothing was seen at first: another process may fill the same file.
            let there =
                has_data(file, range) && read(file, range).is_some_and(|bytes| self.index.verify(chunk, &bytes));
            lock(chunks)[chunk] = if there { Presence::Intact } else { Presence::Missing };
            there
        };
        wanted.iter().copied().filter(|chunk| !intact(chunk)).collect()
    }

    /// This life has seen the chunk intact.
    pub(super) fn is_intact(&self, chunk: usize) -> bool {
        match &self.kind {
            Kind::Whole(_) => true,
            Kind::Sparse { chunks, .. } => lock(chunks).get(chunk) == Some(&Presence::Intact),
        }
    }

    /// Writes a chunk in its place if it is the right one; else tells the hash it has.
    pub(super) fn keep(&self, chunk: usize, bytes: &[u8]) -> Result<Result<(), blake3::Hash>, TransferError> {
        if !self.index.verify(chunk, bytes) {
            return Ok(Err(blake3::hash(bytes)));
        }
        if let Kind::Sparse { file, chunks, .. } = &self.kind {
            let disk = |cause| TransferError::Disk { path: self.path.clone(), cause };
            file.write_all_at(bytes, self.index.chunks()[chunk].range.start).map_err(disk)?;
            lock(chunks)[chunk] = Presence::Intact;
        }
        Ok(Ok(()))
    }

    /// The model, once its header is here.
    pub(super) fn open(&self) -> Result<Arc<ModelFile>, TransferError> {
        let Kind::Sparse { model, .. } = &self.kind else {
            return self.whole_file().cloned().ok_or_else(|| TransferError::Model("no file".into()));
        };
        let mut model = lock(model);
        if let Some(open) = &*model {
            return Ok(open.clone());
        }
        let open = ModelFile::open_partial(&self.path).map_err(|e| TransferError::Model(e.to_string()))?;
        Ok(model.insert(open).clone())
    }

    /// Bytes of these chunks.
    pub(super) fn bytes(&self, chunks: &[usize]) -> u64 {
        let bytes = |range: &Range<u64>| range.end - range.start;
        chunks.iter().map(|&chunk| bytes(&self.index.chunks()[chunk].range)).sum()
    }
}

fn read(file: &File, range: &Range<u64>) -> Option<Vec<u8>> {
    let len = usize::try_from(range.end - range.start).ok().filter(|&n| n < super::CHUNK_BYTES_MAX)?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, range.start).ok()?;
    Some(bytes)
}

/// Whether anything was ever written there: holes of a large file need not be read.
fn has_data(file: &File, range: &Range<u64>) -> bool {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(range.start)) {
        Ok(data) => data < range.end,
        Err(rustix::io::Errno::NXIO) => false, // nothing from here to the end
        Err(_) => true,                        // this file system does not tell
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
