//! The public API by device name: picks the runtime, then loads a stage, creates a grid tile, self-tests or benchmarks a device.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use kernels::bench::Speed;
use kernels::device::{Device, DeviceId};
use kernels::quant::QuantType;
use kernels_gpu_grids::{cuda_tile, vulkan_tile};
use kernels_grids::any_tile::GridTile;
use kernels_grids::rule::Rule;
use kernels_grids::tile::Tile;
use kernels_grids::{Grid, GridError, Region};
use kernels_models::load_cpu_stage;
use kernels_models::stage::{Stage, StageError, StageOptions};
use kernels_models::weights::ModelFile;

use crate::compile::{is_started, keep, prepare};
use crate::device::{probe_report, wgpu_device};
use crate::engine::memory::Release;
use crate::engine::profile::Profiled;
use crate::engine::{load, load_weights};
use crate::error::panic_text;
use crate::load::Weights;
use crate::platform::Platform;
use crate::selftest::{Check, Load, checks, encoding_checks, product_checks};
use crate::shapes::Shape;
use crate::speed::{cache_speed, copy_speed, speed};

/// Loads layers of a model onto a device.
///
/// # Errors
/// The device is missing (the error names what it lacks), the model does not fit, or the device failed.
pub fn load_stage(file: Arc<ModelFile>, options: StageOptions, device: DeviceId) -> Result<Box<dyn Stage>, StageError> {
    match device {
        DeviceId::Cpu => load_cpu_stage(file, options),
        DeviceId::Cuda(_) | DeviceId::Vulkan(_) => {
            let stage = load_profiled(file, options, device)?;
            tracing::debug!("{device} loaded weights in {}", stage.load_phases());
            Ok(stage)
        }
    }
}

/// Like [`load_stage`], for a GPU only; the stage can be profiled.
///
/// # Errors
/// As [`load_stage`], or the device is the CPU.
pub fn load_profiled(
    file: Arc<ModelFile>,
    options: StageOptions,
    device: DeviceId,
) -> Result<Box<dyn Profiled>, StageError> {
    file.check_unchanged()?;
    let stage = loaded(&file, Weights::File, options, device, Instant::now())?;
    file.check_unchanged()?; // the header was valid for the whole read
    Ok(stage)
}

/// Creates a model of a given shape with random weights in `quant` on a GPU, to benchmark without a model file. Loading takes as
/// long as writing the weights to device memory. `options` of the file that describes the model.
///
/// # Errors
/// As [`load_profiled`]; the rows are not whole blocks of the format; or the header's temporary file cannot be written.
pub fn load_random(
    shape: &Shape,
    quant: QuantType,
    options: &dyn Fn(&ModelFile) -> StageOptions,
    device: DeviceId,
) -> Result<Box<dyn Profiled>, StageError> {
    let start = Instant::now();
    let file = shape.sketch(quant)?;
    loaded(&file, Weights::Random, options(&file), device, start)
}

/// `start`: when the caller began to open the file.
fn loaded(
    file: &ModelFile,
    weights: Weights,
    options: StageOptions,
    device: DeviceId,
    start: Instant,
) -> Result<Box<dyn Profiled>, StageError> {
    fn on<R: Platform>(
        (file, weights): (&ModelFile, Weights),
        options: StageOptions,
        (device, number): (&R::Device, usize),
        free: u64,
        start: Instant,
    ) -> Result<Box<dyn Profiled>, StageError> {
        let client = client::<R>(device)?;
        let opened = start.elapsed().as_secs_f64();
        let mut stage = load_weights(file, weights, options, client, number, Some(free))?;
        stage.engine_mut()?.opened(opened);
        Ok(Box::new(stage))
    }
    let free = memory_free(device)?;
    let what = (file, weights);
    match gpu(device).map_err(StageError::Input)? {
        None => Err(StageError::Input(format!("expected a GPU, found {device}; choose one with `--device`"))),
        Some(Gpu::Cuda(gpu)) => on::<CudaRuntime>(what, options, (&gpu, gpu.index), free, start),
        Some(Gpu::Vulkan(gpu)) => on::<WgpuRuntime>(what, options, (&gpu, 0), free, start),
    }
}

/// Runs small models of every family and format on a device and compares them bit by bit with the reference. Calls `done` after each
/// check: a software driver takes minutes for all.
///
/// # Errors
/// The device is missing.
pub fn selftest(device: DeviceId, done: &mut dyn FnMut(&Check)) -> Result<Vec<Check>, String> {
    fn on<R: Platform>(gpu: &R::Device, number: usize, done: &mut dyn FnMut(&Check)) -> Result<Vec<Check>, String> {
        let opened = client::<R>(gpu).map_err(|error| error.to_string())?;
        let load: Load<'_> = &|file, options| Ok(Box::new(load(file, options, client::<R>(gpu)?, number, None)?));
        let operations = product_checks(&opened).chain(encoding_checks(&opened));
        Ok(operations.chain(checks(load)).inspect(done).collect())
    }
    find(device)?;
    let checks = match gpu(device)? {
        None => checks(&|file, options| load_cpu_stage(Arc::clone(file), options)).inspect(done).collect(),
        Some(Gpu::Cuda(gpu)) => on::<CudaRuntime>(&gpu, gpu.index, done)?,
        Some(Gpu::Vulkan(gpu)) => on::<WgpuRuntime>(&gpu, 0, done)?,
    };
    keep();
    Ok(checks)
}

