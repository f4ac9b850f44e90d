//! Mixtures of experts: which experts compute a row, and how their outputs are combined.
use super::{LANES, butterfly_sum, exp, reciprocal, sigmoid};

/// Most experts that a row may use; the largest published models use 10.
pub const USED_MAX: usize = 32;
/// Most experts of a layer; the largest published models have 512.
pub const EXPERTS_MAX: usize = 1024;

/// How a router chooses the experts of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts of a row.
    pub used: usize,
    /// What makes a factor of a score.
    pub gating: Gating,
    /// The factors of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Multiplies all factors at last.
    pub scale: f32,
}

/// The function that makes a factor of a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gating {
    /// The softmax of the scores of all experts.
    Softmax,
    /// The sigmoid of each score.
    Sigmoid,
}

/// An expert of a row, and the factor of its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Number of the expert.
    pub expert: usize,
    /// Factor of its output.
    pub weight: f32,
}

/// The experts of a row, in ascending order: those with the `routing.used` highest scores, or, with `corrections`, the highest sums
/// of the sigmoid of the score and the correction of the expert.
///
/// If a score is not finite, all weights are NaN.
#[must_use]
pub fn route(scores: &[f32], corrections: Option<&[f32]>, routing: Routing) -> Vec<Choice> {
    let mut choices = Vec::with_capacity(routing.used);
    match routing.gating {
        Gating::Softmax => {
            let largest = scores.iter().fold(f32::NEG_INFINITY, |largest, score| largest.max(*score));
            let shares: Vec<f32> = scores.iter().map(|score| exp(score - largest)).collect();
            let mut lanes = [0.0f32; LANES];
            shares.iter().enumerate().for_each(|(i, share)| lanes[i % LANES] += share);
            weigh(scores, &shares, reciprocal(butterfly_sum(lanes)), routing, &mut choices);
        }
        Gating::Sigmoid => {
            let shares: Vec<f32> = scores.iter().map(|score| sigmoid(*score)).collect();
            let keys =
                corrections.map(|all| shares.iter().zip(all).map(|(share, more)| share + more).collect::<Vec<_>>());
            weigh(keys.as_deref().unwrap_or(scores), &shares, whole(scores), routing, &mut choices);
        }
    }
    choices
}

/// The factor of all shares of a router of [`Gating::Sigmoid`]: 1, NaN if a score is not finite.
#[must_use]
pub fn whole(scores: &[f32]) -> f32 {
    if scores.iter().all(|score| score.is_finite()) { 1.0 } else { f32::NAN }
}

/// The end of [`route`]: appends the experts with the highest `keys` to `choices`. Their weights are `shares` times `factor`, then
/// normalised and scaled.
pub fn weigh(keys: &[f32], shares: &[f32], factor: f32, routing: Routing, choices: &mut Vec<Choice>) {
    let mut places = [0usize; USED_MAX];
    let chosen = highest(keys, routing.used, &mut places);
    let first = choices.len();
    choices.extend(chosen.iter().map(|&expert| Choice { expert, weight: shares[expert] * factor }));
    let mine = &mut choices[first..];
    if routing.normalised {
        let inverse = reciprocal(mine.iter().fold(0.0, |sum, choice| sum + choice.weight));
        mine.iter_mut().for_each(|choice| choice.weight *= inverse);
    }
    mine.iter_mut().for_each(|choice| choice.weight *= routing.scale);
}

/// Indices of the highest keys, ascending. Of equal ones the first counts as higher; NaN is lower than any number.
fn highest<'a>(keys: &[f32], used: usize, places: &'a mut [usize; USED_MAX]) -> &'a [usize] {
    let used = used.min(keys.len()).min(USED_MAX);
    for count in 0..used {
        let mut best: Option<(usize, f32)> = None;
        for (index, key) in keys.iter().enumerate() {
            if best.is_none_or(|(_, highest)| *key > highest) && !places[..count].contains(&index) {
                best = Some((index, if key.is_nan() { f32::NEG_INFINITY } else { *key }));
            }
        }
        // There are more keys than chosen ones.
        places[count] = best.map_or(0, |(index, _)| index);
    }
    places[..used].sort_unstable();
    &places[..used]
}

