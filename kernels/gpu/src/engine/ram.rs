//! Passes of a stage with experts in RAM. Once a layer's router has chosen, the rows go to the processor, which computes the experts
//! in RAM while the device computes the others; the device adds the outputs of both in their order.
//!
//! An expert in RAM that rows use more often than one on the device changes places with it.
use std::collections::BTreeMap;
use std::mem::replace;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::POSITIONS;
use kernels::threads::Threads;
use kernels::tile::{Layout, ROWS as TILE_ROWS};
use kernels_models::decoder::{PassInput, PassOutput, RowAt};
use kernels_models::ram::{Expert, Pair, RamExperts, Split};
use kernels_models::stage::{StageError, StageOptions};
use kernels_models::weights::ModelFile;

use super::layers::{Experts, FeedForward, NO_SLOT};
use super::memory::Memory;
use super::steps::{Input, Steps, part, wait};
use super::stream::Stream;
use super::{FEW, GpuEngine, STEPS, Step};
use crate::attention::Places;
use crate::error::{failed, input as invalid};
use crate::experts::put_rows;
use crate::graph::{Buffer, Graph, Graphs, Mark, Pinned};
use crate::load::{Weights, random, write};
use crate::platform::Platform;
use crate::product::ExpertMatrix;

/// Rows between two reviews of where experts lie.
const REVIEW_ROWS: usize = 64;
/// Maximum number of experts that a review moves to the device: each delays the next pass by about a millisecond.
const MOVES_MAX: usize = 4;
/// An expert moves to the device if it was used this many times as often as the one that it replaces, and by [`MORE`] more: chance
/// alone moves few.
const FACTOR: u32 = 2;
const MORE: u32 = 8;
/// Maximum number of recorded passes, each of two graphs per layer with experts in RAM.
const RECORDED_MAX: usize = 32;

/// Experts in RAM, and where all experts lie.
pub(super) struct Ram {
    experts: RamExperts,
    /// By index within the stage.
    layers: Vec<LayerExperts>,
    /// Layers with experts in RAM.
    cuts: Vec<usize>,
    pairs: Vec<Pair>,
    /// Rows since the last review.
    rows: usize,
    /// Experts moved to the device so far.
    pub(super) moved: usize,
    recorded: Option<Recorded>,
    /// How passes of many rows bring experts to the device, if the runtime can.
    stream: Option<Stream>,
}

/// The experts of one layer.
#[derive(Default)]
struct LayerExperts {
    places: Vec<Place>,
    /// How often each was used, the past counting less and less.
    uses: Vec<u32>,
    used: usize,
    on_input: bool,
}

/// Where an expert lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Its slot on the device.
    Device(usize),
    /// Its place among those in RAM.
    Ram(usize),
}

/// Recorded pieces of passes, and buffers of exchanges.
struct Recorded {
    pieces: BTreeMap<Shape, Pieces>,
    passes: u64,
    /// Normalised rows, the experts of each, and their factors.
    read: [Buffer; 3],
    got: Pinned,
    /// [`staged_words`]
    staged: Buffer,
    sent: Pinned,
    arrived: Mark,
}

struct Pieces {
    /// Before and after each choice of experts, alternately.
    graphs: Vec<Graph>,
    /// Number of the pass that used them last.
    used: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    rows: usize,
    wanted: usize,
    blocks: usize,
}

/// Buffers of a pass.
struct Pass<'a> {
    tokens: Option<&'a Handle>,
    places: &'a Places,
    hidden: &'a Handle,
}

/// Words of the outputs of `pairs` pairs in RAM: the number of each pair, then from a multiple of 64 words on their rows.
fn staged_words(pairs: usize, width: usize) -> usize {
    pairs.next_multiple_of(64) + pairs * width
}

