//! Paged attention, 128 positions per page: rotary embedding and KV cache writes, attention page by page, then their combination.
//!
//! A page of one layer holds, for each key/value head, keys `[dims / 8][128][8]` and then values `[128][dims]` in f16 (read eight
//! at a time), or keys `[dims / 4][128][4]` and values `[128][dims]` in f32. Next: `engine.rs`.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::{LANES, POSITIONS};
use kernels_models::weights::Window;

use crate::arithmetic::{Features, both_halves, exp, fused, inverse_sqrt, reciprocal, soft_cap, to_half};
use crate::inline::{await_previous, release_next};
use crate::platform::{Platform, array};
use crate::product::operands::Activations;
use crate::rows::{RowFormats, UNITS, put, square_sum};
use crate::window::{Reach, first_seen};

/// Shape of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads, a divisor of `heads`.
    pub(crate) kv_heads: usize,
    /// Elements of a head: a multiple of 8.
    pub(crate) head_dim: usize,
    /// Rotary pairs of a head.
    pub(crate) pairs: usize,
    /// Rotary pairs are (i, i + pairs) instead of (2 i, 2 i + 1).
    pub(crate) halves: bool,
    /// The KV cache is f16 instead of f32.
    pub(crate) half_cells: bool,
}

impl Heads {
    /// Elements of a row of queries, keys and values.
    #[must_use]
    pub(crate) const fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of a row of queries.
    #[must_use]
    pub(crate) const fn queries(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Words of one head's keys, or values, in a page.
    const fn part_words(&self) -> usize {
        POSITIONS * self.head_dim / if self.half_cells { 2 } else { 1 }
    }

    /// Query heads per cube, out of the group that shares a key head. With few `pages` (of all rows) a cube takes fewer heads, so
    /// that there are cubes for all streaming multiprocessors. The minimum keeps every unit busy while values are summed, and uses
    /// each key for at least two heads.
    fn share(&self, pages: usize, processors: Option<u32>) -> usize {
        let group = self.heads / self.kv_heads;
        if !self.half_cells {
            return group; // strict arithmetic need not be fast, and with fewer heads f32 values do not fit the registers
        }
        let least = (2 * POSITIONS / self.head_dim).max(2).min(group);
        let wanted = 4 * processors.unwrap_or(1) as usize;
        let parts = (wanted / (pages * self.kv_heads)).clamp(1, group);
        group.div_ceil(parts).max(least)
    }

    /// Bytes of a page of one layer.
    #[must_use]
    pub(crate) const fn page_bytes(&self) -> usize {
        self.kv_heads * 2 * self.part_words() * 4
    }
}

/// The rows of a pass with their positions and page tables, for attention kernels.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Number of rows.
    pub(crate) count: usize,
    /// `[count, 2]`: position, and where the row's page table begins in `tables`.
    pub(crate) rows: Handle,
    /// Pages of all sequences, sequence by sequence.
    pub(crate) tables: Handle,
    /// Length of `tables`.
    pub(crate) tables_len: usize,
    /// Pages of the longest sequence.
    pub(crate) blocks: usize,
}

/// Attention parameters of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerHeads<'a> {
    /// Biases of queries, keys and values, in this order.
    pub(crate) biases: Option<&'a Handle>,
    /// RMSNorm of each head of queries, then of keys: `[2, head_dim]`.
    pub(crate) norms: Option<&'a Handle>,
    /// `[positions, 2 · pairs + 1]`: cosines, sines, the factor of queries.
    pub(crate) rotary: &'a Handle,
    /// Positions in the rotary table.
    pub(crate) positions: usize,
    /// Positions that a row attends to; `None`: all up to its own.
    pub(crate) window: Option<Window>,
    /// Soft cap of scores.
    pub(crate) cap: Option<f32>,
    /// A score per head that takes part in the softmax, without a value.
    pub(crate) sinks: Option<&'a Handle>,
    /// Epsilon of the model's RMSNorm.
    pub(crate) eps: f32,
}

/// A layer's KV cache pages, in one buffer.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    pub(crate) pages: Handle,
    /// Number of pages in the buffer.
    pub(crate) count: usize,
}

