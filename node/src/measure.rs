//! What `bench decode` and `selftest` measure and check, as JSON, and how people read it.
use kernels::bench::{DecodeBench, DecodeFigures};
use kernels::device::{DeviceChoice, DeviceId};
use kernels::stage::Activations;
use kernels::weights::ModelFile;
use serde_json::{Value, json};
use std::path::Path;

/// Decodes with `threads` threads, or with one and with all cores, and reads memory beside it.
///
/// # Errors
/// The model cannot be opened or does not fit the measurement.
pub fn decode(path: &Path, threads: Option<usize>, tokens: usize) -> Result<Value, String> {
    let file = ModelFile::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let counts = threads.map_or_else(|| if all > 1 { vec![1, all] } else { vec![1] }, |threads| vec![threads]);
    let figures = counts
        .into_iter()
        .map(|threads| {
            let bench = DecodeBench { threads, activations: Activations::Int8, tokens, ..DecodeBench::default() };
            kernels::bench::decode(&file, bench).map_err(|e| e.to_string())
        })
        .collect::<Result<Vec<DecodeFigures>, String>>()?;
    Ok(json!({"model": path.file_stem().map(|s| s.to_string_lossy()), "runs": figures}))
}

/// `decode`'s figures for people.
pub fn decode_text(figures: &Value) -> String {
    let mut text = format!("{}\n", figures["model"].as_str().unwrap_or("?"));
    for run in figures["runs"].as_array().into_iter().flatten() {
        let number = |name: &str| run[name].as_f64().unwrap_or(0.0);
        text.push_str(&format!(
            "{} threads ({}): decode {:.1} tok/s, prefill {:.0} tok/s; reads {:.2} GB/s, {:.0} % of the {:.2} GB/s that one thread can, \
             {:.0} % of the {:.2} GB/s that these threads can\n",
            run["threads"],
            run["instruction_set"].as_str().unwrap_or("?"),
            number("decode_tok_s"),
            number("prefill_tok_s"),
            number("decode_tok_s") * number("bytes_per_token") / 1e9,
            number("share_of_1") * 100.0,
            number("read_bandwidth_1") / 1e9,
            number("share_of_n") * 100.0,
            number("read_bandwidth_n") / 1e9,
        ));
    }
    text
}

/// Every operation on the device against float64.
///
/// # Errors
/// There is no such device here.
pub fn selftest(device: &str) -> Result<(DeviceId, Vec<Value>), String> {
    let choice: DeviceChoice = device.parse().map_err(|e: kernels::device::DeviceError| e.to_string())?;
    let devices = kernels_burn::probe();
    let device = choice.pick(&devices).map_err(|e| e.to_string())?.id;
    let checks = kernels_burn::selftest(device)?;
    let value = |check: kernels_burn::suite::Check| {
        let (ok, seen) = match check.outcome {
            Ok(seen) => (true, seen),
            Err(wrong) => (false, wrong),
        };
        json!({"name": check.name, "ok": ok, "seen": seen})
    };
    Ok((device, checks.into_iter().map(value).collect()))
}
