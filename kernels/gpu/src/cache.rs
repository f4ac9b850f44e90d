//! Kernel cache on disk, so that a restart does not recompile kernels.
//!
//! Entries are code that a GPU will run, so each is verified: it holds the key it was written for and the hash of its content. A
//! damaged or truncated entry is removed; that and an entry with another key count as a miss. No call fails: an unusable
//! folder costs compile time and one warning.
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Hash of everything that an entry depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// Hashes the parts with their lengths: equal keys have equal parts in equal order.
    pub(crate) fn of(parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Self(hasher.finalize().into())
    }

    pub(crate) fn hex(&self, digits: usize) -> String {
        self.0.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(digits).map(|digit| format!("{digit:x}")).collect()
    }
}

/// A folder of compiled kernels. Several processes may use it at the same time.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    limit_bytes: u64,
    warned: AtomicBool,
}

/// Maximum disk space of all entries; the least recently used are evicted. The kernels of a model take 1 MiB (graphs) and 2 MiB
/// (CubeCL), so this holds twenty combinations of model, grid rule and program build.
const LIMIT_BYTES: u64 = 64 << 20;
/// Maximum content of an entry; it also bounds the memory for reading a bad file. The largest kernel of a model has 0.2 MiB, twice
/// that in CubeCL's format; a rule from text may have more.
const ENTRY_BYTES_MAX: u64 = 8 << 20;
/// Disk space is counted in multiples of this, which also bounds the number of small entries.
const FILE_BYTES: u64 = 4096;
/// An older temporary file belongs to a process that died while writing.
const ABANDONED: Duration = Duration::from_secs(3600);

const MAGIC: [u8; 8] = *b"mnkern-1";
/// Magic, key, content length, content hash.
const HEADER_BYTES: usize = 8 + 32 + 8 + 32;
const SUFFIX: &str = "kernel";

impl Store {
    /// Uses `dir`, which the first [`Self::put`] creates.
    pub(crate) fn new(dir: impl Into<PathBuf>) -> Self {
        Self::with_limit(dir, LIMIT_BYTES)
    }

    fn with_limit(dir: impl Into<PathBuf>, limit_bytes: u64) -> Self {
        Self { dir: dir.into(), limit_bytes, warned: AtomicBool::new(false) }
    }

    /// The content stored for `name` in `space`; a space identifies the machine and the program.
    pub(crate) fn get(&self, space: Key, name: Key) -> Option<Vec<u8>> {
        if !self.is_private() {
            return None;
        }
        let path = self.path(space, name);
        let (_, content) = read(&path).filter(|(key, _)| *key == entry_key(space, name))?;
        // If this fails, the entry is only evicted earlier.
        let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(content)
    }

