//! What nodes say to each other: data-plane frame headers and control messages.
use crate::id::{ContentId, Epoch, JobId, NodeId, RequestId};
use crate::tiles::message::TileMessage;
use crate::work::serve::{Position, Prepare, Sampling};
use alloc::{boxed::Box, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// What a frame's payload is. Codec, raw length and checksum belong to the transport and are added there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameHeader {
    /// Which job.
    pub job: JobId,
    /// Under which placement.
    pub epoch: Epoch,
    /// Which part of the job receives it.
    pub part: u16,
    /// Which of the part's inputs: a stage's are its requests, a tile's are its links.
    pub channel: u64,
    /// Where in the channel: a request's first position, a link's step.
    pub cursor: u32,
    /// A stage's rows, one per position; a halo's elements.
    pub count: u32,
    /// The payload ends with the last that its source knows of the channel: a model's last stage samples from it.
    pub last: bool,
}

impl FrameHeader {
    /// The request, where the receiving part is a stage.
    pub fn request(&self) -> RequestId {
        RequestId(self.channel)
    }

    /// The cursor after the payload, where its elements are positions.
    pub fn end(&self) -> u32 {
        self.cursor.saturating_add(self.count)
    }
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
