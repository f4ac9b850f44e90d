//! GPUs, and what their drivers lack.
use super::Finding;
use crate::config::Size;
use kernels::device::{DeviceChoice, DeviceId};
use std::path::Path;

pub(super) fn examine(wanted: &str) -> Vec<Finding> {
    let probe = kernels_gpu::probe_report();
    let gpus = probe.devices.iter().filter(|d| d.id != DeviceId::Cpu);
    let mut findings: Vec<Finding> =
        gpus.map(|d| Finding::ok(&d.id.to_string(), format!("{}, {}", d.name, Size(d.memory_total)))).collect();
    let nvidia = Path::new("/dev/nvidia0").exists() || Path::new("/proc/driver/nvidia/version").exists();
    for note in &probe.notes {
        let (subject, text) = note.split_once(": ").unwrap_or(("GPUs", note));
        // Without an NVIDIA card nobody misses CUDA, and a GPU that CUDA drives needs no Vulkan.
        let missed = match subject {
            "cuda" => nvidia,
            "vulkan" => false,
            _ => true,
        };
        findings.push(match (missed, text.split_once(": ")) {
            (true, Some((seen, advice))) => Finding::warn(subject, seen, advice),
            (true, None) => Finding::warn(subject, text, ""),
            (false, _) => Finding::ok(subject, text),
        });
    }
    findings.push(match wanted.parse::<DeviceChoice>().and_then(|choice| choice.pick(&probe.devices).cloned()) {
        Ok(device) => Finding::ok("device", format!("{wanted}: computes on {} ({})", device.id, device.name)),
        Err(error) => {
            Finding::fail("device", error.to_string(), "choose another with --device, or see the lines above")
        }
    });
    findings
}
