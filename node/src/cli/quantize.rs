//! `meshnode quantize`: writes a model as a `.mesh` file, exactly or with fewer bits per weight.
use super::compute::threads;
use super::failure::Failure;
use super::global::{Global, answer};
use super::model;
use super::progress::Bar;
use super::table::{render, row};
use crate::config::Size;
use crate::disk;
use crate::pull::Progress;
use kernels_models::quantize::{
    Bits, Prepared, QuantizeError, QuantizeOptions, QuantizeProgress, TARGET_DEFAULT, Written, prepare,
};
use kernels_models::weights::ModelFile;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode quantize smollm2-135m smollm2.mesh                      the same weights, in the form that engines load
  meshnode quantize hf:Qwen/Qwen3-4B qwen3-4b.mesh --bits 4
  meshnode quantize ./folder-with-safetensors big.mesh --bits auto --target-bpw 6
  meshnode quantize Big-00001-of-00003.gguf big.mesh --json | jq .content

The bits are those of the matrices; norms and biases stay in 32. 4: Q4_Z, found by a search. 8: Q8_0. 16: F16. auto: more bits where a \
measurement on a short text finds that a tensor needs them. No tensor gets more bits than it has. An interrupted command continues \
where it stopped if it is run again.")]
pub(super) struct QuantizeArgs {
    /// smollm2-135m, hf:OWNER/REPO/FILE, hf:OWNER/REPO, or the path of a .gguf or .mesh file or of a folder with safetensors
    #[arg(value_name = "IN")]
    model: String,
    /// The file to write
    #[arg(value_name = "OUT.mesh")]
    out: PathBuf,
    /// Bits per weight; keep: the formats of IN, so that all results stay the same
    #[arg(long, value_enum, value_name = "BITS", default_value = "keep")]
    bits: BitsArg,
    /// Most bits per weight on average, in the file, with --bits auto [default: 5.5]
    #[arg(long, value_name = "X", value_parser = target)]
    target_bpw: Option<f64>,
    /// Replace OUT.mesh if it exists
    #[arg(long)]
    force: bool,
    /// Threads that measure tensors with --bits auto [default: one per core]
    #[arg(long, value_name = "N", env = "MESHNODE_THREADS", value_parser = threads)]
    threads: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum BitsArg {
    Keep,
    #[value(name = "4")]
    Four,
    #[value(name = "8")]
    Eight,
    #[value(name = "16")]
    Sixteen,
    Auto,
}

fn target(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(bits) if (1.0..=32.0).contains(&bits) => Ok(bits),
        Ok(_) | Err(_) => Err("expected a number of bits from 1 to 32, for example 5.5".to_owned()),
    }
}

impl QuantizeArgs {
    fn bits(&self) -> Result<Bits, Failure> {
        let bits = match self.bits {
            BitsArg::Keep => Bits::Keep,
            BitsArg::Four => Bits::Four,
            BitsArg::Eight => Bits::Eight,
            BitsArg::Sixteen => Bits::Sixteen,
            BitsArg::Auto => Bits::Auto { target: self.target_bpw.unwrap_or(TARGET_DEFAULT) },
        };
        if self.target_bpw.is_some() && self.bits != BitsArg::Auto {
            return Err(Failure::usage("--target-bpw is of --bits auto only: add it, or remove --target-bpw"));
        }
        Ok(bits)
    }
}

pub(super) fn quantize(global: &Global, args: &QuantizeArgs) -> Result<(), Failure> {
    let bits = args.bits()?;
    if args.out.extension().is_none_or(|extension| extension != "mesh") {
        let out = args.out.display();
        return Err(Failure::usage(format!("expected a name that ends in .mesh for the file to write, found {out}")));
    }
    let path = model::fetch(global, &args.model)?;
    let file = ModelFile::open(&path).map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?;
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let options = QuantizeOptions { bits, force: args.force, threads: args.threads.unwrap_or_else(cores) };
    let bar = Bar::new("");
    let prepared = prepare(&file, &args.out, &options, &Shown(&bar))?;
    require_space(&args.out, &prepared)?;
    let written = prepared.write(&Shown(&bar))?;
    drop(bar);
    answer(global, &written, text);
    Ok(())
}

fn require_space(out: &Path, prepared: &Prepared) -> Result<(), Failure> {
    const ADVICE: &str = "free some space there, or write to another folder";
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    disk::require(disk::free_bytes(folder), prepared.bytes_left(), "the model", out, ADVICE).map_err(Failure::failed)
}

/// Progress as a bar.
struct Shown<'a>(&'a Bar);

impl QuantizeProgress for Shown<'_> {
    fn start(&self, what: &str, done: u64, total: u64) {
        self.0.start(what, done, Some(total));
    }

    fn at(&self, done: u64) {
        self.0.at(done);
    }
}

impl From<QuantizeError> for Failure {
    fn from(error: QuantizeError) -> Self {
        match &error {
            QuantizeError::Same { .. } | QuantizeError::Exists { .. } | QuantizeError::Target { .. } => {
                Self::usage(error)
            }
            QuantizeError::Busy { .. }
            | QuantizeError::Write { .. }
            | QuantizeError::DiskFull { .. }
            | QuantizeError::Weights(_)
            | QuantizeError::Index(_)
            | QuantizeError::Words(_)
            | QuantizeError::Measure { .. } => Self::failed(error),
        }
    }
}

fn text(written: &Written) -> String {
    let formats = written.formats.iter().map(|(name, bytes)| format!("{name} {}", Size(*bytes)));
    let size = format!(
        "{}, {:.2} bits per weight: {}",
        Size(written.file_bytes),
        written.bits_per_weight,
        formats.collect::<Vec<_>>().join(", ")
    );
    let mut rows = vec![row(["path", &written.path.display().to_string()]), row(["size", &size])];
    let errors = written.tensors.iter().filter_map(|tensor| Some((tensor.relative_error?, tensor)));
    let largest = errors.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(error, _)| *error > 0.0);
    let exact = written.resumed == 0;
    rows.extend(match largest {
        Some((error, tensor)) => Some(row(["largest error", &format!("{:.2} % of {}", 100.0 * error, tensor.name)])),
        None => exact.then(|| row(["error", "none: all weights are those of the source"])),
    });
    if written.resumed > 0 {
        let all = written.tensors.len();
        rows.push(row(["continued", &format!("{} of {all} tensors were written before", written.resumed)]));
    }
    rows.push(row(["content", &written.content]));
    render(&rows).trim_end().to_owned()
}
