//! CPU benchmarks of a model, compared with the memory bandwidth measured in the same minutes.
//!
//! A decoding step reads every weight once, whatever the number of sequences, so steps/s · bytes per step over the measured
//! read bandwidth is the fraction of the roofline. All figures are medians over rounds, and each round takes every
//! measurement once.
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kernels::bench::{IDLE, Speed, beyond_caches, fastest, lower_quartile_ns, median, read_bandwidth};
use kernels::cpu::Isa;
use kernels::cpu::activations::{self, Quantise};
use kernels::order::GROUP;
use kernels::pool::Pool;
use kernels::quant::{QuantType, random_blocks};
use kernels::threads::Threads;
use kernels::tile::{Layout, ROWS};
use serde::Serialize;

use crate::engine::products;
use crate::model::load::Matrix;
use crate::model::{CpuEngine, CpuStage};
use crate::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageError, StageOptions};
use crate::weights::ModelFile;

mod attention;
mod sampler;

pub use sampler::{SamplerFigures, sampler};

/// Settings of a decode benchmark.
#[derive(Clone, Copy, Debug)]
pub struct DecodeBench {
    /// Compute threads.
    pub threads: usize,
    /// Number format of activations in products.
    pub activations: Activations,
    /// Prompt tokens per round.
    pub prompt: usize,
    /// Tokens of each sequence decoded after the prompt.
    pub tokens: usize,
    /// Sequences that decode together.
    pub requests: usize,
    /// Rounds to take medians over.
    pub rounds: usize,
}

impl Default for DecodeBench {
    fn default() -> Self {
        Self { threads: 1, activations: Activations::Int8, prompt: 128, tokens: 64, requests: 1, rounds: 5 }
    }
}

/// Results of a decode benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeFigures {
    /// Compute threads.
    pub threads: usize,
    /// Instruction set used.
    pub instruction_set: &'static str,
    /// Numerics id: kernels with the same id give bit-identical results.
    pub numerics: String,
    /// Prompt tokens per second.
    pub prefill_tok_s: f64,
    /// Sequences that decode together.
    pub requests: usize,
    /// Tokens decoded per second, of all sequences.
    pub decode_tok_s: f64,
    /// Weight bytes read per decoding step.
    pub bytes_per_token: u64,
    /// Read bandwidth of one thread from a buffer larger than the caches, in bytes per second.
    pub read_bandwidth_1: f64,
    /// Read bandwidth of `threads` threads together, in bytes per second.
    pub read_bandwidth_n: f64,
    /// `decode_tok_s / requests · bytes_per_token / read_bandwidth_1`
    pub share_of_1: f64,
    /// `decode_tok_s / requests · bytes_per_token / read_bandwidth_n`
    pub share_of_n: f64,
}

/// Benchmarks prefill and decode of a whole model on the CPU.
///
/// # Errors
/// The model cannot be loaded, or the prompt and tokens exceed its context.
pub fn decode(file: &Arc<ModelFile>, bench: DecodeBench) -> Result<DecodeFigures, StageError> {
    let isa = Isa::detect();
    let options = StageOptions {
        layers: 0..file.config().layers,
        sequences: bench.requests,
        context: file.config().context.min(bench.prompt + bench.tokens + 1),
        activations: bench.activations,
        ram: 0,
        threads: bench.threads,
    };
    let mut stage = CpuEngine::load(Arc::clone(file), options, isa)?;
    let threads = |count| Threads::new(count).map_err(|e| no_threads(count, &e));
    let (mut one, mut all) = (threads(1)?, threads(bench.threads)?);
    // As large as the weights read per token, and larger than most caches. Ones, because adding subnormals would be
    // slow.
    let bytes_per_token = stage.engine().bytes_per_token();
    let buffer = vec![1f32; (bytes_per_token as usize).max(128 << 20) / 4];

    let rounds = bench.rounds.max(1);
    let (mut prefill, mut decode) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    let (mut read_1, mut read_n) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    run(&mut stage, &mut all, &bench, 4.min(bench.tokens))?; // warm-up: touches the pages of the file and of scratch
    for _ in 0..rounds {
        read_1.push(read_bandwidth(isa, one.pool(), &buffer));
        read_n.push(read_bandwidth(isa, all.pool(), &buffer));
        let (prompt_s, tokens_s) = run(&mut stage, &mut all, &bench, bench.tokens)?;
        prefill.push(bench.prompt as f64 / prompt_s);
        decode.push((bench.requests * bench.tokens) as f64 / tokens_s);
    }
    let (decode_tok_s, read_bandwidth_1, read_bandwidth_n) = (median(decode), median(read_1), median(read_n));
    let bytes_s = decode_tok_s / bench.requests as f64 * bytes_per_token as f64;
    Ok(DecodeFigures {
        threads: bench.threads,
        instruction_set: isa.name(),
        numerics: stage.numerics().to_owned(),
        prefill_tok_s: median(prefill),
        requests: bench.requests,
        decode_tok_s,
        bytes_per_token,
        read_bandwidth_1,
        read_bandwidth_n,
        share_of_1: bytes_s / read_bandwidth_1,
        share_of_n: bytes_s / read_bandwidth_n,
    })
}

