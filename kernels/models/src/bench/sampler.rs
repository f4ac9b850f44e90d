//! Benchmark: time to sample a token on one core, compared with the time that core needs to read the logits once.
use std::time::Instant;

use kernels::bench::{median, read_bandwidth};
use kernels::cpu::Isa;
use kernels::pool::Pool;
use serde::Serialize;

use super::no_threads;
use crate::sampler::{LogitChanges, NUMERICS, SampleError, Sampler, SamplerSettings};
use crate::stage::StageError;

/// Results of a sampler benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct SamplerFigures {
    /// Number of logits.
    pub vocabulary: usize,
    /// 0 is greedy.
    pub temperature: f64,
    /// Nucleus sampling; 1 keeps all tokens.
    pub top_p: f64,
    /// 0 keeps all tokens.
    pub top_k: u32,
    /// 0 keeps all tokens.
    pub min_p: f64,
    /// Instruction set used.
    pub instruction_set: &'static str,
    /// Numerics id of the sampler.
    pub numerics: &'static str,
    /// Median milliseconds per draw.
    pub ms: f64,
    /// Bytes of logits, which a draw reads at least once.
    pub bytes: u64,
    /// Read bandwidth of one thread from a buffer larger than the caches, in bytes per second.
    pub read_bandwidth: f64,
    /// Fraction of the read bandwidth: `bytes / read_bandwidth` over the seconds per draw.
    pub share_of_read: f64,
}

/// Benchmarks draws from random logits on the calling thread.
///
/// # Errors
/// Settings out of range, zero or too many logits, or the bandwidth thread cannot be started.
pub fn sampler(vocabulary: usize, settings: &SamplerSettings, draws: usize) -> Result<SamplerFigures, StageError> {
    let failed = |e: SampleError| StageError::Device(e.to_string());
    // Cycle through different logits, so that branch predictors and caches do not adapt to one set.
    let logits: Vec<Vec<f32>> = (0..8).map(|seed| some_logits(vocabulary, seed)).collect();
    let isa = Isa::detect();
    let mut pool = Pool::new(1).map_err(|e| no_threads(1, &e))?;
    let buffer = vec![1f32; (128 << 20) / 4];
    let mut sampler = Sampler::new();
    let (mut times, mut reads) = (Vec::new(), Vec::new());
    for (position, logits) in logits.iter().cycle().take(draws.max(logits.len())).enumerate() {
        let start = Instant::now();
        let token = sampler.sample(logits, settings, position as u32, &LogitChanges::default()).map_err(failed)?;
        times.push(start.elapsed().as_secs_f64());
        std::hint::black_box(token);
    }
    for _ in 0..5 {
        reads.push(read_bandwidth(isa, &mut pool, &buffer));
    }
    let (seconds, read_bandwidth, bytes) = (median(times), median(reads), (4 * vocabulary) as u64);
    Ok(SamplerFigures {
        vocabulary,
        temperature: decimal(settings.temperature),
        top_p: decimal(settings.top_p),
        top_k: settings.top_k,
        min_p: decimal(settings.min_p),
        instruction_set: isa.name(),
        numerics: NUMERICS,
        ms: seconds * 1e3,
        bytes,
        read_bandwidth,
        share_of_read: bytes as f64 / read_bandwidth / seconds,
    })
}

/// Converts 0.95f32 to 0.95, not to the f64 value of the nearest `f32`.
fn decimal(setting: f32) -> f64 {
    (f64::from(setting) * 1e6).round() / 1e6
}

/// Sums of four uniform numbers in -2.5..2.5: about the spread and peakedness of a language model's logits.
fn some_logits(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 5.0
    };
    (0..count).map(|_| uniform() + uniform() + uniform() + uniform()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_measured() {
        let settings = SamplerSettings { temperature: 1.0, ..SamplerSettings::greedy() };
        let figures = sampler(4096, &settings, 16).expect("measured");
        assert!(figures.ms > 0.0 && figures.share_of_read > 0.0, "{figures:?}");
        assert_eq!(figures.bytes, 16_384);
        assert!(sampler(0, &settings, 1).is_err());
    }
}
