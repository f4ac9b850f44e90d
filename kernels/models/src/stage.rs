//! A stage: a contiguous range of a model's layers with its KV caches. It is the unit of model computation in the mesh.
use std::ops::Range;

use kernels::boundary::Codec;
use kernels::threads::Threads;

use crate::hidden_rows::{HiddenRows, Piece};
use crate::sampler::{LogitChanges, SampleError, SamplerSettings};

/// Options to load a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageOptions {
    /// Layers `start..end`. Layer 0 includes the embedding; the last layer includes the final norm and the output head.
    pub layers: Range<usize>,
    /// Number of whole contexts that the cache has room for. More sequences may be open if they are shorter.
    pub sequences: usize,
    /// Context length: maximum positions per sequence; exceeding it is an error.
    pub context: usize,
    /// Arithmetic of matrix products. Part of the numerics contract.
    pub activations: Activations,
    /// Bytes of the weights of experts that may lie in RAM, where the processor computes them. Only for GPUs: the CPU has all
    /// weights in RAM.
    pub ram: u64,
    /// Threads used for loading. Each batch brings its own compute threads.
    pub threads: usize,
}

/// How activations enter a quantised matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Quantised to 8 bits in blocks of 32 with one scale each: fast.
    Int8,
    /// Kept as f32: the strict path, equal to the f32 oracles.
    F32,
}

impl Activations {
    /// Bytes per element of the CPU's KV cache. f16 with 8-bit activations: its rounding error is the smaller of the two, and
    /// it halves memory and traffic. f32 on the strict path.
    #[must_use]
    pub const fn cache_cell_bytes(self) -> usize {
        match self {
            Self::Int8 => 2,
            Self::F32 => 4,
        }
    }

    /// Numerics id: names the order of arithmetic that every engine keeps with these activations. Equal ids, equal bits.
    #[must_use]
    pub const fn numerics(self) -> &'static str {
        match self {
            Self::Int8 => "int8-2",
            Self::F32 => "f32-2",
        }
    }
}

/// Identifies a sequence's cache within a stage.
pub type SequenceId = u64;

/// Rows of one sequence at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The sequence; opened by its first rows at position 0.
    pub sequence: SequenceId,
    /// Position of the first row. Must not exceed the number of cached positions; positions from here on are overwritten.
    pub position: usize,
    /// The rows.
    pub input: RowsIn<'a>,
    /// Output of the last row if the stage has the output head; other stages ignore it.
    pub output: RequestedOutput<'a>,
}

/// Requested output of the last row of an entry, for a stage with the output head.
#[derive(Clone, Copy, Debug)]
pub enum RequestedOutput<'a> {
    /// Nothing: the rows only fill the cache.
    Nothing,
    /// The logits.
    Logits,
    /// The token that the sampler draws from the logits.
    Token(Draw<'a>),
    /// One token after each of the last `drafts` + 1 rows, the draw being that of the first. For drafts of tokens that are
    /// verified.
    Tokens {
        /// The draw of the first token; each of the others has the position after the one before.
        draw: Draw<'a>,
        /// Rows of drafts, fewer than all.
        drafts: usize,
    },
}

/// How to draw a token.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// Settings of the request.
    pub settings: SamplerSettings,
    /// Position of the drawn token: with the seed, the key of the random number.
    pub position: u32,
    /// Changes to the logits before the draw.
    pub changes: LogitChanges<'a>,
    /// Also return log-probabilities: of the drawn token, and of this many most likely ones.
    pub logprobs: Option<usize>,
}

/// Input rows.
#[derive(Clone, Copy, Debug)]
pub enum RowsIn<'a> {
    /// Token ids (stage with layer 0).
    Tokens(&'a [u32]),
    /// Hidden rows, `[count, width]` row-major (any other stage).
    Hidden(Piece<'a>),
}

impl<'a> RowsIn<'a> {
    /// Hidden rows in RAM.
    #[must_use]
    pub fn hidden(rows: &'a [f32]) -> Self {
        Self::Hidden(Piece::in_ram(rows))
    }
}

/// Output rows, one value per entry of the batch.
#[derive(Clone, Debug, PartialEq)]
pub enum RowsOut {
    /// Hidden rows `[count, width]` for the next stage.
    Hidden(HiddenRows),
    /// The same in the encoding that [`Stage::encode_rows`] asked for.
    Encoded(Vec<u8>),
    /// Logits `[vocabulary]` of the last row.
    Logits(Vec<f32>),
    /// The drawn token.
    Token(Drawn),
    /// The tokens drawn after the row before the drafts and after each draft.
    Tokens(Vec<u32>),
    /// The normalised row `[width]` of the last row: any output that is requested of a model for embeddings.
    Embedding(Vec<f32>),
    /// Last stage, no output requested.
    Nothing,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Its log-probability and those of the most likely tokens, if the draw asks for them.
    pub logprobs: Option<Logprobs>,
}

/// Natural logarithms of probabilities under the unchanged logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// That of the drawn token.
    pub drawn: f32,
    /// The most likely tokens, the most likely one first; of equal ones the lower id first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Those of a token and of the `most` most likely ones.
    #[must_use]
    pub fn of(logits: &[f32], token: u32, most: usize) -> Self {
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - greatest).exp()).sum();
        let log = |logit: f32| (f64::from(logit - greatest) - sum.ln()) as f32;
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if most < ids.len() {
            ids.select_nth_unstable_by(most, order);
            ids.truncate(most);
        }
        ids.sort_unstable_by(order);
        let top = ids.into_iter().map(|id| (id, log(logits[id as usize]))).collect();
        Self { drawn: logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| log(*logit)), top }
    }
}

