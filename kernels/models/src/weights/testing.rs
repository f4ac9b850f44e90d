//! Test support: builds small valid models in memory, for tests and benchmarks of everything that reads weights.
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use kernels::quant::{QuantType, random_blocks};

use super::{Architecture, ModelFile};

/// Writes GGUF files, valid or not; nothing is checked.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    /// Format version.
    pub version: u32,
    /// Alignment of tensor offsets and of the data start; written as a key if not 32.
    pub alignment: usize,
    keys: Vec<(String, Vec<u8>)>,
    tensors: Vec<TensorSource>,
}

/// A tensor to write.
#[derive(Clone, Debug)]
pub struct TensorSource {
    /// Name.
    pub name: String,
    /// Dimensions in the file's order: columns first.
    pub dims: Vec<u64>,
    /// ggml type number.
    pub kind: u32,
    /// Data.
    pub bytes: Vec<u8>,
    /// Written instead of the true offset.
    pub offset: Option<u64>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }
}

impl GgufWriter {
    /// A key with an already encoded value: type number and bytes.
    pub fn raw(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Self {
        self.keys.retain(|(k, _)| k != key);
        self.keys.push((key.to_owned(), [&kind.to_le_bytes(), value].concat()));
        self
    }

    /// A u32 key.
    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    /// An f32 key.
    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    /// A boolean key.
    pub fn bool(&mut self, key: &str, value: bool) -> &mut Self {
        self.raw(key, 7, &[u8::from(value)])
    }

    /// A string key.
    pub fn text(&mut self, key: &str, value: &str) -> &mut Self {
        self.raw(key, 8, &string(value.as_bytes()))
    }

    /// An array of strings.
    pub fn texts<S: AsRef<[u8]>>(&mut self, key: &str, values: &[S]) -> &mut Self {
        let mut out = [8u32.to_le_bytes().to_vec(), (values.len() as u64).to_le_bytes().to_vec()].concat();
        values.iter().for_each(|v| out.extend(string(v.as_ref())));
        self.raw(key, 9, &out)
    }

    /// An array of i32.
    pub fn i32s(&mut self, key: &str, values: &[i32]) -> &mut Self {
        let mut out = [5u32.to_le_bytes().to_vec(), (values.len() as u64).to_le_bytes().to_vec()].concat();
        values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        self.raw(key, 9, &out)
    }

    /// An array of f32.
    pub fn f32s(&mut self, key: &str, values: &[f32]) -> &mut Self {
        let mut out = [6u32.to_le_bytes().to_vec(), (values.len() as u64).to_le_bytes().to_vec()].concat();
        values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        self.raw(key, 9, &out)
    }

    /// Drops a key.
    pub fn without(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(k, _)| k != key);
        self
    }

    /// A tensor of shape `[rows, cols]`; a vector if `rows` is 1.
    pub fn tensor(&mut self, name: &str, quant: QuantType, [rows, cols]: [usize; 2], bytes: Vec<u8>) -> &mut Self {
        let dims = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
        let kind = quant.ggml_id();
        self.tensors.push(TensorSource { name: name.to_owned(), dims, kind, bytes, offset: None });
        self
    }

    /// The tensors, so that tests can corrupt them.
    pub fn tensors_mut(&mut self) -> &mut Vec<TensorSource> {
        &mut self.tensors
    }

    /// The parts of a split file as llama.cpp's `gguf-split` writes them: all keys in the first part.
    #[must_use]
    pub fn split(&self, parts: usize) -> Vec<Self> {
        let each = self.tensors.len().div_ceil(parts);
        let tensors = self.tensors.chunks(each).map(<[TensorSource]>::to_vec).chain(std::iter::repeat(Vec::new()));
        let part = |(number, tensors): (usize, Vec<TensorSource>)| {
            let keys = if number == 0 { self.keys.clone() } else { Vec::new() };
            let mut part = Self { keys, tensors, ..*self };
            part.raw("split.no", 2, &(number as u16).to_le_bytes());
            part.raw("split.count", 2, &(parts as u16).to_le_bytes());
            part.raw("split.tensors.count", 5, &(self.tensors.len() as i32).to_le_bytes());
            part
        };
        tensors.take(parts).enumerate().map(part).collect()
    }

