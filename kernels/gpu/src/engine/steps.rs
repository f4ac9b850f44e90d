//! Runs steps of few rows as recorded graphs: one upload, one graph replay and one read per step.
//!
//! A step that samples on the device writes its tokens to the input of the next step, which can thus be queued before the host has
//! them.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cubecl::server::Handle;
use kernels::order::POSITIONS;
use kernels_models::decoder::{PassInput, PassOutput, QUEUED_MAX, RowAt};
use kernels_models::hidden_rows::Piece;
use kernels_models::sampler::SamplerSettings;
use kernels_models::stage::{StageError, StageOptions};
use kernels_models::weights::ModelConfig;

use super::GpuEngine;
use super::handover::Handover;
use super::memory::Memory;
use super::spill::Mover;
use crate::attention::Places;
use crate::boundary::RowEncoder;
use crate::draw::{DECIDED, DRAWN_MAX, DRAWN_WORDS, DrawScratch, PARAMETERS, draw, draws, parameters};
use crate::error::failed;
use crate::graph::{Buffer, Graph, Graphs, Mark, Pinned};
use crate::peers::{Kept, has_peers};
use crate::platform::Platform;

/// Maximum rows of a step that runs as a graph although the host reads its rows or logits. Passes of more rows are mostly chunks of
/// prompts, each of another length, and a graph that runs once does not pay.
pub(super) const FEW: usize = 8;
/// Maximum recorded steps: those of requests that come and go while the contexts grow. The least recently used one is dropped.
const GRAPHS_MAX: usize = 128;

/// Recorded steps with their input and output buffers.
pub(super) struct Steps {
    /// First, so dropped first: it waits for queued copies, which use the memory below.
    pub(super) graphs: Graphs,
    recorded: BTreeMap<Shape, RecordedStep>,
    /// Number of steps so far.
    steps: u64,
    /// All inputs of a step, in the order of [`Input`].
    pub(super) words: Buffer,
    /// Hidden rows, updated in place by each layer.
    pub(super) hidden: Handle,
    /// Logits if the stage ends with the output head, else `hidden`.
    pub(super) output: Buffer,
    /// The encoded rows of a step, if an encoding is asked for.
    encoded: Option<Buffer>,
    pub(super) sent: Pinned,
    pub(super) got: Pinned,
    pub(super) done: Mark,
    draws: Option<Draws>,
    /// Rows from and for other GPUs of this machine, if there are any.
    pub(super) handover: Option<Handover>,
    /// Set if pages may move to RAM.
    pub(super) mover: Option<Mover>,
    /// Time that the host waited for steps.
    pub(super) waited: Duration,
}

/// A recorded step.
struct RecordedStep {
    graph: Graph,
    /// Number of the step that used it last.
    used: u64,
}

/// Key of a recorded step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    rows: usize,
    /// Rows whose logits are requested.
    wanted: usize,
    /// Pages per sequence.
    blocks: usize,
    /// Tokens are sampled on the device.
    drawn: bool,
    /// Hidden rows are encoded.
    encoded: bool,
}

/// Buffers of steps that sample on the device, for a stage with the output head.
struct Draws {
    scratch: DrawScratch,
    /// `[rows, DRAWN_WORDS]`
    drawn: Buffer,
    slots: [Slot; QUEUED_MAX],
    /// Slot of the oldest queued step.
    oldest: usize,
    /// Number of rows of each queued step, the oldest first.
    queued: Vec<usize>,
}

/// Host memory of a queued step.
struct Slot {
    sent: Pinned,
    got: Pinned,
    done: Mark,
}

/// Parts of a step's input, each at a multiple of 64 words. Tokens come first, so that a step whose tokens are already on the
/// device is sent without them.
#[derive(Clone, Copy)]
pub(super) enum Input {
    Tokens,
    Rows,
    Chosen,
    Settings,
    Tables,
    Hidden,
}

