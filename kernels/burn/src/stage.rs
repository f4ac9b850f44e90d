//! A stage of a model on any backend of burn: `kernels::stage::Stage` by [`MeshBackend`]'s operations.
//!
//! Rows go through in passes of at most [`PASS_ROWS`]; every operation treats a row by itself and attention sees only
//! its sequence's cache, so chunks, batches and cuts change no bits where the backend's product does not (the fused
//! kernels; the oracle's product promises less). Caches are allocated whole when a sequence opens, after the sum of
//! everything was checked against the device's memory, and proven by reading back what was written: devices do not say
//! when an allocation fails.
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bimm_contracts::{ShapeContract, shape_contract};
use burn::tensor::{Tensor, TensorData};
use kernels::gpu::{Attention, CACHE_CELL_BYTES, Rotation};
use kernels::stage::{ResidentBytes, Rows, RowsIn, RowsOut, SequenceId, Stage, StageError, StageOptions};
use kernels::weights::{ModelConfig, ModelFile, RotaryFrequencies};

use crate::backend::MeshBackend;
use crate::stage::layer::{Cache, Layer};
use crate::stage::weights::{Linear, Loader};

mod layer;
mod weights;

/// Rows of one pass through the layers: bounds scratch memory, and is far below what a launch can take.
const PASS_ROWS: usize = 256;

/// Stays free beside a stage: pools round up. The driver's context and kernels are there already when a stage is loaded; what a
/// node offers leaves room for both.
const SPARE_BYTES: u64 = 256 << 20;

/// A loaded stage on a backend's device.
#[derive(Debug)]
pub struct BurnStage<B: MeshBackend> {
    device: B::Device,
    file: Arc<ModelFile>,
    config: ModelConfig,
    options: StageOptions,
    numerics: String,
    frequencies: RotaryFrequencies,
    layers: Vec<Layer<B>>,
    head: Option<Head<B>>,
    weight_bytes: u64,
    sequences: BTreeMap<SequenceId, Sequence<B>>,
    /// Caches of released sequences: device memory is not asked for twice.
    spare: Vec<Vec<Cache<B>>>,
    opened: u32,
}

/// Final norm and output matrix.
#[derive(Debug)]
struct Head<B: MeshBackend> {
    norm: Tensor<B, 1>,
    output: Linear<B>,
}

/// One sequence's caches, a pair per layer.
#[derive(Debug)]
struct Sequence<B: MeshBackend> {
    held: usize,
    caches: Vec<Cache<B>>,
}

/// Consecutive rows of one entry of a batch.
struct Segment {
    entry: usize,
    sequence: SequenceId,
    position: usize,
    /// Rows of the entry.
    rows: std::ops::Range<usize>,
    /// Ends its entry, whose logits are wanted.
    logits: bool,
}

/// What every layer needs to know of a pass.
struct Pass<'a, B: MeshBackend> {
    segments: &'a [Segment],
    /// Cosines and sines of each row, `[rows, dims]`.
    table: Tensor<B, 2>,
    rotation: Rotation,
    attention: Attention,
    eps: f32,
}

impl<B: MeshBackend> BurnStage<B> {
    /// Loads layers onto a device: weights are moved packed, then every matrix is proven by a product read back.
    /// `memory_free` is what the device has left, where it is known.
    ///
    /// # Errors
    /// Layers that the model lacks, a model that does not fit the memory, a device that fails.
    pub fn load(
        file: Arc<ModelFile>,
        options: StageOptions,
        device: B::Device,
        numerics: String,
        memory_free: Option<u64>,
    ) -> Result<Self, StageError> {
        let config = file.config().clone();
        let layers = options.layers.clone();
        if layers.is_empty() || layers.end > config.layers {
            return Err(input(format!("layers {layers:?}: expected a range of the model's {}", config.layers)));
        }
        if !config.head_dim.is_multiple_of(4) {
            return Err(input(format!("expected heads of a multiple of 4 elements, found {}", config.head_dim)));
        }
        let frequencies = file.rotary_frequencies().map_err(|error| input(error.to_string()))?;
        check_memory(&file, &options, memory_free)?;
        guarded(|| {
            let mut loader = Loader::<B>::new(&file, &device);
            let blocks = layers.clone().map(|i| Layer::load(&mut loader, &config, i)).collect::<Result<_, _>>()?;
            let head = (layers.end == config.layers).then(|| -> Result<_, StageError> {
                let norm = loader.vector("output_norm.weight")?;
                Ok(Head { norm, output: loader.linear(config.head_tensor())? })
            });
            let head = head.transpose()?;
            let weight_bytes = loader.finish()?;
            Ok(Self {
                device: device.clone(),
                config,
                options,
                numerics,
                frequencies,
                layers: blocks,
                head,
                weight_bytes,
                sequences: BTreeMap::new(),
                spare: Vec::new(),
                opened: 0,
                file: file.clone(),
            })
        })
    }