impl Pages {
    fn words(&self, heads: &Heads) -> usize {
        self.count * heads.page_bytes() / 4
    }
}

/// Applies rotary embedding to the queries and keys of rows `qkv[count, row]`. Writes queries to
/// `queries[count, heads · head_dim]`, and keys and values to their pages.
pub(crate) fn place<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    heads: Heads,
    layer: &LayerHeads<'_>,
    places: &Places,
    qkv: &Handle,
    queries: &Handle,
    pages: &Pages,
) {
    let none = layer.rotary; // placeholder: a kernel argument must be a buffer
    // SAFETY: the launch has one row of cubes per row; page tables hold only pages of the pool.
    unsafe {
        place_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static((heads.heads + 2 * heads.kv_heads) as u32, places.count as u32, 1),
            CubeDim::new_1d(UNITS),
            array(qkv, places.count * heads.row()),
            array(layer.biases.unwrap_or(none), if layer.biases.is_some() { heads.row() } else { 1 }),
            array(layer.norms.unwrap_or(none), if layer.norms.is_some() { 2 * heads.head_dim } else { 1 }),
            array(layer.rotary, layer.positions * (2 * heads.pairs + 1)),
            array(&places.rows, 2 * places.count),
            array(&places.tables, places.tables_len),
            array(queries, places.count * heads.queries()),
            array(&pages.pages, pages.words(&heads)),
            1.0 / heads.head_dim as f32,
            layer.eps,
            heads,
            layer.biases.is_some(),
            layer.norms.is_some(),
            able,
        );
    }
}

#[cube(launch_unchecked)]
fn place_kernel(
    qkv: &Array<f32>,
    biases: &Array<f32>,
    norms: &Array<f32>,
    rotary: &Array<f32>,
    rows: &Array<u32>,
    tables: &Array<u32>,
    queries: &mut Array<f32>,
    pages: &mut Array<u32>,
    inverse: f32,
    eps: f32,
    #[comptime] heads: Heads,
    #[comptime] biased: bool,
    #[comptime] normed: bool,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (head, row, unit) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, UNIT_POS_X as usize);
    let dims = comptime!(heads.head_dim);
    let position = rows[2 * row] as usize;
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut x = SharedMemory::<f32>::new(dims);
    let mut i = unit;
    while i < dims {
        let mut value = qkv[row * comptime!(heads.row()) + head * dims + i];
        if comptime!(biased) {
            value += biases[head * dims + i];
        }
        x[i] = value;
        i += comptime!(UNITS as usize);
    }
    sync_cube();
    let turns = head < comptime!(heads.heads + heads.kv_heads);
    if comptime!(normed) {
        // Value heads take part because all units must reach the barriers; they stay unchanged.
        let squares = square_sum(&x.to_slice(), &mut shared, able);
        let factor = inverse_sqrt(fused(squares, inverse, eps, able), able);
        if turns {
            let weights = select(head < comptime!(heads.heads), 0usize, dims);
            let mut i = unit;
            while i < dims {
                x[i] = x[i] * factor * norms[weights + i];
                i += comptime!(UNITS as usize);
            }
        }
        sync_cube();
    }
    let turn = position * comptime!(2 * heads.pairs + 1);
    let mut pair = unit;
    while pair < comptime!(heads.pairs) {
        if turns {
            let (first, second) =
                if comptime!(heads.halves) { (pair, pair + comptime!(heads.pairs)) } else { (2 * pair, 2 * pair + 1) };
            let (cosine, sine) = (rotary[turn + pair], rotary[turn + pair + comptime!(heads.pairs)]);
            let (a, b) = (x[first], x[second]);
            x[first] = fused(a, cosine, -(b * sine), able);
            x[second] = fused(a, sine, b * cosine, able);
        }
        pair += comptime!(UNITS as usize);
    }
    sync_cube();
    if head < comptime!(heads.heads) {
        let scale = rotary[turn + comptime!(2 * heads.pairs)];
        let mut i = unit;
        while i < dims {
            queries[row * comptime!(heads.queries()) + head * dims + i] = x[i] * scale;
            i += comptime!(UNITS as usize);
        }
    } else {
        let page = tables[rows[2 * row + 1] as usize + position / comptime!(POSITIONS)] as usize;
        let within = position % comptime!(POSITIONS);
        let (is_value, kv) = (
            head >= comptime!(heads.heads + heads.kv_heads),
            (head - comptime!(heads.heads)) % comptime!(heads.kv_heads),
        );
        let part = comptime!(heads.part_words());
        let start = (page * comptime!(heads.kv_heads) + kv) * 2 * part;
        // Elements per word.
        let cells = comptime!(if heads.half_cells { 2usize } else { 1usize });
        let mut word = unit;
        while word < comptime!(dims / cells) {
            let mut cell = u32::reinterpret(x[word * cells]);
            if comptime!(heads.half_cells) {
                cell = to_half(x[2 * word]) | (to_half(x[2 * word + 1]) << 16u32);
            }
            let mut at = start + (word / 4 * comptime!(POSITIONS) + within) * 4 + word % 4;
            if is_value {
                at = start + part + within * comptime!(dims / cells) + word;
            }
            pages[at] = cell;
            word += comptime!(UNITS as usize);
        }
    }
}