    /// The contents added to a space, the latest first, up to `bytes_max` in total. Does not count as a use: these entries are
    /// evicted in the order in which they were added.
    pub(crate) fn all(&self, space: Key, bytes_max: u64) -> Vec<Vec<u8>> {
        if !self.is_private() {
            return Vec::new();
        }
        let prefix = format!("{}-", space.hex(SPACE_DIGITS));
        let mut entries = self.entries();
        entries.retain(|entry| entry.path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)));
        entries.sort_by(|a, b| (b.used, &b.path).cmp(&(a.used, &a.path)));
        let mut bytes = 0;
        let within = |entry: &CachedFile| {
            bytes += entry.bytes;
            bytes <= bytes_max
        };
        let read = |entry: CachedFile| {
            let (key, content) = read(&entry.path)?;
            // Such an entry is named by its content, so an entry copied from another space fails this check.
            (key == entry_key(space, Key::of(&[&content]))).then_some(content)
        };
        entries.into_iter().take_while(within).filter_map(read).collect()
    }

    /// Stores a content under its own hash, for [`Self::all`].
    pub(crate) fn add(&self, space: Key, content: &[u8]) {
        self.put(space, Key::of(&[content]), content);
    }

    /// Stores a content and evicts old entries if needed. Ignores contents above [`ENTRY_BYTES_MAX`].
    pub(crate) fn put(&self, space: Key, name: Key, content: &[u8]) {
        if content.len() as u64 > ENTRY_BYTES_MAX {
            return;
        }
        if let Err(error) = create_private(&self.dir) {
            return self.warn(&error.to_string());
        }
        if !self.is_private() {
            return;
        }
        match self.write(&self.path(space, name), entry_key(space, name), content) {
            Ok(()) => self.make_room(),
            Err(error) => self.warn(&error.to_string()),
        }
    }

    /// Removes an entry that the driver rejected.
    pub(crate) fn remove(&self, space: Key, name: Key) {
        // If this fails, the next rejection removes it.
        let _ = std::fs::remove_file(self.path(space, name));
    }

    /// The folder, the bytes that its entries take on disk, and their limit.
    pub(crate) fn usage(&self) -> (&Path, u64, u64) {
        (&self.dir, self.entries().iter().map(|entry| entry.bytes).sum(), self.limit_bytes)
    }

    fn path(&self, space: Key, name: Key) -> PathBuf {
        self.dir.join(format!("{}-{}.{SUFFIX}", space.hex(SPACE_DIGITS), name.hex(NAME_DIGITS)))
    }

    /// Writes atomically: readers see a whole entry or none. After a power loss an entry may be truncated; the hash detects that.
    fn write(&self, path: &Path, key: Key, content: &[u8]) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        // Containers that share the folder may have equal process ids, hence the time.
        let (process, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let temporary = self.dir.join(format!("{process}-{number}-{now}.tmp"));
        let written = (|| {
            let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(&MAGIC)?;
            file.write_all(&key.0)?;
            file.write_all(&(content.len() as u64).to_le_bytes())?;
            file.write_all(blake3::hash(content).as_bytes())?;
            file.write_all(content)?;
            std::fs::rename(&temporary, path)
        })();
        if written.is_err() {
            let _ = std::fs::remove_file(&temporary); // if this fails, see `ABANDONED`
        }
        written
    }

    /// Evicts the least recently used entries until the rest is within the limit.
    fn make_room(&self) {
        let mut entries = self.entries();
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        entries.sort_by(|a, b| (a.used, &a.path).cmp(&(b.used, &b.path)));
        for entry in entries {
            if total <= self.limit_bytes {
                break;
            }
            if std::fs::remove_file(&entry.path).is_ok() {
                total -= entry.bytes;
            }
        }
    }

    /// All entries. Also removes abandoned temporary files.
    fn entries(&self) -> Vec<CachedFile> {
        let mut entries = Vec::new();
        for file in std::fs::read_dir(&self.dir).into_iter().flatten().filter_map(Result::ok) {
            let path = file.path();
            let Ok(metadata) = file.metadata() else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some(SUFFIX) if metadata.is_file() => {
                    let bytes = metadata.len().next_multiple_of(FILE_BYTES);
                    entries.push(CachedFile { path, bytes, used });
                }
                Some("tmp") if used.elapsed().is_ok_and(|age| age > ABANDONED) => {
                    let _ = std::fs::remove_file(&path); // the next call retries
                }
                _ => {}
            }
        }
        entries
    }

    /// Whether the folder exists and only this user can write to it. Warns if other users can.
    fn is_private(&self) -> bool {
        let Ok(metadata) = std::fs::metadata(&self.dir) else { return false };
        let closed = owned_and_closed(&metadata);
        if !closed {
            self.warn("expected a folder that belongs to this user and is not writable by others");
        }
        closed
    }

    fn warn(&self, why: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let dir = self.dir.display();
            tracing::warn!(
                "cannot cache compiled kernels in {dir}: {why}; each start recompiles them until the folder is usable"
            );
        }
    }
}

struct CachedFile {
    path: PathBuf,
    /// On disk, rounded up to [`FILE_BYTES`].
    bytes: u64,
    used: SystemTime,
}

/// Hex digits of the space and of the name in a file name. The entry holds the whole key.
const SPACE_DIGITS: usize = 16;
const NAME_DIGITS: usize = 32;

fn entry_key(space: Key, name: Key) -> Key {
    Key::of(&[&space.0, &name.0])
}

/// Key and content of a valid entry. Removes an invalid one.
fn read(path: &Path) -> Option<(Key, Vec<u8>)> {
    let mut bytes = Vec::new();
    let whole = HEADER_BYTES as u64 + ENTRY_BYTES_MAX;
    let taken = File::open(path).ok()?.take(whole + 1).read_to_end(&mut bytes).ok()?;
    let entry = (taken as u64 <= whole).then(|| parse(bytes)).flatten();
    if entry.is_none() {
        let _ = std::fs::remove_file(path); // if this fails, recompiling the kernel overwrites it
    }
    entry
}

fn parse(mut bytes: Vec<u8>) -> Option<(Key, Vec<u8>)> {
    let (magic, rest) = bytes.split_first_chunk::<8>()?;
    let (key, rest) = rest.split_first_chunk::<32>()?;
    let (length, rest) = rest.split_first_chunk::<8>()?;
    let (hash, content) = rest.split_first_chunk::<32>()?;
    let sound = *magic == MAGIC
        && u64::from_le_bytes(*length) == content.len() as u64
        && blake3::hash(content) == blake3::Hash::from_bytes(*hash);
    let key = Key(*key);
    sound.then(|| (key, bytes.split_off(HEADER_BYTES)))
}

