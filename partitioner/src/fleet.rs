//! The measured machines and links that the planner may use.
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// A node's id in the planner (the same 16 bytes as the core's `NodeId`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceId(pub [u8; 16]);

/// One device that could hold a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its node.
    pub id: DeviceId,
    /// Human-readable name, for explanations.
    pub name: String,
    /// Its physical machine: a standby should be on another one.
    pub machine: u64,
    /// Failure domain: a room, a site, a power supply. Empty: unknown, which equals no other zone.
    pub zone: String,
    /// Bytes that plans may fill with weights, cache and scratch: the node has already held back what it needs itself.
    pub memory: u64,
    /// Quantised weight bytes per second in decode (one row), measured with the device's own products. 0: not measured, and the
    /// planner does not use the device.
    pub bytes_per_second: u64,
    /// Flops per second in prefill (many rows), measured likewise. 0: not measured; only bytes bound the prediction.
    pub flops_per_second: u64,
    /// Bytes per second that grid steps read and write in the device's memory.
    pub copy_bytes_per_second: u64,
    /// Fixed cost of one stage step in nanoseconds (queueing, launch, wake-up).
    pub step_ns: u64,
    /// Fixed cost of each layer of a step in nanoseconds: launches, and hand-overs between threads. 0 also if it was not
    /// measured.
    pub layer_ns: u64,
    /// Bytes of keys and values per second that attention of one row reads from the cache. 0: not measured; attention is not
    /// charged.
    pub cache_bytes_per_second: u64,
    /// Kernel set whose results agree bit for bit; standbys with the same id are preferred.
    pub numerics: u64,
    /// Maximum number of grid steps per pass over the memory; 1: each step is a pass.
    pub pass_steps: u32,
    /// Must not receive new work, for instance while draining.
    pub excluded: bool,
}

impl Device {
    /// Whether both are known to be in the same zone: one failure may take down both.
    pub fn shares_zone(&self, other: &Device) -> bool {
        !self.zone.is_empty() && self.zone == other.zone
    }
}

/// A directed link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Round-trip time in nanoseconds.
    pub rtt_ns: u64,
    /// Bytes per second. 0: the link is unusable.
    pub bytes_per_second: u64,
}

/// The devices and links that may be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fleet {
    /// Devices in a fixed order (by id), so that ties break the same way everywhere.
    pub devices: Vec<Device>,
    /// Measured directed links; a missing pair uses `default_link`.
    pub links: BTreeMap<(DeviceId, DeviceId), Link>,
    /// Assumed figures of an unmeasured link.
    pub default_link: Link,
}

impl Fleet {
    /// The device with this id.
    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.iter().find(|device| device.id == id)
    }

    /// The measured directed link between two devices, or the default.
    pub fn link(&self, from: DeviceId, to: DeviceId) -> &Link {
        self.links.get(&(from, to)).unwrap_or(&self.default_link)
    }
}
