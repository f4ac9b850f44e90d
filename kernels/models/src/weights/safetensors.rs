//! Hugging Face model folders: `.safetensors` files with `config.json`, `tokenizer.json` and `tokenizer_config.json`, converted
//! to the configuration, names and metadata of a GGUF file.
//!
//! The weights are F32, F16 or BF16, in one file or in several with an index. They are joined to one file with `config.json`
//! embedded in its header, which peers receive, too: a stage needs nothing else from the folder. The tokenizer stays on the
//! coordinator.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use kernels::quant::QuantType;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::config::QueryKeyOrder;
use super::error::WeightsError;
use super::gguf::{self, Header, TableEntry};
use super::header;
use super::metadata::{Array, Element, Metadata, Value};
use super::parts::FOLDER_INDEX;
use super::source::Source;
use super::tensor::Stored;

mod options;

/// The type of GLM-4.5 in `config.json`.
const GLM: &str = "glm4_moe";
/// Maximum bytes of the JSON header; the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Maximum bytes of another file in the folder: the largest tokenizers have about 30 MiB.
const BESIDE_BYTES_MAX: u64 = 128 << 20;

/// Alignment of each part's data when they are joined: a cache line.
const ALIGNMENT: u64 = 64;
/// Header entry that is not a tensor.
const METADATA: &str = "__metadata__";
/// Header metadata key under which `config.json` is embedded for peers.
const CONFIG_KEY: &str = "meshnode.config";

/// A tensor entry of the header.
#[derive(Deserialize, Serialize)]
struct Listed {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Whether the bytes look like this format: a plausible length, then a JSON object.
pub(super) fn recognise(bytes: &[u8]) -> bool {
    bytes.first_chunk().is_some_and(|len| u64::from_le_bytes(*len) <= HEADER_BYTES_MAX) && bytes.get(8) == Some(&b'{')
}

/// The file of a model folder, or one part of it.
pub(super) struct Part {
    pub path: PathBuf,
    pub source: Source,
    listed: BTreeMap<String, Json>,
    /// Position where the data begins.
    data: u64,
}

impl Part {
    /// Reads the header of a part.
    ///
    /// # Errors
    /// It cannot be read, or is not a safetensors file.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        Self::read(path, Source::open(path, false)?)
    }

    /// As [`Self::open`] for a file that is open.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(super) fn read(path: &Path, source: Source) -> Result<Self, WeightsError> {
        let (listed, data) = header::read(&source, |bytes, _| read_listed(bytes))?;
        Ok(Self { path: path.to_owned(), source, listed, data })
    }

    /// Whether the header contains the model's configuration, as in a file from a peer.
    pub(super) fn has_config(&self) -> bool {
        embedded_config(&self.listed).is_some()
    }

    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// Joins the parts of a folder to one file that begins with a header of all tensors and the configuration. `index`: the file of