    /// The header, padded to the alignment.
    #[must_use]
    pub fn header(&self) -> Vec<u8> {
        let mut keys: BTreeMap<&str, &Vec<u8>> = self.keys.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let alignment = [&4u32.to_le_bytes()[..], &(self.alignment as u32).to_le_bytes()].concat();
        if self.alignment != 32 {
            keys.insert("general.alignment", &alignment);
        }
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in keys {
            out.extend(string(key.as_bytes()));
            out.extend(value);
        }
        let mut at = 0;
        for tensor in &self.tensors {
            out.extend(string(tensor.name.as_bytes()));
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(at as u64).to_le_bytes());
            at += padded(tensor.bytes.len(), self.alignment);
        }
        out.resize(padded(out.len(), self.alignment), 0);
        out
    }

    /// The complete file.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            out.extend(&tensor.bytes);
            out.resize(padded(out.len(), self.alignment), 0);
        }
        out
    }
}

fn padded(len: usize, alignment: usize) -> usize {
    // Tests also write files with alignment 0.
    len.next_multiple_of(alignment.max(1))
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// Parameters of a small model. Widths are multiples of 256, so that every format fits.
#[derive(Clone, Copy, Debug)]
pub struct TinyModel {
    /// Model family.
    pub architecture: Architecture,
    /// Storage format of the matrices.
    pub quant: QuantType,
    /// Blocks.
    pub layers: usize,
    /// Hidden width.
    pub width: usize,
    /// Query heads; each has 64 elements.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Feed-forward width of each expert, and of a layer without experts, except beside layers that have some: there it is 256 more.
    pub ffn: usize,
    /// Experts of a layer, and of a row; some architectures always have some.
    pub experts: Option<[usize; 2]>,
    /// Whether the output head is tied to the embedding.
    pub tied: bool,
    /// All attention biases that the architecture may have, and GLM-4.5's norms of heads; some architectures always have biases.
    pub biases: bool,
    /// Made for embeddings: the last token's row, of texts that end with the end token.
    pub pooled: bool,
    /// Seed of the random weights.
    pub seed: u64,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            architecture: Architecture::Llama,
            quant: QuantType::Q4_1,
            layers: 3,
            width: 256,
            heads: 4,
            kv_heads: 2,
            ffn: 512,
            experts: None,
            tied: true,
            biases: false,
            pooled: false,
            seed: 1,
        }
    }
}

/// Merges of the small vocabulary, by rank.
pub const TINY_MERGES: [&str; 8] = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d"];
/// Its control tokens: ids 0, 1 and 2.
pub const TINY_CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

impl TinyModel {
    /// A model with each kind of layer that the family has.
    #[must_use]
    pub fn of(architecture: Architecture) -> Self {
        // Every fourth layer of these families is special.
        let four = matches!(architecture, Architecture::SmolLm3 | Architecture::Llama4);
        Self { architecture, layers: if four { 4 } else { 3 }, ..Self::default() }
    }