/// The sum of outputs times their factors: one chain of fused multiply-adds per element, in the given order.
#[must_use]
pub fn combine(outputs: &[(f32, &[f32])], width: usize) -> Vec<f32> {
    (0..width).map(|i| outputs.iter().fold(0.0f32, |sum, (weight, output)| weight.mul_add(output[i], sum))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routing(used: usize, normalised: bool) -> Routing {
        Routing { used, gating: Gating::Softmax, normalised, scale: 1.0 }
    }

    fn chosen(scores: &[f32], used: usize) -> Vec<usize> {
        route(scores, None, routing(used, false)).iter().map(|choice| choice.expert).collect()
    }

    #[test]
    fn the_highest_scores_are_chosen_and_ties_go_to_the_first() {
        assert_eq!(chosen(&[0.5, 3.0, -1.0, 3.0, 2.0], 3), [1, 3, 4]);
        assert_eq!(chosen(&[1.0; 6], 2), [0, 1]);
        assert_eq!(chosen(&[f32::NAN; 6], 2), [0, 1]);
        assert_eq!(chosen(&[f32::NAN, 1.0, f32::NEG_INFINITY, 2.0], 3), [0, 1, 3]);
        assert_eq!(chosen(&[1.0, 2.0], 5), [0, 1], "no more than there are");
    }

    #[test]
    fn weights_are_the_softmax() {
        let scores: Vec<f32> = (0..128).map(|i| ((i * 37 % 100) as f32 - 50.0) / 9.0).collect();
        let sum: f64 = scores.iter().map(|s| f64::from(*s).exp()).sum();
        let plain = route(&scores, None, routing(8, false));
        for choice in &plain {
            let exact = f64::from(scores[choice.expert]).exp() / sum;
            assert!((f64::from(choice.weight) - exact).abs() < 1e-6 * exact, "{choice:?}: {exact}");
        }
        let chosen: f64 = plain.iter().map(|choice| f64::from(choice.weight)).sum();
        let scaled = Routing { scale: 2.5, ..routing(8, true) };
        for (normalised, plain) in route(&scores, None, scaled).iter().zip(&plain) {
            let exact = 2.5 * f64::from(plain.weight) / chosen;
            assert!((f64::from(normalised.weight) - exact).abs() < 1e-6 * exact);
        }
    }

    /// DeepSeek-V3's router, which GLM-4.5 has: corrections choose experts but are no part of their weights.
    #[test]
    fn corrections_choose_and_sigmoids_weigh() {
        let scores = [2.0f32, -1.0, 0.5, 3.0, -4.0];
        let corrections = [0.0f32, 0.9, 0.0, -0.5, 0.0];
        let routing = Routing { used: 2, gating: Gating::Sigmoid, normalised: true, scale: 1.5 };
        let share = |expert: usize| 1.0 / (1.0 + (-f64::from(scores[expert])).exp());
        let choices = route(&scores, Some(&corrections), routing);
        assert_eq!(choices.iter().map(|choice| choice.expert).collect::<Vec<_>>(), [0, 1]);
        for choice in choices {
            let exact = 1.5 * share(choice.expert) / (share(0) + share(1));
            assert!((f64::from(choice.weight) - exact).abs() < 1e-6, "{choice:?}: {exact}");
        }
        let plain = route(&scores, None, Routing { used: 1, normalised: false, scale: 1.0, ..routing });
        assert_eq!(plain[0].expert, 3);
        assert!((f64::from(plain[0].weight) - share(3)).abs() < 1e-6);
        // Scores whose sigmoids are equal still differ.
        assert_eq!(route(&[40.0, 50.0], None, Routing { used: 1, ..routing })[0].expert, 1);
    }

    #[test]
    fn a_score_that_is_not_finite_makes_all_weights_nan() {
        for bad in [f32::NAN, f32::INFINITY] {
            for normalised in [false, true] {
                for gating in [Gating::Softmax, Gating::Sigmoid] {
                    let routing = Routing { gating, ..routing(2, normalised) };
                    for corrections in [None, Some(&[0.0, 0.5, 0.0, 0.0][..])] {
                        let choices = route(&[1.0, 2.0, bad, 0.0], corrections, routing);
                        assert!(choices.iter().all(|choice| choice.weight.is_nan()), "{choices:?}");
                    }
                }
            }
        }
    }
}