/// each tensor, for a folder with an index.
///
/// # Errors
/// A tensor in two parts, or an index that does not agree with the parts.
pub(super) fn join(parts: &[Part], index: Option<&BTreeMap<String, String>>) -> Result<Source, WeightsError> {
    let dir = parts.first().and_then(|part| part.path.parent()).unwrap_or(Path::new("."));
    let config = read_json(&dir.join("config.json"))?.ok_or_else(|| {
        WeightsError::Unsupported(format!(
            "{} lacks config.json, which describes the model; fetch the model's whole folder, or use a GGUF file",
            dir.display()
        ))
    })?;
    options::reject_quantised(&config)?;
    let unused = Unused::of(&config);
    let mut stacks: BTreeMap<String, BTreeMap<usize, (Listed, Source)>> = BTreeMap::new();
    for part in parts {
        let have = part.source.len().saturating_sub(part.data);
        let mut ranges = Vec::new();
        for (name, json) in part.listed.iter().filter(|(name, _)| *name != METADATA) {
            let tensor: Listed = parse_listed(name, json)?;
            let [start, end] = tensor.data_offsets;
            if end > have {
                let (what, need) = (format!("tensor {name:?} in {}", part.name()), end.saturating_add(part.data));
                return Err(WeightsError::Truncated { what, need, have: part.source.len() });
            }
            if !unused.has(name) {
                entry(name, &tensor)?;
            }
            ranges.push((start, end, name));
            let data = part.source.part(&(start.saturating_add(part.data)..end + part.data));
            let (stack, number) = stack_of(name);
            if stacks.entry(stack).or_default().insert(number, (tensor, data)).is_some() {
                return Err(malformed(&format!("tensor {name:?} is in two files, the second is {}", part.name())));
            }
        }
        ranges.sort_unstable();
        if let Some(pair) = ranges.windows(2).find(|pair| pair[1].0 < pair[0].1) {
            let (a, b) = (pair[0].2, pair[1].2);
            return Err(malformed(&format!("tensors {a:?} and {b:?} in {} overlap", part.name())));
        }
    }
    if let Some(index) = index {
        agree(parts, index)?;
    }
    for (name, numbers) in options::long_factors(&config)? {
        let tensor = Listed { dtype: "F32".to_owned(), shape: vec![numbers.len() as u64], data_offsets: [0; 2] };
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        stacks.entry(name.to_owned()).or_default().insert(0, (tensor, Source::memory(bytes.into())));
    }
    // In the order of the names, whatever the order in the files.
    let (mut listed, mut data, mut at) = (BTreeMap::new(), Vec::new(), 0u64);
    for (name, stack) in stacks {
        let (mut tensor, stack) = stacked(&name, stack)?;
        tensor.data_offsets = [at, at + stack.len()];
        at = (at + stack.len()).next_multiple_of(ALIGNMENT);
        data.push(stack);
        listed.insert(name, serde_json::to_value(tensor).unwrap_or_default());
    }
    listed.insert(METADATA.to_owned(), serde_json::json!({ CONFIG_KEY: config.to_string() }));
    Ok(Source::join([Source::memory(written(&listed))].into_iter().chain(data), ALIGNMENT))
}

/// The tensor that a tensor of the folder is a part of, and its number there: experts are stacked.
fn stack_of(name: &str) -> (String, usize) {
    let parts = || {
        let (layer, rest) = name.split_once(".experts.")?;
        let (number, part) = rest.split_once('.')?;
        Some((format!("{layer}.experts.{part}"), number.parse().ok()?))
    };
    parts().unwrap_or_else(|| (name.to_owned(), 0))
}

/// Stacks matrices in their rows.
fn stacked(name: &str, stack: BTreeMap<usize, (Listed, Source)>) -> Result<(Listed, Source), WeightsError> {
    let count = stack.len();
    let wrong = |what: &str| malformed(&format!("tensor {name:?}: expected {what} of all {count} experts"));
    if stack.keys().last().is_some_and(|last| last.checked_add(1) != Some(count)) {
        return Err(wrong("one matrix"));
    }
    let mut stack = stack.into_values();
    let (mut first, data) = stack.next().ok_or_else(|| wrong("one matrix"))?;
    if count == 1 {
        return Ok((first, data));
    }
    let mut pieces = vec![data];
    for (tensor, data) in stack {
        if (&tensor.dtype, &tensor.shape) != (&first.dtype, &first.shape) {
            return Err(wrong("the same format and shape"));
        }
        pieces.push(data);
    }
    match &mut first.shape[..] {
        [rows, _] => *rows = rows.saturating_mul(count as u64),
        _ => return Err(wrong("two dimensions")),
    }
    Ok((first, Source::join(pieces, 1)))
}

/// Checks that the index and the parts name the same tensors.
fn agree(parts: &[Part], index: &BTreeMap<String, String>) -> Result<(), WeightsError> {
    let by_name: BTreeMap<String, &Part> = parts.iter().map(|part| (part.name(), part)).collect();
    for (tensor, file) in index {
        if by_name.get(file).is_none_or(|part| !part.listed.contains_key(tensor)) {
            return Err(malformed(&format!(
                "{FOLDER_INDEX}: expected tensor {tensor:?} in {file}, found no such tensor there; fetch both files again"
            )));
        }
    }
    for part in parts {
        let (name, named) = (part.name(), |tensor: &String| tensor == METADATA || index.contains_key(tensor));
        if let Some(tensor) = part.listed.keys().find(|tensor| !named(tensor)) {
            return Err(malformed(&format!(
                "{FOLDER_INDEX}: expected every tensor of {name}, {tensor:?} is missing; fetch both files again"
            )));
        }
    }
    Ok(())
}

