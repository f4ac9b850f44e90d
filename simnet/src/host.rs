//! A host of the simulated world: its node, disk and executor, and whether its process runs.
use crate::compute::Executor;
use crate::disk::Disk;
use crate::grids::Saved;
use node_core::config::{Capacity, Config, DeviceCapacity};
use node_core::id::{Generation, JobId, NodeId};
use node_core::input::Input;
use node_core::node::Node;
use node_core::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};

/// A host of one world, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub struct HostId(pub u32);

impl HostId {
    /// Its index in lists of hosts.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The hardware of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSpec {
    /// Its region: latency grows with the distance between regions.
    pub region: u32,
    /// What its node advertises.
    pub capacity: Capacity,
    /// Actual executor time in percent of the predicted time.
    pub skew_percent: u32,
    /// Nanoseconds per simulation cell and step.
    pub cell_ns: u64,
    /// Pages that a stage has in RAM beside those of its device.
    pub ram_pages: u32,
}

impl Default for HostSpec {
    /// A desktop computer with a small GPU.
    fn default() -> Self {
        HostSpec {
            region: 0,
            capacity: Capacity {
                machine: 0,
                zone: String::new(),
                devices: vec![DeviceCapacity {
                    device: "simulated".into(),
                    memory_total: 8 << 30,
                    memory_free: 8 << 30,
                    bytes_per_second: 20_000_000_000,
                    flops_per_second: 1_000_000_000_000,
                    copy_bytes_per_second: 20_000_000_000,
                    step_ns: 50_000,
                    layer_ns: 10_000,
                    cache_bytes_per_second: 200_000_000_000,
                    ram_total: 0,
                    ram_free: 0,
                    ram_bytes_per_second: 0,
                    ram_flops_per_second: 0,
                    numerics: 1,
                    pass_steps: 1,
                    gone: false,
                }],
            },
            skew_percent: 100,
            cell_ns: CELL_NS,
            ram_pages: 0,
        }
    }
}

impl HostSpec {
    /// The same machine with this memory on each device.
    #[must_use]
    pub fn with_memory(mut self, bytes: u64) -> Self {
        for device in &mut self.capacity.devices {
            (device.memory_total, device.memory_free) = (bytes, bytes);
        }
        self
    }

    /// The same machine with this much RAM for experts beside each device, computed a fifth as fast as there.
    #[must_use]
    pub fn with_ram(mut self, bytes: u64) -> Self {
        for device in &mut self.capacity.devices {
            (device.ram_total, device.ram_free) = (bytes, bytes);
            device.ram_bytes_per_second = device.bytes_per_second / 5;
        }
        self
    }

    /// The same machine with this number of devices like its first one.
    #[must_use]
    pub fn with_devices(mut self, count: usize) -> Self {
        let first = self.capacity.devices[0].clone();
        let device = |at: usize| DeviceCapacity { device: format!("simulated:{at}"), ..first.clone() };
        if count > 1 {
            self.capacity.devices = (0..count).map(device).collect();
        }
        self
    }

    /// The same machine scaled to one of three kinds by its number: as it is, three times as fast, or 40 % as fast.
    #[must_use]
    pub fn of_kind(mut self, number: usize) -> Self {
        let (speed_percent, memory_percent) = [(100, 100), (300, 150), (40, 90)][number % 3];
        for device in &mut self.capacity.devices {
            for speed in [
                &mut device.bytes_per_second,
                &mut device.flops_per_second,
                &mut device.copy_bytes_per_second,
                &mut device.cache_bytes_per_second,
            ] {
                *speed = *speed * speed_percent / 100;
            }
            for memory in [&mut device.memory_total, &mut device.memory_free] {
                *memory = *memory * memory_percent / 100;
            }
        }
        self.cell_ns = self.cell_ns * 100 / speed_percent;
        self
    }
}

/// An input that reached a host.
#[derive(Debug)]
pub struct Arrival {
    /// The input.
    pub input: Input,
    /// Forged by a misreporting member.
    pub forged: bool,
}

/// One host.
pub struct Host {
    /// Its id in the world.
    pub id: HostId,
    /// The id of its node in the mesh.
    pub node_id: NodeId,
    /// The peer id that the node id is derived from.
    pub peer_id: Vec<u8>,
    /// Gossip address, UDP port P.
    pub gossip_addr: SocketAddr,
    /// Data-plane address, UDP port P + 1.
    pub data_addr: SocketAddr,
    /// Its hardware.
    pub spec: HostSpec,
    /// The node, while the process runs.
    pub node: Option<Node>,
    /// Number of process starts. Events addressed to an earlier life are dropped.
    pub life: u32,
    /// End of the current pause (SIGSTOP).
    pub paused_until: Option<Instant>,
    /// Inputs that arrived and are not handled yet.
    pub inbox: VecDeque<Arrival>,
    /// When its driver drains the inbox.
    pub turn_at: Option<Instant>,
    /// When its driver has finished the inputs that it took last.
    pub busy_until: Instant,
    /// Number of inputs since its node last checked its own invariants.
    pub(crate) unchecked: u32,
    /// Its node was asked to leave in this life.
    pub leaves: bool,
    /// The earliest wakeup in the queue.
    pub wake_at: Option<Instant>,
    /// Its local clock.
    pub clock: Clock,
    /// Its disk, which survives restarts.
    pub disk: Disk,
    /// The recording of this life's inputs, if enabled.
    pub recording: Option<Vec<u8>>,
    /// Checkpoint parts collected in this life, not complete yet.
    pub(crate) parts: BTreeMap<(JobId, u32), Saved>,
    /// Simulation outputs on its disk, by job, output and step.
    pub outputs: BTreeMap<(JobId, u16, u32), Saved>,
    /// Its device.
    pub executor: Executor,
}

