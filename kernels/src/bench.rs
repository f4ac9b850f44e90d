//! How fast a model runs on this machine's CPU, beside what its memory can deliver in the same minutes.
//!
//! Decoding one sequence reads every weight once per token, so tokens times bytes against the measured read bandwidth
//! says how much of the machine is used. All figures are medians of rounds in which every measurement takes its turn.
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};
use crate::model::CpuStage;
use crate::pool::Pool;
use crate::stage::{Activations, Rows, RowsIn, RowsOut, Stage, StageError, StageOptions};
use crate::weights::ModelFile;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct DecodeBench {
    /// Compute threads.
    pub threads: usize,
    /// Arithmetic of products.
    pub activations: Activations,
    /// Prompt tokens of a round.
    pub prompt: usize,
    /// Tokens decoded after it.
    pub tokens: usize,
    /// Rounds; figures are medians over them.
    pub rounds: usize,
}

impl Default for DecodeBench {
    fn default() -> Self {
        Self { threads: 1, activations: Activations::Int8, prompt: 128, tokens: 64, rounds: 5 }
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeFigures {
    /// Compute threads.
    pub threads: usize,
    /// Instruction set in use.
    pub instruction_set: &'static str,
    /// Kernel set whose results agree bit for bit.
    pub numerics: String,
    /// Tokens of the prompt per second.
    pub prefill_tok_s: f64,
    /// Tokens generated per second, one sequence.
    pub decode_tok_s: f64,
    /// Weights read for each token decoded.
    pub bytes_per_token: u64,
    /// Bytes per second that one thread reads from a buffer larger than the caches.
    pub read_bandwidth_1: f64,
    /// The same for `threads` threads together.
    pub read_bandwidth_n: f64,
    /// `decode_tok_s · bytes_per_token / read_bandwidth_1`
    pub share_of_1: f64,
    /// `decode_tok_s · bytes_per_token / read_bandwidth_n`
    pub share_of_n: f64,
}

/// Measures a whole model on the CPU.
///
/// # Errors
/// The model cannot be loaded, or the prompt and tokens exceed its context.
pub fn decode(file: &Arc<ModelFile>, bench: DecodeBench) -> Result<DecodeFigures, StageError> {
    let isa = Isa::detect();
    let options = StageOptions {
        layers: 0..file.config().layers,
        sequences: 1,
        context: file.config().context.min(bench.prompt + bench.tokens + 1),
        activations: bench.activations,
        threads: bench.threads,
    };
    let mut stage = CpuStage::load(Arc::clone(file), options, isa)?;
    let device = |e| StageError::Device(format!("{} threads to measure with: {e}", bench.threads));
    let (mut one, mut all) = (Pool::new(1).map_err(device)?, Pool::new(bench.threads).map_err(device)?);
    // As large as what a token reads, and larger than most caches; ones, because denormal numbers would be slow.
    let bytes_per_token = stage.bytes_per_token();
    let buffer = vec![1f32; (bytes_per_token as usize).max(128 << 20) / 4];

    let rounds = bench.rounds.max(1);
    let (mut prefill, mut decode) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    let (mut read_1, mut read_n) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    run(&mut stage, &bench, 4.min(bench.tokens))?; // pages of the file and of scratch are touched before the clock runs
    for _ in 0..rounds {
        read_1.push(read_bandwidth(isa, &mut one, &buffer));
        read_n.push(read_bandwidth(isa, &mut all, &buffer));
        let (prompt_s, tokens_s) = run(&mut stage, &bench, bench.tokens)?;
        prefill.push(bench.prompt as f64 / prompt_s);
        decode.push(bench.tokens as f64 / tokens_s);
    }
    let (decode_tok_s, read_bandwidth_1, read_bandwidth_n) = (median(decode), median(read_1), median(read_n));
    let bytes_s = decode_tok_s * bytes_per_token as f64;
    Ok(DecodeFigures {
        threads: bench.threads,
        instruction_set: isa.name(),
        numerics: stage.numerics().to_owned(),
        prefill_tok_s: median(prefill),
        decode_tok_s,
        bytes_per_token,
        read_bandwidth_1,
        read_bandwidth_n,
        share_of_1: bytes_s / read_bandwidth_1,
        share_of_n: bytes_s / read_bandwidth_n,
    })
}

/// Seconds for the prompt and for greedy tokens after it.
fn run(stage: &mut CpuStage, bench: &DecodeBench, tokens: usize) -> Result<(f64, f64), StageError> {
    let vocab = stage.vocab() as u32;
    let prompt: Vec<u32> = (0..bench.prompt as u32).map(|i| (i * 37 + 11) % vocab).collect();
    let mut forward = |position: usize, tokens: &[u32]| -> Result<u32, StageError> {
        let rows = Rows { sequence: 0, position, input: RowsIn::Tokens(tokens), logits: true };
        let Some(RowsOut::Logits(logits)) = stage.forward(&[rows])?.pop() else { return Ok(0) };
        let best = logits
            .iter()
            .enumerate()
            .fold((0, f32::NEG_INFINITY), |best, (i, &logit)| if logit > best.1 { (i, logit) } else { best });
        Ok(best.0 as u32)
    };
    let start = Instant::now();
    let mut token = forward(0, &prompt)?;
    let prompt_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for i in 0..tokens {
        token = forward(bench.prompt + i, &[token])?;
    }
    Ok((prompt_s, start.elapsed().as_secs_f64()))
}

/// Bytes per second at which a pool's threads together read a buffer once.
fn read_bandwidth(isa: Isa, pool: &mut Pool, buffer: &[f32]) -> f64 {
    let start = Instant::now();
    pool.run(buffer.len(), 4096, &|_, mine| {
        // SAFETY: the instruction set was detected.
        std::hint::black_box(unsafe { isa.run(ReadAll { numbers: &buffer[mine] }) });
    });
    size_of_val(buffer) as f64 / start.elapsed().as_secs_f64()
}

struct ReadAll<'a> {
    numbers: &'a [f32],
}

impl Kernel for ReadAll<'_> {
    type Output = [f32; 4];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> [f32; 4] {
        // SAFETY: chunks have eight vectors; the machine has `S`.
        unsafe {
            let mut sums = [S::splat(0.0); 8];
            for chunk in self.numbers.chunks_exact(128) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = S::add(*sum, S::load(chunk.as_ptr().add(16 * i)));
                }
            }
            let [a, b, c, d, e, f, g, h] = sums;
            let (low, high) = (S::sum4([a, b, c, d]), S::sum4([e, f, g, h]));
            std::array::from_fn(|i| low[i] + high[i])
        }
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
