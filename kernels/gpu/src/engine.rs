//! The GPU inference engine: weights, KV cache and scratch of a model's layers, and the forward pass that their recipe describes.
//!
//! If the runtime has graphs, a step of few rows replays one graph (`engine/steps.rs`); other passes upload their rows and launch
//! kernel by kernel. Next: `kernels_models::decoder`, which turns an engine into a stage.
use std::collections::VecDeque;
use std::time::Instant;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::boundary::Codec;
use kernels::order::{Activation, POSITIONS};
use kernels::threads::Threads;
use kernels::tile::Layout;
use kernels_models::decoder::{self, Decoder, PassInput, PassOutput, RowAt};
use kernels_models::hidden_rows::Piece;
use kernels_models::ram::experts_in_ram;
use kernels_models::recipe::{LayerRecipe, Recipe};
use kernels_models::rotary::RotaryTables;
use kernels_models::sampler::SamplerSettings;
use kernels_models::stage::{self, ResidentBytes, SequenceId, StageError, StageOptions};
use kernels_models::weights::{ModelConfig, ModelFile};

use crate::arithmetic::Features;
use crate::attention::{Heads, LayerHeads, Pages, Places, attend, place};
use crate::boundary::RowEncoder;
use crate::error::{guarded, input};
use crate::load::{LoadPhases, Loader, Part, Weights, fill, timed};
use crate::pages::Pool;
use crate::platform::Platform;
use crate::product::operands::{Activations, Matrix, Target};
use crate::product::{gate_product, gates, product};
use crate::rows::{RowFormats, cap, embed, gated, norm, norm_add};

mod handover;
mod layers;
pub(crate) mod memory;
mod mixture;
pub(crate) mod profile;
mod ram;
mod results;
mod spill;
mod steps;
mod stream;
mod times;

use layers::{FeedForward, Gated, Head, Layer, layer, rotary};
use memory::{Memory, ROWS, Release, Scratch, buffer_max, check_memory, heads_of, pages_of, scratch_bytes};
use ram::Ram;
use results::Queued;
use steps::{FEW, Steps};

/// Layers of a model on a GPU.
pub struct GpuEngine<R: Platform> {
    client: ComputeClient<R>,
    able: Features,
    config: ModelConfig,
    options: StageOptions,
    recipe: Recipe,
    heads: Heads,
    layers: Vec<Layer>,
    table: Option<Vec<Part>>,
    head: Option<Head>,
    pool: Pool,
    scratch: Scratch,
    bytes: ResidentBytes,
    /// Recorded steps, if the runtime has graphs.
    steps: Option<Steps>,
    /// Experts that the processor computes.
    ram: Option<Box<Ram>>,
    /// The last encoder that was asked for.
    encoder: Option<RowEncoder>,
    /// Hidden rows are encoded.
    encodes: bool,
    /// Index of the device within its runtime.
    number: usize,
    /// Passes queued on the device, the oldest first.
    queued: VecDeque<Queued>,
    /// CubeCL has launched kernels since the last replay or move of pages.
    launched: bool,
    phases: LoadPhases,
    /// Declared after every buffer, because fields are dropped in order.
    _release: Release<R>,
}

/// The steps of a layer, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// RMSNorm before attention.
    AttentionNorm,
    /// Queries, keys and values.
    Inputs,
    /// Rotary embedding of queries and keys; keys and values are written to the KV cache.
    Place,
    /// Attention.
    Attend,
    /// Output projection of attention, added to the residual stream.
    Output,
    /// RMSNorm before the feed-forward.
    FeedForwardNorm,
    /// Choice of experts, in a mixture.
    Route,
    /// Gate and up.
    GateUp,
    /// activation(gate) · up.
    Gated,
    /// Down projection, added to the residual stream.
    Down,
}

const STEPS: [Step; 10] = [
    Step::AttentionNorm,
    Step::Inputs,
    Step::Place,
    Step::Attend,
    Step::Output,
    Step::FeedForwardNorm,
    Step::Route,
    Step::GateUp,
    Step::Gated,
    Step::Down,
];

