//! The device this node computes on, and what it offers to the mesh as measured at start.
use crate::config::UpOptions;
use kernels::device::{Device, DeviceChoice, DeviceId};
use kernels::grid::any_tile::GridTile;
use kernels::grid::rule::Rule;
use kernels::grid::{Grid, GridError, Region};
use kernels::stage::{Stage, StageError, StageOptions};
use kernels::weights::ModelFile;
use node_core::config::Capacity;
use std::sync::Arc;

/// Share of free memory a node offers when it is not told how much: the rest is the user's.
const OFFER_PERCENT: u64 = 80;
/// What one step of a stage costs besides computing: two hand-overs between threads on a CPU; on a GPU its device
/// thread wakes from idle besides.
const STEP_NS: [u64; 2] = [40_000, 400_000];

/// Where stages are loaded.
pub struct Compute {
    device: Device,
    /// Compute threads of a CPU stage.
    pub threads: usize,
    /// What is told to the mesh.
    pub capacity: Capacity,
}

impl Compute {
    /// Finds the device the user asked for and measures it, in about a third of a second.
    ///
    /// # Errors
    /// No such device here; the text names those there are.
    pub fn open(options: &UpOptions) -> Result<Self, String> {
        let devices = kernels_burn::probe();
        let choice: DeviceChoice = options.device.parse().map_err(|e: kernels::device::DeviceError| e.to_string())?;
        let device = choice.pick(&devices).map_err(|e| e.to_string())?.clone();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or(cores).clamp(1, cores);
        let gpu = device.id != DeviceId::Cpu;
        let speed = kernels::bench::speed(threads).map_err(|e| e.to_string())?;
        let offered = options.memory.unwrap_or(device.memory_free / 100 * OFFER_PERCENT);
        let capacity = Capacity {
            machine: machine_id(),
            device: if gpu {
                format!("{} {}", device.id, device.name)
            } else {
                let all = if threads < cores { format!(" of {cores}") } else { String::new() };
                format!("{} {} ({threads}{all} threads)", device.id, device.name)
            },
            memory_total: offered,
            memory_free: offered,
            bytes_per_second: gpu_speed(&device).unwrap_or(speed.weight_bytes_s),
            flops_per_second: speed.flops_s,
            step_ns: STEP_NS[usize::from(gpu)],
            numerics: numerics(&device),
            pass_steps: if gpu { 1 } else { kernels::grid::tile::PASS_STEPS_MAX as u32 },
        };
        Ok(Self { device, threads, capacity })
    }

    /// Makes a tile on it, all cells zero. What a GPU cannot compute, or has no memory for, the processor computes.
    ///
    /// # Errors
    /// The rule does not fit the grid, the tile not in it, the halo not in the tile, or nothing into memory.
    pub fn tile(&self, grid: &Grid, rule: &Rule, region: Region, depth: usize) -> Result<Box<dyn GridTile>, GridError> {
        tile(&self.device, (grid, rule), region, depth)
    }

    /// Loads a stage on it.
    ///
    /// # Errors
    /// Options that do not fit the model, or a device that cannot hold it.
    pub fn load(&self, file: Arc<ModelFile>, options: StageOptions) -> Result<Box<dyn Stage>, StageError> {
        match self.device.id {
            DeviceId::Cpu => kernels::load_cpu_stage(file, options),
            id @ (DeviceId::Cuda(_) | DeviceId::Vulkan(_)) => kernels_burn::load_gpu_stage(file, options, id),
        }
    }
}

/// Bytes a second of a GPU's memory, as measured now; none where the processor computes.
fn gpu_speed(device: &Device) -> Option<u64> {
    if device.id == DeviceId::Cpu {
        return None;
    }
    let measured = kernels_burn::copy_speed(device.id);
    if let Err(why) = &measured {
        let id = device.id;
        tracing::warn!(%why, %id, "the device could not be measured: it is planned with as if it were the processor");
    }
    measured.ok()
}

