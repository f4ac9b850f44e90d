//! Messages between nodes: headers of frames on the data plane, and control messages.
use crate::id::{CallId, ContentId, Epoch, JobId, NodeId, PartId, RequestId};
use crate::work::serve::{FromCaller, Logged, Sampled, Sampling, ToCaller};
use crate::work::steps::{Report, SaveKind, TileFigures};
use crate::work::{Cursors, Order, Ready, Record, Resume};
use alloc::{boxed::Box, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// The header of a frame, without codec, raw length and checksum: the transport adds those.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameHeader {
    /// The job.
    pub job: JobId,
    /// The epoch of the placement.
    pub epoch: Epoch,
    /// The part that receives the frame.
    pub part: PartId,
    /// The part's input: for a stage a request, for a tile a link.
    pub channel: u64,
    /// Position in the channel: a request's first position, or a link's step.
    pub cursor: u32,
    /// Rows of a stage, one per position; elements of a halo strip.
    pub count: u32,
    /// The payload ends with the channel's last element known to the sender: a model's last stage samples from that row.
    pub last: bool,
    /// A channel that has the same content before `cursor`: a part without this channel copies it from there. Only stages of a
    /// model have such channels.
    pub continues: Option<u64>,
    /// Rows of draft tokens. Only stages of a model get them.
    pub drafts: Drafts,
}

/// Rows of a frame that are drafts, and what became of the drafts before them.
///
/// A stage computes rows of drafts and does not count them as positions that it has. The next frame says which of them it may
/// keep, and overwrites the others. Rounds are numbered because two frames may begin at one position with different drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drafts {
    /// Number of frames with drafts that the request had before this one.
    pub round: u32,
    /// The last rows of this frame are drafts; at most [`DRAFTS_MAX`](crate::limits::DRAFTS_MAX).
    pub rows: u8,
    /// Drafts of the frame with drafts before this one that were right: they end at `cursor`.
    pub kept: u8,
}

impl FrameHeader {
    /// The request, if the receiving part is a stage.
    pub fn request(&self) -> RequestId {
        RequestId(self.channel)
    }

    /// The cursor after the payload, if its elements are positions.
    pub fn end(&self) -> u32 {
        self.cursor.saturating_add(self.count)
    }

    /// The cursor after the rows that are no drafts.
    pub fn sure_end(&self) -> u32 {
        self.end().saturating_sub(self.drafts.rows.into())
    }

    /// Whether it is the next step of a request that decodes.
    pub fn is_decode(&self) -> bool {
        self.sure_end() == self.cursor.saturating_add(1)
    }

    /// Whether it follows `have` positions, after which a frame had these drafts, without a gap.
    pub fn follows(&self, have: u32, before: Option<Drafts>) -> bool {
        let same = before.filter(|before| before.round.checked_add(1) == Some(self.drafts.round));
        let kept = same.map_or(0, |before| self.drafts.kept.min(before.rows));
        self.cursor <= have || (kept == self.drafts.kept && self.cursor == have.saturating_add(kept.into()))
    }
}

/// A message on the control stream, encoded by `codec`.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// All known members, the versions of the sender's adverts, and the adverts that the receiver lacks; `reply` requests the
    /// same in return.
    PushPull { members: Vec<u8>, heard: Vec<u8>, adverts: Vec<SignedAdvert>, reply: bool },
    /// Graceful goodbye.
    Leaving,
    /// To the sender of a frame or message of a lower epoch.
    Stale { job: JobId, mine: Epoch },
    /// To a node that holds or will hold parts of a job.
    ToParticipant { job: JobId, epoch: Epoch, say: ToParticipant },
    /// To the coordinator of a job.
    ToCoordinator { job: JobId, epoch: Epoch, say: ToCoordinator },
    /// From a node with a caller to the coordinator of a served model. The sender issued `call`.
    FromCaller { job: JobId, call: CallId, say: FromCaller },
    /// The answer, to the node with the caller.
    ToCaller { call: CallId, say: ToCaller },
}

/// Messages to participants of a job, from its coordinator unless a variant says otherwise.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToParticipant {
    /// Load or keep this part under this epoch.
    Prepare(Box<Order>),
    /// All parts are ready: run the part from here.
    Go { part: PartId, resume: Resume },
    /// The receiver is no longer the part's standby.
    Release { part: PartId },
    /// The job ended, or the receiver no longer takes part in it.
    End,
    /// Fetch the data of this part to disk: a `Prepare` will follow.
    Fetch(Box<Order>),
    /// Run some steps of the part on rows generated from `nonce`. The coordinator measures the time.
    Challenge { part: PartId, nonce: u64 },
    /// `node` is the standby of a part to which the receiver sends, or that part has none.
    Standby { part: PartId, node: Option<NodeId> },
    /// To successors: what they need to take over the job.
    Record(Box<Record>),
    /// To successors: additions to the token log since the last `Log`.
    Log(Vec<(RequestId, Logged)>),
    /// From a participant to successors, as a vote: it does not hear the coordinator, and has a copy of the checkpoint of this
    /// step.
    CoordinatorSilent { checkpoint: Option<u32> },
    /// From the holder of `part` to a holder of `to`, which sends to it: its cursors. Earlier entries need not be retained for
    /// it. `live`: send later entries as they are produced. `again`: entries sent after the cursors may be lost.
    Held { part: PartId, to: PartId, cursors: Cursors, live: bool, again: bool },
    /// From the owner of part `from` to a standby of `part`: the requested entries are no longer retained.
    Gap { part: PartId, from: PartId },
    /// To stages.
    Stage(ToStage),
    /// To tiles.
    Tile(ToTile),
}

