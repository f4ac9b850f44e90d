//! Names of things: short, copyable, ordered, so that maps iterate the same way everywhere.
use core::fmt;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A node: the first 16 bytes of blake3 over its libp2p `PeerId` bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 16]);

/// As bytes at once: a packet of the membership protocol is mostly ids, and element by element they cost a quarter of all
/// the time that a large mesh takes.
impl Serialize for NodeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { self.0.serialize(serializer) } else { serializer.serialize_bytes(&self.0) }
    }
}

impl<'de> Deserialize<'de> for NodeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            return <[u8; 16]>::deserialize(deserializer).map(NodeId);
        }
        deserializer.deserialize_bytes(SixteenBytes)
    }
}

struct SixteenBytes;

impl Visitor<'_> for SixteenBytes {
    type Value = NodeId;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the 16 bytes of a node's id")
    }
    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<NodeId, E> {
        bytes.try_into().map(NodeId).map_err(|_| E::invalid_length(bytes.len(), &self))
    }
}

impl NodeId {
    /// The node behind a key: the first 16 bytes of blake3 over its libp2p `PeerId` bytes.
    pub fn of_peer(peer_id: &[u8]) -> NodeId {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(peer_id).as_bytes()[..16]);
        NodeId(id)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for NodeId {
    /// Eight hex digits, enough to tell nodes of one mesh apart in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl From<NodeId> for partitioner::DeviceId {
    fn from(node: NodeId) -> Self {
        partitioner::DeviceId(node.0)
    }
}

impl From<partitioner::DeviceId> for NodeId {
    fn from(device: partitioner::DeviceId) -> Self {
        NodeId(device.0)
    }
}

/// One life of a node: max(stored + 1, unix seconds), so that a lost store makes no ghost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Generation(pub u64);

/// One version of a job's placement. Ordered by counter, then by issuer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Epoch {
    /// Grows by one with each re-plan.
    pub counter: u32,
    /// The coordinator that issued it.
    pub issuer: NodeId,
}

/// A part of a job, counted from 0: a stage of a model's route, a tile of a grid.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct PartId(pub u16);

impl PartId {
    /// As an index into lists of all parts.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The part with this index; the last possible one where there are more.
    pub fn of(index: usize) -> PartId {
        PartId(u16::try_from(index).unwrap_or(u16::MAX))
    }

    /// The stage before this one.
    pub fn before(self) -> Option<PartId> {
        self.0.checked_sub(1).map(PartId)
    }

    /// The stage after this one.
    pub fn after(self) -> PartId {
        PartId(self.0.saturating_add(1))
    }
}

impl fmt::Display for PartId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A job of the mesh: hash of (coordinator, its generation, a counter), or made by the shell of a simulation's submitter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct JobId(pub u64);

/// A request within a job, counted by the coordinator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// A local caller waiting for an answer (an HTTP request, a command): issued by the shell. A peer only hands it back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct CallId(pub u64);

/// A payload held by the shell; the core passes the name around and never sees bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum TensorId {
    /// It came with a frame. The shell counts these.
    Arrived(u64),
    /// A run makes it. The core counts these.
    Made(u64),
}

/// One piece of work given to the executor, counted by the core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct WorkId(pub u64);

/// One order to load or keep a stage, counted by the core: the same stage may be asked for twice under one epoch, and the
/// answer to the first is not the answer to the second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct LoadId(pub u64);

/// blake3 of some content: a model's shard index, a chunk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContentId(pub [u8; 32]);

impl fmt::Debug for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}
