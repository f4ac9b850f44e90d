//! The vocabulary of serving a model: the model, a stage's order, its work and results, requests and how they end.
use super::Payload;
use crate::id::{ContentId, NodeId, RequestId, TensorId};
use alloc::{string::String, vec::Vec};
use core::ops::Range;
use partitioner::Work;
use serde::{Deserialize, Serialize};

/// A model as the head's shell describes it.
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
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// A stage as the head asks for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepare {
    /// Model content.
    pub content: ContentId,
    /// Model name, for people.
    pub name: String,
    /// The whole route: node and layers, first to last.
    pub route: Vec<(NodeId, Range<u32>)>,
    /// Which entry of the route is the receiver.
    pub stage: u16,
    /// Sequences held at once.
    pub sequences: u32,
    /// Tokens of context per sequence.
    pub context: u32,
    /// Elements of one boundary row.
    pub width: u32,
    /// Activation arithmetic.
    pub int8: bool,
    /// Bytes the plan allows this stage.
    pub bytes_max: u64,
    /// The receiver is not the stage's owner of the route but its standby: it computes in the shadow.
    pub standby: bool,
}

impl Prepare {
    /// What the receiver is to do with the stage, in a word.
    pub fn task(&self) -> &'static str {
        if self.standby { "stand by for" } else { "own" }
    }
}

/// What a stage holds of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Which request.
    pub request: RequestId,
    /// Positions `0..have` are in its cache.
    pub have: u32,
    /// Its ring holds the hidden rows of positions `kept_from..have`; `have` where it holds none.
    pub kept_from: u32,
}

/// A stage to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSpec {
    /// Which model.
    pub content: ContentId,
    /// What its user calls it.
    pub name: String,
    /// Layers `start..end`; layer 0 brings the embedding, the last layer the output head.
    pub layers: Range<u32>,
    /// Layers of the whole model.
    pub layers_total: u32,
    /// Which entry of the route: frames into it carry this as their edge.
    pub stage: u16,
    /// Sequences held at once.
    pub sequences: u32,
    /// Tokens of context per sequence.
    pub context: u32,
    /// Elements of one boundary row.
    pub width: u32,
    /// Activation arithmetic.
    pub int8: bool,
    /// Bytes the plan allows.
    pub bytes_max: u64,
    /// Who may have the weights: the head first.
    pub sources: Vec<NodeId>,
}

/// What loading a stage brought.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedStage {
    /// Bytes resident now: weights, cache, scratch.
    pub bytes: u64,
}

/// One sequence's part of a `Compute`.
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

/// Result of one item of a `Compute`.
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