/// Loads layers onto device `number` of a runtime, the device of `client`. `memory_free`: its free bytes, if known.
///
/// # Errors
/// The options or tensors are invalid, the model does not fit the device, or the device cannot keep the order of arithmetic or
/// failed.
pub fn load<R: Platform>(
    file: &ModelFile,
    options: StageOptions,
    client: ComputeClient<R>,
    number: usize,
    memory_free: Option<u64>,
) -> Result<Decoder<GpuEngine<R>>, StageError> {
    load_weights(file, Weights::File, options, client, number, memory_free)
}

/// Like [`load`], with matrices from `weights`.
pub(crate) fn load_weights<R: Platform>(
    file: &ModelFile,
    weights: Weights,
    options: StageOptions,
    client: ComputeClient<R>,
    number: usize,
    memory_free: Option<u64>,
) -> Result<Decoder<GpuEngine<R>>, StageError> {
    let config = file.config().clone();
    decoder::check_options(&config, &options)?;
    if !config.head_dim.is_multiple_of(8) {
        return Err(input(format!("expected heads of a multiple of 8 elements, found {}", config.head_dim)));
    }
    let stage_options = options.clone();
    let engine = guarded(|| GpuEngine::load(file, weights, config, options, client, number, memory_free))?;
    Decoder::new(file, &stage_options, engine)
}

impl<R: Platform> GpuEngine<R> {
    fn load(
        file: &ModelFile,
        weights: Weights,
        config: ModelConfig,
        options: StageOptions,
        client: ComputeClient<R>,
        number: usize,
        memory_free: Option<u64>,
    ) -> Result<Self, StageError> {
        let start = Instant::now();
        let _release = Release::new(&client); // first, so that it is dropped after all buffers if loading fails
        let able = Features::of(&client)?;
        let recipe = Recipe::of(&config);
        let (heads, pages, most) = (heads_of(&config, &options), pages_of(&options), buffer_max(&client));
        let split = experts_in_ram(file, &options)?;
        check_memory(file, &options, &heads, split.bytes, memory_free, most)?;
        let threads = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build();
        let threads = threads.map_err(|error| StageError::Device(format!("{} threads: {error}", options.threads)))?;
        let memory = Memory { client: &client, number };
        let weights_from = weights;
        let mut loader = Loader::new(&memory, file, weights, &threads)?;
        let range = options.layers.clone();
        let table = (range.start == 0).then(|| loader.matrices(&["token_embd.weight".to_owned()])).transpose()?;
        let mut layers = Vec::with_capacity(range.len());
        let mut tables = RotaryTables::load(file, &recipe, range.clone(), options.context)?;
        tables.grow(options.context);
        let rotary = tables.tables().iter().map(|table| rotary(&memory, table, options.context));
        let rotary = rotary.collect::<Result<Vec<Handle>, _>>()?;
        for index in range.clone() {
            let rotary = rotary[tables.table_of(index - range.start)].clone();
            let bytes = pages * heads.page_bytes();
            let page = Pages { pages: memory.buffer(bytes, "keys and values")?, count: pages };
            timed(&mut loader.phases.proof_s, || fill(&client, &page.pages, bytes / 4))?;
            let in_ram = split.counts[index - range.start];
            layers.push(layer(&mut loader, &recipe.layers[index], index, in_ram, page, rotary, heads.head_dim)?);
        }
        let head = config.has_head(&range).then(|| -> Result<Head, StageError> {
            let norm = loader.vector("output_norm.weight")?;
            let matrix = match &table {
                Some(table) if config.tied => table.clone(),
                _ => loader.matrices(&[config.head_tensor().to_owned()])?,
            };
            Ok(Head { norm, matrix })
        });
        let head = head.transpose()?;
        let (weights, mut phases) = loader.finish()?;
        let ram = (split.bytes > 0)
            .then(|| Ram::load(&memory, file, weights_from, &options, &split).map(Box::new))
            .transpose()?;
        let scratch = Scratch::new(&memory, &config, &heads, &options)?;
        let scratch_bytes = scratch_bytes(&config, &heads, &options);
        let working = (pages * heads.page_bytes() * layers.len()) as u64 + scratch_bytes;
        let working = working + ram.as_ref().map_or(0, |ram| ram.device_bytes());
        let pool = Pool::new(pages);
        let begun = Instant::now();
        let graphs = if able.matrices { R::graphs(&client, number)? } else { None };
        let steps = graphs.map(|graphs| {
            let embedded = table.as_ref().map(|_| &scratch.hidden);
            Steps::new(graphs, &memory, &config, &options, embedded)
        });
        let steps = steps.transpose()?;
        let bytes = ResidentBytes { weights, working: working + steps.as_ref().map_or(0, Steps::handover_bytes) };
        phases.kernels_s = begun.elapsed().as_secs_f64();
        phases.total_s = start.elapsed().as_secs_f64();
        Ok(Self {
            client,
            able,
            config,
            options,
            recipe,
            heads,
            layers,
            table,
            head,
            pool,
            scratch,
            bytes,
            steps,
            ram,
            encoder: None,
            encodes: false,
            number,
            queued: VecDeque::new(),
            launched: true,
            phases,
            _release,
        })
    }

