//! One content on this node's disk: the user's own file, or a sparse file of the same layout that is filled from peers.
//!
//! Chunks that an earlier run or another process left in a sparse file are verified before they are used or served.
use super::error::TransferError;
use super::request::CHUNK_BYTES_MAX;
use kernels_models::weights::{ModelFile, ShardIndex};
use node_core::id::ContentId;
use parking_lot::{Mutex, MutexGuard};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The chunks of a model that are on disk.
pub(super) struct Holding {
    pub(super) content: ContentId,
    pub(super) index: Arc<ShardIndex>,
    pub(super) path: PathBuf,
    kind: Kind,
}

enum Kind {
    /// The user's file, which is never written.
    Whole(Arc<ModelFile>),
    /// A file in the cache.
    Sparse { file: File, chunks: Mutex<Vec<Presence>>, model: Mutex<Option<Arc<ModelFile>>> },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Missing,
    /// The file has data there, which has not been verified since the node started.
    Unproven,
    Intact,
}

impl Holding {
    pub(super) fn whole(path: &Path, index: Arc<ShardIndex>, file: Arc<ModelFile>) -> Self {
        let content = ContentId(index.content_id());
        Self { content, index, path: path.to_owned(), kind: Kind::Whole(file) }
    }

    /// Opens or creates the sparse file.
    pub(super) fn sparse(path: &Path, index: ShardIndex) -> Result<Self, TransferError> {
        let disk = |cause| TransferError::Disk { path: path.to_owned(), cause };
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(disk);
        let mut file = open()?;
        let len = file.metadata().map_err(disk)?.len();
        if len != index.file_len() {
            if len != 0 {
                // Remove instead of truncating: a stage that has the old file open keeps its content.
                std::fs::remove_file(path).map_err(disk)?;
                file = open()?;
            }
            file.set_len(index.file_len()).map_err(disk)?;
        }
        let seen = |chunk: &kernels_models::weights::Chunk| {
            if has_data(&file, &chunk.range) { Presence::Unproven } else { Presence::Missing }
        };
        let chunks = Mutex::new(index.chunks().iter().map(seen).collect());
        let content = ContentId(index.content_id());
        let kind = Kind::Sparse { file, chunks, model: Mutex::new(None) };
        Ok(Self { content, index: Arc::new(index), path: path.to_owned(), kind })
    }

    /// The user's complete file.
    pub(super) fn whole_file(&self) -> Option<&Arc<ModelFile>> {
        match &self.kind {
            Kind::Whole(file) => Some(file),
            Kind::Sparse { .. } => None,
        }
    }

    /// Whether a stage uses it.
    pub(super) fn is_used(&self) -> bool {
        match &self.kind {
            Kind::Whole(_) => true,
            Kind::Sparse { model, .. } => lock(model).as_ref().is_some_and(|model| Arc::strong_count(model) > 1),
        }
    }

    /// Whether the file is still valid: a user's file is unchanged since it was opened; a cache file still has its name
    /// and length, that is, it was not evicted.
    pub(super) fn is_there(&self) -> bool {
        match &self.kind {
            Kind::Whole(model) => model.check_unchanged().is_ok(),
            Kind::Sparse { file, .. } => {
                let (Ok(named), Ok(opened)) = (std::fs::metadata(&self.path), file.metadata()) else { return false };
                (named.dev(), named.ino(), named.len()) == (opened.dev(), opened.ino(), self.index.file_len())
            }
        }
    }

    /// The chunks that peers may request.
    pub(super) fn bitmap(&self) -> Vec<bool> {
        match &self.kind {
            Kind::Whole(_) => vec![self.is_there(); self.index.chunks().len()],
            Kind::Sparse { chunks, .. } => lock(chunks).iter().map(|c| *c != Presence::Missing).collect(),
        }
    }

    /// The bytes of a chunk, for a peer. A chunk of a sparse file is verified first unless that was done before; one of
    /// a user's file is served while the file is unchanged.
    pub(super) fn read(&self, chunk: usize) -> Option<Vec<u8>> {
        let range = &self.index.chunks().get(chunk)?.range;
        match &self.kind {
            Kind::Whole(model) => {
                let bytes = model.read(range).and_then(|bytes| model.check_unchanged().map(|()| bytes));
                bytes
                    .inspect_err(|e| tracing::warn!("chunk {chunk} cannot be served to a peer: {e}"))
                    .ok()
                    .map(Vec::from)
            }
            Kind::Sparse { file, chunks, .. } => match *lock(chunks).get(chunk)? {
                Presence::Missing => None,
                Presence::Intact => read(file, range),
                Presence::Unproven => read(file, range).filter(|bytes| self.index.verify(chunk, bytes)),
            },
        }
    }

    /// Verifies these chunks on disk; returns the missing ones. Reads from the disk.
    pub(super) fn missing(&self, requested: &[usize]) -> Vec<usize> {
        let Kind::Sparse { file, chunks, .. } = &self.kind else { return Vec::new() };
        let intact = |&chunk: &usize| {
            if lock(chunks)[chunk] == Presence::Intact {
                return true;
            }
            let range = &self.index.chunks()[chunk].range;
            // Check missing chunks too: another process may fill the same file.
            let there =
                has_data(file, range) && read(file, range).is_some_and(|bytes| self.index.verify(chunk, &bytes));
            lock(chunks)[chunk] = if there { Presence::Intact } else { Presence::Missing };
            there
        };
        requested.iter().copied().filter(|chunk| !intact(chunk)).collect()
    }

    /// Whether the chunk has been verified since the node started.
    pub(super) fn is_intact(&self, chunk: usize) -> bool {
        match &self.kind {
            Kind::Whole(_) => true,
            Kind::Sparse { chunks, .. } => lock(chunks).get(chunk) == Some(&Presence::Intact),
        }
    }

    /// Writes a chunk to its place if its hash is right; else returns its hash.
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

    /// The model; its header must be on disk.
    pub(super) fn open(&self) -> Result<Arc<ModelFile>, TransferError> {
        let Kind::Sparse { model, .. } = &self.kind else {
            return self.whole_file().cloned().ok_or_else(|| TransferError::Model("the model has no file".into()));
        };
        let mut model = lock(model);
        if let Some(open) = &*model {
            return Ok(open.clone());
        }
        let open = ModelFile::open_partial(&self.path).map_err(|e| TransferError::Model(e.to_string()))?;
        Ok(model.insert(open).clone())
    }

    /// Total bytes of `chunks`.
    pub(super) fn bytes(&self, chunks: &[usize]) -> u64 {
        let bytes = |range: &Range<u64>| range.end - range.start;
        chunks.iter().map(|&chunk| bytes(&self.index.chunks()[chunk].range)).sum()
    }
}

fn read(file: &File, range: &Range<u64>) -> Option<Vec<u8>> {
    let len = usize::try_from(range.end - range.start).ok().filter(|&n| n < CHUNK_BYTES_MAX)?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, range.start).ok()?;
    Some(bytes)
}

/// Whether the range contains data: holes of a large file need not be read.
fn has_data(file: &File, range: &Range<u64>) -> bool {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(range.start)) {
        Ok(data) => data < range.end,
        Err(rustix::io::Errno::NXIO) => false, // no data from here to the end
        Err(_) => true,                        // the file system cannot report holes
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[cfg(test)]
mod tests;