impl Ram {
    /// # Errors
    /// A tensor is missing or invalid, no threads, or no memory.
    pub(super) fn load<R: Platform>(
        memory: &Memory<'_, R>,
        file: &ModelFile,
        weights: Weights,
        options: &StageOptions,
        split: &Split,
    ) -> Result<Self, StageError> {
        let experts = RamExperts::load(file, options, &split.counts, &|tensor, rows, tiles| match weights {
            Weights::File => Ok(tensor.read_tiles(rows, tiles)?),
            Weights::Random => random::fill(tensor.quant, tensor.cols, tiles),
        })?;
        let config = file.config().experts.ok_or_else(|| invalid("expected a model with experts"))?;
        let layer = |in_ram: &usize| {
            let on_device = config.count - in_ram;
            let place =
                |expert| if expert < on_device { Place::Device(expert) } else { Place::Ram(expert - on_device) };
            LayerExperts {
                places: (0..config.count).map(place).collect(),
                uses: vec![0; config.count],
                used: config.used,
                on_input: config.on_input,
            }
        };
        Ok(Self {
            experts,
            layers: split.counts.iter().map(layer).collect(),
            cuts: (0..split.counts.len()).filter(|index| split.counts[*index] > 0).collect(),
            pairs: Vec::new(),
            rows: 0,
            moved: 0,
            recorded: None,
            stream: Stream::new(memory, file, options, split)?,
        })
    }

    /// Bytes of weights in RAM.
    pub(super) fn bytes(&self) -> u64 {
        self.experts.bytes()
    }

    /// Bytes of device memory that passes of many rows need.
    pub(super) fn device_bytes(&self) -> u64 {
        self.stream.as_ref().map_or(0, Stream::bytes)
    }

    /// Computes the experts in RAM of layer `index`: for each pair of `rows` and `chosen` experts, whose factors are `weights`. Fills
    /// `staged` and returns the number of pairs in RAM.
    fn compute(
        &mut self,
        threads: &mut Threads,
        index: usize,
        rows: &[f32],
        (chosen, weights): (&[u32], &[f32]),
        staged: &mut [u32],
    ) -> Result<usize, StageError> {
        let Self { experts, layers, pairs, .. } = self;
        let layer = &mut layers[index];
        let (numbers, outputs) = staged.split_at_mut(chosen.len().next_multiple_of(64));
        numbers.fill(u32::MAX);
        pairs.clear();
        for (number, (expert, weight)) in chosen.iter().zip(weights).enumerate() {
            let expert = *expert as usize;
            let count = layer.places.len();
            let place =
                *layer.places.get(expert).ok_or_else(|| failed(format!("expert {expert} of {count} was chosen")))?;
            layer.uses[expert] = layer.uses[expert].saturating_add(1);
            if let Place::Ram(place) = place {
                numbers[pairs.len()] = number as u32;
                let weight = if layer.on_input { *weight } else { 1.0 };
                pairs.push(Pair { row: number / layer.used, place, weight });
            }
        }
        if !pairs.is_empty() {
            experts.compute(threads, index, rows, pairs, bytemuck::cast_slice_mut(outputs));
        }
        Ok(pairs.len())
    }
}

impl LayerExperts {
    /// The experts in RAM, in the order of their places there.
    fn in_ram(&self) -> Vec<usize> {
        let mut places: Vec<(usize, usize)> = Vec::new();
        for (expert, place) in self.places.iter().enumerate() {
            if let Place::Ram(place) = place {
                places.push((*place, expert));
            }
        }
        places.sort_unstable();
        places.into_iter().map(|(_, expert)| expert).collect()
    }

    /// The expert in RAM that should change places with one on the device, which follows; `None` if none should.
    fn review(&mut self) -> Option<[usize; 2]> {
        let of = |device: bool| {
            let all = self.places.iter().enumerate();
            all.filter(move |(_, place)| matches!(place, Place::Device(_)) == device).map(|(expert, _)| expert)
        };
        let busiest = of(false).max_by_key(|expert| (self.uses[*expert], usize::MAX - expert))?;
        let idlest = of(true).min_by_key(|expert| (self.uses[*expert], *expert))?;
        let limit = self.uses[idlest].saturating_mul(FACTOR).saturating_add(MORE);
        let moves = self.uses[busiest] > limit;
        moves.then_some([busiest, idlest])
    }
}

