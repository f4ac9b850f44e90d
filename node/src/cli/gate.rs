//! `meshnode gate`: measures what each encoding of rows between nodes costs a model, and records which ones may be chosen
//! automatically.
use super::failure::Failure;
use super::global::{Global, answer};
use super::model;
use super::progress::Bar;
use super::table::{render, row};
use crate::pull::Progress;
use crate::rows::Gate;
use kernels::boundary::Codec;
use kernels_models::gate::{GateOptions, KL_MAX, Quality, TOP1_MIN, measure};
use kernels_models::stage::Activations;
use kernels_models::weights::{ModelFile, ShardIndex};
use node_core::id::ContentId;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode gate smollm2-135m
  meshnode serve smollm2-135m --boundary auto

The model runs on this machine's CPU, cut in two and in three stages, over 4096 positions of a text that is part of the \
program. Each encoding is compared with rows as they are: TOP-1 is the share of positions with the same most likely token, KL \
the mean divergence of the next token's distribution in nats, FLIP MARGIN by how much the most likely token led where it \
changed, GREEDY the mean share of a continuation before the first token that differs. An encoding passes with a TOP-1 of 95 % \
and a KL of 0.05 or better. Larger models take hours.")]
pub(super) struct GateArgs {
    /// smollm2-135m, hf:OWNER/REPO/FILE, hf:OWNER/REPO, or the path of a .gguf file or of a folder with safetensors
    model: String,
    /// Compute in int8, as models are served by default. Its rounding turns any change of a row, however small, into
    /// changes of its own, so that even f16 changes some tokens; without it only the encoding is measured
    #[arg(long)]
    int8: bool,
    /// Compute threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// What `gate` shows.
#[derive(Serialize)]
struct Measured {
    path: PathBuf,
    /// Bytes of a row by encoding.
    row_bytes: Vec<(&'static str, usize)>,
    #[serde(flatten)]
    gate: Gate,
}

pub(super) fn gate(global: &Global, args: &GateArgs) -> Result<(), Failure> {
    let path = model::fetch(global, &args.model)?;
    let failed = |e: &dyn std::fmt::Display| Failure::failed(format!("{}: {e}", path.display()));
    let file = ModelFile::open(&path).map_err(|e| failed(&e))?;
    let bar = Bar::new("");
    bar.start("hashing", 0, Some(file.file_len()));
    let index = ShardIndex::build(&file, |_| {}).map_err(|e| failed(&e))?;
    let content = ContentId(index.content_id());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let options = GateOptions {
        activations: if args.int8 { Activations::Int8 } else { Activations::F32 },
        threads: args.threads.map_or(cores, usize::from),
    };
    let codecs = &Codec::ALL[1..];
    let measured = measure(&file, codecs, options, |done, all| {
        if done == 1 {
            bar.start_steps("measuring", all);
        }
        bar.at(done);
    });
    let measured = measured.map_err(|e| failed(&e))?;
    let gate = Gate::new(content, file.config().name.clone(), measured);
    let path = gate.write(&global.models_dir(), content).map_err(|e| Failure::failed(e.to_string()))?;
    let width = file.config().width;
    let bytes = |codec: Codec| codec.row_bytes(width).map(|bytes| (codec.name(), bytes));
    let row_bytes = Codec::ALL.into_iter().filter_map(bytes).collect();
    answer(global, &Measured { path, row_bytes, gate }, text);
    Ok(())
}

fn text(measured: &Measured) -> String {
    let mut rows = vec![row(["ENCODING", "BYTES/ROW", "CUTS", "TOP-1", "KL", "FLIP MARGIN", "GREEDY", "PASSES"])];
    rows.extend(measured.gate.measured.iter().map(|quality: &Quality| {
        let bytes = measured.row_bytes.iter().find(|(name, _)| *name == quality.codec).map_or(0, |(_, bytes)| *bytes);
        vec![
            quality.codec.clone(),
            bytes.to_string(),
            quality.cuts.len().to_string(),
            format!("{:.2} %", 100.0 * quality.top1),
            format!("{:.5}", quality.kl_mean),
            format!("{:.3}", quality.flip_margin_max),
            format!("{:.0} %", 100.0 * quality.greedy),
            if quality.passes() { "yes" } else { "no" }.to_owned(),
        ]
    }));
    let allowed = match &measured.gate.allowed[..] {
        [] => format!("no encoding keeps {:.0} % of the tokens and a KL of {KL_MAX}", 100.0 * TOP1_MIN),
        allowed => format!("--boundary auto may use {}", allowed.join(", ")),
    };
    format!("{}\n{allowed}, recorded in {}", render(&rows), measured.path.display())
}