    /// Writes the model as a GGUF file.
    #[must_use]
    pub fn writer(&self) -> GgufWriter {
        const HEAD: usize = 64;
        let mut w = GgufWriter::default();
        let arch = self.architecture.name();
        w.text("general.architecture", arch).text("general.name", "tiny");
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", 512),
            ("embedding_length", self.width),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", HEAD),
            ("attention.value_length", HEAD),
        ] {
            w.u32(&format!("{arch}.{key}"), value as u32);
        }
        w.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5);
        w.f32(&format!("{arch}.rope.freq_base"), 10_000.0);
        if self.architecture == Architecture::Gemma3 {
            // Windows are shorter than the tests' prompts, and two of three layers have them.
            w.f32("gemma3.rope.freq_base", 1e6).f32("gemma3.final_logit_softcapping", 30.0);
            w.u32("gemma3.attention.sliding_window", 9).u32("gemma3.attention.sliding_window_pattern", 3);
        }
        if self.architecture == Architecture::Gemma2 {
            w.f32("gemma2.attn_logit_softcapping", 2.0).f32("gemma2.final_logit_softcapping", 30.0);
            w.u32("gemma2.attention.sliding_window", 9);
        }
        let [qwen2moe, oss, phi, glm, llama4] = [
            Architecture::Qwen2Moe,
            Architecture::GptOss,
            Architecture::Phi3,
            Architecture::Glm4Moe,
            Architecture::Llama4,
        ]
        .map(|architecture| self.architecture == architecture);
        if oss || phi {
            w.u32(&format!("{arch}.attention.sliding_window"), 9);
        }
        // Contexts above 64 have the factors of long ones.
        if phi {
            w.u32("phi3.rope.dimension_count", 48).u32("phi3.rope.scaling.original_context_length", 64);
            w.f32("phi3.rope.scaling.attn_factor", 1.19);
        }
        if glm {
            w.u32("glm4moe.rope.dimension_count", 32).u32("glm4moe.leading_dense_block_count", 1);
            w.u32("glm4moe.expert_shared_count", 2).f32("glm4moe.expert_weights_scale", 1.5);
        }
        if llama4 {
            w.u32("llama4.attention.chunk_size", 10).u32("llama4.attention.temperature_length", 4);
            w.f32("llama4.attention.temperature_scale", 0.3).u32("llama4.interleave_moe_layer_step", 2);
        }
        if self.architecture == Architecture::Mistral3 {
            w.text("mistral3.rope.scaling.type", "yarn").f32("mistral3.rope.scaling.factor", 4.0);
            w.u32("mistral3.rope.scaling.original_context_length", 8);
            w.f32("mistral3.rope.scaling.yarn_log_multiplier", 0.5).f32("mistral3.attention.temperature_scale", 0.3);
        }
        let mixture = qwen2moe || oss || glm || llama4 || self.architecture == Architecture::Qwen3Moe;
        let dense_ffn = if glm || llama4 { self.ffn + 256 } else { self.ffn };
        w.u32(&format!("{arch}.feed_forward_length"), dense_ffn as u32);
        let experts = self.experts.or(mixture.then_some([6, 2]));
        if let Some([count, used]) = experts {
            w.u32(&format!("{arch}.expert_count"), count as u32);
            w.u32(&format!("{arch}.expert_used_count"), used as u32);
        }
        if mixture {
            w.u32(&format!("{arch}.expert_feed_forward_length"), self.ffn as u32);
        }
        if qwen2moe {
            w.u32(&format!("{arch}.expert_shared_feed_forward_length"), self.ffn as u32);
        }
        if self.pooled {
            w.u32(&format!("{arch}.pooling_type"), 3).bool("tokenizer.ggml.add_eos_token", true);
        }
        let vocab = tiny_vocabulary(&mut w);
        let (q, kv) = (self.heads * HEAD, self.kv_heads * HEAD);
        let mut seed = self.seed;
        let mut add = |name: &str, shape: [usize; 2]| {
            seed += 1;
            let plain = shape[0] == 1 || name.contains("_gate_inp") || name.ends_with(".bias");
            let quant = if plain { QuantType::F32 } else { self.quant };
            let blocks = shape[0] * shape[1] / quant.block_len();
            w.tensor(name, quant, shape, random_blocks(quant, blocks, seed));
        };
        add("token_embd.weight", [vocab, self.width]);
        for layer in 0..self.layers {
            let block = |part: &str| format!("blk.{layer}.{part}");
            add(&block("attn_norm.weight"), [1, self.width]);
            if phi {
                add(&block("attn_qkv.weight"), [q + 2 * kv, self.width]);
            } else {
                add(&block("attn_q.weight"), [q, self.width]);
                add(&block("attn_k.weight"), [kv, self.width]);
                add(&block("attn_v.weight"), [kv, self.width]);
            }
            add(&block("attn_output.weight"), [self.width, q]);
            add(&block(if oss || glm { "post_attention_norm.weight" } else { "ffn_norm.weight" }), [1, self.width]);
            if oss {
                add(&block("attn_sinks.weight"), [1, self.heads]);
            }
            let experts = experts.filter(|_| !(glm && layer == 0 || llama4 && layer % 2 == 0));
            let mut gated = |kind: &str, count: usize, ffn: usize| {
                if phi {
                    add(&block("ffn_up.weight"), [2 * ffn, self.width]);
                } else {
                    add(&block(&format!("ffn_gate{kind}.weight")), [count * ffn, self.width]);
                    add(&block(&format!("ffn_up{kind}.weight")), [count * ffn, self.width]);
                }
                add(&block(&format!("ffn_down{kind}.weight")), [count * self.width, ffn]);
            };
            match experts {
                None => gated("", 1, dense_ffn),
                Some([count, _]) => {
                    gated("_exps", count, self.ffn);
                    if qwen2moe || glm || llama4 {
                        gated("_shexp", 1, if glm { 2 * self.ffn } else { self.ffn });
                    }
                }
            }
            if qwen2moe {
                add(&block("ffn_gate_inp_shexp.weight"), [1, self.width]);
            }
            if let Some([count, _]) = experts {
                add(&block("ffn_gate_inp.weight"), [count, self.width]);
                if glm {
                    add(&block("exp_probs_b.bias"), [1, count]);
                }
                if oss {
                    add(&block("ffn_gate_inp.bias"), [1, count]);
                    add(&block("ffn_gate_exps.bias"), [count, self.ffn]);
                    add(&block("ffn_up_exps.bias"), [count, self.ffn]);
                    add(&block("ffn_down_exps.bias"), [count, self.width]);
                }
            }
            let qwen2 = matches!(self.architecture, Architecture::Qwen2 | Architecture::Qwen2Moe);
            if self.biases || qwen2 || oss || glm {
                add(&block("attn_q.bias"), [1, q]);
                add(&block("attn_k.bias"), [1, kv]);
                add(&block("attn_v.bias"), [1, kv]);
            }
            if (self.biases && !qwen2 && !glm) || oss {
                add(&block("attn_output.bias"), [1, self.width]);
            }
            let normed =
                matches!(self.architecture, Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3);
            if normed || (glm && self.biases) {
                add(&block("attn_q_norm.weight"), [1, HEAD]);
                add(&block("attn_k_norm.weight"), [1, HEAD]);
            }
            if self.architecture.is_gemma() {
                add(&block("post_attention_norm.weight"), [1, self.width]);
                add(&block("post_ffw_norm.weight"), [1, self.width]);
            }
        }
        add("output_norm.weight", [1, self.width]);
        if !self.tied {
            add("output.weight", [vocab, self.width]);
        }
        if phi {
            for (name, step) in [("short", 0.02f32), ("long", 0.5)] {
                let factors: Vec<u8> = (0..24).flat_map(|pair| (1.0 + step * pair as f32).to_le_bytes()).collect();
                w.tensor(&format!("rope_factors_{name}.weight"), QuantType::F32, [1, 24], factors);
            }
        }
        w
    }

    /// Opens the model.
    ///
    /// # Panics
    /// If it cannot be opened, which fails the calling test.
    #[must_use]
    pub fn open(&self) -> Arc<ModelFile> {
        ModelFile::from_bytes(self.writer().write().into()).expect("a sound small model")
    }
}

