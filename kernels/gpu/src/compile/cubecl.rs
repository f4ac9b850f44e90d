//! Caches the kernels that CubeCL compiles itself: we pass them to CubeCL when it starts on a device, and save new ones.
//!
//! CubeCL has its own cache, a file that it reads once and appends to. It does not verify what it reads, does not survive a full
//! disk, and its keys contain neither device nor driver. So we give it a file in memory with verified entries, and a thread copies
//! appended entries to our [`Store`].
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::Runtime;
use cudarc::driver::result as driver;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use super::{Environment, STORE};
use crate::cache::{Key, Store};
use crate::device::toolkit;

/// Devices that CubeCL was started on, and the cache file of each; `None` if its kernels are not saved.
static CHUNKS: Mutex<BTreeMap<usize, Option<Chunk>>> = Mutex::new(BTreeMap::new());

/// Interval between copies: a program that exits loses at most the kernels of this time.
const COPY_EVERY: Duration = Duration::from_secs(2);
/// Maximum bytes, hence memory, per copy: twice the largest kernel that the store accepts.
const COPY_BYTES_MAX: u64 = 16 << 20;
/// CubeCL 0.10's cache file, relative to its cache folder. A test checks this.
const CHUNK: &str = "cuda/0.10.0/ptx/chunk0.cbor";
/// CubeCL's table of cache files, which is optional.
const TABLE: &str = "cuda/0.10.0/ptx/toc.json.log";
/// The same for Vulkan, whose server may start while our folder is configured: its kernels are not cached.
const TABLE_VULKAN: &str = "vulkan/0.10.0/spirv/toc.json.log";
/// Maximum bytes of kernels passed to CubeCL, the latest first: it holds them in memory while it runs. A model's kernels take 2 MiB.
const GIVEN_BYTES_MAX: u64 = 32 << 20;

/// Loads NVRTC and starts CubeCL on a CUDA device, with the kernels cached for it. Errors are ignored here; they occur again, with
/// the reason, when the device is used.
pub(crate) fn prepare(number: usize) {
    let mut chunks = CHUNKS.lock();
    if chunks.contains_key(&number) {
        return;
    }
    let Ok(toolkit) = toolkit::ready() else { return };
    let chunk = STORE.get().and_then(|store| Some((store, space(number, &toolkit)?)));
    let chunk = chunk.and_then(|(store, space)| Chunk::filled(store, space));
    let start = || drop(CudaRuntime::client(&CudaDevice::new(number)));
    // CubeCL panics if a device or its settings are not as expected.
    let started = catch_unwind(AssertUnwindSafe(|| match &chunk {
        Some(chunk) => chunk.lend(start),
        None => {
            start();
            Some(())
        }
    }));
    if let Ok(Some(())) = started {
        chunks.insert(number, chunk.map(Chunk::read));
        copy_from_now_on();
    }
}

/// Whether [`prepare`] has started CubeCL on a device.
pub(crate) fn is_started(number: usize) -> bool {
    CHUNKS.lock().contains_key(&number)
}

/// Copies the kernels compiled since the last call to the store.
pub(crate) fn keep() {
    let mut chunks = CHUNKS.lock();
    for chunk in chunks.values_mut() {
        if chunk.as_mut().is_some_and(|chunk| chunk.copy().is_err()) {
            *chunk = None; // not in CubeCL 0.10's format: its kernels are no longer saved
        }
    }
}

fn copy_from_now_on() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let copy = || loop {
            std::thread::sleep(COPY_EVERY);
            keep();
        };
        // If the thread cannot start, kernels are saved only when the program calls `keep`.
        let _ = std::thread::Builder::new().name("kernel cache".into()).spawn(copy);
    });
}

fn space(number: usize, toolkit: &toolkit::Toolkit) -> Option<Key> {
    driver::init().ok()?;
    let device = driver::device::get(i32::try_from(number).ok()?).ok()?;
    // CubeCL always uses the headers below CUDA_PATH, not those of `toolkit`.
    let headers = cubecl::cuda::install::cuda_path()?;
    Environment::of(device, toolkit).ok()?.space(&format!("CubeCL, {}", headers.display()))
}

/// CubeCL's cache file: CBOR items in sequence.
struct Chunk {
    memory: File,
    /// The bytes up to here are in the store.
    copied: u64,
    store: &'static Store,
    space: Key,
}

/// The file is not in CubeCL's cache format.
#[derive(Debug, PartialEq, Eq)]
struct Foreign;

impl Chunk {
    /// A file with the cached kernels of a space, up to [`GIVEN_BYTES_MAX`]. `None` if the system cannot create files in memory.
    fn filled(store: &'static Store, space: Key) -> Option<Self> {
        let memory = File::from(memfd_create("kernels", MemfdFlags::CLOEXEC).ok()?);
        let mut copied = 0;
        for entry in store.all(space, GIVEN_BYTES_MAX) {
            if entry_len(&entry) == Ok(Some(entry.len())) {
                memory.write_all_at(&entry, copied).ok()?;
                copied += entry.len() as u64;
            }
        }
        Some(Self { memory, copied, store, space })
    }

