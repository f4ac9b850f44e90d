//! Transformer layers on the CPU: runs a layer over all rows of a forward pass, split among threads.
//!
//! Each step splits either the output rows of a matrix or the rows of the pass; the split never changes a bit of the
//! result. Small steps run on the caller alone: waking other threads would cost more.
use std::ops::Range;

use kernels::cpu::Isa;
use kernels::cpu::activations::{Quantise, Rows};
use kernels::cpu::product::Product;
use kernels::cpu::rows::{GateRow, NormHeads, NormRow, RotateHeads};
use kernels::order::{Activation, soft_cap};
use kernels::pool::Pool;
use kernels::tile::{ROWS, Tiles};

use crate::attention::{Attend, QUERIES_MAX, QueryRow, scratch_len};
use crate::decoder::RowAt;
use crate::kv_cache::{KvCache, StoreRow, Writer};
use crate::model::load::{FeedForward, Gated, LayerWeights};
use crate::recipe::LayerRecipe;
use crate::rotary::RotaryTables;
use crate::stage::{Activations, SequenceId};

mod experts;
pub mod ram;

use experts::Mixture;

/// Scratch, KV caches and the current rows. The caller provides the threads.
pub(crate) struct Engine {
    isa: Isa,
    shape: Shape,
    pub(crate) cache: KvCache,
    rotary: RotaryTables,
    pass: Vec<RowAt>,
    /// Rows of the residual stream, `[rows, width]`.
    pub(crate) hidden: Vec<f32>,
    /// Output of the last step, which the next norm adds to `hidden`; empty if there is none.
    delta: Vec<f32>,
    x: Rows,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Rows,
    block: BlockScratch,
    mixture: Mixture,
    /// Attention scratch per thread.
    scratch: Vec<Vec<f32>>,
}

/// The dimensions of a model.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) eps: f32,
    /// Whether rotary pairs are (i, i + pairs) instead of adjacent elements.
    pub(crate) halves: bool,
    /// Number format of activations in products, and of the KV cache.
    pub(crate) activations: Activations,
}

impl Shape {
    fn integers(&self) -> bool {
        self.activations == Activations::Int8
    }
}

/// Steps with fewer multiplications run on the caller alone: about two microseconds of work.
const ALONE: usize = 100_000;

impl Engine {
    pub(crate) fn new(isa: Isa, shape: Shape, layers: usize, rotary: RotaryTables, positions_max: usize) -> Self {
        Self {
            isa,
            cache: KvCache::new(layers, shape.kv_heads, shape.head_dim, shape.activations, positions_max),
            shape,
            rotary,
            pass: Vec::new(),
            hidden: Vec::new(),
            delta: Vec::new(),
            x: Rows::default(),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            attended: Rows::default(),
            block: BlockScratch::default(),
            mixture: Mixture::default(),
            scratch: Vec::new(),
        }
    }

    /// Begins a forward pass over these rows, whose cache positions are already reserved; the caller then fills
    /// `hidden`.
    pub(crate) fn begin(&mut self, rows: &[RowAt]) {
        self.pass.clear();
        self.pass.extend(rows);
        let highest = self.pass.iter().map(|row| row.position + 1).max().unwrap_or(0);
        self.rotary.grow(highest);
        self.hidden.clear();
        self.hidden.resize(self.pass.len() * self.shape.width, 0.0);
        self.delta.clear();
    }

    /// Runs the layer at `index` within the stage.
    pub(crate) fn layer(&mut self, pool: &mut Pool, recipe: &LayerRecipe, weights: &LayerWeights, index: usize) {
        self.norm(pool, &weights.attention_norm);
        self.queries_keys_values(pool, weights);
        if let Some([query, key]) = &weights.head_norms {
            self.norm_heads(pool, query, key);
        }
        self.attend(pool, recipe, weights.sinks.as_deref(), index);
        let Self { isa, shape, attended, delta, .. } = self;
        products(*isa, pool, attended, shape.integers(), &[weights.output.tiles()], [delta]);
        add_bias(delta, weights.output_bias.as_deref());
        let [after_attention, after_ffn] = weights.norms_after.as_ref().map_or([None; 2], |[a, b]| [Some(a), Some(b)]);
        self.norm_delta(pool, after_attention);
        self.norm(pool, &weights.ffn_norm);
        self.feed_forward(pool, recipe.activation, &weights.feed_forward);
        self.norm_delta(pool, after_ffn);
    }

