//! Keys and values of several sequences, addressed by position.
//!
//! Writing a position again is harmless, and writing at one forgets those behind it: replay, cancellation and
//! speculation need nothing else. Memory comes in pages of [`BLOCK`] positions and follows use. Cells are f32 when
//! activations are f32 (the strict path) and f16 when they are int8, where f16 is the smaller of the two roundings and
//! halves both memory and traffic.
use std::collections::BTreeMap;

use crate::cpu::simd::Simd;
use crate::stage::SequenceId;

/// Positions in a block: two vectors of keys, small enough to waste little.
pub(crate) const BLOCK: usize = 32;

/// Keys and values of a stage's layers.
pub(crate) struct KvCache {
    shape: Shape,
    sequences: BTreeMap<SequenceId, Sequence>,
}

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    half: bool,
}

#[derive(Default)]
struct Sequence {
    /// Positions that have been written and are to be believed.
    held: usize,
    pages: Vec<Page>,
}

/// `BLOCK` positions: `[layer][kv head]` of keys `[head_dim][BLOCK]`, then values `[BLOCK][head_dim padded to 16]`.
struct Page(Vec<Aligned>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

impl Shape {
    fn cell_bytes(&self) -> usize {
        if self.half { 2 } else { 4 }
    }

    fn value_row_bytes(&self) -> usize {
        self.head_dim.next_multiple_of(16) * self.cell_bytes()
    }

    fn keys_bytes(&self) -> usize {
        BLOCK * self.head_dim * self.cell_bytes()
    }

    /// Of one head: a multiple of 64, as 32 cells are.
    fn head_bytes(&self) -> usize {
        self.keys_bytes() + BLOCK * self.value_row_bytes()
    }

    fn head_offset(&self, layer: usize, kv_head: usize) -> usize {
        (layer * self.kv_heads + kv_head) * self.head_bytes()
    }

    fn page_bytes(&self) -> usize {
        self.head_offset(self.layers, 0)
    }
}

impl KvCache {
    pub(crate) fn new(layers: usize, kv_heads: usize, head_dim: usize, half: bool) -> Self {
        Self { shape: Shape { layers, kv_heads, head_dim, half }, sequences: BTreeMap::new() }
    }

    /// Positions held for a sequence.
    pub(crate) fn held(&self, sequence: SequenceId) -> usize {
        self.sequences.get(&sequence).map_or(0, |s| s.held)
    }

    pub(crate) fn knows(&self, sequence: SequenceId) -> bool {
        self.sequences.contains_key(&sequence)
    }

    /// Open sequences.
    pub(crate) fn open(&self) -> usize {
        self.sequences.len()
    }

    pub(crate) fn release(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
    }

    /// Forgets positions from `position` on and makes room for `count` more; they count as held.
    pub(crate) fn extend(&mut self, sequence: SequenceId, position: usize, count: usize) {
        let shape = self.shape;
        let entry = self.sequences.entry(sequence).or_default();
        debug_assert!(position <= entry.held);
        entry.held = position + count;
        let pages = entry.held.div_ceil(BLOCK);
        entry.pages.truncate(pages);
        let lines = shape.page_bytes().div_ceil(64);
        entry.pages.resize_with(pages, || Page(vec![Aligned([0; 64]); lines]));
    }

    /// Bytes of all pages.
    pub(crate) fn bytes(&self) -> usize {
        let pages: usize = self.sequences.values().map(|s| s.pages.len()).sum();
        pages * self.shape.page_bytes().next_multiple_of(64)
    }

    /// Blocks of a sequence for reading; `None` if it is not known.
    pub(crate) fn view(&self, sequence: SequenceId) -> Option<SequenceBlocks<'_>> {
        self.sequences.get(&sequence).map(|s| SequenceBlocks { shape: self.shape, pages: &s.pages })
    }

    /// Blocks of a sequence for writing by several threads.
    pub(crate) fn writer(&mut self, sequence: SequenceId) -> Option<Writer> {
        let shape = self.shape;
        self.sequences
            .get_mut(&sequence)
            .map(|s| Writer { shape, pages: s.pages.iter_mut().map(|p| p.0.as_mut_ptr().cast()).collect() })
    }
}

/// Pages of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct SequenceBlocks<'a> {
    shape: Shape,
    pages: &'a [Page],
}

