//! Random small fleets and jobs from a seed, for the planner's tests.
use partitioner::{Device, DeviceId, Experts, Fleet, Goal, Layer, Link, Options, Work};
use std::collections::BTreeMap;

/// A xorshift generator: sufficient for tests, and the same on every machine.
pub(crate) struct Random(u64);

impl Random {
    /// An independent stream for each seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A separate stream; this one is unchanged.
    fn aside(&self) -> Self {
        Self::new(self.0)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// Device number `n`.
pub(crate) fn id(n: usize) -> DeviceId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(n as u64).to_be_bytes());
    DeviceId::first(bytes)
}

/// A job with uneven layers.
pub(crate) fn work(random: &mut Random, layers: usize) -> Work {
    let mut windows = random.aside();
    let mut layer = |random: &mut Random| Layer {
        flops_per_token: 50 + random.below(200),
        weight_bytes: 60 + random.below(80),
        kv_bytes_per_token: 1 + random.below(3),
        window: (windows.below(3) == 0).then(|| 1 + windows.below(3) as u32),
        experts: None,
    };
    let embed_bytes = random.below(150);
    Work {
        layers: (0..layers).map(|_| layer(random)).collect(),
        embed_bytes,
        head_bytes: embed_bytes + random.below(20),
        tied: random.below(2) == 0,
        head_flops: random.below(400),
        activation_bytes: 10 + random.below(50),
        coarser_bytes: Vec::new(),
        context: random.below(10) as u32,
        sequences: 1 + random.below(3) as u32,
        scratch_bytes: random.below(30),
    }
}

/// Devices of very different sizes and speeds; some excluded, some unmeasured, some links unusable.
pub(crate) fn fleet(random: &mut Random, devices: usize) -> Fleet {
    let mut layers = random.aside();
    let mut device = |random: &mut Random, n: usize| Device {
        id: id(n),
        name: format!("node-{n}"),
        label: String::new(),
        machine: n as u64,
        zone: String::new(),
        memory: 100 + random.below(900),
        bytes_per_second: if random.below(12) == 0 { 0 } else { 100 + random.below(2_000) },
        flops_per_second: random.below(3) * (100 + random.below(5_000)),
        copy_bytes_per_second: 0,
        step_ns: random.below(50_000_000),
        layer_ns: layers.below(3) * layers.below(30_000_000),
        cache_bytes_per_second: layers.below(3) * (5 + layers.below(100)),
        ram: 0,
        ram_bytes_per_second: 0,
        ram_flops_per_second: 0,
        numerics: random.below(2),
        pass_steps: 1,
        excluded: random.below(12) == 0,
    };
    let link = |random: &mut Random| Link {
        rtt_ns: random.below(100_000_000),
        bytes_per_second: if random.below(10) == 0 { 0 } else { 500 + random.below(20_000) },
    };
    let mut links = BTreeMap::new();
    for from in 0..devices {
        for to in (0..devices).filter(|&to| to != from) {
            if random.below(3) > 0 {
                links.insert((id(from).node, id(to).node), link(random));
            }
        }
    }
    let mut list: Vec<Device> = (0..devices).map(|n| device(random, n)).collect();
    let swap = random.below(devices as u64) as usize;
    list.swap(0, swap);
    Fleet { devices: list, links, default_link: link(random) }
}

/// The same job with experts in most layers: what a stage of it may leave to RAM.
#[allow(dead_code, reason = "not every test binary uses it")]
pub(crate) fn with_experts(random: &mut Random, mut work: Work) -> Work {
    for layer in &mut work.layers {
        let (count, share) = (4 + random.below(5) as u32, 60 + random.below(40));
        let used = 1 + random.below(2) as u32;
        let bytes = layer.weight_bytes * share / 100;
        layer.experts = (random.below(8) > 0).then_some(Experts { bytes, count, used });
    }
    work
}

/// The same devices, most of them with RAM for experts, and less memory.
#[allow(dead_code, reason = "not every test binary uses it")]
pub(crate) fn with_ram(random: &mut Random, mut fleet: Fleet) -> Fleet {
    for device in &mut fleet.devices {
        device.memory = device.memory * (40 + random.below(50)) / 100;
        if random.below(4) > 0 {
            device.ram = 50 + random.below(500);
            device.ram_bytes_per_second = random.below(8) * (20 + random.below(200));
            device.ram_flops_per_second = random.below(3) * (10 + random.below(1_000));
        }
    }
    fleet
}

/// Options with device 0 as coordinator.
pub(crate) fn options(goal: Goal) -> Options {
    Options { goal, head: id(0).node, losses: false }
}
