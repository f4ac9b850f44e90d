//! The devices this node computes on, and the capacity it advertises to the mesh, measured at start.
use crate::config::{Size, UpOptions};
use kernels::device::{Device, DeviceId, DeviceList};
use kernels_grids::any_tile::GridTile;
use kernels_grids::rule::Rule;
use kernels_grids::{Grid, GridError, Region};
use kernels_models::stage::{Stage, StageError, StageOptions};
use kernels_models::weights::ModelFile;
use node_core::config::{Capacity, DeviceCapacity, Measured, Speed};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory of a stage besides weights and caches: activations of one prefill chunk of a wide model, and logits.
pub(crate) const SCRATCH_BYTES: u64 = 16 << 20;

/// The devices of this node, and what it advertises of them.
pub(crate) struct Devices {
    /// In the order of the advert: orders name them by their places.
    pub all: Vec<Arc<Compute>>,
    /// The capacity advertised to the mesh.
    pub capacity: Capacity,
    /// GPUs of this machine that this node does not use.
    pub idle_gpus: Vec<Device>,
}

/// A device on which parts are computed.
pub(crate) struct Compute {
    device: Device,
    /// Its place in the advert.
    pub index: u8,
    /// Compute threads on the CPU.
    pub threads: usize,
    /// RAM that no stage uses yet for positions that leave their devices, in bytes. All devices of the node share it.
    spill: Arc<AtomicU64>,
}

/// RAM of a stage for positions that leave its device.
pub(crate) struct SpillShare {
    pub(crate) bytes: u64,
    left: Arc<AtomicU64>,
}

