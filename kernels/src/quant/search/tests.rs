//! Tests of the search: its error beside that of ggml's own quantiser, on the same weights.
use super::*;
use crate::quant::{QUANT_TYPES, QuantType};
use crate::tile::Layout;

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
fn relative_rmse(weights: &[f32], blocks: &[u8]) -> f64 {
    let mut back = vec![0.0f64; weights.len()];
    QuantType::Q4Z.dequantize_f64(blocks, &mut back);
    let error: f64 = weights.iter().zip(&back).map(|(w, b)| (f64::from(*w) - b).powi(2)).sum();
    (error / weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()).sqrt()
}

/// At 4.5 bits per weight, the error is below that of ggml's Q4_K and IQ4_NL.
#[test]
fn the_error_is_below_that_of_ggml() {
    let oracle = include_str!("../../../../tests/oracles/ggml_rmse.txt");
    let mut compared = 0;
    for line in oracle.lines().filter(|line| !line.starts_with('#')) {
        let [seed, count, sum, name, theirs] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let kind = QUANT_TYPES.into_iter().find(|kind| kind.name() == name).expect("a format");
        assert_eq!(kind.row_bytes(1024), QuantType::Q4Z.row_bytes(1024), "{name} has the same bits");
        let weights = student_t(seed.parse().unwrap(), count.parse().unwrap());
        let found: f64 = weights.iter().map(|w| f64::from(*w).powi(2)).sum();
        let (sum, theirs): (f64, f64) = (sum.parse().unwrap(), theirs.parse().unwrap());
        assert!((found / sum - 1.0).abs() < 1e-9, "seed {seed}: the weights are those of the oracle, {found} {sum}");
        let ours = relative_rmse(&weights, &q4_z(Isa::detect(), &weights));
        eprintln!("seed {seed}: relative RMSE of Q4_Z {ours:.5}, of ggml's {name} {theirs:.5}");
        assert!(ours < 0.98 * theirs, "{name}, seed {seed}: {ours}, ggml {theirs}");
        compared += 1;
    }
    assert_eq!(compared, 6);
    assert_eq!(Layout::of(QuantType::Q4Z).matrix_bytes(16, 1024) * 8, 16 * 1024 * 9 / 2, "4.5 bits, also as tiles");
}

#[test]
fn every_instruction_set_gives_the_same_blocks() {
    let weights = student_t(9, 1024);
    let expected = q4_z(Isa::Portable, &weights);
    assert!(Isa::all().into_iter().all(|isa| q4_z(isa, &weights) == expected));
}

/// Weights that the format holds exactly, and blocks of zeros, of one sign, with one outlier and of extreme sizes.
#[test]
fn unusual_blocks_are_kept() {
    let error = |weights: &[f32]| relative_rmse(weights, &q4_z(Isa::detect(), weights));
    let zeros = q4_z(Isa::detect(), &[0.0; BLOCK]);
    let mut back = [1.0f32; BLOCK];
    QuantType::Q4Z.dequantize(&zeros, &mut back);
    assert_eq!(back, [0.0; BLOCK]);
    for sign in [-1.0, 1.0] {
        let same = [0.25 * sign; BLOCK];
        assert!(error(&same) < 2e-3, "{}", error(&same));
        let positive: Vec<f32> = student_t(3, BLOCK).iter().map(|w| sign * w.abs()).collect();
        assert!(error(&positive) < 0.1, "{}", error(&positive));
        let mut outlier = [0.0; BLOCK];
        outlier[7] = 3.0 * sign;
        assert!(error(&outlier) < 2e-3, "{}", error(&outlier));
    }
    let two: Vec<f32> = (0..BLOCK).map(|i| if i % 3 == 0 { -0.5 } else { 0.25 }).collect();
    assert!(error(&two) < 2e-3, "{}", error(&two));
    for size in [1e-3, 1e5] {
        let weights: Vec<f32> = student_t(4, BLOCK).iter().map(|w| size / 0.1 * w).collect();
        assert!(error(&weights) < 0.12, "{size}: {}", error(&weights));
    }
    let mut large = [1.0; BLOCK];
    large[3] = 2e6;
    let scale = u16::from_le_bytes(q4_z(Isa::detect(), &large)[..2].try_into().unwrap());
    assert!(!scale_and_zero(scale).0.is_finite(), "tiles reject it");
}
