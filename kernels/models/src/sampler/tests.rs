//! Tests of the sampler against a sorting reference and the exact distribution, of single settings and extremes, and with
//! invalid logits.
use kernels::cpu::Isa;

use super::order::{LOGITS_MAX, Scale};
use super::{LogitChanges, SampleError, Sampler, SamplerSettings, random};

fn settings() -> SamplerSettings {
    SamplerSettings { temperature: 1.0, ..SamplerSettings::greedy() }
}

fn sample(logits: &[f32], s: &SamplerSettings, position: u32) -> u32 {
    Sampler::new().sample(logits, s, position, &LogitChanges::default()).expect("sound logits")
}

/// Sums of four uniform numbers: a spread similar to a language model's logits.
fn some_logits(count: usize, mut state: u64, width: f32) -> Vec<f32> {
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (uniform() + uniform() + uniform() + uniform()) * width).collect()
}

/// Reference implementation: a sort and plain loops, with the sampler's weights.
fn sorted_draw(logits: &[f32], s: &SamplerSettings, position: u32) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let of = |id: u32| logits[id as usize];
    order.sort_by(|&a, &b| of(b).partial_cmp(&of(a)).expect("numbers").then(a.cmp(&b)));
    if s.top_k != 0 {
        order.truncate(s.top_k as usize);
    }
    let scale = Scale::new(of(order[0]), s.temperature);
    let mut tokens: Vec<(u32, u64)> = order.iter().map(|&id| (id, scale.weight(of(id)))).collect();
    let total: u64 = tokens.iter().map(|t| t.1).sum();
    if s.top_p < 1.0 {
        let enough = ((f64::from(s.top_p) * total as f64).ceil() as u64).clamp(1, total);
        let mut before = 0;
        let kept = tokens.iter().take_while(|t| {
            let keep = before < enough;
            before += t.1;
            keep
        });
        let kept = kept.count();
        tokens.truncate(kept);
    }
    if s.min_p > 0.0 {
        let greatest = tokens[0].1;
        let least = ((f64::from(s.min_p) * greatest as f64).ceil() as u64).clamp(1, greatest);
        tokens.retain(|t| t.1 >= least);
    }
    let total: u64 = tokens.iter().map(|t| t.1).sum();
    let target = ((u128::from(random(s.seed, position)) * u128::from(total)) >> 64) as u64;
    let mut sum = 0;
    let drawn = tokens.iter().find(|t| {
        sum += t.1;
        target < sum
    });
    drawn.expect("the target is below the total").0
}

fn many_settings() -> Vec<SamplerSettings> {
    let mut all = Vec::new();
    for temperature in [1e-30, 1e-3, 0.2, 0.7, 1.0, 2.5, 100.0] {
        for (top_k, top_p, min_p) in [
            (0, 1.0, 0.0),
            (1, 1.0, 0.0),
            (40, 1.0, 0.0),
            (0, 0.95, 0.0),
            (0, 0.0, 0.0),
            (0, 0.999_999, 0.0),
            (0, 1.0, 0.05),
            (0, 1.0, 1.0),
            (0, 1.0, 1e-12),
            (40, 0.95, 0.05),
            (700, 0.5, 1e-3),
            (u32::MAX, 0.9, 0.0),
        ] {
            all.push(SamplerSettings { temperature, top_k, top_p, min_p, ..settings() });
        }
    }
    all
}

/// Logits that are hard for bucketing: ties, gaps, masks, outliers, both zeros.
fn hard_logits() -> Vec<Vec<f32>> {
    let mut masked = some_logits(3000, 5, 6.0);
    masked.iter_mut().step_by(3).for_each(|l| *l = f32::NEG_INFINITY);
    masked.iter_mut().step_by(7).for_each(|l| *l = -1e9);
    let coarse: Vec<f32> = some_logits(5000, 6, 4.0).iter().map(|l| (l * 2.0).round() / 2.0).collect();
    let mut outliers = vec![1.0f32; 500];
    (outliers[77], outliers[400]) = (f32::MAX, f32::MIN);
    let mut one = vec![f32::NEG_INFINITY; 1000];
    one[613] = -3.0;
    let zeros: Vec<f32> = (0..300).map(|i| if i % 3 == 0 { 0.0 } else { -0.0 }).collect();
    let close: Vec<f32> = (0..2000).map(|i| 20.0 + (i * 7919 % 2000) as f32 * 2e-6).collect();
    vec![
        some_logits(10_007, 1, 5.0),
        some_logits(4_100, 2, 0.01),
        masked,
        coarse,
        outliers,
        one,
        zeros,
        close,
        vec![-7.5; 5000],
        vec![0.25],
        vec![f32::MIN, f32::MAX],
        vec![f32::from_bits(1), 0.0, -f32::from_bits(1)],
    ]
}

