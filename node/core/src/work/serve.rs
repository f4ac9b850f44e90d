//! The vocabulary of serving a model: the model, a stage's order, its work and results, requests and how they end.
use super::Payload;
use crate::id::{ContentId, NodeId, PartId, RequestId, TensorId};
use crate::limits::{CONTEXT_MAX, SEQUENCES_MAX};
use alloc::{boxed::Box, format, string::String, vec::Vec};
use core::ops::Range;
use partitioner::{Plan, Work};
use serde::{Deserialize, Serialize};

/// A model as the coordinator's shell describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Content id of its shard index.
    pub content: ContentId,
    /// Name for people and the API.
    pub name: String,
    /// Costs for the planner.
    pub work: Work,
    /// Model width: elements of one boundary row.
    pub width: u32,
    /// Activation arithmetic of the CPU path: part of the numerics contract, so all stages share it.
    pub int8: bool,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
}

/// One generation request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// How to choose each token.
    pub sampling: Sampling,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Its name, by which its caller finds it again at whatever node goes on with it.
    pub key: RequestKey,
}

/// Names a request across nodes: a digest of the caller's secret and of the name that the caller gave the request, so that no
/// other caller can attach to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestKey(pub [u8; 16]);

/// What successors learn of a request as it goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Logged {
    /// It was taken.
    Opened {
        /// Its name.
        key: RequestKey,
        /// Tokens of its prompt, which follow as `Tokens`.
        prompt: u32,
        /// Most tokens to generate.
        max_tokens: u32,
        /// How to choose each token.
        sampling: Sampling,
        /// Go on after an end-of-sequence token.
        ignore_eos: bool,
    },
    /// Tokens of the prompt and of the answer.
    Tokens {
        /// The position of the first of them.
        from: u32,
        /// At most [`LOG_TOKENS_MAX`](crate::limits::LOG_TOKENS_MAX).
        tokens: Vec<u32>,
    },
    /// It is over.
    Over,
}

/// What the coordinator of a request tells a node that has its caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToCaller {
    /// The token of a position.
    Token {
        /// Position in the sequence, prompt counted.
        position: u32,
        /// The token.
        token: u32,
    },
    /// No more tokens.
    Done {
        /// Why.
        reason: DoneReason,
        /// The position after the last token, 0 where there are none: tokens before it that did not come are asked for.
        end: u32,
    },
    /// Another node coordinates the job now: ask there.
    Moved(NodeId),
    /// The node does not coordinate the job.
    Unknown,
}

/// What a node that has a caller asks of the node that coordinates the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromCaller {
    /// Run this request, or go on with it if it is known by its key.
    Ask {
        /// The request.
        request: Box<Request>,
        /// Tokens are wanted from this position on.
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
    /// Tokens, and what is added to their logits; at most [`LOGIT_BIASES_MAX`].
    pub logit_bias_e6: Vec<(u32, i32)>,
    /// Key of the random numbers.
    pub seed: u64,
}

impl Sampling {
    /// Always the likeliest token.
    pub const GREEDY: Sampling = Sampling {
        temperature_e6: 0,
        top_p_e6: 1_000_000,
        top_k: 0,
        min_p_e6: 0,
        repetition_penalty_e6: 1_000_000,
        presence_penalty_e6: 0,
        frequency_penalty_e6: 0,
        logit_bias_e6: Vec::new(),
        seed: 0,
    };

    /// Whether choosing a token needs the tokens before it.
    pub fn looks_back(&self) -> bool {
        self.repetition_penalty_e6 != Self::GREEDY.repetition_penalty_e6
            || self.presence_penalty_e6 != 0
            || self.frequency_penalty_e6 != 0
    }
}

/// Tokens with a bias that a request may have. OpenAI allows some hundreds.
pub const LOGIT_BIASES_MAX: usize = 1024;

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
    /// The request cannot be served, and why (a prompt longer than the context, an unknown job).
    Invalid(String),
    /// The mesh could not finish it.
    Failed(String),
}

/// A stage as the coordinator orders it: its part number names its layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageOrder {
    /// Content id of the model's shard index.
    pub content: ContentId,
    /// Layers `start..end` of every stage, first to last. Layer 0 brings the embedding, the last layer the output head.
    pub layers: Vec<Range<u32>>,
    /// Sequences held at once.
    pub sequences: u32,
    /// Tokens of context per sequence.
    pub context: u32,
    /// Elements of one boundary row.
    pub width: u32,
    /// Activation arithmetic: part of the numerics contract, so all stages share it.
    pub int8: bool,
}

impl StageOrder {
    /// The layers of a stage; empty if there is no such stage.
    pub fn layers_of(&self, part: PartId) -> Range<u32> {
        self.layers.get(part.index()).cloned().unwrap_or_default()
    }

    /// Layers of the whole model.
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

    pub(super) fn unsound(&self) -> Option<String> {
        let follow =
            |end: u32, layers: &Range<u32>| (layers.start == end && layers.end > layers.start).then_some(layers.end);
        if self.layers.is_empty() || self.layers.iter().try_fold(0, follow).is_none() {
            Some(String::from("a route whose stages do not cover the layers once, in order"))
        } else if self.sequences == 0 || self.sequences > SEQUENCES_MAX {
            Some(format!("{} sequences, expected 1 to {SEQUENCES_MAX}", self.sequences))
        } else if self.context == 0 || self.context > CONTEXT_MAX {
            Some(format!("a context of {}, expected 1 to {CONTEXT_MAX}", self.context))
        } else {
            None
        }
    }
}

/// What a successor needs to go on serving a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeRecord {
    /// The model, with its costs.
    pub model: ModelSpec,
    /// The present placement.
    pub plan: Option<Box<Plan>>,
}

/// What a stage holds of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Which request.
    pub request: RequestId,
    /// Positions `0..have` are in its cache.
    pub have: u32,
    /// It keeps the hidden rows of positions `kept_from..have` for the next stage; `have` where it keeps none.
    pub kept_from: u32,
}

/// One sequence's part of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Whose cache.
    pub request: RequestId,
    /// First position written; anything the cache holds from here on is overwritten.
    pub position: u32,
    /// Positions, one row each.
    pub count: u32,
    /// Rows in.
    pub input: Payload,
    /// Name for the hidden rows out (ignored at the last stage).
    pub output: TensorId,
    /// At the last stage: choose a token from the last row.
    pub sample: Option<SampleSpec>,
}

/// How to choose one token: counter-based, so that a replay chooses the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleSpec {
    /// Settings of the request.
    pub sampling: Sampling,
    /// Position of the token being chosen: with the seed, the key of the random number.
    pub position: u32,
    /// Tokens so far, for penalties; empty where the sampling needs none.
    pub history: Vec<u32>,
    /// How many tokens of the history are the prompt's.
    pub prompt: u32,
}

/// Result of one item of a batch.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ItemResult {
    /// Hidden rows for the next stage, kept by the shell under the id the core named in `Item::output`.
    Hidden,
    /// Last stage, sampling asked for: the token.
    Token { token: u32 },
    /// Last stage, no sampling asked for (a prefill chunk before the last).
    Nothing,
}
