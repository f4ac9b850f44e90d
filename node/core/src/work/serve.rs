//! Vocabulary of serving a model: the model, orders of stages, batches and their results, requests and how they end.
use super::Payload;
use crate::id::{ContentId, JobId, NodeId, PartId, RequestId, TensorId};
use crate::limits::{CONTEXT_MAX, DRAFTS_MAX, SEQUENCES_MAX};
use alloc::{boxed::Box, format, string::String, vec::Vec};
use core::ops::Range;
use partitioner::{Plan, Work};
use serde::{Deserialize, Serialize};

/// A model, as the coordinator's shell describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Content id of its shard index.
    pub content: ContentId,
    /// Human-readable name, also used by the API.
    pub name: String,
    /// Costs, for the planner.
    pub work: Work,
    /// Model width: elements per boundary row.
    pub width: u32,
    /// Encodings of boundary rows that a plan may choose from, the most precise first: of `work.activation_bytes`, then of
    /// `work.coarser_bytes`. Once the model runs on several nodes only the chosen one.
    pub boundary: Vec<RowFormat>,
    /// Activation arithmetic: int8 if set, else f32. Part of the numerics contract, so all stages share it.
    pub int8: bool,
    /// Tokens that end an answer (EOS).
    pub eos: Vec<u32>,
    /// Most pipelines that serve it, each on nodes of its own: 1 to [`REPLICAS_MAX`](crate::limits::REPLICAS_MAX). 0: this is
    /// one of several, and ends when it is unused after the loss of its coordinator.
    pub replicas: u32,
    /// Content id of a smaller model with the same tokens. If the coordinator serves it too, it makes drafts for this one.
    pub draft: Option<ContentId>,
}

impl ModelSpec {
    /// The encoding of boundary rows, unless a plan chooses a coarser one.
    pub fn row(&self) -> RowFormat {
        self.boundary.first().copied().unwrap_or(RowFormat::lossless(self.width))
    }

    /// The encoding that a plan chose.
    pub fn row_of(&self, plan: &Plan) -> RowFormat {
        let chosen = self.boundary.iter().find(|row| u64::from(row.bytes) == plan.row_bytes());
        chosen.copied().unwrap_or(self.row())
    }

    /// Keeps only the encoding of this many bytes, if there is one.
    pub fn fix_row(&mut self, bytes: u64) {
        if let Some(&row) = self.boundary.iter().find(|row| u64::from(row.bytes) == bytes) {
            self.work = self.work.with_rows_of(bytes);
            self.boundary = alloc::vec![row];
        }
    }
}

/// How rows of activations are encoded between stages. All but the first change the tokens of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowCodec {
    /// f32.
    Lossless,
    /// Half precision.
    F16,
    /// 8 bits in blocks.
    Q8,
    /// 4 bits in blocks.
    Q4,
}

/// An encoding of the rows of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowFormat {
    /// The encoding.
    pub codec: RowCodec,
    /// Bytes of an encoded row.
    pub bytes: u32,
}

impl RowFormat {
    /// Rows of `width` elements in f32.
    pub const fn lossless(width: u32) -> Self {
        Self { codec: RowCodec::Lossless, bytes: width.saturating_mul(4) }
    }
}

/// One generation request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// Maximum number of tokens to generate.
    pub max_tokens: u32,
    /// How to sample each token.
    pub sampling: Sampling,
    /// Whether to continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Which requests go before it while the cache is full.
    pub priority: Priority,
    /// Key by which the caller finds the request again, also at another node.
    pub key: RequestKey,
}

/// Importance of a request, the highest first. Requests of a higher priority are admitted first, and take the pages of
/// running requests of a lower one, which are computed again later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Priority {
    /// A person waits for the answer.
    #[default]
    Interactive,
    /// A program waits for many answers.
    Batch,
    /// No caller waits for the answer.
    Idle,
}

/// Identifies a request across nodes: a digest of the caller's secret and of the name that the caller gave the request,
/// so that no other caller can attach to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestKey(pub [u8; 16]);

/// An entry of the token log, which successors receive as a request proceeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Logged {
    /// The request was accepted.
    Opened {
        /// Its key.
        key: RequestKey,
        /// Number of prompt tokens, which follow as `Tokens`.
        prompt: u32,
        /// Maximum number of tokens to generate.
        max_tokens: u32,
        /// How to sample each token.
        sampling: Sampling,
        /// Whether to continue after an end-of-sequence token.
        ignore_eos: bool,
        /// Which requests go before it.
        priority: Priority,
    },
    /// Tokens of the prompt and of the answer.
    Tokens {
        /// Position of the first of them.
        from: u32,
        /// At most [`LOG_TOKENS_MAX`](crate::limits::LOG_TOKENS_MAX).
        tokens: Vec<u32>,
    },
    /// The request is over.
    Over,
}

