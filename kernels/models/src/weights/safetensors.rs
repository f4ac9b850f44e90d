//! Hugging Face model folders: a `.safetensors` file with `config.json`, `tokenizer.json` and `tokenizer_config.json`,
//! converted to the configuration, names and metadata of a GGUF file.
//!
//! The weights must be a single file (no `…-00001-of-…` shards) in F32, F16 or BF16. Peers receive it with `config.json`
//! embedded in its header; a stage needs nothing else from the folder. The tokenizer stays on the coordinator.
use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use kernels::quant::QuantType;
use serde::Deserialize;
use serde_json::Value as Json;

use super::config::QueryKeyOrder;
use super::error::WeightsError;
use super::gguf::{self, Header, TableEntry};
use super::metadata::{Array, Element, Metadata, Value};

/// Maximum bytes of the JSON header; the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Maximum bytes of another file in the folder: the largest tokenizers have about 30 MiB.
const BESIDE_BYTES_MAX: u64 = 128 << 20;

/// Header metadata key under which `config.json` is embedded for peers.
const CONFIG_KEY: &str = "meshnode.config";

/// A tensor entry of the header.
#[derive(Deserialize)]
struct Listed {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Whether the bytes look like this format: a plausible length, then a JSON object.
pub(super) fn recognise(bytes: &[u8]) -> bool {
    bytes.first_chunk().is_some_and(|len| u64::from_le_bytes(*len) <= HEADER_BYTES_MAX) && bytes.get(8) == Some(&b'{')
}

/// Parses the header and the other files of the folder. `bytes`: the file of `file_len` bytes, or a prefix of it; if the header
/// does not end within it, [`WeightsError::Truncated`] gives the length needed.
pub(super) fn parse(bytes: &[u8], file_len: u64, path: Option<&Path>) -> Result<Header, WeightsError> {
    let (listed, data) = read_listed(bytes)?;
    let mut builder = Builder::default();
    let (config, served) = match listed.get("__metadata__").and_then(|metadata| metadata[CONFIG_KEY].as_str()) {
        Some(text) => (serde_json::from_str(text).map_err(|e| malformed(&format!("{CONFIG_KEY}: {e}")))?, None),
        None => builder.folder(path, &listed, data)?,
    };
    builder.model(&config)?;
    let table = table(listed, config["tie_word_embeddings"].as_bool().unwrap_or(false))?;
    let tensors = gguf::place(table, data, 1, file_len)?;
    // Kernels require aligned elements.
    if let Some(odd) = tensors.iter().find(|t| !t.range.start.is_multiple_of(t.quant.block_bytes() as u64)) {
        return Err(malformed(&format!(
            "tensor {:?} begins at byte {}, which is not aligned to its elements",
            odd.name, odd.range.start
        )));
    }
    Ok(Header { header_len: data, metadata: builder.finish(), tensors, layout: QueryKeyOrder::HuggingFace, served })
}

fn read_json(path: &Path) -> Result<Option<Json>, WeightsError> {
    let Some(text) = read_beside(path)? else { return Ok(None) };
    let json = serde_json::from_str(&text);
    json.map(Some).map_err(|e| malformed(&format!("{}: {e}", path.display())))
}

fn read_beside(path: &Path) -> Result<Option<String>, WeightsError> {
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

/// Embeds `config.json` in the header. The new length keeps the alignment of the data.
fn carry(mut listed: BTreeMap<String, Json>, data: u64, config: &Json) -> Bytes {
    let metadata = listed.entry("__metadata__".to_owned()).or_insert(Json::Null);
    // The rest of the metadata is never read.
    *metadata = serde_json::json!({ CONFIG_KEY: config.to_string() });
    let mut text = serde_json::to_vec(&listed).unwrap_or_default();
    while !(8 + text.len() as u64).abs_diff(data).is_multiple_of(64) {
        text.push(b' ');
    }
    [&(text.len() as u64).to_le_bytes()[..], &text].concat().into()
}

/// The tensors, with GGUF names.
fn table(listed: BTreeMap<String, Json>, tied: bool) -> Result<Vec<TableEntry>, WeightsError> {
    let mut table = Vec::new();
    for (name, json) in listed {
        // Inverse frequencies are derived from the configuration; a tied head repeats the embedding.
        let derived = name == "__metadata__" || name.ends_with(".rotary_emb.inv_freq");
        if derived || (tied && name == "lm_head.weight") {
            continue;
        }
        let listed: Listed = serde_json::from_value(json).map_err(|e| malformed(&format!("tensor {name:?}: {e}")))?;
        table.push(entry(&name, &listed)?);
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
    Ok(TableEntry { name: gguf_name(name), quant, rows, cols, offset: start, size })
}

/// Maps `model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`. Unknown names are kept and rejected later, by name.
fn gguf_name(name: &str) -> String {
    const PARTS: [(&str, &str); 15] = [
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

    /// Reads the other files of the folder. Returns `config.json` and the header that embeds it.
    fn folder(
        &mut self,
        path: Option<&Path>,
        listed: &BTreeMap<String, Json>,
        data: u64,
    ) -> Result<(Json, Option<Bytes>), WeightsError> {
        let dir = path.and_then(Path::parent).ok_or_else(|| {
            WeightsError::Unsupported(
                "a safetensors model needs the other files of its folder: open it by its path".to_owned(),
            )
        })?;
        let config = read_json(&dir.join("config.json"))?.ok_or_else(|| {
            WeightsError::Unsupported(format!(
                "{} lacks config.json, which describes the model; fetch the model's whole folder, or use a GGUF file",
                dir.display()
            ))
        })?;
        let tokenizer = read_json(&dir.join("tokenizer.json"))?;
        let options = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or(Json::Null);
        self.template(&options, dir)?;
        if let Some(tokenizer) = &tokenizer {
            self.tokenizer(tokenizer, &options, &config)?;
        }
        let served = carry(listed.clone(), data, &config);
        Ok((config, Some(served)))
    }

    /// Converts `config.json`.
    fn model(&mut self, config: &Json) -> Result<(), WeightsError> {
        let kind = config["model_type"].as_str().unwrap_or_default();
        if kind.starts_with("gemma") {
            return Err(WeightsError::Unsupported(format!(
                "config.json: a {kind:?} model is supported in GGUF files only (its folder stores norm weights minus one); use the .gguf file"
            )));
        }
        // Mistral is Llama with a sliding window.
        let arch = if kind == "mistral" { "llama" } else { kind };
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
        ] {
            if let Some(value) = config[theirs].as_u64() {
                self.set(&format!("{arch}.{ours}"), Value::Unsigned(value));
            }
        }
        let window = config["sliding_window"].as_u64().filter(|_| config["use_sliding_window"] != Json::Bool(false));
        if let Some(window) = window {
            self.set(&format!("{arch}.attention.sliding_window"), Value::Unsigned(window));
        }
        for (theirs, ours) in [("rms_norm_eps", "attention.layer_norm_rms_epsilon"), ("rope_theta", "rope.freq_base")] {
            if let Some(value) = config[theirs].as_f64() {
                self.set(&format!("{arch}.{ours}"), Value::Float(value));
            }
        }
        if let Some(activation) = config["hidden_act"].as_str().filter(|&a| a != "silu") {
            return Err(WeightsError::Unsupported(format!("config.json: activation {activation:?}; supported: silu")));
        }
        self.rope_scaling(arch, &config["rope_scaling"])
    }

    fn rope_scaling(&mut self, arch: &str, scaling: &Json) -> Result<(), WeightsError> {
        let Some(kind) = scaling["rope_type"].as_str().or(scaling["type"].as_str()) else { return Ok(()) };
        let kind = if kind == "default" { "none" } else { kind };
        self.set(&format!("{arch}.rope.scaling.type"), Value::Text(kind.to_owned()));
        for (theirs, ours) in [
            ("factor", "factor"),
            ("original_max_position_embeddings", "original_context_length"),
            ("low_freq_factor", "low_freq_factor"),
            ("high_freq_factor", "high_freq_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ] {
            if let Some(value) = scaling[theirs].as_f64() {
                let whole = theirs == "original_max_position_embeddings" && value >= 0.0;
                let value = if whole { Value::Unsigned(value as u64) } else { Value::Float(value) };
                self.set(&format!("{arch}.rope.scaling.{ours}"), value);
            }
        }
        if scaling["attention_factor"].is_number() {
            return Err(WeightsError::Unsupported(
                "config.json: rope_scaling.attention_factor is not supported".into(),
            ));
        }
        Ok(())
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
    let text = json.to_string();
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
