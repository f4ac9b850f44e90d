//! `meshnode inspect`: what a model's files hold, without loading them.
use super::failure::Failure;
use super::global::{Global, answer};
use super::model;
use super::progress::Bar;
use super::table::{render, row};
use crate::config::Size;
use crate::pull::Progress;
use kernels_models::quantize::bits_per_weight;
use kernels_models::stage::Activations;
use kernels_models::weights::{ModelFile, ShardIndex};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode inspect smollm2-135m
  meshnode inspect Qwen3-30B-A3B-Q4_K_M-00001-of-00002.gguf --tensors
  meshnode inspect smollm2-135m --hash --json | jq .content
  meshnode inspect model.mesh --hash                               verify all of it")]
pub(super) struct InspectArgs {
    /// smollm2-135m, hf:OWNER/REPO/FILE, hf:OWNER/REPO, or the path of a .gguf or .mesh file or of a folder with safetensors
    model: String,
    /// List all tensors
    #[arg(long)]
    tensors: bool,
    /// Compute the content ids by which peers fetch the model and its tensors: reads all files once. A .mesh file has them in its
    /// header, and all its bytes are compared with them
    #[arg(long)]
    hash: bool,
}

/// What `inspect` shows.
#[derive(Serialize)]
struct Seen {
    path: String,
    name: String,
    architecture: &'static str,
    layers: usize,
    width: usize,
    vocabulary: usize,
    context: usize,
    /// Experts of a layer, and of a token.
    experts: Option<[usize; 2]>,
    file_bytes: u64,
    /// Bytes in memory, and those that decoding reads per token.
    weight_bytes: u64,
    token_bytes: u64,
    /// Bytes of KV cache per token.
    cache_bytes: u64,
    /// Bytes in the files by format.
    formats: BTreeMap<&'static str, u64>,
    /// Bits per weight of the matrices, as they are in the files.
    bits_per_weight: f64,
    /// Whether the matrices are tiles: a `.mesh` file.
    tiles: bool,
    content: Option<String>,
    /// Whether all bytes were compared with the content id.
    verified: bool,
    tensors: Option<Vec<Tensor>>,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    format: &'static str,
    rows: usize,
    columns: usize,
    bytes: u64,
    content: Option<String>,
}

pub(super) fn inspect(global: &Global, args: &InspectArgs) -> Result<(), Failure> {
    let path = model::fetch(global, &args.model)?;
    let file = ModelFile::open(&path).map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?;
    let index = match args.hash {
        true => Some(hashed(&file)?),
        false => ShardIndex::recorded(&file).map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?,
    };
    let is_mesh = file.recorded_hashes().is_some();
    let config = file.config();
    let costs = file.costs(Activations::Int8);
    let mut formats = BTreeMap::new();
    for tensor in file.tensors() {
        *formats.entry(tensor.quant.name()).or_insert(0) += tensor.range.end - tensor.range.start;
    }
    let experts = config.experts.map(|experts| [experts.count, experts.used]);
    // Experts that a token does not use are not read.
    let idle = |bytes: u64| experts.map_or(0, |[count, used]| bytes / count as u64 * (count - used) as u64);
    let layers: u64 = costs.layers.iter().map(|layer| layer.weight_bytes).sum();
    let read: u64 = costs.layers.iter().map(|layer| layer.weight_bytes - idle(layer.expert_bytes)).sum();
    let embedding = if costs.tied { 0 } else { costs.embed_bytes };
    let seen = Seen {
        path: path.display().to_string(),
        name: config.name.clone(),
        architecture: config.architecture.name(),
        layers: config.layers,
        width: config.width,
        vocabulary: config.vocab,
        context: config.context,
        experts,
        file_bytes: crate::pull::bytes(&path),
        weight_bytes: layers + costs.head_bytes + embedding,
        token_bytes: read + costs.head_bytes,
        cache_bytes: costs.layers.iter().map(|layer| layer.kv_bytes_per_token).sum(),
        formats,
        bits_per_weight: bits_per_weight(&file),
        tiles: is_mesh,
        verified: is_mesh && args.hash,
        content: index.as_ref().map(|index| hex(index.content_id())),
        tensors: args.tensors.then(|| tensors(&file, index.as_ref())),
    };
    answer(global, &seen, text);
    Ok(())
}

fn tensors(file: &ModelFile, index: Option<&ShardIndex>) -> Vec<Tensor> {
    let ids = index.map(ShardIndex::tensor_ids);
    let of = |number: usize| ids.as_ref().and_then(|ids| ids.get(number)).map(|id| hex(*id));
    let tensor = |(number, tensor): (usize, &kernels_models::weights::TensorInfo)| Tensor {
        name: tensor.name.clone(),
        format: tensor.quant.name(),
        rows: tensor.rows,
        columns: tensor.cols,
        bytes: tensor.range.end - tensor.range.start,
        content: of(number),
    };
    file.tensors().iter().enumerate().map(tensor).collect()
}

/// Hashes all files, with a progress bar.
fn hashed(file: &ModelFile) -> Result<ShardIndex, Failure> {
    let (bar, done) = (Bar::new("hashing"), AtomicU64::new(0));
    bar.start("the model", 0, Some(file.file_len()));
    let progress = |bytes: u64| bar.at(done.fetch_add(bytes, Ordering::Relaxed) + bytes);
    ShardIndex::build(file, progress).map_err(|e| Failure::failed(e.to_string()))
}

fn hex(id: [u8; 32]) -> String {
    blake3::Hash::from_bytes(id).to_hex().to_string()
}

fn text(seen: &Seen) -> String {
    let size = |bytes: u64| Size(bytes).to_string();
    let experts = seen.experts.map(|[count, used]| format!(", {count} experts ({used} per token)")).unwrap_or_default();
    let shape = format!(
        "{}, {} layers of width {}{experts}, vocabulary {}, context {}",
        seen.architecture, seen.layers, seen.width, seen.vocabulary, seen.context
    );
    let formats: Vec<String> = seen.formats.iter().map(|(name, bytes)| format!("{name} {}", size(*bytes))).collect();
    let mut rows = vec![
        row(["name", &seen.name]),
        row(["path", &seen.path]),
        row(["shape", &shape]),
        row([
            "files",
            &format!("{}, {:.2} bits per weight: {}", size(seen.file_bytes), seen.bits_per_weight, formats.join(", ")),
        ]),
        row([
            "memory",
            &format!("{} of weights, {} of cache per token", size(seen.weight_bytes), size(seen.cache_bytes)),
        ]),
        row(["decoding", &format!("reads {} of weights per token", size(seen.token_bytes))]),
    ];
    if seen.tiles {
        let form = "tiles, which engines load without conversion";
        rows.push(row(["form", &format!("{form}{}", if seen.verified { "; all hashes are right" } else { "" })]));
    }
    rows.extend(seen.content.iter().map(|content| row(["content", content])));
    let mut text = render(&rows);
    if let Some(tensors) = &seen.tensors {
        let mut rows = vec![row(["TENSOR", "FORMAT", "ROWS", "COLUMNS", "SIZE", "CONTENT"])];
        rows.extend(tensors.iter().map(|tensor| {
            let content = tensor.content.as_deref().unwrap_or_default();
            let [lines, columns] = [tensor.rows, tensor.columns].map(|number| number.to_string());
            row([&tensor.name, tensor.format, &lines, &columns, &size(tensor.bytes), content])
        }));
        text = format!("{text}\n{}", render(&rows));
    }
    text.trim_end().to_owned()
}