impl<'a> SequenceBlocks<'a> {
    pub(crate) fn head(&self, layer: usize, kv_head: usize) -> HeadBlocks<'a> {
        assert!(layer < self.shape.layers && kv_head < self.shape.kv_heads, "a head of the cache");
        HeadBlocks { blocks: *self, offset: self.shape.head_offset(layer, kv_head) }
    }
}

/// Keys and values of one head of one layer.
#[derive(Clone, Copy)]
pub(crate) struct HeadBlocks<'a> {
    blocks: SequenceBlocks<'a>,
    offset: usize,
}

impl HeadBlocks<'_> {
    /// Whether cells are f16.
    pub(crate) fn half(&self) -> bool {
        self.blocks.shape.half
    }

    /// Positions there is room for.
    pub(crate) fn positions(&self) -> usize {
        self.blocks.pages.len() * BLOCK
    }

    /// Keys of block `b`: `[head_dim][BLOCK]` cells.
    #[inline(always)]
    pub(crate) fn keys(&self, b: usize) -> *const u8 {
        self.blocks.pages[b].0.as_ptr().cast::<u8>().wrapping_add(self.offset)
    }

    /// Values of block `b` and the bytes of each of its `BLOCK` rows.
    #[inline(always)]
    pub(crate) fn values(&self, b: usize) -> (*const u8, usize) {
        let shape = &self.blocks.shape;
        (self.keys(b).wrapping_add(shape.keys_bytes()), shape.value_row_bytes())
    }
}

/// Writes positions of one sequence; distinct positions may be written at the same time.
pub(crate) struct Writer {
    shape: Shape,
    pages: Vec<*mut u8>,
}

// SAFETY: `store` asks that no two threads write the same position; distinct ones are distinct memory.
unsafe impl Sync for Writer {}
// SAFETY: as above.
unsafe impl Send for Writer {}

impl Writer {
    /// Keys and values of all heads (`kv_heads · head_dim` each) at a position of one layer.
    ///
    /// # Safety
    /// The cache outlives the call and nobody else reads or writes this position now.
    pub(crate) unsafe fn store(&self, layer: usize, position: usize, keys: &[f32], values: &[f32]) {
        let size = self.shape.head_dim;
        assert!(layer < self.shape.layers, "a layer of the cache");
        assert!(keys.len() == self.shape.kv_heads * size && values.len() == keys.len(), "a row of keys and values");
        let page = self.pages[position / BLOCK];
        for (head, (keys, values)) in keys.chunks_exact(size).zip(values.chunks_exact(size)).enumerate() {
            // SAFETY: offsets lie within the page; the place is ours by contract.
            unsafe {
                let key = page.add(self.shape.head_offset(layer, head));
                let value = key.add(self.shape.keys_bytes() + position % BLOCK * self.shape.value_row_bytes());
                let key = key.add(position % BLOCK * self.shape.cell_bytes());
                if self.shape.half {
                    scatter::<Half>(keys, key, BLOCK * 2);
                    scatter::<Half>(values, value, 2);
                } else {
                    scatter::<f32>(keys, key, BLOCK * 4);
                    scatter::<f32>(values, value, 4);
                }
            }
        }
    }
}

/// # Safety
/// `to` has a cell for each number, `stride` bytes apart.
unsafe fn scatter<C: Cell>(from: &[f32], to: *mut u8, stride: usize) {
    for (i, &number) in from.iter().enumerate() {
        // SAFETY: by contract.
        unsafe { C::store(number, to.add(i * stride)) }
    }
}

/// How a key or value is kept.
pub(crate) trait Cell {
    /// Bytes of one.
    const BYTES: usize;
    /// # Safety
    /// The machine has `S`; 16 cells lie at `from`.
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;
    /// # Safety
    /// `to` is a cell.
    unsafe fn store(number: f32, to: *mut u8);
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
    unsafe fn store(number: f32, to: *mut u8) {
        // SAFETY: by contract.
        unsafe { to.cast::<f32>().write_unaligned(number) }
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
    unsafe fn store(number: f32, to: *mut u8) {
        // SAFETY: by contract.
        unsafe { to.cast::<u16>().write_unaligned(half::f16::from_f32_const(number).to_bits()) }
    }
}
