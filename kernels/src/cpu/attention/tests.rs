//! Attention against f64 for odd shapes, equal bits for every instruction set, and blindness to what comes later.
use super::*;
use crate::cpu::Isa;
use crate::kv_cache::{KvCache, StoreRow};
use crate::quant::{QuantType, random_blocks};
use crate::stage::Activations;

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let bytes = random_blocks(QuantType::F32, count, seed);
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn filled(isa: Isa, size: usize, half: bool, positions: usize) -> KvCache {
    let activations = if half { Activations::Int8 } else { Activations::F32 };
    let mut cache = KvCache::new(2, 2, size, activations);
    cache.extend(1, 0, positions);
    let writer = cache.writer(1).unwrap();
    for position in 0..positions {
        let (keys, values) = (noise(2 * size, 100 + position as u64), noise(2 * size, 9000 + position as u64));
        // SAFETY: one position at a time; the instruction set was detected.
        unsafe { isa.run(StoreRow { keys: &keys, values: &values, place: writer.place(1, position) }) };
    }
    cache
}

fn attend(isa: Isa, cache: &KvCache, queries: &[f32], size: usize, position: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; queries.len()];
    let mut scores = vec![f32::NAN; scores_len(queries.len() / size, position)];
    let blocks = cache.view(1).unwrap().head(1, 1);
    let kernel = Attend { queries, head_dim: size, blocks, position, scores: &mut scores, out: &mut out };
    // SAFETY: the instruction set was detected.
    unsafe { isa.run(kernel) };
    out
}

fn exact(half: bool, queries: &[f32], size: usize, position: usize) -> Vec<f64> {
    let cell = |v: f32| f64::from(if half { half::f16::from_f32(v).to_f32() } else { v });
    let head = |seed: u64| -> Vec<f64> { noise(2 * size, seed)[size..].iter().map(|v| cell(*v)).collect() };
    let keys: Vec<_> = (0..=position).map(|p| head(100 + p as u64)).collect();
    let values: Vec<_> = (0..=position).map(|p| head(9000 + p as u64)).collect();
    let mut out = Vec::new();
    for query in queries.chunks_exact(size) {
        let score = |key: &Vec<f64>| query.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum::<f64>();
        let weights: Vec<f64> = keys.iter().map(|key| score(key).exp()).collect();
        let sum: f64 = weights.iter().sum();
        out.extend((0..size).map(|d| weights.iter().zip(&values).map(|(w, v)| w * v[d]).sum::<f64>() / sum));
    }
    out
}

#[test]
fn agrees_with_f64_and_between_instruction_sets() {
    for half in [false, true] {
        for size in [16, 40, 64, 80, 128] {
            let cache = filled(Isa::detect(), size, half, 70);
            for heads in [1, 2, 3, 4, 5, 7, 8] {
                let queries: Vec<f32> = noise(heads * size, 4).iter().map(|q| q * 0.3).collect();
                for position in [0, 1, 15, 16, 31, 32, 69] {
                    let found = attend(Isa::detect(), &cache, &queries, size, position);
                    for (found, exact) in found.iter().zip(exact(half, &queries, size, position)) {
                        assert!((f64::from(*found) - exact).abs() < 2e-6, "{half} {size} {heads} {position}");
                    }
                    for isa in Isa::all() {
                        let cache = filled(isa, size, half, position + 1); // what comes later does not matter
                        let other = attend(isa, &cache, &queries, size, position);
                        let same = other.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{isa:?} {half} {size} {heads} {position}");
                    }
                }
            }
        }
    }
}
