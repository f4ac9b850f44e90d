//! Measures the codecs of hidden rows with a GGUF file: `gate FILE [THREADS] [--int8]`, one JSON line per codec and number of
//! cuts on stdout. With f32 activations unless `--int8` is given.
use std::io::Write;

use kernels::boundary::Codec;
use kernels_models::gate::{GateOptions, measure};
use kernels_models::stage::Activations;
use kernels_models::weights::ModelFile;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (flags, args): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let path = args.first().ok_or("expected: gate FILE [THREADS] [--int8]")?;
    let threads = args.get(1).map_or(Ok(1), |arg| arg.parse())?;
    let activations = if flags.iter().any(|flag| flag == "--int8") { Activations::Int8 } else { Activations::F32 };
    let options = GateOptions { activations, threads };
    let progress = |done: u64, all: u64| {
        if done.is_multiple_of(100) {
            let _ = writeln!(std::io::stderr(), "{done} of {all} steps");
        }
    };
    for quality in measure(&ModelFile::open(path.as_ref())?, &Codec::ALL[1..], options, progress)? {
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&quality)?)?;
    }
    Ok(())
}
