//! Benchmarks decode and prefill of a GGUF file on this machine: `decode FILE [THREADS [ROUNDS]] [--f32]`, JSON on
//! stdout.
use std::io::Write;

use kernels_models::bench::{DecodeBench, decode};
use kernels_models::stage::Activations;
use kernels_models::weights::ModelFile;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (flags, args): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let path = args.first().ok_or("expected: decode FILE [THREADS [ROUNDS]] [--f32]")?;
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |arg| arg.parse());
    let activations = if flags.iter().any(|f| f == "--f32") { Activations::F32 } else { Activations::Int8 };
    let bench = DecodeBench { threads: number(1, 1)?, rounds: number(2, 5)?, activations, ..DecodeBench::default() };
    let figures = decode(&ModelFile::open(path.as_ref())?, bench)?;
    writeln!(std::io::stdout(), "{}", serde_json::to_string(&figures)?)?;
    Ok(())
}
