//! Model configuration: sizes, rotary embedding, the tensors an architecture requires, and the cost of each part.
use std::ops::Range;

use kernels::order::experts::{Gating, Routing};
use kernels::tile;

use super::error::WeightsError;
use super::metadata::Metadata;
use super::tensor::TensorInfo;
use crate::kv_cache::position_bytes;
use crate::stage::Activations;

mod frequencies;
mod keys;
mod tensors;

pub use frequencies::RotaryFrequencies;
pub(crate) use tensors::CORRECTIONS;
pub(super) use tensors::{ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT};

use keys::Keys;
pub(crate) use tensors::layer_of;
use tensors::{SHARED_GATE, missing_tensor};

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
/// SmolLM3 (Hugging Face, "SmolLM3", 2025) and Llama 4 rotate in three of four layers; their files do not say so.
const STILL_PERIOD: usize = 4;
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
    /// Phi-3 and Phi-4: rotary embedding on halves, with factors that depend on the context; all layers may use a sliding window.
    /// Files have query, key and value in one matrix, and gate and up in another.
    Phi3,
    /// GLM-4.5: experts chosen by sigmoids with corrections, and a shared one, from the second layer on; rotary embedding on halves of
    /// a part of each head.
    Glm4Moe,
    /// Llama 4 (its text part): in three of four layers rotary embedding and attention within chunks, in the others attention to all
    /// positions with a temperature. Experts in all or every other layer, whose factor applies to their input, and a shared one.
    Llama4,
    /// Ministral 3: as `Llama`; attention has a temperature that depends on the position.
    Mistral3,
}

impl Architecture {
    /// All supported families.
    pub const ALL: [Self; 13] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen2Moe,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Gemma2,
        Self::Gemma3,
        Self::SmolLm3,
        Self::GptOss,
        Self::Phi3,
        Self::Glm4Moe,
        Self::Llama4,
        Self::Mistral3,
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
            Self::Phi3 => "phi3",
            Self::Glm4Moe => "glm4moe",
            Self::Llama4 => "llama4",
            Self::Mistral3 => "mistral3",
        }
    }

    /// Whether the feed-forward is GeGLU, the embedding is scaled, and blocks are followed by a norm.
    pub(crate) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Whether windows are those of the model's layers, and no bound of its context.
    fn has_windows(self) -> bool {
        self.is_gemma() || matches!(self, Self::GptOss | Self::Phi3 | Self::Llama4)
    }

    /// Whether query and key heads are always normalised with weights.
    fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe | Self::Gemma3)
    }

    /// The reference implementations of Qwen2 and GLM-4.5 have biases on query, key and value only.
    fn has_output_bias(self) -> bool {
        !matches!(self, Self::Qwen2 | Self::Qwen2Moe | Self::Glm4Moe)
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
    /// Width of the feed-forward block in layers without experts; that of an expert if all layers have some.
    pub ffn: usize,
    /// The experts that take the place of the feed-forward block in all or some layers.
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
    /// RMSNorm on each query and key head.
    pub head_norms: Option<HeadNorms>,
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
    /// Attention temperature: in the layers of `still_period`, else in all.
    pub temperature: Option<Temperature>,
    /// Further blocks at the end of the file, which predict later tokens and are not used.
    pub predictors: usize,
    /// Whether the output head is tied to the embedding (`token_embd.weight`); otherwise it is `output.weight`.
    pub tied: bool,
    /// The model is made for embeddings: the result is the normalised row of the last token, and there is no output head.
    pub pooled: bool,
}

/// A mixture of experts: each row is computed by a few feed-forward blocks, which a router chooses by its scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that compute a row.
    pub used: usize,
    /// Width of an expert.
    pub width: usize,
    /// An expert that computes every row.
    pub shared: Option<SharedExpert>,
    /// What makes factors of scores.
    pub gating: Gating,
    /// Experts are chosen by the sums of their factors and of corrections (`blk.N.exp_probs_b.bias`).
    pub corrected: bool,
    /// The factors of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Multiplies all factors.
    pub scale: f32,
    /// The factors apply to the input of an expert, not to its output.
    pub on_input: bool,
    /// The router and the matrices of the experts have biases.
    pub biases: bool,
    /// Layers before this one have no experts.
    pub first: usize,
    /// Of the others, those with this period have experts: layers `period - 1`, `2 · period - 1` and so on.
    pub period: usize,
}

impl Experts {
    /// Whether a layer has experts.
    #[must_use]
    pub fn in_layer(&self, layer: usize) -> bool {
        layer >= self.first && (layer + 1).is_multiple_of(self.period)
    }

    /// How the router chooses.
    #[must_use]
    pub fn routing(&self) -> Routing {
        Routing { used: self.used, gating: self.gating, normalised: self.normalised, scale: self.scale }
    }
}

/// An expert that computes every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its width.
    pub width: usize,
    /// Whether its output is multiplied by the sigmoid of a score of its own.
    pub gated: bool,
}

/// RMSNorm on each query and key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadNorms {
    /// Before the rotation, with `head_dim` weights (`blk.N.attn_{q,k}_norm.weight`).
    Weighted,
    /// Without weights, in layers with rotary embedding. A rotation changes no norm, so it may come before or after.
    Plain,
}