impl Recorded {
    fn new<R: Platform>(engine: &GpuEngine<R>, graphs: &Graphs) -> Result<Self, StageError> {
        let (scratch, width) = (&engine.scratch, engine.config.width);
        let pairs = FEW * engine.config.experts.map_or(0, |experts| experts.used);
        let [chosen, weights] = &scratch.mixture.choices;
        let words = staged_words(pairs, width);
        let [x, chosen, weights] = [&scratch.x.floats, chosen, weights].map(|handle| graphs.buffer(handle.clone()));
        Ok(Self {
            pieces: BTreeMap::new(),
            passes: 0,
            read: [x?, chosen?, weights?],
            got: graphs.pinned(FEW * width + 2 * pairs)?,
            staged: graphs.buffer(engine.client.empty(4 * words))?,
            sent: graphs.pinned(words)?,
            arrived: graphs.mark()?,
        })
    }

    /// Records the pieces of a pass unless they are recorded already.
    fn record<R: Platform>(
        &mut self,
        engine: &GpuEngine<R>,
        steps: &mut Steps,
        cuts: &[usize],
        shape: Shape,
    ) -> Result<(), StageError> {
        self.passes += 1;
        let used = self.passes;
        if let Some(pieces) = self.pieces.get_mut(&shape) {
            pieces.used = used;
            return Ok(());
        }
        if self.pieces.len() >= RECORDED_MAX {
            let oldest = self.pieces.iter().min_by_key(|(_, pieces)| pieces.used).map(|(shape, _)| *shape);
            oldest.and_then(|oldest| self.pieces.remove(&oldest));
        }
        let most = engine.options.context.div_ceil(POSITIONS);
        let Steps { graphs, words, hidden, output, .. } = steps;
        let places = engine.recorded_places(&words.handle, shape.rows, shape.blocks);
        let [tokens, chosen] = [Input::Tokens, Input::Chosen].map(|of| part(&words.handle, of, most));
        let pass = Pass { tokens: engine.table.as_ref().map(|_| &tokens), places: &places, hidden };
        let mut pieces = Vec::with_capacity(2 * cuts.len() + 1);
        let pairs = shape.rows * engine.config.experts.map_or(0, |experts| experts.used);
        for cut in 0..=cuts.len() {
            pieces.push(graphs.record(|client| {
                engine.until_choice(client, cuts, cut, &pass, Some((&self.staged.handle, pairs)));
                if cut == cuts.len() {
                    engine.logits(client, hidden, &chosen, shape.wanted, &output.handle);
                }
            })?);
            if let Some(index) = cuts.get(cut) {
                pieces.push(graphs.record(|client| engine.experts_on_device(client, *index, shape.rows))?);
            }
        }
        self.pieces.insert(shape, Pieces { graphs: pieces, used });
        Ok(())
    }
}

impl<R: Platform> GpuEngine<R> {
    /// A pass of a stage with experts in RAM; returns its results.
    pub(super) fn run_with_ram(
        &mut self,
        ram: &mut Ram,
        threads: &mut Threads,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
    ) -> Result<PassOutput, StageError> {
        let few = rows.len() <= FEW && self.steps.is_some() && (self.head.is_none() || !wanted.is_empty());
        let results = if few {
            // The decoder encodes rows that come as numbers.
            PassOutput::Numbers(self.replay_with_ram(ram, threads, rows, input, wanted)?)
        } else {
            self.launch_with_ram(ram, threads, rows, input, wanted)?
        };
        ram.rows += rows.len();
        if ram.rows >= REVIEW_ROWS {
            ram.rows = 0;
            self.review(ram)?;
        }
        Ok(results)
    }

