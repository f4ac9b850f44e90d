//! What nodes say to each other: data-plane frame headers and control messages.
use crate::id::{ContentId, Epoch, JobId, NodeId, RequestId};
use crate::tiles::message::TileMessage;
use alloc::{boxed::Box, string::String, vec::Vec};
use core::ops::Range;
use serde::{Deserialize, Serialize};

/// Names the positions a payload holds. Codec, raw length and checksum belong to the transport and are added there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameHeader {
    /// Which job.
    pub job: JobId,
    /// Under which placement.
    pub epoch: Epoch,
    /// Into which stage (0 is the first: head to first stage is edge 0).
    pub edge: u16,
    /// Which request.
    pub request: RequestId,
    /// First position.
    pub position: u32,
    /// Positions, one row each.
    pub count: u32,
    /// The last row is to be sampled at the last stage.
    pub sample: bool,
}

/// A message on the control stream, encoded by `codec`.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// All members known, which adverts have been heard, and those that the other side lacks; `reply` asks for the same.
    /// Whoever hears what the other has heard sends what it lacks.
    PushPull { members: Vec<u8>, heard: Vec<u8>, adverts: Vec<SignedAdvert>, reply: bool },
    /// Head to participant: hold this stage under this epoch.
    Prepare { job: JobId, epoch: Epoch, prepare: Prepare },
    /// Participant to head: the bytes resident and, where caches outlived the epoch before, what they hold.
    Prepared { job: JobId, epoch: Epoch, result: Result<u64, String>, held: Vec<Position> },
    /// Head to all participants: every stage is ready, frames of this epoch may flow. For each request named, the stage
    /// after the receiver holds so many positions: send it what follows them, from the ring and from now on.
    Go { job: JobId, epoch: Epoch, resume: Vec<(RequestId, u32)> },
    /// Head to the owners beside a stage: this node is its standby and gets a copy of its frames, or there is none.
    Standby { job: JobId, epoch: Epoch, stage: u16, node: Option<NodeId> },
    /// A standby to whoever feeds its stage: it holds `have` positions of the request; send a copy of what follows them.
    Resume { job: JobId, epoch: Epoch, request: RequestId, have: u32 },
    /// A stage or standby to the stage before it, to that one's standby, and (a standby) to the head: positions held.
    Held { job: JobId, epoch: Epoch, held: Vec<(RequestId, u32)> },
    /// Head to all participants: the job is over.
    End { job: JobId, epoch: Epoch },
    /// Head to the last stage: settings of a request, and its tokens so far where choosing looks back at them, of which the
    /// first `prompt` are the prompt's.
    Open { job: JobId, epoch: Epoch, request: RequestId, sampling: Sampling, tokens: Vec<u32>, prompt: u32 },
    /// Head to all stages: the request is over, free its cache.
    Close { job: JobId, epoch: Epoch, request: RequestId },
    /// Last stage to head: the token chosen for `position`.
    Token { job: JobId, epoch: Epoch, request: RequestId, position: u32, token: u32 },
    /// Last stage to head: positions before `position` are in every cache (an unsampled chunk went through).
    Progress { job: JobId, epoch: Epoch, request: RequestId, position: u32 },
    /// Any stage to head: it holds only `have` positions of the request; send again from there.
    Gap { job: JobId, epoch: Epoch, request: RequestId, have: u32 },
    /// Whoever got a frame or message of a lower epoch, to its sender.
    Stale { job: JobId, mine: Epoch },
    /// A participant to the head: a neighbour has been silent for this long.
    Silent { job: JobId, epoch: Epoch, node: NodeId, silent_ms: u32 },
    /// A participant to the head: its executor failed, or (not `held`) it holds no stage of the job.
    StageFailed { job: JobId, epoch: Epoch, held: bool, reason: String },
    /// Graceful goodbye.
    Leaving,
    /// Head to a node that is to hold this stage soon: have its weights on disk by then.
    Fetch { job: JobId, epoch: Epoch, prepare: Prepare },
    /// To the head: the weights are there, and so many bytes of them came from peers.
    Fetched { job: JobId, epoch: Epoch, result: Result<u64, String> },
    /// Head to an owner or standby: run some steps of the stage on rows drawn from `nonce`. The head takes the time.
    Challenge { job: JobId, epoch: Epoch, nonce: u64 },
    /// To the head: a digest of what the steps made.
    Challenged { job: JobId, epoch: Epoch, nonce: u64, result: Result<u64, String> },
    /// About a simulation.
    Tile { job: JobId, epoch: Epoch, say: Box<TileMessage> },
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

/// Tokens with a bias that a request may have. OpenAI allows some hundreds.
pub const LOGIT_BIASES_MAX: usize = 1024;

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

/// What a node tells about itself, signed by its key because others pass it on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedAdvert {
    /// An encoded `Advert`.
    pub bytes: Vec<u8>,
    /// Ed25519 over `bytes`.
    pub signature: Vec<u8>,
}

/// The signed part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advert {
    /// Who.
    pub node: NodeId,
    /// Which life.
    pub generation: crate::id::Generation,
    /// Grows with each change; the newest wins.
    pub version: u64,
    /// The key behind `node`.
    pub peer_id: Vec<u8>,
    /// Name for people.
    pub name: String,
    /// UDP P.
    pub gossip_addrs: Vec<core::net::SocketAddr>,
    /// UDP P + 1.
    pub data_addrs: Vec<core::net::SocketAddr>,
    /// What it offers.
    pub capacity: crate::config::Capacity,
    /// Contents of which it can give peers something; what exactly, they ask.
    pub holds: Vec<ContentId>,
    /// Takes no new work.
    pub draining: bool,
}

/// What neighbours of a job tell each other every `HEARTBEAT`, as a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Which job.
    pub job: JobId,
    /// The sender's epoch of it.
    pub epoch: Epoch,
    /// Work finished so far.
    pub done: u64,
    /// How long the present operation has been running, microseconds.
    pub op_elapsed_us: u32,
    /// How long it was predicted to run, microseconds.
    pub op_budget_us: u32,
}