    /// hidden += delta; x = RMSNorm(hidden) · weight.
    fn norm(&mut self, pool: &mut Pool, weight: &[f32]) {
        let rows = 0..self.pass.len();
        self.norm_rows(pool, weight, rows);
    }

    /// As [`Self::norm`] for a range of rows; `x` then holds only those.
    fn norm_rows(&mut self, pool: &mut Pool, weight: &[f32], rows: Range<usize>) {
        let Self { isa, shape, hidden, delta, x, .. } = self;
        let width = shape.width;
        x.shape(rows.len(), width);
        let (out, hidden) = (x.rows_mut(), Shared::of(hidden));
        each_row(pool, rows.len(), 8 * width, &|i| {
            let place = (rows.start + i) * width;
            // SAFETY: each row is visited once; the instruction set was detected.
            unsafe {
                let (floats, blocks) = out.row(i);
                let (hidden, x) = (hidden.slice(place..place + width), floats);
                let delta = if delta.is_empty() { &[] } else { &delta[place..place + width] };
                let blocks = if shape.integers() { blocks } else { &mut [] };
                isa.run(NormRow { hidden, delta, weight, eps: shape.eps, x, blocks });
            }
        });
        delta.clear();
    }

    /// RMSNorm of a step's output, before it is added to the residual stream.
    fn norm_delta(&mut self, pool: &mut Pool, weight: Option<&Vec<f32>>) {
        let Some(weight) = weight else { return };
        let Self { isa, shape, delta, .. } = self;
        let (count, width) = (delta.len() / shape.width, shape.width);
        let delta = Shared::of(delta);
        each_row(pool, count, 8 * width, &|i| {
            // SAFETY: each row is visited once; the instruction set was detected.
            unsafe {
                isa.run(NormHeads { row: delta.slice(i * width..(i + 1) * width), weight, eps: shape.eps });
            }
        });
    }

    /// q, k, v = products of x with three matrices, plus biases.
    fn queries_keys_values(&mut self, pool: &mut Pool, weights: &LayerWeights) {
        let Self { isa, shape, x, q, k, v, .. } = self;
        let matrices = weights.inputs.each_ref().map(|matrix| matrix.tiles());
        products(*isa, pool, x, shape.integers(), &matrices, [&mut *q, &mut *k, &mut *v]);
        for (rows, bias) in [q, k, v].into_iter().zip(weights.input_biases.iter().flatten()) {
            add_bias(rows, Some(bias));
        }
    }