    /// Calls `start` while CubeCL is configured to use this file. `None`, without calling `start`, if that cannot be set up.
    fn lend<T>(&self, start: impl FnOnce() -> T) -> Option<T> {
        let folder = tempfile::tempdir().ok()?;
        self.show(folder.path()).ok()?;
        let _lent = Lent::new(folder.path());
        Some(start())
    }

    /// Creates CubeCL's folder layout with a link to this file. CubeCL no longer needs the folder once it has opened the file.
    fn show(&self, folder: &Path) -> std::io::Result<()> {
        for table in [TABLE, TABLE_VULKAN].map(|table| folder.join(table)) {
            std::fs::create_dir_all(table.parent().unwrap_or(folder))?;
            // A table would be written to disk, which may be full, in a folder that is deleted soon. A dangling link keeps CubeCL
            // from creating it, and CubeCL works without it.
            symlink("none/none", table)?;
        }
        let chunk = folder.join(CHUNK);
        symlink(format!("/proc/self/fd/{}", self.memory.as_raw_fd()), &chunk)?;
        File::options().append(true).open(chunk).map(drop)
    }

    /// Frees the file's memory after CubeCL has read it.
    fn read(self) -> Self {
        self.forget(0, self.copied);
        self
    }

    fn forget(&self, from: u64, to: u64) {
        if to > from {
            // If this fails, the memory stays in use.
            let _ = fallocate(&self.memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to - from);
        }
    }

    /// Copies appended entries to the store; an incomplete entry waits for the next call.
    fn copy(&mut self) -> Result<(), Foreign> {
        let end = self.memory.metadata().map_or(self.copied, |metadata| metadata.len());
        let mut bytes = vec![0; usize::try_from((end - self.copied).min(COPY_BYTES_MAX)).unwrap_or_default()];
        if self.memory.read_exact_at(&mut bytes, self.copied).is_err() {
            return Err(Foreign);
        }
        let mut rest = bytes.as_slice();
        while let Some(len) = entry_len(rest)? {
            let (entry, behind) = rest.split_at(len);
            self.store.add(self.space, entry);
            rest = behind;
        }
        let from = self.copied;
        self.copied += (bytes.len() - rest.len()) as u64;
        self.forget(from, self.copied);
        if from == self.copied && bytes.len() as u64 == COPY_BYTES_MAX { Err(Foreign) } else { Ok(()) }
    }
}

/// Sets CubeCL's cache folder until dropped.
struct Lent {
    before: Arc<CubeClRuntimeConfig>,
    _alone: MutexGuard<'static, ()>,
}

/// Held while CubeCL's settings are changed.
static LENDING: Mutex<()> = Mutex::new(());

impl Lent {
    fn new(folder: &Path) -> Self {
        let alone = LENDING.lock();
        let before = CubeClRuntimeConfig::get();
        let mut with_cache = (*before).clone();
        with_cache.compilation.cache = Some(CacheConfig::File(folder.to_path_buf()));
        *CubeClRuntimeConfig::storage().lock() = Some(Arc::new(with_cache));
        Self { before, _alone: alone }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        *CubeClRuntimeConfig::storage().lock() = Some(Arc::clone(&self.before));
    }
}

