//! Compiled kernels on disk: a kernel that was compiled for a device is not compiled again at the next start.
//!
//! What is read is code that a GPU will run, so nothing is believed: an entry names the key that it was made for and the hash of its
//! content. One that is damaged, cut short or of another key is removed and reported as absent. Nothing here fails: a folder that
//! cannot be used costs the time to compile, and one warning.
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Identifies what an entry depends on: the hash of all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// Equal keys have equal parts in equal order.
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

/// A folder of compiled kernels. Any number of processes may use it at once.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    limit_bytes: u64,
    warned: AtomicBool,
}

/// Disk space of all entries. The kernels of a model take 1 MiB (graphs) and 2 MiB (CubeCL), so this holds twenty models, rules and
/// builds of the program; what was used least recently is removed first.
const LIMIT_BYTES: u64 = 64 << 20;
/// Content of an entry at most, hence memory for a file that claims to be one. The largest kernel of a model has 0.2 MiB, twice that
/// as CubeCL keeps it; a rule from text may have more.
const ENTRY_BYTES_MAX: u64 = 8 << 20;
/// What a file takes on disk beside its content, at least: it bounds the number of small entries too.
const FILE_BYTES: u64 = 4096;
/// A temporary file that is older belongs to a process that ended while it wrote.
const ABANDONED: Duration = Duration::from_secs(3600);

const MAGIC: [u8; 8] = *b"mnkern-1";
/// Magic, key, length of the content, its hash.
const HEADER_BYTES: usize = 8 + 32 + 8 + 32;
const SUFFIX: &str = "kernel";

impl Store {
    /// Uses `dir`, which is created when the first entry is kept.
    pub(crate) fn new(dir: impl Into<PathBuf>) -> Self {
        Self::with_limit(dir, LIMIT_BYTES)
    }

    fn with_limit(dir: impl Into<PathBuf>, limit_bytes: u64) -> Self {
        Self { dir: dir.into(), limit_bytes, warned: AtomicBool::new(false) }
    }

    /// The content that was kept for `name` in `space`, which stands for the machine and the program.
    pub(crate) fn get(&self, space: Key, name: Key) -> Option<Vec<u8>> {
        if !self.is_private() {
            return None;
        }
        let path = self.path(space, name);
        let (_, content) = read(&path).filter(|(key, _)| *key == entry_key(space, name))?;
        // Where that is refused, the entry is removed earlier than others.
        let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(content)
    }

