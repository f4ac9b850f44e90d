//! Models on the CPU: a range of layers loaded from a file, run pass by pass.
//!
//! Each architecture is one file that reads top to bottom: `model/llama.rs` first.
use std::ops::Range;
use std::sync::Arc;

use crate::cpu::Isa;
use crate::cpu::engine::{Bias, Engine, RowAt, Shape};
use crate::cpu::product::Matrix;
use crate::cpu::rotary::RotaryTable;
use crate::stage::{Activations, ResidentBytes, Rows, RowsIn, RowsOut, SequenceId, Stage, StageError, StageOptions};
use crate::weights::{Architecture, ModelConfig, ModelFile, RopeKind, WeightsError};

mod llama;
mod qwen2;
mod qwen3;

/// Loads layers of a model for this machine's CPU. Matrices stay in the file's mapping; only norms and biases are copied.
///
/// # Errors
/// Options that make no sense, a tensor that is not there, or no threads to be had.
pub fn load_cpu_stage(file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
    Ok(Box::new(CpuStage::load(file, options, Isa::detect())?))
}

/// Rows that go through the layers together: enough to use each weight many times, few enough that scratch stays small.
const ROWS_PER_PASS: usize = 128;

pub(crate) struct CpuStage {
    options: StageOptions,
    width: usize,
    vocab: usize,
    blocks: Vec<Block>,
    embedding: Option<Stored>,
    head: Option<Head>,
    pub(crate) engine: Engine,
    weight_bytes: u64,
    /// Matrices above point into it.
    _file: Arc<ModelFile>,
}

/// One layer of some architecture.
enum Block {
    Llama(llama::Block),
    Qwen2(qwen2::Block),
    Qwen3(qwen3::Block),
}

struct Head {
    norm: Vec<f32>,
    matrix: Stored,
}

/// A matrix in the mapping of the file that the stage keeps open.
struct Stored(Matrix<'static>);

impl Stored {
    fn matrix(&self) -> Matrix<'_> {
        self.0
    }
}

/// Biases around attention: any architecture's files may have them.
struct AttentionBiases {
    /// Of query, key and value.
    inputs: [Option<Vec<f32>>; 3],
    output: Option<Vec<f32>>,
}

impl AttentionBiases {
    fn inputs(&self) -> [Bias<'_>; 3] {
        self.inputs.each_ref().map(Option::as_deref)
    }

    fn output(&self) -> Bias<'_> {
        self.output.as_deref()
    }
}

impl CpuStage {
    pub(crate) fn load(file: Arc<ModelFile>, options: StageOptions, isa: Isa) -> Result<Self, StageError> {
        let config = file.config();
        let StageOptions { layers, sequences, context, threads, .. } = &options;
        if layers.is_empty() || layers.end > config.layers {
            return Err(StageError::Input(format!("layers {layers:?}: the model has 0..{}", config.layers)));
        }
        if *sequences == 0 || *context == 0 || *threads == 0 {
            return Err(StageError::Input(format!(
                "expected at least one sequence, position and thread; found {sequences}, {context} and {threads}"
            )));
        }
        let mut loader = Loader { file: &file, weight_bytes: 0 };
        let blocks = layers.clone().map(|layer| loader.block(config, layer)).collect::<Result<_, _>>()?;
        let embedding = (layers.start == 0).then(|| loader.matrix("token_embd.weight")).transpose()?;
        let head = (layers.end == config.layers).then(|| loader.head(config, embedding.is_some())).transpose()?;
        let weight_bytes = loader.weight_bytes;
        let engine = engine(&file, &options, isa)?;
        let (width, vocab) = (config.width, config.vocab);
        Ok(Self { options, width, vocab, blocks, embedding, head, engine, weight_bytes, _file: file })
    }

    /// Tokens of the vocabulary.
    pub(crate) fn vocab(&self) -> usize {
        self.vocab
    }