    /// Everything that can be wrong with a batch, before anything changes.
    fn check(&self, batch: &[Rows<'_>]) -> Result<(), StageError> {
        static HIDDEN: ShapeContract<'static> = shape_contract!["count", "width"];
        let mut held: BTreeMap<SequenceId, usize> = self.sequences.iter().map(|(id, s)| (*id, s.held)).collect();
        for rows in batch {
            let count = match rows.input {
                RowsIn::Tokens(tokens) if self.options.layers.start == 0 => {
                    if let Some(token) = tokens.iter().find(|&&t| t as usize >= self.config.vocab) {
                        return Err(input(format!("token {token}: the vocabulary has {}", self.config.vocab)));
                    }
                    tokens.len()
                }
                RowsIn::Hidden(rows) if self.options.layers.start > 0 => {
                    let width = self.config.width;
                    let shape = [rows.len() / width, if rows.len().is_multiple_of(width) { width } else { 0 }];
                    let [count] = HIDDEN
                        .try_unpack_shape(&shape, &["count"], &[("width", width)])
                        .map_err(|error| input(format!("{} elements of hidden rows: {error}", rows.len())))?;
                    count
                }
                RowsIn::Tokens(_) => return Err(input("this stage takes hidden rows, found tokens")),
                RowsIn::Hidden(_) => return Err(input("this stage takes tokens, found hidden rows")),
            };
            let before = held.get(&rows.sequence).copied().unwrap_or(0);
            if count == 0 || rows.position > before {
                let (id, at) = (rows.sequence, rows.position);
                return Err(input(format!("sequence {id}: {count} rows at position {at}, {before} are held")));
            }
            let end = rows.position.saturating_add(count);
            if end > self.options.context {
                let (id, context) = (rows.sequence, self.options.context);
                return Err(input(format!("sequence {id}: {end} positions, the context is {context}")));
            }
            held.insert(rows.sequence, end);
        }
        if held.len() > self.options.sequences {
            return Err(input(format!("{} sequences, at most {} may be open", held.len(), self.options.sequences)));
        }
        Ok(())
    }

    /// Makes sure that a sequence has caches.
    fn open(&mut self, sequence: SequenceId) -> Result<(), StageError> {
        if self.sequences.contains_key(&sequence) {
            return Ok(());
        }
        let caches = match self.spare.pop() {
            Some(caches) => caches,
            None => {
                let shape = [self.options.context, self.config.kv_width()];
                self.layers
                    .iter()
                    .map(|_| {
                        self.opened += 1;
                        Cache::new(shape, self.opened as f32, &self.device)
                    })
                    .collect::<Result<_, _>>()?
            }
        };
        self.sequences.insert(sequence, Sequence { held: 0, caches });
        Ok(())
    }

    fn run(&mut self, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        for rows in batch {
            self.open(rows.sequence)?;
        }
        let last = self.head.is_some();
        let mut out: Vec<RowsOut> =
            batch.iter().map(|_| if last { RowsOut::Nothing } else { RowsOut::Hidden(Vec::new()) }).collect();
        for segments in passes(batch, self.config.width) {
            let hidden = self.pass(batch, &segments)?;
            if let Some(head) = &self.head {
                let ends = wanted(&segments);
                if !ends.is_empty() {
                    let rows = ends.iter().map(|&(_, row)| hidden.clone().slice([row..row + 1])).collect();
                    let rows = B::rms_norm(Tensor::cat(rows, 0), &head.norm, self.config.norm_eps);
                    let logits = self.read(head.output.forward(rows))?;
                    for ((entry, _), logits) in ends.iter().zip(logits.chunks_exact(self.config.vocab)) {
                        out[*entry] = RowsOut::Logits(logits.to_vec());
                    }
                } else {
                    B::settle(&self.device).map_err(StageError::Device)?;
                }
            } else {
                let values = self.read(hidden)?;
                let mut at = 0;
                for segment in &segments {
                    let len = segment.rows.len() * self.config.width;
                    if let RowsOut::Hidden(rows) = &mut out[segment.entry] {
                        rows.extend(&values[at..at + len]);
                    }
                    at += len;
                }
            }
        }
        Ok(out)
    }

    /// The segments' rows through all layers: `[rows, width]`.
    fn pass(&mut self, batch: &[Rows<'_>], segments: &[Segment]) -> Result<Tensor<B, 2>, StageError> {
        let Self { config, device, .. } = &*self;
        let width = config.width;
        let mut hidden: Vec<f32> = Vec::new();
        let mut positions: Vec<usize> = Vec::new();
        for segment in segments {
            positions.extend(segment.position..segment.position + segment.rows.len());
            match batch[segment.entry].input {
                RowsIn::Tokens(tokens) => self.embed(&tokens[segment.rows.clone()], &mut hidden)?,
                RowsIn::Hidden(rows) => hidden.extend(&rows[segment.rows.start * width..segment.rows.end * width]),
            }
        }
        let rotation = Rotation { kind: config.rope.kind, dims: config.rope.dims, head_dim: config.head_dim };
        let attention = Attention {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            capacity: self.options.context,
        };
        let table = upload(rotary_table(&self.frequencies, &positions), rotation.dims, device);
        let pass = Pass { segments, table, rotation, attention, eps: config.norm_eps };
        let mut hidden = upload(hidden, width, device);
        for (i, layer) in self.layers.iter().enumerate() {
            hidden = layer.forward(hidden, &pass, &mut self.sequences, i);
        }
        for segment in segments {
            let sequence = self.sequences.get_mut(&segment.sequence).expect("opened before the pass");
            sequence.held = segment.position + segment.rows.len();
        }
        Ok(hidden)
    }

    /// Rows of the embedding, decoded on the host: a handful of kilobytes out of a matrix the device need not hold.
    fn embed(&self, tokens: &[u32], hidden: &mut Vec<f32>) -> Result<(), StageError> {
        let table = self.file.tensor("token_embd.weight").ok_or_else(|| input("the file lacks token_embd.weight"))?;
        for &token in tokens {
            let at = hidden.len();
            hidden.resize(at + self.config.width, 0.0);
            table.quant.dequantize(table.row(token as usize), &mut hidden[at..]);
        }
        Ok(())
    }

    fn read(&self, rows: Tensor<B, 2>) -> Result<Vec<f32>, StageError> {
        read::<B>(rows, &self.device)
    }
}

impl<B: MeshBackend> Stage for BurnStage<B>
where
    B::Device: Send,
{
    fn forward(&mut self, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        self.check(batch)?;
        guarded(|| self.run(batch))
    }

    fn held(&self, sequence: SequenceId) -> usize {
        self.sequences.get(&sequence).map_or(0, |s| s.held)
    }

    fn release(&mut self, sequence: SequenceId) {
        self.spare.extend(self.sequences.remove(&sequence).map(|s| s.caches));
    }

    fn resident_bytes(&self) -> ResidentBytes {
        let open = (self.sequences.len() + self.spare.len()) as u64;
        let caches = open * cache_bytes(&self.config, &self.options);
        ResidentBytes { weights: self.weight_bytes, working: caches + scratch_bytes(&self.config) }
    }

    fn width(&self) -> usize {
        self.config.width
    }

    fn numerics(&self) -> &str {
        &self.numerics
    }
}

/// Cuts a batch into passes of at most [`PASS_ROWS`] rows, in order.
fn passes(batch: &[Rows<'_>], width: usize) -> Vec<Vec<Segment>> {
    let mut passes: Vec<Vec<Segment>> = Vec::new();
    let mut room = 0;
    for (entry, rows) in batch.iter().enumerate() {
        let count = match rows.input {
            RowsIn::Tokens(tokens) => tokens.len(),
            RowsIn::Hidden(rows) => rows.len() / width,
        };
        let mut start = 0;
        while start < count {
            if room == 0 {
                passes.push(Vec::new());
                room = PASS_ROWS;
            }
            let end = count.min(start + room);
            let pass = passes.last_mut().expect("just pushed");
            pass.push(Segment {
                entry,
                sequence: rows.sequence,
                position: rows.position + start,
                rows: start..end,
                logits: rows.logits && end == count,
            });
            room -= end - start;
            start = end;
        }
    }
    passes
}

/// Entries whose logits are wanted, each with its last row within the pass.
fn wanted(segments: &[Segment]) -> Vec<(usize, usize)> {
    let ends = segments.iter().scan(0, |at, segment| {
        *at += segment.rows.len();
        Some((segment, *at - 1))
    });
    ends.filter(|(segment, _)| segment.logits).map(|(segment, row)| (segment.entry, row)).collect()
}

/// Cosines, then sines, of each position: `[positions, dims]`.
fn rotary_table(frequencies: &RotaryFrequencies, positions: &[usize]) -> Vec<f32> {
    let magnitude = f64::from(frequencies.magnitude);
    let mut table = Vec::with_capacity(positions.len() * frequencies.inverse.len() * 2);
    for &position in positions {
        let angles = || frequencies.inverse.iter().map(|inverse| position as f64 * inverse);
        table.extend(angles().map(|angle| (angle.cos() * magnitude) as f32));
        table.extend(angles().map(|angle| (angle.sin() * magnitude) as f32));
    }
    table
}

/// Floats as rows on the device. By way of one dimension: CUDA pads the rows of tensors with more.
pub(crate) fn upload<B: MeshBackend>(values: Vec<f32>, width: usize, device: &B::Device) -> Tensor<B, 2> {
    let len = values.len();
    Tensor::<B, 1>::from_data(TensorData::new(values, [len]), device).reshape([len / width, width])
}

/// Rows back on the host. The device is asked first: it answers a read after a failure with old data.
pub(crate) fn read<B: MeshBackend>(rows: Tensor<B, 2>, device: &B::Device) -> Result<Vec<f32>, StageError> {
    B::settle(device).map_err(StageError::Device)?;
    let data = rows.try_into_data().map_err(|error| StageError::Device(error.to_string()))?;
    data.into_vec::<f32>().map_err(|error| StageError::Device(format!("read back something else: {error:?}")))
}

/// burn and cubecl report a lost device by panicking.
fn guarded<T>(work: impl FnOnce() -> Result<T, StageError>) -> Result<T, StageError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(StageError::Device(panic_text(panic.as_ref()))))
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}

fn input(text: impl Into<String>) -> StageError {
    StageError::Input(text.into())
}

/// Bytes of one sequence's caches.
fn cache_bytes(config: &ModelConfig, options: &StageOptions) -> u64 {
    (options.layers.len() * 2 * options.context * config.kv_width() * CACHE_CELL_BYTES) as u64
}

/// Bytes of a pass between its first and last operation, at most.
fn scratch_bytes(config: &ModelConfig) -> u64 {
    let per_row = 8 * config.width + 3 * config.q_width() + 4 * config.kv_width() + 3 * config.ffn;
    ((PASS_ROWS * per_row + 2 * config.vocab) * size_of::<f32>()) as u64
}

/// Refuses what cannot fit, naming the sums: a device that is full computes wrong numbers instead of failing.
fn check_memory(file: &ModelFile, options: &StageOptions, free: Option<u64>) -> Result<(), StageError> {
    let Some(free) = free else { return Ok(()) };
    let config = file.config();
    let head = options.layers.end == config.layers;
    let needed = |name: &str| name != "token_embd.weight" || (head && config.tied);
    let weights: u64 = file
        .tensors()
        .iter()
        .filter(|t| config.belongs_to(&t.name, &options.layers) && needed(&t.name))
        .map(|t| kernels::gpu::packed_bytes(t.quant, t.rows, t.cols))
        .sum();
    let caches = cache_bytes(config, options) * options.sequences as u64;
    let scratch = scratch_bytes(config);
    let total = weights + caches + scratch;
    let room = free - SPARE_BYTES.min(free / 10);
    if total > room {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        return Err(input(format!(
            "the device has {} MiB free, {} less than needed: {} MiB of weights, {} of caches ({} sequences of {} \
             positions), {} of scratch; give it fewer layers, a shorter context or fewer sequences",
            mib(free),
            mib(total - room),
            mib(weights),
            mib(caches),
            options.sequences,
            options.context,
            mib(scratch)
        )));
    }
    Ok(())
}