impl Host {
    pub(crate) fn new(id: HostId, mut spec: HostSpec) -> Self {
        let peer_id = format!("simulated peer {}", id.0).into_bytes();
        // 10.0.0.0/8, one address per host.
        let ip = Ipv4Addr::from_bits(0x0A00_0001 + id.0);
        spec.capacity.machine = u64::from(id.0) + 1;
        Host {
            id,
            node_id: NodeId::of_peer(&peer_id),
            peer_id,
            gossip_addr: SocketAddr::from((ip, 9440)),
            data_addr: SocketAddr::from((ip, 9441)),
            parts: BTreeMap::new(),
            outputs: BTreeMap::new(),
            executor: Executor::new(&spec),
            spec,
            node: None,
            life: 0,
            paused_until: None,
            inbox: VecDeque::new(),
            turn_at: None,
            busy_until: Instant(0),
            unchecked: 0,
            leaves: false,
            wake_at: None,
            clock: Clock::default(),
            disk: Disk::default(),
            recording: None,
        }
    }

    /// Whether the process exists, paused or not.
    pub fn runs(&self) -> bool {
        self.node.is_some()
    }

    /// Its node, if it runs, asserts its own invariants. Planted bugs break some of them, but have to be found by the
    /// checkers.
    pub(crate) fn assert_invariants(&self) {
        if !node_core::PLANTED
            && let Some(node) = &self.node
        {
            node.assert_invariants();
        }
    }

    pub(crate) fn config(&mut self, now: Instant) -> Config {
        let unix_seconds = EPOCH_SECONDS + now.0 / 1_000_000_000;
        Config {
            node: self.node_id,
            generation: Generation(self.disk.next_generation(unix_seconds)),
            peer_id: self.peer_id.clone(),
            name: format!("host-{}", self.id.0),
            gossip_addrs: vec![self.gossip_addr],
            data_addrs: vec![self.data_addr],
            capacity: self.spec.capacity.clone(),
        }
    }
}

/// A host's monotonic clock, with drift.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// Start of the current drift rate, in world time and in local time.
    since: (Instant, Instant),
    ppm: i32,
}

impl Clock {
    /// The same clock with this drift from now on, in parts per million.
    pub fn drifting(self, now: Instant, ppm: i32) -> Clock {
        Clock { since: (now, self.local(now)), ppm: ppm.clamp(-DRIFT_PPM_MAX, DRIFT_PPM_MAX) }
    }

    /// The local time at a world time.
    pub fn local(self, world: Instant) -> Instant {
        if self.ppm == 0 && self.since.0 == self.since.1 {
            return world;
        }
        let passed = u128::from(world.0.saturating_sub(self.since.0.0));
        let shown = passed * self.rate() / MILLION;
        Instant(self.since.1.0 + u64::try_from(shown).unwrap_or(u64::MAX))
    }

    /// The first world time at which the clock shows this local time.
    pub fn world(self, local: Instant) -> Instant {
        if self.ppm == 0 && self.since.0 == self.since.1 {
            return local;
        }
        let shown = u128::from(local.0.saturating_sub(self.since.1.0));
        let passed = (shown * MILLION).div_ceil(self.rate());
        Instant(self.since.0.0.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX)))
    }

    fn rate(self) -> u128 {
        (1_000_000 + i64::from(self.ppm)).unsigned_abs().into()
    }
}

/// A tile of a few hundred cells takes as long per step as a real one of a million.
const CELL_NS: u64 = 10_000;
const MILLION: u128 = 1_000_000;
/// Maximum drift: 10 %.
const DRIFT_PPM_MAX: i32 = 100_000;
/// The wall clock when the virtual world begins: any plausible date.
const EPOCH_SECONDS: u64 = 1_800_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drifting_clock_is_monotonic_and_never_wakes_early() {
        for ppm in [-100_000, -333, 0, 1, 20_000] {
            let clock = Clock::default().drifting(Instant(1_000_003), 777).drifting(Instant(5_000_000_011), ppm);
            let mut before = Instant(0);
            for step in 0..2000 {
                let world = Instant(5_000_000_011 + step * 777_777);
                let local = clock.local(world);
                assert!(local >= before && clock.local(clock.world(local)) >= local, "{ppm} {step}");
                before = local;
            }
        }
    }
}
