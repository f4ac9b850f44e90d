//! The sampler's settings one by one, its random numbers, and logits that are not numbers.
use super::{SampleError, Sampler, SamplerSettings, exp, uniform};

fn settings() -> SamplerSettings {
    SamplerSettings { temperature: 1.0, ..SamplerSettings::greedy() }
}

fn sample(logits: &[f32], s: &SamplerSettings, position: u32) -> u32 {
    Sampler::new().sample(logits, s, position, &[]).expect("sound logits")
}

/// Probabilities by the definitions, written without regard to speed; ties go to lower ids.
fn reference(logits: &[f32], s: &SamplerSettings) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("numbers").then(a.cmp(&b)));
    let top = f64::from(logits[order[0]]);
    let mut p = vec![0.0; logits.len()];
    let k = if s.top_k == 0 { logits.len() } else { (s.top_k as usize).min(logits.len()) };
    for &i in &order[..k] {
        p[i] = ((f64::from(logits[i]) - top) / f64::from(s.temperature)).exp();
    }
    let total: f64 = p.iter().sum();
    let mut before = 0.0;
    for &i in &order {
        if before >= f64::from(s.top_p) * total && before > 0.0 {
            p[i] = 0.0;
        } else {
            before += p[i];
        }
    }
    for w in &mut p {
        if *w < f64::from(s.min_p) {
            *w = 0.0;
        }
    }
    let total: f64 = p.iter().sum();
    p.iter().map(|w| w / total).collect()
}

/// 40,000 positions are 40,000 draws: each token as often as its probability says, within five standard deviations.
#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = (0..40).map(|i| ((i * 7919) % 41) as f32 / 9.0 - 2.0).collect();
    let cases = [
        settings(),
        SamplerSettings { temperature: 0.7, ..settings() },
        SamplerSettings { temperature: 2.5, seed: 99, ..settings() },
        SamplerSettings { top_k: 5, ..settings() },
        SamplerSettings { top_p: 0.6, ..settings() },
        SamplerSettings { min_p: 0.2, ..settings() },
        SamplerSettings { temperature: 1.3, top_k: 12, top_p: 0.9, min_p: 0.05, seed: 7, ..settings() },
        SamplerSettings { top_p: 0.0, ..settings() },
    ];
    let mut sampler = Sampler::new();
    for s in cases {
        let wanted = reference(&logits, &s);
        let draws = 40_000u32;
        let mut counts = vec![0u32; logits.len()];
        for position in 0..draws {
            counts[sampler.sample(&logits, &s, position, &[]).expect("sound") as usize] += 1;
        }
        for (id, (&count, &p)) in counts.iter().zip(&wanted).enumerate() {
            let n = f64::from(draws);
            let bound = 5.0 * (n * p * (1.0 - p)).sqrt() + 1e-9;
            assert!((f64::from(count) - n * p).abs() <= bound, "{s:?}: token {id} came {count} times, p = {p}");
        }
    }
}

/// The draw depends on (seed, position) alone: a stage that takes over draws the same.
#[test]
fn the_same_seed_and_position_draw_the_same() {
    let logits: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let s = SamplerSettings { seed: 5, top_p: 0.95, ..settings() };
    let forward: Vec<u32> = (0..100).map(|p| sample(&logits, &s, p)).collect();
    let mut sampler = Sampler::new();
    for p in (0..100u32).rev() {
        assert_eq!(sampler.sample(&logits, &s, p, &[]).expect("sound"), forward[p as usize]);
    }
    let other: Vec<u32> = (0..100).map(|p| sample(&logits, &SamplerSettings { seed: 6, ..s }, p)).collect();
    assert_ne!(forward, other);
    // Written down: a change of the numbers is a change of the protocol.
    assert_eq!([uniform(0, 0), uniform(1, 0), uniform(0, 1)].map(|u| (u * 1e6) as u32), GOLDEN);
}

const GOLDEN: [u32; 3] = [751_958, 453_482, 745_157];

#[test]
fn ties_go_to_the_lowest_id() {
    let greedy = SamplerSettings::greedy();
    assert_eq!(sample(&[1.0, 3.0, 3.0, -1.0, 3.0], &greedy, 0), 1);
    assert_eq!(sample(&[-0.0, 0.0], &greedy, 0), 0);
    let one = SamplerSettings { top_k: 1, ..settings() };
    for position in 0..50 {
        assert_eq!(sample(&[1.0, 3.0, 3.0, -1.0, 3.0], &one, position), 1);
        let two = sample(&[1.0, 3.0, 3.0, -1.0, 3.0], &SamplerSettings { top_k: 2, ..settings() }, position);
        assert!(two == 1 || two == 2);
    }
    // Tiny temperatures are greedy, not a division by zero.
    let cold = SamplerSettings { temperature: 1e-30, ..settings() };
    assert_eq!(sample(&[1.0, 3.0, 2.999, f32::NEG_INFINITY], &cold, 3), 1);
}

#[test]
fn repetition_costs() {
    let greedy = SamplerSettings { repetition_penalty: 2.0, ..SamplerSettings::greedy() };
    let mut sampler = Sampler::new();
    let mut choose = |logits: &[f32], history: &[u32]| sampler.sample(logits, &greedy, 0, history).expect("sound");
    assert_eq!(choose(&[4.0, 3.0, 1.0], &[]), 0);
    assert_eq!(choose(&[4.0, 3.0, 1.0], &[0]), 1);
    // Once, however often it came; a token outside the vocabulary is nothing.
    assert_eq!(choose(&[4.0, 1.9, 1.0], &[0, 0, 0, 77]), 0);
    assert_eq!(choose(&[-1.0, -1.5], &[0]), 1);
}

#[test]
fn unsound_logits_and_settings_are_errors() {
    let mut sampler = Sampler::new();
    let greedy = SamplerSettings::greedy();
    let is_logit = |e| matches!(e, Err(SampleError::Logit { id: 1, .. }));
    assert!(is_logit(sampler.sample(&[0.0, f32::NAN], &greedy, 0, &[])));
    assert!(is_logit(sampler.sample(&[0.0, f32::INFINITY], &greedy, 0, &[])));
    assert_eq!(sampler.sample(&[], &greedy, 0, &[]), Err(SampleError::Empty { count: 0 }));
    let none = [f32::NEG_INFINITY; 3];
    assert_eq!(sampler.sample(&none, &greedy, 0, &[]), Err(SampleError::Empty { count: 3 }));
    for wrong in [
        SamplerSettings { temperature: -1.0, ..greedy },
        SamplerSettings { temperature: f32::NAN, ..greedy },
        SamplerSettings { top_p: 1.5, ..greedy },
        SamplerSettings { min_p: -0.1, ..greedy },
        SamplerSettings { repetition_penalty: 0.0, ..greedy },
    ] {
        assert!(matches!(sampler.sample(&[0.0], &wrong, 0, &[]), Err(SampleError::Setting { .. })));
    }
}

#[test]
fn our_exponential_is_the_exponential() {
    for i in 0..20_000 {
        let x = -f64::from(i) * 0.037_1;
        let (found, wanted) = (exp(x), x.exp());
        assert!((found - wanted).abs() <= 1e-15 * wanted + 1e-323, "exp({x}) = {found}, expected {wanted}");
    }
    assert_eq!((exp(0.0), exp(-1e300), exp(f64::NEG_INFINITY)), (1.0, 0.0, 0.0));
}