    fn run(
        &mut self,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
    ) -> Result<Option<PassOutput>, StageError> {
        if rows.len() <= FEW && self.steps.is_some() && (self.head.is_none() || !wanted.is_empty()) {
            let (words, kept) = self.replay(rows, input, wanted)?;
            self.queued.push_back(Queued::Step { words, kept });
            return Ok(None);
        }
        self.launched = true;
        let (tokens, hidden, places) = self.uploaded(rows, input)?;
        self.layers(&self.client, tokens.as_ref(), &places, &hidden);
        self.begin_results(&hidden, rows.len(), wanted)
    }

    /// Uploads the input of a pass: tokens, if it has them, hidden rows, or room for them, and the places of the rows.
    fn uploaded(
        &mut self,
        rows: &[RowAt],
        input: PassInput<'_>,
    ) -> Result<(Option<Handle>, Handle, Places), StageError> {
        let (tokens, hidden) = match input {
            PassInput::Tokens(tokens) => (Some(self.upload(bytemuck::cast_slice(tokens))), self.scratch.hidden.clone()),
            PassInput::Hidden(pieces) => match self.brought(pieces)? {
                Some(hidden) => (None, hidden),
                None => {
                    let bytes: Vec<&[u8]> = pieces.iter().map(|piece| bytemuck::cast_slice(piece.rows)).collect();
                    (None, self.client.create(Bytes::from_bytes_vec(bytes.concat())))
                }
            },
        };
        let (table, tables) = self.tables(rows, None);
        let places = Places {
            count: rows.len(),
            rows: self.upload(bytemuck::cast_slice(&table)),
            tables: self.upload(bytemuck::cast_slice(&tables)),
            tables_len: tables.len(),
            blocks: rows.iter().map(|row| row.position / POSITIONS + 1).max().unwrap_or(1),
        };
        Ok((tokens, hidden, places))
    }

    /// Copies rows that other GPUs hold to a buffer of this device; `None` if they do not hold all.
    fn brought(&mut self, pieces: &[Piece<'_>]) -> Result<Option<Handle>, StageError> {
        let Some(Steps { graphs, handover: Some(handover), .. }) = &mut self.steps else { return Ok(None) };
        handover.brought(graphs, pieces)
    }

    /// All layers, preceded by the embedding of `tokens` if given.
    fn layers<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        tokens: Option<&Handle>,
        places: &Places,
        hidden: &Handle,
    ) {
        self.embed(client, tokens, places.count, hidden);
        (0..self.layers.len()).for_each(|index| self.layer_steps(client, index, &STEPS, places, hidden));
    }

