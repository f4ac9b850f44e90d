//! Measures what a codec of hidden rows costs a model: the model runs as several stages, and the rows between them pass
//! through the codec, as between nodes.
//!
//! All codecs run side by side over the same text, and each position is compared with the lossless run. Two measures are
//! teacher-forced (the input is the text): the Kullback-Leibler divergence of the next token's distribution, and whether the
//! most likely token is the same. The third continues the text greedily, so that one different token changes all later ones.
use std::sync::Arc;

use kernels::boundary::Codec;
use kernels::threads::Threads;
use serde::{Deserialize, Serialize};

use crate::model::load_cpu_stage;
use crate::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, SequenceId, Stage, StageError, StageOptions};
use crate::weights::ModelFile;

/// The measured text: this project's own documentation and sources, fixed here so that figures stay comparable.
const TEXT: &str = include_str!("gate/text.txt");

/// Least number of positions that are compared.
pub const POSITIONS_MIN: usize = 4096;
/// Positions of one window of the text: the model starts again at each.
const WINDOW: usize = 512;
/// Windows in memory at once: enough rows per step to use each weight several times, few enough for the caches of a large
/// model.
const GROUP: usize = 4;
/// Cached positions before a greedy continuation: a multiple of [`crate::decoder::SHARED_POSITIONS`].
const GREEDY_FROM: usize = 384;
/// Tokens of a greedy continuation.
const GREEDY_TOKENS: usize = 64;

/// Least share of positions with the same most likely token, for a codec that may be chosen automatically.
pub const TOP1_MIN: f64 = 0.95;
/// Largest mean divergence in nats, for a codec that may be chosen automatically.
pub const KL_MAX: f64 = 0.05;

/// Settings of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct GateOptions {
    /// Arithmetic of matrix products.
    pub activations: Activations,
    /// Compute threads.
    pub threads: usize,
}

/// A codec compared with the lossless run, at one number of cuts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Name of the codec.
    pub codec: String,
    /// Layers at whose start the model was cut.
    pub cuts: Vec<usize>,
    /// Positions compared.
    pub positions: usize,
    /// Mean divergence from the lossless distribution, in nats.
    pub kl_mean: f64,
    /// Largest divergence, in nats.
    pub kl_max: f64,
    /// Share of positions with the same most likely token.
    pub top1: f64,
    /// Positions whose most likely token differs.
    pub flips: usize,
    /// Largest difference of the two greatest lossless logits among the flips, in nats; 0 without flips.
    pub flip_margin_max: f64,
    /// Mean share of a greedy continuation before the first token that differs.
    pub greedy: f64,
}

impl Quality {
    /// Whether the codec may be chosen automatically at this number of cuts.
    #[must_use]
    pub fn passes(&self) -> bool {
        // Not a number fails.
        self.top1 >= TOP1_MIN && self.kl_mean <= KL_MAX
    }
}

/// Measures `codecs`, with one cut in the middle and with two cuts. `progress` receives the steps done and their number.
///
/// # Errors
/// The model has fewer than three layers, no output head or no tokenizer, the text has too few tokens of its vocabulary, or
/// a stage fails.
pub fn measure(
    file: &Arc<ModelFile>,
    codecs: &[Codec],
    options: GateOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<Vec<Quality>, StageError> {
    let layers = file.config().layers;
    if layers < 3 || file.config().pooled {
        let what = "expected a model with an output head and at least three layers, to cut it twice";
        let kind = if file.config().pooled { " of a model for embeddings" } else { "" };
        return Err(StageError::Input(format!("{what}; found {layers} layers{kind}")));
    }
    let windows = windows(file)?;
    let plans = [vec![layers / 2], vec![layers / 3, 2 * layers / 3]];
    let steps_of = |group: &[Vec<u32>]| (group[0].len() + continuation(group[0].len())) as u64;
    let all = plans.len() as u64 * windows.chunks(GROUP).map(steps_of).sum::<u64>();
    let (mut done, mut measured) = (0, Vec::new());
    for cuts in plans {
        let mut run = Run::load(file, &cuts, codecs, options, windows[0].len())?;
        for group in windows.chunks(GROUP) {
            run.group(group, &mut || {
                done += 1;
                progress(done, all);
            })?;
        }
        measured.extend(run.figures(&cuts));
    }
    Ok(measured)
}

/// The text in windows of equal length.
fn windows(file: &ModelFile) -> Result<Vec<Vec<u32>>, StageError> {
    let tokenizer = file.tokenizer().map_err(|e| StageError::Input(e.to_string()))?;
    let tokens = tokenizer.encode(TEXT, false).map_err(|e| StageError::Input(e.to_string()))?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let length = WINDOW.min(file.config().context);
    let windows: Vec<Vec<u32>> = tokens
        .chunks_exact(length.saturating_sub(usize::from(bos.is_some())).max(1))
        .map(|chunk| bos.into_iter().chain(chunk.iter().copied()).collect())
        .take(POSITIONS_MIN.div_ceil(length.max(1)))
        .collect();
    let found = windows.len() * length;
    if found < POSITIONS_MIN {
        let what = format!("expected {POSITIONS_MIN} positions, found {found}: the text has {} tokens", tokens.len());
        return Err(StageError::Input(what));
    }
    Ok(windows)
}

/// Tokens of the greedy continuation of a window.
fn continuation(window: usize) -> usize {
    GREEDY_TOKENS.min(window.saturating_sub(GREEDY_FROM))
}

/// The stages of a model, and the figures so far.
struct Run<'a> {
    stages: Vec<Box<dyn Stage>>,
    threads: Threads,
    width: usize,
    /// The codecs that are compared with the lossless run; run 0 is lossless.
    codecs: &'a [Codec],
    sums: Vec<Sums>,
}

