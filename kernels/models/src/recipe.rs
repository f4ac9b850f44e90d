//! What a decoder computes, as data: one recipe per layer, which every engine reads.
//!
//! A layer is a pre-norm attention block and a pre-norm gated feed-forward block or mixture of such, each added to the residual
//! stream. All differences between model families are expressed here. Next: `model.rs` for the CPU engine.
use kernels::order::Activation;

use crate::weights::{Architecture, Experts, HeadNorms, ModelConfig, Rope, Temperature, Window};

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Factor for embedding rows; `None`: not scaled.
    pub embed_scale: Option<f32>,
    /// In order, from layer 0.
    pub layers: Vec<LayerRecipe>,
    /// Soft cap of the logits ([`kernels::order::soft_cap`]).
    pub logit_cap: Option<f32>,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRecipe {
    /// RMSNorm of each head of query and key.
    pub head_norms: Option<HeadNorms>,
    /// Biases on query, key and value.
    pub biases: bool,
    /// A bias on the attention output projection.
    pub output_bias: bool,
    /// RMSNorm of the attention and feed-forward outputs, before the residual addition (`post_attention_norm`,
    /// `post_ffw_norm`).
    pub norms_after: bool,
    /// Positions that a row attends to. `None`: all positions up to its own.
    pub window: Option<Window>,
    /// Rotary embedding of queries and keys. All layers of a model rotate the same elements.
    pub rope: Rope,
    /// Factor for queries after rotation.
    pub scale: f32,
    /// A further one, which depends on the position.
    pub temperature: Option<Temperature>,
    /// Soft cap of the attention scores.
    pub score_cap: Option<f32>,
    /// Each query head has a score that takes part in the softmax, without a value (`attn_sinks`).
    pub sinks: bool,
    /// Tensor of the norm before the feed-forward block.
    pub ffn_norm: &'static str,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Experts in place of the feed-forward block.
    pub experts: Option<Experts>,
}

impl Recipe {
    /// Derives the recipe of a model from its configuration.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Self {
        let gemma = config.architecture.is_gemma();
        let layer = |index: usize| {
            let is_global = |period: Option<usize>| period.is_some_and(|period| (index + 1).is_multiple_of(period));
            let local = config.local.as_ref().filter(|local| !is_global(local.period));
            let is_still = config.still_period.is_some_and(|period| (index + 1).is_multiple_of(period));
            let rope = local.map_or(&config.rope, |local| &local.rope);
            LayerRecipe {
                head_norms: config.head_norms.filter(|norms| *norms == HeadNorms::Weighted || !is_still),
                biases: config.attention_bias,
                output_bias: config.attention_output_bias,
                norms_after: config.norms_after,
                window: local.map(|local| local.window),
                rope: if is_still { rope.still() } else { rope.clone() },
                scale: config.attention_scale,
                temperature: config.temperature.filter(|_| is_still || config.still_period.is_none()),
                score_cap: config.score_cap,
                sinks: config.sinks,
                ffn_norm: config.ffn_norm_tensor(),
                experts: config.experts_of(index),
                activation: match config.architecture {
                    Architecture::Gemma2 | Architecture::Gemma3 => Activation::Gelu,
                    Architecture::GptOss => Activation::Clamped,
                    Architecture::Llama
                    | Architecture::Qwen2
                    | Architecture::Qwen2Moe
                    | Architecture::Qwen3
                    | Architecture::Qwen3Moe
                    | Architecture::SmolLm3
                    | Architecture::Phi3
                    | Architecture::Glm4Moe
                    | Architecture::Llama4
                    | Architecture::Mistral3 => Activation::Silu,
                },
            }
        };
        Self {
            embed_scale: gemma.then(|| (config.width as f32).sqrt()),
            layers: (0..config.layers).map(layer).collect(),
            logit_cap: config.logit_cap,
        }
    }
}
