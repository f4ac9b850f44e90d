//! The measured machines and links that the planner may use.
use alloc::{collections::BTreeMap, format, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// A node's id in the planner (the same 16 bytes as the core's `NodeId`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct NodeKey(pub [u8; 16]);

/// A device of a node. All devices of a node are lost with it, and hand rows to each other in its memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceId {
    /// The node.
    pub node: NodeKey,
    /// Its place in the node's list of devices.
    pub index: u8,
}

impl DeviceId {
    /// The first device of a node.
    pub const fn first(node: [u8; 16]) -> Self {
        Self { node: NodeKey(node), index: 0 }
    }
}

/// An end of a hop: a device, or a node itself, whose memory is as near to one of its devices as to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    node: NodeKey,
    device: Option<u8>,
}

impl From<DeviceId> for Endpoint {
    fn from(device: DeviceId) -> Self {
        Self { node: device.node, device: Some(device.index) }
    }
}

impl From<NodeKey> for Endpoint {
    fn from(node: NodeKey) -> Self {
        Self { node, device: None }
    }
}

impl Endpoint {
    /// Whether a hop between the two is none: within one device, or between a node and its own device.
    pub fn is_at(self, other: Endpoint) -> bool {
        self.node == other.node && (self.device == other.device || self.device.is_none() || other.device.is_none())
    }
}

/// One device that could hold a stage. A node may have several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its node, and its place there.
    pub id: DeviceId,
    /// The node's human-readable name, for explanations.
    pub name: String,
    /// The device's name within its node, such as "cuda:1". Empty if the node has no other.
    pub label: String,
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
    /// Bytes of the machine's RAM that experts of stages on this device may take: the processor computes them there. 0: none, as
    /// for the processor itself, whose memory is RAM.
    pub ram: u64,
    /// Quantised weight bytes per second that the processor reads in decode. 0: not measured, and no expert lies in RAM.
    pub ram_bytes_per_second: u64,
    /// Flops per second of the processor in prefill. 0: not measured; only bytes bound the prediction.
    pub ram_flops_per_second: u64,
    /// Kernel set whose results agree bit for bit; standbys with the same id are preferred.
    pub numerics: u64,
    /// Maximum number of grid steps per pass over the memory; 1: each step is a pass.
    pub pass_steps: u32,
    /// Must not receive new work, for instance while draining.
    pub excluded: bool,
}

impl Device {
    /// Its node's name, and its own if the node has several.
    pub fn shown(&self) -> String {
        if self.label.is_empty() { self.name.clone() } else { format!("{} {}", self.name, self.label) }
    }

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

/// What lies between two devices of one node: rows go through the node's memory, from one device thread to the other by way of
/// the driver's. Two wake-ups of threads take about 20 µs, and one core copies about 8 GB/s.
pub const IN_PROCESS: Link = Link { rtt_ns: 40_000, bytes_per_second: 8_000_000_000 };

/// The devices and links that may be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fleet {
    /// Devices in a fixed order (by id), so that ties break the same way everywhere.
    pub devices: Vec<Device>,
    /// Measured directed links between nodes; a missing pair uses `default_link`.
    pub links: BTreeMap<(NodeKey, NodeKey), Link>,
    /// Assumed figures of an unmeasured link.
    pub default_link: Link,
}

impl Fleet {
    /// The device with this id.
    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.iter().find(|device| device.id == id)
    }

    /// The measured directed link from one end to another, or the default; [`IN_PROCESS`] within a node.
    pub fn link(&self, from: impl Into<Endpoint>, to: impl Into<Endpoint>) -> &Link {
        let (from, to) = (from.into().node, to.into().node);
        if from == to { &IN_PROCESS } else { self.links.get(&(from, to)).unwrap_or(&self.default_link) }
    }
}