/// Words of a row's place: its position, and the start of its page table.
const ROW_WORDS: usize = 2;

impl Input {
    /// First word of a part; `most`: pages per page table.
    const fn start(self, most: usize) -> usize {
        match self {
            Self::Tokens => 0,
            Self::Rows => DRAWN_MAX.next_multiple_of(64),
            Self::Chosen => Self::Rows.start(most) + (ROW_WORDS * DRAWN_MAX).next_multiple_of(64),
            Self::Settings => Self::Chosen.start(most) + DRAWN_MAX.next_multiple_of(64),
            Self::Tables => Self::Settings.start(most) + (DRAWN_MAX * PARAMETERS).next_multiple_of(64),
            Self::Hidden => Self::Tables.start(most) + (DRAWN_MAX * most).next_multiple_of(64),
        }
    }
}

/// A part of the input buffer.
pub(super) fn part(words: &Handle, part: Input, most: usize) -> Handle {
    words.clone().offset_start(4 * part.start(most) as u64)
}

/// Writes rows to the input of a step from word `at` on. Returns the end.
fn put_rows(words: &mut [u32], mut at: usize, pieces: &[Piece<'_>]) -> usize {
    for piece in pieces {
        words[at..][..piece.rows.len()].copy_from_slice(bytemuck::cast_slice(piece.rows));
        at += piece.rows.len();
    }
    at
}

/// Waits for a mark and adds the time to `wait_time`.
pub(super) fn wait(graphs: &Graphs, mark: &Mark, waited: &mut Duration) -> Result<(), StageError> {
    let start = Instant::now();
    let result = graphs.wait(mark);
    *waited += start.elapsed();
    result
}

impl Steps {
    /// `embedded`: the output buffer of the embedding, for a stage that begins with it.
    pub(super) fn new<R: Platform>(
        graphs: Graphs,
        memory: &Memory<'_, R>,
        config: &ModelConfig,
        options: &StageOptions,
        embedded: Option<&Handle>,
    ) -> Result<Self, StageError> {
        let most = options.context.div_ceil(POSITIONS);
        let last = config.has_head(&options.layers);
        let rows = if last { DRAWN_MAX } else { FEW };
        let len = Input::Hidden.start(most) + if embedded.is_some() { 0 } else { rows * config.width };
        let words = memory.buffer(len * 4, "rows of steps")?;
        let hidden = embedded.cloned().unwrap_or_else(|| part(&words, Input::Hidden, most));
        let (output, numbers) = if last {
            (memory.buffer(rows * config.vocab * 4, "logits of steps")?, FEW * config.vocab)
        } else {
            (hidden.clone(), FEW * config.width)
        };
        let (sent, got, done) = (graphs.pinned(len)?, graphs.pinned(numbers)?, graphs.mark()?);
        let draws = last.then(|| Draws::new(&graphs, memory, config.vocab, len)).transpose()?;
        let (words, output) = (graphs.buffer(words)?, graphs.buffer(output)?);
        let sides = [options.layers.start > 0, options.layers.end < config.layers];
        let handover = (has_peers() && sides.contains(&true))
            .then(|| Handover::new(&graphs, memory, config.width, sides))
            .transpose()?;
        Ok(Self {
            graphs,
            recorded: BTreeMap::new(),
            steps: 0,
            words,
            hidden,
            output,
            encoded: None,
            sent,
            got,
            done,
            draws,
            handover,
            mover: None,
            waited: Duration::ZERO,
        })
    }
}

impl Steps {
    /// Bytes of device memory for rows from and to other devices.
    pub(super) fn handover_bytes(&self) -> u64 {
        self.handover.as_ref().map_or(0, Handover::bytes)
    }

    /// Forgets the steps that encode their rows.
    pub(super) fn forget_encoded(&mut self) {
        self.encoded = None;
        self.recorded.retain(|shape, _| !shape.encoded);
    }

    /// Prepares steps that encode their rows.
    pub(super) fn prepare_encoded<R: Platform>(
        &mut self,
        memory: &Memory<'_, R>,
        encoder: &RowEncoder,
    ) -> Result<(), StageError> {
        let rows = memory.buffer(4 * FEW * encoder.words(), "encoded rows of steps")?;
        self.encoded = Some(self.graphs.buffer(rows)?);
        Ok(())
    }
}

impl Draws {
    /// `len`: words of the inputs of a step.
    fn new<R: Platform>(graphs: &Graphs, memory: &Memory<'_, R>, vocab: usize, len: usize) -> Result<Self, StageError> {
        let slot = || -> Result<Slot, StageError> {
            let (sent, got) = (graphs.pinned(len)?, graphs.pinned(DRAWN_MAX * DRAWN_WORDS)?);
            Ok(Slot { sent, got, done: graphs.mark()? })
        };
        Ok(Self {
            scratch: memory.exact(|| DrawScratch::new(memory.client, vocab))?,
            drawn: graphs.buffer(memory.buffer(4 * DRAWN_MAX * DRAWN_WORDS, "tokens of steps")?)?,
            slots: [slot()?, slot()?],
            oldest: 0,
            queued: Vec::with_capacity(QUEUED_MAX),
        })
    }
}

impl<R: Platform> GpuEngine<R> {
    /// Runs `work` with both the engine and its steps. Waits first for kernels that CubeCL launched on its own stream.
    pub(super) fn with_steps<T>(
        &mut self,
        work: impl FnOnce(&Self, &mut Steps) -> Result<T, StageError>,
    ) -> Result<T, StageError> {
        let mut steps = self.steps.take().ok_or_else(|| failed("this device cannot replay steps"))?;
        let result = (|| {
            if std::mem::take(&mut self.launched) {
                steps.graphs.join()?;
            }
            work(self, &mut steps)
        })();
        self.steps = Some(steps);
        result
    }

    /// Pages of the longest sequence, rounded up to a power of two so that few shapes are recorded.
    pub(super) fn blocks_of(&self, rows: &[RowAt]) -> usize {
        let blocks = rows.iter().map(|row| row.position / POSITIONS + 1).max().unwrap_or(1);
        blocks.next_power_of_two().min(self.options.context.div_ceil(POSITIONS))
    }

    /// Records a step of this shape unless it is recorded already.
    fn record(&self, steps: &mut Steps, shape: Shape) -> Result<(), StageError> {
        steps.steps += 1;
        let used = steps.steps;
        if let Some(recorded) = steps.recorded.get_mut(&shape) {
            recorded.used = used;
            return Ok(());
        }
        if steps.recorded.len() >= GRAPHS_MAX {
            // Not one that is queued: those were used last.
            let oldest = steps.recorded.iter().min_by_key(|(_, recorded)| recorded.used).map(|(shape, _)| *shape);
            oldest.and_then(|oldest| steps.recorded.remove(&oldest));
        }
        let most = self.options.context.div_ceil(POSITIONS);
        let (words, places) =
            (&steps.words.handle, self.recorded_places(&steps.words.handle, shape.rows, shape.blocks));
        let [tokens, chosen, settings] =
            [Input::Tokens, Input::Chosen, Input::Settings].map(|of| part(words, of, most));
        let (hidden, output, draws) = (&steps.hidden, &steps.output.handle, &steps.draws);
        let encoded = &steps.encoded;
        let graph = steps.graphs.record(|client| {
            self.layers(client, self.table.as_ref().map(|_| &tokens), &places, hidden);
            self.logits(client, hidden, &chosen, shape.wanted, output);
            if let (true, Some(encoder), Some(rows)) = (shape.encoded, &self.encoder, encoded) {
                encoder.encode(client, self.able, hidden, shape.rows, &rows.handle);
            }
            if let (true, Some(Draws { scratch, drawn, .. })) = (shape.drawn, draws) {
                draw(client, self.able, scratch, output, &settings, shape.rows, &tokens, &drawn.handle);
            }
        })?;
        steps.recorded.insert(shape, RecordedStep { graph, used });
        Ok(())
    }

    /// The places of the rows of recorded steps, whose input is in `words`.
    pub(super) fn recorded_places(&self, words: &Handle, rows: usize, blocks: usize) -> Places {
        let most = self.options.context.div_ceil(POSITIONS);
        let [rows_at, tables] = [Input::Rows, Input::Tables].map(|of| part(words, of, most));
        Places { count: rows, rows: rows_at, tables, tables_len: DRAWN_MAX * most, blocks }
    }

    /// Writes the inputs that every step has: positions and page tables of its rows, and the rows whose logits are requested.
    fn write_rows(&self, words: &mut [u32], rows: &[RowAt], wanted: impl Iterator<Item = usize>) {
        let most = self.options.context.div_ceil(POSITIONS);
        let (table, tables) = self.tables(rows, Some(most));
        words[Input::Rows.start(most)..][..table.len()].copy_from_slice(&table);
        words[Input::Tables.start(most)..][..tables.len()].copy_from_slice(&tables);
        for (word, row) in words[Input::Chosen.start(most)..].iter_mut().zip(wanted) {
            *word = row as u32;
        }
    }

    /// Writes the input of a pass that reads its results. Returns the number of words. `None`: its rows are on the device already.
    pub(super) fn write_pass(
        &self,
        words: &mut [u32],
        rows: &[RowAt],
        input: Option<PassInput<'_>>,
        wanted: &[usize],
    ) -> usize {
        self.write_rows(words, rows, wanted.iter().copied());
        let mut len = Input::Hidden.start(self.options.context.div_ceil(POSITIONS));
        match input {
            Some(PassInput::Tokens(tokens)) => words[..tokens.len()].copy_from_slice(tokens),
            Some(PassInput::Hidden(pieces)) => len = put_rows(words, len, pieces),
            None => {}
        }
        len
    }

    /// Queues a pass of few rows as a graph. Returns what [`Self::replayed`] needs: the number of words, and where the device keeps
    /// them. At most one may be queued.
    pub(super) fn replay(
        &mut self,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
    ) -> Result<(usize, Option<Kept>), StageError> {
        let blocks = self.blocks_of(rows);
        self.with_steps(|engine, steps| {
            let encoded = engine.encoder().is_some();
            let shape = Shape { rows: rows.len(), wanted: wanted.len(), blocks, drawn: false, encoded };
            engine.record(steps, shape)?;
            let input = if engine.bring_input(steps, Some(&input)) { None } else { Some(input) };
            let words = steps.sent.words();
            let len = engine.write_pass(words, rows, input, wanted);
            let (from, count) = match (engine.encoder(), &steps.encoded) {
                (Some(encoder), Some(encoded)) => (encoded, rows.len() * encoder.words()),
                _ if engine.head.is_some() => (&steps.output, wanted.len() * engine.config.vocab),
                _ => (&steps.output, rows.len() * engine.config.width),
            };
            let got = &mut steps.got.words()[..count];
            let graph = &steps.recorded[&shape].graph;
            let handover = steps.handover.as_ref().filter(|_| !encoded);
            let (also, kept) = handover.and_then(Handover::claim).unzip();
            steps.graphs.queue((&words[..len], &steps.words, 0), graph, (got, from, also), &steps.done)?;
            Ok((count, kept))
        })
    }

    /// Copies a step's rows from other GPUs of this machine, if these hold them all.
    fn bring_input(&self, steps: &mut Steps, input: Option<&PassInput<'_>>) -> bool {
        let Some(PassInput::Hidden(pieces)) = input else { return false };
        let start = Input::Hidden.start(self.options.context.div_ceil(POSITIONS));
        let to = steps.words.address() + 4 * start as u64;
        steps.handover.as_mut().is_some_and(|handover| handover.bring(&steps.graphs, pieces, to))
    }

    /// Waits for the pass that [`Self::replay`] queued.
    pub(super) fn replayed(&mut self, words: usize, kept: Option<Kept>) -> Result<PassOutput, StageError> {
        let mut steps = self.steps.take().ok_or_else(|| failed("this device cannot replay steps"))?;
        let waited = wait(&steps.graphs, &steps.done, &mut steps.waited);
        let output = waited.map(|()| self.output_of(bytemuck::cast_slice(&steps.got.words()[..words]), kept));
        self.steps = Some(steps);
        output
    }

    /// Whether the device samples the tokens of steps with this number of rows and these settings.
    pub(super) fn draws_rows(&self, rows: usize, settings: &SamplerSettings) -> bool {
        let able = self.steps.as_ref().is_some_and(|steps| steps.draws.is_some());
        able && rows <= DRAWN_MAX && draws(settings, self.config.vocab)
    }

    /// See [`kernels_models::decoder::Engine::queue`].
    pub(super) fn queue_step(
        &mut self,
        rows: &[RowAt],
        input: Option<PassInput<'_>>,
        settings: &[(SamplerSettings, u32)],
    ) -> Result<(), StageError> {
        let (blocks, most) = (self.blocks_of(rows), self.options.context.div_ceil(POSITIONS));
        self.with_steps(|engine, steps| {
            let shape = Shape { rows: rows.len(), wanted: rows.len(), blocks, drawn: true, encoded: false };
            engine.record(steps, shape)?;
            let brought = engine.bring_input(steps, input.as_ref());
            let Some(draws) = &mut steps.draws else { return Err(failed("this stage cannot sample tokens")) };
            if draws.queued.len() == QUEUED_MAX {
                return Err(failed(format!("{QUEUED_MAX} steps are queued already")));
            }
            let slot = &mut draws.slots[(draws.oldest + draws.queued.len()) % QUEUED_MAX];
            let words = slot.sent.words();
            engine.write_rows(words, rows, 0..rows.len());
            for (i, (settings, position)) in settings.iter().enumerate() {
                words[Input::Settings.start(most) + i * PARAMETERS..][..PARAMETERS].copy_from_slice(&parameters(
                    settings,
                    *position,
                    engine.config.vocab,
                ));
            }
            let (mut start, mut end) = (Input::Rows.start(most), Input::Hidden.start(most));
            match input {
                Some(PassInput::Tokens(tokens)) => {
                    words[..tokens.len()].copy_from_slice(tokens);
                    start = 0;
                }
                Some(PassInput::Hidden(pieces)) if !brought => end = put_rows(words, end, pieces),
                Some(PassInput::Hidden(_)) => {}
                None => {}
            }
            let sent = (&words[start..end], &steps.words, start);
            let got = (&mut slot.got.words()[..rows.len() * DRAWN_WORDS], &draws.drawn, None);
            steps.graphs.queue(sent, &steps.recorded[&shape].graph, got, &slot.done)?;
            draws.queued.push(rows.len());
            Ok(())
        })
    }

    /// See [`kernels_models::decoder::Engine::collect`].
    pub(super) fn collect_step(&mut self) -> Result<Vec<Option<u32>>, StageError> {
        self.with_steps(|_, steps| {
            let none = || failed("no step is queued");
            let draws = steps.draws.as_mut().ok_or_else(none)?;
            if draws.queued.is_empty() {
                return Err(none());
            }
            let (rows, slot) = (draws.queued.remove(0), &mut draws.slots[draws.oldest]);
            draws.oldest = (draws.oldest + 1) % QUEUED_MAX;
            wait(&steps.graphs, &slot.done, &mut steps.waited)?;
            let drawn = slot.got.words()[..rows * DRAWN_WORDS].chunks_exact(DRAWN_WORDS);
            Ok(drawn.map(|words| (words[1] == DECIDED).then_some(words[0])).collect())
        })
    }
}
