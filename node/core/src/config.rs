//! Configuration of a node at start; nothing here changes while it runs.
use crate::id::{Generation, NodeId};
use crate::limits::{DEDICATED_MEMORY_RESERVED, SHARED_MEMORY_RESERVED_PERCENT};
use alloc::{string::String, vec::Vec};
use core::net::SocketAddr;

/// Fixed facts about this node.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// Its generation, already persisted by the shell.
    pub generation: Generation,
    /// The libp2p `PeerId` bytes behind `node`; peers pin it.
    pub peer_id: Vec<u8>,
    /// Human-readable name.
    pub name: String,
    /// Its gossip addresses (UDP P).
    pub gossip_addrs: Vec<SocketAddr>,
    /// Its data-plane addresses (UDP P + 1).
    pub data_addrs: Vec<SocketAddr>,
    /// What its device offers.
    pub capacity: Capacity,
}

/// What a node offers to the mesh, as measured.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Capacity {
    /// Hash that distinguishes physical machines.
    pub machine: u64,
    /// Failure domain named by the node's owner, at most [`ZONE_BYTES_MAX`](crate::limits::ZONE_BYTES_MAX) bytes. Empty:
    /// unknown.
    pub zone: String,
    /// Human-readable: "cpu", "cuda:0 NVIDIA H200", …
    pub device: String,
    /// Bytes that stages and tiles may take in total: plans fill them completely.
    pub memory_total: u64,
    /// Bytes not yet taken.
    pub memory_free: u64,
    /// Quantised weight bytes per second in decode, measured with the device's own products. 0: not measured.
    pub bytes_per_second: u64,
    /// Flops per second in prefill. 0: not measured.
    pub flops_per_second: u64,
    /// Bytes per second that grid steps read and write in the device's memory. 0: not measured.
    pub copy_bytes_per_second: u64,
    /// Fixed cost of one stage step, nanoseconds.
    pub step_ns: u64,
    /// Fixed cost of each layer of a step, nanoseconds: launches, and hand-overs between threads.
    pub layer_ns: u64,
    /// Bytes of keys and values per second that attention of one row reads from the cache. 0: not measured.
    pub cache_bytes_per_second: u64,
    /// Kernel set whose results agree bit for bit.
    pub numerics: u64,
    /// Maximum number of grid steps per pass over the memory; 1: each step is a pass.
    pub pass_steps: u32,
}

/// A device as detected and measured on its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// See [`Capacity::machine`].
    pub machine: u64,
    /// See [`Capacity::device`].
    pub device: String,
    /// Bytes of its memory that are free.
    pub memory_free: u64,
    /// The device has dedicated memory, separate from the machine's.
    pub own_memory: bool,
    /// Its measured speed. Figures that were not measured are 0, never another device's.
    pub speed: Speed,
    /// See [`Capacity::numerics`].
    pub numerics: u64,
    /// See [`Capacity::pass_steps`].
    pub pass_steps: u32,
}

/// Measured speed of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Speed {
    /// See [`Capacity::bytes_per_second`].
    pub bytes_per_second: u64,
    /// See [`Capacity::flops_per_second`].
    pub flops_per_second: u64,
    /// See [`Capacity::copy_bytes_per_second`].
    pub copy_bytes_per_second: u64,
    /// See [`Capacity::step_ns`].
    pub step_ns: u64,
    /// See [`Capacity::layer_ns`].
    pub layer_ns: u64,
    /// See [`Capacity::cache_bytes_per_second`].
    pub cache_bytes_per_second: u64,
}

impl Capacity {
    /// What a node with this device offers. `wish`: bytes of memory that its owner configured, if any.
    ///
    /// The only place where memory is held back: plans may fill all that a node offers. Of a device with dedicated memory,
    /// [`DEDICATED_MEMORY_RESERVED`] is never offered. Of the machine's memory, [`SHARED_MEMORY_RESERVED_PERCENT`] of what is free is held
    /// back unless the owner configured how much to offer.
    #[must_use]
    pub fn of(device: Measured, wish: Option<u64>) -> Self {
        let free = device.memory_free;
        let offered = match (device.own_memory, wish) {
            (true, wish) => free.saturating_sub(DEDICATED_MEMORY_RESERVED).min(wish.unwrap_or(u64::MAX)),
            (false, Some(wish)) => wish,
            (false, None) => free / 100 * (100 - SHARED_MEMORY_RESERVED_PERCENT),
        };
        let Speed {
            bytes_per_second,
            flops_per_second,
            copy_bytes_per_second,
            step_ns,
            layer_ns,
            cache_bytes_per_second,
        } = device.speed;
        Self {
            machine: device.machine,
            zone: String::new(),
            device: device.device,
            memory_total: offered,
            memory_free: offered,
            bytes_per_second,
            flops_per_second,
            copy_bytes_per_second,
            step_ns,
            layer_ns,
            cache_bytes_per_second,
            numerics: device.numerics,
            pass_steps: device.pass_steps,
        }
    }
}