/// Messages to stages of a model, besides frames.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToStage {
    /// To the last stage: the settings of a request, and its tokens so far if sampling depends on them; the first `prompt` of
    /// these are the prompt.
    Open { request: RequestId, sampling: Sampling, tokens: Vec<u32>, prompt: u32 },
    /// To all stages: the request ended. Its cache stays for requests that begin with the same tokens, until `Close`.
    Rest { request: RequestId, drafts: Drafts },
    /// To all stages: free the cache of a request, which has ended.
    Close { request: RequestId },
}

/// Messages to tiles of a grid, besides frames.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTile {
    /// From a standby to the owner: save a snapshot after the current cycle, and announce it.
    WantSnapshot { part: PartId },
    /// From the owner to a standby: a snapshot is saved.
    Saved { part: PartId, step: u32, bytes: u64 },
    /// From the node that fetches a saved state: the state was fetched, or is not needed.
    Fetched { part: PartId, step: u32, kind: SaveKind },
}

/// Messages from participants to the coordinator of a job.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// The part is loaded, or why it is not.
    Prepared { part: PartId, result: Result<Ready, String> },
    /// The data of the part are on disk; the result is the number of bytes fetched from peers.
    Fetched { part: PartId, result: Result<u64, String> },
    /// A digest of the output of a challenge's steps.
    Challenged { part: PartId, nonce: u64, result: Result<u64, String> },
    /// A standby reports its cursors.
    Held { part: PartId, cursors: Cursors },
    /// The executor failed while running a part, or (not `held`) the node holds no such part.
    Failed { part: PartId, held: bool, reason: String },
    /// A neighbour has been silent for this long; 0: it is heard again.
    Silent { node: NodeId, silent_ms: u32 },
    /// From stages.
    Stage(FromStage),
    /// From tiles.
    Tile(FromTile),
}

/// Reports of a model's stages.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromStage {
    /// The last stage sampled the token for `position`.
    Token { request: RequestId, position: u32, sampled: Sampled },
    /// The last stage sampled the token for `position`, and those that follow if the drafts of the round are right.
    Tokens { request: RequestId, position: u32, round: u32, tokens: Vec<u32> },
    /// The last stage: positions before `position` are in every cache (an unsampled chunk passed all stages).
    Progress { request: RequestId, position: u32 },
    /// Any stage: it has only `have` positions of the request; resend from there.
    Gap { request: RequestId, have: u32 },
    /// The standby of the first stage: it has `have` positions of the request; send a copy of the later ones.
    Resume { request: RequestId, have: u32 },
    /// A stage's owner, every second while it computes: the microseconds that it has computed in total.
    Busy { part: PartId, busy_us: u64 },
}

/// Reports of a grid's tiles.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromTile {
    /// Owner or standby: steps completed.
    Progress { part: PartId, step: u32, figures: TileFigures },
    /// Owner: the report after a step of the schedule.
    Report { part: PartId, step: u32, report: Report },
    /// Owner: a state is saved, for the coordinator to fetch.
    Saved { part: PartId, step: u32, kind: SaveKind, bytes: u64 },
}

/// A node's description of itself, signed by its key because other nodes forward it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedAdvert {
    /// An encoded `Advert`.
    pub bytes: Vec<u8>,
    /// Ed25519 over `bytes`.
    pub signature: Vec<u8>,
}

/// The content of a signed advert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advert {
    /// The node.
    pub node: NodeId,
    /// Its generation.
    pub generation: crate::id::Generation,
    /// Increases with each change; the highest version of a generation wins.
    pub version: u64,
    /// The key behind `node`.
    pub peer_id: Vec<u8>,
    /// Human-readable name.
    pub name: String,
    /// Gossip addresses (UDP P).
    pub gossip_addrs: Vec<core::net::SocketAddr>,
    /// Data-plane addresses (UDP P + 1).
    pub data_addrs: Vec<core::net::SocketAddr>,
    /// The capacity it offers.
    pub capacity: crate::config::Capacity,
    /// Contents of which it holds at least a part; peers ask for the details.
    pub holds: Vec<ContentId>,
    /// The node takes no new work.
    pub draining: bool,
}

/// The datagram that nodes with a common job exchange every `HEARTBEAT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The job.
    pub job: JobId,
    /// The sender's epoch of the job.
    pub epoch: Epoch,
    /// Operations completed so far.
    pub done: u64,
    /// Elapsed time of the present operation, microseconds.
    pub op_elapsed_us: u32,
    /// Predicted time of the present operation, microseconds.
    pub op_budget_us: u32,
}