/// A factor of queries that grows with the position: 1 + scale · ln(1 + ⌊(position + offset) / every⌋) (Nakanishi, "Scalable-Softmax",
/// arXiv 2501.19399, as in the reference implementations of Llama 4 and Ministral 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Factor of the logarithm.
    pub scale: f64,
    /// Positions with one factor.
    pub every: usize,
    /// Added to the position.
    pub offset: usize,
}

/// The positions up to its own that a row attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// That many, its own included.
    Sliding(usize),
    /// Those of its chunk; chunks have that many and begin at position 0.
    Chunk(usize),
}

impl Window {
    /// Most positions that a row attends to.
    #[must_use]
    pub fn positions(self) -> usize {
        match self {
            Self::Sliding(positions) | Self::Chunk(positions) => positions,
        }
    }

    /// First position that the row at `position` attends to.
    #[must_use]
    pub fn first(self, position: usize) -> usize {
        match self {
            Self::Sliding(positions) => (position + 1).saturating_sub(positions),
            Self::Chunk(positions) => position / positions * positions,
        }
    }
}

/// Layers with a window (local ones): all but every `period`-th.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalLayers {
    /// The positions that a row attends to.
    pub window: Window,
    /// Layers `period - 1`, `2 · period - 1` and so on are global; `None`: no layer is.
    pub period: Option<usize>,
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
    /// LongRoPE (Ding et al., arXiv 2402.13753): divides frequencies by factors of the file, of which there is one set for contexts up
    /// to the original one and another for longer ones; scales cosine and sine.
    Long {
        /// Original training context.
        original_context: usize,
        /// Scale of cosine and sine.
        attention_factor: f64,
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
            Some(experts) if experts.first == 0 && experts.period == 1 => experts.width,
            Some(_) | None => keys.size("feed_forward_length", None, WIDTH_MAX)?,
        };
        let predictors = keys.predictors(architecture)?;
        let long = architecture == Architecture::Phi3 && tensor(ROPE_FACTORS_LONG).is_some();
        let rope = keys.rope(architecture, layout, head_dim, long)?;
        let config = Self {
            architecture,
            name: metadata.text("general.name")?.unwrap_or(name).to_owned(),
            layers: keys.layers(predictors)?,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn,
            experts,
            vocab: embedding.rows,
            context: keys.context(architecture)?,
            norm_eps: keys.norm_eps()?,
            local: keys.local(architecture, &rope)?,
            temperature: keys.temperature(architecture)?,
            rope,
            predictors,
            attention_bias: tensor("blk.0.attn_q.bias").is_some(),
            attention_output_bias: architecture.has_output_bias() && tensor("blk.0.attn_output.bias").is_some(),
            head_norms: if architecture == Architecture::Llama4 {
                // Of two published sizes, the one with 128 experts has none; files do not say so.
                experts.filter(|experts| experts.count != 128).map(|_| HeadNorms::Plain)
            } else {
                let given = architecture == Architecture::Glm4Moe && tensor("blk.0.attn_q_norm.weight").is_some();
                (given || architecture.has_head_norms()).then_some(HeadNorms::Weighted)
            },
            sinks: architecture == Architecture::GptOss,
            norms_after: architecture.is_gemma(),
            attention_scale: keys.attention_scale(architecture, width / heads, head_dim)?,
            score_cap: keys.score_cap(architecture)?,
            logit_cap: keys.logit_cap(architecture)?,
            still_period: matches!(architecture, Architecture::SmolLm3 | Architecture::Llama4).then_some(STILL_PERIOD),
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
        if let Some(experts) = experts
            && !(width.is_multiple_of(tile::ROWS) && experts.width.is_multiple_of(tile::ROWS))
        {
            let what = format!("widths of the model and its experts in multiples of {}", tile::ROWS);
            return Err(inconsistent(&what, &[width, experts.width]));
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

    pub(super) fn costs(&self, tensors: &[TensorInfo], activations: Activations) -> ModelCosts {
        let (q, kv) = (self.q_width() as u64, self.kv_width() as u64);
        let (width, vocab) = (self.width as u64, self.vocab as u64);
        let layer = |layer: usize| {
            // Rows of the feed-forward matrices that compute a token.
            let ffn = match self.experts_of(layer) {
                None => 3 * self.ffn,
                Some(experts) => {
                    let shared = experts.shared.map_or(0, |shared| shared.width);
                    3 * (experts.used * experts.width + shared) + experts.count
                }
            };
            LayerCosts {
                flops_per_token: 2 * width * (2 * q + 2 * kv + ffn as u64),
                weight_bytes: 0,
                expert_bytes: 0,
                kv_bytes_per_token: position_bytes(self.kv_heads, self.head_dim, activations) as u64,
            }
        };
        let mut costs = ModelCosts {
            layers: (0..self.layers).map(layer).collect(),
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

fn missing(key: &str) -> WeightsError {
    WeightsError::Malformed(format!("metadata key {key:?} is missing"))
}

fn inconsistent(expected: &str, found: &[usize]) -> WeightsError {
    WeightsError::Malformed(format!("expected {expected}, found {found:?}"))
}

#[cfg(test)]
mod tests;