/// Parses the header of a file that contains the configuration. `bytes`: the file of `file_len` bytes, or a prefix of it; if the
/// header does not end within it, [`WeightsError::Truncated`] gives the length needed. `folder`: where the tokenizer and the chat
/// template are.
pub(super) fn parse(bytes: &[u8], file_len: u64, folder: Option<&Path>) -> Result<Header, WeightsError> {
    let (listed, data) = read_listed(bytes)?;
    let text = embedded_config(&listed).ok_or_else(|| {
        WeightsError::Unsupported(
            "a safetensors model needs the other files of its folder: open it by its path".to_owned(),
        )
    })?;
    let config: Json = serde_json::from_str(text).map_err(|e| malformed(&format!("{CONFIG_KEY}: {e}")))?;
    let mut builder = Builder::default();
    if let Some(folder) = folder {
        builder.folder(folder, &config)?;
    }
    builder.model(&config)?;
    let mut table = table(&listed, &Unused::of(&config))?;
    if config["model_type"] == GLM {
        // Its GGUF files have another name for the norm before the feed-forward block.
        for entry in &mut table {
            if let Some(block) = entry.name.strip_suffix("ffn_norm.weight") {
                entry.name = format!("{block}post_attention_norm.weight");
            }
        }
    }
    let tensors = gguf::place(table, data, 1, file_len)?;
    // Kernels require aligned elements.
    if let Some(odd) = tensors.iter().find(|t| !t.range.start.is_multiple_of(t.quant.block_bytes() as u64)) {
        return Err(malformed(&format!(
            "tensor {:?} begins at byte {}, which is not aligned to its elements",
            odd.name, odd.range.start
        )));
    }
    Ok(Header {
        header_len: data,
        metadata: builder.finish(),
        tensors,
        layout: QueryKeyOrder::HuggingFace,
        hashes: None,
    })
}

fn embedded_config(listed: &BTreeMap<String, Json>) -> Option<&str> {
    listed.get(METADATA)?[CONFIG_KEY].as_str()
}

fn read_json(path: &Path) -> Result<Option<Json>, WeightsError> {
    let Some(text) = read_beside(path)? else { return Ok(None) };
    let json = serde_json::from_str(&text);
    json.map(Some).map_err(|e| malformed(&format!("{}: {e}", path.display())))
}

/// Reads a text file of a model folder; `None` if there is none.
pub(super) fn read_beside(path: &Path) -> Result<Option<String>, WeightsError> {
    use std::io::Read;
    let io = |source| WeightsError::Io { path: path.to_owned(), source };
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    let mut text = String::new();
    file.take(BESIDE_BYTES_MAX + 1).read_to_string(&mut text).map_err(io)?;
    if text.len() as u64 > BESIDE_BYTES_MAX {
        return Err(malformed(&format!("{}: more than {BESIDE_BYTES_MAX} bytes", path.display())));
    }
    Ok(Some(text))
}

/// The header's entries and the position where the data begins.
fn read_listed(bytes: &[u8]) -> Result<(BTreeMap<String, Json>, u64), WeightsError> {
    let have = bytes.len() as u64;
    let truncated = |need| WeightsError::Truncated { what: "safetensors header".to_owned(), need, have };
    let len = bytes.first_chunk().map(|len| u64::from_le_bytes(*len)).ok_or_else(|| truncated(8))?;
    let data = len.checked_add(8).filter(|_| len <= HEADER_BYTES_MAX);
    let data = data.ok_or_else(|| malformed(&format!("a safetensors header of {len} bytes")))?;
    let header = bytes.get(8..data as usize).ok_or_else(|| truncated(data))?;
    let listed = serde_json::from_slice(header).map_err(|e| malformed(&format!("safetensors header: {e}")))?;
    Ok((listed, data))
}