/// From the coordinator of a request to the node that has its caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToCaller {
    /// The token at a position.
    Token {
        /// Position in the sequence, counting the prompt.
        position: u32,
        /// The token.
        sampled: Sampled,
    },
    /// The request runs.
    Begun {
        /// Number of prompt tokens that were cached.
        cached: u32,
    },
    /// The request is over.
    Done {
        /// Reason.
        reason: DoneReason,
        /// Position after the last token of a finished answer (`Stop`, `Length`): the receiver asks for tokens that did
        /// not arrive. May be 0 otherwise.
        end: u32,
    },
    /// Another node coordinates the job now. Ask that node.
    Moved(NodeId),
    /// The node does not coordinate the job.
    Unknown,
    /// The request runs in this job.
    RunsIn {
        /// The job that was asked, or a replica of it. The receiver asks this one from now on.
        job: JobId,
        /// Nodes that may coordinate the job after the sender, in order: the receiver asks them if it loses the sender.
        successors: Vec<NodeId>,
    },
}

/// From the node that has a caller to the coordinator of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromCaller {
    /// Run this request, or continue it if its key is known.
    Ask {
        /// The request.
        request: Box<Request>,
        /// First position whose token the caller needs.
        from: u32,
    },
    /// The caller went away.
    Cancel,
}

/// Sampler settings. Fixed-point so that equality and encoding are exact: value × 1,000,000.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature_e6: u32,
    /// Nucleus; 1,000,000 is off.
    pub top_p_e6: u32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p_e6: u32,
    /// 1,000,000 is off.
    pub repetition_penalty_e6: u32,
    /// 0 is off.
    pub presence_penalty_e6: i32,
    /// 0 is off.
    pub frequency_penalty_e6: i32,
    /// Tokens and the values that are added to their logits; at most [`LOGIT_BIASES_MAX`].
    pub logit_bias_e6: Vec<(u32, i32)>,
    /// Grammar that the answer must match, in llguidance's dialect of Lark; at most [`GRAMMAR_BYTES_MAX`].
    pub grammar: Option<String>,
    /// Also return the log-probabilities of each token and of this many most likely ones; at most [`LOGPROBS_MAX`].
    pub logprobs: Option<u8>,
    /// Key of the random number generator.
    pub seed: u64,
    /// Most draft tokens of a decode step, at most [`DRAFTS_MAX`]; 0 is off. The answer is the same with any number.
    pub drafts: u8,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Sampling = Sampling {
        temperature_e6: 0,
        top_p_e6: 1_000_000,
        top_k: 0,
        min_p_e6: 0,
        repetition_penalty_e6: 1_000_000,
        presence_penalty_e6: 0,
        frequency_penalty_e6: 0,
        logit_bias_e6: Vec::new(),
        grammar: None,
        logprobs: None,
        seed: 0,
        drafts: DRAFTS_MAX,
    };

    /// Whether sampling depends on the tokens so far.
    pub fn uses_history(&self) -> bool {
        self.repetition_penalty_e6 != Self::GREEDY.repetition_penalty_e6
            || self.presence_penalty_e6 != 0
            || self.frequency_penalty_e6 != 0
            || self.grammar.is_some()
    }

    /// Whether draft tokens can be verified: a token after a draft must depend on nothing but positions and logits.
    pub fn allows_drafts(&self) -> bool {
        self.drafts > 0 && !self.uses_history() && self.logprobs.is_none()
    }
}

/// Logit biases per request. OpenAI allows some hundreds.
pub const LOGIT_BIASES_MAX: usize = 1024;

/// Bytes of a grammar. Each participant compiles it, so an order or a log entry of this size must stay acceptable.
pub const GRAMMAR_BYTES_MAX: usize = 64 << 10;

/// Why a call ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DoneReason {
    /// An end-of-sequence token.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// The caller cancelled.
    Cancelled,
    /// The queue is full: try again later (HTTP 429).
    Busy,
    /// The request cannot be served. The text says why (a prompt longer than the context, an unknown job).
    Invalid(String),
    /// The mesh could not finish it. The text says why.
    Failed(String),
}

/// A stage, as the coordinator orders it. The part number selects its layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageOrder {
    /// Content id of the model's shard index.
    pub content: ContentId,
    /// Layers `start..end` of every stage, first to last. Layer 0 includes the embedding, the last layer the output
    /// head.
    pub layers: Vec<Range<u32>>,
    /// Sequences cached at once.
    pub sequences: u32,
    /// Context length per sequence, in tokens.
    pub context: u32,
    /// Elements per boundary row.
    pub width: u32,
    /// Encoding of boundary rows.
    pub row: RowFormat,
    /// Activation arithmetic: int8 if set, else f32. Part of the numerics contract, so all stages share it.
    pub int8: bool,
}