#[test]
fn buckets_and_a_sort_draw_the_same_on_every_instruction_set() {
    for (number, logits) in hard_logits().iter().enumerate() {
        for (i, s) in many_settings().iter().enumerate() {
            for position in 0..4 {
                let s = SamplerSettings { seed: i as u64, ..*s };
                let expected = sorted_draw(logits, &s, position);
                for isa in Isa::all() {
                    let found = Sampler::on(isa).sample(logits, &s, position, &LogitChanges::default()).expect("sound");
                    assert_eq!(found, expected, "logits {number}, {s:?}, position {position}, {isa:?}");
                }
            }
        }
    }
}

#[test]
fn the_largest_vocabulary_works_and_a_larger_one_is_an_error() {
    for logits in [some_logits(262_144, 9, 5.0), vec![1.0; LOGITS_MAX]] {
        for s in [settings(), SamplerSettings { top_k: 40, top_p: 0.95, min_p: 0.05, ..settings() }] {
            assert_eq!(sample(&logits, &s, 3), sorted_draw(&logits, &s, 3), "{s:?}");
        }
    }
    let error = Sampler::new().sample(&vec![0.0; LOGITS_MAX + 1], &settings(), 0, &LogitChanges::default());
    assert_eq!(error, Err(SampleError::TooMany { count: LOGITS_MAX + 1 }));
}

