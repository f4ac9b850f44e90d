//! Mixtures of experts: which experts compute a row, and how their outputs are combined.
use super::{LANES, butterfly_sum, exp, reciprocal};

/// Most experts that a row may use; the largest published models use 10.
pub const USED_MAX: usize = 32;
/// Most experts of a layer; the largest published models have 512.
pub const EXPERTS_MAX: usize = 1024;

/// An expert of a row, and the factor of its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Number of the expert.
    pub expert: usize,
    /// Factor of its output.
    pub weight: f32,
}

/// The experts of a row, in ascending order: those with the `used` highest scores. Their weights are the softmax of all scores,
/// where `normalised` divided by the sum of the chosen ones.
///
/// If a score is not finite, all weights are NaN.
#[must_use]
pub fn route(scores: &[f32], used: usize, normalised: bool) -> Vec<Choice> {
    let largest = scores.iter().fold(f32::NEG_INFINITY, |largest, score| largest.max(*score));
    let shares: Vec<f32> = scores.iter().map(|score| exp(score - largest)).collect();
    let mut lanes = [0.0f32; LANES];
    shares.iter().enumerate().for_each(|(i, share)| lanes[i % LANES] += share);
    weigh(scores, &shares, butterfly_sum(lanes), used, normalised)
}

/// As [`route`], given e^(score - largest score) of each expert and the sum of these.
#[must_use]
pub fn weigh(scores: &[f32], shares: &[f32], total: f32, used: usize, normalised: bool) -> Vec<Choice> {
    let inverse = reciprocal(total);
    let mut choices: Vec<Choice> =
        highest(scores, used).into_iter().map(|expert| Choice { expert, weight: shares[expert] * inverse }).collect();
    if normalised {
        let inverse = reciprocal(choices.iter().fold(0.0, |sum, choice| sum + choice.weight));
        choices.iter_mut().for_each(|choice| choice.weight *= inverse);
    }
    choices
}

/// Indices of the highest scores, ascending. Of equal ones the first counts as higher; NaN is lower than any number.
fn highest(scores: &[f32], used: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::with_capacity(used);
    for _ in 0..used.min(scores.len()) {
        let mut best: Option<(usize, f32)> = None;
        for (index, score) in scores.iter().enumerate() {
            if best.is_none_or(|(_, highest)| *score > highest) && !chosen.contains(&index) {
                best = Some((index, if score.is_nan() { f32::NEG_INFINITY } else { *score }));
            }
        }
        chosen.extend(best.map(|(index, _)| index));
    }
    chosen.sort_unstable();
    chosen
}

/// The sum of outputs times their factors: one chain of fused multiply-adds per element, in the given order.
#[must_use]
pub fn combine(outputs: &[(f32, &[f32])], width: usize) -> Vec<f32> {
    (0..width).map(|i| outputs.iter().fold(0.0f32, |sum, (weight, output)| weight.mul_add(output[i], sum))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(scores: &[f32], used: usize) -> Vec<usize> {
        route(scores, used, false).iter().map(|choice| choice.expert).collect()
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
        let plain = route(&scores, 8, false);
        for choice in &plain {
            let exact = f64::from(scores[choice.expert]).exp() / sum;
            assert!((f64::from(choice.weight) - exact).abs() < 1e-6 * exact, "{choice:?}: {exact}");
        }
        let chosen: f64 = plain.iter().map(|choice| f64::from(choice.weight)).sum();
        for (normalised, plain) in route(&scores, 8, true).iter().zip(&plain) {
            let exact = f64::from(plain.weight) / chosen;
            assert!((f64::from(normalised.weight) - exact).abs() < 1e-6 * exact);
        }
    }

    #[test]
    fn a_score_that_is_not_finite_makes_all_weights_nan() {
        for bad in [f32::NAN, f32::INFINITY] {
            for normalised in [false, true] {
                let choices = route(&[1.0, 2.0, bad, 0.0], 2, normalised);
                assert!(choices.iter().all(|choice| choice.weight.is_nan()), "{choices:?}");
            }
        }
    }
}
