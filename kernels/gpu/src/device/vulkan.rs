//! Vulkan device discovery, in wgpu's order.
use std::ffi::CStr;

use ash::vk;
use cubecl::wgpu::WgpuDevice;
use kernels::device::{Device, DeviceId, cpu};

use super::report::Probe;

/// Lists the devices. A missing driver is a note, not a fault: not every machine has a GPU.
pub(super) fn probe() -> Probe {
    match devices() {
        Ok(devices) => Probe { devices: devices.into_iter().map(|(device, _)| device).collect(), ..Probe::default() },
        Err(note) => Probe { notes: vec![note], ..Probe::default() },
    }
}

/// The wgpu device of `vulkan:number`.
pub(crate) fn wgpu_device(number: u32) -> Option<WgpuDevice> {
    devices().ok()?.into_iter().find(|(device, _)| device.id == DeviceId::Vulkan(number)).map(|(_, wgpu)| wgpu)
}

/// Discrete GPUs first, then integrated, virtual, and software drivers.
fn devices() -> Result<Vec<(Device, WgpuDevice)>, String> {
    let none = |error: &dyn std::fmt::Display| {
        format!("vulkan: no driver ({error}); install the GPU's driver, or mesa-vulkan-drivers for a software one")
    };
    // SAFETY: the loader is the system's own; the instance is destroyed below, before the entry is dropped.
    let entry = unsafe { ash::Entry::load() }.map_err(|error| none(&error))?;
    let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_1);
    // SAFETY: no layers, no extensions, and nothing is borrowed after the call.
    let instance =
        unsafe { entry.create_instance(&vk::InstanceCreateInfo::default().application_info(&application), None) };
    let instance = instance.map_err(|error| none(&error))?;
    // SAFETY: the instance is alive.
    let found = unsafe { instance.enumerate_physical_devices() };
    let mut devices = Vec::new();
    for device in found.as_deref().unwrap_or_default() {
        devices.push(describe(&instance, *device));
    }
    // SAFETY: nothing created from the instance is used after this.
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
                // wgpu supports only the first software device.
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

/// Rank of the device type, name, total and free bytes of memory.
fn describe(instance: &ash::Instance, device: vk::PhysicalDevice) -> (u8, String, u64, u64) {
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    // SAFETY: the device belongs to a live instance; the budget outlives the call that fills it.
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
