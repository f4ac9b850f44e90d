//! Loads the weights of a range of layers from the file and converts them to tiles.
use parking_lot::Mutex;
use std::ops::Range;

use kernels::order::experts::Routing;
use kernels::pool::Pool;
use kernels::quant::QuantType;
use kernels::tile::{Layout, ROWS, Tiles, convert};
use memmap2::MmapMut;

use crate::engine::Shared;
use crate::recipe::LayerRecipe;
use crate::stage::StageError;
use crate::weights::config::CORRECTIONS;
use crate::weights::{HeadNorms, ModelConfig, ModelFile};

/// A matrix stored as tiles.
pub(crate) struct Matrix {
    kind: QuantType,
    rows: usize,
    cols: usize,
    bytes: MmapMut,
}

/// Writes the tiles of a range of rows.
type Fill<'a> = dyn Fn(Range<usize>, &mut [u8]) -> Result<(), StageError> + Sync + 'a;

impl Matrix {
    /// Builds a matrix on all threads. `fill` writes the tiles of a row range, which starts at a tile boundary.
    ///
    /// # Errors
    /// An error of `fill`, or no memory.
    pub(crate) fn filled(
        pool: &mut Pool,
        kind: QuantType,
        [rows, cols]: [usize; 2],
        fill: &Fill<'_>,
    ) -> Result<Self, StageError> {
        let layout = Layout::of(kind);
        let size = layout.matrix_bytes(rows, cols);
        let no_memory = |e| StageError::Device(format!("no memory for {size} bytes of weights: {e}"));
        // The kernel zeroes a page on first touch, by the thread that writes it.
        let mut bytes = MmapMut::map_anon(size.max(1)).map_err(no_memory)?;
        #[cfg(target_os = "linux")]
        let _ = bytes.advise(memmap2::Advice::HugePage); // a hint
        let tile_row_bytes = layout.matrix_bytes(1, cols);
        let (out, failed) = (Shared::of(&mut bytes[..size]), Mutex::new(None::<StageError>));
        pool.run(rows.div_ceil(ROWS), 1, &|_, tile_rows| {
            let mine = tile_rows.start * ROWS..(tile_rows.end * ROWS).min(rows);
            // SAFETY: the pool's ranges do not overlap.
            let tiles = unsafe { out.slice(tile_rows.start * tile_row_bytes..tile_rows.end * tile_row_bytes) };
            if let Err(error) = fill(mine, tiles) {
                *failed.lock() = Some(error);
            }
        });
        match failed.into_inner() {
            Some(error) => Err(error),
            None => Ok(Self { kind, rows, cols, bytes }),
        }
    }

    /// Converts rows from the storage format of a file.
    ///
    /// # Errors
    /// A non-finite number, a scale that tiles do not hold, or no memory.
    pub(crate) fn convert(
        pool: &mut Pool,
        kind: QuantType,
        [rows, cols]: [usize; 2],
        stored: &[u8],
    ) -> Result<Self, StageError> {
        let row_bytes = stored.len() / rows.max(1);
        Self::filled(pool, kind, [rows, cols], &|mine, out| {
            let stored = &stored[mine.start * row_bytes..mine.end * row_bytes];
            convert(kind, cols, mine, stored, out).map_err(|error| StageError::Input(error.to_string()))
        })
    }

    pub(crate) fn tiles(&self) -> Tiles<'_> {
        let size = Layout::of(self.kind).matrix_bytes(self.rows, self.cols);
        Tiles::new(self.kind, self.rows, self.cols, &self.bytes[..size]).expect("made for these rows and columns")
    }

    /// The tiles, to be replaced.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Where the tiles of one of `count` matrices lie that were stored one after another in the rows.
    pub(crate) fn part_of(&self, index: usize, count: usize) -> Range<usize> {
        let each = Layout::of(self.kind).matrix_bytes(self.rows / count, self.cols);
        index * each..(index + 1) * each
    }
}

