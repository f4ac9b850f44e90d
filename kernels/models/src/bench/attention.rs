//! Benchmark: KV-cache bandwidth of single-row attention on the CPU.
use std::time::Duration;

use kernels::bench::fastest;
use kernels::cpu::Isa;
use kernels::pool::Pool;

use crate::attention::{Attend, QueryRow, scratch_len};
use crate::engine::Shared;
use crate::kv_cache::{KvCache, StoreRow, position_bytes};
use crate::stage::{Activations, SequenceId};

/// Context length of the row.
const POSITIONS: usize = 2048;
/// KV heads, head dimension, and query heads per KV head, as in models of 14 and 32 billion weights. Other models have
/// four to eight query heads per KV head, and compute per cache byte grows with that number: five is typical.
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const SHARED_BY: usize = 5;
/// Stages in 8-bit arithmetic, which sets the cache format.
const ACTIVATIONS: Activations = Activations::Int8;
const SEQUENCE: SequenceId = 0;
/// Maximum cache size: writing more would take longer than measuring.
const BYTES_MAX: usize = 128 << 20;
/// No pass begins after this time.
const MEASURE: Duration = Duration::from_millis(100);
/// Write interval in positions, so that every OS page is written: unwritten pages all map to one zero page, which would
/// be read from the caches. The values of this many positions take 2 KiB.
const WRITTEN_EVERY: usize = 8;

/// Cache bytes per second that all threads of the pool read together, as in a step of one row of a stage. The cache has
/// about `bytes`, but at least one layer.
pub(super) fn cache_bytes_s(isa: Isa, pool: &mut Pool, bytes: usize) -> u64 {
    let layer_bytes = POSITIONS * position_bytes(KV_HEADS, HEAD_DIM, ACTIVATIONS);
    let layers = (bytes.min(BYTES_MAX) / layer_bytes).max(1);
    let mut cache = KvCache::new(layers, KV_HEADS, HEAD_DIM, ACTIVATIONS, POSITIONS);
    cache.reserve(&[(SEQUENCE, POSITIONS)]).expect("room for one sequence");
    write(isa, &mut cache, layers);
    let pages = cache.view(SEQUENCE).expect("it was reserved");
    let group = SHARED_BY * HEAD_DIM;
    let queries = vec![0.01; KV_HEADS * group];
    let mut out = vec![0.0; KV_HEADS * group];
    let mut scratch = vec![vec![0.0; scratch_len(SHARED_BY, HEAD_DIM, POSITIONS)]; pool.workers()];
    let (out, scratch) = (Shared::of(&mut out), Shared::of(&mut scratch));
    let seconds = fastest(MEASURE, || {
        for layer in 0..layers {
            pool.run(KV_HEADS, 1, &|worker, heads| {
                for head in heads {
                    let part = head * group..(head + 1) * group;
                    // SAFETY: each head is computed once and the parts do not overlap; the scratch is the worker's own; the
                    // instruction set was detected.
                    unsafe {
                        let (queries, out) = (&queries[part.clone()], out.slice(part));
                        isa.run(Attend {
                            rows: &mut [QueryRow { queries, seen: 0..POSITIONS, out }],
                            head_dim: HEAD_DIM,
                            pages: pages.head(layer, head),
                            cap: None,
                            sinks: None,
                            scratch: &mut scratch.slice(worker..worker + 1)[0],
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
    let writer = cache.writer(SEQUENCE, 0).expect("it was reserved");
    for position in (0..POSITIONS).step_by(WRITTEN_EVERY) {
        for layer in 0..layers {
            // SAFETY: one place at a time, in a cache without readers; the instruction set was detected.
            unsafe { isa.run(StoreRow { keys: &row, values: &row, place: writer.place(layer, position) }) };
        }
    }
}
