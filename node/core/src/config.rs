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

/// What a node offers to the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "wire::CapacityRecord", into = "wire::CapacityRecord")]
pub struct Capacity {
    /// Hash that distinguishes physical machines.
    pub machine: u64,
    /// Failure domain named by the node's owner, at most [`ZONE_BYTES_MAX`](crate::limits::ZONE_BYTES_MAX) bytes. Empty:
    /// unknown.
    pub zone: String,
    /// Its devices, at most [`DEVICES_MAX`]. Orders name a device by its place in this list, which stays the same for the
    /// node's lifetime.
    pub devices: Vec<DeviceCapacity>,
}

/// What one device of a node offers, as measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCapacity {
    /// Human-readable, the device's name within its machine first: "cpu", "cuda:0 NVIDIA H200", …
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
    /// Bytes of the machine's RAM that experts of stages on this device may take in total, where the processor computes them.
    /// 0: none.
    pub ram_total: u64,
    /// Bytes of them not yet taken.
    pub ram_free: u64,
    /// Quantised weight bytes per second that the processor reads in decode. 0: not measured, and no expert lies in RAM.
    pub ram_bytes_per_second: u64,
    /// Flops per second of the processor in prefill. 0: not measured.
    pub ram_flops_per_second: u64,
    /// Kernel set whose results agree bit for bit.
    pub numerics: u64,
    /// Maximum number of grid steps per pass over the memory; 1: each step is a pass.
    pub pass_steps: u32,
    /// The machine no longer has the device: its parts move, and no plan uses it.
    pub gone: bool,
}

impl DeviceCapacity {
    /// The device's name within its machine, such as "cuda:0".
    pub fn label(&self) -> &str {
        self.device.split(' ').next().unwrap_or_default()
    }
}

/// A device as detected and measured on its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// See [`DeviceCapacity::device`].
    pub device: String,
    /// Bytes of its memory that are free.
    pub memory_free: u64,
    /// The device has dedicated memory, separate from the machine's.
    pub own_memory: bool,
    /// Its measured speed. Figures that were not measured are 0, never another device's.
    pub speed: Speed,
    /// See [`DeviceCapacity::numerics`].
    pub numerics: u64,
    /// See [`DeviceCapacity::pass_steps`].
    pub pass_steps: u32,
}

/// Measured speed of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Speed {
    /// See [`DeviceCapacity::bytes_per_second`].
    pub bytes_per_second: u64,
    /// See [`DeviceCapacity::flops_per_second`].
    pub flops_per_second: u64,
    /// See [`DeviceCapacity::copy_bytes_per_second`].
    pub copy_bytes_per_second: u64,
    /// See [`DeviceCapacity::step_ns`].
    pub step_ns: u64,
    /// See [`DeviceCapacity::layer_ns`].
    pub layer_ns: u64,
    /// See [`DeviceCapacity::cache_bytes_per_second`].
    pub cache_bytes_per_second: u64,
}

impl DeviceCapacity {
    /// What a node offers of this device. `wish`: bytes of memory that its owner configured, if any.
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
            device: device.device,
            memory_total: offered,
            memory_free: offered,
            bytes_per_second,
            flops_per_second,
            copy_bytes_per_second,
            step_ns,
            layer_ns,
            cache_bytes_per_second,
            ram_total: 0,
            ram_free: 0,
            ram_bytes_per_second: 0,
            ram_flops_per_second: 0,
            numerics: device.numerics,
            pass_steps: device.pass_steps,
            gone: false,
        }
    }

    /// The same device with `bytes` of the machine's RAM for experts, which a processor of this speed computes.
    #[must_use]
    pub fn with_ram(self, bytes: u64, processor: Speed) -> Self {
        Self {
            ram_total: bytes,
            ram_free: bytes,
            ram_bytes_per_second: processor.bytes_per_second,
            ram_flops_per_second: processor.flops_per_second,
            ..self
        }
    }
}

impl Capacity {
    /// A device of the node.
    pub fn device(&self, index: u8) -> Option<&DeviceCapacity> {
        self.devices.get(usize::from(index))
    }

    /// Bytes that parts may take on all devices together.
    pub fn memory_total(&self) -> u64 {
        self.devices.iter().fold(0, |sum, device| sum.saturating_add(device.memory_total))
    }

    /// Bytes of RAM that experts may take beside all devices together.
    pub fn ram_total(&self) -> u64 {
        self.devices.iter().fold(0, |sum, device| sum.saturating_add(device.ram_total))
    }

    /// Bytes of this RAM not yet taken.
    pub fn ram_free(&self) -> u64 {
        self.devices.iter().fold(0, |sum, device| sum.saturating_add(device.ram_free))
    }

