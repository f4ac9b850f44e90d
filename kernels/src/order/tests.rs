//! Tests of the scalar reference against f64, and of the properties that allow distributed computation.
use super::*;

/// Pseudo-random numbers in ±1, a function of the seed.
fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn chunks_are_whole_groups_and_partition_the_row() {
    for cols in [1, 31, 64, 65, 127, 128, 576, 1000, 3584, 18944, 18945] {
        let mut end = 0;
        for index in 0..CHUNKS {
            let columns = chunk(cols, index);
            assert_eq!(columns.start, end, "{cols}");
            assert!(columns.start.is_multiple_of(GROUP) || columns.is_empty(), "{cols}: {columns:?}");
            end = columns.end;
        }
        assert_eq!(end, cols);
    }
    // The same chunk bounds for a row of a 7B model and for its shards on 2, 4 and 8 ranks.
    assert_eq!(chunk(3584, 3), 1344..1792);
}

#[test]
fn functions_agree_with_f64() {
    let close = |found: f32, exact: f64, ulps: f64| {
        let error = (f64::from(found) - exact).abs() / exact.abs().max(1e-38);
        assert!(error <= ulps * f64::from(f32::EPSILON), "{found} for {exact}: {error:e}");
    };
    for i in 0..400_000u32 {
        let x = f32::from_bits(0x0180_0000 + i * 5_000);
        if (2f32.powi(-125)..2f32.powi(125)).contains(&x) {
            close(reciprocal(x), 1.0 / f64::from(x), 1.0);
        }
        if x.is_normal() {
            close(inverse_sqrt(x), 1.0 / f64::from(x).sqrt(), 2.0);
        }
    }
    for i in -85_990..=85_990 {
        let x = i as f32 * 1e-3;
        close(exp(x), f64::from(x).exp(), 2.0);
        let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
        close(sigmoid(x), exact, 3.0);
        let silu = Activation::Silu.gate(x, 1.0);
        assert!((f64::from(silu) - f64::from(x) * exact).abs() <= 1e-6 * f64::from(x).abs().max(1e-3), "{x}");
        let tanh = (0.797_884_560_802_865_4 * (f64::from(x) + 0.044_715 * f64::from(x).powi(3))).tanh();
        let gelu = 0.5 * f64::from(x) * (1.0 + tanh);
        assert!((f64::from(Activation::Gelu.gate(x, 1.0)) - gelu).abs() <= 1e-6 * f64::from(x).abs().max(1.0), "{x}");
        let cap = 50.0 * (f64::from(x) / 50.0).tanh();
        assert!((f64::from(soft_cap(x, 50.0)) - cap).abs() < 3e-5, "{x}");
    }
    assert_eq!([exp(f32::NEG_INFINITY), exp(-1e9)], [exp(-86.0); 2]);
}

#[test]
fn quantisation_rounds_to_even_per_block() {
    let mut row = vec![0.0; 70];
    row[0] = 127.0;
    row[1] = 0.5;
    row[2] = 1.5;
    row[3] = -126.6;
    row[33] = 1e-31;
    row[64] = f32::MIN_POSITIVE;
    let quantised = quantise(&row);
    assert_eq!(quantised.codes.len(), 128);
    assert_eq!(quantised.codes[..4], [127, 0, 2, -127]);
    assert_eq!(quantised.scales[1..], [0.0; 3], "values up to SMALLEST become zero");
    for (x, (code, scale)) in
        random(4096, 3).iter().zip(quantise(&random(4096, 3)).codes.iter().zip((0..4096).map(|i| i / BLOCK)))
    {
        let scale = quantise(&random(4096, 3)[scale * BLOCK..][..BLOCK]).scales[0];
        assert!((x - f32::from(*code) * scale).abs() <= 0.5001 * scale);
    }
}

#[test]
fn products_agree_with_f64() {
    for cols in [32, 64, 96, 576, 1536] {
        let (x, w) = (random(cols, 1), random(cols, 2));
        let exact: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
        assert!((f64::from(dot_f32(&w, &x)) - exact).abs() < 1e-4);
        let quantised = quantise(&x);
        for (split, minimum) in [(false, None), (false, Some(-0.25)), (true, None)] {
            let block = |b: usize| WeightBlock {
                codes: std::array::from_fn(|i| ((w[b * BLOCK + i] + 1.0) * 31.9) as u8),
                offset: if minimum.is_some() { 0 } else { 32 },
                scales: if split { [0.01, 0.02] } else { [0.01; 2] },
                split,
                minimum,
            };
            let weights: Vec<WeightBlock> = (0..cols / BLOCK).map(block).collect();
            let weight = |i: usize| f64::from(weights[i / BLOCK].weight(i % BLOCK));
            let value = |i: usize| f64::from(quantised.codes[i]) * f64::from(quantised.scales[i / BLOCK]);
            let exact: f64 = (0..cols).map(|i| weight(i) * value(i)).sum();
            let found = f64::from(dot(&weights, &quantised, cols));
            assert!((found - exact).abs() < 1e-4, "{cols} {split} {minimum:?}: {found} for {exact}");
        }
    }
}

