//! Everything worth knowing of a GPU in one run: self-test, decode speed of a real model, bandwidth of the kernels.
//!
//! `gpu_check [cuda:0] [MODEL.gguf]`
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

use kernels::device::{DeviceChoice, DeviceId};
use kernels::stage::{Activations, Rows, RowsIn, RowsOut, Stage, StageOptions};
use kernels::weights::ModelFile;
use kernels_burn::{answer_probe, bench_gpu, load_gpu_stage, probe_report, selftest};

#[expect(clippy::print_stdout, reason = "a report for people")]
fn main() {
    answer_probe();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let report = probe_report();
    for device in &report.devices {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        println!(
            "{}: {} ({:.1} of {:.1} GiB free)",
            device.id,
            device.name,
            gib(device.memory_free),
            gib(device.memory_total)
        );
    }
    report.notes.iter().for_each(|note| println!("{note}"));
    let choice = arguments.first().map_or("cuda", String::as_str);
    let device = match choice.parse() {
        Ok(DeviceChoice::This(device)) => device,
        Ok(DeviceChoice::Auto) => DeviceId::Cuda(0),
        Err(error) => return println!("{error}"),
    };
    println!("\n== self-test of {device}");
    section(|| {
        let start = Instant::now();
        let checks = selftest(device)?;
        for check in &checks {
            match &check.outcome {
                Ok(found) => println!("ok      {}: {found}", check.name),
                Err(wrong) => println!("FAILED  {}: {wrong}", check.name),
            }
        }
        let failed = checks.iter().filter(|check| check.outcome.is_err()).count();
        println!("{} checks, {failed} failed, {:.1} s", checks.len(), start.elapsed().as_secs_f64());
        Ok(())
    });
    if let Some(model) = arguments.get(1) {
        println!("\n== decode of {model} on {device}");
        section(|| decode(Path::new(model), device));
    }
    println!("\n== weight bytes a second of the matrix-vector kernel, {device}");
    section(|| {
        let figures = bench_gpu(device)?;
        let copy = figures.iter().find(|f| f.quant.is_none()).map_or(f64::NAN, |f| f.bytes_per_second);
        for f in &figures {
            let (name, share) = (f.quant.map_or("copy", |q| q.name()), f.bytes_per_second / copy * 100.0);
            let (rows, cols) = (f.rows, f.cols);
            println!(
                "{name:5} {rows:>7} x {cols:<9} {:9.1} us {:8.1} GB/s {share:5.1} % of the copy",
                f.seconds * 1e6,
                f.bytes_per_second / 1e9
            );
        }
        Ok(())
    });
}

/// A failure ends its section, not the report.
#[expect(clippy::print_stdout, reason = "a report for people")]
fn section(run: impl FnOnce() -> Result<(), String>) {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => println!("FAILED  {error}"),
        Err(_) => println!("FAILED  it panicked"),
    }
}

/// Prefill and greedy decode, in tokens a second; the text shows that it computes sense.
#[expect(clippy::print_stdout, reason = "a report for people")]
fn decode(path: &Path, device: DeviceId) -> Result<(), String> {
    const STEPS: usize = 64;
    let file = ModelFile::open(path).map_err(|error| error.to_string())?;
    let tokenizer = file.tokenizer().map_err(|error| error.to_string())?;
    let layers = 0..file.config().layers;
    let options = StageOptions { layers, sequences: 1, context: 512, activations: Activations::F32, threads: 1 };
    let start = Instant::now();
    let mut stage = load_gpu_stage(file, options, device).map_err(|error| error.to_string())?;
    println!(
        "loaded and proven in {:.2} s: {:?}, {}",
        start.elapsed().as_secs_f64(),
        stage.resident_bytes(),
        stage.numerics()
    );
    let mut tokens = tokenizer.encode("The capital of France is", true).map_err(|error| error.to_string())?;
    let (mut position, mut text, mut times) = (0, Vec::new(), Vec::new());
    for _ in 0..STEPS {
        let start = Instant::now();
        let logits = last_logits(stage.as_mut(), position, &tokens)?;
        times.push(start.elapsed().as_secs_f64());
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).ok_or("no logits")?;
        position += tokens.len();
        tokens = vec![u32::try_from(best).map_err(|error| error.to_string())?];
        text.extend(&tokens);
    }
    println!("text: {:?}", tokenizer.decode(&text));
    let first = times.remove(0);
    times.sort_by(f64::total_cmp);
    let (median, mean) = (times[times.len() / 2], times.iter().sum::<f64>() / times.len() as f64);
    println!(
        "first step {:.1} ms (compiles); decode {:.1} tok/s by the median of {} steps, {:.1} by the mean",
        first * 1e3,
        1.0 / median,
        times.len(),
        1.0 / mean
    );
    let prompt: Vec<u32> = text.iter().copied().cycle().take(256).collect();
    for _ in 0..2 {
        let start = Instant::now();
        last_logits(stage.as_mut(), 0, &prompt)?;
        println!(
            "prefill of {} tokens: {:.1} tok/s",
            prompt.len(),
            prompt.len() as f64 / start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn last_logits(stage: &mut dyn Stage, position: usize, tokens: &[u32]) -> Result<Vec<f32>, String> {
    let rows = Rows { sequence: 1, position, input: RowsIn::Tokens(tokens), logits: true };
    match stage.forward(&[rows]).map_err(|error| error.to_string())?.pop() {
        Some(RowsOut::Logits(logits)) => Ok(logits),
        Some(RowsOut::Hidden(_) | RowsOut::Nothing) | None => Err("no logits".into()),
    }
}
