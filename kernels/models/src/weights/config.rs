//! Model configuration: sizes, rotary embedding, the tensors an architecture requires, and the cost of each part.
use std::collections::BTreeMap;
use std::ops::Range;

use kernels::tile;

use super::error::WeightsError;
use super::metadata::Metadata;
use super::tensor::TensorInfo;
use crate::kv_cache::position_bytes;
use crate::stage::Activations;

mod frequencies;
mod keys;

pub use frequencies::RotaryFrequencies;

use keys::Keys;

/// Per-dimension RoPE factors for long contexts in Llama 3 files.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Maximum number of blocks: the deepest published model has 126; a malicious count must not become a long loop.
const LAYERS_MAX: usize = 4096;
/// Maximum hidden, feed-forward or head width: well above any model, and products of two fit 64 bits.
const WIDTH_MAX: usize = 1 << 20;
/// Maximum context: positions above it are not exact in f32.
const CONTEXT_MAX: usize = 1 << 24;
/// Valid RoPE bases: greater than 1, so that wavelengths increase.
const ROPE_BASES: Range<f64> = 1.000_001..1e12;
/// Bytes per element of a hidden row sent between stages.
const ACTIVATION_ELEMENT_BYTES: u64 = 4;
/// SmolLM3 rotates in three of four layers (Hugging Face, "SmolLM3", 2025); its files do not say so.
const STILL_PERIOD: usize = 4;
/// The gate of a shared expert: one row, but a matrix.
const SHARED_GATE: &str = "ffn_gate_inp_shexp.weight";

/// Supported model families. All are pre-norm decoders with RMSNorm, grouped-query attention, rotary embedding and a gated
/// feed-forward block; the differences are in [`ModelConfig`] and [`crate::recipe::Recipe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// SmolLM2, Llama 1 to 3, Mistral, Mixtral (with experts): rotary embedding on adjacent pairs; a few have attention biases.
    Llama,
    /// Biases on query, key and value; rotary embedding on halves.
    Qwen2,
    /// As `Qwen2` with experts: each row also uses a shared one, scaled by a gate of its own.
    Qwen2Moe,
    /// RMSNorm on each query and key head; rotary embedding on halves.
    Qwen3,
    /// As `Qwen3` with experts.
    Qwen3Moe,
    /// RMSNorm after each block, GeGLU, a scaled embedding, soft caps of attention scores and logits. Every other layer uses a
    /// sliding window.
    Gemma2,
    /// RMSNorm on each query and key head and after each block, GeGLU, a scaled embedding. Five of six layers use a sliding
    /// window and their own RoPE base.
    Gemma3,
    /// As `Llama`; every fourth layer has no rotary embedding.
    SmolLm3,
    /// Experts with biases and a clamped activation, attention sinks; every other layer uses a sliding window.
    GptOss,
}

impl Architecture {
    /// All supported families.
    pub const ALL: [Self; 9] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen2Moe,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Gemma2,
        Self::Gemma3,
        Self::SmolLm3,
        Self::GptOss,
    ];

    /// The name in `general.architecture`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen2Moe => "qwen2moe",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3moe",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3",
            Self::SmolLm3 => "smollm3",
            Self::GptOss => "gpt-oss",
        }
    }

    /// Whether the feed-forward is GeGLU, the embedding is scaled, and blocks are followed by a norm.
    pub(crate) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Whether some layers use a sliding window and others do not.
    fn alternates(self) -> bool {
        self.is_gemma() || self == Self::GptOss
    }

    /// Whether query and key heads are normalised.
    fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe | Self::Gemma3)
    }

    /// Qwen2's reference implementation has biases on query, key and value only.
    fn has_output_bias(self) -> bool {
        !matches!(self, Self::Qwen2 | Self::Qwen2Moe)
    }

    fn parse(name: &str) -> Result<Self, WeightsError> {
        Self::ALL.into_iter().find(|a| a.name() == name).ok_or_else(|| {
            let supported: Vec<_> = Self::ALL.iter().map(|a| a.name()).collect();
            WeightsError::Unsupported(format!(
                "the model's architecture is {name:?}; supported: {}",
                supported.join(", ")
            ))
        })
    }
}

