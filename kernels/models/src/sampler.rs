//! The sampler: draws a token from logits, deterministically. Equal logits give equal tokens on every machine.
//!
//! Random numbers are a function of (seed, position), so a stage that takes over mid-request draws the same tokens as its
//! predecessor. Weights are integers (`sampler/order.rs`), so sums are exact on every CPU and at any thread count.
use kernels::cpu::Isa;

use order::{Candidate, Measure, Order, Scale, Scratch, Survey};

pub mod order;

/// Numerics id of the weights and the token order. Samplers with another id may draw other tokens from the same logits.
pub const NUMERICS: &str = "sampler-2";

/// Sampling parameters of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerSettings {
    /// 0 is greedy; higher values flatten the distribution. At most 100.
    pub temperature: f32,
    /// Nucleus sampling: keeps the smallest set of most likely tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps this number of most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps tokens whose probability is at least this fraction of the highest one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the history; 1 has no effect.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens generated so far; 0 has no effect. -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence among the generated tokens; 0 has no effect. -2 to 2.
    pub frequency_penalty: f32,
    /// Key of the random numbers.
    pub seed: u64,
}

impl SamplerSettings {
    /// Greedy decoding: always the most likely token.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }

    /// Whether the token history affects the draw.
    #[must_use]
    pub fn uses_history(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks that every field is in its range.
    ///
    /// # Errors
    /// [`SampleError::Setting`] with the first field out of range.
    pub fn check(&self) -> Result<(), SampleError> {
        let checks = [
            ("temperature", self.temperature, 0.0..=100.0),
            ("top_p", self.top_p, 0.0..=1.0),
            ("min_p", self.min_p, 0.0..=1.0),
            ("repetition_penalty", self.repetition_penalty, 1e-3..=1e3),
            ("presence_penalty", self.presence_penalty, -2.0..=2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0..=2.0),
        ];
        for (name, found, range) in checks {
            if !range.contains(&found) {
                return Err(SampleError::Setting { name, found, low: *range.start(), high: *range.end() });
            }
        }
        Ok(())
    }
}

/// Per-request changes to the logits, applied before a token is drawn.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitChanges<'a> {
    /// Prompt and generated tokens; may be empty if the settings do not look back.
    pub history: &'a [u32],
    /// Number of prompt tokens in the history. The remaining tokens were generated.
    pub prompt: usize,
    /// Tokens, each with the bias of its logit in millionths.
    pub bias: &'a [(u32, i32)],
    /// The tokens that may be drawn, if not all: bit `id % 32` of word `id / 32`.
    pub allowed: Option<&'a [u32]>,
}

impl LogitChanges<'_> {
    /// Whether the logits stay unchanged.
    #[must_use]
    pub fn is_empty(&self, settings: &SamplerSettings) -> bool {
        self.bias.is_empty() && self.allowed.is_none() && (self.history.is_empty() || !settings.uses_history())
    }
}

/// Draws tokens. Holds only scratch memory: the result depends on the arguments alone.
#[derive(Debug)]
pub struct Sampler {
    scratch: Scratch,
    /// Logits after bias and penalties.
    changed: Vec<f32>,
    /// Tokens of the history sorted by id, each with 1 if it was generated.
    seen: Vec<(u32, u32)>,
    /// Logits of the top-k tokens, by id, if `top_k` applies.
    kept: Vec<f32>,
    kept_ids: Vec<u32>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self::new()
    }
}

impl Sampler {
    /// Creates a sampler for this machine's instruction set.
    #[must_use]
    pub fn new() -> Self {
        Self::on(Isa::detect())
    }

    fn on(isa: Isa) -> Self {
        Self {
            scratch: Scratch::new(isa),
            changed: Vec::new(),
            seen: Vec::new(),
            kept: Vec::new(),
            kept_ids: Vec::new(),
        }
    }

    /// Draws the token at `position`. Order of application: bias, penalties, temperature, top-k, top-p, min-p. Among equally
    /// likely tokens the lowest id comes first. A token less than 2^-44 as likely as the most likely one is never drawn.
    ///
    /// # Errors
    /// No logits or more than 2^20, a logit of NaN or +∞, no finite logit among the allowed tokens, or a setting out of range.
    pub fn sample(
        &mut self,
        logits: &[f32],
        settings: &SamplerSettings,
        position: u32,
        changes: &LogitChanges<'_>,
    ) -> Result<u32, SampleError> {
        settings.check()?;
        let mut seen = check(logits, &self.scratch)?;
        let mut logits = logits;
        if !changes.is_empty(settings) {
            change(logits, settings, changes, &mut self.seen, &mut self.changed);
            logits = &self.changed;
            seen = check(logits, &self.scratch)?;
        }
        if settings.temperature == 0.0 {
            return Ok(seen.first as u32);
        }
        let scale = Scale::new(seen.extremes.1, settings.temperature);
        let k = settings.top_k as usize;
        let cut = k != 0 && k < logits.len();
        let mut extremes = seen.extremes;
        if cut {
            // Use temperature 1 for these buckets: at a low temperature nearly all tokens would share the last bucket.
            let spread = Scale::new(extremes.1, 1.0);
            let mut order = Order::new(logits, extremes, spread, Measure::Count, &mut self.scratch);
            let (last, _) = order.find(k as u64 - 1);
            keep_until(&last, logits, (&mut self.kept, &mut self.kept_ids));
            logits = &self.kept;
            extremes.0 = last.logit;
        }
        let mut order = Order::new(logits, extremes, scale, Measure::Weight, &mut self.scratch);
        let limit = limit(&mut order, settings, scale.weight(extremes.1));
        let target = (u128::from(random(settings.seed, position)) * u128::from(limit)) >> 64;
        let (drawn, _) = order.find(target as u64);
        Ok(if cut { self.kept_ids[drawn.id as usize] } else { drawn.id })
    }
}