/// Exact probabilities from the definitions in f64, not optimised; ties go to lower ids.
fn exact(logits: &[f32], s: &SamplerSettings) -> Vec<f64> {
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

/// Pearson's chi-square statistic against its one-in-a-million quantile (Wilson and Hilferty). Outcomes with fewer than 10
/// expected occurrences are pooled; impossible outcomes must not occur.
fn assert_follows(counts: &[u32], p: &[f64], draws: u32, what: &str) {
    let (mut statistic, mut kinds) = (0.0, 0u32);
    let mut add = |count: f64, expected: f64| {
        if expected > 0.0 {
            statistic += (count - expected) * (count - expected) / expected;
            kinds += 1;
        }
    };
    let mut rare = (0.0, 0.0);
    for (id, (&count, &p)) in counts.iter().zip(p).enumerate() {
        assert!(p > 0.0 || count == 0, "{what}: token {id} is impossible but was drawn {count} times");
        let expected = p * f64::from(draws);
        if expected < 10.0 {
            rare = (rare.0 + f64::from(count), rare.1 + expected);
        } else {
            add(f64::from(count), expected);
        }
    }
    if rare.1 >= 1.0 {
        add(rare.0, rare.1);
    }
    let freedom = f64::from(kinds.max(2) - 1);
    let ninth = 2.0 / (9.0 * freedom);
    let bound = freedom * (1.0 - ninth + 4.75 * ninth.sqrt()).powi(3);
    assert!(statistic <= bound, "{what}: chi-square {statistic}, bound {bound}");
}

#[test]
fn draws_follow_the_exact_distribution() {
    let few: Vec<f32> = (0..40).map(|i| ((i * 7919) % 41) as f32 / 9.0 - 2.0).collect();
    let many = some_logits(3000, 3, 3.0);
    let cases = [
        settings(),
        SamplerSettings { temperature: 0.7, ..settings() },
        SamplerSettings { temperature: 2.5, seed: 99, ..settings() },
        SamplerSettings { top_k: 5, ..settings() },
        SamplerSettings { top_p: 0.6, ..settings() },
        SamplerSettings { min_p: 0.2, ..settings() },
        SamplerSettings { temperature: 1.3, top_k: 12, top_p: 0.9, min_p: 0.05, seed: 7, ..settings() },
        SamplerSettings { top_p: 0.0, ..settings() },
        SamplerSettings { temperature: 100.0, seed: 1, ..settings() },
        SamplerSettings { temperature: 1e-3, seed: 2, ..settings() },
    ];
    let mut sampler = Sampler::new();
    for logits in [few, many] {
        for s in cases {
            let draws = 40_000u32;
            let mut counts = vec![0u32; logits.len()];
            for position in 0..draws {
                counts[sampler.sample(&logits, &s, position, &LogitChanges::default()).expect("sound") as usize] += 1;
            }
            assert_follows(&counts, &exact(&logits, &s), draws, &format!("{} logits, {s:?}", logits.len()));
        }
    }
}

#[test]
#[should_panic(expected = "chi-square")]
fn the_wrong_temperature_fails_the_chi_square_test() {
    let logits = some_logits(300, 4, 2.0);
    let warmer = SamplerSettings { temperature: 1.2, ..settings() };
    let mut counts = vec![0u32; logits.len()];
    for position in 0..40_000 {
        counts[sample(&logits, &warmer, position) as usize] += 1;
    }
    assert_follows(&counts, &exact(&logits, &settings()), 40_000, "warmer");
}

/// The draw depends on (seed, position) alone: a stage that takes over draws the same token.
#[test]
fn the_same_seed_and_position_draw_the_same() {
    let logits: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 / 16.0).collect();
    let s = SamplerSettings { seed: 5, top_p: 0.95, ..settings() };
    let forward: Vec<u32> = (0..100).map(|p| sample(&logits, &s, p)).collect();
    let mut sampler = Sampler::new();
    for p in (0..100u32).rev() {
        assert_eq!(sampler.sample(&logits, &s, p, &LogitChanges::default()).expect("sound"), forward[p as usize]);
    }
    let other: Vec<u32> = (0..100).map(|p| sample(&logits, &SamplerSettings { seed: 6, ..s }, p)).collect();
    assert_ne!(forward, other);
    // Golden values: a change of the random numbers is a protocol change and requires another `NUMERICS`.
    let share = |bits: u64| (bits as f64 / 2f64.powi(64) * 1e6) as u32;
    assert_eq!([random(0, 0), random(1, 0), random(0, 1)].map(share), [751_958, 453_482, 745_157]);
    assert_eq!(forward[..12], GOLDEN);
}

const GOLDEN: [u32; 12] = [835, 338, 180, 685, 229, 535, 103, 726, 737, 464, 357, 543];

#[test]
fn ties_go_to_the_lowest_id() {
    let greedy = SamplerSettings::greedy();
    assert_eq!(sample(&[1.0, 3.0, 3.0, -1.0, 3.0], &greedy, 0), 1);
    for isa in Isa::all() {
        let mut sampler = Sampler::on(isa);
        for (first, second) in [(0.0, -0.0), (-0.0, 0.0)] {
            let mut logits = vec![-1.0; 10_000];
            (logits[4095], logits[9000]) = (first, second);
            assert_eq!(sampler.sample(&logits, &greedy, 0, &LogitChanges::default()), Ok(4095));
            let one = SamplerSettings { top_k: 1, ..settings() };
            assert_eq!(sampler.sample(&logits, &one, 0, &LogitChanges::default()), Ok(4095));
        }
        for count in [1, 31, 32, 33, 4095, 4096, 4097, 12_000] {
            let mut logits = some_logits(count, 11, 1.0);
            logits[count - 1] = 3.0;
            assert_eq!(sampler.sample(&logits, &greedy, 0, &LogitChanges::default()), Ok(count as u32 - 1));
            logits[count / 2] = 3.0;
            assert_eq!(sampler.sample(&logits, &greedy, 0, &LogitChanges::default()), Ok(count as u32 / 2));
        }
    }
    for position in 0..50 {
        let two = sample(&[1.0, 3.0, 3.0, -1.0, 3.0], &SamplerSettings { top_k: 2, ..settings() }, position);
        assert!(two == 1 || two == 2);
    }
    // Tiny temperatures are greedy, not a division by zero.
    let cold = SamplerSettings { temperature: f32::from_bits(1), ..settings() };
    assert_eq!(sample(&[1.0, 3.0, 2.999, f32::NEG_INFINITY], &cold, 3), 1);
}