/// State of a submitted batch.
#[derive(Debug)]
pub enum Submitted {
    /// Computed: one result per entry.
    Done(Vec<RowsOut>),
    /// Queued on a device; [`Stage::finish`] returns the results.
    Queued,
}

/// A loaded stage. `threads` are used by the CPU engine; GPU stages ignore them.
///
/// The numerics contract: a row's result has the same bits alone or in any batch, with any chunking of the prefill, any thread
/// count and any partition of the layers.
pub trait Stage: Send {
    /// Submits the rows of several sequences as one batch. If the batch is queued, it must be finished before any other call to
    /// the stage. After an error the caches of the batch are invalid: release or rewrite them.
    ///
    /// # Errors
    /// Input that does not fit the stage (kind, width, token id, position gap, context full, too many sequences), or a device
    /// failure.
    fn submit(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Submitted, StageError>;

    /// Waits for the queued batch, which must be `batch`, and returns its results.
    ///
    /// # Errors
    /// No batch is queued, invalid logits, or a device failure.
    fn finish(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError>;

    /// Runs a batch and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::submit`] and [`Self::finish`].
    fn forward(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        match self.submit(threads, batch)? {
            Submitted::Done(results) => Ok(results),
            Submitted::Queued => self.finish(threads, batch),
        }
    }

    /// Encoding of the hidden rows of later batches. Lossless at first. No batch may be queued.
    fn encode_rows(&mut self, codec: Codec);
    /// Number of cached positions of a sequence (0 if unknown).
    fn cached_positions(&self, sequence: SequenceId) -> usize;
    /// Gives a sequence the cached first `positions` of another, instead of what it had. No batch may be queued.
    ///
    /// # Errors
    /// The other sequence has fewer positions, or the number is no multiple of
    /// [`SHARED_POSITIONS`](crate::decoder::SHARED_POSITIONS).
    fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize) -> Result<(), StageError>;
    /// Frees a sequence's cache; unknown sequences are ignored.
    fn release(&mut self, sequence: SequenceId);
    /// Allows the stage to move cached positions that are not computed to this many bytes of RAM. Returns the number of
    /// positions that fit there; 0 if its cache is in RAM already.
    fn use_ram(&mut self, _bytes: u64) -> usize {
        0
    }
    /// Bytes resident in memory: weights, and caches and scratch.
    fn resident_bytes(&self) -> ResidentBytes;
    /// Elements of a hidden row.
    fn width(&self) -> usize;
    /// Numerics id ([`Activations::numerics`]): stages with equal ids agree bit for bit.
    fn numerics(&self) -> &str;
}

/// Memory used by a stage, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentBytes {
    /// Weights.
    pub weights: u64,
    /// Key and value caches allocated now, and scratch.
    pub working: u64,
}

/// Why a stage did not compute.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The logits of a row are invalid, so no token was drawn.
    #[error("layers {first}-{last}, position {position}: {what}", first = layers.start, last = layers.end - 1)]
    Logits {
        /// Layers of the stage.
        layers: Range<usize>,
        /// Position of the row.
        position: usize,
        /// What is wrong.
        what: SampleError,
    },
    /// The input does not fit the stage; nothing was changed.
    #[error("{0}")]
    Input(String),
    /// The device failed; the stage must be loaded again.
    #[error("the device failed: {0}")]
    Device(String),
}

#[cfg(test)]
mod tests {
    use super::Logprobs;

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [1.0, 3.0, 2.0, 3.0, -50.0];
        let sum: f64 = logits.iter().map(|logit: &f32| f64::from(*logit).exp()).sum();
        let log = |logit: f32| (f64::from(logit) - sum.ln()) as f32;
        let found = Logprobs::of(&logits, 2, 3);
        let near = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert!(near(found.drawn, log(2.0)), "{found:?}");
        let ids: Vec<u32> = found.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 2], "of equal ones the lower id first");
        assert!(found.top.iter().all(|(id, value)| near(*value, log(logits[*id as usize]))), "{found:?}");
        assert_eq!(Logprobs::of(&logits, 0, 9).top.len(), 5);
        assert!(Logprobs::of(&logits, 0, 0).top.is_empty());
    }
}