impl StageOrder {
    /// The layers of a stage; empty if there is no such stage.
    pub fn layers_of(&self, part: PartId) -> Range<u32> {
        self.layers.get(part.index()).cloned().unwrap_or_default()
    }

    /// Number of layers of the whole model.
    pub fn layers_total(&self) -> u32 {
        self.layers.last().map_or(0, |layers| layers.end)
    }

    /// Whether this stage is the model's last.
    pub fn is_last(&self, part: PartId) -> bool {
        part.index() + 1 == self.layers.len()
    }

    pub(super) fn is_same_stage(&self, part: PartId, other: &StageOrder, theirs: PartId) -> bool {
        let room = |order: &StageOrder| (order.content, order.sequences, order.context, order.width, order.int8);
        room(self) == room(other)
            && self.layers_total() == other.layers_total()
            && self.layers_of(part) == other.layers_of(theirs)
    }

    pub(crate) fn unsound(&self) -> Option<String> {
        let follow =
            |end: u32, layers: &Range<u32>| (layers.start == end && layers.end > layers.start).then_some(layers.end);
        if self.layers.is_empty() || self.layers.iter().try_fold(0, follow).is_none() {
            Some(String::from("the stages of the order do not cover the layers once and in order"))
        } else if self.sequences == 0 || self.sequences > SEQUENCES_MAX {
            Some(format!("{} sequences, expected 1 to {SEQUENCES_MAX}", self.sequences))
        } else if self.context == 0 || self.context > CONTEXT_MAX {
            Some(format!("a context of {} tokens, expected 1 to {CONTEXT_MAX}", self.context))
        } else if self.row.bytes == 0 || self.row.bytes > RowFormat::lossless(self.width).bytes {
            let most = RowFormat::lossless(self.width).bytes;
            Some(format!("rows of {} bytes, expected 1 to {most} for a width of {}", self.row.bytes, self.width))
        } else {
            None
        }
    }
}

/// Succession record of a served model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeRecord {
    /// The model and its costs.
    pub model: ModelSpec,
    /// The present placement.
    pub plan: Option<Box<Plan>>,
}

/// State of one request at a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Request id.
    pub request: RequestId,
    /// Positions `0..have` are in its cache.
    pub have: u32,
    /// The send log has the hidden rows of positions `kept_from..have` for the next stage. Equal to `have` if it has
    /// none.
    pub kept_from: u32,
}

/// One sequence's share of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The request whose cache is used.
    pub request: RequestId,
    /// First position written. Cached positions from here on are overwritten.
    pub position: u32,
    /// Number of positions, one row each.
    pub count: u32,
    /// The last rows are drafts. At the last stage, a token is sampled from each of them and from the row before them.
    pub drafts: u32,
    /// Input rows.
    pub input: Payload,
    /// Id of the hidden rows out (ignored at the last stage).
    pub output: TensorId,
    /// At the last stage: sample a token from the last row that is no draft.
    pub sample: Option<SampleSpec>,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability and those of the most likely tokens, if the request asks for them. A token that comes from the
    /// token log of a lost coordinator has none.
    pub logprobs: Option<Box<Logprobs>>,
    /// Of a model for embeddings, whose token means nothing: the normalised row of the last position, as bits of f32; at
    /// most [`EMBEDDING_MAX`].
    pub embedding: Option<Vec<u32>>,
}

impl From<u32> for Sampled {
    fn from(token: u32) -> Self {
        Sampled { token, logprobs: None, embedding: None }
    }
}

/// Elements of an embedding: twice the width of the largest models that are made for it.
pub const EMBEDDING_MAX: usize = 16 << 10;

/// Natural logarithms of probabilities under the model's own distribution, before penalties and temperature; × 1,000,000.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Logprobs {
    /// That of the sampled token.
    pub sampled_e6: i32,
    /// The most likely tokens, the most likely one first; at most [`LOGPROBS_MAX`].
    pub top_e6: Vec<(u32, i32)>,
}

/// Log-probabilities returned beside that of the sampled token. OpenAI allows 20.
pub const LOGPROBS_MAX: u8 = 20;

/// How to sample one token. The generator is counter-based, so that a replay samples the same token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleSpec {
    /// Sampling settings of the request.
    pub sampling: Sampling,
    /// Position of the sampled token, of several the first: with the seed, the key of the random number.
    pub position: u32,
    /// Tokens so far, for penalties and grammars. Empty if the sampling does not depend on them.
    pub history: Vec<u32>,
    /// Number of prompt tokens in the history.
    pub prompt: u32,
}

/// Result of one item of a batch.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ItemResult {
    /// Hidden rows for the next stage, stored by the shell under `Item::output`.
    Hidden,
    /// Last stage, with sampling: the token.
    Token(Sampled),
    /// Last stage, with sampling and drafts: the tokens after the row before the drafts and after each of them.
    Tokens(Vec<u32>),
    /// Last stage, without sampling (a prefill chunk before the last).
    Nothing,
}