/// Writes a header, padded so that the data after it is aligned.
fn written(listed: &BTreeMap<String, Json>) -> Bytes {
    let mut text = serde_json::to_vec(listed).unwrap_or_default();
    text.resize((8 + text.len()).next_multiple_of(ALIGNMENT as usize) - 8, b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat().into()
}

fn parse_listed(name: &str, json: &Json) -> Result<Listed, WeightsError> {
    Listed::deserialize(json).map_err(|e| malformed(&format!("tensor {name:?}: {e}")))
}

/// Tensors of a folder that are not read.
struct Unused {
    /// A tied head repeats the embedding.
    tied: bool,
    /// Later layers predict later tokens.
    layers: Option<u64>,
}

impl Unused {
    fn of(config: &Json) -> Self {
        let layers = config["num_hidden_layers"].as_u64().filter(|_| config["model_type"] == GLM);
        Self { tied: config["tie_word_embeddings"].as_bool().unwrap_or(false), layers }
    }

    /// Inverse frequencies are derived from the configuration.
    fn has(&self, name: &str) -> bool {
        let layer = || name.strip_prefix("model.layers.")?.split_once('.')?.0.parse::<u64>().ok();
        name.ends_with(".rotary_emb.inv_freq")
            || (self.tied && name == "lm_head.weight")
            || self.layers.is_some_and(|layers| layer().is_some_and(|layer| layer >= layers))
    }
}

/// The tensors, with GGUF names.
fn table(listed: &BTreeMap<String, Json>, unused: &Unused) -> Result<Vec<TableEntry>, WeightsError> {
    let mut table = Vec::new();
    for (name, json) in listed {
        if name == METADATA || unused.has(name) {
            continue;
        }
        table.push(entry(name, &parse_listed(name, json)?)?);
    }
    Ok(table)
}

fn entry(name: &str, listed: &Listed) -> Result<TableEntry, WeightsError> {
    let wrong = |what: &str| malformed(&format!("tensor {name:?} of shape {:?}: {what}", listed.shape));
    let quant = match listed.dtype.as_str() {
        "F32" => QuantType::F32,
        "F16" => QuantType::F16,
        "BF16" => QuantType::Bf16,
        other => {
            return Err(WeightsError::Unsupported(format!(
                "tensor {name:?} is stored as {other}; supported in safetensors: F32, F16, BF16"
            )));
        }
    };
    let (rows, cols) = match listed.shape[..] {
        [cols] => (1, cols),
        [rows, cols] => (rows, cols),
        _ => return Err(wrong("expected one or two dimensions")),
    };
    let (Ok(rows @ 1..), Ok(cols @ 1..)) = (usize::try_from(rows), usize::try_from(cols)) else {
        return Err(wrong("expected dimensions of at least 1"));
    };
    let row_bytes = quant.row_bytes(cols).filter(|&b| b <= gguf::ROW_BYTES_MAX);
    let row_bytes = row_bytes.ok_or_else(|| wrong("rows are too long"))? as u64;
    let size = row_bytes.checked_mul(rows as u64).ok_or_else(|| wrong("the size exceeds 64 bits"))?;
    let [start, end] = listed.data_offsets;
    if end.checked_sub(start) != Some(size) {
        return Err(wrong(&format!("expected {size} bytes, found the range {start}..{end}")));
    }
    Ok(TableEntry { name: gguf_name(name), quant, rows, cols, stored: Stored::Rows, offset: start, size })
}

/// Maps `model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`. Unknown names are kept and rejected later, by name.
fn gguf_name(name: &str) -> String {
    const PARTS: [(&str, &str); 33] = [
        ("input_layernorm.weight", "attn_norm.weight"),
        ("self_attn.q_proj.weight", "attn_q.weight"),
        ("self_attn.k_proj.weight", "attn_k.weight"),
        ("self_attn.v_proj.weight", "attn_v.weight"),
        ("self_attn.q_proj.bias", "attn_q.bias"),
        ("self_attn.k_proj.bias", "attn_k.bias"),
        ("self_attn.v_proj.bias", "attn_v.bias"),
        ("self_attn.q_norm.weight", "attn_q_norm.weight"),
        ("self_attn.k_norm.weight", "attn_k_norm.weight"),
        ("self_attn.o_proj.weight", "attn_output.weight"),
        ("self_attn.o_proj.bias", "attn_output.bias"),
        ("post_attention_layernorm.weight", "ffn_norm.weight"),
        ("mlp.gate_proj.weight", "ffn_gate.weight"),
        ("mlp.up_proj.weight", "ffn_up.weight"),
        ("mlp.down_proj.weight", "ffn_down.weight"),
        ("mlp.gate.weight", "ffn_gate_inp.weight"),
        ("mlp.experts.gate_proj.weight", "ffn_gate_exps.weight"),
        ("mlp.experts.up_proj.weight", "ffn_up_exps.weight"),
        ("mlp.experts.down_proj.weight", "ffn_down_exps.weight"),
        ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
        ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
        ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
        ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
        ("self_attn.qkv_proj.weight", "attn_qkv.weight"),
        ("mlp.gate_up_proj.weight", "ffn_up.weight"),
        ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        ("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"),
        ("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
        ("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
        ("block_sparse_moe.gate.weight", "ffn_gate_inp.weight"),
        ("block_sparse_moe.experts.w1.weight", "ffn_gate_exps.weight"),
        ("block_sparse_moe.experts.w3.weight", "ffn_up_exps.weight"),
        ("block_sparse_moe.experts.w2.weight", "ffn_down_exps.weight"),
    ];
    let fixed = match name {
        "model.embed_tokens.weight" => Some("token_embd.weight"),
        "model.norm.weight" => Some("output_norm.weight"),
        "lm_head.weight" => Some("output.weight"),
        _ => None,
    };
    let block = || {
        let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (_, ours) = PARTS.iter().find(|(theirs, _)| *theirs == part)?;
        Some(format!("blk.{layer}.{ours}"))
    };
    fixed.map(str::to_owned).or_else(block).unwrap_or_else(|| name.to_owned())
}

/// Builds metadata with GGUF keys.
#[derive(Default)]
struct Builder {
    arrays: Vec<u8>,
    entries: BTreeMap<String, Value>,
}

impl Builder {
    fn finish(self) -> Metadata {
        Metadata::new(self.arrays.into(), self.entries)
    }

    fn set(&mut self, key: &str, value: Value) {
        self.entries.insert(key.to_owned(), value);
    }

    fn texts<'a>(&mut self, key: &str, texts: impl Iterator<Item = &'a str>) {
        let (start, mut len) = (self.arrays.len(), 0);
        for text in texts {
            self.arrays.extend((text.len() as u64).to_le_bytes());
            self.arrays.extend(text.as_bytes());
            len += 1;
        }
        let range = start..self.arrays.len();
        self.set(key, Value::Array(Array { element: Element::Text, len, range }));
    }

    fn numbers(&mut self, key: &str, numbers: impl Iterator<Item = f64>) {
        let (start, mut len) = (self.arrays.len(), 0);
        for number in numbers {
            self.arrays.extend(number.to_le_bytes());
            len += 1;
        }
        let range = start..self.arrays.len();
        self.set(key, Value::Array(Array { element: Element::F64, len, range }));
    }

    /// Reads the chat template and the tokenizer.
    fn folder(&mut self, dir: &Path, config: &Json) -> Result<(), WeightsError> {
        let options = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or(Json::Null);
        self.template(&options, dir)?;
        match read_json(&dir.join("tokenizer.json"))? {
            Some(tokenizer) => self.tokenizer(&tokenizer, &options, config),
            None => Ok(()),
        }
    }

    /// Converts `config.json`.
    fn model(&mut self, config: &Json) -> Result<(), WeightsError> {
        let kind = config["model_type"].as_str().unwrap_or_default();
        options::reject_folder(kind)?;
        // Mistral is Llama with a sliding window, Mixtral with experts.
        let arch = match kind {
            "mistral" | "mixtral" => "llama",
            "qwen2_moe" => "qwen2moe",
            "qwen3_moe" => "qwen3moe",
            GLM => "glm4moe",
            "ministral3" => "mistral3",
            other => other,
        };
        self.set("general.architecture", Value::Text(arch.to_owned()));
        if let Some(name) = config["_name_or_path"].as_str().filter(|n| !n.is_empty()) {
            self.set("general.name", Value::Text(name.to_owned()));
        }
        for (theirs, ours) in [
            ("num_hidden_layers", "block_count"),
            ("max_position_embeddings", "context_length"),
            ("hidden_size", "embedding_length"),
            ("intermediate_size", "feed_forward_length"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("head_dim", "attention.key_length"),
            ("head_dim", "attention.value_length"),
            ("num_experts", "expert_count"),
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ] {
            if let Some(value) = config[theirs].as_u64() {
                self.set(&format!("{arch}.{ours}"), Value::Unsigned(value));
            }
        }
        if let Some(normalised) = config["norm_topk_prob"].as_bool() {
            self.set(&format!("{arch}.expert_weights_norm"), Value::Bool(normalised));
        }
        if config["no_rope_layer_interval"].as_u64().is_some_and(|interval| kind == "smollm3" && interval != 4) {
            return Err(WeightsError::Unsupported("config.json: no_rope_layer_interval: expected 4".into()));
        }
        let dense = |key: &str| config[key].as_array().is_some_and(|layers| !layers.is_empty());
        if config["decoder_sparse_step"].as_u64().is_some_and(|step| step != 1) || dense("mlp_only_layers") {
            return Err(WeightsError::Unsupported(
                "config.json: decoder_sparse_step and mlp_only_layers: expected experts in every layer".into(),
            ));
        }
        let window = config["sliding_window"].as_u64().filter(|_| config["use_sliding_window"] != Json::Bool(false));
        if let Some(window) = window {
            self.set(&format!("{arch}.attention.sliding_window"), Value::Unsigned(window));
        }
        if let Some(value) = config["rms_norm_eps"].as_f64() {
            self.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), Value::Float(value));
        }
        if let Some(activation) = config["hidden_act"].as_str().filter(|&a| a != "silu") {
            return Err(WeightsError::Unsupported(format!("config.json: activation {activation:?}; supported: silu")));
        }
        if kind == GLM {
            self.glm4_moe(config)?;
        }
        self.rope(arch, config, (kind == GLM).then_some(0.5))
    }

    /// Reads the chat template from `tokenizer_config.json` or its own file.
    fn template(&mut self, options: &Json, dir: &Path) -> Result<(), WeightsError> {
        let inline = &options["chat_template"];
        let named = || {
            let default = inline.as_array()?.iter().find(|t| t["name"] == "default")?;
            default["template"].as_str()
        };
        let text = match inline.as_str().or_else(named) {
            Some(text) => Some(text.to_owned()),
            None => read_beside(&dir.join("chat_template.jinja"))?,
        };
        if let Some(text) = text {
            self.set("tokenizer.chat_template", Value::Text(text));
        }
        Ok(())
    }

    /// Converts `tokenizer.json`: vocabulary by id, and merges.
    fn tokenizer(&mut self, tokenizer: &Json, options: &Json, config: &Json) -> Result<(), WeightsError> {
        const NORMAL: f64 = 1.0;
        const UNKNOWN: f64 = 2.0;
        const CONTROL: f64 = 3.0;
        const USER_DEFINED: f64 = 4.0;
        const UNUSED: f64 = 5.0;
        const BYTE: f64 = 6.0;
        let model = &tokenizer["model"];
        let vocab = model["vocab"].as_object().filter(|_| model["type"] == "BPE");
        let vocab =
            vocab.ok_or_else(|| WeightsError::Unsupported("tokenizer.json: expected a BPE model".to_owned()))?;
        let sentence_piece = model["byte_fallback"] == Json::Bool(true);
        // Embedding rows without a token are padding.
        let count = config["vocab_size"].as_u64().unwrap_or(0).min(1 << 20) as usize;
        let mut tokens: Vec<(&str, f64)> = vec![("", UNUSED); count];
        let mut put = |id: Option<u64>, text, kind| {
            let slot = id.and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
            *slot.ok_or_else(|| {
                malformed(&format!("tokenizer.json: {text:?} has no id below vocab_size ({count})"))
            })? = (text, kind);
            Ok::<(), WeightsError>(())
        };
        for (text, id) in vocab {
            let byte = sentence_piece && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
            let unknown = model["unk_token"].as_str() == Some(text);
            put(
                id.as_u64(),
                text.as_str(),
                if byte {
                    BYTE
                } else if unknown {
                    UNKNOWN
                } else {
                    NORMAL
                },
            )?;
        }
        for added in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let text = added["content"].as_str().unwrap_or_default();
            let unknown = model["unk_token"].as_str() == Some(text);
            let special = added["special"] == Json::Bool(true);
            let kind = if unknown {
                UNKNOWN
            } else if special {
                CONTROL
            } else {
                USER_DEFINED
            };
            put(added["id"].as_u64(), text, kind)?;
        }
        self.texts("tokenizer.ggml.tokens", tokens.iter().map(|t| t.0));
        self.numbers("tokenizer.ggml.token_type", tokens.iter().map(|t| t.1));
        let merges = merges(model)?;
        if sentence_piece {
            self.set("tokenizer.ggml.model", Value::Text("llama".to_owned()));
            // The rank of the first merge that produces a piece serves as its score.
            let mut ranks: BTreeMap<String, f64> = BTreeMap::new();
            for (rank, (a, b)) in merges.iter().enumerate() {
                ranks.entry(format!("{a}{b}")).or_insert(-(rank as f64));
            }
            let worst = -(merges.len() as f64);
            self.numbers("tokenizer.ggml.scores", tokens.iter().map(|t| ranks.get(t.0).copied().unwrap_or(worst)));
            let prefix = tokenizer["normalizer"].to_string().contains("Prepend");
            self.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
        } else {
            self.set("tokenizer.ggml.model", Value::Text("gpt2".to_owned()));
            self.set("tokenizer.ggml.pre", Value::Text(pre_tokenizer(&tokenizer["pre_tokenizer"]).to_owned()));
            let spelt: Vec<String> = merges.iter().map(|(a, b)| format!("{a} {b}")).collect();
            self.texts("tokenizer.ggml.merges", spelt.iter().map(String::as_str));
        }
        let id = |token: &Json| {
            let text = token.as_str().or(token["content"].as_str())?;
            tokens.iter().position(|t| t.0 == text).map(|i| Value::Unsigned(i as u64))
        };
        if let Some(bos) = id(&options["bos_token"]) {
            self.set("tokenizer.ggml.bos_token_id", bos);
        }
        if let Some(eos) = id(&options["eos_token"]) {
            self.set("tokenizer.ggml.eos_token_id", eos);
        }
        let adds = tokenizer["post_processor"].to_string().contains("TemplateProcessing");
        self.set("tokenizer.ggml.add_bos_token", Value::Bool(options["add_bos_token"].as_bool().unwrap_or(adds)));
        Ok(())
    }
}