/// Attention results per page, before they are combined.
#[derive(Clone, Debug)]
pub(crate) struct Partials {
    /// `[rows, heads, blocks, head_dim]`
    pub(crate) values: Handle,
    /// `[rows, heads, blocks, 2]`: largest score, sum of weights.
    pub(crate) sums: Handle,
    /// Maximum of `rows · blocks`.
    pub(crate) room: usize,
}

/// Attention of `queries[count, heads · head_dim]` over the KV cache; writes activations in the formats `wanted`.
pub(crate) fn attend<R: Platform>(
    client: &ComputeClient<R>,
    able: Features,
    heads: Heads,
    layer: &LayerHeads<'_>,
    places: &Places,
    queries: &Handle,
    pages: &Pages,
    partials: &Partials,
    wanted: RowFormats,
    x: &Activations,
) {
    let each = (partials.room / places.blocks).max(1);
    let (reach, window) = Reach::of(layer.window);
    let mut first = 0;
    while first < places.count {
        let count = each.min(places.count - first);
        let share = heads.share(places.blocks * count, client.properties().hardware.num_streaming_multiprocessors);
        let shares = (heads.heads / heads.kv_heads).div_ceil(share);
        let parts = count * heads.heads * places.blocks;
        // SAFETY: the rows belong to the pass and fit `partials`; page tables hold only pages of the pool.
        unsafe {
            attend_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(places.blocks as u32, (heads.kv_heads * shares) as u32, count as u32),
                CubeDim::new_1d(POSITIONS as u32),
                array(queries, places.count * heads.queries()),
                array(&pages.pages, pages.words(&heads)),
                array(&pages.pages, pages.words(&heads)),
                array(&places.rows, 2 * places.count),
                array(&places.tables, places.tables_len),
                array(&partials.values, parts * heads.head_dim),
                array(&partials.sums, parts * 2),
                first as u32,
                places.blocks as u32,
                window,
                layer.cap.unwrap_or(0.0),
                heads,
                share,
                reach,
                layer.cap.is_some(),
                able,
            );
            combine_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(heads.queries().div_ceil(COMBINED) as u32, count as u32, 1),
                CubeDim::new_1d(UNITS),
                array(&partials.values, parts * heads.head_dim),
                array(&partials.sums, parts * 2),
                array(&places.rows, 2 * places.count),
                array(&x.floats, places.count * x.cols),
                array(&x.codes, x.code_words(places.count)),
                array(&x.scales, x.scale_words(places.count)),
                array(layer.sinks.unwrap_or(&partials.sums), heads.heads),
                first as u32,
                places.blocks as u32,
                window,
                heads,
                reach,
                layer.sinks.is_some(),
                wanted,
                able,
            );
        }
        first += count;
    }
}

/// Values loaded per batch: registers hold no more.
const fn values_at_once(heads: &Heads) -> usize {
    if heads.half_cells { 32 } else { 4 }
}

