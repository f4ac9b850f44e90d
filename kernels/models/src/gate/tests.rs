//! The measures on numbers whose results are known, and a small model through its codecs.
use super::*;

#[test]
fn the_most_likely_token_is_the_lowest_of_equal_ones_and_the_margin_that_to_the_next() {
    assert_eq!(greatest(&[1.0, 3.0, 2.5, 3.0]), (1, 0.0));
    assert_eq!(greatest(&[4.0, 3.0, 2.5]), (0, 1.0));
    assert_eq!(greatest(&[0.0, 1.0, 3.5]), (2, 2.5));
}

#[test]
fn divergence_is_that_of_the_softmaxes() {
    let (p, q) = ([0.5f64, 0.25, 0.25], [0.25f64, 0.25, 0.5]);
    let logits = |p: [f64; 3], add: f64| p.map(|p| (p.ln() + add) as f32);
    let expected = 0.5 * 2f64.ln() - 0.25 * 2f64.ln();
    assert!((divergence(&logits(p, 3.0), &logits(q, -1.0)) - expected).abs() < 1e-6);
    assert!(divergence(&logits(p, 3.0), &logits(p, 0.0)).abs() < 1e-9, "logits count up to a constant");
    let never = [0.0, f32::NEG_INFINITY];
    assert_eq!(divergence(&never, &never), 0.0);
    assert!(divergence(&[0.0, 1.0], &[f32::NAN, 1.0]).is_nan(), "not a number is not hidden");
}

#[test]
fn a_codec_passes_by_its_share_and_its_divergence() {
    let quality = Quality {
        codec: "q8".into(),
        cuts: vec![1],
        positions: 4096,
        kl_mean: KL_MAX,
        kl_max: 1.0,
        top1: TOP1_MIN,
        flips: 1,
        flip_margin_max: 0.1,
        greedy: 0.5,
    };
    assert!(quality.passes());
    assert!(!Quality { top1: TOP1_MIN - 0.001, ..quality.clone() }.passes());
    assert!(!Quality { kl_mean: KL_MAX + 0.001, ..quality.clone() }.passes());
    assert!(!Quality { kl_mean: f64::NAN, ..quality }.passes());
}
