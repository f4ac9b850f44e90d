//! Paged KV cache of several sequences, addressed by position.
//!
//! Writing a position again is harmless, and reserving up to a position discards all later ones: replay, cancellation and
//! speculative decoding need nothing else. Memory is allocated in pages of [`PAGE`] positions as sequences grow. Sequences may
//! share pages, which are copied before one of them writes. Cells are f32 or f16 ([`Activations::cache_cell_bytes`]).
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::cpu::simd::{Kernel, Simd};

use crate::stage::{Activations, SequenceId};

/// Positions per page: two vectors of keys; small, so little is wasted.
pub(crate) const PAGE: usize = 32;

/// Keys and values of a stage's layers, for all open sequences.
pub(crate) struct KvCache {
    shape: Shape,
    sequences: BTreeMap<SequenceId, Vec<Arc<Page>>>,
    /// Number of pages in memory.
    live: Arc<AtomicUsize>,
    /// Most pages in memory.
    pages_max: usize,
}

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    cell_bytes: usize,
}

/// `PAGE` positions: `[layer][kv head]` of keys `[head_dim][PAGE]`, then values `[PAGE][head_dim padded to 16]`.
struct Page {
    cells: Vec<Aligned>,
    live: Arc<AtomicUsize>,
}

impl Page {
    fn new(cells: Vec<Aligned>, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(1, Ordering::Relaxed);
        Self { cells, live: live.clone() }
    }
}

impl Clone for Page {
    fn clone(&self) -> Self {
        Self::new(self.cells.clone(), &self.live)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

/// Bytes per position and layer, all heads. Memory is allocated for [`PAGE`] positions at a time.
pub(crate) fn position_bytes(kv_heads: usize, head_dim: usize, activations: Activations) -> usize {
    let shape = Shape { layers: 1, kv_heads, head_dim, cell_bytes: activations.cache_cell_bytes() };
    shape.page_bytes() / PAGE
}

impl Shape {
    fn half(&self) -> bool {
        self.cell_bytes == Half::BYTES
    }

    fn value_row_bytes(&self) -> usize {
        self.head_dim.next_multiple_of(16) * self.cell_bytes
    }

    fn keys_bytes(&self) -> usize {
        PAGE * self.head_dim * self.cell_bytes
    }

    /// Bytes of one head in a page: a multiple of 64, because 32 cells are.
    fn head_bytes(&self) -> usize {
        self.keys_bytes() + PAGE * self.value_row_bytes()
    }

    fn head_offset(&self, layer: usize, kv_head: usize) -> usize {
        (layer * self.kv_heads + kv_head) * self.head_bytes()
    }

    fn page_bytes(&self) -> usize {
        self.head_offset(self.layers, 0)
    }
}

impl KvCache {
    /// A cache of at most `positions_max` positions, in whole pages of sequences.
    pub(crate) fn new(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        activations: Activations,
        positions_max: usize,
    ) -> Self {
        let shape = Shape { layers, kv_heads, head_dim, cell_bytes: activations.cache_cell_bytes() };
        Self { shape, sequences: BTreeMap::new(), live: Arc::default(), pages_max: positions_max.div_ceil(PAGE) }
    }

    pub(crate) fn release(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
    }

    /// Allocates pages for the first `n` positions of each `(sequence, n)` and discards later ones.
    ///
    /// # Errors
    /// The pages that are missing and those that there are. Nothing has changed.
    pub(crate) fn reserve(&mut self, wanted: &[(SequenceId, usize)]) -> Result<(), (usize, usize)> {
        let held = |sequence| self.sequences.get(sequence).map_or(0, Vec::len);
        let more: usize = wanted.iter().map(|(sequence, end)| end.div_ceil(PAGE).saturating_sub(held(sequence))).sum();
        if more > 0 && self.live.load(Ordering::Relaxed) + more > self.pages_max {
            return Err((more, self.pages_max));
        }
        let lines = self.shape.page_bytes().div_ceil(64);
        for (sequence, positions) in wanted {
            let new = || Arc::new(Page::new(vec![Aligned([0; 64]); lines], &self.live));
            self.sequences.entry(*sequence).or_default().resize_with(positions.div_ceil(PAGE), new);
        }
        Ok(())
    }

    /// Gives a sequence the pages of the first `positions` of another.
    pub(crate) fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize) {
        let pages = self.sequences.get(&from).into_iter().flatten().take(positions.div_ceil(PAGE)).cloned().collect();
        self.sequences.insert(to, pages);
    }

    /// Allocated bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.live.load(Ordering::Relaxed) * self.shape.page_bytes().next_multiple_of(64)
    }