#[test]
fn norms_agree_with_f64() {
    for cols in [1, 48, 64, 128, 576, 3584] {
        let (row, weight) = (random(cols, 5), random(cols, 6));
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / cols as f64 + 1e-5;
        for (found, (x, w)) in rms_norm(&row, &weight, 1e-5).iter().zip(row.iter().zip(&weight)) {
            assert!((f64::from(*found) - f64::from(*x) * f64::from(*w) / mean.sqrt()).abs() < 2e-6, "{cols}");
        }
    }
}

#[test]
fn attention_agrees_with_f64_and_ignores_positions_outside_its_window() {
    let (size, held) = (48, 300);
    let query: Vec<f32> = random(size, 7).iter().map(|q| 2.0 * q).collect();
    let (keys, values) = (random(size * held, 8), random(size * held, 9));
    let keys: Vec<&[f32]> = keys.chunks(size).collect();
    let values: Vec<&[f32]> = values.chunks(size).collect();
    for (seen, cap) in
        [(0..1, None), (0..128, None), (0..129, None), (0..300, None), (130..300, None), (3..257, Some(5.0))]
    {
        let found = attend(&query, &keys, &values, seen.clone(), cap, None);
        let score = |p: usize| {
            let score: f64 = query.iter().zip(keys[p]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let weights: Vec<f64> = seen.clone().map(|p| score(p).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (d, found) in found.iter().enumerate() {
            let exact: f64 = seen.clone().zip(&weights).map(|(p, w)| w * f64::from(values[p][d])).sum::<f64>() / sum;
            assert!((f64::from(*found) - exact).abs() < 1e-5, "{seen:?} {cap:?}: {found} for {exact}");
        }
    }
    // Positions outside the window have no influence, not even on the last bit.
    let mut other = values.clone();
    let nan = vec![f32::NAN; size];
    other[129] = &nan;
    assert_eq!(
        attend(&query, &keys, &other, 130..300, None, None),
        attend(&query, &keys, &values, 130..300, None, None)
    );
}

#[test]
fn non_finite_inputs_give_non_finite_outputs() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut row = random(96, 1);
        row[40] = bad;
        let quantised = quantise(&row);
        assert!(quantised.scales[1].is_nan() && quantised.scales[0].is_finite() && quantised.scales[2].is_finite());
        let block = WeightBlock { codes: [0; BLOCK], offset: 0, scales: [0.5; 2], split: false, minimum: None };
        assert!(dot(&[block; 3], &quantised, 96).is_nan());
        assert!(rms_norm(&row, &random(96, 2), 1e-5).iter().all(|x| !x.is_finite()), "{bad}");
        let (keys, values) = (random(300 * 32, 3), random(300 * 32, 4));
        let (keys, values): (Vec<&[f32]>, Vec<&[f32]>) = (keys.chunks(32).collect(), values.chunks(32).collect());
        for at in [0, 130, 299] {
            let mut other = keys.clone();
            other[at] = &row[32..64];
            let found = attend(&random(32, 5), &other, &values, 0..300, None, None);
            // A score of minus infinity has weight zero; all other non-finite scores propagate.
            let score: f32 = random(32, 5).iter().zip(&row[32..64]).fold(0.0, |sum, (q, k)| q.mul_add(*k, sum));
            assert!(score == f32::NEG_INFINITY || found.iter().all(|x| x.is_nan()), "{bad} at {at}");
            let mut other = values.clone();
            other[at] = &row[32..64];
            assert!(!attend(&random(32, 5), &keys, &other, 0..300, None, None)[8].is_finite(), "{bad} at {at}");
        }
    }
    assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && soft_cap(f32::NAN, 30.0).is_nan());
    let clamped = |gate: f64, up: f64| {
        let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
        gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
    };
    for (gate, up) in [(0.5, 2.0), (9.0, -8.0), (-20.0, 9.0), (6.9, 0.0)] {
        let found = f64::from(Activation::Clamped.gate(gate, up));
        let exact = clamped(gate.into(), up.into());
        assert!((found - exact).abs() <= 1e-5 * exact.abs().max(1e-3), "{gate} {up}: {found} {exact}");
    }
    assert!(Activation::Clamped.gate(f32::NAN, 1.0).is_nan() && Activation::Clamped.gate(1.0, f32::NAN).is_nan());
    assert!(Activation::Silu.gate(f32::NAN, 1.0).is_nan() && Activation::Gelu.gate(1.0, f32::NAN).is_nan());
    assert!(!rms_factor(f32::INFINITY, 8, 1e-5).is_finite() && rms_factor(-f32::NAN, 8, 1e-5).is_nan());
}
