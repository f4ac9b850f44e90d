//! The decoder: implements [`Stage`] on top of any [`Engine`]. It validates batches, splits them into forward passes, tracks
//! open sequences, samples tokens and queues the next decode step ahead of its request.
//!
//! This logic exists once; an [`Engine`] only computes passes. Next: `model.rs`, the CPU engine.
use std::collections::BTreeMap;
use std::ops::Range;

use kernels::boundary::Codec;
use kernels::order::rms_norm;
use kernels::threads::Threads;
use parking_lot::Mutex;

use crate::hidden_rows::{OnDevice, Piece, cut};
use crate::sampler::{Sampler, SamplerSettings};
use crate::stage::{
    Draw, Drawn, Logprobs, RequestedOutput, ResidentBytes, Rows, RowsIn, RowsOut, SequenceId, Stage, StageError,
    StageOptions, Submitted,
};
use crate::weights::{ModelConfig, ModelFile};

mod ahead;
mod hidden;

use ahead::{Ahead, Step};

/// One row of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowAt {
    /// Sequence whose KV cache the row attends to.
    pub sequence: SequenceId,
    /// Position in the sequence.
    pub position: usize,
}

/// Input rows of a pass.
#[derive(Clone, Copy, Debug)]
pub enum PassInput<'a> {
    /// One token id per row, each within the vocabulary (stage with layer 0).
    Tokens(&'a [u32]),
    /// `[rows, width]`, in pieces (any other stage).
    Hidden(&'a [Piece<'a>]),
}

/// Output of a pass.
#[derive(Debug)]
pub enum PassOutput {
    /// Logits `[requested, vocabulary]`, or hidden rows `[rows, width]`.
    Numbers(Vec<f32>),
    /// Hidden rows, which the device holds too.
    Held(Vec<f32>, OnDevice),
    /// Hidden rows in the encoding that [`Engine::encode_rows`] asked for.
    Encoded(Vec<u8>),
}

impl PassOutput {
    /// The numbers of a pass whose rows no encoding was asked for.
    ///
    /// # Errors
    /// The engine encoded them nevertheless.
    fn numbers(self) -> Result<Vec<f32>, StageError> {
        match self {
            Self::Numbers(numbers) | Self::Held(numbers, _) => Ok(numbers),
            Self::Encoded(_) => Err(StageError::Device("expected numbers from the engine, found encoded rows".into())),
        }
    }
}

/// Computes the layers of a stage on one device.
pub trait Engine: Send {
    /// Maximum rows per pass: enough to reuse each weight many times, few enough that scratch stays small.
    const ROWS_PER_PASS: usize;

    /// Allocates cache for the first `n` positions of each `(sequence, n)`; later positions are discarded. Sequences may be
    /// new; no sequence is listed twice.
    ///
    /// # Errors
    /// Not enough memory for all of them; no sequence has changed.
    fn reserve(&mut self, requested: &[(SequenceId, usize)]) -> Result<(), StageError>;