/// Blocks loaded per batch when they are combined.
const BLOCKS: usize = 8;

/// Vectors of keys loaded per batch, a divisor of `count`: f32 needs more registers.
const fn batch_of(count: usize, halves: bool) -> usize {
    if halves && count.is_multiple_of(8) {
        8
    } else if count.is_multiple_of(4) {
        4
    } else if count.is_multiple_of(2) {
        2
    } else {
        1
    }
}

/// Adds a vector of keys (eight f16 or four f32) to the scores of all heads. `at`: its offset in a query, in units of four.
#[cube]
fn score_vector(
    vector: Vector<u32, Const<4>>,
    q: &SharedMemory<Vector<f32, Const<4>>>,
    at: usize,
    scores: &mut Array<f32>,
    #[comptime] heads: Heads,
    #[comptime] group: usize,
    #[comptime] able: Features,
) {
    let dims = comptime!(heads.head_dim);
    if comptime!(heads.half_cells) {
        #[unroll]
        for part in 0..2usize {
            let (a, b) = both_halves(vector[comptime!(2 * part)], able);
            let (c, d) = both_halves(vector[comptime!(2 * part + 1)], able);
            #[unroll]
            for h in 0..group {
                let x = q[comptime!(h * dims / 4 + part) + at];
                let sum = fused(x[1], b, fused(x[0], a, scores[h], able), able);
                scores[h] = fused(x[3], d, fused(x[2], c, sum, able), able);
            }
        }
    } else {
        #[unroll]
        for h in 0..group {
            let x = q[comptime!(h * dims / 4) + at];
            #[unroll]
            for w in 0..4usize {
                scores[h] = fused(x[w], f32::reinterpret(vector[w]), scores[h], able);
            }
        }
    }
}

