//! What nodes hold of a job, as they reported: plans count that memory as free.
use super::Job;
use crate::id::{NodeId, PartId};
use crate::job::output::ResidentBytes;
use alloc::collections::BTreeMap;
use partitioner::{DeviceId, Room};

/// What a node holds.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// The partition (`Job::cut`) that the parts belong to.
    cut: u32,
    /// Device of each part, and what it takes there.
    pub(super) parts: BTreeMap<PartId, (u8, Room)>,
}

impl Job {
    /// Memory and RAM that devices hold for the job.
    pub(in crate::job) fn holdings(&self) -> ResidentBytes {
        let mut holdings: BTreeMap<DeviceId, Room> = BTreeMap::new();
        for (node, held) in &self.resident {
            for &(device, room) in held.parts.values() {
                let sum = holdings.entry(node.device(device)).or_default();
                *sum = sum.plus(room);
            }
        }
        holdings.into_iter().collect()
    }

    /// Bytes of a device's memory that a node holds of a part.
    pub(in crate::job) fn bytes_at(&self, part: PartId, node: NodeId) -> Option<u64> {
        self.resident.get(&node).and_then(|held| held.parts.get(&part)).map(|(_, room)| room.memory)
    }

    /// Records what a node reports to hold. Returns whether the part is new at the device.
    pub(in crate::job) fn note_resident(&mut self, device: DeviceId, part: PartId, room: Room) -> bool {
        let held = self.resident.entry(device.into()).or_default();
        if core::mem::replace(&mut held.cut, self.cut) != self.cut {
            held.parts.clear();
        }
        held.parts.insert(part, (device.index, room)).is_none_or(|(before, _)| before != device.index)
    }

    /// A node is ordered to hold a part.
    pub(in crate::job) fn note_asked(&mut self, node: NodeId) {
        self.known.insert(node);
    }

    /// A device holds nothing any more. Returns whether nothing is known of its node's other devices either.
    pub(in crate::job) fn forget_device(&mut self, device: DeviceId) -> bool {
        let node = NodeId::from(device);
        let Some(held) = self.resident.get_mut(&node) else { return true };
        held.parts.retain(|_, (on, _)| *on != device.index);
        let empty = held.parts.is_empty();
        if empty {
            self.resident.remove(&node);
        }
        empty
    }

    pub(in crate::job) fn forget_resident(&mut self, node: NodeId) {
        self.resident.remove(&node);
    }
}
