//! A contiguous range of a model's layers with its key and value caches: the one thing that computes for a mesh.
use std::ops::Range;

use crate::sampler::{Changes, SampleError, SamplerSettings};
use crate::threads::Threads;

/// What to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageOptions {
    /// Layers `start..end`; layer 0 brings the embedding, the last layer the final norm and output head.
    pub layers: Range<usize>,
    /// Sequences that may be open at once; a further one is an error.
    pub sequences: usize,
    /// Positions per sequence; a position beyond is an error.
    pub context: usize,
    /// Arithmetic of matrix products on the CPU. Part of the numerics contract.
    pub activations: Activations,
    /// Threads that load it. What computes it afterwards is given with each batch.
    pub threads: usize,
}

/// How activations enter a quantised matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Rounded to 8 bit in blocks of 32 with a scale each: fast.
    Int8,
    /// As they are: the strict path, equal to the f32 oracles.
    F32,
}

impl Activations {
    /// Bytes of a number in the processor's caches of keys and values: f16 beside 8-bit activations, where it is the
    /// smaller of the two roundings and halves both memory and traffic; f32 on the strict path.
    #[must_use]
    pub const fn cache_cell_bytes(self) -> usize {
        match self {
            Self::Int8 => 2,
            Self::F32 => 4,
        }
    }

    /// Names the order of arithmetic that every engine keeps with these activations: equal names, equal bits.
    #[must_use]
    pub const fn numerics(self) -> &'static str {
        match self {
            Self::Int8 => "int8-2",
            Self::F32 => "f32-2",
        }
    }
}

/// Names a sequence's cache within a stage.
pub type SequenceId = u64;

/// Rows of one sequence at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Whose cache; opened by its first rows at position 0.
    pub sequence: SequenceId,
    /// Position of the first row. Must not exceed the positions held; positions from here on are overwritten.
    pub position: usize,
    /// The rows.
    pub input: RowsIn<'a>,
    /// What the last layer gives of the last row; other stages ignore it.
    pub want: Want<'a>,
}

/// What is wanted of the last row of an entry, where the stage ends with the output head.
#[derive(Clone, Copy, Debug)]
pub enum Want<'a> {
    /// Nothing: the rows only fill the cache.
    Nothing,
    /// Its logits.
    Logits,
    /// The token that the sampler draws from its logits.
    Token(Draw<'a>),
}

/// How to draw a token.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// Settings of the request.
    pub settings: SamplerSettings,
    /// Position of the token that is drawn: with the seed, the key of the random number.
    pub position: u32,
    /// What changes the logits first.
    pub changes: Changes<'a>,
}

/// Rows in.
#[derive(Clone, Copy, Debug)]
pub enum RowsIn<'a> {
    /// Token ids (stage with layer 0).
    Tokens(&'a [u32]),
    /// Hidden rows, `[count, width]` row-major (any other stage).
    Hidden(&'a [f32]),
}

/// Rows out, one per entry of the batch.
#[derive(Clone, Debug, PartialEq)]
pub enum RowsOut {
    /// Hidden rows `[count, width]` for the next stage.
    Hidden(Vec<f32>),
    /// Logits `[vocabulary]` of the last row.
    Logits(Vec<f32>),
    /// The token that was drawn.
    Token(u32),
    /// Last stage, nothing wanted.
    Nothing,
}

/// What became of a batch that was submitted.
#[derive(Debug)]
pub enum Submitted {
    /// It is computed: one result per entry.
    Done(Vec<RowsOut>),
    /// A device is at it; [`Stage::finish`] gives the results.
    Queued,
}

/// A loaded stage. `threads` compute where the processor does; a device's stage leaves them alone.
///
/// The numerics contract: a row's result has the same bits alone or in any batch, in any chunking of a prefill, at any
/// thread count and under any cut of the layers.
pub trait Stage: Send {
    /// Submits the rows of several sequences as one batch. A device may be still at it when this returns: the batch must be
    /// finished before anything else is asked of the stage. On an error no cache of the batch is to be trusted: release or
    /// rewrite them.
    ///
    /// # Errors
    /// Input that does not fit the stage (kind, width, token id, position gap, context full, too many sequences), or a
    /// device failure.
    fn submit(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Submitted, StageError>;

    /// Waits for the batch that was queued, which is `batch`, and gives its results.
    ///
    /// # Errors
    /// No batch is queued, logits that are not sound, or a device failure.
    fn finish(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError>;

    /// Runs a batch, and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::submit`] and [`Self::finish`].
    fn forward(&mut self, threads: &mut Threads, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        match self.submit(threads, batch)? {
            Submitted::Done(results) => Ok(results),
            Submitted::Queued => self.finish(threads, batch),
        }
    }

    /// Positions held for a sequence (0 if unknown).
    fn held(&self, sequence: SequenceId) -> usize;
    /// Frees a sequence's cache; unknown sequences are ignored.
    fn release(&mut self, sequence: SequenceId);
    /// Bytes of weights in memory, and of caches and scratch.
    fn resident_bytes(&self) -> ResidentBytes;
    /// Elements of a hidden row.
    fn width(&self) -> usize;
    /// Kernel set whose results agree bit for bit ([`Activations::numerics`]).
    fn numerics(&self) -> &str;
}

/// What a stage takes.
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
    /// The logits of a row are not sound, so no token was drawn.
    #[error("layers {first}-{last}, position {position}: {what}", first = layers.start, last = layers.end - 1)]
    Logits {
        /// Layers of the stage.
        layers: Range<usize>,
        /// Position of the row.
        position: usize,
        /// What is wrong with them.
        what: SampleError,
    },
    /// The input does not fit; nothing was changed.
    #[error("{0}")]
    Input(String),
    /// The device failed; the stage must be loaded anew.
    #[error("the device failed: {0}")]
    Device(String),
}