/// A cube computes one page of one row for `share` query heads of one key head. A unit holds the scores of one position.
#[cube(launch_unchecked)]
fn attend_kernel(
    queries: &Array<Vector<f32, Const<4>>>,
    fours: &Array<Vector<u32, Const<4>>>,
    words: &Array<u32>,
    rows: &Array<u32>,
    tables: &Array<u32>,
    values: &mut Array<f32>,
    sums: &mut Array<f32>,
    first_row: u32,
    blocks: u32,
    window: u32,
    cap: f32,
    #[comptime] heads: Heads,
    #[comptime] share: usize,
    #[comptime] reach: Reach,
    #[comptime] capped: bool,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (dims, group) = comptime!((heads.head_dim, share));
    let (all, shares) = comptime!((heads.heads / heads.kv_heads, (heads.heads / heads.kv_heads).div_ceil(share)));
    let (block, unit) = (CUBE_POS_X as usize, UNIT_POS_X as usize);
    let (kv, head) = (CUBE_POS_Y as usize / shares, CUBE_POS_Y as usize % shares * share);
    let row = first_row as usize + CUBE_POS_Z as usize;
    let positions = comptime!(POSITIONS);
    let position = rows[2 * row] as usize;
    let first = first_seen(position, window, reach);
    let start = block * positions;
    if start > position || start + positions <= first {
        terminate!();
    }
    let from = select(first > start, first - start, 0usize);
    let to = min(positions, position + 1 - start);
    let page = tables[rows[2 * row + 1] as usize + block] as usize;
    let part = comptime!(heads.part_words());
    let keys = (page * comptime!(heads.kv_heads) + kv) * 2 * part;
    let mut q = SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(group * dims / 4));
    let mut weights = SharedMemory::<f32>::new(comptime!(group * positions));
    let mut tops = SharedMemory::<f32>::new(comptime!(group * positions));
    let mut i = unit;
    while i < comptime!(group * dims / 4) {
        // Heads past the end of the group repeat the last one; their results are not written.
        let h = min(head + i / comptime!(dims / 4), comptime!(all - 1));
        q[i] = queries
            [row * comptime!(heads.queries() / 4) + (kv * all + h) * comptime!(dims / 4) + i % comptime!(dims / 4)];
        i += positions;
    }
    sync_cube();
    let seen = unit >= from && unit < to;
    let mut scores = Array::<f32>::new(group);
    #[unroll]
    for h in 0..group {
        scores[h] = 0.0f32;
    }
    if seen {
        // Vectors are loaded in batches: single loads would each wait for memory.
        let each = comptime!(if heads.half_cells { 8usize } else { 4usize });
        let batch = comptime!(batch_of(dims / each, heads.half_cells));
        let mut vectors = Array::<Vector<u32, Const<4>>>::new(batch);
        for start in 0..comptime!(dims / each / batch) {
            #[unroll]
            for i in 0..batch {
                vectors[i] = fours[keys / 4 + (start * batch + i) * positions + unit];
            }
            #[unroll]
            for i in 0..batch {
                score_vector(
                    vectors[i],
                    &q,
                    (start * batch + i) * comptime!(each / 4),
                    &mut scores,
                    heads,
                    group,
                    able,
                );
            }
        }
        if comptime!(capped) {
            #[unroll]
            for h in 0..group {
                scores[h] = soft_cap(scores[h], cap, able);
            }
        }
    }
    #[unroll]
    for h in 0..group {
        tops[h * positions + unit] = select(seen, scores[h], comptime!(f32::MIN));
    }
    sync_cube();
    #[unroll]
    for step in 0..7u32 {
        let apart = comptime!((POSITIONS / 2) >> step);
        if unit < apart {
            #[unroll]
            for h in 0..group {
                let (at, other) = (h * positions + unit, tops[h * positions + unit + apart]);
                tops[at] = select(other > tops[at], other, tops[at]);
            }
        }
        sync_cube();
    }
    #[unroll]
    for h in 0..group {
        let mut weight = 0.0f32;
        if seen {
            weight = exp(scores[h] - tops[comptime!(h * positions)], able);
        }
        weights[h * positions + unit] = weight;
    }
    sync_cube();
    // Sums of weights: a lane sums every 32nd position in order, then a tree adds the lanes. `tops[h * positions]` is kept.
    #[unroll]
    for h in 0..group {
        if unit < comptime!(LANES) {
            let mut sum = 0.0f32;
            #[unroll]
            for i in 0..4usize {
                sum += weights[comptime!(h * positions + i * LANES) + unit];
            }
            tops[comptime!(h * positions + LANES) + unit] = sum;
        }
    }
    sync_cube();
    #[unroll]
    for step in 0..5u32 {
        let apart = comptime!((LANES / 2) >> step);
        if unit < apart {
            #[unroll]
            for h in 0..group {
                let at = comptime!(h * positions + LANES) + unit;
                let other = tops[at + apart];
                tops[at] += other;
            }
        }
        sync_cube();
    }
    let out = (CUBE_POS_Z as usize * comptime!(heads.heads) + kv * all + head) * blocks as usize + block;
    if unit < group && head + unit < all {
        let at = (out + unit * blocks as usize) * 2;
        sums[at] = tops[unit * positions];
        sums[at + 1] = tops[unit * positions + comptime!(LANES)];
    }
    // A unit handles one word of values (two in f16) for a share of the query heads.
    let cells = comptime!(if heads.half_cells { 2usize } else { 1usize });
    let across = comptime!(dims / cells);
    let shares = comptime!((POSITIONS / (dims / if heads.half_cells { 2 } else { 1 })).clamp(1, group));
    let share = comptime!(group.div_ceil(shares));
    let mut column = unit;
    while column < comptime!(shares * across) {
        let (word, h0) = (column % across, column / across * share);
        let mut low = Array::<f32>::new(share);
        let mut high = Array::<f32>::new(share);
        #[unroll]
        for h in 0..share {
            low[h] = 0.0f32;
            high[h] = 0.0f32;
        }
        let each = comptime!(values_at_once(&heads));
        let mut start = from / each * each;
        let mut batch = Array::<u32>::new(each);
        while start < to {
            #[unroll]
            for i in 0..each {
                // Masked positions have weight 0, and their cells may hold anything.
                let p = start + i;
                batch[i] = 0u32;
                if p >= from && p < to {
                    batch[i] = words[keys + part + p * across + word];
                }
            }
            #[unroll]
            for i in 0..each {
                #[unroll]
                for h in 0..share {
                    let weight = weights[min(h0 + h, comptime!(group - 1)) * positions + start + i];
                    if comptime!(heads.half_cells) {
                        let (a, b) = both_halves(batch[i], able);
                        low[h] = fused(weight, a, low[h], able);
                        high[h] = fused(weight, b, high[h], able);
                    } else {
                        low[h] = fused(weight, f32::reinterpret(batch[i]), low[h], able);
                    }
                }
            }
            start += each;
        }
        #[unroll]
        for h in 0..share {
            if h0 + h < group && head + h0 + h < all {
                let at = (out + (h0 + h) * blocks as usize) * dims + word * cells;
                values[at] = low[h];
                if comptime!(heads.half_cells) {
                    values[at + 1] = high[h];
                }
            }
        }
        column += positions;
    }
}