/// Merges as `"a b"` (older files) or `["a", "b"]`.
fn merges(model: &Json) -> Result<Vec<(&str, &str)>, WeightsError> {
    let listed = model["merges"].as_array().ok_or_else(|| malformed("tokenizer.json: expected a list of merges"))?;
    listed
        .iter()
        .map(|merge| match merge.as_array().map(Vec::as_slice) {
            Some([a, b]) => a.as_str().zip(b.as_str()),
            Some(_) => None,
            None => merge.as_str()?.split_once(' '),
        })
        .map(|pair| pair.ok_or_else(|| malformed("tokenizer.json: expected each merge to be a pair")))
        .collect()
}

/// GGUF's name of a pre-tokenizer, recognised by its regular expression. The tokenizer rejects an unknown one.
fn pre_tokenizer(json: &Json) -> &str {
    // Letters in upper case, then in lower case; a slash ends punctuation.
    const CASES: [&str; 2] =
        [r"[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+", r"[^\\s\\p{L}\\p{N}]+[\\r\\n/]*"];
    let text = json.to_string();
    if CASES.iter().all(|part| text.contains(part)) {
        if text.contains(r"\\p{N}{1,3}") && text.contains("(?i:'s|'t|'re|'ve|'m|'ll|'d)?") {
            return "gpt-4o";
        } else if text.contains(r"|\\p{N}| ?[^") && !text.contains("'ll") {
            return "tekken";
        }
    }
    if text.contains(r"\\p{N}{1,3}") && !text.contains(r"\\p{Lu}") {
        "llama-bpe"
    } else if text.contains(r"|\\p{N}| ?[^") && !text.contains(r"\\p{Lu}") {
        "qwen2"
    } else if text.contains("\"Digits\"") && text.contains("\"individual_digits\":true") {
        "smollm"
    } else if json["type"] == "ByteLevel" {
        "gpt-2"
    } else {
        "unknown (tokenizer.json)"
    }
}

fn malformed(what: &str) -> WeightsError {
    WeightsError::Malformed(what.to_owned())
}

#[cfg(test)]
mod tests;
