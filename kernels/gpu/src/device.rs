//! GPUs of this machine: found in a process of their own, named as people name them, and why one is not offered.
//!
//! A driver can hang, crash or panic when touched, and CUDA keeps a context for the life of a process; so a child looks
//! and answers in one line. A program takes part by calling [`answer_probe`] before anything else.
use std::ffi::CStr;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ash::vk;
use cubecl::wgpu::WgpuDevice;
use kernels::device::{Device, DeviceId, cpu};
use serde::{Deserialize, Serialize};

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The processor first, then CUDA devices, then Vulkan devices with the likeliest fast one first.
    pub devices: Vec<Device>,
    /// What is missing and how to get it, one line each.
    pub notes: Vec<String>,
}

/// Set in the environment of the process that looks.
const PROBE_KEY: &str = "MESHNODE_PROBE_DEVICES";
/// Begins the line of the answer: drivers print to stdout too.
const ANSWER: &str = "meshnode-devices:";
/// Longer than any driver takes to start; a hung one is given up.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of an answer at most: some dozens of devices.
const ANSWER_BYTES_MAX: u64 = 1 << 16;

static ANSWERS: AtomicBool = AtomicBool::new(false);

/// If this process was started to look for devices: answers and exits. Call it first in `main`.
pub fn answer_probe() {
    ANSWERS.store(true, Ordering::Relaxed);
    if std::env::var_os(PROBE_KEY).is_none() {
        return;
    }
    let answer = serde_json::to_string(&look()).unwrap_or_default();
    // Nobody reads it if this fails, and the parent sees no answer.
    let _ = writeln!(std::io::stdout(), "\n{ANSWER}{answer}");
    std::process::exit(0);
}

/// The devices of this machine, the processor first.
#[must_use]
pub fn probe() -> Vec<Device> {
    probe_report().devices
}

/// The devices of this machine and what is missing for others.
#[must_use]
pub fn probe_report() -> Probe {
    let mut found = if ANSWERS.load(Ordering::Relaxed) {
        ask_child().unwrap_or_else(|why| Probe {
            devices: Vec::new(),
            notes: vec![format!("looking for GPUs failed: {why}; only the processor is used")],
        })
    } else {
        // A test's binary, which would run its tests again.
        look()
    };
    found.devices.insert(0, cpu());
    found
}

fn ask_child() -> Result<Probe, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut child = Command::new(program)
        .env(PROBE_KEY, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let stdout = child.stdout.take().ok_or("no pipe")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.take(ANSWER_BYTES_MAX).read_to_string(&mut text).map(|_| text)
    });
    let start = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if start.elapsed() > PROBE_TIMEOUT => {
                // It may already be gone; the error is about the driver either way.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("a driver did not answer in {} s", PROBE_TIMEOUT.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = reader.join().map_err(|_| "the reader panicked")?.map_err(|error| error.to_string())?;
    let answer = text.lines().find_map(|line| line.strip_prefix(ANSWER));
    let answer = answer.ok_or_else(|| format!("a driver ended the process that looked ({status})"))?;
    serde_json::from_str(answer).map_err(|error| error.to_string())
}

fn look() -> Probe {
    let mut probe = Probe::default();
    match cuda_missing() {
        None => match cuda_devices() {
            Ok(devices) => probe.devices.extend(devices),
            Err(error) => probe.notes.push(format!("cuda: {error}")),
        },
        Some(note) => probe.notes.push(note),
    }
    match vulkan_devices() {
        Ok(devices) => probe.devices.extend(devices.into_iter().map(|(device, _)| device)),
        Err(note) => probe.notes.push(note),
    }
    probe
}

/// What keeps CUDA from being offered: the driver, the compiler of kernels, or the headers they include.
fn cuda_missing() -> Option<String> {
    // SAFETY: these only try to open the libraries.
    let (driver, compiler) =
        unsafe { (cudarc::driver::sys::is_culib_present(), cudarc::nvrtc::sys::is_culib_present()) };
    if !driver {
        return Some("cuda: no NVIDIA driver (libcuda.so.1) on this machine".into());
    }
    let get = "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl` and \
               point LD_LIBRARY_PATH at the library and CUDA_PATH at the headers; until then use vulkan";
    if !compiler {
        return Some(format!("cuda: the driver is there, NVRTC (libnvrtc.so) is not: {get}"));
    }
    let headers = cubecl::cuda::install::cuda_path().map(|path| path.join("include/cuda_runtime.h"));
    match headers {
        Some(path) if path.is_file() => None,
        Some(path) => Some(format!("cuda: the driver and NVRTC are there, {} is not: {get}", path.display())),
        None => Some(format!("cuda: the driver and NVRTC are there, the CUDA headers are not: {get}")),
    }
}

