//! The cache of weights from peers: its size limit, and which contents are evicted.
//!
//! It contains only what was fetched from peers. Model files of the user, including pulled ones, are never touched.
use crate::config::Size;
use crate::disk::{self, NoRoom};
use kernels_models::weights::ShardIndex;
use node_core::id::ContentId;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Default limit in bytes: enough for a few large models.
const LIMIT_MAX: u64 = 50 << 30;
/// Default share of the disk's free space in percent, so that a node does not fill the disk.
const DISK_PERCENT: u64 = 80;

/// Weights fetched from peers, on disk.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    dir: PathBuf,
    limit: u64,
}

/// A content in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CachedModel {
    pub(super) used_at: SystemTime,
    pub(super) content: ContentId,
    pub(super) bytes: u64,
}

impl Cache {
    /// The cache next to a folder of models, with at most `limit` bytes: by default 50 GiB, or 80 % of the disk's free
    /// space if that is less.
    pub(crate) fn beside(models_dir: &Path, limit: Option<u64>) -> Self {
        Self::at(&models_dir.with_file_name("shards"), limit)
    }

    pub(super) fn at(dir: &Path, limit: Option<u64>) -> Self {
        let mut cache = Self { dir: dir.to_owned(), limit: LIMIT_MAX };
        cache.limit = limit.unwrap_or_else(|| {
            let room = disk::free_bytes(dir).map(|free| free.saturating_add(cache.used()) / 100 * DISK_PERCENT);
            room.unwrap_or(LIMIT_MAX).min(LIMIT_MAX)
        });
        cache
    }

    /// Its folder.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Most bytes in it.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes in it.
    pub(crate) fn used(&self) -> u64 {
        self.entries().iter().map(|entry| entry.bytes).sum()
    }

    /// All contents, least recently used first.
    pub(super) fn entries(&self) -> Vec<CachedModel> {
        let entry = |path: PathBuf| {
            let content = content_of(&path)?;
            let index = std::fs::metadata(&path).ok()?;
            let weights = std::fs::metadata(self.weights(content)).map_or(0, |m| m.blocks() * BLOCK_BYTES);
            let bytes = weights + index.blocks() * BLOCK_BYTES;
            Some(CachedModel { used_at: index.modified().unwrap_or(SystemTime::UNIX_EPOCH), content, bytes })
        };
        let files = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut entries: Vec<CachedModel> = files.filter_map(|file| entry(file.path())).collect();
        entries.sort_by_key(|entry| (entry.used_at, entry.content));
        entries
    }

    /// The stored index of a content, if it is valid.
    pub(super) fn kept_index(&self, content: ContentId) -> Option<ShardIndex> {
        let bytes = std::fs::read(self.index(content)).ok()?;
        ShardIndex::decode(&bytes).ok().filter(|index| index.content_id() == content.0)
    }

    /// Marks a content as used now.
    pub(super) fn touch(&self, content: ContentId) {
        // Without a new time, another content may be evicted first; nothing else depends on it.
        let _ = std::fs::File::options()
            .append(true)
            .open(self.index(content))
            .and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// The evictable contents to remove so that `coming` more bytes fit under the limit and on the disk.
    pub(super) fn victims(
        &self,
        coming: u64,
        free: Option<u64>,
        may_go: impl Fn(ContentId) -> bool,
    ) -> Result<Vec<CachedModel>, NoRoom> {
        let entries = self.entries();
        let used: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let over_limit = used.saturating_add(coming).saturating_sub(self.limit);
        let over_disk = free.map_or(0, |free| coming.saturating_sub(free));
        let (mut victims, mut freed) = (Vec::new(), 0);
        for entry in entries.into_iter().filter(|entry| may_go(entry.content)) {
            if freed >= over_limit.max(over_disk) {
                break;
            }
            freed += entry.bytes;
            victims.push(entry);
        }
        let lacking = |free: u64, advice| NoRoom {
            what: "weights from peers".to_owned(),
            path: self.dir.clone(),
            need: Size(coming),
            free: Size(free),
            advice,
        };
        if freed < over_disk {
            Err(lacking(free.unwrap_or(0).saturating_add(freed), disk::FREE_CACHE))
        } else if freed < over_limit {
            Err(lacking(self.limit.saturating_sub(used - freed), RAISE_LIMIT))
        } else {
            Ok(victims)
        }
    }

    /// Removes a content. Files that are open stay readable.
    pub(super) fn remove(&self, content: ContentId) -> std::io::Result<()> {
        match std::fs::remove_file(self.weights(content)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            Ok(()) | Err(_) => std::fs::remove_file(self.index(content)),
        }
    }

    pub(super) fn index(&self, content: ContentId) -> PathBuf {
        self.dir.join(format!("{}.index", blake3::Hash::from_bytes(content.0).to_hex()))
    }

    pub(super) fn weights(&self, content: ContentId) -> PathBuf {
        self.index(content).with_extension("gguf")
    }
}

/// The content of an index file, from its name.
fn content_of(path: &Path) -> Option<ContentId> {
    let stem = path.file_stem()?.to_str().filter(|_| path.extension().is_some_and(|e| e == "index"))?;
    blake3::Hash::from_hex(stem).ok().map(|hash| ContentId(*hash.as_bytes()))
}

/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;
/// Advice if contents in use exceed the limit.
const RAISE_LIMIT: &str = "the rest of the cache is in use: raise --cache-size, or choose another --cache-dir";

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn content(n: u8) -> ContentId {
        ContentId([n; 32])
    }