    /// Gives a sequence the cached first `positions` of another, which has them, instead of what it had. The same positions
    /// may later be written again through either sequence, with the same bits.
    fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize);

    /// Frees the cache of a sequence.
    fn release(&mut self, sequence: SequenceId);

    /// Allows the engine to move cached positions that are not computed to this many bytes of RAM. Returns the number of positions
    /// that fit there; 0 if this engine's cache is in RAM already.
    fn use_ram(&mut self, _bytes: u64) -> usize {
        0
    }

    /// Asks for hidden rows in an encoding from now on. An engine that has no kernels for it returns numbers, which the decoder
    /// then encodes to the same bytes on the host. No pass may be queued.
    fn encode_rows(&mut self, _codec: Codec) {}

    /// Computes rows whose positions are reserved; rows of one sequence are in position order. Returns the logits of the rows in
    /// `requested` (ascending) if the stage has the output head, else all hidden rows. `None`: the pass is queued, and
    /// [`Engine::collect_pass`] returns them.
    ///
    /// # Errors
    /// The device failed.
    fn pass(
        &mut self,
        threads: &mut Threads,
        rows: &[RowAt],
        input: PassInput<'_>,
        requested: &[usize],
    ) -> Result<Option<PassOutput>, StageError>;

    /// Waits for the oldest queued pass and returns its output.
    ///
    /// # Errors
    /// The device failed.
    fn collect_pass(&mut self) -> Result<PassOutput, StageError> {
        Err(StageError::Device("this engine queues no passes".into()))
    }

    /// Whether [`Engine::queue`] accepts a step with this many rows and these sampler settings.
    fn can_sample(&self, _rows: usize, _settings: &SamplerSettings) -> bool {
        false
    }

    /// Queues a decode step and returns before it is computed: one row per sequence, positions reserved, one token sampled per
    /// row. `input`: its rows; `None`, for a stage with layer 0: the tokens sampled by the previously queued step, row by row. At
    /// most [`QUEUED_MAX`] steps are queued.
    ///
    /// # Errors
    /// The device failed.
    fn queue(
        &mut self,
        _rows: &[RowAt],
        _input: Option<PassInput<'_>>,
        _draws: &[(SamplerSettings, u32)],
    ) -> Result<(), StageError> {
        Err(StageError::Device("this engine queues no steps".into()))
    }

    /// Waits for the oldest queued step and returns its sampled tokens. `None` for a row that the device left undecided: its
    /// logits are invalid, or too many tokens are almost equally likely.
    ///
    /// # Errors
    /// The device failed.
    fn collect(&mut self) -> Result<Vec<Option<u32>>, StageError> {
        Err(StageError::Device("this engine queues no steps".into()))
    }

    /// Bytes resident in memory: weights, and caches and scratch.
    fn resident_bytes(&self) -> ResidentBytes;

    /// Numerics id; see [`Stage::numerics`].
    fn numerics(&self) -> &str;
}

/// Sequences share positions in multiples of this: whole pages of every engine.
pub const SHARED_POSITIONS: usize = 128;

/// Maximum queued steps: the requested one and the one after it.
pub const QUEUED_MAX: usize = 2;

/// A range of a model's layers on an engine.
#[derive(Debug)]
pub struct Decoder<E> {
    layers: Range<usize>,
    /// The range includes the last layer of the model.
    last: bool,
    /// Of the last stage of a model for embeddings.
    pooling: Option<Pooling>,
    width: usize,
    vocab: usize,
    context: usize,
    /// Encoding of hidden rows.
    codec: Codec,
    held: BTreeMap<SequenceId, usize>,
    /// The step that was queued ahead of its request.
    queued_next: Option<Ahead>,
    /// The submitted, unfinished batch.
    queued: Option<Queued>,
    /// One per thread; they grow as they are needed.
    samplers: Vec<Mutex<Sampler>>,
    engine: E,
}

/// Final norm of a model for embeddings. The host computes it, so that embeddings have the same bits on all devices.
#[derive(Debug)]
struct Pooling {
    norm: Vec<f32>,
    eps: f32,
}

impl Pooling {
    fn load(file: &ModelFile, layers: &Range<usize>) -> Result<Option<Self>, StageError> {
        let config = file.config();
        if !config.pooled || layers.end != config.layers {
            return Ok(None);
        }
        let norm = file.tensor("output_norm.weight");
        let norm = norm.ok_or_else(|| StageError::Input("tensor \"output_norm.weight\" is missing".into()))?;
        Ok(Some(Self { norm: norm.to_finite_f32()?, eps: config.norm_eps }))
    }
}

