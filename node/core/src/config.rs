//! What a node is told at start; nothing here changes while it runs.
use crate::id::{Generation, NodeId};
use alloc::{string::String, vec::Vec};
use core::net::SocketAddr;

/// Fixed facts about this node.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// This life of it, already persisted by the shell.
    pub generation: Generation,
    /// The libp2p `PeerId` bytes behind `node`, told to peers so that they can pin it.
    pub peer_id: Vec<u8>,
    /// Name shown to people.
    pub name: String,
    /// Where gossip datagrams reach it (UDP P).
    pub gossip_addrs: Vec<SocketAddr>,
    /// Where the data plane reaches it (UDP P + 1).
    pub data_addrs: Vec<SocketAddr>,
    /// What its device offers.
    pub capacity: Capacity,
}

/// What a node offers to the mesh, as measured.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Capacity {
    /// Hash of what tells one physical machine from another.
    pub machine: u64,
    /// "cpu", "cuda:0 NVIDIA H200", …: for people.
    pub device: String,
    /// Bytes the node may use in all.
    pub memory_total: u64,
    /// Bytes not yet taken.
    pub memory_free: u64,
    /// Measured weight bytes per second in decode.
    pub bytes_per_second: u64,
    /// Measured flops per second in prefill.
    pub flops_per_second: u64,
    /// Fixed cost of one stage step, nanoseconds.
    pub step_ns: u64,
    /// Kernel set whose results agree bit for bit.
    pub numerics: u64,
    /// Most steps of a grid that it makes in one pass over its memory; 1: each step is a pass.
    pub pass_steps: u32,
}
