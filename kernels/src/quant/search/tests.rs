//! Tests of the search: its error beside that of ggml's own quantiser, on the same weights.
use super::*;

/// Student-t weights with four degrees of freedom, from 53 random bits each, by the inverse of the distribution function (Shaw,
/// "Sampling Student's T distribution", 2006).
fn student_t(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    // SplitMix64 (Steele, Lea and Flood, 2014).
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let mut weight = move || {
        let p = ((next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let root = (4.0 * p * (1.0 - p)).sqrt();
        let t = 2.0 * ((root.acos() / 3.0).cos() / root - 1.0).max(0.0).sqrt();
        (0.02 * if p < 0.5 { -t } else { t }) as f32
    };
    (0..count).map(|_| weight()).collect()
}

/// Root of the squared error, relative to that of the weights.
fn relative_rmse(kind: QuantType, weights: &[f32], blocks: &[u8]) -> f64 {
    let mut back = vec![0.0f64; weights.len()];
    kind.dequantize_f64(blocks, &mut back);
    let error: f64 = weights.iter().zip(&back).map(|(w, b)| (f64::from(*w) - b).powi(2)).sum();
    (error / weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()).sqrt()
}

/// At the same bits per weight in the same format, the error is below that of ggml.
#[test]
fn the_error_is_below_that_of_ggml() {
    let oracle = include_str!("../../../../tests/oracles/ggml_rmse.txt");
    let mut compared = 0;
    for line in oracle.lines().filter(|line| !line.starts_with('#')) {
        let [seed, count, sum, name, theirs] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let kind = SEARCHED.into_iter().find(|kind| kind.name() == name).expect("a searched format");
        let weights = student_t(seed.parse().unwrap(), count.parse().unwrap());
        let found: f64 = weights.iter().map(|w| f64::from(*w).powi(2)).sum();
        let (sum, theirs): (f64, f64) = (sum.parse().unwrap(), theirs.parse().unwrap());
        assert!((found / sum - 1.0).abs() < 1e-9, "seed {seed}: the weights are those of the oracle, {found} {sum}");
        let ours = relative_rmse(kind, &weights, &search(kind, Isa::detect(), &weights).unwrap());
        eprintln!("{name}, seed {seed}: relative RMSE {ours:.5}, ggml {theirs:.5}");
        assert!(ours < 0.98 * theirs, "{name}, seed {seed}: {ours}, ggml {theirs}");
        compared += 1;
    }
    assert_eq!(compared, 6);
}

#[test]
fn every_instruction_set_gives_the_same_blocks() {
    let weights = student_t(9, 1024);
    for kind in SEARCHED {
        let expected = search(kind, Isa::Portable, &weights);
        assert!(Isa::all().into_iter().all(|isa| search(kind, isa, &weights) == expected), "{}", kind.name());
    }
    assert_eq!(search(QuantType::Q8_0, Isa::Portable, &weights), None);
}

/// Weights that the formats hold exactly, and blocks of zeros, of one sign and with one outlier.
#[test]
fn unusual_blocks_are_kept() {
    for kind in SEARCHED {
        let error = |weights: &[f32]| relative_rmse(kind, weights, &search(kind, Isa::detect(), weights).unwrap());
        let zeros = search(kind, Isa::detect(), &[0.0; SUPER_BLOCK]).unwrap();
        let mut back = [1.0f32; SUPER_BLOCK];
        kind.dequantize(&zeros, &mut back);
        assert_eq!(back, [0.0; SUPER_BLOCK], "{}", kind.name());
        for sign in [-1.0, 1.0] {
            let same = [0.25 * sign; SUPER_BLOCK];
            assert!(error(&same) < 2e-3, "{}: {}", kind.name(), error(&same));
            let positive: Vec<f32> = student_t(3, SUPER_BLOCK).iter().map(|w| sign * w.abs()).collect();
            assert!(error(&positive) < 0.1, "{}: {}", kind.name(), error(&positive));
            let mut outlier = [0.0; SUPER_BLOCK];
            outlier[77] = 3.0 * sign;
            // IQ4_NL has no zero: the others become 1/127 of the outlier.
            let bound = if kind == QuantType::Iq4Nl { 31f64.sqrt() / 126.0 } else { 2e-3 };
            assert!(error(&outlier) < bound, "{}: {}", kind.name(), error(&outlier));
        }
    }
    // Two levels of each group are exact in Q4_K, up to the rounding of its factors.
    let two: Vec<f32> = (0..SUPER_BLOCK).map(|i| if i % 3 == 0 { -0.5 } else { 0.25 }).collect();
    assert!(relative_rmse(QuantType::Q4K, &two, &search(QuantType::Q4K, Isa::detect(), &two).unwrap()) < 2e-3);
}