/// Creates a folder and its parents with mode 0700.
pub(crate) fn create_private(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn owned_and_closed(metadata: &Metadata) -> bool {
    const OTHERS_WRITE: u32 = 0o022;
    metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & OTHERS_WRITE == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::of(&[text.as_bytes()])
    }

    /// The only entry of a store.
    fn only(store: &Store) -> PathBuf {
        let mut entries = store.entries();
        assert_eq!(entries.len(), 1);
        entries.remove(0).path
    }

    #[test]
    fn another_process_finds_a_stored_entry() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("kernels"));
        assert_eq!(store.get(key("a"), key("k")), None);
        store.put(key("a"), key("k"), b"code");
        let other = Store::new(dir.path().join("kernels"));
        assert_eq!(other.get(key("a"), key("k")).as_deref(), Some(&b"code"[..]));
        other.remove(key("a"), key("k"));
        assert_eq!(store.get(key("a"), key("k")), None);
    }

    #[test]
    fn key_parts_are_delimited() {
        assert_ne!(Key::of(&[b"ab", b"c"]), Key::of(&[b"a", b"bc"]));
        assert_ne!(Key::of(&[b"ab"]), Key::of(&[b"ab", b""]));
    }

    #[test]
    fn an_entry_of_another_space_is_not_used_even_under_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        store.put(key("this driver"), key("k"), b"code");
        store.add(key("this driver"), b"more");
        assert_eq!(store.get(key("another driver"), key("k")), None);
        assert!(store.all(key("another driver"), u64::MAX).is_empty());
        for entry in store.entries() {
            let name = entry.path.file_name().unwrap().to_string_lossy().into_owned();
            let renamed = name.replace(&key("this driver").hex(SPACE_DIGITS), &key("another driver").hex(SPACE_DIGITS));
            assert_ne!(name, renamed);
            std::fs::copy(&entry.path, dir.path().join(renamed)).unwrap();
        }
        assert_eq!(store.get(key("another driver"), key("k")), None);
        assert!(store.all(key("another driver"), u64::MAX).is_empty());
        assert_eq!(store.all(key("this driver"), u64::MAX), [b"more".to_vec()]);
    }

    #[test]
    fn a_damaged_entry_is_removed_and_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let content: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        store.put(key("a"), key("k"), &content);
        let path = only(&store);
        let sound = std::fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> = (0..sound.len()).step_by(7).map(|length| sound[..length].to_vec()).collect();
        damaged.extend((0..sound.len()).step_by(5).map(|at| {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            bytes
        }));
        damaged.push([&sound[..], b"x"].concat());
        for bytes in damaged {
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(store.get(key("a"), key("k")), None, "{} bytes of {}", bytes.len(), sound.len());
            let foreign = bytes.len() == sound.len() && bytes[8..40] != sound[8..40];
            assert_eq!(path.exists(), foreign, "a damaged entry is removed, an entry with another key is not");
            store.put(key("a"), key("k"), &content);
            assert_eq!(store.get(key("a"), key("k")).as_ref(), Some(&content));
        }
    }

    #[test]
    fn the_least_recently_used_entry_is_evicted() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::with_limit(dir.path(), 3 * FILE_BYTES);
        let names = ["a", "b", "c"];
        for (i, name) in names.into_iter().enumerate() {
            store.put(key("space"), key(name), name.as_bytes());
            let path = store.path(key("space"), key(name));
            let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(i as u64);
            File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
        }
        assert!(store.get(key("space"), key("a")).is_some(), "used: now the latest");
        store.put(key("space"), key("d"), b"d");
        let left = ["a", "b", "c", "d"].map(|name| store.path(key("space"), key(name)).exists());
        assert_eq!(left, [true, false, true, true]);
        assert_eq!(store.usage(), (dir.path(), 3 * FILE_BYTES, 3 * FILE_BYTES));
    }

    #[test]
    fn the_latest_entries_of_a_space_are_read_up_to_the_byte_limit() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        for i in 0..4u8 {
            store.add(key("space"), &[i]);
            let path = store.path(key("space"), Key::of(&[&[i]]));
            let then = SystemTime::UNIX_EPOCH + Duration::from_secs(i.into());
            File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
        }
        assert_eq!(store.all(key("space"), 2 * FILE_BYTES), [vec![3], vec![2]]);
        assert_eq!(store.all(key("space"), u64::MAX).len(), 4);
    }

    #[test]
    fn an_entry_that_is_too_large_is_neither_stored_nor_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        store.put(key("a"), key("k"), &vec![0; ENTRY_BYTES_MAX as usize + 1]);
        assert!(store.entries().is_empty());
        let path = store.path(key("a"), key("k"));
        File::create(&path).unwrap().set_len(HEADER_BYTES as u64 + ENTRY_BYTES_MAX + 1).unwrap();
        assert_eq!(store.get(key("a"), key("k")), None);
        assert!(!path.exists());
    }

    #[test]
    fn temporary_files_of_a_killed_process_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let (old, new) = (dir.path().join("1-0.tmp"), dir.path().join("2-0.tmp"));
        File::create(&old).unwrap().set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        File::create(&new).unwrap();
        store.put(key("a"), key("k"), b"code");
        assert!(!old.exists() && new.exists());
    }

    #[test]
    fn an_unusable_folder_is_a_miss_with_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"").unwrap();
        let store = Store::new(dir.path().join("file"));
        store.put(key("a"), key("k"), b"code");
        assert_eq!(store.get(key("a"), key("k")), None);
        assert!(store.warned.load(Ordering::Relaxed));
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_read() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        store.put(key("a"), key("k"), b"code");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(store.get(key("a"), key("k")), None);
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        assert!(store.get(key("a"), key("k")).is_some());
    }
}
