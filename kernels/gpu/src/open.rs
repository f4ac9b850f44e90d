//! Where a device's name meets a runtime: loading a stage, making a tile of a grid, the self-test and the speed of a device.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use kernels::bench::Speed;
use kernels::device::{Device, DeviceId};
use kernels::gpu::grid::{cuda_tile, vulkan_tile};
use kernels::grid::any_tile::GridTile;
use kernels::grid::rule::Rule;
use kernels::grid::tile::Tile;
use kernels::grid::{Grid, GridError, Region};
use kernels::load_cpu_stage;
use kernels::quant::QuantType;
use kernels::stage::{Stage, StageError, StageOptions};
use kernels::weights::ModelFile;

use crate::Platform;
use crate::compile::{is_started, keep, prepare};
use crate::device::{probe_report, wgpu_device};
use crate::engine::memory::Release;
use crate::engine::{Profiled, load, load_weights, panic_text};
use crate::load::Weights;
use crate::selftest::{Check, checks};
use crate::shapes::Shape;
use crate::speed::{cache_speed, copy_speed, speed};

/// Loads layers of a model onto a device.
///
/// # Errors
/// A device that is not here (with what it lacks), a model that does not fit it, or a failure of the device.
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

/// As [`load_stage`] for a GPU, as a stage that can be measured.
///
/// # Errors
/// As [`load_stage`], and for the processor.
pub fn load_profiled(
    file: Arc<ModelFile>,
    options: StageOptions,
    device: DeviceId,
) -> Result<Box<dyn Profiled>, StageError> {
    file.check_unchanged()?;
    let stage = loaded(&file, Weights::File, options, device, Instant::now())?;
    file.check_unchanged()?; // so it was what the header said while it was read
    Ok(stage)
}

/// A model of a shape on a GPU, its matrices random and in `quant`, without a file: what a GPU can be measured with where no model
/// is. It takes as long to load as its bytes take to write in the device's memory.
///
/// # Errors
/// As [`load_profiled`]; rows of the shape that are no whole blocks of the format; no folder for the header's temporary file.
pub fn load_random(
    shape: &Shape,
    quant: QuantType,
    options: StageOptions,
    device: DeviceId,
) -> Result<Box<dyn Profiled>, StageError> {
    let start = Instant::now();
    let file = shape.sketch(quant)?;
    loaded(&file, Weights::Random, options, device, start)
}

/// `start`: when opening the file began.
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
        None => Err(StageError::Input(format!("expected a GPU, found {device}; `--device` names one"))),
        Some(Gpu::Cuda(gpu)) => on::<CudaRuntime>(what, options, (&gpu, gpu.index), free, start),
        Some(Gpu::Vulkan(gpu)) => on::<WgpuRuntime>(what, options, (&gpu, 0), free, start),
    }
}

/// Small models on a device: the bits of the reference for every family and format.
///
/// # Errors
/// The device is not here.
pub fn selftest(device: DeviceId) -> Result<Vec<Check>, String> {
    find(device)?;
    let checks = match gpu(device)? {
        None => checks(&|file, options| load_cpu_stage(Arc::clone(file), options)),
        Some(Gpu::Cuda(gpu)) => {
            checks(&|file, options| Ok(Box::new(load(file, options, client::<CudaRuntime>(&gpu)?, gpu.index, None)?)))
        }
        Some(Gpu::Vulkan(gpu)) => {
            checks(&|file, options| Ok(Box::new(load(file, options, client::<WgpuRuntime>(&gpu)?, 0, None)?)))
        }
    };
    keep();
    Ok(checks)
}

/// What a GPU showed when it was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuSpeed {
    /// How fast stages are without their attention, or why that could not be measured.
    pub products: Result<Speed, String>,
    /// Bytes of keys and values a second that attention of one row reads; or why not.
    pub cache_bytes_s: Result<u64, String>,
    /// Bytes a second that a copy in its memory reads and writes, which tiles of grids come close to; or why not.
    pub copy_bytes_s: Result<u64, String>,
}

