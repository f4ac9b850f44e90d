//! Where a device's name meets a backend's type: loading a stage, and the self-test of a device.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::backend::cuda::CudaDevice;
use burn::backend::wgpu::WgpuDevice;
use burn::backend::{Cuda, Flex, Vulkan};
use kernels::bench::Speed;
use kernels::device::{Device, DeviceId};
use kernels::gpu::bench::{Figure, copy_figure, product_figure, speed};
use kernels::quant::QuantType;
use kernels::stage::{Stage, StageError, StageOptions};
use kernels::weights::ModelFile;

use crate::device::{probe_report, wgpu_device};
use crate::stage::{BurnStage, panic_text};
use crate::suite::{self, Check, Own, Plain};

/// Loads layers of a model onto a GPU.
///
/// # Errors
/// A device that is not here (with what it lacks), a model that does not fit it, or a failure of the device.
pub fn load_gpu_stage(
    file: Arc<ModelFile>,
    options: StageOptions,
    device: DeviceId,
) -> Result<Box<dyn Stage>, StageError> {
    let Device { name, memory_free, .. } = find(device).map_err(StageError::Input)?;
    let numerics = numerics(device, &name);
    Ok(match device {
        DeviceId::Cuda(_) | DeviceId::Vulkan(_) => match backend(device).map_err(StageError::Input)? {
            Gpu::Cuda(gpu) => Box::new(BurnStage::<Cuda>::load(file, options, gpu, numerics, Some(memory_free))?),
            Gpu::Vulkan(gpu) => Box::new(BurnStage::<Vulkan>::load(file, options, gpu, numerics, Some(memory_free))?),
        },
        DeviceId::Cpu => {
            Box::new(BurnStage::<Flex>::load(file, options, Default::default(), numerics, Some(memory_free))?)
        }
    })
}

/// Checks every operation on a device against float64, then small models end to end.
///
/// # Errors
/// The device is not here.
pub fn selftest(device: DeviceId) -> Result<Vec<Check>, String> {
    find(device)?;
    Ok(match device {
        DeviceId::Cpu => {
            let device = Default::default();
            let plain = suite::operations::<Flex, Plain>(&device);
            plain.into_iter().chain(checks::<Flex>(&device)).collect()
        }
        DeviceId::Cuda(_) | DeviceId::Vulkan(_) => match backend(device)? {
            Gpu::Cuda(gpu) => checks::<Cuda>(&gpu),
            Gpu::Vulkan(gpu) => checks::<Vulkan>(&gpu),
        },
    })
}

fn checks<B: crate::MeshBackend>(device: &B::Device) -> Vec<Check>
where
    B::Device: Send,
{
    suite::operations::<B, Own>(device).into_iter().chain(suite::models::<B>(device)).collect()
}

/// What the device's memory does at best (a copy), and what the matrix-vector kernel makes of it, by format and shape.
///
/// # Errors
/// The device is not here or fails.
pub fn bench_gpu(device: DeviceId) -> Result<Vec<Figure>, String> {
    find(device)?;
    match backend(device)? {
        Gpu::Cuda(gpu) => figures::<cubecl::cuda::CudaRuntime>(&gpu),
        Gpu::Vulkan(gpu) => figures::<cubecl::wgpu::WgpuRuntime>(&gpu),
    }
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
    fn measured<R: cubecl::Runtime>(device: &R::Device) -> GpuSpeed {
        let client = match caught(|| Ok(R::client(device))) {
            Ok(client) => client,
            Err(why) => return GpuSpeed { products: Err(why.clone()), copy_bytes_s: Err(why) },
        };
        let slow = is_slow(&client);
        let products = caught(|| speed(&client, slow));
        client.memory_cleanup(); // before the copy takes as much
        let bytes = if slow { COPY_BYTES / 64 } else { COPY_BYTES / 10 };
        let copy = caught(|| copy_figure(&client, bytes));
        client.memory_cleanup();
        GpuSpeed { products, copy_bytes_s: copy.map(|figure| figure.bytes_per_second as u64) }
    }
    Ok(match backend(device)? {
        Gpu::Cuda(gpu) => measured::<cubecl::cuda::CudaRuntime>(&gpu),
        Gpu::Vulkan(gpu) => measured::<cubecl::wgpu::WgpuRuntime>(&gpu),
    })
}

/// cubecl reports kernels that do not compile and devices that are lost by panicking.
fn caught<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_text(panic.as_ref())))
}

/// Software drivers share the host's memory and cores: a part of what is usual shows as much.
fn is_slow<R: cubecl::Runtime>(client: &cubecl::client::ComputeClient<R>) -> bool {
    client.properties().hardware.plane_size_max < 32
}

/// Formats measured.
const QUANTS: [QuantType; 5] = [QuantType::Q4_0, QuantType::Q4_1, QuantType::Q8_0, QuantType::Q4K, QuantType::Q6K];
/// Rows and columns: an attention matrix of a 7B model, its feed-forward matrices, its head.
const SHAPES: [(usize, usize); 4] = [(3584, 3584), (18944, 3584), (3584, 18944), (152_064, 3584)];
/// Bytes copied: far beyond any cache.
const COPY_BYTES: usize = 1 << 30;

fn figures<R: cubecl::Runtime>(device: &R::Device) -> Result<Vec<Figure>, String> {
    let client = R::client(device);
    let slow = is_slow(&client);
    let mut figures = vec![copy_figure(&client, if slow { COPY_BYTES / 16 } else { COPY_BYTES })?];
    for (rows, cols) in SHAPES.into_iter().filter(|(rows, _)| !slow || *rows <= 3584) {
        for quant in QUANTS {
            if cols.is_multiple_of(quant.block_len()) {
                figures.push(product_figure(&client, quant, rows, cols)?);
            }
        }
    }
    Ok(figures)
}

enum Gpu {
    Cuda(CudaDevice),
    Vulkan(WgpuDevice),
}

fn backend(device: DeviceId) -> Result<Gpu, String> {
    match device {
        DeviceId::Cpu => Err("the processor is no GPU".into()),
        DeviceId::Cuda(i) => Ok(Gpu::Cuda(CudaDevice::new(i as usize))),
        DeviceId::Vulkan(i) => wgpu_device(i).map(Gpu::Vulkan).ok_or_else(|| format!("there is no vulkan:{i} here")),
    }
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

/// Kernel set and device model: another model's exponential may round differently.
fn numerics(device: DeviceId, name: &str) -> String {
    match device {
        DeviceId::Cpu => "flex-f32-1".into(),
        DeviceId::Cuda(_) => format!("cuda-f32-1 {name}"),
        DeviceId::Vulkan(_) => format!("vulkan-f32-1 {name}"),
    }
}
