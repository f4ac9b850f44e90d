//! Where a device's name meets a runtime: loading a stage, making a tile of a grid, the self-test and the speed of a device.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

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
use kernels::stage::{Stage, StageError, StageOptions};
use kernels::weights::ModelFile;

use crate::Platform;
use crate::device::{probe_report, wgpu_device};
use crate::engine::{load, panic_text};
use crate::selftest::{Check, checks};
use crate::speed::{copy_speed, speed};

/// Loads layers of a model onto a device.
///
/// # Errors
/// A device that is not here (with what it lacks), a model that does not fit it, or a failure of the device.
pub fn load_stage(file: Arc<ModelFile>, options: StageOptions, device: DeviceId) -> Result<Box<dyn Stage>, StageError> {
    let free = Some(find(device).map_err(StageError::Input)?.memory_free);
    Ok(match gpu(device).map_err(StageError::Input)? {
        None => load_cpu_stage(file, options)?,
        Some(Gpu::Cuda(gpu)) => Box::new(load(&file, options, client::<CudaRuntime>(&gpu)?, gpu.index, free)?),
        Some(Gpu::Vulkan(gpu)) => Box::new(load(&file, options, client::<WgpuRuntime>(&gpu)?, 0, free)?),
    })
}

/// Small models on a device: the bits of the reference for every family and format.
///
/// # Errors
/// The device is not here.
pub fn selftest(device: DeviceId) -> Result<Vec<Check>, String> {
    find(device)?;
    Ok(match gpu(device)? {
        None => checks(&|file, options| load_cpu_stage(Arc::clone(file), options)),
        Some(Gpu::Cuda(gpu)) => {
            checks(&|file, options| Ok(Box::new(load(file, options, client::<CudaRuntime>(&gpu)?, gpu.index, None)?)))
        }
        Some(Gpu::Vulkan(gpu)) => {
            checks(&|file, options| Ok(Box::new(load(file, options, client::<WgpuRuntime>(&gpu)?, 0, None)?)))
        }
    })
}

/// What a GPU showed when it was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuSpeed {
    /// How fast the products of stages are, or why that could not be measured.
    pub products: Result<Speed, String>,
    /// Bytes a second that a copy in its memory reads and writes, which tiles of grids come close to; or why not.
    pub copy_bytes_s: Result<u64, String>,
}

/// Measures a GPU with the kernels that it will run: under half a second beside their compilation, with 256 MiB of its memory.
///
/// # Errors
/// The device is not here.
pub fn gpu_speed(device: DeviceId) -> Result<GpuSpeed, String> {
    fn measured<R: Platform>(device: &R::Device) -> GpuSpeed {
        let client = match client::<R>(device) {
            Ok(client) => client,
            Err(why) => {
                return GpuSpeed { products: Err(why.to_string()), copy_bytes_s: Err(why.to_string()) };
            }
        };
        // Software drivers share the host's memory and cores: a part of what is usual shows as much.
        let slow = client.properties().hardware.plane_size_max < 32;
        let products = caught(|| speed(&client, slow));
        client.memory_cleanup(); // before the copy takes as much
        let copy_bytes_s = caught(|| copy_speed(&client, slow));
        client.memory_cleanup();
        GpuSpeed { products, copy_bytes_s }
    }
    match gpu(device)? {
        None => Err("the processor is no GPU".into()),
        Some(Gpu::Cuda(gpu)) => Ok(measured::<CudaRuntime>(&gpu)),
        Some(Gpu::Vulkan(gpu)) => Ok(measured::<WgpuRuntime>(&gpu)),
    }
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
        DeviceId::Cuda(number) => cuda_tile(number as usize, (grid, rule), region, depth, free),
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
        DeviceId::Cuda(i) => Gpu::Cuda(CudaDevice::new(i as usize)),
        DeviceId::Vulkan(i) => Gpu::Vulkan(wgpu_device(i).ok_or_else(|| format!("there is no vulkan:{i} here"))?),
    }))
}

/// cubecl reports kernels that do not compile and devices that are lost by panicking.
fn caught<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_text(panic.as_ref())))
}

fn client<R: Platform>(device: &R::Device) -> Result<ComputeClient<R>, StageError> {
    caught(|| Ok(R::client(device))).map_err(StageError::Device)
}

fn find(device: DeviceId) -> Result<Device, String> {
    let probe = probe_report();
    let kind = device.to_string();
    let kind = kind.split(':').next().unwrap_or_default();
    let why = probe
        .notes
        .iter()
        .filter(|note| note.starts_with(kind))
        .fold(String::new(), |all, note| format!("{all}; {note}"));
    probe.devices.into_iter().find(|d| d.id == device).ok_or_else(|| format!("there is no {device} here{why}"))
}
