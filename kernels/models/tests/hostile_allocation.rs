//! A hostile header cannot make a node allocate more than a small multiple of the file's length. The only test of its
//! process, because it counts every allocation.
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels_models::weights::testing::{GgufWriter, TinyModel};
use kernels_models::weights::{ModelFile, ShardIndex};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator; the counters do not affect it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak of live allocated bytes during `work`, above the bytes live before.
fn peak(work: impl FnOnce()) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed) - before
}

fn check(what: &str, bytes: Vec<u8>) {
    let len = bytes.len();
    let bytes = bytes::Bytes::from(bytes);
    let used = peak(|| _ = ModelFile::from_bytes(bytes));
    assert!(used <= 8 * len + (64 << 10), "{what}: {used} bytes allocated for a file of {len}");
}

#[test]
fn counts_in_a_header_do_not_drive_allocation() {
    let header = |tensors: u64, keys: u64, rest: &[u8]| {
        [b"GGUF".as_slice(), &3u32.to_le_bytes(), &tensors.to_le_bytes(), &keys.to_le_bytes(), rest].concat()
    };
    for count in [1 << 10, 1 << 20, 1 << 31, 1 << 40, u64::MAX / 14, u64::MAX] {
        check("keys", header(0, count, &[0; 40]));
        check("tensors", header(count, 0, &[0; 40]));
        let key = [&1u64.to_le_bytes()[..], b"k", &8u32.to_le_bytes(), &count.to_le_bytes(), b"rest"].concat();
        check("a string", header(0, 1, &key));
        let name = [&count.to_le_bytes()[..], b"rest of the file"].concat();
        check("a name", header(0, 1, &name));
        for element in [0u32, 4, 8, 12] {
            let array = [&1u64.to_le_bytes()[..], b"k", &9u32.to_le_bytes(), &element.to_le_bytes()].concat();
            check("an array", header(0, 1, &[&array[..], &count.to_le_bytes(), b"rest"].concat()));
        }
    }
    let corrupted = |change: &dyn Fn(&mut GgufWriter)| {
        let mut writer = TinyModel { layers: 1, ..TinyModel::default() }.writer();
        change(&mut writer);
        writer.write()
    };
    check("a valid file", corrupted(&|_| ()));
    check("layers", corrupted(&|w| _ = w.u32("llama.block_count", u32::MAX)));
    check("heads", corrupted(&|w| _ = w.u32("llama.attention.head_count", 1 << 20)));
    check("a wide tensor", corrupted(&|w| w.tensors_mut()[3].dims = vec![1 << 40, 1 << 20]));
    check("a tall tensor", corrupted(&|w| w.tensors_mut()[3].dims = vec![256, 1 << 50]));
    let index = [b"MNIX".as_slice(), &1u32.to_le_bytes(), &[0; 16], &u32::MAX.to_le_bytes(), &[0; 57]].concat();
    let used = peak(|| assert!(ShardIndex::decode(&index).is_err()));
    assert!(used < 4096, "{used} bytes allocated for an index of {}", index.len());
}
