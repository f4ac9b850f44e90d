//! A model as the planner sees it: layers with their flops and bytes, and the fixed costs of every stage.
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// One transformer block: what holding and running it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Multiply-adds times two for one token at batch 1, attention over an empty cache.
    pub flops_per_token: u64,
    /// Bytes of weights as stored (quantised); also what decode reads per token, except for experts that it does not use.
    pub weight_bytes: u64,
    /// Bytes of key and value cache per token of one sequence.
    pub kv_bytes_per_token: u64,
    /// Maximum number of positions that a row attends to, its own included; `None`: all up to its own. The cache holds all
    /// positions in either case.
    pub window: Option<u32>,
    /// Weights of which each row reads a part.
    pub experts: Option<Experts>,
}

/// A mixture of experts: a row reads those that it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// Bytes of all experts, part of the layer's weights.
    pub bytes: u64,
    /// Number of experts.
    pub count: u32,
    /// Experts of a row.
    pub used: u32,
}

impl Layer {
    /// Bytes of weights that a step over `tokens` rows reads, if the rows choose their experts independently.
    #[must_use]
    pub fn bytes_read(&self, tokens: u32) -> u64 {
        let Some(Experts { bytes, count, used }) = self.experts.filter(|experts| experts.count > 0) else {
            return self.weight_bytes;
        };
        // Shares in units of 2^-32: of the experts that one row does not use, then of those that no row uses.
        const ONE: u128 = 1 << 32;
        let mut square = ONE * u128::from(count.saturating_sub(used)) / u128::from(count);
        let (mut unused, mut left) = (ONE, tokens);
        while left > 0 {
            if left & 1 == 1 {
                unused = (unused * square) >> 32;
            }
            square = (square * square) >> 32;
            left >>= 1;
        }
        let unread = (u128::from(bytes) * unused) >> 32;
        self.weight_bytes.saturating_sub(u64::try_from(unread).unwrap_or(u64::MAX))
    }
}

/// A language model, to be split by layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The blocks, first to last.
    pub layers: Vec<Layer>,
    /// Weight bytes of the token embedding, charged to the stage that holds layer 0.
    pub embed_bytes: u64,
    /// Weight bytes of final norm and output head, charged to the last stage. With tied embeddings these are the same file
    /// bytes as `embed_bytes`, and a stage that is both first and last pays them once (`tied`).
    pub head_bytes: u64,
    /// Output head and embedding are one matrix.
    pub tied: bool,
    /// Flops per token of the output head.
    pub head_flops: u64,
    /// Bytes of one token's activation at a boundary, as sent.
    pub activation_bytes: u64,
    /// Bytes of it under coarser encodings that a plan may choose instead ([`Plan::row_bytes`](crate::Plan::row_bytes)), the
    /// most precise first: each takes fewer than the one before.
    pub coarser_bytes: Vec<u64>,
    /// Tokens of context reserved per sequence.
    pub context: u32,
    /// Sequences served concurrently.
    pub sequences: u32,
    /// Scratch bytes of every stage.
    pub scratch_bytes: u64,
}

impl Work {
    /// This model with rows of `bytes` at every boundary, and no choice.
    #[must_use]
    pub fn with_rows_of(&self, bytes: u64) -> Self {
        Self { activation_bytes: bytes, coarser_bytes: Vec::new(), ..self.clone() }
    }

    /// Positions that a row attends to in predictions: half of the context.
    ///
    /// A request that fills its context attends to 1, 2, … `context` positions, row after row, and the time of attention is
    /// linear in the positions. So half of the context is the mean over the request's rows, in decode and in prefill, and the
    /// plan with the least time at this position has the least time for the whole request. The whole context would be exact
    /// only for the last token, which few requests reach.
    #[must_use]
    pub fn planned_positions(&self) -> u32 {
        self.context / 2
    }
}
