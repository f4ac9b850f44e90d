//! The machines and links as measured: what the planner may use.
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// A node as the planner names it (the same 16 bytes as the core's `NodeId`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceId(pub [u8; 16]);

/// One device that could hold a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its node.
    pub id: DeviceId,
    /// Human name, for explanations.
    pub name: String,
    /// The physical machine it sits in: a standby belongs on another one.
    pub machine: u64,
    /// Failure domain: a room, a site, a power supply. Empty: unknown, and the same as no other's.
    pub zone: String,
    /// Bytes that plans may fill with weights, cache and scratch: the node has kept back what it needs itself.
    pub memory: u64,
    /// Quantised weight bytes per second that the device's own products reach in decode (one row). 0: not measured, and the
    /// device is left out until it is.
    pub bytes_per_second: u64,
    /// Flops per second that its products reach in prefill (many rows). 0: not measured, only bytes bound the prediction.
    pub flops_per_second: u64,
    /// Bytes per second that steps of a grid read and write in its memory.
    pub copy_bytes_per_second: u64,
    /// Fixed cost of one stage step in nanoseconds (queueing, launch, wake-up).
    pub step_ns: u64,
    /// Fixed cost of each layer of a step in nanoseconds: launches, and hand-overs between threads. 0 also where it was not
    /// measured.
    pub layer_ns: u64,
    /// Bytes of keys and values per second that attention of one row reads from the cache. 0: not measured, attention is not
    /// charged.
    pub cache_bytes_per_second: u64,
    /// Kernel set whose results agree bit for bit; a standby of the same id comes first.
    pub numerics: u64,
    /// Most steps of a grid that it makes in one pass over its memory; 1: each step is a pass.
    pub pass_steps: u32,
    /// Draining or otherwise not to be given new work.
    pub excluded: bool,
}

impl Device {
    /// Whether both are known to stand in one zone: what ends the one may end the other.
    pub fn shares_zone(&self, other: &Device) -> bool {
        !self.zone.is_empty() && self.zone == other.zone
    }
}

/// A directed link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Round-trip time in nanoseconds.
    pub rtt_ns: u64,
    /// Bytes per second. 0: the link carries nothing and is not used.
    pub bytes_per_second: u64,
}

/// Everything that could take part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fleet {
    /// Devices in a fixed order (by id), so that ties break the same way everywhere.
    pub devices: Vec<Device>,
    /// Measured directed links; a pair that is missing uses `default_link`.
    pub links: BTreeMap<(DeviceId, DeviceId), Link>,
    /// What an unmeasured link is taken for.
    pub default_link: Link,
}

impl Fleet {
    /// The device with this id.
    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.iter().find(|device| device.id == id)
    }

    /// The directed link between two devices, as measured or else the default.
    pub fn link(&self, from: DeviceId, to: DeviceId) -> &Link {
        self.links.get(&(from, to)).unwrap_or(&self.default_link)
    }
}