    /// RMSNorm of each head of queries and keys.
    fn norm_heads(&mut self, pool: &mut Pool, q_weight: &[f32], k_weight: &[f32]) {
        let Self { isa, shape, q, k, pass, .. } = self;
        let (q_width, k_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (q, k) = (Shared::of(q), Shared::of(k));
        each_row(pool, pass.len(), 4 * (q_width + k_width), &|i| {
            // SAFETY: each row is visited once; the instruction set was detected.
            unsafe {
                let row = q.slice(i * q_width..(i + 1) * q_width);
                isa.run(NormHeads { row, weight: q_weight, eps: shape.eps });
                let row = k.slice(i * k_width..(i + 1) * k_width);
                isa.run(NormHeads { row, weight: k_weight, eps: shape.eps });
            }
        });
    }

    /// Applies rotary embedding to queries and keys, stores keys and values in the cache of `layer`, and computes
    /// attention of each row over its visible positions.
    fn attend(&mut self, pool: &mut Pool, recipe: &LayerRecipe, sinks: Option<&[f32]>, layer: usize) {
        self.rotate_and_store(pool, layer);
        let Self { isa, shape, cache, pass, q, attended, scratch, .. } = self;
        let heads = shape.heads / shape.kv_heads;
        let group = heads * shape.head_dim;
        let q_width = group * shape.kv_heads;
        let end = pass.iter().map(|row| row.position + 1).max().unwrap_or(0);
        let most = rows_at_once(heads, pass.len() * shape.kv_heads, pool.workers());
        let units = row_groups(pass, most);
        scratch.resize_with(scratch.len().max(pool.workers()), Vec::new);
        for scratch in scratch.iter_mut() {
            let needed = scratch_len(most * heads, shape.head_dim, end);
            if scratch.len() < needed {
                scratch.resize(needed.next_power_of_two(), 0.0);
            }
        }
        attended.shape(pass.len(), q_width);
        let (out, scratch) = (attended.rows_mut(), Shared::of(scratch));
        let views: Vec<_> =
            units.iter().map(|rows| cache.view(pass[rows.start].sequence).expect("an open sequence")).collect();
        let work: usize = pass.iter().map(|row| 2 * (row.position + 1) * q_width).sum();
        let row = |i: usize, head: usize| {
            let part = head * group..(head + 1) * group;
            let seen = recipe.window.map_or(0, |window| window.first(pass[i].position))..pass[i].position + 1;
            // SAFETY: each head of a row is computed once.
            QueryRow { queries: &q[i * q_width..][part.clone()], seen, out: unsafe { out.part(i, part) } }
        };
        let attend = |worker: usize, mine: Range<usize>| {
            let mut rows = Vec::with_capacity(QUERIES_MAX);
            for unit in mine {
                let (unit, head) = (unit / shape.kv_heads, unit % shape.kv_heads);
                rows.clear();
                rows.extend(units[unit].clone().map(|i| row(i, head)));
                // SAFETY: units do not overlap; the scratch is the worker's own; the instruction set was detected.
                unsafe {
                    isa.run(Attend {
                        rows: &mut rows,
                        head_dim: shape.head_dim,
                        pages: views[unit].head(layer, head),
                        cap: recipe.score_cap,
                        sinks: sinks.map(|sinks| &sinks[head * heads..(head + 1) * heads]),
                        scratch: &mut scratch.slice(worker..worker + 1)[0],
                    });
                }
            }
        };
        let units = units.len() * shape.kv_heads;
        if work < ALONE {
            attend(0, 0..units)
        } else {
            pool.run(units, 1, &attend)
        }
        if shape.integers() {
            each_row(pool, pass.len(), 4 * q_width, &|i| {
                // SAFETY: each row is visited once; the instruction set was detected.
                unsafe {
                    let (floats, blocks) = out.row(i);
                    isa.run(Quantise { floats: &floats[..q_width], blocks });
                }
            });
        }
    }

    fn rotate_and_store(&mut self, pool: &mut Pool, layer: usize) {
        let Self { isa, shape, cache, rotary, pass, q, k, v, .. } = self;
        let (size, halves, turned) = (shape.head_dim, shape.halves, &rotary.tables()[rotary.table_of(layer)]);
        let (q_width, k_width) = (shape.heads * size, shape.kv_heads * size);
        let mut writers: Vec<(SequenceId, Writer)> = Vec::new();
        for row in pass.iter() {
            if writers.last().is_none_or(|(sequence, _)| *sequence != row.sequence) {
                let writer = cache.writer(row.sequence, row.position).expect("an open sequence");
                writers.push((row.sequence, writer));
            }
        }
        let (q, k) = (Shared::of(q), Shared::of(k));
        each_row(pool, pass.len(), 4 * (q_width + k_width), &|i| {
            let RowAt { sequence, position } = pass[i];
            let ((cos, sin), scale) = (turned.at(position), turned.query_factor(position));
            let writer = writers.iter().find(|(s, _)| *s == sequence).map(|(_, writer)| writer);
            // SAFETY: each row is visited once, and rows of a sequence have distinct positions; the instruction set was
            // detected.
            unsafe {
                let queries = q.slice(i * q_width..(i + 1) * q_width);
                isa.run(RotateHeads { row: queries, head_dim: size, halves, cos, sin, scale });
                let keys = k.slice(i * k_width..(i + 1) * k_width);
                isa.run(RotateHeads { row: keys, head_dim: size, halves, cos, sin, scale: 1.0 });
                let place = writer.expect("a writer per sequence").place(layer, position);
                isa.run(StoreRow { keys, values: &v[i * k_width..][..k_width], place });
            }
        });
    }

    /// delta = the feed-forward block or the experts of x.
    fn feed_forward(&mut self, pool: &mut Pool, activation: Activation, weights: &FeedForward) {
        let Self { isa, shape, x, delta, block, mixture, .. } = self;
        let run = Run { isa: *isa, integers: shape.integers(), activation };
        match weights {
            FeedForward::Dense(gated) => block.compute(pool, run, x, gated, delta),
            FeedForward::Experts(experts) => mixture.compute(pool, run, x, experts, block, delta),
        }
    }

    /// Adds the last step's output to `hidden`: the end of a stage's last layer.
    pub(crate) fn add_delta(&mut self) {
        self.hidden.iter_mut().zip(&self.delta).for_each(|(h, d)| *h += d);
        self.delta.clear();
    }

    /// Final norm and output head of the given rows, after [`Self::add_delta`]. Overwrites `hidden`.
    pub(crate) fn logits(
        &mut self,
        pool: &mut Pool,
        rows: &[usize],
        norm: &[f32],
        head: Tiles<'_>,
        cap: Option<f32>,
    ) -> Vec<f32> {
        let width = self.shape.width;
        for (i, &row) in rows.iter().enumerate() {
            // Rows ascend, so no row is overwritten before it is read.
            self.hidden.copy_within(row * width..(row + 1) * width, i * width);
        }
        self.norm_rows(pool, norm, 0..rows.len());
        let mut out = Vec::new();
        products(self.isa, pool, &self.x, self.shape.integers(), &[head], [&mut out]);
        if let Some(cap) = cap {
            out.iter_mut().for_each(|logit| *logit = soft_cap(*logit, cap));
        }
        out
    }

    /// Allocated bytes of caches and scratch.
    pub(crate) fn bytes(&self) -> usize {
        let floats = [&self.hidden, &self.delta, &self.q, &self.k, &self.v];
        let scratch: usize = floats.into_iter().chain(&self.scratch).map(|v| v.capacity() * size_of::<f32>()).sum();
        let rows: usize = [&self.x, &self.attended].into_iter().map(Rows::bytes).sum();
        self.cache.bytes() + self.rotary.bytes() + scratch + rows + self.block.bytes() + self.mixture.bytes()
    }
}

/// How the steps of a feed-forward block run.
#[derive(Clone, Copy)]
struct Run {
    isa: Isa,
    integers: bool,
    activation: Activation,
}

/// Scratch of a gated feed-forward block.
#[derive(Default)]
struct BlockScratch {
    gate: Vec<f32>,
    up: Vec<f32>,
    gated: Rows,
}

impl BlockScratch {
    /// out = down · (activation(gate · x) ∘ (up · x)).
    fn compute(&mut self, pool: &mut Pool, run: Run, x: &Rows, weights: &Gated, out: &mut Vec<f32>) {
        let Self { gate, up, gated } = self;
        let matrices = weights.inputs.each_ref().map(|matrix| matrix.tiles());
        products(run.isa, pool, x, run.integers, &matrices, [&mut *gate, &mut *up]);
        gated.shape(x.count(), matrices[0].rows());
        gate_rows(pool, run, gate, up, gated);
        products(run.isa, pool, gated, run.integers, &[weights.down.tiles()], [out]);
    }