#[test]
fn repetition_penalty_applies_once_per_token() {
    let greedy = SamplerSettings { repetition_penalty: 2.0, ..SamplerSettings::greedy() };
    let mut sampler = Sampler::new();
    let mut choose = |logits: &[f32], history: &[u32]| {
        let changes = LogitChanges { history, ..LogitChanges::default() };
        sampler.sample(logits, &greedy, 0, &changes).expect("sound")
    };
    assert_eq!(choose(&[4.0, 3.0, 1.0], &[]), 0);
    assert_eq!(choose(&[4.0, 3.0, 1.0], &[0]), 1);
    // The penalty applies once, however often the token occurred; a token outside the vocabulary is ignored.
    assert_eq!(choose(&[4.0, 1.9, 1.0], &[0, 0, 0, 77]), 0);
    assert_eq!(choose(&[-1.0, -1.5], &[0]), 1);
    // A result beyond the f32 range is clamped.
    let harsh = SamplerSettings { repetition_penalty: 1e-3, ..settings() };
    let changes = LogitChanges { history: &[0, 1], ..LogitChanges::default() };
    assert_eq!(Sampler::new().sample(&[f32::MAX, f32::NEG_INFINITY], &harsh, 0, &changes), Ok(0));
}

#[test]
fn presence_applies_once_and_frequency_per_occurrence_excluding_the_prompt() {
    let mut sampler = Sampler::new();
    let mut choose = |presence_penalty, frequency_penalty, history: &[u32], prompt| {
        let s = SamplerSettings { presence_penalty, frequency_penalty, ..SamplerSettings::greedy() };
        let changes = LogitChanges { history, prompt, ..LogitChanges::default() };
        sampler.sample(&[4.0, 3.0, 1.9], &s, 0, &changes).expect("sound")
    };
    assert_eq!(choose(1.5, 0.0, &[0, 0], 2), 0, "prompt tokens are exempt");
    assert_eq!(choose(1.5, 0.0, &[0, 0], 1), 1);
    assert_eq!(choose(0.9, 0.0, &[0, 0, 0, 0], 0), 0, "once");
    assert_eq!(choose(0.0, 0.9, &[0], 0), 0);
    assert_eq!(choose(0.0, 0.9, &[0, 0], 0), 1);
    assert_eq!(choose(0.0, 0.6, &[0, 1, 0, 1, 0, 1, 0], 0), 2);
    // A negative penalty favours tokens that occurred.
    assert_eq!(choose(-1.2, 0.0, &[1], 0), 1);
}

#[test]
fn only_allowed_tokens_are_drawn() {
    let mut sampler = Sampler::new();
    let logits: Vec<f32> = (0..100).map(|id| id as f32 / 50.0).collect();
    let mut draw = |words: &[u32], temperature: f32, position| {
        let s = SamplerSettings { temperature, ..SamplerSettings::greedy() };
        let changes = LogitChanges { allowed: Some(words), ..LogitChanges::default() };
        sampler.sample(&logits, &s, position, &changes)
    };
    assert_eq!(draw(&[0b1010, 0, 0, 0], 0.0, 0), Ok(3));
    assert_eq!(draw(&[1, 0b100], 0.0, 0), Ok(34), "a token beyond the words is not allowed");
    let drawn: std::collections::BTreeSet<u32> =
        (0..200).filter_map(|at| draw(&[0b1010, 0, 1], 1.0, at).ok()).collect();
    assert!(drawn.into_iter().eq([1, 3, 64]));
    assert_eq!(draw(&[0], 0.0, 0), Err(SampleError::Empty { count: 100 }));
}

