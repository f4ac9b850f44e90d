//! The CPU engine: loads a range of layers from a model file and runs forward passes by their recipe.
//!
//! Next: `model/load.rs`, then `engine.rs`.
use std::sync::Arc;

use kernels::cpu::Isa;
use kernels::pool::Pool;
use kernels::threads::Threads;
use kernels::tile::Tiles;

use crate::decoder::{self, Decoder, PassInput, PassOutput, RowAt, SHARED_POSITIONS};
use crate::engine::{Engine, Shape};
use crate::recipe::Recipe;
use crate::rotary::RotaryTables;
use crate::stage::{ResidentBytes, SequenceId, Stage, StageError, StageOptions};
use crate::weights::{ModelFile, RopeKind};

pub(crate) mod load;

use load::{FeedForward, LayerWeights, Loader, Matrix, OutputHead};

/// Loads layers of a model for this machine's CPU. All weights are copied into memory as tiles and vectors; the file is not
/// read afterwards.
///
/// # Errors
/// Invalid options, a tensor that is missing or holds a non-finite number, a file that was modified or truncated since it was
/// opened, no threads or no memory.
pub fn load_cpu_stage(file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
    Ok(Box::new(CpuEngine::load(file, options, Isa::detect())?))
}

/// As [`load_cpu_stage`] with the portable instruction set: the reference that devices are checked against.
///
/// # Errors
/// As [`load_cpu_stage`].
pub fn load_plain_stage(file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
    Ok(Box::new(CpuEngine::load(file, options, Isa::Portable)?))
}

/// A stage on the CPU.
pub(crate) type CpuStage = Decoder<CpuEngine>;

/// Weights and caches of a range of layers in host memory.
pub(crate) struct CpuEngine {
    options: StageOptions,
    width: usize,
    recipe: Recipe,
    /// The embedding table; `None` if layer 0 is not in the range or the output matrix is tied to it.
    embedding: Option<Matrix>,
    layers: Vec<LayerWeights>,
    head: Option<OutputHead>,
    engine: Engine,
    weight_bytes: u64,
    /// Keeps the model file open: its lock is held, and the node's model cache keeps the file.
    _file: Arc<ModelFile>,
}

impl CpuEngine {
    pub(crate) fn load(file: Arc<ModelFile>, options: StageOptions, isa: Isa) -> Result<CpuStage, StageError> {
        let config = file.config();
        decoder::check_options(config, &options)?;
        file.check_unchanged()?;
        let recipe = Recipe::of(config);
        let no_threads = |e| StageError::Device(format!("{} compute threads: {e}", options.threads));
        let engine = engine(&file, &recipe, &options, isa)?;
        // A pool of its own, dropped after loading: the node's compute threads may be busy.
        let mut pool = Pool::new(options.threads).map_err(no_threads)?;
        let mut loader = Loader { file: &file, pool: &mut pool, bytes: 0 };
        let range = options.layers.clone();
        let (first, head) = (range.start == 0, config.has_head(&range));
        let embedding = (first && !(head && config.tied)).then(|| loader.matrix(EMBEDDING)).transpose()?;
        let layers = range.clone().map(|layer| loader.layer(&recipe.layers[layer], layer)).collect::<Result<_, _>>()?;
        let head = head.then(|| loader.head(config)).transpose()?;
        file.check_unchanged()?; // the bytes read match the header
        let (weight_bytes, width) = (loader.bytes, config.width);
        let (stage_options, _file) = (options.clone(), Arc::clone(&file));
        let engine = Self { options, width, recipe, embedding, layers, head, engine, weight_bytes, _file };
        Decoder::new(&file, &stage_options, engine)
    }

    /// Bytes of weights read to decode one token, not counting its embedding row.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        let unused = |layer: &LayerWeights| match &layer.feed_forward {
            FeedForward::Dense(_) => 0,
            FeedForward::Experts(experts) => experts.unused_bytes(),
        };
        let embedding = self.embedding.as_ref().map_or(0, |matrix| matrix.tiles().bytes().len() as u64);
        self.weight_bytes - embedding - self.layers.iter().map(unused).sum::<u64>()
    }
}

impl decoder::Engine for CpuEngine {
    const ROWS_PER_PASS: usize = 128;

    fn reserve(&mut self, requested: &[(SequenceId, usize)]) -> Result<(), StageError> {
        self.engine.cache.reserve(requested).map_err(|(missing, all)| {
            StageError::Input(format!(
                "{} sequences need {missing} more pages than are free of the {all} pages of the cache; release a sequence",
                requested.len()
            ))
        })
    }

    fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize) {
        self.engine.cache.share(from, to, positions);
    }

    fn release(&mut self, sequence: SequenceId) {
        self.engine.cache.release(sequence);
    }

    fn pass(
        &mut self,
        threads: &mut Threads,
        rows: &[RowAt],
        input: PassInput<'_>,
        requested: &[usize],
    ) -> Result<Option<PassOutput>, StageError> {
        let pool = threads.pool();
        let Self { options, recipe, embedding, layers, head, engine, width, .. } = self;
        engine.begin(rows);
        match input {
            PassInput::Tokens(tokens) => {
                let table = embedding.as_ref().or(head.as_ref().map(|head| &head.matrix));
                let table = table.expect("a stage that takes tokens has the embedding").tiles();
                let rows = engine.hidden.chunks_exact_mut(*width);
                rows.zip(tokens).for_each(|(hidden, token)| embed(table, recipe, *token, hidden));
            }
            PassInput::Hidden(pieces) => {
                let mut rest = &mut engine.hidden[..];
                for piece in pieces {
                    let (rows, after) = rest.split_at_mut(piece.rows.len());
                    rows.copy_from_slice(piece.rows);
                    rest = after;
                }
            }
        }
        for (index, weights) in layers.iter().enumerate() {
            engine.layer(pool, &recipe.layers[options.layers.start + index], weights, index);
        }
        engine.add_delta();
        Ok(Some(PassOutput::Numbers(match head {
            None => engine.hidden.clone(),
            Some(_) if requested.is_empty() => Vec::new(),
            Some(head) => engine.logits(pool, requested, &head.norm, head.matrix.tiles(), recipe.logit_cap),
        })))
    }

    fn resident_bytes(&self) -> ResidentBytes {
        ResidentBytes { weights: self.weight_bytes, working: self.engine.bytes() as u64 }
    }

    fn numerics(&self) -> &str {
        self.options.activations.numerics()
    }
}

/// Writes the embedding of a token. The token must be in the vocabulary.
fn embed(table: Tiles<'_>, recipe: &Recipe, token: u32, row: &mut [f32]) {
    table.write_row(token as usize, row);
    if let Some(scale) = recipe.embed_scale {
        row.iter_mut().for_each(|x| *x *= scale);
    }
}

const EMBEDDING: &str = "token_embd.weight";

fn engine(file: &ModelFile, recipe: &Recipe, options: &StageOptions, isa: Isa) -> Result<Engine, StageError> {
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
    // Each context in whole shared pages, and one page for a challenge beside the requests.
    let positions_max = options.sequences * options.context.next_multiple_of(SHARED_POSITIONS) + SHARED_POSITIONS;
    let rotary = RotaryTables::load(file, recipe, options.layers.clone(), options.context)?;
    Ok(Engine::new(isa, shape, options.layers.len(), rotary, positions_max))
}

#[cfg(test)]
mod tests;
