//! Rotary frequencies from a model's base, factors and scaling, with the same bits on every machine.
use std::f64::consts::PI;

use super::{Rope, RopeScaling};
use crate::weights::error::WeightsError;

/// Parameters of a cosine and sine table: the angle of pair `i` at position `p` is `p × inverse[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// One per pair, `dims / 2`.
    pub inverse: Vec<f64>,
    /// Scale of cosine and sine; 1 without YaRN and LongRoPE.
    pub magnitude: f32,
}

impl Rope {
    /// Inverse frequencies `base^(-2 i / dims)` with the factors of a tensor and scaling applied. Bit-identical on every machine: the power
    /// uses only additions, multiplications and divisions.
    ///
    /// # Errors
    /// The factors do not number `dims / 2`, or are not positive.
    pub fn frequencies(&self, factors: Option<(&str, &[f32])>) -> Result<RotaryFrequencies, WeightsError> {
        let pairs = self.dims / 2;
        if let Some((name, factors)) = factors
            && (factors.len() != pairs || factors.iter().any(|f| !(f.is_finite() && *f > 0.0)))
        {
            return Err(WeightsError::Malformed(format!(
                "tensor {name:?}: expected {pairs} positive factors, found {}",
                factors.len()
            )));
        }
        let factors = factors.map(|(_, factors)| factors);
        let step = root(1.0 / f64::from(self.base), pairs as i32);
        let plain = |i: usize| power(step, i as i32) / factors.map_or(1.0, |f| f64::from(f[i]));
        let (inverse, magnitude) = match self.scaling {
            RopeScaling::None => ((0..pairs).map(plain).collect(), 1.0),
            RopeScaling::Linear { factor } => ((0..pairs).map(|i| plain(i) / factor).collect(), 1.0),
            RopeScaling::Long { attention_factor, .. } => ((0..pairs).map(plain).collect(), attention_factor as f32),
            RopeScaling::Llama3 { factor, original_context, low, high } => {
                let stretched = |i: usize| {
                    let turns = original_context as f64 * plain(i) / (2.0 * PI);
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    plain(i) * kept + plain(i) / factor * (1.0 - kept)
                };
                ((0..pairs).map(stretched).collect(), 1.0)
            }
            RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
                // The dimension that makes `turns` turns within the original context. Logarithms differ by at most one ulp
                // between machines, which floor and ceil absorb.
                let dimension = |turns: f64| {
                    self.dims as f64 * (original_context as f64 / (turns * 2.0 * PI)).ln()
                        / (2.0 * f64::from(self.base).ln())
                };
                let low = dimension(beta_fast).floor().max(0.0);
                let high = dimension(beta_slow).ceil().min(self.dims as f64 - 1.0);
                let blend = |i: usize| {
                    let divided = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    plain(i) / factor * divided + plain(i) * (1.0 - divided)
                };
                let magnitude = (attention_factor * (1.0 + 0.1 * factor.ln())) as f32;
                ((0..pairs).map(blend).collect(), magnitude)
            }
        };
        Ok(RotaryFrequencies { inverse, magnitude })
    }
}

/// `x^n` by repeated squaring.
fn power(x: f64, n: i32) -> f64 {
    let (mut result, mut square, mut n) = (1.0, x, n);
    while n > 0 {
        if n & 1 == 1 {
            result *= square;
        }
        square *= square;
        n >>= 1;
    }
    result
}

/// The n-th root of `a` for `0 < a < 1`, by Newton's method from above, which decreases monotonically.
fn root(a: f64, n: i32) -> f64 {
    let mut x = 1.0f64;
    loop {
        let slope = f64::from(n) * power(x, n - 1);
        let next = x - (power(x, n) - a) / slope;
        // A NaN from an underflowed slope also ends the loop.
        if next.partial_cmp(&x) != Some(std::cmp::Ordering::Less) {
            return x;
        }
        x = next;
    }
}