/// Measures the [`Speed`] of the CPU with `threads` threads, in about a third of a second. Reads at most `memory` bytes
/// of weights (at least four small matrices), because a node with little memory may run its stages from the caches.
///
/// # Errors
/// The threads cannot be started.
pub fn speed(threads: usize, memory: u64) -> Result<Speed, StageError> {
    /// Rows and columns of the matrices, as in a small model.
    const SIDE: usize = 1024;
    const KIND: QuantType = QuantType::Q4_1;
    const PROMPT: usize = 64;
    /// Matrices in the prefill measurement: the minimum number.
    const PREFILLED: usize = 4;
    let isa = Isa::detect();
    let mut pool = Pool::new(threads).map_err(|e| no_threads(threads, &e))?;
    let stored = random_blocks(KIND, SIDE * SIDE / KIND.block_len(), 1);
    let one = Layout::of(KIND).matrix_bytes(SIDE, SIDE);
    let count = (beyond_caches().min(bytes_of(memory)) / one).max(PREFILLED);
    let matrices = (0..count).map(|_| Matrix::convert(&mut pool, KIND, [SIDE; 2], &stored));
    let matrices = matrices.collect::<Result<Vec<Matrix>, _>>()?;
    // The smallest product that all threads share.
    let (tiny_rows, tiny_cols) = (4 * ROWS * threads, GROUP);
    let tiny = random_blocks(KIND, tiny_rows * tiny_cols / KIND.block_len(), 1);
    let tiny = Matrix::convert(&mut pool, KIND, [tiny_rows, tiny_cols], &tiny)?;
    let (row, prompt) = (some_rows(isa, 1, SIDE), some_rows(isa, PROMPT, SIDE));
    let mut out = Vec::new();
    let mut seconds = |x: &activations::Rows, matrices: &[&Matrix]| {
        fastest(MEASURE, || {
            matrices.iter().for_each(|matrix| products(isa, &mut pool, x, true, &[matrix.tiles()], [&mut out]));
        })
    };
    let all: Vec<&Matrix> = matrices.iter().collect();
    let decode = seconds(&row, &all);
    let few = &all[..PREFILLED];
    let prefill = seconds(&prompt, few);
    let hand_over = seconds(&some_rows(isa, 1, tiny_cols), &[&tiny; HAND_OVERS_TIMED]) / HAND_OVERS_TIMED as f64;
    // Measurement noise must not make the bandwidth infinite.
    let reading = (decode - count as f64 * hand_over).max(decode / 2.0);
    Ok(Speed {
        weight_bytes_s: ((count * one) as f64 / reading) as u64,
        flops_s: ((few.len() * SIDE * SIDE * 2 * PROMPT) as f64 / prefill) as u64,
        step_ns: hand_over_ns(),
        layer_ns: (LAYER_HAND_OVERS * hand_over * 1e9) as u64,
    })
}

/// Measures KV-cache bytes per second that attention of one row reads with `threads` threads, in 8-bit arithmetic.
/// Takes about a tenth of a second. The cache takes at most `memory` bytes, but at least 8 MiB.
///
/// # Errors
/// The threads cannot be started.
pub fn cache_speed(threads: usize, memory: u64) -> Result<u64, StageError> {
    let mut pool = Pool::new(threads).map_err(|e| no_threads(threads, &e))?;
    Ok(attention::cache_bytes_s(Isa::detect(), &mut pool, beyond_caches().min(bytes_of(memory))))
}

fn bytes_of(memory: u64) -> usize {
    usize::try_from(memory).unwrap_or(usize::MAX)
}

/// Hand-overs between compute threads per layer of one row: queries, keys and values; attention; output; gate and up;
/// down.
const LAYER_HAND_OVERS: f64 = 5.0;
/// Hand-overs per timed pass.
const HAND_OVERS_TIMED: usize = 64;