    /// Pages of a sequence for reading; `None` if the sequence is unknown.
    pub(crate) fn view(&self, sequence: SequenceId) -> Option<SequencePages<'_>> {
        self.sequences.get(&sequence).map(|pages| SequencePages { shape: self.shape, pages })
    }

    /// Pages of a sequence for concurrent writes to positions from `position` on. Pages that it shares are copied.
    pub(crate) fn writer(&mut self, sequence: SequenceId, position: usize) -> Option<Writer> {
        let (shape, first) = (self.shape, position / PAGE);
        let pages = self.sequences.get_mut(&sequence)?.iter_mut().skip(first);
        let pages = pages.map(|page| Arc::make_mut(page).cells.as_mut_ptr().cast()).collect();
        Some(Writer { shape, first, pages })
    }
}

/// Pages of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct SequencePages<'a> {
    shape: Shape,
    pages: &'a [Arc<Page>],
}

impl<'a> SequencePages<'a> {
    pub(crate) fn head(&self, layer: usize, kv_head: usize) -> HeadPages<'a> {
        assert!(layer < self.shape.layers && kv_head < self.shape.kv_heads, "a head of the cache");
        HeadPages { pages: *self, offset: self.shape.head_offset(layer, kv_head) }
    }
}

/// Keys and values of one head of one layer.
#[derive(Clone, Copy)]
pub(crate) struct HeadPages<'a> {
    pages: SequencePages<'a>,
    offset: usize,
}

impl HeadPages<'_> {
    /// Whether cells are f16.
    pub(crate) fn half(&self) -> bool {
        self.pages.shape.half()
    }

    /// Allocated positions.
    pub(crate) fn positions(&self) -> usize {
        self.pages.pages.len() * PAGE
    }

    /// Keys of page `b`: `[head_dim][PAGE]` cells.
    #[inline(always)]
    pub(crate) fn keys(&self, b: usize) -> *const u8 {
        self.pages.pages[b].cells.as_ptr().cast::<u8>().wrapping_add(self.offset)
    }

    /// Values of page `b` and the bytes of each of its `PAGE` rows.
    #[inline(always)]
    pub(crate) fn values(&self, b: usize) -> (*const u8, usize) {
        let shape = &self.pages.shape;
        (self.keys(b).wrapping_add(shape.keys_bytes()), shape.value_row_bytes())
    }
}

/// Writes positions of one sequence; distinct positions may be written concurrently.
pub(crate) struct Writer {
    shape: Shape,
    /// Number of the first of `pages`.
    first: usize,
    pages: Vec<*mut u8>,
}

// SAFETY: `StoreRow` requires that no two threads write the same position; distinct positions are distinct memory.
unsafe impl Sync for Writer {}
// SAFETY: as above.
unsafe impl Send for Writer {}

impl Writer {
    /// Address of a position in one layer.
    pub(crate) fn place(&self, layer: usize, position: usize) -> CellAddress {
        let shape = self.shape;
        assert!(layer < shape.layers, "a layer of the cache");
        let page = self.pages[position / PAGE - self.first];
        let keys = page.wrapping_add(shape.head_offset(layer, 0) + position % PAGE * shape.cell_bytes);
        let values = page
            .wrapping_add(shape.head_offset(layer, 0) + shape.keys_bytes() + position % PAGE * shape.value_row_bytes());
        CellAddress { shape, keys, values }
    }
}

/// Cells of one position of one layer, all heads.
#[derive(Clone, Copy)]
pub(crate) struct CellAddress {
    shape: Shape,
    /// First key cell of the first head.
    keys: *mut u8,
    /// First value cell of the first head.
    values: *mut u8,
}

/// Stores the keys and values of all heads (`kv_heads · head_dim` each) of one position. Further contract of `run`: the cache
/// is alive, and no other thread reads or writes the position.
pub(crate) struct StoreRow<'a> {
    pub(crate) keys: &'a [f32],
    pub(crate) values: &'a [f32],
    pub(crate) place: CellAddress,
}

impl Kernel for StoreRow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the contract above; the CPU supports `S`.
        unsafe { if self.place.shape.half() { self.cells::<S, Half>() } else { self.cells::<S, f32>() } }
    }
}