/// Weights of one layer.
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Vec<f32>,
    /// Query, key, value.
    pub(crate) inputs: [Matrix; 3],
    pub(crate) input_biases: Option<[Vec<f32>; 3]>,
    /// RMSNorm weights of the query and key heads.
    pub(crate) head_norms: Option<[Vec<f32>; 2]>,
    /// A score per query head.
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) output: Matrix,
    pub(crate) output_bias: Option<Vec<f32>>,
    /// RMSNorm weights after attention and feed-forward.
    pub(crate) norms_after: Option<[Vec<f32>; 2]>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) feed_forward: FeedForward,
}

/// What follows attention.
pub(crate) enum FeedForward {
    Dense(Gated),
    Experts(Box<Experts>),
}

/// A gated feed-forward block, or those of all experts, one after another in the rows.
pub(crate) struct Gated {
    /// Gate and up.
    pub(crate) inputs: [Matrix; 2],
    pub(crate) down: Matrix,
}

/// A mixture of experts.
pub(crate) struct Experts {
    pub(crate) routing: Routing,
    /// One row per expert.
    pub(crate) router: Matrix,
    pub(crate) router_bias: Option<Vec<f32>>,
    /// One per expert.
    pub(crate) corrections: Option<Vec<f32>>,
    pub(crate) bank: Bank,
    /// The expert of every row.
    pub(crate) shared: Option<SharedExpert>,
}

/// Weights of experts of one layer.
pub(crate) struct Bank {
    /// Number of experts.
    pub(crate) count: usize,
    /// The factors apply to the inputs of experts.
    pub(crate) on_input: bool,
    /// Of gate, up and down, one row per expert.
    pub(crate) biases: Option<[Vec<f32>; 3]>,
    pub(crate) experts: Gated,
}

/// An expert of every row.
pub(crate) struct SharedExpert {
    /// One row: the score whose sigmoid multiplies the output.
    pub(crate) gate: Option<Matrix>,
    pub(crate) expert: Gated,
}

/// Final norm and output matrix.
pub(crate) struct OutputHead {
    pub(crate) norm: Vec<f32>,
    pub(crate) matrix: Matrix,
}

/// Loads tensors from a file and counts the bytes they take in memory.
pub(crate) struct Loader<'a> {
    pub(crate) file: &'a ModelFile,
    pub(crate) pool: &'a mut Pool,
    pub(crate) bytes: u64,
}

impl Experts {
    /// Bytes of the experts that a row does not use.
    pub(crate) fn unused_bytes(&self) -> u64 {
        let Bank { count, experts: Gated { inputs: [gate, up], down }, .. } = &self.bank;
        let bytes: u64 = [gate, up, down].iter().map(|matrix| matrix.tiles().bytes().len() as u64).sum();
        bytes / *count as u64 * (count - self.routing.used) as u64
    }
}