    /// The contents that were added to a space, the latest first, as many as have `bytes_max` together. This is no use of them: what
    /// is read as a whole is removed in the order in which it came.
    pub(crate) fn all(&self, space: Key, bytes_max: u64) -> Vec<Vec<u8>> {
        if !self.is_private() {
            return Vec::new();
        }
        let prefix = format!("{}-", space.hex(SPACE_DIGITS));
        let mut entries = self.entries();
        entries.retain(|entry| entry.path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)));
        entries.sort_by(|a, b| (b.used, &b.path).cmp(&(a.used, &a.path)));
        let mut bytes = 0;
        let within = |entry: &Entry| {
            bytes += entry.bytes;
            bytes <= bytes_max
        };
        let read = |entry: Entry| {
            let (key, content) = read(&entry.path)?;
            // The content is its own name there, so an entry that was put under another space's name shows itself.
            (key == entry_key(space, Key::of(&[&content]))).then_some(content)
        };
        entries.into_iter().take_while(within).filter_map(read).collect()
    }

    /// Keeps what is known by its content alone, for [`Self::all`].
    pub(crate) fn add(&self, space: Key, content: &[u8]) {
        self.put(space, Key::of(&[content]), content);
    }

    /// Keeps a content, and makes room for it.
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

    /// Removes an entry that did not work.
    pub(crate) fn remove(&self, space: Key, name: Key) {
        // If it stays, it is removed again the next time that it does not work.
        let _ = std::fs::remove_file(self.path(space, name));
    }

    /// The folder, bytes that its entries take on disk, and how many they may take.
    pub(crate) fn usage(&self) -> (&Path, u64, u64) {
        (&self.dir, self.entries().iter().map(|entry| entry.bytes).sum(), self.limit_bytes)
    }

    fn path(&self, space: Key, name: Key) -> PathBuf {
        self.dir.join(format!("{}-{}.{SUFFIX}", space.hex(SPACE_DIGITS), name.hex(NAME_DIGITS)))
    }

    /// All at once: readers see the entry whole or not at all. A machine that loses power may keep a part, which its hash shows.
    fn write(&self, path: &Path, key: Key, content: &[u8]) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        // Process ids repeat where containers share the folder, hence the time.
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
            let _ = std::fs::remove_file(&temporary); // nothing is lost: see `ABANDONED`
        }
        written
    }

    /// Removes what was used least recently until the rest is within the limit.
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

    /// All entries; removes temporary files that nobody writes any more.
    fn entries(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        for file in std::fs::read_dir(&self.dir).into_iter().flatten().filter_map(Result::ok) {
            let path = file.path();
            let Ok(metadata) = file.metadata() else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some(SUFFIX) if metadata.is_file() => {
                    let bytes = metadata.len().next_multiple_of(FILE_BYTES);
                    entries.push(Entry { path, bytes, used });
                }
                Some("tmp") if used.elapsed().is_ok_and(|age| age > ABANDONED) => {
                    let _ = std::fs::remove_file(&path); // or the next time
                }
                _ => {}
            }
        }
        entries
    }

    /// Whether nobody else can put kernels there, as far as the folder exists. Warns where somebody can.
    fn is_private(&self) -> bool {
        let Ok(metadata) = std::fs::metadata(&self.dir) else { return false };
        let closed = owned_and_closed(&metadata);
        if !closed {
            self.warn("expected a folder that belongs to this user and that no other may write");
        }
        closed
    }

    fn warn(&self, why: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let dir = self.dir.display();
            tracing::warn!(
                "compiled kernels are not kept in {dir}: {why}; each start compiles them again until it can be used"
            );
        }
    }
}

struct Entry {
    path: PathBuf,
    /// On disk.
    bytes: u64,
    used: SystemTime,
}

/// Digits of a file's name for the space, and for the name in it. The whole key is in the entry.
const SPACE_DIGITS: usize = 16;
const NAME_DIGITS: usize = 32;

fn entry_key(space: Key, name: Key) -> Key {
    Key::of(&[&space.0, &name.0])
}

/// Key and content of a sound entry. Removes any other.
fn read(path: &Path) -> Option<(Key, Vec<u8>)> {
    let mut bytes = Vec::new();
    let whole = HEADER_BYTES as u64 + ENTRY_BYTES_MAX;
    let taken = File::open(path).ok()?.take(whole + 1).read_to_end(&mut bytes).ok()?;
    let entry = (taken as u64 <= whole).then(|| parse(bytes)).flatten();
    if entry.is_none() {
        let _ = std::fs::remove_file(path); // else it is written over when the kernel was compiled again
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

/// Makes a folder, and those above it, that only this user may enter.
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
    fn what_was_kept_is_found_again_by_another_process() {
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
    fn parts_of_a_key_do_not_run_into_each_other() {
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
            assert_eq!(path.exists(), foreign, "what is damaged is removed, what is another's is not");
            store.put(key("a"), key("k"), &content);
            assert_eq!(store.get(key("a"), key("k")).as_ref(), Some(&content));
        }
    }

    #[test]
    fn what_was_used_least_recently_makes_room() {
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
    fn the_latest_of_a_space_are_read_as_far_as_there_is_memory() {
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
    fn an_entry_too_large_is_neither_kept_nor_read() {
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
    fn files_that_a_killed_process_left_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let (old, new) = (dir.path().join("1-0.tmp"), dir.path().join("2-0.tmp"));
        File::create(&old).unwrap().set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        File::create(&new).unwrap();
        store.put(key("a"), key("k"), b"code");
        assert!(!old.exists() && new.exists());
    }

    #[test]
    fn a_folder_that_cannot_be_used_costs_nothing_but_the_entry() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"").unwrap();
        let store = Store::new(dir.path().join("file"));
        store.put(key("a"), key("k"), b"code");
        assert_eq!(store.get(key("a"), key("k")), None);
        assert!(store.warned.load(Ordering::Relaxed));
    }

    #[test]
    fn a_folder_that_others_may_write_is_not_read() {
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