    /// Bytes not yet taken on all devices together.
    pub fn memory_free(&self) -> u64 {
        self.devices.iter().fold(0, |sum, device| sum.saturating_add(device.memory_free))
    }
}

/// Capacities on the wire. The figures of a kind of device are sent once, because an advert is one datagram: eight cards of one
/// model take little more room than one.
mod wire {
    use super::{Capacity, DeviceCapacity};
    use crate::limits::DEVICES_MAX;
    use alloc::{borrow::ToOwned, format, string::String, vec::Vec};
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize)]
    pub(super) struct CapacityRecord {
        machine: u64,
        zone: String,
        kinds: Vec<Kind>,
        devices: Vec<DeviceRecord>,
    }

    /// What devices of one model have in common.
    #[derive(PartialEq, Eq, Serialize, Deserialize)]
    struct Kind {
        /// The device's text after its label.
        model: String,
        bytes_per_second: u64,
        flops_per_second: u64,
        copy_bytes_per_second: u64,
        step_ns: u64,
        layer_ns: u64,
        cache_bytes_per_second: u64,
        /// The devices of a node divide its RAM evenly.
        ram_total: u64,
        ram_bytes_per_second: u64,
        ram_flops_per_second: u64,
        numerics: u64,
        pass_steps: u32,
    }

    #[derive(Serialize, Deserialize)]
    struct DeviceRecord {
        kind: u8,
        label: String,
        memory_total: u64,
        memory_free: u64,
        ram_free: u64,
        gone: bool,
    }

    impl Kind {
        fn of(device: &DeviceCapacity) -> Self {
            Self {
                model: device.device[device.label().len()..].to_owned(),
                bytes_per_second: device.bytes_per_second,
                flops_per_second: device.flops_per_second,
                copy_bytes_per_second: device.copy_bytes_per_second,
                step_ns: device.step_ns,
                layer_ns: device.layer_ns,
                cache_bytes_per_second: device.cache_bytes_per_second,
                ram_total: device.ram_total,
                ram_bytes_per_second: device.ram_bytes_per_second,
                ram_flops_per_second: device.ram_flops_per_second,
                numerics: device.numerics,
                pass_steps: device.pass_steps,
            }
        }
    }

    impl From<Capacity> for CapacityRecord {
        fn from(capacity: Capacity) -> Self {
            let Capacity { machine, zone, devices: all } = capacity;
            let (mut kinds, mut devices) = (Vec::new(), Vec::with_capacity(all.len()));
            for device in &all {
                let kind = Kind::of(device);
                let at = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
                    kinds.push(kind);
                    kinds.len() - 1
                });
                devices.push(DeviceRecord {
                    kind: u8::try_from(at).unwrap_or(u8::MAX),
                    label: device.label().to_owned(),
                    memory_total: device.memory_total,
                    memory_free: device.memory_free,
                    ram_free: device.ram_free,
                    gone: device.gone,
                });
            }
            Self { machine, zone, kinds, devices }
        }
    }

    impl TryFrom<CapacityRecord> for Capacity {
        type Error = String;

        fn try_from(record: CapacityRecord) -> Result<Self, String> {
            let CapacityRecord { machine, zone, kinds, devices } = record;
            if devices.len() > DEVICES_MAX {
                return Err(format!("{} devices, expected at most {DEVICES_MAX}", devices.len()));
            }
            let device = |record: DeviceRecord| {
                let DeviceRecord { kind, label, memory_total, memory_free, ram_free, gone } = record;
                let known = kinds.get(usize::from(kind));
                let known = known.ok_or_else(|| format!("a device of kind {kind}, expected below {}", kinds.len()))?;
                Ok(DeviceCapacity {
                    device: label + &known.model,
                    memory_total,
                    memory_free,
                    bytes_per_second: known.bytes_per_second,
                    flops_per_second: known.flops_per_second,
                    copy_bytes_per_second: known.copy_bytes_per_second,
                    step_ns: known.step_ns,
                    layer_ns: known.layer_ns,
                    cache_bytes_per_second: known.cache_bytes_per_second,
                    ram_total: known.ram_total,
                    ram_free,
                    ram_bytes_per_second: known.ram_bytes_per_second,
                    ram_flops_per_second: known.ram_flops_per_second,
                    numerics: known.numerics,
                    pass_steps: known.pass_steps,
                    gone,
                })
            };
            let devices = devices.into_iter().map(device).collect::<Result<_, String>>()?;
            Ok(Self { machine, zone, devices })
        }
    }
}
