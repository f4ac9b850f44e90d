//! Models on the CPU: a range of layers loaded from a file, run pass by pass as their recipe says.
//!
//! Next: `model/load.rs`, then `cpu/engine.rs`.
use std::sync::Arc;

use crate::cpu::Isa;
use crate::cpu::engine::{Engine, RowAt, Shape};
use crate::cpu::rotary::RotaryTable;
use crate::pool::Pool;
use crate::recipe::Recipe;
use crate::stage::{Activations, ResidentBytes, Rows, RowsIn, RowsOut, SequenceId, Stage, StageError, StageOptions};
use crate::weights::{ModelFile, RopeKind, WeightsError};

pub(crate) mod load;

use load::{Head, LayerWeights, Loader};

/// Loads layers of a model for this machine's CPU. Matrices become tiles in memory; embedding rows stay in the file's mapping.
///
/// # Errors
/// Options that make no sense, a tensor that is not there or holds numbers that are not finite, no threads or no memory.
pub fn load_cpu_stage(file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
    Ok(Box::new(CpuStage::load(file, options, Isa::detect())?))
}

/// Rows that go through the layers together: enough to use each weight many times, few enough that scratch stays small.
const ROWS_PER_PASS: usize = 128;

pub(crate) struct CpuStage {
    options: StageOptions,
    width: usize,
    vocab: usize,
    recipe: Recipe,
    layers: Vec<LayerWeights>,
    head: Option<Head>,
    pub(crate) engine: Engine,
    weight_bytes: u64,
    /// Embedding rows are read from it.
    file: Arc<ModelFile>,
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
        let recipe = Recipe::of(config);
        let no_threads = |e| StageError::Device(format!("{threads} compute threads: {e}"));
        let mut engine = engine(&file, &options, isa, Pool::new(*threads).map_err(no_threads)?)?;
        let mut loader = Loader { file: &file, pool: &mut engine.pool, bytes: 0 };
        let weights =
            layers.clone().map(|layer| loader.layer(&recipe.layers[layer], layer)).collect::<Result<_, _>>()?;
        let head = (layers.end == config.layers).then(|| loader.head(config)).transpose()?;
        let weight_bytes = loader.bytes;
        let (width, vocab) = (config.width, config.vocab);
        Ok(Self { options, width, vocab, recipe, layers: weights, head, engine, weight_bytes, file })
    }

    /// Tokens of the vocabulary.
    pub(crate) fn vocab(&self) -> usize {
        self.vocab
    }

    /// Weights that decoding one token reads, beside a row of the embedding.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        self.weight_bytes
    }

    fn embeds(&self) -> bool {
        self.options.layers.start == 0
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
            RowsIn::Tokens(tokens) if self.embeds() => {
                if let Some(token) = tokens.iter().find(|t| **t as usize >= self.vocab) {
                    return Err(StageError::Input(format!("token {token} of a vocabulary of {}", self.vocab)));
                }
                tokens.len()
            }
            RowsIn::Hidden(hidden) if !self.embeds() => {
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
        let Self { options, recipe, layers, head, engine, width, vocab, file, .. } = self;
        let at = |&(entry, row): &(usize, usize)| RowAt {
            sequence: batch[entry].sequence,
            position: batch[entry].position + row,
        };
        engine.begin(rows.iter().map(at));
        for (hidden, &(entry, row)) in engine.hidden.chunks_exact_mut(*width).zip(rows) {
            match batch[entry].input {
                RowsIn::Tokens(tokens) => embed(file, recipe, tokens[row], hidden),
                RowsIn::Hidden(from) => hidden.copy_from_slice(&from[row * *width..][..*width]),
            }
        }
        for (index, weights) in layers.iter().enumerate() {
            engine.layer(&recipe.layers[options.layers.start + index], weights, index);
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
        let logits = engine.logits(&wanted, &head.norm, head.matrix.tiles(), recipe.logit_cap);
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
            Activations::Int8 => "int8-2",
            Activations::F32 => "f32-2",
        }
    }
}

/// The embedding of a token, which is one of the vocabulary.
fn embed(file: &ModelFile, recipe: &Recipe, token: u32, row: &mut [f32]) {
    let table = file.tensor(EMBEDDING).expect("checked when the file was opened");
    let row_bytes = table.bytes.len() / table.rows;
    table.quant.dequantize(&table.bytes[token as usize * row_bytes..][..row_bytes], row);
    if let Some(scale) = recipe.embed_scale {
        row.iter_mut().for_each(|x| *x *= scale);
    }
}

const EMBEDDING: &str = "token_embd.weight";

fn engine(file: &ModelFile, options: &StageOptions, isa: Isa, pool: Pool) -> Result<Engine, StageError> {
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
    Ok(Engine::new(isa, pool, shape, options.layers.len(), rotary))
}

fn unusable(error: WeightsError) -> StageError {
    StageError::Input(format!("the weights cannot be used: {error}"))
}

#[cfg(test)]
mod tests;