    /// Weights that decoding one token reads: all but the embedding, of which it is one row.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        let untied = |stored: &Stored| match &self.head {
            Some(head) if std::ptr::eq(head.matrix.0.bytes(), stored.0.bytes()) => 0,
            Some(_) | None => stored.0.bytes().len() as u64,
        };
        self.weight_bytes - self.embedding.as_ref().map_or(0, untied)
    }

    /// Everything that can be wrong with a batch, before anything changes.
    fn check(&self, batch: &[Rows<'_>]) -> Result<(), StageError> {
        let wrong = |what: String| Err(StageError::Input(what));
        let mut seen: Vec<SequenceId> = Vec::with_capacity(batch.len());
        for rows in batch {
            let sequence = rows.sequence;
            if seen.contains(&sequence) {
                return wrong(format!("sequence {sequence} is twice in one batch; join its rows"));
            }
            seen.push(sequence);
            let count = self.count(rows)?;
            let held = self.engine.cache.held(sequence);
            if rows.position > held {
                return wrong(format!(
                    "sequence {sequence}: rows begin at position {}, but {held} are held; replay from {held}",
                    rows.position
                ));
            }
            if rows.position.checked_add(count).is_none_or(|end| end > self.options.context) {
                return wrong(format!(
                    "sequence {sequence}: {count} rows at position {} exceed the context of {}",
                    rows.position, self.options.context
                ));
            }
        }
        let new = seen.iter().filter(|s| !self.engine.cache.knows(**s)).count();
        if self.engine.cache.open() + new > self.options.sequences {
            return wrong(format!(
                "{new} new sequences beside {} open ones exceed the limit of {}; release one",
                self.engine.cache.open(),
                self.options.sequences
            ));
        }
        Ok(())
    }

    /// Rows of an entry, which are of the kind and shape that this stage takes.
    fn count(&self, rows: &Rows<'_>) -> Result<usize, StageError> {
        let count = match rows.input {
            RowsIn::Tokens(tokens) if self.embedding.is_some() => {
                if let Some(token) = tokens.iter().find(|t| **t as usize >= self.vocab) {
                    return Err(StageError::Input(format!("token {token} of a vocabulary of {}", self.vocab)));
                }
                tokens.len()
            }
            RowsIn::Hidden(hidden) if self.embedding.is_none() => {
                if !hidden.len().is_multiple_of(self.width) {
                    let found = hidden.len();
                    return Err(StageError::Input(format!("{found} numbers are no whole rows of {}", self.width)));
                }
                hidden.len() / self.width
            }
            RowsIn::Tokens(_) => return Err(StageError::Input("tokens for a stage without layer 0".into())),
            RowsIn::Hidden(_) => return Err(StageError::Input("hidden rows for the stage with layer 0".into())),
        };
        if count == 0 {
            return Err(StageError::Input(format!("no rows for sequence {}", rows.sequence)));
        }
        Ok(count)
    }

    /// One pass: `rows` of the batch (entry, row within it) through all layers.
    fn pass(&mut self, batch: &[Rows<'_>], rows: &[(usize, usize)], out: &mut [RowsOut]) {
        let Self { blocks, embedding, head, engine, width, vocab, .. } = self;
        let at = |&(entry, row): &(usize, usize)| RowAt {
            sequence: batch[entry].sequence,
            position: batch[entry].position + row,
        };
        engine.begin(rows.iter().map(at));
        for (hidden, &(entry, row)) in engine.hidden.chunks_exact_mut(*width).zip(rows) {
            match (batch[entry].input, &*embedding) {
                (RowsIn::Tokens(tokens), Some(table)) => {
                    let table = table.matrix();
                    table.kind().dequantize(table.row(tokens[row] as usize), hidden);
                }
                (RowsIn::Hidden(from), _) => hidden.copy_from_slice(&from[row * *width..][..*width]),
                (RowsIn::Tokens(_), None) => unreachable!("checked with the batch"),
            }
        }
        for (layer, block) in blocks.iter().enumerate() {
            match block {
                Block::Llama(block) => block.forward(engine, layer),
                Block::Qwen2(block) => block.forward(engine, layer),
                Block::Qwen3(block) => block.forward(engine, layer),
            }
        }
        engine.settle();
        let Some(head) = head else {
            for (hidden, &(entry, row)) in engine.hidden.chunks_exact(*width).zip(rows) {
                if let RowsOut::Hidden(out) = &mut out[entry] {
                    out[row * *width..][..*width].copy_from_slice(hidden);
                }
            }
            return;
        };
        let ends = |&(entry, row): &(usize, usize)| {
            let count = match batch[entry].input {
                RowsIn::Tokens(tokens) => tokens.len(),
                RowsIn::Hidden(hidden) => hidden.len() / *width,
            };
            batch[entry].logits && row + 1 == count
        };
        let wanted: Vec<usize> = (0..rows.len()).filter(|&i| ends(&rows[i])).collect();
        if wanted.is_empty() {
            return;
        }
        let logits = engine.logits(&wanted, &head.norm, head.matrix.matrix());
        if let [one] = wanted[..] {
            out[rows[one].0] = RowsOut::Logits(logits);
            return;
        }
        for (logits, i) in logits.chunks_exact(*vocab).zip(wanted) {
            out[rows[i].0] = RowsOut::Logits(logits.to_vec());
        }
    }
}

impl Stage for CpuStage {
    fn forward(&mut self, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        self.check(batch)?;
        let mut out = Vec::with_capacity(batch.len());
        let mut rows = Vec::new();
        for (entry, each) in batch.iter().enumerate() {
            let count = self.count(each)?;
            self.engine.cache.extend(each.sequence, each.position, count);
            rows.extend((0..count).map(|row| (entry, row)));
            out.push(match self.head {
                None => RowsOut::Hidden(vec![0.0; count * self.width]),
                Some(_) => RowsOut::Nothing,
            });
        }
        for rows in rows.chunks(ROWS_PER_PASS) {
            self.pass(batch, rows, &mut out);
        }
        Ok(out)
    }

    fn held(&self, sequence: SequenceId) -> usize {
        self.engine.cache.held(sequence)
    }

    fn release(&mut self, sequence: SequenceId) {
        self.engine.cache.release(sequence);
    }

    fn resident_bytes(&self) -> ResidentBytes {
        ResidentBytes { weights: self.weight_bytes, working: self.engine.bytes() as u64 }
    }

    fn width(&self) -> usize {
        self.width
    }

    fn numerics(&self) -> &str {
        match self.options.activations {
            Activations::Int8 => "cpu-int8-1",
            Activations::F32 => "cpu-f32-1",
        }
    }
}

fn engine(file: &ModelFile, options: &StageOptions, isa: Isa) -> Result<Engine, StageError> {
    let config = file.config();
    let factors = file.tensor("rope_freqs.weight").map(|t| t.to_f32());
    let rotary = RotaryTable::new(config.rope.frequencies(factors.as_deref()).map_err(unusable)?);
    let shape = Shape {
        width: config.width,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        eps: config.norm_eps,
        halves: config.rope.kind == RopeKind::Halves,
        activations: options.activations,
    };
    Engine::new(isa, options.threads, shape, options.layers.len(), rotary)
        .map_err(|e| StageError::Device(format!("{} compute threads: {e}", options.threads)))
}

fn unusable(error: WeightsError) -> StageError {
    StageError::Input(format!("the weights cannot be used: {error}"))
}

/// Takes tensors out of a file and counts their bytes.
struct Loader<'a> {
    file: &'a ModelFile,
    weight_bytes: u64,
}

