//! Checks of GPUs, drivers and the chosen device.
use super::Finding;
use crate::config::Size;
use kernels::device::{DeviceId, DeviceList};

pub(super) fn examine(requested: &str) -> Vec<Finding> {
    let probe = kernels_gpu::probe_report();
    let gpus = probe.devices.iter().filter(|d| d.id != DeviceId::Cpu);
    let mut findings: Vec<Finding> =
        gpus.map(|d| Finding::ok(&d.id.to_string(), format!("{}, {}", d.name, Size(d.memory_total)))).collect();
    // Missing hardware is no problem; hardware that is present but unusable is.
    for note in &probe.notes {
        let (subject, text) = note.split_once(": ").unwrap_or(("GPUs", note));
        findings.push(Finding::ok(subject, text));
    }
    findings.extend(probe.faults.iter().map(|fault| Finding::warn(&fault.driver, &fault.seen, &fault.advice)));
    if let Some((dir, used, limit)) = kernels_gpu::kernel_cache_usage() {
        let seen = format!("{}: {} of {} used by compiled kernels", dir.display(), Size(used), Size(limit));
        findings.push(Finding::ok("kernel cache", seen));
    }
    findings.push(match requested.parse::<DeviceList>().and_then(|list| list.pick(&probe.devices)) {
        Ok(used) => {
            let used: Vec<String> = used.iter().map(|device| format!("{} ({})", device.id, device.name)).collect();
            Finding::ok("device", format!("{requested}: computes on {}", used.join(" and ")))
        }
        Err(error) => {
            Finding::fail("device", error.to_string(), "choose another with --device, or see the lines above")
        }
    });
    findings
}
