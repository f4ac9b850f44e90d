//! Models on the CPU: a range of layers loaded from a file, run pass by pass as their recipe says.
//!
//! Next: `model/load.rs`, then `cpu/engine.rs`.
use std::sync::Arc;

use crate::cpu::Isa;
use crate::cpu::engine::{Engine, Shape};
use crate::decoder::{self, Decoder, PassInput, RowAt};
use crate::pool::Pool;
use crate::recipe::Recipe;
use crate::rotary::RotaryTables;
use crate::stage::{ResidentBytes, SequenceId, Stage, StageError, StageOptions};
use crate::weights::{ModelFile, RopeKind};

pub(crate) mod load;

use load::{Head, LayerWeights, Loader};

/// Loads layers of a model for this machine's CPU. Matrices become tiles in memory; embedding rows stay in the file's mapping.
///
/// # Errors
/// Options that make no sense, a tensor that is not there or holds numbers that are not finite, no threads or no memory.
pub fn load_cpu_stage(file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
    Ok(Box::new(CpuEngine::load(file, options, Isa::detect())?))
}

/// As [`load_cpu_stage`], on the plainest instruction set: the reference that devices are checked with.
///
/// # Errors
/// See there.
pub fn load_plain_stage(file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
    Ok(Box::new(CpuEngine::load(file, options, Isa::Portable)?))
}

/// A stage on the processor.
pub(crate) type CpuStage = Decoder<CpuEngine>;

/// Layers in the processor's memory.
pub(crate) struct CpuEngine {
    options: StageOptions,
    width: usize,
    recipe: Recipe,
    layers: Vec<LayerWeights>,
    head: Option<Head>,
    engine: Engine,
    weight_bytes: u64,
    /// Embedding rows are read from it.
    file: Arc<ModelFile>,
}

impl CpuEngine {
    pub(crate) fn load(file: Arc<ModelFile>, options: StageOptions, isa: Isa) -> Result<CpuStage, StageError> {
        let config = file.config();
        decoder::check_options(config, &options)?;
        let recipe = Recipe::of(config);
        let no_threads = |e| StageError::Device(format!("{} compute threads: {e}", options.threads));
        let mut engine = engine(&file, &recipe, &options, isa, Pool::new(options.threads).map_err(no_threads)?)?;
        let mut loader = Loader { file: &file, pool: &mut engine.pool, bytes: 0 };
        let range = options.layers.clone();
        let layers = range.clone().map(|layer| loader.layer(&recipe.layers[layer], layer)).collect::<Result<_, _>>()?;
        let head = (range.end == config.layers).then(|| loader.head(config)).transpose()?;
        let (weight_bytes, width) = (loader.bytes, config.width);
        let stage_options = options.clone();
        let engine = Self { options, width, recipe, layers, head, engine, weight_bytes, file: Arc::clone(&file) };
        Ok(Decoder::new(config, &stage_options, engine))
    }

    /// Weights that decoding one token reads, beside a row of the embedding.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        self.weight_bytes
    }
}

impl decoder::Engine for CpuEngine {
    const ROWS_PER_PASS: usize = 128;

    fn reserve(&mut self, wanted: &[(SequenceId, usize)]) -> Result<(), StageError> {
        wanted.iter().for_each(|(sequence, positions)| self.engine.cache.reserve(*sequence, *positions));
        Ok(())
    }

    fn release(&mut self, sequence: SequenceId) {
        self.engine.cache.release(sequence);
    }

    fn pass(&mut self, rows: &[RowAt], input: PassInput<'_>, wanted: &[usize]) -> Result<Vec<f32>, StageError> {
        let Self { options, recipe, layers, head, engine, width, file, .. } = self;
        engine.begin(rows);
        match input {
            PassInput::Tokens(tokens) => {
                let rows = engine.hidden.chunks_exact_mut(*width);
                rows.zip(tokens).for_each(|(hidden, token)| embed(file, recipe, *token, hidden));
            }
            PassInput::Hidden(hidden) => engine.hidden.copy_from_slice(hidden),
        }
        for (index, weights) in layers.iter().enumerate() {
            engine.layer(&recipe.layers[options.layers.start + index], weights, index);
        }
        engine.settle();
        Ok(match head {
            None => engine.hidden.clone(),
            Some(_) if wanted.is_empty() => Vec::new(),
            Some(head) => engine.logits(wanted, &head.norm, head.matrix.tiles(), recipe.logit_cap),
        })
    }

    fn resident_bytes(&self) -> ResidentBytes {
        ResidentBytes { weights: self.weight_bytes, working: self.engine.bytes() as u64 }
    }

    fn numerics(&self) -> &str {
        self.options.activations.numerics()
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

fn engine(
    file: &ModelFile,
    recipe: &Recipe,
    options: &StageOptions,
    isa: Isa,
    pool: Pool,
) -> Result<Engine, StageError> {
    let config = file.config();
    let shape = Shape {
        width: config.width,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        eps: config.norm_eps,
        halves: config.rope.kind == RopeKind::Halves,
        activations: options.activations,
    };
    Ok(Engine::new(isa, pool, shape, options.layers.len(), RotaryTables::of(file, recipe, options.layers.clone())?))
}

#[cfg(test)]
mod tests;
