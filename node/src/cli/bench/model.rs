//! `bench decode` and `bench prefill`: a model file, or random weights in the shape of a model, on the CPU or a GPU.
use crate::cli::compute::{one_device, threads};
use crate::cli::failure::Failure;
use crate::cli::global::{Global, answer};
use crate::cli::model::fetch;
use crate::cli::print::remark;
use crate::cli::progress::Spinner;
use crate::config::Size;
use crate::measure::{self, GpuBench, Source};
use kernels::device::{DeviceChoice, DeviceId};
use kernels::quant::QuantType;
use kernels_gpu::{SHAPES, Shape};
use kernels_models::bench::DecodeBench;
use std::path::{Path, PathBuf};

/// A model and a device.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct ModelArgs {
    /// The model, as in `run`
    #[arg(default_value = "smollm2-135m")]
    model: String,
    /// Random weights in the shape of a known model instead of a file
    #[arg(long, value_name = "SHAPE", value_parser = shape, conflicts_with = "model")]
    shape: Option<&'static Shape>,
    /// Format of the random weights
    #[arg(long, value_name = "FORMAT", default_value = "q4_0", requires = "shape", value_parser = quant)]
    quant: QuantType,
    /// Save the random weights as a GGUF file, as for load tests of a server
    #[arg(long, value_name = "FILE", requires = "shape")]
    write: Option<PathBuf>,
    /// Compute device: cpu, cuda[:i], vulkan[:i] or auto, where i is the number of the GPU
    #[arg(long, value_name = "DEVICE", default_value = "cpu", env = "MESHNODE_DEVICE", value_parser = one_device)]
    device: String,
    /// Compute threads [default: on the CPU one measurement with one thread and one with one per core]
    #[arg(long, value_name = "N", env = "MESHNODE_THREADS", value_parser = threads)]
    threads: Option<usize>,
    /// Device memory for the model, on a GPU: experts that do not fit lie in RAM, and the processor computes them
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
}

#[derive(Debug, clap::Args)]
pub(in crate::cli) struct DecodeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prompt [default: 512 on a GPU, 128 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=131_072))]
    prompt: Option<u32>,
    /// Tokens to decode per measurement [default: 128 on a GPU, 64 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(8..=4096))]
    tokens: Option<u32>,
    /// Batch size: requests that decode concurrently
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    requests: u32,
    /// Sampling temperature, on a GPU; 0 chooses the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
}

#[derive(Debug, clap::Args)]
pub(in crate::cli) struct PrefillArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prompt [default: 512 on a GPU, 128 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=131_072))]
    prompt: Option<u32>,
}

fn shape(text: &str) -> Result<&'static Shape, String> {
    let names = || SHAPES.iter().map(|shape| shape.name).collect::<Vec<_>>().join(", ");
    SHAPES.iter().find(|shape| shape.name == text).ok_or_else(|| format!("expected one of {}", names()))
}

fn quant(text: &str) -> Result<QuantType, String> {
    let all = kernels::quant::QUANT_TYPES;
    let names = || all.iter().map(|kind| kind.name().to_lowercase()).collect::<Vec<_>>().join(", ");
    // "q4" means Q4_0, the most common 4-bit format.
    let name = if text.eq_ignore_ascii_case("q4") { "Q4_0" } else { text };
    all.into_iter()
        .find(|kind| kind.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| format!("expected one of {}", names()))
}

pub(in crate::cli) fn decode(global: &Global, args: &DecodeArgs) -> Result<(), Failure> {
    let numbers = Numbers {
        prompt: args.prompt,
        tokens: args.tokens,
        decodes: true,
        requests: args.requests,
        temperature: args.temperature,
    };
    run(global, &args.model, &numbers)
}

pub(in crate::cli) fn prefill(global: &Global, args: &PrefillArgs) -> Result<(), Failure> {
    let numbers = Numbers { prompt: args.prompt, tokens: None, decodes: false, requests: 1, temperature: 0.0 };
    run(global, &args.model, &numbers)
}