impl Loader<'_> {
    fn block(&mut self, config: &ModelConfig, layer: usize) -> Result<Block, StageError> {
        let mut layer = LayerLoader { loader: self, prefix: format!("blk.{layer}.") };
        Ok(match config.architecture {
            Architecture::Llama => Block::Llama(llama::Block::load(&mut layer, config)?),
            Architecture::Qwen2 => Block::Qwen2(qwen2::Block::load(&mut layer, config)?),
            Architecture::Qwen3 => Block::Qwen3(qwen3::Block::load(&mut layer, config)?),
        })
    }

    fn head(&mut self, config: &ModelConfig, embedding_counted: bool) -> Result<Head, StageError> {
        let matrix = self.matrix(config.head_tensor())?;
        if config.tied && embedding_counted {
            let Range { start, end } = matrix.matrix().bytes().as_ptr_range();
            self.weight_bytes -= end as u64 - start as u64;
        }
        Ok(Head { norm: self.vector("output_norm.weight")?, matrix })
    }

    fn matrix(&mut self, name: &str) -> Result<Stored, StageError> {
        let tensor = self.file.tensor(name).ok_or_else(|| missing(name))?;
        self.weight_bytes += tensor.bytes.len() as u64;
        let matrix = Matrix::new(tensor.quant, tensor.rows, tensor.cols, tensor.bytes)
            .ok_or_else(|| StageError::Input(format!("tensor {name:?}: bytes and shape disagree")))?;
        // SAFETY: the bytes belong to the file, which never moves or changes them and which the stage keeps open as long
        // as it has any `Stored`; the lifetime is shortened again by `Stored::matrix`.
        Ok(Stored(unsafe { std::mem::transmute::<Matrix<'_>, Matrix<'static>>(matrix) }))
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>, StageError> {
        let tensor = self.file.tensor(name).ok_or_else(|| missing(name))?;
        self.weight_bytes += tensor.bytes.len() as u64;
        Ok(tensor.to_f32())
    }
}

/// Takes the tensors of one layer, by their names within it.
struct LayerLoader<'a, 'f> {
    loader: &'a mut Loader<'f>,
    prefix: String,
}

impl LayerLoader<'_, '_> {
    fn matrix(&mut self, name: &str) -> Result<Stored, StageError> {
        self.loader.matrix(&format!("{}{name}.weight", self.prefix))
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>, StageError> {
        self.loader.vector(&format!("{}{name}.weight", self.prefix))
    }

    /// Those that the model has.
    fn attention_biases(&mut self, config: &ModelConfig) -> Result<AttentionBiases, StageError> {
        let mut bias = |name: &str, there: bool| {
            there.then(|| self.loader.vector(&format!("{}{name}.bias", self.prefix))).transpose()
        };
        let mut input = |name| bias(name, config.attention_bias);
        Ok(AttentionBiases {
            inputs: [input("attn_q")?, input("attn_k")?, input("attn_v")?],
            output: bias("attn_output", config.attention_output_bias)?,
        })
    }
}

fn missing(name: &str) -> StageError {
    StageError::Input(format!("tensor {name:?} is missing"))
}

#[cfg(test)]
mod tests;
