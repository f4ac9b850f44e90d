//! Planted bugs, to prove that the simulator finds them. They exist only in builds with the feature `planted`, and only simnet
//! plants one: the node's program asserts that it was built without the feature.

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Planted {
    /// Frames and messages of a lower epoch are accepted.
    EpochCheckLeftOut = 1,
    /// A resend ring drops the entries that one of its receivers holds, not those that all of them hold.
    RingTrimmedEarly = 2,
    /// A standby that became the owner stays listed as standby.
    StandbyPromotedTwice = 3,
    /// A stage receives a cursor of the next stage that is one too high.
    ResumeOneAhead = 4,
    /// A running request is not cancelled.
    CancelDropped = 5,
    /// A token's random number is derived from the first position of its frame, not from the last.
    SeedByFirstPosition = 6,
    /// Standbys never receive copies of rows.
    StandbyNeverFed = 7,
    /// A new epoch does not fence the operations of the old one.
    NoFence = 8,
    /// Standbys do not receive `Close` for ended requests.
    CloseNotToStandby = 9,
    /// A lost node may be part of the next plan.
    LostNotExcluded = 10,
    /// A node that rejoins stays excluded.
    RejoinIgnored = 11,
    /// The coordinator does not apply its list of banned nodes.
    BanIgnored = 12,
    /// Stages whose coordinator is down are never dropped.
    OrphansStay = 13,
    /// The loss of any stage fails all running requests.
    LossFailsRequests = 14,
    /// Standbys are never chosen.
    NoStandbys = 15,
    /// A tile's standby that becomes the owner reports one step more than it completed.
    TileOneAhead = 16,
    /// A successor takes a job over without a majority.
    SuccessionWithoutMajority = 17,
    /// Reports of tiles from before a simulation's rollback are summed with those after it.
    ReportsOfTwoPartitions = 18,
    /// A simulation is not cancelled.
    SimulationCancelDropped = 19,
    /// A checkpoint is missing one tile.
    CheckpointIncomplete = 20,
    /// A request continues the longest cache, whatever its tokens are.
    PrefixUnchecked = 21,
    /// A stage counts rows of draft tokens as positions that it has.
    DraftsCounted = 22,
}

/// Whether this build has the feature `planted`.
pub const PLANTED: bool = cfg!(feature = "planted");

/// Plants this bug, or none, in the whole process from now on. Call it before creating nodes: it is not an input of theirs.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Planted>) {
    present::BUG.store(bug.map_or(0, |bug| bug as u8), core::sync::atomic::Ordering::Relaxed);
}

/// Whether the bug is planted: never, in release builds.
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

/// A flag in every constructor would burden builds without the feature more than a global burdens builds with it.
#[cfg(feature = "planted")]
mod present {
    pub(super) static BUG: core::sync::atomic::AtomicU8 = core::sync::atomic::AtomicU8::new(0);
}
