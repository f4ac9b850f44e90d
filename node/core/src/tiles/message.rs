//! What nodes that share a simulation say to each other.
use crate::work::steps::{Report, SaveKind, TileFigures, TileOrder, TileReady, Will};
use alloc::{boxed::Box, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// A message about a grid job, under an epoch.
#[allow(missing_docs)] // of fields: each variant says what they are
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TileMessage {
    /// Coordinator to participant: hold this tile under this epoch.
    Prepare(Box<TileOrder>),
    /// Participant to coordinator: it is held, or not.
    Prepared { tile: u16, result: Result<TileReady, String> },
    /// Coordinator to all owners: every tile is held, and this many steps have been made of each.
    Go { at: Vec<u32> },
    /// Whoever computes `tile` to the owner of its neighbour `to`: it has made `step` steps, what came before need not be kept
    /// for it. `live`: send what follows as it is made. `again`: what was sent after `step` may be lost.
    Held { tile: u16, to: u16, step: u32, live: bool, again: bool },
    /// The owner of `from` to a standby of `tile`: what it asks for is not kept any more.
    Gap { tile: u16, from: u16 },
    /// A standby to the owner: put your state aside after the present cycle, and say so.
    WantSnapshot { tile: u16 },
    /// The owner to whoever is to fetch it: a state is put aside.
    Saved { tile: u16, step: u32, kind: SaveKind, bytes: u64 },
    /// It has been fetched, or is not wanted.
    Taken { tile: u16, step: u32, kind: SaveKind },
    /// Owner or standby to coordinator: how far it is.
    Progress { tile: u16, step: u32, figures: TileFigures },
    /// Owner to coordinator, after a step that the schedule names.
    Report { tile: u16, step: u32, report: Report },
    /// To the coordinator: the executor failed.
    Failed { tile: u16, reason: String },
    /// Coordinator to a standby: it does not stand by for this tile any more.
    Release { tile: u16 },
    /// Coordinator to all: the job is over; to one: it takes no part any more.
    End,
    /// Coordinator to those who may succeed it: what they need for that.
    Will(Box<Will>),
    /// A participant to those who may succeed: it does not hear the coordinator.
    Orphaned,
}