impl Drop for SpillShare {
    fn drop(&mut self) {
        self.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

impl Devices {
    /// Finds the devices that the user selected and measures them, each in about a second (a GPU's kernels are compiled
    /// first). Cards of one model are measured once.
    ///
    /// # Errors
    /// This machine lacks one of them; the text lists the devices found. Or `--memory` names a device that is not used.
    pub(crate) fn open(options: &UpOptions) -> Result<Self, String> {
        let kernels_gpu::Probe { devices, faults, .. } = kernels_gpu::probe_report();
        for fault in &faults {
            tracing::warn!("{fault}");
        }
        let list: DeviceList = options.device.parse().map_err(|e: kernels::device::DeviceError| e.to_string())?;
        let used = list.pick(&devices).map_err(|e| e.to_string())?;
        let named: Vec<String> = used.iter().map(|device| device.id.to_string()).collect();
        if let Some((id, _)) = options.memory_of.iter().find(|(id, _)| used.iter().all(|device| device.id != *id)) {
            return Err(format!(
                "--memory names {id}, but the node uses {}: name it with --device too",
                named.join(", ")
            ));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or(cores).clamp(1, cores);
        let sharing = used.iter().filter(|device| !device.own_memory).count() as u64;
        let mut offers: Vec<DeviceCapacity> = Vec::new();
        for &device in &used {
            let kin = used.iter().zip(&offers).find(|(other, _)| is_same_model(other, device)).map(|(_, offer)| offer);
            let offer = offer(device, (threads, cores), sharing, kin, options)?;
            offers.push(offer);
        }
        let zone = options.zone.as_ref().map(|zone| zone.name().to_owned()).unwrap_or_default();
        let free = devices.first().map_or(0, |cpu| cpu.memory_free);
        let (spill, experts) = ram_shares(free, &used, (options.spill, options.expert_ram));
        offer_ram(&mut offers, &used, experts, threads);
        let spill = Arc::new(AtomicU64::new(spill));
        let compute = |(index, device): (u8, &&Device)| {
            Arc::new(Compute { device: (*device).clone(), index, threads, spill: spill.clone() })
        };
        Ok(Self {
            all: (0..).zip(&used).map(compute).collect(),
            capacity: Capacity { machine: machine_id(), zone, devices: offers },
            idle_gpus: kernels::device::idle_gpus(&devices, &used).into_iter().cloned().collect(),
        })
    }
}

/// What the node offers of a device. `kin`: the same of a card of the same model, which is measured already. `sharing`: number
/// of the node's devices that share the machine's memory.
fn offer(
    device: &Device,
    (threads, cores): (usize, usize),
    sharing: u64,
    kin: Option<&DeviceCapacity>,
    options: &UpOptions,
) -> Result<DeviceCapacity, String> {
    let gpu = device.id != DeviceId::Cpu;
    let wish = options.memory_of.iter().find(|(id, _)| *id == device.id).map(|(_, bytes)| *bytes).or(options.memory);
    let asked = wish.map(|asked| within(asked, device));
    let speed = match (asked, kin) {
        (Some(0), _) => Speed::default(), // a client computes nothing
        (_, Some(kin)) => Speed {
            bytes_per_second: kin.bytes_per_second,
            flops_per_second: kin.flops_per_second,
            copy_bytes_per_second: kin.copy_bytes_per_second,
            step_ns: kin.step_ns,
            layer_ns: kin.layer_ns,
            cache_bytes_per_second: kin.cache_bytes_per_second,
        },
        (_, None) if gpu => gpu_speed(device.id),
        (limit, None) => processor_speed(threads, limit.unwrap_or(u64::MAX))?,
    };
    let measured = Measured {
        device: if gpu {
            format!("{} {}", device.id, device.name)
        } else {
            let all = if threads < cores { format!(" of {cores}") } else { String::new() };
            let s = if threads.max(cores) == 1 { "" } else { "s" };
            format!("{} {} ({threads}{all} thread{s})", device.id, device.name)
        },
        memory_free: if device.own_memory { device.memory_free } else { device.memory_free / sharing.max(1) },
        own_memory: device.own_memory,
        speed,
        numerics: numerics(device),
        pass_steps: if gpu { 1 } else { kernels_grids::tile::PASS_STEPS_MAX as u32 },
    };
    let offer = DeviceCapacity::of(measured, asked);
    if let Some(warning) = wish.and_then(|asked| doubtful(asked, offer.memory_total, device)) {
        tracing::warn!("{warning}");
    }
    Ok(offer)
}

/// Whether two devices are cards of one model under one API.
fn is_same_model(one: &Device, other: &Device) -> bool {
    let same_kind = match (one.id, other.id) {
        (DeviceId::Cuda(_), DeviceId::Cuda(_)) | (DeviceId::Vulkan(_), DeviceId::Vulkan(_)) => true,
        (DeviceId::Cpu | DeviceId::Cuda(_) | DeviceId::Vulkan(_), _) => false,
    };
    same_kind && one.name == other.name
}

impl Compute {
    /// Whether it is a GPU, which may disappear.
    pub(crate) fn is_gpu(&self) -> bool {
        self.device.id != DeviceId::Cpu
    }

    /// Whether the machine still has the device. Asks the drivers, which takes up to seconds.
    pub(crate) fn is_there(&self) -> bool {
        kernels_gpu::probe().iter().any(|device| device.id == self.device.id)
    }

    /// Its name within the machine, such as "cuda:1".
    pub(crate) fn label(&self) -> String {
        self.device.id.to_string()
    }

    /// Takes RAM for positions that leave the device, at most this number of bytes.
    pub(crate) fn spill(&self, most: u64) -> SpillShare {
        let take = |left: u64| Some(left.saturating_sub(most));
        let before = self.spill.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        SpillShare { bytes: before.unwrap_or_default().min(most), left: self.spill.clone() }
    }

    /// Creates a tile on the device, all cells zero. Falls back to the CPU if the GPU cannot compute it or lacks the
    /// memory.
    ///
    /// # Errors
    /// The rule does not fit the grid, the tile is not inside it, the halo is wider than the tile, or memory is too
    /// small.
    pub(crate) fn tile(
        &self,
        grid: &Grid,
        rule: &Rule,
        region: Region,
        depth: usize,
    ) -> Result<Box<dyn GridTile>, GridError> {
        tile(&self.device, (grid, rule), region, depth)
    }

    /// Loads a stage on it.
    ///
    /// # Errors
    /// The options do not fit the model, or the device cannot hold the stage.
    pub(crate) fn load(&self, file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
        match self.device.id {
            DeviceId::Cpu => kernels_models::load_cpu_stage(file, options), // skips GPU detection
            id @ (DeviceId::Cuda(_) | DeviceId::Vulkan(_)) => kernels_gpu::load_stage(file, options, id),
        }
    }
}

/// RAM of a node beside its GPUs: for positions that leave them, and for experts that they have no memory for. `free`: free RAM
/// of the machine. `asked`: the same two as the user configured them. A default takes nothing of what the other one has.
fn ram_shares(free: u64, used: &[&Device], asked: (Option<u64>, Option<u64>)) -> (u64, u64) {
    let gpus = || used.iter().filter(|device| device.id != DeviceId::Cpu);
    let own_memory = gpus().any(|gpu| gpu.own_memory);
    let spills = gpus().next().is_some_and(|gpu| gpu.own_memory);
    let (spill, experts) = asked;
    let experts = experts.filter(|_| own_memory);
    let spill = match spill {
        _ if gpus().next().is_none() => 0, // the caches are in RAM already
        Some(bytes) => bytes,
        None if !spills => 0,
        None => (free / SPILL_SHARE).min(free.saturating_sub(experts.unwrap_or(0))),
    };
    let experts = match experts {
        Some(bytes) => bytes,
        None if !own_memory || used.iter().any(|device| device.id == DeviceId::Cpu) => 0,
        None => (free / EXPERTS_SHARE).min(free.saturating_sub(spill)),
    };
    (spill, experts)
}

/// Divides RAM for experts among the GPUs with memory of their own. Measures the processor, unless that is one of the node's
/// devices. Without its speed, plans leave no expert to it, and none is offered.
fn offer_ram(offers: &mut [DeviceCapacity], used: &[&Device], experts: u64, threads: usize) {
    let takes = |offer: &DeviceCapacity, device: &Device| {
        device.id != DeviceId::Cpu && device.own_memory && offer.bytes_per_second > 0
    };
    let count = offers.iter().zip(used).filter(|(offer, device)| takes(offer, device)).count() as u64;
    let Some(each) = experts.checked_div(count).filter(|each| *each > 0) else { return };
    let known =
        used.iter().zip(&*offers).find(|(device, offer)| device.id == DeviceId::Cpu && offer.bytes_per_second > 0);
    let processor = match known {
        Some((_, cpu)) => Ok(Speed {
            bytes_per_second: cpu.bytes_per_second,
            flops_per_second: cpu.flops_per_second,
            ..Speed::default()
        }),
        None => processor_speed(threads, experts),
    };
    match processor {
        Ok(speed) => {
            for (offer, _) in offers.iter_mut().zip(used).filter(|(offer, device)| takes(offer, device)) {
                *offer = std::mem::take(offer).with_ram(each, speed);
            }
        }
        Err(why) => tracing::warn!(%why, "the processor could not be measured: no experts lie in RAM"),
    }
}

/// The default of `--expert-ram` is this fraction of the free RAM: with that of `--spill`, a quarter is left to other programs.
const EXPERTS_SHARE: u64 = 2;

/// The default of `--spill` is this fraction of the free RAM: other programs need the rest.
const SPILL_SHARE: u64 = 4;

/// Bytes of `--memory`, capped at the device's total memory (0: unknown).
fn within(asked: u64, device: &Device) -> u64 {
    if device.memory_total == 0 { asked } else { asked.min(device.memory_total) }
}

/// A warning if `--memory` exceeds what the device has, or is too small for any stage.
fn doubtful(asked: u64, offered: u64, device: &Device) -> Option<String> {
    let (given, id) = (Size(asked), device.id);
    if asked > offered {
        let (offered, total) = (Size(offered), Size(device.memory_total));
        return Some(format!("--memory {given}: {id} has {total} in total; the node offers {offered}"));
    }
    let least = Size(SCRATCH_BYTES);
    (asked > 0 && asked <= least.0).then(|| {
        format!(
            "--memory {given}: no stage of a model fits: each needs {least} besides its weights; a size has a unit, as \
             in 4G"
        )
    })
}

/// Measures the CPU kernels within `memory`, the user's limit. Grid steps read and write memory about as fast as matrix
/// products do.
///
/// Repeats until two measurements agree: other programs, or a hypervisor that runs other machines, can make one several
/// times too slow, and a node that understates its speed is planned as too slow for as long as it runs.
fn processor_speed(threads: usize, memory: u64) -> Result<Speed, String> {
    let measure = || -> Result<Speed, String> {
        let shown = kernels_models::bench::speed(threads, memory).map_err(|e| e.to_string())?;
        Ok(Speed {
            bytes_per_second: shown.weight_bytes_s,
            flops_per_second: shown.flops_s,
            copy_bytes_per_second: shown.weight_bytes_s,
            step_ns: shown.step_ns,
            layer_ns: shown.layer_ns,
            cache_bytes_per_second: kernels_models::bench::cache_speed(threads, memory).map_err(|e| e.to_string())?,
        })
    };
    let mut best = measure()?;
    for _ in 1..MEASUREMENTS_MAX {
        let next = measure()?;
        let agree = agree(best, next);
        best = better(best, next);
        if agree {
            break;
        }
    }
    Ok(best)
}

/// Takes about two and a half seconds on a machine where no two measurements agree.
const MEASUREMENTS_MAX: usize = 5;

/// Whether two measurements show about the same speeds.
fn agree(one: Speed, other: Speed) -> bool {
    alike(one.bytes_per_second, other.bytes_per_second)
        && alike(one.flops_per_second, other.flops_per_second)
        && alike(one.cache_bytes_per_second, other.cache_bytes_per_second)
}

/// The better figure of both, field by field: interference only makes a measurement slower.
fn better(one: Speed, other: Speed) -> Speed {
    Speed {
        bytes_per_second: one.bytes_per_second.max(other.bytes_per_second),
        flops_per_second: one.flops_per_second.max(other.flops_per_second),
        copy_bytes_per_second: one.copy_bytes_per_second.max(other.copy_bytes_per_second),
        step_ns: one.step_ns.min(other.step_ns),
        layer_ns: one.layer_ns.min(other.layer_ns),
        cache_bytes_per_second: one.cache_bytes_per_second.max(other.cache_bytes_per_second),
    }
}

/// Whether two measured speeds differ by a third at most.
fn alike(one: u64, other: u64) -> bool {
    one.max(other) / 4 * 3 <= one.min(other)
}

/// Measures the GPU kernels. A figure that could not be measured is 0, "not measured": the CPU's figures say nothing
/// about it.
fn gpu_speed(id: DeviceId) -> Speed {
    let mut speed = Speed::default();
    let (products, cache, copied) = match kernels_gpu::measure_gpu(id) {
        Ok(measured) => (measured.products, measured.cache_bytes_s, measured.copy_bytes_s),
        Err(why) => (Err(why.clone()), Err(why.clone()), Err(why)),
    };
    match products {
        Ok(shown) => {
            (speed.bytes_per_second, speed.flops_per_second) = (shown.weight_bytes_s, shown.flops_s);
            (speed.step_ns, speed.layer_ns) = (shown.step_ns, shown.layer_ns);
        }
        Err(why) => tracing::warn!(%why, %id, "matrix products could not be measured: this device gets no layers"),
    }
    match cache {
        Ok(bytes_s) => speed.cache_bytes_per_second = bytes_s,
        Err(why) => tracing::warn!(%why, %id, "attention could not be measured: plans assume that it costs nothing"),
    }
    match copied {
        Ok(bytes_s) => speed.copy_bytes_per_second = bytes_s,
        Err(why) => tracing::warn!(%why, %id, "memory bandwidth could not be measured: this device gets no tiles"),
    }
    speed
}

fn tile(
    device: &Device,
    (grid, rule): (&Grid, &Rule),
    region: Region,
    depth: usize,
) -> Result<Box<dyn GridTile>, GridError> {
    let free = usize::try_from(device.memory_free).unwrap_or(usize::MAX);
    match kernels_gpu::grid_tile(device.id, (grid, rule), region, depth, free) {
        Err(why) if device.id != DeviceId::Cpu => {
            let (cells, rule_name, id) = (region.cells(), rule.name(), device.id);
            tracing::warn!(%why, %id, cells, rule = rule_name, "the GPU cannot compute this tile: using the CPU");
            kernels_gpu::grid_tile(DeviceId::Cpu, (grid, rule), region, depth, free)
        }
        made => made,
    }
}

/// Stages with equal ids agree bit for bit and choose equal tokens: all CPUs, and GPUs of the same model and API. The
/// id covers the sampler, which breaks ties between equal logits.
fn numerics(device: &Device) -> u64 {
    id_of(device, kernels_models::sampler::NUMERICS)
}

fn id_of(device: &Device, sampler: &str) -> u64 {
    let kind = match device.id {
        DeviceId::Cpu => "cpu".to_owned(),
        DeviceId::Cuda(_) => format!("cuda {}", device.name),
        DeviceId::Vulkan(_) => format!("vulkan {}", device.name),
    };
    let name = format!("{kind}, {sampler}");
    u64::from_le_bytes(blake3::hash(name.as_bytes()).as_bytes()[..8].try_into().unwrap_or([0; 8]))
}

/// Identifies the physical machine: a hash of its machine id, else of its boot id, else of its host name.
fn machine_id() -> u64 {
    let id = ["/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/etc/hostname"]
        .iter()
        .find_map(|path| std::fs::read(path).ok().filter(|id| !id.is_empty()))
        .unwrap_or_default();
    u64::from_le_bytes(blake3::hash(&id).as_bytes()[..8].try_into().unwrap_or([0; 8]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::threads::Threads;
    use kernels_grids::{Link, links};
    use kernels_simulations::Simulation;
    use std::path::Path;

    const STEPS: usize = 12;
    const DEPTH: usize = 3;

    /// The state hash after [`STEPS`] steps of a job, as one tile or cut in two at `cut` along y, each tile as on its
    /// own node.
    fn hash(device: &Device, job: &str, cut: Option<usize>) -> u128 {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(job);
        let simulation = Simulation::read(&file).unwrap();
        let (grid, mut threads) = (simulation.grid(), Threads::new(1).unwrap());
        let mut regions = vec![grid.region()];
        if let Some(at) = cut {
            regions.push(Region { start: [0, at, 0], end: grid.region().end });
            regions[0].end[1] = at;
        }
        let links_of = |me| links(grid, &regions, me, DEPTH * simulation.rule().radius());
        let all: Vec<Vec<(usize, Link)>> = (0..regions.len()).map(links_of).collect();
        let mut tiles = Vec::new();
        for (region, links) in regions.iter().zip(&all) {
            let mut made = tile(device, (grid, simulation.rule()), *region, DEPTH).unwrap();
            assert_eq!(made.is_asynchronous(), device.id != DeviceId::Cpu);
            made.link(&links.iter().map(|(_, link)| *link).collect::<Vec<_>>()).unwrap();
            simulation.load(&mut *made).unwrap();
            tiles.push(made);
        }
        for _ in 0..STEPS / DEPTH {
            let mut halos = Vec::new();
            for (me, links) in all.iter().enumerate() {
                for (number, (peer, link)) in links.iter().enumerate() {
                    let back = |(other, there): &(usize, Link)| {
                        *other == me && there.region == regions[me] && there.shift == link.shift.map(|shift| -shift)
                    };
                    let there = all[*peer].iter().position(back).unwrap();
                    let mut halo = Vec::new();
                    tiles[me].pack_into(number, &mut halo).unwrap();
                    halos.push((*peer, there, halo));
                }
            }
            halos.iter().for_each(|(peer, link, halo)| tiles[*peer].unpack(*link, halo).unwrap());
            for tile in &mut tiles {
                let tail = tile.split_steps_max();
                tile.advance(&mut threads, DEPTH - tail).unwrap();
                if tile.steps_left() == tail {
                    tile.compute_halo_strips(&mut threads).unwrap();
                    tile.interior(&mut threads).unwrap();
                } else {
                    tile.advance(&mut threads, tail).unwrap();
                }
            }
        }
        for tile in &tiles {
            tile.wait().unwrap();
            assert_eq!(tile.first_not_finite().unwrap(), None);
        }
        let quantity = simulation.default_quantity();
        let need = simulation.source_quantities(quantity)[0];
        assert!(simulation.sample(&*tiles[0], need, regions[0], 4).unwrap().iter().any(|value| *value != 0.0));
        tiles.iter().fold(0u128, |sum, tile| sum.wrapping_add(tile.state_hash(&mut threads).unwrap()))
    }

    #[test]
    fn a_node_offers_no_more_memory_than_its_device_has_and_warns_of_too_little() {
        let device = Device {
            id: DeviceId::Cpu,
            name: "A".into(),
            memory_total: 23 << 30,
            memory_free: 20 << 30,
            own_memory: false,
        };
        assert_eq!((within(8 << 30, &device), doubtful(8 << 30, 8 << 30, &device)), (8 << 30, None));
        assert_eq!(within(900 << 30, &device), 23 << 30);
        let warning = doubtful(900 << 30, 23 << 30, &device);
        assert!(warning.is_some_and(|text| text.contains("900.0 GiB") && text.contains("23.0 GiB")));
        let warning = doubtful(1, 1, &device);
        assert!(warning.is_some_and(|text| text.contains("--memory 1 B") && text.contains("4G")));
    }

    #[test]
    fn ram_is_divided_between_conversations_and_experts() {
        let device = |id, own_memory| Device { id, name: "A".into(), memory_total: 1, memory_free: 1, own_memory };
        let (cpu, card, shared) =
            (device(DeviceId::Cpu, false), device(DeviceId::Cuda(0), true), device(DeviceId::Vulkan(0), false));
        assert_eq!(ram_shares(100, &[&card], (None, None)), (25, 50));
        assert_eq!(ram_shares(100, &[&card], (Some(80), None)), (80, 20), "what is left");
        assert_eq!(ram_shares(100, &[&card], (None, Some(90))), (10, 90));
        assert_eq!(ram_shares(100, &[&card], (None, Some(0))), (25, 0));
        assert_eq!(ram_shares(100, &[&card, &cpu], (None, None)), (25, 0), "the processor's parts have the RAM");
        assert_eq!(ram_shares(100, &[&card, &cpu], (None, Some(30))), (25, 30));
        assert_eq!(ram_shares(100, &[&cpu], (None, Some(30))), (0, 0));
        assert_eq!(ram_shares(100, &[&shared], (None, Some(30))), (0, 0), "its memory is the RAM");
        assert_eq!(ram_shares(100, &[&shared], (Some(9), None)), (9, 0));
    }

    #[test]
    fn each_card_offers_its_part_of_the_ram() {
        let device = |id, own_memory| Device { id, name: "A".into(), memory_total: 1, memory_free: 1, own_memory };
        let (cpu, cards) = (device(DeviceId::Cpu, false), [0, 1].map(|index| device(DeviceId::Cuda(index), true)));
        let used = [&cards[0], &cards[1], &cpu];
        let measured = |bytes_per_second| DeviceCapacity { bytes_per_second, ..DeviceCapacity::default() };
        let mut offers = [measured(9), measured(9), measured(2)];
        offer_ram(&mut offers, &used, 100, 1);
        assert_eq!(
            offers.each_ref().map(|offer| (offer.ram_total, offer.ram_bytes_per_second)),
            [(50, 2), (50, 2), (0, 0)]
        );
        let mut offers = [measured(9), measured(0), measured(2)];
        offer_ram(&mut offers, &used, 100, 1);
        assert_eq!(offers.map(|offer| offer.ram_free), [100, 0, 0], "a card without measured products gets no layers");
    }

    #[test]
    fn gpus_of_the_same_model_have_the_same_numerics_id() {
        let gpu = |id| Device { id, name: "A".into(), memory_total: 1, memory_free: 1, own_memory: true };
        assert_eq!(numerics(&gpu(DeviceId::Cuda(0))), numerics(&gpu(DeviceId::Cuda(1))));
        assert_ne!(numerics(&gpu(DeviceId::Cuda(0))), numerics(&gpu(DeviceId::Vulkan(0))));
        assert_ne!(numerics(&gpu(DeviceId::Cuda(0))), numerics(&gpu(DeviceId::Cpu)));
    }

    #[test]
    fn nodes_with_different_samplers_have_different_numerics_ids() {
        let device = Device { id: DeviceId::Cpu, name: "A".into(), memory_total: 1, memory_free: 1, own_memory: false };
        assert_eq!(numerics(&device), id_of(&device, "sampler-2"));
        assert_ne!(numerics(&device), id_of(&device, "sampler-1"));
    }

    #[test]
    fn two_tiles_have_the_state_hash_of_one() {
        let devices = kernels_gpu::probe();
        for device in devices.iter().filter(|device| device.id == DeviceId::Cpu) {
            let one = hash(device, "glider-gun.toml", None);
            assert_eq!(one, hash(device, "glider-gun.toml", Some(20)));
        }
        let Some(gpu) = devices.iter().find(|device| matches!(device.id, DeviceId::Vulkan(_))) else {
            let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "vulkan"));
            assert!(!required, "MESHNODE_REQUIRE names vulkan, but no Vulkan driver was found");
            eprintln!("SKIPPED: no Vulkan driver on this machine");
            return;
        };
        assert_eq!(hash(gpu, "glider-gun.toml", Some(20)), hash(&devices[0], "glider-gun.toml", None));
        for job in ["karman.toml", "gray-scott-text.toml"] {
            assert_eq!(hash(gpu, job, Some(40)), hash(gpu, job, None), "{job}");
        }
    }
}
