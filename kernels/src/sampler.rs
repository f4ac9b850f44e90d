//! From logits to a token: the same one on every machine that has the same logits.
//!
//! Randomness is a function of (seed, position), so that a stage that takes over mid-request draws what its predecessor
//! would have drawn. All arithmetic is f64 in a fixed order with an exponential of our own: equal logits give equal tokens
//! on every processor.
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// How to choose among tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerSettings {
    /// 0 takes the most likely token; larger flattens. At most 100.
    pub temperature: f32,
    /// The smallest set of most likely tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// The so many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Tokens at least so likely as this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the history; 1 does nothing.
    pub repetition_penalty: f32,
    /// Key of the random numbers.
    pub seed: u64,
}

impl SamplerSettings {
    /// The most likely token, always.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }

    /// Whether every field is in its range.
    ///
    /// # Errors
    /// [`SampleError::Setting`] names the first that is not.
    pub fn check(&self) -> Result<(), SampleError> {
        let checks = [
            ("temperature", self.temperature, 0.0..=100.0),
            ("top_p", self.top_p, 0.0..=1.0),
            ("min_p", self.min_p, 0.0..=1.0),
            ("repetition_penalty", self.repetition_penalty, 1e-3..=1e3),
        ];
        for (name, found, range) in checks {
            if !range.contains(&found) {
                return Err(SampleError::Setting { name, found, low: *range.start(), high: *range.end() });
            }
        }
        Ok(())
    }
}

/// Chooses tokens. Holds only scratch memory: what it returns depends on its arguments alone.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f64,
    /// Not normalised: exp((logit - largest) / temperature).
    weight: f64,
}

impl Sampler {
    /// A sampler.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The token at `position` after `history` (prompt and generated tokens). Filters apply in the order penalty,
    /// temperature, top-k, top-p, min-p; of equally likely tokens the lowest id comes first.
    ///
    /// # Errors
    /// No logits, a NaN or +∞ among them, none finite, or a setting out of range.
    pub fn sample(
        &mut self,
        logits: &[f32],
        settings: &SamplerSettings,
        position: u32,
        history: &[u32],
    ) -> Result<u32, SampleError> {
        settings.check()?;
        check_logits(logits)?;
        let penalised = penalise(logits, settings.repetition_penalty, history);
        let logit = |id: usize| penalised.get(&(id as u32)).copied().unwrap_or_else(|| f64::from(logits[id]));
        if settings.temperature == 0.0 {
            return Ok(greatest(logits.len(), logit));
        }
        self.candidates.clear();
        let finite = |c: &Candidate| c.logit > f64::NEG_INFINITY;
        let all = (0..logits.len()).map(|id| Candidate { id: id as u32, logit: logit(id), weight: 0.0 });
        self.candidates.extend(all.filter(finite));
        self.keep_top_k(settings.top_k as usize);
        self.weigh(f64::from(settings.temperature));
        self.keep_top_p(f64::from(settings.top_p));
        let least = f64::from(settings.min_p) * self.candidates[0].weight;
        let kept = self.candidates.iter().take_while(|c| c.weight >= least).count().max(1);
        self.candidates.truncate(kept);
        Ok(self.draw(uniform(settings.seed, position)))
    }

    /// Sorts most likely first and keeps `k` (all for 0).
    fn keep_top_k(&mut self, k: usize) {
        let candidates = &mut self.candidates;
        if k != 0 && k < candidates.len() {
            candidates.select_nth_unstable_by(k - 1, likelier);
            candidates.truncate(k);
        }
        // The order is total (ids differ), so an unstable sort has one result.
        candidates.sort_unstable_by(likelier);
    }

    fn weigh(&mut self, temperature: f64) {
        let largest = self.candidates[0].logit;
        for c in &mut self.candidates {
            c.weight = exp((c.logit - largest) / temperature);
        }
    }

    fn keep_top_p(&mut self, p: f64) {
        if p >= 1.0 {
            return;
        }
        let enough = p * self.candidates.iter().map(|c| c.weight).sum::<f64>();
        let mut sum = 0.0;
        let before = |c: &Candidate| {
            let wanted = sum < enough;
            sum += c.weight;
            wanted
        };
        let kept = self.candidates.iter().map(before).take_while(|&wanted| wanted).count().max(1);
        self.candidates.truncate(kept);
    }

