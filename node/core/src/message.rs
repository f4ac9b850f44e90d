//! What nodes send each other: headers of frames on the data plane, and control messages.
use crate::id::{CallId, ContentId, Epoch, JobId, NodeId, PartId, RequestId};
use crate::work::serve::{FromCaller, Logged, Sampling, ToCaller};
use crate::work::steps::{Report, SaveKind, TileFigures};
use crate::work::{Cursors, Order, Ready, Record, Resume};
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
    pub part: PartId,
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
    PushPull { members: Vec<u8>, heard: Vec<u8>, adverts: Vec<SignedAdvert>, reply: bool },
    /// Graceful goodbye.
    Leaving,
    /// To the sender of a frame or message of a lower epoch.
    Stale { job: JobId, mine: Epoch },
    /// To a node that holds parts of a job, or is to hold one.
    ToParticipant { job: JobId, epoch: Epoch, say: ToParticipant },
    /// To the coordinator of a job.
    ToCoordinator { job: JobId, epoch: Epoch, say: ToCoordinator },
    /// From a node that has a caller, to the coordinator of a served model. `call` is the sender's.
    FromCaller { job: JobId, call: CallId, say: FromCaller },
    /// The answer, to the node that has the caller.
    ToCaller { call: CallId, say: ToCaller },
}

/// What participants of a job receive, from its coordinator unless a variant says otherwise.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToParticipant {
    /// Hold this part under this epoch.
    Prepare(Box<Order>),
    /// All parts are ready: the part runs, from here.
    Go { part: PartId, resume: Resume },
    /// The receiver is no longer the part's standby.
    Release { part: PartId },
    /// The job is over, or the receiver takes no part in it any more.
    End,
    /// Have the data of this part on disk: the receiver is to hold it soon.
    Fetch(Box<Order>),
    /// Run some steps of the part on rows drawn from `nonce`. The coordinator takes the time.
    Challenge { part: PartId, nonce: u64 },
    /// This node is the standby of a part that the receiver feeds, or there is none.
    Standby { part: PartId, node: Option<NodeId> },
    /// To successors: what they need to take the job over.
    Record(Box<Record>),
    /// To successors: what happened to requests since the last of these.
    Log(Vec<(RequestId, Logged)>),
    /// From a participant, to successors: it does not hear the coordinator, and has a copy of the checkpoint of this step.
    CoordinatorSilent { checkpoint: Option<u32> },
    /// From the holder of part `part` to a holder of part `to`, which feeds it: how far it is. What came before need not be kept
    /// for it. `live`: send what follows as it is made. `again`: what was sent after that may be lost.
    Held { part: PartId, to: PartId, cursors: Cursors, live: bool, again: bool },
    /// From the owner of part `from` to a standby of `part`: what it asks for is not kept any more.
    Gap { part: PartId, from: PartId },
    /// To stages.
    Stage(ToStage),
    /// To tiles.
    Tile(ToTile),
}

/// What stages of a model receive, besides frames.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToStage {
    /// To the last stage: settings of a request, and its tokens so far where choosing looks back at them, of which the first
    /// `prompt` are the prompt's.
    Open { request: RequestId, sampling: Sampling, tokens: Vec<u32>, prompt: u32 },
    /// To all stages: the request is over, free its cache.
    Close { request: RequestId },
}

/// What tiles of a grid receive, besides frames.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTile {
    /// From a standby to the owner: save a snapshot after the present cycle, and say so.
    WantSnapshot { part: PartId },
    /// From the owner to a standby: a snapshot is saved.
    Saved { part: PartId, step: u32, bytes: u64 },
    /// From the node that fetches a saved state: it has it, or does not want it.
    Taken { part: PartId, step: u32, kind: SaveKind },
}

/// What the coordinator of a job receives from its participants.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// The part is held, or why not.
    Prepared { part: PartId, result: Result<Ready, String> },
    /// The data of the part are on disk, and so many bytes of them came from peers.
    Fetched { part: PartId, result: Result<u64, String> },
    /// A digest of what a challenge's steps made.
    Challenged { part: PartId, nonce: u64, result: Result<u64, String> },
    /// A standby reports how far it is.
    Held { part: PartId, cursors: Cursors },
    /// The executor failed under a part, or (not `held`) the node holds no such part.
    Failed { part: PartId, held: bool, reason: String },
    /// A neighbour has been silent for this long; 0: it is heard again.
    Silent { node: NodeId, silent_ms: u32 },
    /// From stages.
    Stage(FromStage),
    /// From tiles.
    Tile(FromTile),
}

/// What stages of a model report.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromStage {
    /// The last stage chose the token for `position`.
    Token { request: RequestId, position: u32, token: u32 },
    /// The last stage: positions before `position` are in every cache (an unsampled chunk went through).
    Progress { request: RequestId, position: u32 },
    /// Any stage: it has only `have` positions of the request; send again from there.
    Gap { request: RequestId, have: u32 },
    /// The standby of the first stage: it has `have` positions of the request; send a copy of what follows.
    Resume { request: RequestId, have: u32 },
}

/// What tiles of a grid report.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromTile {
    /// Owner or standby: how far it is.
    Progress { part: PartId, step: u32, figures: TileFigures },
    /// Owner: after a step that the schedule names.
    Report { part: PartId, step: u32, report: Report },
    /// Owner: a state is saved for the coordinator to fetch.
    Saved { part: PartId, step: u32, kind: SaveKind, bytes: u64 },
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