fn check(logits: &[f32], scratch: &Scratch) -> Result<Survey, SampleError> {
    if logits.is_empty() {
        return Err(SampleError::Empty { count: 0 });
    }
    if logits.len() > order::LOGITS_MAX {
        return Err(SampleError::TooMany { count: logits.len() });
    }
    let seen = scratch.survey(logits);
    let (least, greatest) = seen.extremes;
    if least.is_nan() || greatest.is_nan() || greatest == f32::INFINITY {
        let wrong = logits.iter().enumerate().find(|(_, l)| l.is_nan() || **l == f32::INFINITY);
        let (id, &found) = wrong.unwrap_or((0, &f32::NAN));
        return Err(SampleError::Logit { id, found });
    }
    if greatest == f32::NEG_INFINITY {
        return Err(SampleError::Empty { count: logits.len() });
    }
    Ok(seen)
}

/// Applies bias and penalties, and removes the tokens that are not allowed. Non-finite logits stay; token ids outside the
/// vocabulary are ignored.
fn change(
    logits: &[f32],
    settings: &SamplerSettings,
    changes: &LogitChanges<'_>,
    seen: &mut Vec<(u32, u32)>,
    out: &mut Vec<f32>,
) {
    out.clear();
    out.extend_from_slice(logits);
    let set = |out: &mut Vec<f32>, id: u32, of: &dyn Fn(f64) -> f64| {
        if let Some(logit) = out.get_mut(id as usize).filter(|logit| logit.is_finite()) {
            *logit = (of(f64::from(*logit)) as f32).clamp(f32::MIN, f32::MAX);
        }
    };
    for &(id, millionths) in changes.bias {
        set(out, id, &|logit| logit + f64::from(millionths) / 1e6);
    }
    if let Some(allowed) = changes.allowed {
        for (word, logits) in out.chunks_mut(32).enumerate() {
            let bits = allowed.get(word).copied().unwrap_or(0);
            let removed = logits.iter_mut().enumerate().filter(|(bit, _)| bits >> bit & 1 == 0);
            removed.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
    }
    if !settings.uses_history() {
        return;
    }
    let [repetition, presence, frequency] =
        [settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty].map(f64::from);
    seen.clear();
    seen.extend(changes.history.iter().enumerate().map(|(i, id)| (*id, u32::from(i >= changes.prompt))));
    seen.sort_unstable();
    for same in seen.chunk_by(|a, b| a.0 == b.0) {
        let generated: u32 = same.iter().map(|(_, generated)| generated).sum();
        set(out, same[0].0, &|logit| {
            let repeated = if logit > 0.0 { logit / repetition } else { logit * repetition };
            repeated - f64::from(generated) * frequency - f64::from(generated.min(1)) * presence
        });
    }
}

/// Copies logits and ids of the tokens up to and including `last`, in order of likelihood.
fn keep_until(last: &Candidate, logits: &[f32], (kept, ids): (&mut Vec<f32>, &mut Vec<u32>)) {
    kept.clear();
    ids.clear();
    for (number, chunk) in logits.chunks(64).enumerate() {
        if !chunk.iter().fold(false, |any, &l| any | (l >= last.logit)) {
            continue;
        }
        for (i, &logit) in chunk.iter().enumerate() {
            let id = (64 * number + i) as u32;
            if logit > last.logit || logit == last.logit && id <= last.id {
                kept.push(logit);
                ids.push(id);
            }
        }
    }
}

/// Total weight of the tokens that top-p and min-p keep: a prefix of the order, at least one token.
fn limit(order: &mut Order<'_>, settings: &SamplerSettings, greatest: u64) -> u64 {
    let total = order.total();
    let share = |of: u64, part: f32| ((of as f64 * f64::from(part)).ceil() as u64).clamp(1, of);
    let mut limit = total;
    if settings.top_p < 1.0 {
        (_, limit) = order.find(share(total, settings.top_p) - 1);
    }
    if settings.min_p > 0.0 {
        limit = limit.min(order.sum_from(share(greatest, settings.min_p)));
    }
    limit
}

/// 64 pseudo-random bits from a keyed hash of (seed, position).
#[must_use]
pub fn random(seed: u64, position: u32) -> u64 {
    let mut key = *b"seed....meshnode sampler numbers";
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let hash = blake3::keyed_hash(&key, &position.to_le_bytes());
    let mut bits = [0; 8];
    bits.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(bits)
}

/// Why no token was drawn.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A NaN or +∞ logit: the stage that computed it is faulty.
    #[error("logit {id} is {found}; the stage that computed it is faulty")]
    Logit {
        /// Token id.
        id: usize,
        /// Its logit.
        found: f32,
    },
    /// No logits, or none finite.
    #[error("none of {count} logits is finite; the stage that computed them is faulty")]
    Empty {
        /// Number of logits.
        count: usize,
    },
    /// More logits than the integer sums can hold.
    #[error("expected at most {max} logits, found {count}", max = order::LOGITS_MAX)]
    TooMany {
        /// Number of logits.
        count: usize,
    },
    /// A setting out of range.
    #[error("{name}: expected {low} to {high}, found {found}")]
    Setting {
        /// Name of the setting.
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