/// Length of the first CBOR item (RFC 8949); `None` if it is incomplete.
fn entry_len(bytes: &[u8]) -> Result<Option<usize>, Foreign> {
    let (mut at, mut items) = (0usize, 1u64);
    while items > 0 {
        let Some(head) = bytes.get(at) else { return Ok(None) };
        let (major, short) = (head >> 5, head & 31);
        at += 1;
        let argument = match short {
            0..24 => u64::from(short),
            24..28 => {
                let width = 1 << (short - 24);
                let Some(number) = bytes.get(at..at + width) else { return Ok(None) };
                at += width;
                number.iter().fold(0, |number, byte| (number << 8) | u64::from(*byte))
            }
            _ => return Err(Foreign), // indefinite length, which CubeCL does not write
        };
        let inside = match major {
            0 | 1 | 7 => 0,
            2 | 3 => {
                let len = usize::try_from(argument).map_err(|_| Foreign)?;
                at = at.checked_add(len).ok_or(Foreign)?;
                0
            }
            4 => argument,
            5 => argument.checked_mul(2).ok_or(Foreign)?,
            _ => 1, // a tag is followed by one item
        };
        items = (items - 1).checked_add(inside).ok_or(Foreign)?;
    }
    Ok((at <= bytes.len()).then_some(at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::cache::CacheOption;
    use cubecl::compilation_cache::CompilationCache;
    use serde::{Deserialize, Serialize};

    /// CubeCL's cache entry for a kernel.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Kernel {
        entrypoint_name: String,
        shared_mem_bytes: usize,
        ptx: Vec<std::ffi::c_char>,
    }

    type Cache = CompilationCache<u128, Kernel>;

    fn kernel(number: usize) -> Kernel {
        let ptx = (0..3000).map(|i| ((i * 7 + number) % 251) as std::ffi::c_char).collect();
        Kernel { entrypoint_name: format!("kernel_{number}"), shared_mem_bytes: number << 10, ptx }
    }

    fn store(dir: &Path) -> &'static Store {
        Box::leak(Box::new(Store::new(dir)))
    }

    fn all(store: &Store, space: Key) -> Vec<Vec<u8>> {
        store.all(space, u64::MAX)
    }

    /// Opens CubeCL's cache like its server does when it starts on a device.
    fn server(chunk: &Chunk) -> Cache {
        let start = || {
            let settings = CubeClRuntimeConfig::get();
            let root = settings.compilation.cache.as_ref().expect("a cache").root();
            Cache::new("ptx", CacheOption::default().name("cuda").root(root))
        };
        let cache = chunk.lend(start).expect("a folder");
        let _alone = LENDING.lock();
        assert!(CubeClRuntimeConfig::get().compilation.cache.is_none(), "set only during `lend`");
        cache
    }

    #[test]
    fn kernels_that_cubecl_compiled_are_cached_for_its_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let (store, space) = (store(dir.path()), Key::of(&[b"space"]));
        let key = |number: usize| u128::MAX - number as u128; // more than 64 bits
        let mut chunk = Chunk::filled(store, space).unwrap();
        let mut cubecl = server(&chunk);
        chunk = chunk.read();
        for number in 0..3 {
            cubecl.insert(key(number), kernel(number)).unwrap();
            chunk.copy().unwrap();
        }
        assert_eq!(all(store, space).len(), 3);
        let mut chunk = Chunk::filled(store, space).unwrap();
        let mut again = server(&chunk);
        chunk = chunk.read();
        for number in 0..3 {
            assert_eq!(again.get(&key(number)), Some(&kernel(number)));
        }
        again.insert(key(3), kernel(3)).unwrap();
        chunk.copy().unwrap();
        assert_eq!(all(store, space).len(), 4, "cached entries are not copied again");
        assert!(all(store, Key::of(&[b"another driver"])).is_empty());
    }

    #[test]
    fn damaged_entries_never_reach_cubecl() {
        let dir = tempfile::tempdir().unwrap();
        let (store, space) = (store(dir.path()), Key::of(&[b"space"]));
        let mut chunk = Chunk::filled(store, space).unwrap();
        let mut cubecl = server(&chunk);
        for number in 0..2 {
            cubecl.insert(number as u128, kernel(number)).unwrap();
        }
        chunk.copy().unwrap();
        let mut files: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().path()).collect();
        files.sort();
        let mut bytes = std::fs::read(&files[0]).unwrap();
        let last = bytes.len() - 100;
        bytes[last] ^= 1;
        std::fs::write(&files[0], bytes).unwrap();
        store.add(space, b"no entry of CubeCL's");
        let chunk = Chunk::filled(store, space).unwrap();
        let again = server(&chunk);
        let found =
            (0..2).filter(|number| again.get(&(*number as u128)).is_some_and(|k| *k == kernel(*number))).count();
        assert_eq!(found, 1);
        assert_eq!(again.get(&2), None);
    }

    #[test]
    fn an_entry_is_copied_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let (store, space) = (store(dir.path()), Key::of(&[b"space"]));
        let mut chunk = Chunk::filled(store, space).unwrap();
        let entry = [0x82, 0x19, 0x01, 0x00, 0x63, b'a', b'b', b'c']; // [256, "abc"]
        for length in 0..entry.len() {
            assert_eq!(entry_len(&entry[..length]), Ok(None), "{length} bytes");
        }
        assert_eq!(entry_len(&[&entry[..], b"x"].concat()), Ok(Some(entry.len())));
        chunk.memory.write_all_at(&entry[..5], 0).unwrap();
        chunk.copy().unwrap();
        assert!(all(store, space).is_empty());
        chunk.memory.write_all_at(&entry[5..], 5).unwrap();
        chunk.copy().unwrap();
        assert_eq!(all(store, space), [entry.to_vec()]);
        chunk.memory.write_all_at(&[0xff; 9], 8).unwrap();
        assert_eq!(chunk.copy(), Err(Foreign));
    }

    #[test]
    fn impossible_lengths_end_the_copy() {
        for bytes in
            [&[0x5b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff][..], &[0xbb, 0xff, 0, 0, 0, 0, 0, 0, 0], &[0x9f]]
        {
            assert_eq!(entry_len(bytes), Err(Foreign), "{bytes:x?}");
        }
        assert_eq!(entry_len(&[0x9b, 0, 0, 0, 1, 0, 0, 0, 0]), Ok(None));
    }
}