    fn bytes(&self) -> usize {
        (self.gate.capacity() + self.up.capacity()) * size_of::<f32>() + self.gated.bytes()
    }
}

/// out = activation(gate) ∘ up, for all rows of `out`.
fn gate_rows(pool: &mut Pool, run: Run, gate: &[f32], up: &[f32], out: &mut Rows) {
    let (count, ffn) = (out.count(), out.cols());
    let out = out.rows_mut();
    each_row(pool, count, 24 * ffn, &|i| {
        // SAFETY: each row is visited once; the instruction set was detected.
        unsafe {
            let (floats, blocks) = out.row(i);
            let blocks = if run.integers { blocks } else { &mut [] };
            let (gate, up) = (&gate[i * ffn..][..ffn], &up[i * ffn..][..ffn]);
            run.isa.run(GateRow { activation: run.activation, gate, up, x: floats, blocks });
        }
    });
}

/// Adds a bias to each row.
fn add_bias(rows: &mut [f32], bias: Option<&[f32]>) {
    let Some(bias) = bias else { return };
    for row in rows.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
}

/// `out[i]` = `x` · `matrices[i]`ᵀ; the output rows of all matrices are split among the threads.
pub(crate) fn products<const N: usize>(
    isa: Isa,
    pool: &mut Pool,
    x: &Rows,
    integers: bool,
    matrices: &[Tiles<'_>; N],
    out: [&mut Vec<f32>; N],
) {
    let mut first = [0; N];
    let mut total = 0;
    let out: [Shared<'_, f32>; N] = {
        let mut index = 0;
        out.map(|out| {
            first[index] = total;
            total += matrices[index].rows().next_multiple_of(GRAIN);
            out.resize(x.count() * matrices[index].rows(), 0.0); // every element is written below
            index += 1;
            Shared::of(out)
        })
    };
    pool.run(total, GRAIN, &|_, mine| {
        for ((weights, first), out) in matrices.iter().zip(first).zip(&out) {
            let bound = |row: usize| row.saturating_sub(first).min(weights.rows());
            let rows = bound(mine.start)..bound(mine.end);
            if !rows.is_empty() {
                // SAFETY: ranges do not overlap, so no element is written twice; the instruction set was detected.
                unsafe { Product { weights: *weights, x, rows, integers, out: out.start }.run(isa) }
            }
        }
    });
}

/// Output rows per unit of work: whole tiles.
const GRAIN: usize = ROWS;

/// Rows of one sequence whose attention one call computes: enough that their query heads are a multiple of [`QUERIES_MAX`], but so few
/// that all workers have work. `units`: rows times key heads.
fn rows_at_once(heads: usize, units: usize, workers: usize) -> usize {
    let full = (1..QUERIES_MAX).find(|rows| (rows * heads).is_multiple_of(QUERIES_MAX)).unwrap_or(QUERIES_MAX);
    full.min((units / (2 * workers)).max(1))
}

/// Groups of at most `most` neighbouring rows of one sequence.
fn row_groups(pass: &[RowAt], most: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    for (i, row) in pass.iter().enumerate() {
        match groups.last_mut().filter(|group| group.len() < most && pass[group.start].sequence == row.sequence) {
            Some(group) => group.end = i + 1,
            None => groups.push(i..i + 1),
        }
    }
    groups
}

/// Calls `step` once per row, on the caller alone if there is little to do; `work`: multiplications per row.
fn each_row(pool: &mut Pool, rows: usize, work: usize, step: &(dyn Fn(usize) + Sync)) {
    if rows * work < ALONE {
        return (0..rows).for_each(step);
    }
    pool.run(rows, 1, &|_, mine| mine.for_each(step));
}

/// A slice of which threads borrow disjoint parts mutably.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    of: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: `slice` asks for disjoint parts.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn of(all: &'a mut [T]) -> Self {
        Self { start: all.as_mut_ptr(), len: all.len(), of: std::marker::PhantomData }
    }

    /// # Safety
    /// No two live parts overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, part: Range<usize>) -> &mut [T] {
        assert!(part.start <= part.end && part.end <= self.len, "{part:?} of {}", self.len);
        // SAFETY: in bounds, and disjoint by contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(part.start), part.len()) }
    }
}