fn cuda_devices() -> Result<Vec<Device>, String> {
    use cudarc::driver::result;
    let error = |error: result::DriverError| format!("the driver says {error:?}; `nvidia-smi` tells more");
    result::init().map_err(error)?;
    let count = result::device::get_count().map_err(error)?;
    let mut devices = Vec::new();
    for i in 0..count {
        let device = result::device::get(i).map_err(error)?;
        let name = result::device::get_name(device).map_err(error)?;
        let integrated = cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
        // SAFETY: the device was just found.
        let own_memory = unsafe { result::device::get_attribute(device, integrated) }.map_err(error)? == 0;
        // SAFETY: the device was just found; its context is current on this thread until it is released below.
        let (free, total) = unsafe {
            let context = result::primary_ctx::retain(device).map_err(error)?;
            let memory = result::ctx::set_current(context).and_then(|()| result::mem_get_info());
            result::primary_ctx::release(device).map_err(error)?;
            memory.map_err(error)?
        };
        let id = DeviceId::Cuda(u32::try_from(i).unwrap_or_default());
        devices.push(Device { id, name, memory_total: total as u64, memory_free: free as u64, own_memory });
    }
    Ok(devices)
}

/// A Vulkan device by its number, as wgpu names it.
pub(crate) fn wgpu_device(number: u32) -> Option<WgpuDevice> {
    vulkan_devices().ok()?.into_iter().find(|(device, _)| device.id == DeviceId::Vulkan(number)).map(|(_, wgpu)| wgpu)
}

/// Discrete GPUs first, then integrated, virtual, and software drivers.
fn vulkan_devices() -> Result<Vec<(Device, WgpuDevice)>, String> {
    let none = |error: &dyn std::fmt::Display| {
        format!("vulkan: no driver ({error}); a GPU's driver brings one, mesa-vulkan-drivers a software one")
    };
    // SAFETY: the loader is the system's own; the instance is destroyed below, before the entry is dropped.
    let entry = unsafe { ash::Entry::load() }.map_err(|error| none(&error))?;
    let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_1);
    // SAFETY: no layers, no extensions, nothing borrowed beyond the call.
    let instance =
        unsafe { entry.create_instance(&vk::InstanceCreateInfo::default().application_info(&application), None) };
    let instance = instance.map_err(|error| none(&error))?;
    // SAFETY: the instance is alive.
    let found = unsafe { instance.enumerate_physical_devices() };
    let mut devices = Vec::new();
    for device in found.as_deref().unwrap_or_default() {
        devices.push(describe(&instance, *device));
    }
    // SAFETY: nothing of the instance is used after this.
    unsafe { instance.destroy_instance(None) };
    if let Err(error) = found {
        return Err(none(&error));
    }
    let mut numbered: Vec<(Device, WgpuDevice)> = Vec::new();
    for rank in 0..4 {
        let of_kind = devices.iter().filter(|(kind, ..)| *kind == rank).enumerate();
        for (i, (_, name, total, free)) in of_kind {
            let wgpu = match rank {
                0 => WgpuDevice::DiscreteGpu(i),
                1 => WgpuDevice::IntegratedGpu(i),
                2 => WgpuDevice::VirtualGpu(i),
                // wgpu takes the first software device only.
                _ if i > 0 => continue,
                _ => WgpuDevice::Cpu,
            };
            let id = DeviceId::Vulkan(u32::try_from(numbered.len()).unwrap_or(u32::MAX));
            let (memory_total, memory_free) = (*total, *free);
            numbered.push((Device { id, name: name.clone(), memory_total, memory_free, own_memory: rank == 0 }, wgpu));
        }
    }
    Ok(numbered)
}

/// Rank of its kind, name, and bytes of memory: total and free.
fn describe(instance: &ash::Instance, device: vk::PhysicalDevice) -> (u8, String, u64, u64) {
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    // SAFETY: the device belongs to the living instance; the budget outlives the call that fills it.
    let (properties, heaps, budgeted) = unsafe {
        let properties = instance.get_physical_device_properties(device);
        let extensions = instance.enumerate_device_extension_properties(device).unwrap_or_default();
        let budgeted = extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(vk::EXT_MEMORY_BUDGET_NAME));
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default();
        if budgeted {
            memory = memory.push_next(&mut budget);
        }
        instance.get_physical_device_memory_properties2(device, &mut memory);
        (properties, memory.memory_properties, budgeted)
    };
    let name = properties.device_name_as_c_str().map(CStr::to_string_lossy).unwrap_or_default().into_owned();
    let rank = match properties.device_type {
        vk::PhysicalDeviceType::DISCRETE_GPU => 0,
        vk::PhysicalDeviceType::INTEGRATED_GPU => 1,
        vk::PhysicalDeviceType::VIRTUAL_GPU => 2,
        vk::PhysicalDeviceType::CPU => 3,
        _ => 4,
    };
    if rank == 3 {
        let memory = cpu();
        return (rank, name, memory.memory_total, memory.memory_free);
    }
    let local = |i: &usize| heaps.memory_heaps[*i].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let largest = (0..heaps.memory_heap_count as usize).filter(local).max_by_key(|i| heaps.memory_heaps[*i].size);
    let Some(heap) = largest else { return (rank, name, 0, 0) };
    let total = heaps.memory_heaps[heap].size;
    let free =
        if budgeted { budget.heap_budget[heap].saturating_sub(budget.heap_usage[heap]).min(total) } else { total };
    (rank, name, total, free)
}
