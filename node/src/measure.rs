//! Measurements and checks of `bench decode`, `bench device` and `selftest`, as JSON and as human-readable text.
use crate::config::{Size, UpOptions};
use crate::device::Devices;
use crate::views::count;
use kernels::device::{DeviceChoice, DeviceId};
use kernels_models::bench::{DecodeBench, DecodeFigures};
use kernels_models::weights::ModelFile;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

mod gpu;

pub(crate) use gpu::{GpuBench, Source, model as gpu_model, text as gpu_text};

/// Measures decode and prefill with `threads` threads (or with one, then with all cores), and the read bandwidth of the
/// memory for comparison.
///
/// # Errors
/// The model cannot be opened, or its context is too short for the measurement.
pub(crate) fn decode(path: &Path, threads: Option<usize>, bench: DecodeBench) -> Result<Value, String> {
    let file = ModelFile::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let counts = threads.map_or_else(|| if all > 1 { vec![1, all] } else { vec![1] }, |threads| vec![threads]);
    let figures = counts
        .into_iter()
        .map(|threads| {
            let bench = DecodeBench { threads, ..bench };
            kernels_models::bench::decode(&file, bench).map_err(|e| e.to_string())
        })
        .collect::<Result<Vec<DecodeFigures>, String>>()?;
    Ok(json!({"model": path.file_stem().map(|s| s.to_string_lossy()), "runs": figures}))
}

/// Human-readable results of [`decode`].
pub(crate) fn decode_text(figures: &Value) -> String {
    let mut text = format!("{}\n", figures["model"].as_str().unwrap_or("?"));
    for run in figures["runs"].as_array().into_iter().flatten() {
        let number = |name: &str| run[name].as_f64().unwrap_or(0.0);
        text.push_str(&format!(
            "{} ({}): decode {:.1} tok/s{}, prefill {:.0} tok/s; reads {:.2} GB/s, {:.0} % of the read bandwidth of one thread \
             ({:.2} GB/s), {:.0} % of that of all these threads ({:.2} GB/s)\n",
            count(run["threads"].as_u64().unwrap_or(0) as usize, "thread"),
            run["instruction_set"].as_str().unwrap_or("?"),
            number("decode_tok_s"),
            match run["requests"].as_u64().unwrap_or(1) {
                1 => String::new(),
                requests => format!(" of {requests} requests"),
            },
            number("prefill_tok_s"),
            number("share_of_1") * number("read_bandwidth_1") / 1e9,
            number("share_of_1") * 100.0,
            number("read_bandwidth_1") / 1e9,
            number("share_of_n") * 100.0,
            number("read_bandwidth_n") / 1e9,
        ));
    }
    text
}

/// Measures what a node would advertise for a device: its speed with the kernels of stages, and the memory it would
/// offer.
///
/// # Errors
/// This machine has no such device.
pub(crate) fn device(options: &UpOptions) -> Result<Value, String> {
    let start = Instant::now();
    let devices = Devices::open(options)?.capacity.devices;
    let capacity = devices.first().ok_or("no device was found")?;
    Ok(json!({
        "device": capacity.device,
        "decode_bytes_per_second": capacity.bytes_per_second,
        "prefill_flops_per_second": capacity.flops_per_second,
        "copy_bytes_per_second": capacity.copy_bytes_per_second,
        "step_ns": capacity.step_ns,
        "layer_ns": capacity.layer_ns,
        "cache_bytes_per_second": capacity.cache_bytes_per_second,
        "memory_offered": capacity.memory_total,
        "seconds": start.elapsed().as_secs_f64(),
    }))
}

/// Human-readable results of [`device`].
pub(crate) fn device_text(figures: &Value) -> String {
    format!(
        "{}\n  decode     {} of weights\n  attention  {} of keys and values\n  prefill    {}\n  copy       {} read and written\n  \
         step       {:.0} µs of overhead per step\n  layer      {:.1} µs of overhead per layer\n  \
         offers     {}\n(probed and measured in {:.1} s)\n",
        figures["device"].as_str().unwrap_or("?"),
        per_second(figures["decode_bytes_per_second"].as_u64(), "B"),
        per_second(figures["cache_bytes_per_second"].as_u64(), "B"),
        per_second(figures["prefill_flops_per_second"].as_u64(), "FLOP"),
        per_second(figures["copy_bytes_per_second"].as_u64(), "B"),
        figures["step_ns"].as_f64().unwrap_or(0.0) / 1e3,
        figures["layer_ns"].as_f64().unwrap_or(0.0) / 1e3,
        Size(figures["memory_offered"].as_u64().unwrap_or(0)),
        figures["seconds"].as_f64().unwrap_or(0.0),
    )
}

/// Formats a measured speed, as in "712 GB/s" or "80 MB/s"; a dash if there is none.
pub(crate) fn per_second(speed: Option<u64>, unit: &str) -> String {
    match speed {
        None | Some(0) => "–".into(),
        Some(speed) if speed < 1_000_000_000 => format!("{:.0} M{unit}/s", speed as f64 / 1e6),
        Some(speed) if speed < 10_000_000_000 => format!("{:.1} G{unit}/s", speed as f64 / 1e9),
        Some(speed) => format!("{:.0} G{unit}/s", speed as f64 / 1e9),
    }
}

/// Checks every operation on the device against the reference. `progress` gets the number of checks done and the last one's name.
///
/// # Errors
/// This machine has no such device.
pub(crate) fn selftest(device: &str, progress: impl Fn(usize, &str)) -> Result<(DeviceId, Vec<Value>), String> {
    let choice: DeviceChoice = device.parse().map_err(|e: kernels::device::DeviceError| e.to_string())?;
    let devices = kernels_gpu::probe();
    let device = choice.pick(&devices).map_err(|e| e.to_string())?.id;
    let mut count = 0;
    let checks = kernels_gpu::selftest(device, &mut |check| {
        count += 1;
        progress(count, &check.name);
    })?;
    let value = |check: kernels_gpu::Check| {
        let (ok, seen) = match check.outcome {
            Ok(seen) => (true, seen),
            Err(wrong) => (false, wrong),
        };
        json!({"name": check.name, "ok": ok, "seen": seen})
    };
    Ok((device, checks.into_iter().map(value).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_have_suitable_units_and_missing_ones_a_dash() {
        assert_eq!(per_second(Some(712_400_000_000), "B"), "712 GB/s");
        assert_eq!(per_second(Some(600_000), "B"), "1 MB/s");
        assert_eq!(per_second(Some(1_260_000_000), "FLOP"), "1.3 GFLOP/s");
        assert_eq!((per_second(Some(0), "B"), per_second(None, "B")), ("–".into(), "–".into()));
    }
}