/// Nanoseconds of a round trip to a sleeping thread and back, as in each step of a stage.
fn hand_over_ns() -> u64 {
    let (ask, asked) = mpsc::sync_channel::<()>(1);
    let (answer, answered) = mpsc::sync_channel(1);
    std::thread::scope(|scope| {
        let answers = move || asked.iter().all(|()| answer.send(()).is_ok());
        if std::thread::Builder::new().spawn_scoped(scope, answers).is_err() {
            return 0; // nothing was measured
        }
        let once = || {
            std::thread::sleep(IDLE);
            let start = Instant::now();
            let whole = ask.send(()).is_ok() && answered.recv().is_ok();
            if whole { start.elapsed() } else { Duration::ZERO }
        };
        let times = (0..HAND_OVERS).map(|_| once()).collect();
        drop(ask);
        lower_quartile_ns(times)
    })
}

/// Number of hand-over measurements.
const HAND_OVERS: usize = 16;
/// No pass begins after this time.
const MEASURE: Duration = Duration::from_millis(150);

fn some_rows(isa: Isa, count: usize, cols: usize) -> activations::Rows {
    let mut rows = activations::Rows::default();
    rows.shape(count, cols);
    let out = rows.rows_mut();
    for i in 0..count {
        // SAFETY: one row at a time; the instruction set was detected.
        unsafe {
            let (floats, blocks) = out.row(i);
            floats[..cols].iter_mut().enumerate().for_each(|(k, x)| *x = ((k * 37 + i) % 101) as f32 - 50.0);
            isa.run(Quantise { floats: &floats[..cols], blocks });
        }
    }
    rows
}

fn no_threads(threads: usize, error: &std::io::Error) -> StageError {
    StageError::Device(format!("cannot start {threads} threads for the benchmark: {error}"))
}

fn rows(sequence: usize, position: usize, tokens: &[u32]) -> Rows<'_> {
    Rows { sequence: sequence as u64, position, input: RowsIn::Tokens(tokens), output: RequestedOutput::Logits }
}

/// Runs the prompt of each sequence and greedy decoding of `count` tokens of each; returns the seconds of one prompt and of
/// decoding.
fn run(
    stage: &mut CpuStage,
    threads: &mut Threads,
    bench: &DecodeBench,
    count: usize,
) -> Result<(f64, f64), StageError> {
    let vocab = stage.vocab() as u32;
    let prompt: Vec<u32> = (0..bench.prompt as u32).map(|i| (i * 37 + 11) % vocab).collect();
    let mut forward = |rows: &[Rows<'_>]| -> Result<Vec<u32>, StageError> {
        let best = |out| {
            let RowsOut::Logits(logits) = out else { return 0 };
            let best = logits.iter().zip(0..).max_by(|a, b| a.0.total_cmp(b.0));
            best.map_or(0, |(_, token)| token)
        };
        Ok(stage.forward(threads, rows)?.into_iter().map(best).collect())
    };
    let (start, mut tokens, mut prompt_s) = (Instant::now(), Vec::new(), 0.0);
    for sequence in 0..bench.requests {
        tokens.extend(forward(&[rows(sequence, 0, &prompt[..])])?);
        if sequence == 0 {
            prompt_s = start.elapsed().as_secs_f64();
        }
    }
    let start = Instant::now();
    for i in 0..count {
        let of = |(sequence, token)| rows(sequence, bench.prompt + i, token);
        tokens = forward(&tokens.chunks(1).enumerate().map(of).collect::<Vec<_>>())?;
    }
    Ok((prompt_s, start.elapsed().as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_measurements_are_plausible_and_quick() {
        let start = Instant::now();
        for memory in [u64::MAX, 0] {
            let speed = speed(2, memory).unwrap();
            assert!(speed.weight_bytes_s > 1 << 20 && speed.flops_s > 1 << 20, "{memory}: {speed:?}");
            assert!((1_000..1_000_000_000).contains(&speed.step_ns), "{memory}: {speed:?}");
            assert!((1..1_000_000_000).contains(&speed.layer_ns), "{memory}: {speed:?}");
            let cache_bytes_s = cache_speed(2, memory).unwrap();
            assert!(cache_bytes_s > 1 << 20, "{memory}: {cache_bytes_s}");
            eprintln!("{speed:?}, {:.1} GB/s of cache", cache_bytes_s as f64 / 1e9);
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed()); // far less on an idle machine
    }
}