struct Numbers {
    prompt: Option<u32>,
    tokens: Option<u32>,
    decodes: bool,
    requests: u32,
    temperature: f32,
}

fn run(global: &Global, args: &ModelArgs, numbers: &Numbers) -> Result<(), Failure> {
    let choice: DeviceChoice =
        args.device.parse().map_err(|error: kernels::device::DeviceError| Failure::failed(error.to_string()))?;
    let chosen = match choice {
        DeviceChoice::This(DeviceId::Cpu) => DeviceId::Cpu, // without looking for GPUs
        DeviceChoice::This(_) | DeviceChoice::Auto => {
            choice.pick(&kernels_gpu::probe()).map_err(|error| Failure::failed(error.to_string()))?.id
        }
    };
    if !(0.0..=100.0).contains(&numbers.temperature) {
        return Err(Failure::failed(format!("--temperature: expected 0 to 100, found {}", numbers.temperature)));
    }
    let threads = args.threads.or(global.file.threads);
    if let (Some(shape), Some(path)) = (args.shape, &args.write) {
        write(shape, args.quant, path)?;
        remark(format!("wrote random weights in the shape of {} to {}", shape.name, path.display()));
    }
    if chosen == DeviceId::Cpu {
        let (path, _kept) = file(global, args)?;
        let bench = DecodeBench {
            prompt: numbers.prompt.unwrap_or(128) as usize,
            tokens: if numbers.decodes { numbers.tokens.unwrap_or(64) as usize } else { 1 },
            requests: numbers.requests as usize,
            ..DecodeBench::default()
        };
        let spinner = Spinner::new("measuring");
        let figures = measure::decode(&path, threads, bench).map_err(Failure::failed)?;
        drop(spinner);
        answer(global, &figures, measure::decode_text);
        return Ok(());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let bench = GpuBench {
        threads: threads.unwrap_or(cores).clamp(1, cores),
        prompt: numbers.prompt.unwrap_or(512) as usize,
        tokens: if numbers.decodes { numbers.tokens.unwrap_or(128) as usize } else { 0 },
        requests: numbers.requests as usize,
        temperature: numbers.temperature,
        memory: args.memory.map(|size| size.0),
    };
    let path;
    let source = match args.shape {
        Some(shape) => Source::Random(shape, args.quant),
        None => {
            path = fetch(global, &args.model)?;
            Source::File(&path)
        }
    };
    let spinner = Spinner::new(format!("loading and measuring on {chosen}"));
    let figures = measure::gpu_model(source, chosen, bench).map_err(Failure::failed)?;
    drop(spinner);
    answer(global, &figures, measure::gpu_text);
    Ok(())
}

/// The file to measure on the CPU. Random weights that are not saved are in a temporary folder, removed when the second
/// value is dropped.
fn file(global: &Global, args: &ModelArgs) -> Result<(PathBuf, Option<tempfile::TempDir>), Failure> {
    match (args.shape, &args.write) {
        (None, _) => Ok((fetch(global, &args.model)?, None)),
        (Some(_), Some(path)) => Ok((path.clone(), None)),
        (Some(shape), None) => {
            let folder = tempfile::tempdir().map_err(|error| {
                Failure::failed(format!("cannot create a folder for random weights: {error}; set TMPDIR to another"))
            })?;
            let path = folder.path().join(format!("{}.gguf", shape.name));
            write(shape, args.quant, &path)?;
            Ok((path, Some(folder)))
        }
    }
}

fn write(shape: &Shape, quant: QuantType, path: &Path) -> Result<(), Failure> {
    let spinner = Spinner::new(format!("writing {}", path.display()));
    let written = shape.write(path, quant);
    drop(spinner);
    written.map_err(|error| Failure::failed(format!("cannot write {}: {error}", path.display())))
}