/// Sizes and options of a model, consistent with the shapes of its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub architecture: Architecture,
    /// `general.name`, or the architecture name.
    pub name: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Hidden width: elements of a hidden row.
    pub width: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements per head (for query, key and value).
    pub head_dim: usize,
    /// Width of the feed-forward block, or of each expert.
    pub ffn: usize,
    /// The experts that take the place of the feed-forward block.
    pub experts: Option<Experts>,
    /// Vocabulary size: rows of the embedding, length of the logits.
    pub vocab: usize,
    /// Context length that the model was trained for.
    pub context: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Biases on query, key and value (`blk.N.attn_{q,k,v}.bias`), in all blocks.
    pub attention_bias: bool,
    /// A bias on the attention output projection (`blk.N.attn_output.bias`), in all blocks.
    pub attention_output_bias: bool,
    /// RMSNorm on each query and key head (`blk.N.attn_{q,k}_norm.weight`, `head_dim` weights).
    pub qk_norm: bool,
    /// A score per query head that takes part in the softmax, without a value (`blk.N.attn_sinks.weight`).
    pub sinks: bool,
    /// RMSNorm on the outputs of attention and feed-forward (`blk.N.post_{attention,ffw}_norm.weight`, `width` weights).
    pub norms_after: bool,
    /// Sliding-window layers, if the family has them.
    pub local: Option<LocalLayers>,
    /// Factor for queries.
    pub attention_scale: f32,
    /// Soft cap of the attention scores.
    pub score_cap: Option<f32>,
    /// Soft cap of the logits.
    pub logit_cap: Option<f32>,
    /// Every layer with this period has no rotary embedding, from layer `period - 1` on.
    pub still_period: Option<usize>,
    /// Whether the output head is tied to the embedding (`token_embd.weight`); otherwise it is `output.weight`.
    pub tied: bool,
    /// The model is made for embeddings: the result is the normalised row of the last token, and there is no output head.
    pub pooled: bool,
}

/// A mixture of experts: each row is computed by a few feed-forward blocks, which a router chooses by its scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that compute a row.
    pub used: usize,
    /// Width of an expert that computes every row, scaled by a gate of its own; `None`: there is none.
    pub shared: Option<usize>,
    /// The factors of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// The router and the matrices of the experts have biases.
    pub biases: bool,
}

/// Sliding-window (local) layers: all but every `period`-th.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalLayers {
    /// Window size: positions that a row attends to, its own included.
    pub window: usize,
    /// Layers `period - 1`, `2 · period - 1` and so on are global.
    pub period: usize,
    /// Rotary embedding of the local layers.
    pub rope: Rope,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Which elements form a pair.
    pub kind: RopeKind,
    /// Base of the geometric series of wavelengths.
    pub base: f32,
    /// Rotated elements per head, the first ones; even, at most `head_dim`.
    pub dims: usize,
    /// Scaling to a longer context.
    pub scaling: RopeScaling,
}

/// Which two elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeKind {
    /// `2i` and `2i + 1`.
    Interleaved,
    /// `i` and `i + dims / 2`.
    Halves,
}

/// Row order of the query and key matrices: GGUF's converter interleaves Llama's halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueryKeyOrder {
    Gguf,
    HuggingFace,
}

/// Scaling of angles beyond the original training context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// None (per-dimension factors of the file may still apply).
    None,
    /// Divides all angles by the factor.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Llama 3: divides wavelengths longer than `original_context / low`, keeps those shorter than `original_context / high`,
    /// with a ramp of frequencies between. (GGUF files store the equivalent factors in a tensor.)
    Llama3 {
        /// Divisor.
        factor: f64,
        /// Original training context.
        original_context: usize,
        /// Dimensions with fewer turns within the original context are divided.
        low: f64,
        /// Dimensions with more turns are kept.
        high: f64,
    },
    /// YaRN: divides long wavelengths, keeps short ones, with a ramp between; scales cosine and sine.
    Yarn {
        /// Divisor.
        factor: f64,
        /// Original training context.
        original_context: usize,
        /// Additional scale of cosine and sine.
        attention_factor: f64,
        /// Dimensions with more turns within the original context are kept.
        beta_fast: f64,
        /// Dimensions with fewer turns are divided.
        beta_slow: f64,
    },
}

/// Costs of a model, in the units of the partitioner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCosts {
    /// In layer order.
    pub layers: Vec<LayerCosts>,
    /// Bytes of the token embedding.
    pub embed_bytes: u64,
    /// Bytes of the final norm and the output head. A tied head counts the embedding's bytes.
    pub head_bytes: u64,
    /// Whether embedding and output head are one matrix.
    pub tied: bool,
    /// Flops per token of the output head.
    pub head_flops: u64,
    /// Bytes of one hidden row.
    pub activation_bytes: u64,
}