    /// From the exchange before to the choice of experts in layer `cuts[cut]`, or to the last layer. `staged`: outputs of pairs in RAM
    /// of the layer before, [`staged_words`] for this number of pairs.
    fn until_choice<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        cuts: &[usize],
        cut: usize,
        pass: &Pass<'_>,
        staged: Option<(&Handle, usize)>,
    ) {
        let (count, mut begin) = (pass.places.count, 0);
        if let Some(before) = cut.checked_sub(1).map(|before| cuts[before])
            && let Some(experts) = self.mixture(before)
        {
            if let Some((staged, pairs)) = staged {
                let rows = staged.clone().offset_start(4 * pairs.next_multiple_of(64) as u64);
                let (width, outputs) = (self.config.width, &self.scratch.mixture.outputs);
                put_rows(client, self.able, staged, &rows, pairs, width, outputs, count * experts.used());
            }
            self.combine_experts(client, experts, count, pass.hidden);
            begin = before + 1;
        } else {
            self.embed(client, pass.tokens, count, pass.hidden);
        }
        let end = cuts.get(cut).copied().unwrap_or(self.layers.len());
        (begin..end).for_each(|index| self.layer_steps(client, index, &STEPS, pass.places, pass.hidden));
        if cut < cuts.len() {
            const UNTIL_CHOICE: &[Step] = STEPS.split_at(7).0;
            self.layer_steps(client, end, UNTIL_CHOICE, pass.places, pass.hidden);
        }
    }

    /// The experts on the device that rows chose in a layer.
    fn experts_on_device<L: Platform>(&self, client: &ComputeClient<L>, index: usize, count: usize) {
        let Some(experts) = self.mixture(index) else { return };
        let activation = self.recipe.layers[self.options.layers.start + index].activation;
        self.expert_gate_up(client, experts, &experts.bank, count);
        self.gate_experts(client, experts, count, activation);
        self.expert_outputs(client, experts, &experts.bank, count);
        self.shared_expert(client, experts, count, activation);
    }

    pub(super) fn mixture(&self, index: usize) -> Option<&Experts> {
        match &self.layers[index].feed_forward {
            FeedForward::Experts(experts) => Some(experts),
            FeedForward::Dense(_) => None,
        }
    }

    /// A pass that CubeCL launches.
    fn launch_with_ram(
        &mut self,
        ram: &mut Ram,
        threads: &mut Threads,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
    ) -> Result<PassOutput, StageError> {
        self.launched = true;
        let (count, width) = (rows.len(), self.config.width);
        let pairs = count * self.config.experts.map_or(0, |experts| experts.used);
        let (tokens, hidden, places) = self.uploaded(rows, input)?;
        let pass = Pass { tokens: tokens.as_ref(), places: &places, hidden: &hidden };
        let first = |handle: &Handle, words: usize| {
            let unused = handle.size() - 4 * words as u64;
            handle.clone().offset_end(unused)
        };
        let mut staged: Option<(Handle, usize)> = None;
        let mut words = Vec::new();
        for (cut, index) in ram.cuts.clone().into_iter().enumerate() {
            let before = staged.as_ref().map(|(staged, pairs)| (staged, *pairs));
            self.until_choice(&self.client, &ram.cuts, cut, &pass, before);
            if let Some(stream) = &mut ram.stream
                && self.mixture(index).is_some_and(|experts| self.is_grouped(experts, count))
            {
                // Many rows use most experts: it is faster to bring these to the device.
                self.experts_on_device(&self.client, index, count);
                let in_ram = ram.layers[index].in_ram();
                stream.compute(self, threads, &ram.experts, index, &in_ram, count)?;
                staged = None;
                continue;
            }
            let [chosen, weights] = &self.scratch.mixture.choices;
            let read = vec![first(&self.scratch.x.floats, count * width), first(chosen, pairs), first(weights, pairs)];
            self.client.flush().map_err(failed)?;
            let coming = self.client.read_async(read);
            self.experts_on_device(&self.client, index, count);
            self.client.flush().map_err(failed)?;
            let read = cubecl::future::block_on(coming).map_err(failed)?;
            let [x, chosen, weights] = &read[..] else { return Err(failed("a read gave too little")) };
            let x: Vec<f32> = bytemuck::pod_collect_to_vec(x);
            let chosen: Vec<u32> = bytemuck::pod_collect_to_vec(chosen);
            let weights: Vec<f32> = bytemuck::pod_collect_to_vec(weights);
            words.resize(staged_words(pairs, width), 0);
            let found = ram.compute(threads, index, &x, (&chosen, &weights), &mut words)?;
            staged = (found > 0).then(|| {
                // The pairs of this pass that are in RAM, as if there were no others.
                let begin = pairs.next_multiple_of(64);
                let mut sent = words[..found].to_vec();
                sent.resize(found.next_multiple_of(64), u32::MAX);
                sent.extend_from_slice(&words[begin..begin + found * width]);
                (self.upload(bytemuck::cast_slice(&sent)), found)
            });
        }
        let before = staged.as_ref().map(|(staged, pairs)| (staged, *pairs));
        self.until_choice(&self.client, &ram.cuts, ram.cuts.len(), &pass, before);
        match self.begin_results(&hidden, count, wanted)? {
            Some(results) => Ok(results),
            None => self.arrive(),
        }
    }

    /// A pass of few rows as graphs.
    fn replay_with_ram(
        &mut self,
        ram: &mut Ram,
        threads: &mut Threads,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
    ) -> Result<Vec<f32>, StageError> {
        let shape = Shape { rows: rows.len(), wanted: wanted.len(), blocks: self.blocks_of(rows) };
        let width = self.config.width;
        let pairs = rows.len() * self.config.experts.map_or(0, |experts| experts.used);
        self.with_steps(|engine, steps| {
            let mut recorded = match ram.recorded.take() {
                Some(recorded) => recorded,
                None => Recorded::new(engine, &steps.graphs)?,
            };
            let result = (|| {
                recorded.record(engine, steps, &ram.cuts, shape)?;
                let len = engine.write_pass(steps.sent.words(), rows, Some(input), wanted);
                steps.graphs.queue_write(&steps.sent.words()[..len], &steps.words, 0)?;
                let Recorded { pieces, read, got, staged, sent, arrived, .. } = &mut recorded;
                let pieces = &pieces[&shape].graphs;
                for (cut, index) in ram.cuts.clone().into_iter().enumerate() {
                    steps.graphs.launch(&pieces[2 * cut])?;
                    let (x, choices) = got.words().split_at_mut(rows.len() * width);
                    let (chosen, weights) = choices[..2 * pairs].split_at_mut(pairs);
                    for (buffer, words) in read.iter().zip([&mut *x, &mut *chosen, &mut *weights]) {
                        steps.graphs.queue_read(buffer, 0, words)?;
                    }
                    steps.graphs.set(arrived)?;
                    steps.graphs.launch(&pieces[2 * cut + 1])?;
                    wait(&steps.graphs, arrived, &mut steps.waited)?;
                    let weights = bytemuck::cast_slice(weights);
                    let words = &mut sent.words()[..staged_words(pairs, width)];
                    let found = ram.compute(threads, index, bytemuck::cast_slice(x), (chosen, weights), words)?;
                    let len = pairs.next_multiple_of(64) + found * width;
                    steps.graphs.queue_write(&words[..len], staged, 0)?;
                }
                steps.graphs.launch(&pieces[2 * ram.cuts.len()])?;
                let each = if engine.head.is_some() { engine.config.vocab } else { width };
                let numbers = each * if engine.head.is_some() { wanted.len() } else { rows.len() };
                steps.graphs.queue_read(&steps.output, 0, &mut steps.got.words()[..numbers])?;
                steps.graphs.set(&steps.done)?;
                wait(&steps.graphs, &steps.done, &mut steps.waited)?;
                Ok(bytemuck::cast_slice(&steps.got.words()[..numbers]).to_vec())
            })();
            if result.is_err() {
                let _ = steps.graphs.settle(); // copies that were queued may still use the buffers
            }
            ram.recorded = Some(recorded);
            result
        })
    }

    /// Moves experts that are used often to the device. Nothing may be queued there.
    fn review(&mut self, ram: &mut Ram) -> Result<(), StageError> {
        let mut moves = 0;
        for index in ram.cuts.clone() {
            if moves < MOVES_MAX
                && let Some(experts) = ram.layers[index].review()
            {
                self.exchange(ram, index, experts)?;
                moves += 1;
            }
            ram.layers[index].uses.iter_mut().for_each(|uses| *uses -= *uses / 8);
        }
        ram.moved += moves;
        Ok(())
    }

    /// An expert in RAM and one on the device, which follows, change places.
    fn exchange(&mut self, ram: &mut Ram, index: usize, [busy, idle]: [usize; 2]) -> Result<(), StageError> {
        let layer = &mut ram.layers[index];
        let (Place::Ram(place), Place::Device(slot)) = (layer.places[busy], layer.places[idle]) else {
            return Err(failed("expected an expert in RAM and one on the device"));
        };
        let experts = self.mixture(index).ok_or_else(|| failed("expected a layer with experts"))?;
        let slots = experts.bank.slots.as_ref().ok_or_else(|| failed("expected a layer with experts in RAM"))?;
        let parts = experts.parts(slot, self.config.width);
        let read = parts.iter().map(SlotPart::handle).collect();
        let read = cubecl::future::block_on(self.client.read_async(read)).map_err(failed)?;
        let floats = |bytes: &Bytes| bytemuck::pod_collect_to_vec::<u8, f32>(bytes);
        let leaving = match &read[..] {
            [gate, up, down] => Expert { tiles: [gate, up, down].map(|tiles| tiles.to_vec()), biases: None },
            [gate, up, down, biases @ ..] if biases.len() == 3 => {
                let biases = Some([floats(&biases[0]), floats(&biases[1]), floats(&biases[2])]);
                Expert { tiles: [gate, up, down].map(|tiles| tiles.to_vec()), biases }
            }
            _ => return Err(failed("a read gave too little")),
        };
        let coming = ram.experts.expert(index, place);
        let biases = coming.biases.iter().flatten().map(|bias| bytemuck::cast_slice::<f32, u8>(bias));
        let contents = coming.tiles.iter().map(Vec::as_slice).chain(biases);
        for (part, bytes) in parts.iter().zip(contents) {
            if bytes.len() != part.bytes {
                return Err(failed(format!("{} bytes of an expert, expected {}", bytes.len(), part.bytes)));
            }
            write(&self.client, &self.upload(bytes), &part.buffer, part.start / 4, part.bytes / 4);
        }
        ram.experts.replace(index, place, &leaving);
        layer.places[busy] = replace(&mut layer.places[idle], Place::Ram(place));
        for (slots, exact) in [(&slots.exact, true), (&slots.any, false)] {
            let slot_of = |(expert, place): (usize, &Place)| match place {
                Place::Device(slot) => *slot as u32,
                Place::Ram(_) if exact => NO_SLOT,
                Place::Ram(_) => (expert % experts.bank.down.count) as u32,
            };
            let words: Vec<u32> = layer.places.iter().enumerate().map(slot_of).collect();
            write(&self.client, &self.upload(bytemuck::cast_slice(&words)), slots, 0, words.len());
        }
        self.launched = true;
        self.client.flush().map_err(failed)
    }
}