/// Measures a GPU with the kernels that it will run: under half a second beside their compilation, with 280 MiB of its memory.
///
/// # Errors
/// The device is not here.
pub fn gpu_speed(device: DeviceId) -> Result<GpuSpeed, String> {
    fn measured<R: Platform>(device: &R::Device, number: usize) -> GpuSpeed {
        let client = match client::<R>(device) {
            Ok(client) => client,
            Err(why) => {
                let why = why.to_string();
                return GpuSpeed {
                    products: Err(why.clone()),
                    cache_bytes_s: Err(why.clone()),
                    copy_bytes_s: Err(why),
                };
            }
        };
        // Software drivers share the host's memory and cores: a part of what is usual shows as much.
        let slow = client.properties().hardware.plane_size_max < 32;
        // Each gives its memory back before the next takes as much.
        let products = freed(&client, || caught(|| speed(&client, number, slow)));
        let cache_bytes_s = freed(&client, || caught(|| cache_speed(&client, number, slow)));
        let copy_bytes_s = freed(&client, || caught(|| copy_speed(&client, slow)));
        GpuSpeed { products, cache_bytes_s, copy_bytes_s }
    }
    let speed = match gpu(device)? {
        None => return Err("the processor is no GPU".into()),
        Some(Gpu::Cuda(gpu)) => measured::<CudaRuntime>(&gpu, gpu.index),
        Some(Gpu::Vulkan(gpu)) => measured::<WgpuRuntime>(&gpu, 0),
    };
    keep();
    Ok(speed)
}

/// A tile on a device of this machine, all cells zero. `depth`: steps that one exchange of halos serves. `free`: bytes of a
/// GPU's memory that the tile may take.
///
/// # Errors
/// The device is not here, the rule does not fit the grid or the device, the tile not in the grid, the halo not in the tile, or
/// the tile not into the memory.
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
            let gone = || GridError::Device { what: format!("there is no vulkan:{number} here") };
            vulkan_tile(&wgpu_device(number).ok_or_else(gone)?, (grid, rule), region, depth, free)
        }
    }
}

enum Gpu {
    Cuda(CudaDevice),
    Vulkan(WgpuDevice),
}

/// `None` for the processor.
fn gpu(device: DeviceId) -> Result<Option<Gpu>, String> {
    Ok(Some(match device {
        DeviceId::Cpu => return Ok(None),
        DeviceId::Cuda(i) => {
            prepare(i as usize);
            Gpu::Cuda(CudaDevice::new(i as usize))
        }
        DeviceId::Vulkan(i) => Gpu::Vulkan(wgpu_device(i).ok_or_else(|| format!("there is no vulkan:{i} here"))?),
    }))
}

/// cubecl reports kernels that do not compile and devices that are lost by panicking.
fn caught<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_text(panic.as_ref())))
}

/// Does work, and then gives all memory that it took back to the device.
fn freed<R: Platform, T>(client: &ComputeClient<R>, work: impl FnOnce() -> T) -> T {
    let _release = Release::new(client);
    work()
}

fn client<R: Platform>(device: &R::Device) -> Result<ComputeClient<R>, StageError> {
    caught(|| Ok(R::client(device))).map_err(StageError::Device)
}

/// Free bytes of a device's memory. A CUDA device that this process computes on already is asked without a process of its own, whose
/// driver takes most of a second to start.
fn memory_free(device: DeviceId) -> Result<u64, StageError> {
    match device {
        DeviceId::Cuda(number) if is_started(number as usize) => {
            CudaRuntime::memory_free(number as usize).ok_or_else(|| {
                StageError::Device(format!("{device} does not answer; `nvidia-smi` tells more; start the node again"))
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
    probe.devices.into_iter().find(|d| d.id == device).ok_or_else(|| format!("there is no {device} here{why}"))
}
