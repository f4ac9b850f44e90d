//! The device this node computes on, and what it offers to the mesh as measured at start.
use crate::config::UpOptions;
use kernels::device::{Device, DeviceChoice, DeviceId};
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
            device: format!("{} {}", device.id, device.name),
            memory_total: offered,
            memory_free: offered,
            bytes_per_second: speed.weight_bytes_s,
            flops_per_second: speed.flops_s,
            step_ns: STEP_NS[usize::from(gpu)],
            numerics: numerics(&device),
        };
        Ok(Self { device, threads, capacity })
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

/// Stages with equal ids agree bit for bit; CPUs by instruction set, GPUs by model.
fn numerics(device: &Device) -> u64 {
    let name = if device.id == DeviceId::Cpu { "cpu".to_owned() } else { format!("{} {}", device.id, device.name) };
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