/// Measured rates of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuRates {
    /// Rates of a stage without attention, or why the measurement failed.
    pub products: Result<Speed, String>,
    /// Bytes of the KV cache that attention of one row reads per second, or why the measurement failed.
    pub cache_bytes_s: Result<u64, String>,
    /// Bytes per second that a device-memory copy reads and writes, or why the measurement failed. Grid tiles come close to it.
    pub copy_bytes_s: Result<u64, String>,
}

/// Measures a GPU with the kernels that stages run. Takes under 0.5 s plus compilation, and 280 MiB of device memory.
///
/// # Errors
/// The device is missing or is the CPU.
pub fn measure_gpu(device: DeviceId) -> Result<GpuRates, String> {
    fn measured<R: Platform>(device: &R::Device, number: usize) -> GpuRates {
        let client = match client::<R>(device) {
            Ok(client) => client,
            Err(why) => {
                let why = why.to_string();
                return GpuRates {
                    products: Err(why.clone()),
                    cache_bytes_s: Err(why.clone()),
                    copy_bytes_s: Err(why),
                };
            }
        };
        // Software drivers share the host's memory and cores; a smaller problem is enough for them.
        let slow = client.properties().hardware.plane_size_max < 32;
        // Each measurement frees its memory before the next one allocates.
        let products = freed(&client, || caught(|| speed(&client, number, slow)));
        let cache_bytes_s = freed(&client, || caught(|| cache_speed(&client, number, slow)));
        let copy_bytes_s = freed(&client, || caught(|| copy_speed(&client, slow)));
        GpuRates { products, cache_bytes_s, copy_bytes_s }
    }
    let speed = match gpu(device)? {
        None => return Err(format!("expected a GPU, found {device}")),
        Some(Gpu::Cuda(gpu)) => measured::<CudaRuntime>(&gpu, gpu.index),
        Some(Gpu::Vulkan(gpu)) => measured::<WgpuRuntime>(&gpu, 0),
    };
    keep();
    Ok(speed)
}

/// Creates a tile with all cells zero on a device of this machine. `depth`: halo depth, in steps per halo exchange. `free`: bytes
/// of GPU memory that the tile may take.
///
/// # Errors
/// The device is missing, the rule does not fit the grid or the device, the tile does not fit the grid, the halo does not fit the
/// tile, or the tile does not fit into memory.
pub fn grid_tile(
    device: DeviceId,
    (grid, rule): (&Grid, &Rule),
    region: Region,
    depth: usize,
    free: usize,
) -> Result<Box<dyn GridTile>, GridError> {
    match device {
        DeviceId::Cpu => Ok(Box::new(Tile::new(grid, rule, region, depth)?)),
        DeviceId::Cuda(number) => {
            prepare(number as usize);
            cuda_tile(number as usize, (grid, rule), region, depth, free)
        }
        DeviceId::Vulkan(number) => {
            let missing = || GridError::Device { what: format!("vulkan:{number} was not found") };
            vulkan_tile(&wgpu_device(number).ok_or_else(missing)?, (grid, rule), region, depth, free)
        }
    }
}

enum Gpu {
    Cuda(CudaDevice),
    Vulkan(WgpuDevice),
}

/// `None` for the CPU.
fn gpu(device: DeviceId) -> Result<Option<Gpu>, String> {
    Ok(Some(match device {
        DeviceId::Cpu => return Ok(None),
        DeviceId::Cuda(i) => {
            prepare(i as usize);
            Gpu::Cuda(CudaDevice::new(i as usize))
        }
        DeviceId::Vulkan(i) => Gpu::Vulkan(wgpu_device(i).ok_or_else(|| format!("vulkan:{i} was not found"))?),
    }))
}

/// Turns panics into errors: CubeCL panics when a kernel does not compile or a device is lost.
fn caught<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_text(panic.as_ref())))
}

/// Runs `work`, then frees all device memory that it allocated.
fn freed<R: Platform, T>(client: &ComputeClient<R>, work: impl FnOnce() -> T) -> T {
    let _release = Release::new(client);
    work()
}

fn client<R: Platform>(device: &R::Device) -> Result<ComputeClient<R>, StageError> {
    caught(|| Ok(R::client(device))).map_err(StageError::Device)
}

/// Free bytes of device memory. A CUDA device that this process already uses is queried here; others are queried in a child
/// process, where the driver takes most of a second to start.
fn memory_free(device: DeviceId) -> Result<u64, StageError> {
    match device {
        DeviceId::Cuda(number) if is_started(number as usize) => {
            CudaRuntime::memory_free(number as usize).ok_or_else(|| {
                StageError::Device(format!(
                    "{device} does not respond; run `nvidia-smi` for details, then restart the node"
                ))
            })
        }
        DeviceId::Cpu | DeviceId::Cuda(_) | DeviceId::Vulkan(_) => {
            find(device).map(|found| found.memory_free).map_err(StageError::Input)
        }
    }
}

fn find(device: DeviceId) -> Result<Device, String> {
    let probe = probe_report();
    let kind = device.to_string();
    let kind = kind.split(':').next().unwrap_or_default();
    let why = probe
        .notes
        .iter()
        .cloned()
        .chain(probe.faults.iter().map(ToString::to_string))
        .filter(|note| note.starts_with(kind))
        .fold(String::new(), |all, note| format!("{all}; {note}"));
    probe.devices.into_iter().find(|d| d.id == device).ok_or_else(|| format!("{device} was not found{why}"))
}