/// Bytes of a slot in a buffer.
struct SlotPart {
    buffer: Handle,
    start: usize,
    bytes: usize,
}

impl SlotPart {
    fn handle(&self) -> Handle {
        let behind = self.buffer.size() - (self.start + self.bytes) as u64;
        self.buffer.clone().offset_start(self.start as u64).offset_end(behind)
    }
}

impl Experts {
    /// What a slot takes on the device: tiles of gate, up and down, then their biases if there are any. `width`: that of the model.
    fn parts(&self, slot: usize, width: usize) -> Vec<SlotPart> {
        let tiles = |experts: &ExpertMatrix, matrix: usize| {
            let strip = Layout::of(experts.matrix.kind).matrix_bytes(TILE_ROWS, experts.matrix.cols);
            let rows = experts.first + (matrix * experts.count + slot) * experts.rows;
            SlotPart {
                buffer: experts.matrix.tiles.clone(),
                start: rows / TILE_ROWS * strip,
                bytes: experts.rows / TILE_ROWS * strip,
            }
        };
        let bank = &self.bank;
        let mut parts = match &bank.inputs[..] {
            [both] => vec![tiles(both, 0), tiles(both, 1)],
            one_each => one_each.iter().map(|one| tiles(one, 0)).collect(),
        };
        parts.push(tiles(&bank.down, 0));
        if let Some([inputs, outputs]) = &bank.biases {
            let bias = |buffer: &Handle, place: usize, each: usize| SlotPart {
                buffer: buffer.clone(),
                start: 4 * place * each,
                bytes: 4 * each,
            };
            let (slots, each) = (bank.down.count, self.width());
            parts.extend([bias(inputs, slot, each), bias(inputs, slots + slot, each), bias(outputs, slot, width)]);
        }
        parts
    }
}
