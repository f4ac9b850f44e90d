//! Bugs on purpose, so that it is known that the simulator would find them. Only builds with the feature `planted` have
//! any, and only simnet turns it on: the node's program asserts that it was built without.

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Planted {
    /// Frames and messages of a lower epoch are let in.
    EpochCheckLeftOut = 1,
    /// A ring drops what one of its stage's successors holds, not what all of them do.
    RingTrimmedEarly = 2,
    /// A standby that became an owner stays listed as standby.
    StandbyPromotedTwice = 3,
    /// A stage receives a count of what the next one holds that is one too high.
    ResumeOneAhead = 4,
    /// A running request is not cancelled.
    CancelDropped = 5,
    /// A token's random number is drawn by the first position of its frame, not by the last.
    SeedByFirstPosition = 6,
    /// Standbys are never sent copies of rows.
    StandbyNeverFed = 7,
    /// A new epoch does not fence what runs under the old one.
    NoFence = 8,
    /// Standbys do not hear of closed requests.
    CloseNotToStandby = 9,
    /// A lost node may be part of the next plan.
    LostNotExcluded = 10,
    /// A node that comes back stays excluded.
    BackIgnored = 11,
    /// The coordinator does not apply its list of banned nodes.
    BanIgnored = 12,
    /// Stages of a dead coordinator are never dropped.
    OrphansStay = 13,
    /// The loss of any stage fails all running requests.
    LossFailsRequests = 14,
    /// Standbys are never sought.
    NoStandbys = 15,
    /// A tile's standby that becomes its owner says that it holds one step more than it does.
    TileOneAhead = 16,
    /// A successor takes a job over without a majority.
    SuccessionWithoutMajority = 17,
    /// Reports of tiles before a simulation went back to a checkpoint are added to those after it.
    ReportsOfTwoCuts = 18,
    /// A simulation is not cancelled.
    SimulationCancelDropped = 19,
    /// A checkpoint lacks the part of a tile.
    CheckpointIncomplete = 20,
}

/// Whether this build can have any.
pub const PLANTED: bool = cfg!(feature = "planted");

/// Has this bug from now on, in the whole process, or none. Set before nodes are made: it is no input of theirs.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Planted>) {
    present::BUG.store(bug.map_or(0, |bug| bug as u8), core::sync::atomic::Ordering::Relaxed);
}

/// Whether the bug is there: never, in builds that people use.
#[inline]
pub(crate) fn has(bug: Planted) -> bool {
    #[cfg(feature = "planted")]
    return present::BUG.load(core::sync::atomic::Ordering::Relaxed) == bug as u8;
    #[cfg(not(feature = "planted"))]
    {
        let _ = bug;
        false
    }
}

/// Carrying a flag through every constructor would cost builds without it more than this costs builds with it.
#[cfg(feature = "planted")]
mod present {
    pub(super) static BUG: core::sync::atomic::AtomicU8 = core::sync::atomic::AtomicU8::new(0);
}