/// Costs of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerCosts {
    /// Flops (two per multiply-add) for one token with an empty cache.
    pub flops_per_token: u64,
    /// Bytes in memory, on the device that needs most.
    pub weight_bytes: u64,
    /// Part of these bytes that belongs to experts of which a token uses only some.
    pub expert_bytes: u64,
    /// Bytes of KV cache per position, on the device that needs most.
    pub kv_bytes_per_token: u64,
}

impl Rope {
    /// The embedding without rotation: all angles are zero, which changes no number.
    #[must_use]
    pub fn still(&self) -> Self {
        Self { scaling: RopeScaling::Linear { factor: f64::INFINITY }, ..self.clone() }
    }
}

impl ModelConfig {
    /// Reads and validates the sizes. Values missing from the header are derived from tensor shapes, which `tensor` looks up.
    pub(super) fn read<'a>(
        metadata: &Metadata,
        layout: QueryKeyOrder,
        tensor: impl Fn(&str) -> Option<&'a TensorInfo>,
    ) -> Result<Self, WeightsError> {
        let name = metadata.text("general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
        let architecture = Architecture::parse(name)?;
        let keys = Keys { metadata, prefix: architecture.name() };
        keys.reject_unsupported()?;
        let embedding = tensor("token_embd.weight").ok_or_else(|| missing_tensor("token_embd.weight"))?;
        let width = keys.size("embedding_length", None, WIDTH_MAX)?;
        let heads = keys.size("attention.head_count", None, WIDTH_MAX)?;
        let kv_heads = keys.size("attention.head_count_kv", Some(heads), WIDTH_MAX)?;
        let head_dim = keys.size("attention.key_length", width.checked_div(heads), WIDTH_MAX)?;
        let value_dim = keys.size("attention.value_length", Some(head_dim), WIDTH_MAX)?;
        let experts = keys.experts(architecture, tensor("blk.0.ffn_gate_inp.bias").is_some())?;
        let ffn = match experts {
            None => keys.size("feed_forward_length", None, WIDTH_MAX)?,
            // Mixtral's files have the width under the usual name.
            Some(_) => match keys.optional("expert_feed_forward_length", WIDTH_MAX)? {
                Some(width) => width,
                None => keys.size("feed_forward_length", None, WIDTH_MAX)?,
            },
        };
        let config = Self {
            architecture,
            name: metadata.text("general.name")?.unwrap_or(name).to_owned(),
            layers: keys.size("block_count", None, LAYERS_MAX)?,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn,
            experts,
            vocab: embedding.rows,
            context: keys.context(architecture)?,
            norm_eps: keys.norm_eps()?,
            rope: keys.rope(architecture, layout, head_dim)?,
            attention_bias: tensor("blk.0.attn_q.bias").is_some(),
            attention_output_bias: architecture.has_output_bias() && tensor("blk.0.attn_output.bias").is_some(),
            qk_norm: architecture.has_head_norms(),
            sinks: architecture == Architecture::GptOss,
            norms_after: architecture.is_gemma(),
            local: keys.local(architecture, layout, head_dim)?,
            attention_scale: keys.attention_scale(architecture, width / heads, head_dim)?,
            score_cap: keys.score_cap(architecture)?,
            logit_cap: keys.logit_cap(architecture)?,
            still_period: (architecture == Architecture::SmolLm3).then_some(STILL_PERIOD),
            tied: tensor("output.weight").is_none(),
            pooled: keys.pooled()?,
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(inconsistent("a number of heads that is a multiple of the key heads", &[heads, kv_heads]));
        }
        if value_dim != head_dim {
            return Err(inconsistent("value heads as wide as key heads", &[value_dim, head_dim]));
        }
        if head_dim.checked_mul(heads).is_none_or(|q| q > WIDTH_MAX) {
            return Err(inconsistent("heads that fit the largest width", &[heads, head_dim]));
        }
        if experts.is_some() && !(width.is_multiple_of(tile::ROWS) && ffn.is_multiple_of(tile::ROWS)) {
            let what = format!("widths of the model and its experts in multiples of {}", tile::ROWS);
            return Err(inconsistent(&what, &[width, ffn]));
        }
        if let Some(tokens) = metadata.texts("tokenizer.ggml.tokens")?.map(|t| t.size_hint().1)
            && tokens != Some(config.vocab)
        {
            return Err(inconsistent(
                "one embedding row per token (tokens, rows)",
                &[tokens.unwrap_or_default(), config.vocab],
            ));
        }
        Ok(config)
    }

    /// Combined width of all query heads.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Combined width of all key (or value) heads.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Whether a stage of these layers has the output head.
    #[must_use]
    pub fn has_head(&self, layers: &Range<usize>) -> bool {
        layers.end == self.layers && !self.pooled
    }

    /// Name of the output head's matrix, `[vocab, width]`.
    #[must_use]
    pub fn head_tensor(&self) -> &'static str {
        if self.tied { "token_embd.weight" } else { "output.weight" }
    }

    /// The norm before the feed-forward block, without the `blk.N.` prefix; gpt-oss's files give it another name.
    #[must_use]
    pub fn ffn_norm_tensor(&self) -> &'static str {
        if self.architecture == Architecture::GptOss { "post_attention_norm.weight" } else { "ffn_norm.weight" }
    }

    /// The tensors of one block without their `blk.N.` prefix, with shape `[rows, cols]`.
    #[must_use]
    pub fn block_tensors(&self) -> Vec<(&'static str, [usize; 2])> {
        let Self { width, ffn, head_dim, .. } = *self;
        let (q, kv) = (self.q_width(), self.kv_width());
        let mut tensors = vec![
            ("attn_norm.weight", [1, width]),
            ("attn_q.weight", [q, width]),
            ("attn_k.weight", [kv, width]),
            ("attn_v.weight", [kv, width]),
            ("attn_output.weight", [width, q]),
            (self.ffn_norm_tensor(), [1, width]),
        ];
        match self.experts {
            None => tensors.extend([
                ("ffn_gate.weight", [ffn, width]),
                ("ffn_up.weight", [ffn, width]),
                ("ffn_down.weight", [width, ffn]),
            ]),
            // One expert after another in the rows.
            Some(Experts { count, shared, biases, .. }) => {
                if biases {
                    tensors.extend([
                        ("ffn_gate_inp.bias", [1, count]),
                        ("ffn_gate_exps.bias", [count, ffn]),
                        ("ffn_up_exps.bias", [count, ffn]),
                        ("ffn_down_exps.bias", [count, width]),
                    ]);
                }
                tensors.extend([
                    ("ffn_gate_inp.weight", [count, width]),
                    ("ffn_gate_exps.weight", [count * ffn, width]),
                    ("ffn_up_exps.weight", [count * ffn, width]),
                    ("ffn_down_exps.weight", [count * width, ffn]),
                ]);
                tensors.extend(shared.into_iter().flat_map(|shared| {
                    [
                        (SHARED_GATE, [1, width]),
                        ("ffn_gate_shexp.weight", [shared, width]),
                        ("ffn_up_shexp.weight", [shared, width]),
                        ("ffn_down_shexp.weight", [width, shared]),
                    ]
                }));
            }
        }
        if self.attention_bias {
            tensors.extend([("attn_q.bias", [1, q]), ("attn_k.bias", [1, kv]), ("attn_v.bias", [1, kv])]);
        }
        if self.attention_output_bias {
            tensors.push(("attn_output.bias", [1, width]));
        }
        if self.sinks {
            tensors.push(("attn_sinks.weight", [1, self.heads]));
        }
        if self.qk_norm {
            tensors.extend([("attn_q_norm.weight", [1, head_dim]), ("attn_k_norm.weight", [1, head_dim])]);
        }
        if self.norms_after {
            tensors.extend([("post_attention_norm.weight", [1, width]), ("post_ffw_norm.weight", [1, width])]);
        }
        tensors
    }

    /// Whether a stage of these layers needs the tensor.
    #[must_use]
    pub fn belongs_to(&self, name: &str, layers: &Range<usize>) -> bool {
        let (first, last) = (layers.contains(&0), !layers.is_empty() && layers.end == self.layers);
        match name {
            "token_embd.weight" => first || (last && self.tied && !self.pooled),
            "output.weight" => last && !self.pooled,
            "output_norm.weight" => last,
            ROPE_FACTORS => !layers.is_empty(),
            _ => layer_of(name).is_some_and(|layer| layers.contains(&layer)),
        }
    }

    /// Checks that every tensor of the architecture is present with its shape, and that no other tensor would be silently
    /// ignored.
    pub(super) fn check_tensors(
        &self,
        tensors: &[TensorInfo],
        by_name: &BTreeMap<String, usize>,
    ) -> Result<(), WeightsError> {
        let check = |name: &str, shape: [usize; 2]| {
            let tensor = by_name.get(name).map(|&i| &tensors[i]).ok_or_else(|| missing_tensor(name))?;
            if [tensor.rows, tensor.cols] == shape {
                return Ok(());
            }
            Err(WeightsError::Malformed(format!(
                "tensor {name:?}: expected {shape:?} rows and columns from the sizes in the header, found {:?}",
                [tensor.rows, tensor.cols]
            )))
        };
        check("token_embd.weight", [self.vocab, self.width])?;
        check("output_norm.weight", [1, self.width])?;
        if !self.tied {
            check("output.weight", [self.vocab, self.width])?;
        }
        let block = self.block_tensors();
        for layer in 0..self.layers {
            for (name, shape) in &block {
                check(&format!("blk.{layer}.{name}"), *shape)?;
            }
        }
        for tensor in tensors {
            let known = match tensor.name.as_str() {
                "token_embd.weight" | "output.weight" | "output_norm.weight" | ROPE_FACTORS => true,
                name => layer_of(name).is_some_and(|layer| {
                    layer < self.layers && block.iter().any(|(part, _)| name.ends_with(&format!(".{layer}.{part}")))
                }),
            };
            if !known {
                return Err(WeightsError::Unsupported(format!(
                    "tensor {:?} is not part of a {} model of {} layers; ignoring it would give wrong results",
                    tensor.name,
                    self.architecture.name(),
                    self.layers
                )));
            }
        }
        Ok(())
    }

    pub(super) fn costs(&self, tensors: &[TensorInfo], activations: Activations) -> ModelCosts {
        let (q, kv) = (self.q_width() as u64, self.kv_width() as u64);
        let (width, vocab) = (self.width as u64, self.vocab as u64);
        // Rows of the feed-forward matrices that compute a token.
        let ffn = match self.experts {
            None => 3 * self.ffn,
            Some(experts) => 3 * (experts.used * self.ffn + experts.shared.unwrap_or(0)) + experts.count,
        };
        let layer = LayerCosts {
            flops_per_token: 2 * width * (2 * q + 2 * kv + ffn as u64),
            weight_bytes: 0,
            expert_bytes: 0,
            kv_bytes_per_token: position_bytes(self.kv_heads, self.head_dim, activations) as u64,
        };
        let mut costs = ModelCosts {
            layers: vec![layer; self.layers],
            embed_bytes: 0,
            head_bytes: 0,
            tied: self.tied && !self.pooled,
            head_flops: if self.pooled { 0 } else { 2 * width * vocab },
            activation_bytes: width * ACTIVATION_ELEMENT_BYTES,
        };
        for tensor in tensors {
            let bytes = resident_bytes(tensor);
            match tensor.name.as_str() {
                "token_embd.weight" => costs.embed_bytes += bytes,
                "output.weight" if self.pooled => {}
                "output.weight" | "output_norm.weight" => costs.head_bytes += bytes,
                name => {
                    if let Some(layer) = layer_of(name).and_then(|l| costs.layers.get_mut(l)) {
                        layer.weight_bytes += bytes;
                        layer.expert_bytes += if name.ends_with("_exps.weight") { bytes } else { 0 };
                    }
                }
            }
        }
        if costs.tied {
            costs.head_bytes += costs.embed_bytes;
        }
        costs
    }
}