impl Loader<'_> {
    pub(crate) fn layer(&mut self, recipe: &LayerRecipe, index: usize) -> Result<LayerWeights, StageError> {
        let name = |part: &str| format!("blk.{index}.{part}");
        let norms = |loader: &mut Self, there: bool, parts: [&str; 2]| {
            let [a, b] = parts.map(|part| name(&format!("{part}.weight")));
            there.then(|| Ok::<_, StageError>([loader.vector(&a)?, loader.vector(&b)?])).transpose()
        };
        let bias = |loader: &mut Self, part: &str| loader.vector(&name(&format!("{part}.bias")));
        let matrix = |loader: &mut Self, part: &str| loader.matrix(&name(&format!("{part}.weight")));
        let inputs = ["attn_q", "attn_k", "attn_v"];
        let input_biases = || -> Result<_, StageError> {
            let [q, k, v] = inputs;
            Ok([bias(self, q)?, bias(self, k)?, bias(self, v)?])
        };
        let input_biases = recipe.biases.then(input_biases).transpose()?;
        Ok(LayerWeights {
            input_biases,
            attention_norm: self.vector(&name("attn_norm.weight"))?,
            inputs: [matrix(self, inputs[0])?, matrix(self, inputs[1])?, matrix(self, inputs[2])?],
            head_norms: match recipe.head_norms {
                None => None,
                Some(HeadNorms::Weighted) => norms(self, true, ["attn_q_norm", "attn_k_norm"])?,
                Some(HeadNorms::Plain) => {
                    Some([vec![1.0; self.file.config().head_dim], vec![1.0; self.file.config().head_dim]])
                }
            },
            output: matrix(self, "attn_output")?,
            output_bias: recipe.output_bias.then(|| bias(self, "attn_output")).transpose()?,
            norms_after: norms(self, recipe.norms_after, ["post_attention_norm", "post_ffw_norm"])?,
            sinks: recipe.sinks.then(|| self.vector(&name("attn_sinks.weight"))).transpose()?,
            ffn_norm: self.vector(&name(recipe.ffn_norm))?,
            feed_forward: self.feed_forward(recipe, index)?,
        })
    }

    fn feed_forward(&mut self, recipe: &LayerRecipe, index: usize) -> Result<FeedForward, StageError> {
        let mut matrix = |part: &str| self.matrix(&format!("blk.{index}.{part}.weight"));
        let mut gated = |kind: &str| -> Result<Gated, StageError> {
            let mut part = |name: &str| matrix(&format!("{name}{kind}"));
            Ok(Gated { inputs: [part("ffn_gate")?, part("ffn_up")?], down: part("ffn_down")? })
        };
        let Some(config) = recipe.experts else {
            return Ok(FeedForward::Dense(gated("")?));
        };
        let experts = gated("_exps")?;
        let shared = config.shared.map(|_| gated("_shexp")).transpose()?;
        let gate = config.shared.filter(|shared| shared.gated).map(|_| matrix("ffn_gate_inp_shexp")).transpose()?;
        let router = matrix("ffn_gate_inp")?;
        let mut vector = |part: &str| self.vector(&format!("blk.{index}.{part}"));
        let router_bias = config.biases.then(|| vector("ffn_gate_inp.bias")).transpose()?;
        let corrections = config.corrected.then(|| vector(CORRECTIONS)).transpose()?;
        let biases = ["ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"];
        let mut all = || Ok::<_, StageError>([vector(biases[0])?, vector(biases[1])?, vector(biases[2])?]);
        let biases = config.biases.then(&mut all).transpose()?;
        Ok(FeedForward::Experts(Box::new(Experts {
            routing: config.routing(),
            router,
            router_bias,
            corrections,
            bank: Bank { count: config.count, on_input: config.on_input, biases, experts },
            shared: shared.map(|expert| SharedExpert { gate, expert }),
        })))
    }

    pub(crate) fn head(&mut self, config: &ModelConfig) -> Result<OutputHead, StageError> {
        Ok(OutputHead { norm: self.vector("output_norm.weight")?, matrix: self.matrix(config.head_tensor())? })
    }

    pub(crate) fn matrix(&mut self, name: &str) -> Result<Matrix, StageError> {
        let tensor = self.file.tensor(name).ok_or_else(|| missing(name))?;
        let fill = |rows: Range<usize>, out: &mut [u8]| Ok(tensor.read_tiles(rows, out)?);
        let matrix = Matrix::filled(self.pool, tensor.quant, [tensor.rows, tensor.cols], &fill)?;
        self.bytes += matrix.tiles().bytes().len() as u64;
        Ok(matrix)
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>, StageError> {
        let vector = self.file.tensor(name).ok_or_else(|| missing(name))?.to_finite_f32()?;
        self.bytes += size_of_val(&vector[..]) as u64;
        Ok(vector)
    }
}

pub(crate) fn missing(name: &str) -> StageError {
    StageError::Input(format!("tensor {name:?} is missing"))
}