/// Writes control tokens, all bytes and a few merges; returns the number of tokens.
fn tiny_vocabulary(w: &mut GgufWriter) -> usize {
    let mut tokens: Vec<String> = TINY_CONTROL.iter().map(|&t| t.to_owned()).collect();
    let mut next = 0x100;
    for byte in 0..256u32 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        tokens.extend(char::from_u32(if printable { byte } else { next }).map(String::from));
        next += u32::from(!printable);
    }
    tokens.extend(TINY_MERGES.iter().map(|m| m.replace(' ', "")));
    let kinds: Vec<i32> = (0..tokens.len()).map(|i| if i < TINY_CONTROL.len() { 3 } else { 1 }).collect();
    w.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
    w.texts("tokenizer.ggml.tokens", &tokens).i32s("tokenizer.ggml.token_type", &kinds);
    w.texts("tokenizer.ggml.merges", &TINY_MERGES);
    w.u32("tokenizer.ggml.bos_token_id", 1).u32("tokenizer.ggml.eos_token_id", 2);
    tokens.len()
}

/// Gives the changed header of a `.mesh` file its hash, if the file has a whole header.
pub fn seal_mesh(bytes: &mut [u8]) {
    let len = super::mesh::header_len(bytes).and_then(|len| usize::try_from(len).ok());
    if let Some(header) = len.filter(|len| *len >= super::mesh::HEAD_BYTES).and_then(|len| bytes.get_mut(..len)) {
        super::mesh::seal(header);
    }
}

/// Path of the real model: `MESHNODE_MODEL`, else the cache of `meshnode pull`, downloading it there if missing. Prints SKIPPED
/// and returns `None` if it is not available.
///
/// # Panics
/// If it is not available and `MESHNODE_REQUIRE` lists `model`.
#[must_use]
#[expect(clippy::print_stdout, reason = "a skipped test prints why")]
pub fn real_model_path() -> Option<PathBuf> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new(); // download once for all tests
    match FOUND.get_or_init(find_or_fetch) {
        Ok(path) => Some(path.clone()),
        Err(reason) => {
            let required = std::env::var("MESHNODE_REQUIRE").unwrap_or_default();
            let reason = format!("{reason}; run `meshnode pull smollm2-135m`, or set MESHNODE_MODEL to its path");
            assert!(!required.split(',').any(|r| r == "model"), "the model is required: {reason}");
            println!("SKIPPED: {reason}");
            None
        }
    }
}

fn find_or_fetch() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("MESHNODE_MODEL").map(PathBuf::from) {
        let missing = || format!("MESHNODE_MODEL is {}, which is not a file", named.display());
        return if named.is_file() { Ok(named) } else { Err(missing()) };
    }
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    let cache = cache.ok_or("cannot locate the cache: neither XDG_CACHE_HOME nor HOME is set")?;
    let path = cache.join("meshnode/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.is_file() {
        return Ok(path);
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fetch_model.py");
    let run = Command::new("python3").arg(script).arg(&path).status();
    match run {
        Ok(status) if status.success() => Ok(path),
        Ok(status) => Err(format!("tests/fetch_model.py failed with {status}")),
        Err(error) => Err(format!("cannot run python3 to fetch the model: {error}")),
    }
}