    /// The embedding of `tokens`, if given.
    fn embed<L: Platform>(&self, client: &ComputeClient<L>, tokens: Option<&Handle>, count: usize, hidden: &Handle) {
        if let (Some(tokens), Some(table)) = (tokens, &self.table) {
            for part in table {
                let scale = self.recipe.embed_scale;
                embed(client, self.able, &part.matrix, part.offset, tokens, count, scale, hidden);
            }
        }
    }

    /// Steps of the layer at `index` within the stage.
    fn layer_steps<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        index: usize,
        steps: &[Step],
        places: &Places,
        hidden: &Handle,
    ) {
        let recipe = &self.recipe.layers[self.options.layers.start + index];
        for step in steps {
            self.step(client, *step, recipe, &self.layers[index], places, hidden);
        }
    }

    /// Logits `[many, vocabulary]` of the rows whose indices are in `chosen`.
    fn logits<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        hidden: &Handle,
        chosen: &Handle,
        many: usize,
        logits: &Handle,
    ) {
        let Some(head) = &self.head else { return };
        self.norm(client, hidden, &head.norm, Some(chosen), many, self.wanted(&head.matrix), &self.scratch.x);
        self.products(client, &head.matrix, &self.scratch.x, many, logits, self.config.vocab, None, false);
        if let Some(most) = self.recipe.logit_cap {
            cap(client, self.able, logits, many * self.config.vocab, most);
        }
    }

    fn step<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        step: Step,
        recipe: &LayerRecipe,
        layer: &Layer,
        places: &Places,
        hidden: &Handle,
    ) {
        let (able, count, scratch) = (self.able, places.count, &self.scratch);
        let heads = LayerHeads {
            biases: layer.biases.as_ref(),
            norms: layer.head_norms.as_ref(),
            rotary: &layer.rotary,
            positions: self.options.context,
            window: recipe.window,
            cap: recipe.score_cap,
            sinks: layer.sinks.as_ref(),
            eps: self.config.norm_eps,
        };
        let after = |index: usize| layer.norms_after.as_ref().map(|norms| &norms[index]);
        match step {
            Step::AttentionNorm => {
                self.norm(client, hidden, &layer.attention_norm, None, count, self.wanted(&layer.inputs), &scratch.x);
            }
            Step::Inputs => {
                self.products(client, &layer.inputs, &scratch.x, count, &scratch.qkv, self.heads.row(), None, false);
            }
            Step::Place => {
                place(client, able, self.heads, &heads, places, &scratch.qkv, &scratch.queries, &layer.pages);
            }
            Step::Attend => {
                let (queries, partials, wanted) = (&scratch.queries, &scratch.partials, self.wanted(&layer.output));
                let (pages, x) = (&layer.pages, &scratch.attended);
                attend(client, able, self.heads, &heads, places, queries, pages, partials, wanted, x);
            }
            Step::Output => {
                let bias = layer.output_bias.as_ref();
                self.add_products(client, &layer.output, &scratch.attended, count, bias, after(0), hidden);
            }
            Step::FeedForwardNorm => {
                let mut wanted = self.wanted_by(layer.feed_forward.inputs());
                wanted.floats |= layer.feed_forward.has_ram(); // the processor receives them
                self.norm(client, hidden, &layer.ffn_norm, None, count, wanted, &scratch.x);
            }
            Step::Route => match &layer.feed_forward {
                FeedForward::Dense(_) => {}
                FeedForward::Experts(experts) => self.route_rows(client, experts, count),
            },
            Step::GateUp => match &layer.feed_forward {
                FeedForward::Dense(gated) => self.gate_up(client, gated, count, recipe.activation, &scratch.gated),
                FeedForward::Experts(experts) => self.expert_gate_up(client, experts, &experts.bank, count),
            },
            Step::Gated => match &layer.feed_forward {
                FeedForward::Dense(gated) => self.gate(client, gated, count, recipe.activation, &scratch.gated),
                FeedForward::Experts(experts) => self.gate_experts(client, experts, count, recipe.activation),
            },
            Step::Down => match &layer.feed_forward {
                FeedForward::Dense(Gated { down, .. }) => {
                    self.add_products(client, down, &scratch.gated, count, None, after(1), hidden);
                }
                FeedForward::Experts(experts) => {
                    self.expert_outputs(client, experts, &experts.bank, count);
                    self.shared_expert(client, experts, count, recipe.activation);
                    self.combine_experts(client, experts, count, hidden);
                }
            },
        }
    }

    /// Gate and up of a block; with the activation if [`Self::gates`].
    fn gate_up<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        weights: &Gated,
        count: usize,
        activation: Activation,
        out: &Activations,
    ) {
        let (able, x, both) = (self.able, &self.scratch.x, &self.scratch.both);
        if self.gates(weights, count) {
            gate_product(client, able, &weights.inputs[0].matrix, x, count, activation, out);
        } else {
            self.products(client, &weights.inputs, x, count, both, 2 * weights.width, None, false);
        }
    }

    /// activation(gate) · up of a block, unless [`Self::gates`].
    fn gate<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        weights: &Gated,
        count: usize,
        activation: Activation,
        out: &Activations,
    ) {
        if !self.gates(weights, count) {
            gated(client, self.able, &self.scratch.both, activation, count, self.wanted(&weights.down), out);
        }
    }

    /// Whether gate and up are one matrix and the product kernel applies the activation ([`gate_product`]).
    fn gates(&self, weights: &Gated, count: usize) -> bool {
        let integers = RowFormats { floats: false, integers: true };
        let [part] = &weights.inputs[..] else { return false };
        self.wanted(&weights.inputs) == integers
            && self.wanted(&weights.down) == integers
            && part.width == 2 * weights.width
            && gates(&part.matrix, count, self.able)
    }

    /// The formats of activations that these matrices read.
    fn wanted(&self, parts: &[Part]) -> RowFormats {
        self.wanted_by(parts.iter().map(|part| &part.matrix))
    }

    fn wanted_by<'m>(&self, matrices: impl Iterator<Item = &'m Matrix>) -> RowFormats {
        let integers = self.options.activations == stage::Activations::Int8;
        let mut wanted = RowFormats { floats: !integers, integers: false };
        for matrix in matrices {
            let codes = Layout::of(matrix.kind).bits > 0;
            wanted.floats |= !codes;
            wanted.integers |= integers && codes;
        }
        wanted
    }

    fn norm<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        hidden: &Handle,
        weight: &Handle,
        rows: Option<&Handle>,
        count: usize,
        wanted: RowFormats,
        x: &Activations,
    ) {
        norm(client, self.able, hidden, weight, self.config.norm_eps, rows, count, wanted, x);
    }

    fn products<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        parts: &[Part],
        x: &Activations,
        count: usize,
        rows: &Handle,
        stride: usize,
        bias: Option<&Handle>,
        add: bool,
    ) {
        let integers = self.options.activations == stage::Activations::Int8;
        for Part { matrix, offset, width } in parts {
            let parts = Some(&self.scratch.parts);
            let target = Target { rows, stride, offset: *offset, width: *width, bias, add, parts };
            product(client, self.able, matrix, x, integers, count, &target);
        }
    }

    /// Adds products to the residual stream, normalised first if `norm` is given.
    fn add_products<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        parts: &[Part],
        x: &Activations,
        count: usize,
        bias: Option<&Handle>,
        norm: Option<&Handle>,
        hidden: &Handle,
    ) {
        let (width, eps) = (self.config.width, self.config.norm_eps);
        let Some(weight) = norm else { return self.products(client, parts, x, count, hidden, width, bias, true) };
        self.products(client, parts, x, count, &self.scratch.delta, width, bias, false);
        norm_add(client, self.able, &self.scratch.delta, weight, eps, count, width, hidden);
    }

    /// For each row its position and the start of its page table, and the page tables: padded to `room` pages if given.
    fn tables(&self, rows: &[RowAt], room: Option<usize>) -> (Vec<u32>, Vec<u32>) {
        let (mut table, mut tables) = (Vec::with_capacity(2 * rows.len()), Vec::new());
        let mut last: Option<(SequenceId, u32)> = None;
        for row in rows {
            let begin = match last {
                Some((sequence, begin)) if sequence == row.sequence => begin,
                _ => {
                    let begin = tables.len();
                    tables.extend(self.pool.of(row.sequence));
                    tables.resize(room.map_or(tables.len(), |room| begin + room), 0);
                    begin as u32
                }
            };
            last = Some((row.sequence, begin));
            table.extend([row.position as u32, begin]);
        }
        (table, tables)
    }

    fn upload(&self, bytes: &[u8]) -> Handle {
        self.client.create(Bytes::from_bytes_vec(bytes.to_vec()))
    }
}