    /// Three contents of 64 KiB, each with an index; the first was used last.
    fn cache(limit: u64) -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), Some(limit));
        for n in 1..=3 {
            std::fs::write(cache.weights(content(n)), vec![n; 64 << 10]).unwrap();
            std::fs::write(cache.index(content(n)), [n]).unwrap();
            let age = Duration::from_secs(if n == 1 { 0 } else { 1000 - u64::from(n) });
            let index = std::fs::File::options().append(true).open(cache.index(content(n))).unwrap();
            index.set_modified(SystemTime::now() - age).unwrap();
        }
        std::fs::write(dir.path().join("other.side"), [0; 9000]).unwrap();
        (dir, cache)
    }

    #[test]
    fn the_least_recently_used_is_evicted_first_and_only_as_much_as_needed() {
        let (_dir, cache) = cache(256 << 10);
        let used = cache.used();
        assert!((192 << 10..=216 << 10).contains(&used), "{used}");
        let victims = |coming| {
            let victims = cache.victims(coming, Some(1 << 40), |_| true).unwrap();
            victims.iter().map(|v| v.content.0[0]).collect::<Vec<_>>()
        };
        assert_eq!(victims(20 << 10), [0; 0]);
        assert_eq!(victims(100 << 10), [2]);
        assert_eq!(victims(180 << 10), [2, 3]);
        cache.touch(content(2));
        assert_eq!(victims(100 << 10), [3], "a recently used content stays");
        cache.remove(content(3)).unwrap();
        assert_eq!(victims(100 << 10), [0; 0]);
    }

    #[test]
    fn contents_in_use_stay_and_the_error_says_what_to_do() {
        let (_dir, cache) = cache(256 << 10);
        let error = cache.victims(200 << 10, Some(1 << 40), |c| c == content(3)).unwrap_err().to_string();
        for words in ["200.0 KiB needed", "--cache-size", "weights from peers"] {
            assert!(error.contains(words), "{error}");
        }
        let error = cache.victims(100 << 10, Some(10 << 10), |_| false).unwrap_err().to_string();
        assert!(error.contains("10.0 KiB free") && error.contains("free some space"), "{error}");
    }

    #[test]
    fn the_default_limit_leaves_space_on_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let limit = Cache::at(dir.path(), None).limit();
        assert!(limit <= LIMIT_MAX && limit <= disk::free_bytes(dir.path()).unwrap());
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_empty_cache() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("none"), Some(100));
        assert_eq!((cache.used(), cache.limit(), cache.entries()), (0, 100, vec![]));
        assert_eq!(cache.victims(100, None, |_| true), Ok(vec![]));
        assert!(cache.victims(101, None, |_| true).is_err(), "more than the cache may ever have");
    }

    #[test]
    fn the_cache_is_beside_the_models() {
        let cache = Cache::beside(Path::new("/home/me/.cache/meshnode/models"), Some(1));
        assert_eq!(cache.dir(), Path::new("/home/me/.cache/meshnode/shards"));
    }

    #[test]
    fn only_files_with_the_name_of_an_index_are_contents() {
        let name = "ab".repeat(32);
        assert_eq!(content_of(Path::new(&format!("/x/{name}.index"))), Some(ContentId([0xab; 32])));
        for other in [format!("{name}.gguf"), name.clone(), format!("{}.index", &name[2..]), "x.index".into()] {
            assert_eq!(content_of(Path::new(&other)), None, "{other}");
        }
    }

    #[test]
    fn the_disk_limits_what_comes_also_below_the_limit_of_the_cache() {
        let (_dir, cache) = cache(1 << 30);
        let victims = |free| cache.victims(100 << 10, Some(free), |_| true).map(|victims| victims.len());
        assert_eq!(victims(100 << 10), Ok(0));
        assert_eq!(victims(99 << 10), Ok(1), "one content is more than enough");
        assert_eq!(victims(0), Ok(2));
        assert_eq!(cache.victims(100 << 10, None, |_| true).map(|victims| victims.len()), Ok(0), "unknown");
    }

    #[test]
    fn a_size_that_no_disk_has_does_not_wrap() {
        let (_dir, cache) = cache(256 << 10);
        assert!(cache.victims(u64::MAX, Some(1 << 40), |_| true).is_err());
        assert!(cache.victims(u64::MAX, None, |_| true).is_err());
    }

    #[test]
    fn a_content_is_removed_also_if_its_weights_are_gone() {
        let (_dir, cache) = cache(256 << 10);
        std::fs::remove_file(cache.weights(content(1))).unwrap();
        cache.remove(content(1)).unwrap();
        assert!(!cache.index(content(1)).exists());
        assert!(cache.remove(content(1)).is_err(), "there is no such content");
        assert_eq!(cache.entries().len(), 2);
    }

    #[test]
    fn an_index_of_another_content_is_not_used() {
        let (_dir, cache) = cache(256 << 10);
        assert!(cache.kept_index(content(1)).is_none(), "noise");
        assert!(cache.kept_index(content(9)).is_none(), "none");
    }
}