impl StoreRow<'_> {
    #[inline(always)]
    unsafe fn cells<S: Simd, C: Cell>(self) {
        let CellAddress { shape, keys: to_keys, values: to_values } = self.place;
        let size = shape.head_dim;
        assert!(self.keys.len() == shape.kv_heads * size && self.values.len() == self.keys.len(), "a row of keys");
        for (head, (keys, values)) in self.keys.chunks_exact(size).zip(self.values.chunks_exact(size)).enumerate() {
            let offset = head * shape.head_bytes();
            for (i, (keys, values)) in keys.chunks(16).zip(values.chunks(16)).enumerate() {
                // SAFETY: the head has `size` keys, `PAGE` cells apart, and a row of values padded to whole vectors.
                unsafe {
                    let mut cells = [0u8; 64];
                    C::store::<S>(S::load_first(keys.as_ptr(), keys.len()), cells.as_mut_ptr());
                    for d in 0..keys.len() {
                        let to = to_keys.add(offset + (16 * i + d) * PAGE * C::BYTES);
                        std::ptr::copy_nonoverlapping(cells.as_ptr().add(d * C::BYTES), to, C::BYTES);
                    }
                    let to = to_values.add(offset + 16 * i * C::BYTES);
                    C::store::<S>(S::load_first(values.as_ptr(), values.len()), to);
                }
            }
        }
    }
}

/// Storage format of a key or value.
pub(crate) trait Cell {
    /// Bytes per cell.
    const BYTES: usize;
    /// # Safety
    /// The CPU supports `S`; 16 cells lie at `from`.
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;
    /// # Safety
    /// The CPU supports `S`; 16 cells lie at `to`.
    unsafe fn store<S: Simd>(numbers: S::F, to: *mut u8);
}

/// IEEE half precision.
pub(crate) struct Half;

impl Cell for f32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: by contract.
        unsafe { S::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(numbers: S::F, to: *mut u8) {
        // SAFETY: by contract.
        unsafe { S::store(numbers, to.cast()) }
    }
}

impl Cell for Half {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: by contract.
        unsafe { S::load_f16(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(numbers: S::F, to: *mut u8) {
        // SAFETY: by contract.
        unsafe { S::store_f16(numbers, to.cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_allocated_and_freed_with_positions() {
        let mut cache = KvCache::new(2, 3, 64, Activations::Int8, 256);
        let page = 2 * 3 * (32 * 64 * 2) * 2;
        assert_eq!(page, 2 * 32 * position_bytes(3, 64, Activations::Int8));
        assert_eq!(cache.bytes(), 0);
        cache.reserve(&[(5, 32)]).unwrap();
        assert_eq!(cache.bytes(), page);
        cache.reserve(&[(5, 33)]).unwrap();
        assert_eq!(cache.bytes(), 2 * page);
        cache.reserve(&[(9, 70)]).unwrap();
        assert_eq!(cache.bytes(), 5 * page);
        cache.reserve(&[(9, 15)]).unwrap(); // discards later positions
        assert_eq!(cache.bytes(), 3 * page);
        cache.release(5);
        cache.release(5);
        assert_eq!(cache.bytes(), page);
        assert_eq!(cache.reserve(&[(6, 100), (7, 130)]), Err((9, 8)));
        assert_eq!(cache.bytes(), page, "nothing has changed");
    }

    #[test]
    fn a_shared_page_is_copied_before_it_is_written() {
        let mut cache = KvCache::new(1, 1, 16, Activations::F32, 256);
        let page = cache.shape.page_bytes();
        cache.reserve(&[(1, 96)]).unwrap();
        let first = |cache: &KvCache, sequence| cache.view(sequence).unwrap().head(0, 0).keys(1);
        cache.share(1, 2, 64);
        assert_eq!(cache.bytes(), 3 * page);
        cache.reserve(&[(2, 65)]).unwrap();
        assert!(cache.writer(2, 64).is_some() && first(&cache, 1) == first(&cache, 2), "it writes only behind them");
        assert_eq!(cache.bytes(), 4 * page);
        assert!(cache.writer(2, 40).is_some() && first(&cache, 1) != first(&cache, 2));
        assert_eq!(cache.bytes(), 5 * page);
        cache.release(1);
        assert_eq!(cache.bytes(), 3 * page, "the first page is still the other sequence's");
    }
}