impl<R: Platform> decoder::Engine for GpuEngine<R> {
    const ROWS_PER_PASS: usize = ROWS;

    fn reserve(&mut self, wanted: &[(SequenceId, usize)]) -> Result<(), StageError> {
        let moves = self.pool.reserve(wanted).map_err(|missing| {
            let (free, all) = self.pool.free_of();
            let positions: usize = wanted.iter().map(|(_, positions)| positions).sum();
            input(format!(
                "{} sequences with {positions} positions need {missing} more pages of {POSITIONS} positions, but only {free} of \
                 {all} are free; wait for a sequence to end, or give the stage more sequences",
                wanted.len()
            ))
        })?;
        if moves.is_empty() { Ok(()) } else { guarded(|| self.move_pages(&moves)) }
    }

    fn use_ram(&mut self, bytes: u64) -> usize {
        let page = (self.heads.page_bytes() * self.layers.len()).max(1) as u64;
        let mut pages = usize::try_from(bytes / page).unwrap_or(usize::MAX);
        if pages > 0
            && let Err(error) = guarded(|| self.prepare_moves())
        {
            tracing::warn!("the cache stays on the device: {error}");
            pages = 0;
        }
        self.pool.set_ram(pages);
        pages.saturating_mul(POSITIONS)
    }

