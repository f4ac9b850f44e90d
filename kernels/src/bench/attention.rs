//! How fast attention of one row reads its cache on this processor.
use std::time::Duration;

use super::fastest;
use crate::cpu::Isa;
use crate::cpu::attention::{Attend, scores_len};
use crate::cpu::engine::Shared;
use crate::kv_cache::{KvCache, StoreRow, position_bytes};
use crate::pool::Pool;
use crate::stage::{Activations, SequenceId};

/// Positions that the row attends to.
const POSITIONS: usize = 2048;
/// Key and value heads, the elements of each, and the query heads that share it, as in models of 14 and 32 billion weights. In
/// others four to eight share it, and the more do, the more is computed for each byte of the cache: five are in the middle.
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const SHARED_BY: usize = 5;
/// The cache of stages in 8-bit arithmetic.
const ACTIVATIONS: Activations = Activations::Int8;
const SEQUENCE: SequenceId = 0;
/// Largest cache: writing more would take longer than measuring.
const BYTES_MAX: usize = 128 << 20;
/// No further pass begins after this.
const MEASURE: Duration = Duration::from_millis(100);
/// Every page of the operating system is written: pages that never were are all read from one page of zeros, which is in the
/// caches. A row of values of that many positions is 2 KiB.
const WRITTEN_EVERY: usize = 8;

/// Bytes per second that all threads of the pool read together, as a stage's do in a step of one row: from a cache of about
/// `bytes`, but of at least one layer.
pub(super) fn cache_bytes_s(isa: Isa, pool: &mut Pool, bytes: usize) -> u64 {
    let layer_bytes = POSITIONS * position_bytes(KV_HEADS, HEAD_DIM, ACTIVATIONS);
    let layers = (bytes.min(BYTES_MAX) / layer_bytes).max(1);
    let mut cache = KvCache::new(layers, KV_HEADS, HEAD_DIM, ACTIVATIONS);
    cache.reserve(SEQUENCE, POSITIONS);
    write(isa, &mut cache, layers);
    let pages = cache.view(SEQUENCE).expect("it was reserved");
    let group = SHARED_BY * HEAD_DIM;
    let queries = vec![0.01; KV_HEADS * group];
    let mut out = vec![0.0; KV_HEADS * group];
    let mut scores = vec![vec![0.0; scores_len(SHARED_BY, POSITIONS)]; pool.workers()];
    let (out, scores) = (Shared::of(&mut out), Shared::of(&mut scores));
    let seconds = fastest(MEASURE, || {
        for layer in 0..layers {
            pool.run(KV_HEADS, 1, &|worker, heads| {
                for head in heads {
                    let part = head * group..(head + 1) * group;
                    // SAFETY: each head is computed once and their parts do not overlap; scores are the worker's own; the
                    // instruction set was detected.
                    unsafe {
                        isa.run(Attend {
                            queries: &queries[part.clone()],
                            head_dim: HEAD_DIM,
                            pages: pages.head(layer, head),
                            seen: 0..POSITIONS,
                            cap: None,
                            scores: &mut scores.slice(worker..worker + 1)[0],
                            out: out.slice(part),
                        });
                    }
                }
            });
        }
    });
    ((layers * layer_bytes) as f64 / seconds) as u64
}

fn write(isa: Isa, cache: &mut KvCache, layers: usize) {
    let row = vec![0.5; KV_HEADS * HEAD_DIM];
    let writer = cache.writer(SEQUENCE).expect("it was reserved");
    for position in (0..POSITIONS).step_by(WRITTEN_EVERY) {
        for layer in 0..layers {
            // SAFETY: one place at a time, in a cache that nobody reads; the instruction set was detected.
            unsafe { isa.run(StoreRow { keys: &row, values: &row, place: writer.place(layer, position) }) };
        }
    }
}
