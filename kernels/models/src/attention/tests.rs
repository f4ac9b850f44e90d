//! Attention is bit-identical to the scalar reference: odd shapes, windows, caps, every instruction set.
use kernels::cpu::Isa;
use kernels::quant::{QuantType, random_blocks};

use super::*;
use crate::kv_cache::{KvCache, StoreRow};
use crate::stage::Activations;

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let bytes = random_blocks(QuantType::F32, count, seed);
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn filled(isa: Isa, size: usize, half: bool, positions: usize) -> KvCache {
    let activations = if half { Activations::Int8 } else { Activations::F32 };
    let mut cache = KvCache::new(2, 2, size, activations, positions);
    cache.reserve(&[(1, positions)]).unwrap();
    let writer = cache.writer(1, 0).unwrap();
    for position in 0..positions {
        let (keys, values) = (noise(2 * size, 100 + position as u64), noise(2 * size, 9000 + position as u64));
        // SAFETY: one position at a time; the instruction set was detected.
        unsafe { isa.run(StoreRow { keys: &keys, values: &values, place: writer.place(1, position) }) };
    }
    cache
}

/// First visible position, the row's own position, the cap of its scores, and whether heads have sinks.
type Row = (usize, usize, Option<f32>, bool);

fn sinks_of(queries: &[f32], size: usize) -> Vec<f32> {
    (0..queries.len() / size).map(|head| head as f32 * 0.7 - 1.0).collect()
}

fn attend(isa: Isa, cache: &KvCache, queries: &[f32], size: usize, row: Row) -> Vec<f32> {
    attend_rows(isa, cache, queries, size, &[row])
}

/// All rows at once, which have the cap and the sinks of the first.
fn attend_rows(isa: Isa, cache: &KvCache, queries: &[f32], size: usize, rows: &[Row]) -> Vec<f32> {
    let mut out = vec![f32::NAN; queries.len()];
    let end = rows.iter().map(|(_, position, ..)| position + 1).max().unwrap();
    let mut scratch = vec![f32::NAN; scratch_len(queries.len() / size, size, end)];
    let pages = cache.view(1).unwrap().head(1, 1);
    let (_, _, cap, sunk) = rows[0];
    let each = queries.len() / rows.len();
    let sinks = sinks_of(&queries[..each], size);
    let sinks = sunk.then_some(&sinks[..]);
    let parts = queries.chunks(each).zip(out.chunks_mut(each)).zip(rows);
    let mut rows: Vec<QueryRow> = parts
        .map(|((queries, out), (first, position, ..))| QueryRow { queries, seen: *first..position + 1, out })
        .collect();
    let kernel = Attend { rows: &mut rows, head_dim: size, pages, cap, sinks, scratch: &mut scratch };
    // SAFETY: the instruction set was detected.
    unsafe { isa.run(kernel) };
    out
}

/// The scalar reference on the same cache contents.
fn reference(half: bool, queries: &[f32], size: usize, (first, position, cap, sunk): Row) -> Vec<f32> {
    let cell = |v: &f32| if half { half::f16::from_f32(*v).to_f32() } else { *v };
    let head = |seed: usize| -> Vec<f32> { noise(2 * size, seed as u64)[size..].iter().map(cell).collect() };
    let keys: Vec<_> = (0..=position).map(|p| head(100 + p)).collect();
    let values: Vec<_> = (0..=position).map(|p| head(9000 + p)).collect();
    let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
    let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
    let sinks = sinks_of(queries, size);
    let heads = queries.chunks_exact(size).zip(sinks);
    heads
        .flat_map(|(q, sink)| order::attend(q, &keys, &values, first..position + 1, cap, sunk.then_some(sink)))
        .collect()
}

#[test]
fn every_instruction_set_matches_the_reference_bit_for_bit() {
    for half in [false, true] {
        for size in [16, 40, 64, 80, 128] {
            for isa in Isa::all() {
                let cache = filled(isa, size, half, 300);
                for heads in [1, 2, 3, 4, 5, 7, 8] {
                    let queries: Vec<f32> = noise(heads * size, 4).iter().map(|q| q * 0.3).collect();
                    for row in [
                        (0, 0, None, false),
                        (0, 1, None, false),
                        (0, 31, None, false),
                        (0, 32, None, false),
                        (0, 127, None, false),
                        (0, 128, None, false),
                        (0, 128, None, true),
                    ] {
                        let found = attend(isa, &cache, &queries, size, row);
                        assert_eq!(
                            found,
                            reference(half, &queries, size, row),
                            "{isa:?} {half} {size} {heads} {row:?}"
                        );
                    }
                    if heads == 3 {
                        for row in [
                            (0, 299, None, false),
                            (7, 7, None, false),
                            (130, 260, None, false),
                            (129, 290, Some(5.0), false),
                            (0, 299, None, true),
                        ] {
                            let found = attend(isa, &cache, &queries, size, row);
                            let expected = reference(half, &queries, size, row);
                            assert_eq!(found, expected, "{isa:?} {half} {size} {heads} {row:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_computed_together_match_the_reference_bit_for_bit() {
    let rows_from = |first: usize, rows: usize, window: Option<usize>| -> Vec<Row> {
        let seen_from = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
        (first..first + rows).map(|position| (seen_from(position), position, None, false)).collect()
    };
    for half in [false, true] {
        for size in [40, 64, 96] {
            for isa in Isa::all() {
                let cache = filled(isa, size, half, 300);
                for (heads, first, rows, window) in [
                    (3, 0, 4, None),
                    (3, 125, 4, None),
                    (3, 129, 7, Some(130)),
                    (1, 244, 12, None),
                    (1, 250, 13, Some(5)),
                    (5, 126, 5, Some(127)),
                    (4, 127, 3, Some(64)),
                    (2, 0, 6, Some(2)),
                    (8, 255, 3, None),
                ] {
                    let rows = rows_from(first, rows, window);
                    for (cap, sunk) in [(None, false), (Some(3.0), true)] {
                        let rows: Vec<Row> = rows.iter().map(|row| (row.0, row.1, cap, sunk)).collect();
                        let queries: Vec<f32> = noise(rows.len() * heads * size, 5).iter().map(|q| q * 0.3).collect();
                        let found = attend_rows(isa, &cache, &queries, size, &rows);
                        let each = queries.chunks(heads * size).zip(&rows);
                        let expected: Vec<f32> =
                            each.flat_map(|(queries, row)| reference(half, queries, size, *row)).collect();
                        assert_eq!(found, expected, "{isa:?} {half} {size} {heads} {rows:?}");
                    }
                }
            }
        }
    }
}