    fn encode_rows(&mut self, codec: Codec) {
        let prepared = guarded(|| self.prepare_encoder(codec));
        if let Err(error) = prepared {
            tracing::warn!("the processor encodes hidden rows: {error}");
        }
    }

    fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize) {
        self.pool.share(from, to, positions);
    }

    fn release(&mut self, sequence: SequenceId) {
        self.pool.release(sequence);
    }

    fn pass(
        &mut self,
        threads: &mut Threads,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
    ) -> Result<Option<PassOutput>, StageError> {
        let mut ram = self.ram.take();
        let result = guarded(|| match &mut ram {
            Some(ram) => self.run_with_ram(ram, threads, rows, input, wanted).map(Some),
            None => self.run(rows, input, wanted),
        });
        self.ram = ram;
        result
    }

    fn collect_pass(&mut self) -> Result<PassOutput, StageError> {
        guarded(|| self.arrive())
    }

    fn can_sample(&self, rows: usize, settings: &SamplerSettings) -> bool {
        self.ram.is_none() && self.draws_rows(rows, settings)
    }

    fn queue(
        &mut self,
        rows: &[RowAt],
        input: Option<PassInput<'_>>,
        draws: &[(SamplerSettings, u32)],
    ) -> Result<(), StageError> {
        guarded(|| self.queue_step(rows, input, draws))
    }

    fn collect(&mut self) -> Result<Vec<Option<u32>>, StageError> {
        guarded(|| self.collect_step())
    }

    fn resident_bytes(&self) -> ResidentBytes {
        self.bytes
    }

    fn numerics(&self) -> &str {
        self.options.activations.numerics()
    }
}