#[test]
fn a_bias_is_added_before_penalties() {
    let mut sampler = Sampler::new();
    let mut choose = |bias: &[(u32, i32)], repetition_penalty| {
        let s = SamplerSettings { repetition_penalty, ..SamplerSettings::greedy() };
        let changes = LogitChanges { history: &[1], bias, ..LogitChanges::default() };
        sampler.sample(&[4.0, 3.0, f32::NEG_INFINITY], &s, 0, &changes).expect("sound")
    };
    assert_eq!(choose(&[(1, 1_000_001)], 1.0), 1);
    assert_eq!(choose(&[(1, 999_999)], 1.0), 0);
    assert_eq!(choose(&[(1, 1_000_001)], 1.5), 0);
    assert_eq!(choose(&[(1, 1_000_001), (0, -100_000_000), (77, 5)], 1.5), 1);
    assert_eq!(choose(&[(2, 100_000_000)], 1.0), 0, "a masked token stays masked");
}

#[test]
fn invalid_logits_and_settings_are_errors() {
    let greedy = SamplerSettings::greedy();
    for isa in Isa::all() {
        let mut sampler = Sampler::on(isa);
        for wrong in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for (count, at) in [(2, 1), (9000, 31), (9000, 4096), (9000, 8999)] {
                let mut logits = vec![0.5; count];
                logits[at] = wrong;
                for s in [greedy, settings()] {
                    let error = sampler.sample(&logits, &s, 0, &LogitChanges::default());
                    assert!(
                        matches!(error, Err(SampleError::Logit { id, .. }) if id == at),
                        "{wrong} at {at}: {error:?}"
                    );
                }
            }
        }
    }
    let mut sampler = Sampler::new();
    assert_eq!(sampler.sample(&[], &greedy, 0, &LogitChanges::default()), Err(SampleError::Empty { count: 0 }));
    let none = [f32::NEG_INFINITY; 3];
    assert_eq!(sampler.sample(&none, &greedy, 0, &LogitChanges::default()), Err(SampleError::Empty { count: 3 }));
    for wrong in [
        SamplerSettings { temperature: -1.0, ..greedy },
        SamplerSettings { temperature: f32::NAN, ..greedy },
        SamplerSettings { top_p: 1.5, ..greedy },
        SamplerSettings { min_p: -0.1, ..greedy },
        SamplerSettings { repetition_penalty: 0.0, ..greedy },
        SamplerSettings { presence_penalty: 2.5, ..greedy },
        SamplerSettings { frequency_penalty: f32::NAN, ..greedy },
    ] {
        assert!(matches!(
            sampler.sample(&[0.0], &wrong, 0, &LogitChanges::default()),
            Err(SampleError::Setting { .. })
        ));
    }
}

/// Within a relative 2^-45 of the exact weight plus about half a unit, and monotonic in the logit.
#[test]
fn weights_approximate_the_exponential_and_are_monotonic() {
    let greatest = (1u64 << 43) as f64;
    for temperature in [0.3, 1.0, 77.0] {
        let scale = Scale::new(0.0, temperature);
        assert_eq!(scale.weight(0.0), 1 << 43);
        for i in 0..200_000 {
            let logit = -(i as f32) * 0.000_17 * temperature;
            let expected = (f64::from(logit) / f64::from(temperature)).exp() * greatest;
            let found = scale.weight(logit) as f64;
            assert!((found - expected).abs() <= 0.51 + expected * 2f64.powi(-45), "{logit}: {found}, exact {expected}");
        }
        assert_eq!(scale.weight(f32::MIN), 0);
        assert_eq!(scale.weight(f32::NEG_INFINITY), 0);
    }
    // Neighbouring numbers around the table's step boundaries, where an approximation could be discontinuous.
    let scale = Scale::new(0.0, 1.0);
    for step in 0..4096u32 {
        let seam = -(step as f32) / 512.0 * std::f32::consts::LN_2;
        let mut below = f32::from_bits(seam.to_bits() + 40);
        for _ in 0..80 {
            let above = f32::from_bits(below.to_bits() - 1);
            if above > 0.0 || above.is_nan() {
                break;
            }
            assert!(scale.weight(above) >= scale.weight(below), "{above:e} weighs less than {below:e}");
            below = above;
        }
    }
}