fn tile(
    device: &Device,
    (grid, rule): (&Grid, &Rule),
    region: Region,
    depth: usize,
) -> Result<Box<dyn GridTile>, GridError> {
    let free = usize::try_from(device.memory_free).unwrap_or(usize::MAX);
    match kernels_burn::grid_tile(device.id, (grid, rule), region, depth, free) {
        Err(why) if device.id != DeviceId::Cpu => {
            let (cells, rule_name, id) = (region.cells(), rule.name(), device.id);
            tracing::warn!(%why, %id, cells, rule = rule_name, "the processor computes a tile, for the GPU does not");
            kernels_burn::grid_tile(DeviceId::Cpu, (grid, rule), region, depth, free)
        }
        made => made,
    }
}

/// Stages with equal ids agree bit for bit; CPUs by instruction set, GPUs by model, wherever in a machine they are.
fn numerics(device: &Device) -> u64 {
    let name = match device.id {
        DeviceId::Cpu => "cpu".to_owned(),
        DeviceId::Cuda(_) => format!("cuda {}", device.name),
        DeviceId::Vulkan(_) => format!("vulkan {}", device.name),
    };
    u64::from_le_bytes(blake3::hash(name.as_bytes()).as_bytes()[..8].try_into().unwrap_or([0; 8]))
}

/// What tells one physical machine from another: its machine id, else its host name.
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
    use kernels::grid::simulation::Simulation;
    use kernels::grid::tile::Threads;
    use kernels::grid::{Link, links};
    use std::path::Path;

    const STEPS: usize = 12;
    const DEPTH: usize = 3;

    /// The state's hash after some steps of a job in so many tiles, each as a node would hold it.
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
            assert_eq!(made.is_detached(), device.id != DeviceId::Cpu);
            made.link(&links.iter().map(|(_, link)| *link).collect::<Vec<_>>()).unwrap();
            simulation.load(&mut *made).unwrap();
            tiles.push(made);
        }
        for _ in 0..STEPS / DEPTH {
            let mut strips = Vec::new();
            for (me, links) in all.iter().enumerate() {
                for (number, (peer, link)) in links.iter().enumerate() {
                    let back = |(other, there): &(usize, Link)| {
                        *other == me && there.region == regions[me] && there.shift == link.shift.map(|shift| -shift)
                    };
                    let there = all[*peer].iter().position(back).unwrap();
                    let mut strip = Vec::new();
                    tiles[me].pack_into(number, &mut strip).unwrap();
                    strips.push((*peer, there, strip));
                }
            }
            strips.iter().for_each(|(peer, link, strip)| tiles[*peer].unpack(*link, strip).unwrap());
            for tile in &mut tiles {
                let tail = tile.tail();
                tile.advance(&mut threads, DEPTH - tail).unwrap();
                if tile.left() == tail {
                    tile.strips(&mut threads).unwrap();
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
        let need = simulation.needs(quantity)[0];
        assert!(simulation.sample(&*tiles[0], need, regions[0], 4).unwrap().iter().any(|value| *value != 0.0));
        tiles.iter().fold(0u128, |sum, tile| sum.wrapping_add(tile.state_hash(&mut threads).unwrap()))
    }

    #[test]
    fn two_gpus_of_a_kind_share_a_simulation() {
        let gpu = |id| Device { id, name: "A".into(), memory_total: 1, memory_free: 1 };
        assert_eq!(numerics(&gpu(DeviceId::Cuda(0))), numerics(&gpu(DeviceId::Cuda(1))));
        assert_ne!(numerics(&gpu(DeviceId::Cuda(0))), numerics(&gpu(DeviceId::Vulkan(0))));
        assert_ne!(numerics(&gpu(DeviceId::Cuda(0))), numerics(&gpu(DeviceId::Cpu)));
    }

    #[test]
    fn tiles_of_two_nodes_have_the_hash_of_one() {
        let devices = kernels_burn::probe();
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