/// Validates options for a model before anything is loaded.
///
/// # Errors
/// Layers outside the model; zero sequences, positions or threads.
pub fn check_options(config: &ModelConfig, options: &StageOptions) -> Result<(), StageError> {
    let StageOptions { layers, sequences, context, threads, .. } = options;
    if layers.is_empty() || layers.end > config.layers {
        return Err(StageError::Input(format!("layers {layers:?}: the model has 0..{}", config.layers)));
    }
    if *sequences == 0 || *context == 0 || *threads == 0 {
        return Err(StageError::Input(format!(
            "expected at least one sequence, position and thread; found {sequences}, {context} and {threads}"
        )));
    }
    Ok(())
}

impl<E: Engine> Decoder<E> {
    /// Wraps `engine`, which has loaded `options.layers` of the file.
    ///
    /// # Errors
    /// The final norm of a model for embeddings is missing, or holds a non-finite number.
    pub fn new(file: &ModelFile, options: &StageOptions, engine: E) -> Result<Self, StageError> {
        let config = file.config();
        Ok(Self {
            layers: options.layers.clone(),
            last: options.layers.end == config.layers,
            pooling: Pooling::load(file, &options.layers)?,
            width: config.width,
            vocab: config.vocab,
            context: options.context,
            codec: Codec::Lossless,
            held: BTreeMap::new(),
            queued_next: None,
            queued: None,
            samplers: Vec::new(),
            engine,
        })
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The engine, for benchmarks. Waits for queued work first and discards its results.
    ///
    /// # Errors
    /// The device failed.
    pub fn engine_mut(&mut self) -> Result<&mut E, StageError> {
        self.abandon()?;
        self.forget_ahead()?;
        Ok(&mut self.engine)
    }

    /// Vocabulary size.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    fn embeds(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether the engine computes logits instead of hidden rows.
    fn has_head(&self) -> bool {
        self.last && self.pooling.is_none()
    }

    /// Validates a batch; nothing has changed if this fails.
    fn check(&self, batch: &[Rows<'_>]) -> Result<(), StageError> {
        let wrong = |what: String| Err(StageError::Input(what));
        let mut seen: Vec<SequenceId> = Vec::with_capacity(batch.len());
        for rows in batch {
            let sequence = rows.sequence;
            if seen.contains(&sequence) {
                return wrong(format!("sequence {sequence} occurs twice in one batch; merge its rows"));
            }
            seen.push(sequence);
            let count = self.count(rows)?;
            if let RequestedOutput::Tokens { drafts, .. } = rows.output
                && drafts >= count
            {
                return wrong(format!(
                    "sequence {sequence}: {drafts} drafts in {count} rows, expected fewer than rows"
                ));
            }
            let held = self.cached_positions(sequence);
            if rows.position > held {
                return wrong(format!(
                    "sequence {sequence}: rows begin at position {}, but {held} are cached; replay from {held}",
                    rows.position
                ));
            }
            if rows.position.checked_add(count).is_none_or(|end| end > self.context) {
                return wrong(format!(
                    "sequence {sequence}: {count} rows at position {} exceed the context of {}",
                    rows.position, self.context
                ));
            }
        }
        Ok(())
    }

    /// Number of rows of an entry. Checks their kind and shape.
    fn count(&self, rows: &Rows<'_>) -> Result<usize, StageError> {
        let count = match rows.input {
            RowsIn::Tokens(tokens) if self.embeds() => {
                if let Some(token) = tokens.iter().find(|t| **t as usize >= self.vocab) {
                    return Err(StageError::Input(format!("expected a token id below {}, found {token}", self.vocab)));
                }
                tokens.len()
            }
            RowsIn::Hidden(hidden) if !self.embeds() => {
                if !hidden.rows.len().is_multiple_of(self.width) {
                    let found = hidden.rows.len();
                    return Err(StageError::Input(format!("expected rows of {} numbers, found {found}", self.width)));
                }
                hidden.rows.len() / self.width
            }
            RowsIn::Tokens(_) => {
                return Err(StageError::Input("expected hidden rows, found tokens: the stage has no layer 0".into()));
            }
            RowsIn::Hidden(_) => {
                return Err(StageError::Input("expected tokens, found hidden rows: the stage has layer 0".into()));
            }
        };
        if count == 0 {
            return Err(StageError::Input(format!("no rows for sequence {}", rows.sequence)));
        }
        Ok(count)
    }
}

/// A batch in flight on a device.
#[derive(Debug)]
enum Queued {
    /// A step whose tokens the device samples, and the step queued behind it.
    Step { next: Option<Step> },
    /// Forward passes.
    Passes(Passes),
}

/// A token to draw on the host.
struct DrawTask<'a> {
    /// Batch entry.
    entry: usize,
    logits: &'a [f32],
    /// Position of the row, for errors.
    position: usize,
    draw: Draw<'a>,
}

/// A batch split into passes, with the output of each computed pass.
#[derive(Debug)]
struct Passes {
    joined: Joined,
    outputs: Vec<Option<PassOutput>>,
}

/// The rows of a batch one after another, from which passes are sliced.
#[derive(Debug, Default)]
struct Joined {
    rows: Vec<RowAt>,
    /// Batch entry of each row.
    entries: Vec<usize>,
    /// Rows whose logits are requested.
    requested: Vec<usize>,
}

impl Joined {
    fn of(batch: &[Rows<'_>], counts: &[usize]) -> Self {
        let mut joined = Self::default();
        for (entry, (rows, &count)) in batch.iter().zip(counts).enumerate() {
            let at = |row| RowAt { sequence: rows.sequence, position: rows.position + row };
            joined.rows.extend((0..count).map(at));
            joined.entries.resize(joined.rows.len(), entry);
            let requested = match rows.output {
                RequestedOutput::Nothing => 0,
                RequestedOutput::Logits | RequestedOutput::Token(_) => 1,
                RequestedOutput::Tokens { drafts, .. } => (drafts + 1).min(count),
            };
            joined.requested.extend(joined.rows.len() - requested..joined.rows.len());
        }
        joined
    }

    /// Rows of a pass whose logits are requested, relative to its first row.
    fn requested_of(&self, pass: &Range<usize>) -> Vec<usize> {
        self.requested.iter().filter(|row| pass.contains(row)).map(|row| row - pass.start).collect()
    }
}

impl<E: Engine> Decoder<E> {
    /// Reserves cache for a batch and records the new lengths.
    fn reserve(&mut self, batch: &[Rows<'_>], counts: &[usize]) -> Result<(), StageError> {
        let ends: Vec<(SequenceId, usize)> =
            batch.iter().zip(counts).map(|(rows, count)| (rows.sequence, rows.position + count)).collect();
        if self.engine.reserve(&ends).is_err() {
            // Steps queued ahead may have taken pages for positions that were never used.
            let used: Vec<(SequenceId, usize)> = self.held.iter().map(|(&sequence, &end)| (sequence, end)).collect();
            self.engine.reserve(&used)?;
            self.engine.reserve(&ends)?;
        }
        self.held.extend(ends);
        Ok(())
    }

    /// Starts all passes of a batch.
    fn begin(&mut self, threads: &mut Threads, batch: &[Rows<'_>], counts: &[usize]) -> Result<Passes, StageError> {
        let mut passes = Passes { joined: Joined::of(batch, counts), outputs: Vec::new() };
        let joined = &passes.joined;
        let (mut tokens, mut hidden) = (Vec::new(), Vec::new());
        for rows in batch {
            match rows.input {
                RowsIn::Tokens(more) => tokens.extend(more),
                RowsIn::Hidden(piece) => hidden.push(piece),
            }
        }
        for (index, rows) in joined.rows.chunks(E::ROWS_PER_PASS).enumerate() {
            let start = index * E::ROWS_PER_PASS;
            let pass = start..start + rows.len();
            let pieces = cut(&hidden, pass.start * self.width, pass.end * self.width);
            let input =
                if self.embeds() { PassInput::Tokens(&tokens[pass.clone()]) } else { PassInput::Hidden(&pieces) };
            let requested = if self.has_head() { joined.requested_of(&pass) } else { Vec::new() };
            match self.engine.pass(threads, rows, input, &requested) {
                Ok(output) => passes.outputs.push(output),
                Err(error) => {
                    // Drain queued passes, so that a later batch does not collect their output.
                    let _ = self.arrive(passes.outputs);
                    return Err(error);
                }
            }
        }
        Ok(passes)
    }

    /// Waits for all queued passes of a batch, even if one fails.
    fn arrive(&mut self, outputs: Vec<Option<PassOutput>>) -> Result<Vec<PassOutput>, StageError> {
        let arrived: Vec<_> =
            outputs.into_iter().map(|output| output.map_or_else(|| self.engine.collect_pass(), Ok)).collect();
        arrived.into_iter().collect()
    }

    /// Assembles the results of a batch once its passes are computed.
    fn end(&mut self, threads: &mut Threads, batch: &[Rows<'_>], passes: Passes) -> Result<Vec<RowsOut>, StageError> {
        let Passes { joined, outputs } = passes;
        let outputs = self.arrive(outputs)?;
        if !self.last {
            return self.hidden_of(threads, &joined, outputs);
        }
        let numbers = outputs.into_iter().map(PassOutput::numbers).collect::<Result<Vec<_>, _>>()?;
        let mut out: Vec<RowsOut> = batch.iter().map(|_| RowsOut::Nothing).collect();
        let mut tasks = Vec::new();
        for (index, numbers) in numbers.iter().enumerate() {
            let start = index * E::ROWS_PER_PASS;
            let pass = start..(start + E::ROWS_PER_PASS).min(joined.rows.len());
            if let Some(Pooling { norm, eps }) = &self.pooling {
                for row in joined.requested_of(&pass) {
                    let hidden = &numbers[row * self.width..(row + 1) * self.width];
                    out[joined.entries[start + row]] = RowsOut::Embedding(rms_norm(hidden, norm, *eps));
                }
                continue;
            }
            for (logits, row) in numbers.chunks_exact(self.vocab).zip(joined.requested_of(&pass)) {
                let entry = joined.entries[start + row];
                let position = joined.rows[start + row].position;
                match batch[entry].output {
                    RequestedOutput::Token(draw) => tasks.push(DrawTask { entry, logits, position, draw }),
                    RequestedOutput::Tokens { draw, drafts } => {
                        let first = batch[entry].position + self.count(&batch[entry])? - 1 - drafts;
                        let draw = Draw { position: draw.position + (position - first) as u32, ..draw };
                        tasks.push(DrawTask { entry, logits, position, draw });
                    }
                    RequestedOutput::Logits => out[entry] = RowsOut::Logits(logits.to_vec()),
                    RequestedOutput::Nothing => {}
                }
            }
        }
        for (task, drawn) in tasks.iter().zip(self.draw(threads, &tasks)) {
            let drawn = drawn?;
            match (batch[task.entry].output, &mut out[task.entry]) {
                (RequestedOutput::Tokens { .. }, RowsOut::Tokens(tokens)) => tokens.push(drawn.token),
                (RequestedOutput::Tokens { .. }, empty) => *empty = RowsOut::Tokens(vec![drawn.token]),
                (_, empty) => *empty = RowsOut::Token(drawn),
            }
        }
        Ok(out)
    }

    /// Waits for a queued batch and discards its results.
    fn abandon(&mut self) -> Result<(), StageError> {
        match self.queued.take() {
            None => Ok(()),
            Some(Queued::Step { next }) => {
                let drawn = self.engine.collect().map(drop);
                next.map_or(Ok(()), |_| self.engine.collect().map(drop)).and(drawn)
            }
            Some(Queued::Passes(passes)) => self.arrive(passes.outputs).map(drop),
        }
    }

    /// Draws the tokens of a batch, each on one of the threads.
    fn draw(&mut self, threads: &mut Threads, tasks: &[DrawTask<'_>]) -> Vec<Result<Drawn, StageError>> {
        let missing = threads.count().saturating_sub(self.samplers.len());
        self.samplers.extend(std::iter::repeat_with(|| Mutex::new(Sampler::new())).take(missing));
        let slots: Vec<Mutex<Option<Result<Drawn, StageError>>>> = tasks.iter().map(|_| Mutex::new(None)).collect();
        let (samplers, layers) = (&self.samplers, &self.layers);
        threads.pool().run(tasks.len(), 1, &|thread, range| {
            let mut sampler = samplers[thread].lock();
            for (task, slot) in tasks[range.clone()].iter().zip(&slots[range]) {
                let DrawTask { logits, position, draw, .. } = *task;
                let token = sampler.sample(logits, &draw.settings, draw.position, &draw.changes);
                let token = token.map_err(|what| StageError::Logits { layers: layers.clone(), position, what });
                let logprobs = |token| draw.logprobs.map(|most| Logprobs::of(logits, token, most));
                *slot.lock() = Some(token.map(|token| Drawn { token, logprobs: logprobs(token) }));
            }
        });
        let lost = || Err(StageError::Device("a thread drew no token".into()));
        slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(lost)).collect()
    }
}

impl<E: Engine> Stage for Decoder<E> {
    fn submit(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Submitted, StageError> {
        self.check(batch)?;
        self.abandon()?;
        if let Some((step, input)) = self.step_of(batch) {
            let next = self.begin_step(batch, &step, &input)?;
            self.queued = Some(Queued::Step { next });
            return Ok(Submitted::Queued);
        }
        self.forget_ahead()?;
        let counts = batch.iter().map(|rows| self.count(rows)).collect::<Result<Vec<_>, _>>()?;
        self.reserve(batch, &counts)?;
        let passes = self.begin(threads, batch, &counts)?;
        if passes.outputs.iter().all(Option::is_some) {
            return self.end(threads, batch, passes).map(Submitted::Done);
        }
        self.queued = Some(Queued::Passes(passes));
        Ok(Submitted::Queued)
    }

    fn finish(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        match self.queued.take() {
            None => Err(StageError::Input("no batch is queued".into())),
            Some(Queued::Step { next }) => self.end_step(threads, batch, next),
            Some(Queued::Passes(passes)) => self.end(threads, batch, passes),
        }
    }

    fn encode_rows(&mut self, codec: Codec) {
        if !self.last {
            self.codec = codec;
            self.engine.encode_rows(codec);
        }
    }

    fn cached_positions(&self, sequence: SequenceId) -> usize {
        self.held.get(&sequence).copied().unwrap_or(0)
    }

    fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize) -> Result<(), StageError> {
        let held = self.cached_positions(from);
        if positions > held || !positions.is_multiple_of(SHARED_POSITIONS) || from == to {
            return Err(StageError::Input(format!(
                "sequence {to} cannot continue sequence {from} after {positions} positions: expected a multiple of \
                 {SHARED_POSITIONS} up to {held}, and another sequence"
            )));
        }
        self.engine.share(from, to, positions);
        self.held.insert(to, positions);
        Ok(())
    }

    fn release(&mut self, sequence: SequenceId) {
        if self.held.remove(&sequence).is_some() {
            self.engine.release(sequence);
        }
    }

    fn use_ram(&mut self, bytes: u64) -> usize {
        self.engine.use_ram(bytes)
    }

    fn resident_bytes(&self) -> ResidentBytes {
        self.engine.resident_bytes()
    }

    fn width(&self) -> usize {
        self.width
    }

    fn numerics(&self) -> &str {
        self.engine.numerics()
    }
}