/// Figures of one codec, summed.
#[derive(Clone, Default)]
struct Sums {
    positions: usize,
    kl: f64,
    kl_max: f64,
    flips: usize,
    flip_margin_max: f64,
    answers: usize,
    greedy: f64,
}

/// One row of a step: the run (0 is lossless, others a codec), the window within its group, and the token.
#[derive(Clone, Copy)]
struct Token {
    run: usize,
    window: usize,
    token: u32,
}

impl Token {
    fn sequence(self) -> SequenceId {
        (self.run * GROUP + self.window) as SequenceId
    }
}

impl<'a> Run<'a> {
    fn load(
        file: &Arc<ModelFile>,
        cuts: &[usize],
        codecs: &'a [Codec],
        options: GateOptions,
        context: usize,
    ) -> Result<Self, StageError> {
        let ends = cuts.iter().copied().chain([file.config().layers]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let load = |(start, end): (usize, usize)| {
            let options = StageOptions {
                layers: start..end,
                sequences: GROUP * (codecs.len() + 1),
                context,
                activations: options.activations,
                ram: 0,
                threads: options.threads,
            };
            load_cpu_stage(Arc::clone(file), options)
        };
        let no_threads = |e| StageError::Device(format!("{} compute threads: {e}", options.threads));
        Ok(Self {
            stages: starts.zip(ends).map(load).collect::<Result<_, _>>()?,
            threads: Threads::new(options.threads).map_err(no_threads)?,
            width: file.config().width,
            codecs,
            sums: vec![Sums::default(); codecs.len()],
        })
    }

    /// Measures some windows of equal length.
    fn group(&mut self, windows: &[Vec<u32>], tick: &mut impl FnMut()) -> Result<(), StageError> {
        let runs = self.codecs.len() + 1;
        let length = windows[0].len();
        for position in 0..length {
            let rows: Vec<Token> =
                (0..windows.len()).map(|window| Token { run: 0, window, token: windows[window][position] }).collect();
            // The first stage computes the same for all: only what passes a codec differs.
            let logits = self.step(&rows, position, runs)?;
            for (window, lossless) in logits[..windows.len()].iter().enumerate() {
                for (run, sums) in self.sums.iter_mut().enumerate() {
                    sums.compare(lossless, &logits[(run + 1) * windows.len() + window]);
                }
            }
            tick();
        }
        self.continue_greedily(windows, length, tick)?;
        for stage in &mut self.stages {
            (0..GROUP * runs).for_each(|sequence| stage.release(sequence as SequenceId));
        }
        Ok(())
    }

    fn continue_greedily(
        &mut self,
        windows: &[Vec<u32>],
        length: usize,
        tick: &mut impl FnMut(),
    ) -> Result<(), StageError> {
        let (runs, count) = (self.codecs.len() + 1, continuation(length));
        if count == 0 {
            return Ok(());
        }
        let token = |run, window: usize| Token { run, window, token: windows[window][GREEDY_FROM] };
        let mut rows: Vec<Token> =
            (0..runs).flat_map(|run| (0..windows.len()).map(move |window| token(run, window))).collect();
        for row in rows.iter().filter(|row| row.run > 0) {
            self.stages[0].share(row.window as SequenceId, row.sequence(), GREEDY_FROM)?;
        }
        let mut same = vec![0; rows.len()];
        for step in 0..count {
            let logits = self.step(&rows, GREEDY_FROM + step, 1)?;
            rows.iter_mut().zip(&logits).for_each(|(row, logits)| row.token = greatest(logits).0);
            for at in windows.len()..rows.len() {
                if same[at] == step && rows[at].token == rows[rows[at].window].token {
                    same[at] = step + 1;
                }
            }
            tick();
        }
        for (row, same) in rows.iter().zip(same).filter(|(row, _)| row.run > 0) {
            let sums = &mut self.sums[row.run - 1];
            sums.answers += 1;
            sums.greedy += same as f64 / count as f64;
        }
        Ok(())
    }

    /// Computes one row per entry at a position. `runs` > 1: the rows are of run 0, and all runs continue from the first
    /// stage's result. Returns logits, run by run.
    fn step(&mut self, rows: &[Token], position: usize, runs: usize) -> Result<Vec<Vec<f32>>, StageError> {
        let tokens: Vec<[u32; 1]> = rows.iter().map(|row| [row.token]).collect();
        let inputs = rows.iter().zip(&tokens).map(|(row, token)| (row.sequence(), RowsIn::Tokens(token)));
        let mut outputs = forward(&mut *self.stages[0], &mut self.threads, inputs, position)?;
        let spread: Vec<Token> =
            (0..runs).flat_map(|run| rows.iter().map(move |row| Token { run: row.run + run, ..*row })).collect();
        outputs = (0..runs).flat_map(|_| outputs.iter().cloned()).collect();
        for stage in &mut self.stages[1..] {
            for (row, hidden) in spread.iter().zip(&mut outputs) {
                if let Some(codec) = row.run.checked_sub(1).map(|at| self.codecs[at]) {
                    let coded = codec.encode(self.width, hidden);
                    *hidden = codec.decode(self.width, &coded).map_err(|e| StageError::Input(e.to_string()))?;
                }
            }
            let inputs = spread.iter().zip(&outputs).map(|(row, hidden)| (row.sequence(), RowsIn::hidden(hidden)));
            outputs = forward(&mut **stage, &mut self.threads, inputs, position)?;
        }
        Ok(outputs)
    }

    fn figures(&self, cuts: &[usize]) -> Vec<Quality> {
        let of = |(codec, sums): (&Codec, &Sums)| {
            let positions = sums.positions.max(1) as f64;
            Quality {
                codec: codec.name().to_owned(),
                cuts: cuts.to_vec(),
                positions: sums.positions,
                kl_mean: sums.kl / positions,
                kl_max: sums.kl_max,
                top1: 1.0 - sums.flips as f64 / positions,
                flips: sums.flips,
                flip_margin_max: sums.flip_margin_max,
                greedy: if sums.answers == 0 { 1.0 } else { sums.greedy / sums.answers as f64 },
            }
        };
        self.codecs.iter().zip(&self.sums).map(of).collect()
    }
}

/// One row per sequence, at the same position. Returns hidden rows or logits.
fn forward<'r>(
    stage: &mut dyn Stage,
    threads: &mut Threads,
    inputs: impl Iterator<Item = (SequenceId, RowsIn<'r>)>,
    position: usize,
) -> Result<Vec<Vec<f32>>, StageError> {
    let batch: Vec<Rows<'_>> =
        inputs.map(|(sequence, input)| Rows { sequence, position, input, output: RequestedOutput::Logits }).collect();
    let numbers = |output| match output {
        RowsOut::Hidden(rows) => Ok(rows.to_vec()),
        RowsOut::Logits(numbers) | RowsOut::Embedding(numbers) => Ok(numbers),
        RowsOut::Encoded(_) | RowsOut::Token(_) | RowsOut::Tokens(_) | RowsOut::Nothing => {
            Err(StageError::Device("the stage returned neither rows nor logits".into()))
        }
    };
    stage.forward(threads, &batch)?.into_iter().map(numbers).collect()
}

impl Sums {
    fn compare(&mut self, lossless: &[f32], coded: &[f32]) {
        self.positions += 1;
        let divergence = divergence(lossless, coded);
        self.kl += divergence;
        // `max` would hide what is not a number.
        self.kl_max = if divergence <= self.kl_max { self.kl_max } else { divergence };
        let (token, margin) = greatest(lossless);
        if greatest(coded).0 != token {
            self.flips += 1;
            self.flip_margin_max = self.flip_margin_max.max(margin);
        }
    }
}

/// The most likely token (of equal ones the lowest), and by how much its logit exceeds the next.
fn greatest(logits: &[f32]) -> (u32, f64) {
    let (mut at, mut first, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > first {
            (at, second, first) = (token as u32, first, logit);
        } else if logit > second {
            second = logit;
        }
    }
    (at, f64::from(first) - f64::from(second))
}

/// Kullback-Leibler divergence of the distribution of `other` from that of `logits`, in nats.
fn divergence(logits: &[f32], other: &[f32]) -> f64 {
    let norm = |logits: &[f32]| {
        let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        most + logits.iter().map(|&logit| (f64::from(logit) - most).exp()).sum::<f64>().ln()
    };
    let (p, q) = (norm(logits), norm(other));
    let term = |(&a, &b): (&f32, &f32)| {
        let (log_p, log_q) = (f64::from(a) - p, f64::from(b) - q);
        // A token without probability adds nothing.
        if log_p < -700.0 { 0.0 } else { log_p.exp() * (log_p - log_q) }
    };
    logits.iter().zip(other).map(term).sum()
}

#[cfg(test)]
mod tests;
