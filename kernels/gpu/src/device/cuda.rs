//! CUDA device discovery: the usable devices, or why one cannot be used and how to fix it.
use std::path::Path;

use cudarc::driver::{result, sys};
use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys as nvrtc;
use kernels::device::{Device, DeviceId};

use super::report::{Fault, Kind, Probe};
use super::toolkit::{DRIVER, Toolkit, driver_version, ready};

/// Asks the driver. A broken driver may crash or never return: see [`super::ask`].
pub(super) fn probe() -> Probe {
    let mut probe = Probe::default();
    if let Err(why) = driver_version() {
        // A loaded kernel module means that the machine has a card: then a missing driver library is a fault.
        if KERNEL_MODULE.iter().any(|path| Path::new(path).exists()) {
            let advice = "install the driver library of the kernel module's version (on Debian and Ubuntu libcuda1 or \
                          libnvidia-compute); start containers with `--gpus all`";
            let seen = format!("NVIDIA's kernel module is loaded, but the driver library was not found: {why}");
            probe.faults.push(Kind::Cuda.fault(seen, advice));
        } else {
            probe.notes.push(format!("cuda: no NVIDIA driver ({DRIVER}) on this machine"));
        }
        return probe;
    }
    let toolkit = match result::init().and_then(|()| result::device::get_count()) {
        Ok(count) => ready().map(|toolkit| (count, toolkit)),
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            probe.notes.push("cuda: the driver finds no device".into());
            return probe;
        }
        Err(error) => Err(driver_fault(error)),
    };
    match toolkit {
        Ok((count, toolkit)) => {
            for number in 0..count {
                match describe(number, &toolkit) {
                    Ok(device) => probe.devices.push(device),
                    Err(fault) => probe.faults.push(fault),
                }
            }
        }
        Err(fault) => probe.faults.push(fault),
    }
    probe
}

/// Files that exist if NVIDIA's kernel module drives a card: its device files, and WSL's.
const KERNEL_MODULE: [&str; 3] = ["/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"];

fn describe(number: i32, toolkit: &Toolkit) -> Result<Device, Fault> {
    let device = result::device::get(number).map_err(driver_fault)?;
    let name = result::device::get_name(device).map_err(driver_fault)?;
    let integrated =
        attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED).map_err(driver_fault)?;
    let capability = capability(device).map_err(driver_fault)?;
    let known = architectures()?;
    if !known.contains(&capability) {
        let (oldest, newest) = (known.iter().min().unwrap_or(&0), known.iter().max().unwrap_or(&0));
        let library = toolkit.library.display();
        let other = if capability < *oldest { "an older" } else { "a newer" };
        return Err(Kind::Cuda.fault(
            format!(
                "NVRTC ({library}) supports sm_{oldest} to sm_{newest}, but cuda:{number} ({name}) is sm_{capability}"
            ),
            format!("install {other} CUDA version and set CUDA_PATH to its folder; until then use vulkan"),
        ));
    }
    // SAFETY: the device was just found; its context is current on this thread until it is released below.
    let (free, total) = unsafe {
        let context = result::primary_ctx::retain(device).map_err(driver_fault)?;
        let memory = result::ctx::set_current(context).and_then(|()| result::mem_get_info());
        result::primary_ctx::release(device).map_err(driver_fault)?;
        memory.map_err(driver_fault)?
    };
    let id = DeviceId::Cuda(u32::try_from(number).unwrap_or_default());
    Ok(Device { id, name, memory_total: total as u64, memory_free: free as u64, own_memory: integrated == 0 })
}

/// Compute capability as in `sm_90`: 10 · major + minor.
pub(crate) fn capability(device: sys::CUdevice) -> Result<u32, result::DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let number = 10 * attribute(device, MAJOR)? + attribute(device, MINOR)?;
    Ok(u32::try_from(number).unwrap_or_default())
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32, result::DriverError> {
    // SAFETY: the device was found by its number.
    unsafe { result::device::get_attribute(device, which) }
}

/// Compute capabilities that the loaded NVRTC supports.
fn architectures() -> Result<Vec<u32>, Fault> {
    let failed = |error: NvrtcError| Kind::Cuda.fault(format!("NVRTC reports {error:?}"), "reinstall CUDA");
    let mut count = 0;
    // SAFETY: NVRTC is loaded; the first call writes one number, the second writes `count` numbers.
    let numbers = unsafe {
        nvrtc::nvrtcGetNumSupportedArchs(&mut count).result().map_err(failed)?;
        let mut numbers = vec![0; usize::try_from(count).unwrap_or_default()];
        nvrtc::nvrtcGetSupportedArchs(numbers.as_mut_ptr()).result().map_err(failed)?;
        numbers
    };
    Ok(numbers.into_iter().filter_map(|number| u32::try_from(number).ok()).collect())
}

/// A driver error with advice.
fn driver_fault(error: result::DriverError) -> Fault {
    const STUB: u32 = sys::CUresult::CUDA_ERROR_STUB_LIBRARY as u32;
    const MISMATCH: u32 = sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as u32;
    let advice = match error.0 as u32 {
        STUB => "libcuda is a link-time stub: remove CUDA's `stubs` folder from LD_LIBRARY_PATH",
        MISMATCH => "the versions of driver library and kernel module differ, as after an update: restart the machine",
        _ => "run `nvidia-smi` for details; restart the machine if the driver was just installed or updated",
    };
    Kind::Cuda.fault(format!("the driver reports {error:?}"), advice)
}