/// Columns that a cube combines.
const COMBINED: usize = 4 * UNITS as usize;

/// Combines the attention results of a row's pages, in order. A unit handles four columns of one head.
#[cube(launch_unchecked)]
fn combine_kernel(
    values: &Array<Vector<f32, Const<4>>>,
    sums: &Array<Vector<f32, Const<2>>>,
    rows: &Array<u32>,
    floats: &mut Array<f32>,
    codes: &mut Array<u32>,
    scales: &mut Array<Vector<f32, Const<4>>>,
    sinks: &Array<f32>,
    first_row: u32,
    blocks: u32,
    window: u32,
    #[comptime] heads: Heads,
    #[comptime] reach: Reach,
    #[comptime] sunk: bool,
    #[comptime] wanted: RowFormats,
    #[comptime] able: Features,
) {
    release_next(able);
    await_previous(able);
    let (dims, cols) = comptime!((heads.head_dim, heads.heads * heads.head_dim));
    let (unit, row) = (UNIT_POS_X as usize, first_row as usize + CUBE_POS_Y as usize);
    let column = CUBE_POS_X as usize * comptime!(COMBINED) + 4 * unit;
    let position = rows[2 * row] as usize;
    let first = first_seen(position, window, reach) / comptime!(POSITIONS);
    let last = position / comptime!(POSITIONS);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * UNITS as usize));
    let mut out = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        out[i] = 0.0f32;
    }
    if column < cols {
        let head = (CUBE_POS_Y as usize * comptime!(heads.heads) + column / dims) * blocks as usize;
        let mut top = comptime!(f32::MIN).runtime();
        if comptime!(sunk) {
            top = sinks[column / dims];
        }
        let mut start = first;
        while start <= last {
            #[unroll]
            for i in 0..BLOCKS {
                let other = sums[head + min(start + i, last)][0];
                top = select(other > top, other, top);
            }
            start += BLOCKS;
        }
        let mut sum = 0.0f32;
        if comptime!(sunk) {
            sum = exp(sinks[column / dims] - top, able);
        }
        let mut pairs = Array::<Vector<f32, Const<2>>>::new(BLOCKS);
        let mut fours = Array::<Vector<f32, Const<4>>>::new(BLOCKS);
        start = first;
        while start <= last {
            #[unroll]
            for i in 0..BLOCKS {
                let b = head + min(start + i, last);
                pairs[i] = sums[b];
                fours[i] = values[(b * dims + column % dims) / 4];
            }
            #[unroll]
            for i in 0..BLOCKS {
                if start + i <= last {
                    let factor = exp(pairs[i][0] - top, able);
                    sum = fused(pairs[i][1], factor, sum, able);
                    #[unroll]
                    for k in 0..4usize {
                        out[k] = fused(fours[i][k], factor, out[k], able);
                    }
                }
            }
            start += BLOCKS;
        }
        let inverse = reciprocal(sum, able);
        #[unroll]
        for i in 0..4usize {
            out[i] = out[i] * inverse;
        }
    }
    put(&out, row, column, cols, &mut shared, floats, codes, scales, wanted, able);
}
