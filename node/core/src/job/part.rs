//! A job's parts as its coordinator sees them: owner, standby, and the state of each.
use crate::id::NodeId;
use crate::planted::{self, Planted};
use crate::time::Instant;
use crate::work::{Cursors, PartState, Ready};
use partitioner::{DeviceId, Room, Tier};

/// A part of the present placement.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) owner: NodeId,
    /// Its owner's device.
    pub(super) device: u8,
    /// Memory of that device and RAM that the plan allows it.
    pub(super) room: Room,
    /// Predicted nanoseconds per token or step on its owner.
    pub(super) step_ns: u64,
    /// Its owner's answer under the present epoch.
    pub(super) ready: Option<Ready>,
    pub(super) standby: Option<Standby>,
}

/// A part's standby.
#[derive(Clone, Debug)]
pub(super) struct Standby {
    pub(super) node: NodeId,
    /// The node's device. Never one of the owner's node, which would be lost with it.
    pub(super) device: u8,
    pub(super) tier: Tier,
    pub(super) room: Room,
    pub(super) step_ns: u64,
    /// Snapshot interval, in milliseconds.
    pub(super) snapshot_ms: u32,
    /// Its answer under the present epoch; until then, the time of the last order.
    pub(super) prepared: Result<PartState, Instant>,
    /// Pages that it has in RAM, as it answered.
    pub(super) ram_pages: u32,
    /// Whether it has what it needs to take the part over: a stage in memory, or a tile's cells, under this placement
    /// or an earlier one of the same partition. This is a hint. A promotion orders the part with `Prepare`, and a node
    /// that no longer has it loads it or rejects the order.
    pub(super) ready: bool,
    /// Progress that it reports.
    pub(super) cursors: Cursors,
    /// Whether it was announced as current under the present epoch.
    pub(super) reported: bool,
}

impl Part {
    pub(super) fn new(device: DeviceId, room: Room, step_ns: u64) -> Self {
        Part { owner: device.into(), device: device.index, room, step_ns, ready: None, standby: None }
    }

    /// Its owner's device.
    pub(super) fn place(&self) -> DeviceId {
        self.owner.device(self.device)
    }

    /// Its standby becomes its owner.
    pub(super) fn promote(&mut self) -> Option<Standby> {
        let standby =
            if planted::has(Planted::StandbyPromotedTwice) { self.standby.clone() } else { self.standby.take() }?;
        (self.owner, self.device) = (standby.node, standby.device);
        (self.room, self.step_ns) = (standby.room, standby.step_ns);
        Some(standby)
    }
}

impl Standby {
    pub(super) fn new(now: Instant, device: DeviceId, tier: Tier, (room, step_ns): (Room, u64)) -> Self {
        Standby {
            node: device.into(),
            device: device.index,
            tier,
            room,
            step_ns,
            snapshot_ms: 0,
            prepared: Err(now),
            ram_pages: 0,
            ready: false,
            cursors: Cursors::All(0),
            reported: false,
        }
    }

    /// Its device.
    pub(super) fn place(&self) -> DeviceId {
        self.node.device(self.device)
    }

    pub(super) fn is_prepared(&self) -> bool {
        self.prepared.is_ok()
    }

    /// It is ordered again, under another epoch.
    pub(super) fn ask_again(&mut self, now: Instant) {
        (self.prepared, self.reported) = (Err(now), false);
    }

    /// Its cursor on a channel.
    pub(super) fn at(&self, channel: u64) -> u32 {
        match &self.cursors {
            Cursors::All(at) => *at,
            Cursors::Each(each) => each.iter().find(|(of, _)| *of == channel).map_or(0, |(_, at)| *at),
        }
    }
}