/// Bytes of a tensor in memory: a matrix as tiles, a vector as f32.
fn resident_bytes(tensor: &TensorInfo) -> u64 {
    if is_vector(&tensor.name, tensor.rows) {
        return (tensor.rows * tensor.cols * size_of::<f32>()) as u64;
    }
    tile::Layout::of(tensor.quant).matrix_bytes(tensor.rows, tensor.cols) as u64
}

/// Whether engines keep a tensor as numbers, not as tiles: norms, biases, sinks and factors.
pub(crate) fn is_vector(name: &str, rows: usize) -> bool {
    (rows == 1 && !name.ends_with(SHARED_GATE)) || name.ends_with(".bias")
}

/// The block that a tensor belongs to, `blk.N.…`.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    let (number, _) = name.strip_prefix("blk.")?.split_once('.')?;
    // Only the canonical spelling counts: "07" is not layer 7.
    number.parse().ok().filter(|n: &usize| n.to_string() == number)
}

fn missing(key: &str) -> WeightsError {
    WeightsError::Malformed(format!("metadata key {key:?} is missing"))
}

fn missing_tensor(name: &str) -> WeightsError {
    WeightsError::Malformed(format!("tensor {name:?} is missing"))
}

fn inconsistent(expected: &str, found: &[usize]) -> WeightsError {
    WeightsError::Malformed(format!("expected {expected}, found {found:?}"))
}

#[cfg(test)]
mod tests;