    /// The candidate at a share `u` in `0..1` of the total weight.
    fn draw(&self, u: f64) -> u32 {
        let target = u * self.candidates.iter().map(|c| c.weight).sum::<f64>();
        let mut sum = 0.0;
        for c in &self.candidates {
            sum += c.weight;
            if target < sum {
                return c.id;
            }
        }
        // Rounding may leave the target at the total: the last one with any weight.
        self.candidates.iter().rev().find(|c| c.weight > 0.0).map_or(self.candidates[0].id, |c| c.id)
    }
}

fn check_logits(logits: &[f32]) -> Result<(), SampleError> {
    if let Some((id, &found)) = logits.iter().enumerate().find(|(_, l)| l.is_nan() || **l == f32::INFINITY) {
        return Err(SampleError::Logit { id, found });
    }
    if logits.iter().all(|&l| l == f32::NEG_INFINITY) {
        return Err(SampleError::Empty { count: logits.len() });
    }
    Ok(())
}

/// The changed logits of tokens in the history.
fn penalise(logits: &[f32], penalty: f32, history: &[u32]) -> std::collections::BTreeMap<u32, f64> {
    if penalty == 1.0 {
        return std::collections::BTreeMap::new();
    }
    let penalty = f64::from(penalty);
    let seen: BTreeSet<u32> = history.iter().copied().filter(|&id| (id as usize) < logits.len()).collect();
    let change = |id: u32| {
        let logit = f64::from(logits[id as usize]);
        (id, if logit > 0.0 { logit / penalty } else { logit * penalty })
    };
    seen.into_iter().map(change).collect()
}

/// The id with the greatest logit, the lowest of several.
fn greatest(count: usize, logit: impl Fn(usize) -> f64) -> u32 {
    let mut best = (f64::NEG_INFINITY, 0);
    for id in 0..count {
        let l = logit(id);
        if l > best.0 {
            best = (l, id);
        }
    }
    best.1 as u32
}

fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// A number in `0..1` that depends on (seed, position) alone: 53 bits of a keyed hash.
fn uniform(seed: u64, position: u32) -> f64 {
    let mut key = *b"seed....meshnode sampler numbers";
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let hash = blake3::keyed_hash(&key, &position.to_le_bytes());
    let mut bits = [0; 8];
    bits.copy_from_slice(&hash.as_bytes()[..8]);
    (u64::from_le_bytes(bits) >> 11) as f64 / (1u64 << 53) as f64
}

/// e^x for x ≤ 0 from additions and multiplications alone, so that no two C libraries differ: x = k ln 2 + r, Taylor in r.
/// Relative error below 1e-15.
fn exp(x: f64) -> f64 {
    // ln 2 in two parts; the upper has 21 zero bits at its end, so that k × it is exact.
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    if x < -745.0 {
        return 0.0;
    }
    let k = (x * std::f64::consts::LOG2_E).round();
    let r = (x - k * LN2_HIGH) - k * LN2_LOW;
    // |r| ≤ 0.35: 14 terms leave 0.35^14 / 14! < 1e-17.
    let mut sum = 1.0;
    for n in (1..14).rev() {
        sum = 1.0 + sum * r / f64::from(n);
    }
    // In two steps, as 2^k alone may be below the smallest normal number.
    let half = (k / 2.0).trunc();
    sum * power_of_two(half as i32) * power_of_two((k - half) as i32)
}

/// 2^n for -1022 ≤ n ≤ 1023.
fn power_of_two(n: i32) -> f64 {
    f64::from_bits(((1023 + n) as u64) << 52)
}

/// Why no token was chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A logit that no sound computation gives: the stage that made it has failed.
    #[error("logit {id} is {found}; the stage that computed it is faulty")]
    Logit {
        /// Which.
        id: usize,
        /// Its value.
        found: f32,
    },
    /// Nothing to choose from.
    #[error("none of {count} logits is finite; the stage that computed them is faulty")]
    Empty {
        /// How many there were.
        count: usize,
    },
    /// A setting out of range.
    #[error("{name}: expected {low} to {high}, found {found}")]
    Setting {
        /// Which.
        name: &'static str,
        /// Its value.
        found: f32,
        /// Smallest allowed.
        low: f32,
        /// Largest allowed.
        high: f32,
    },
}

#[cfg(test)]
mod tests;
