//! What a decoder computes, as data: one recipe for each layer, which every engine reads.
//!
//! A layer is a pre-normed attention and a pre-normed gated feed-forward, each added to the residual stream; what differs between
//! families of models is said here and nowhere else. Next: `model.rs` for the processor's engine.
use crate::order::Activation;
use crate::weights::{Architecture, ModelConfig, Rope};

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// What embedding rows are multiplied by; `None`: they are taken as they are.
    pub embed_scale: Option<f32>,
    /// First to last.
    pub layers: Vec<LayerRecipe>,
    /// Soft cap of the logits ([`crate::order::soft_cap`]).
    pub logit_cap: Option<f32>,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRecipe {
    /// RMSNorm of each head of query and key, before rotation (`attn_q_norm`, `attn_k_norm`).
    pub head_norms: bool,
    /// Biases on query, key and value.
    pub biases: bool,
    /// A bias on what attention gives.
    pub output_bias: bool,
    /// RMSNorm of what attention and feed-forward give, before it is added to the stream (`post_attention_norm`,
    /// `post_ffw_norm`).
    pub norms_after: bool,
    /// Positions that a row sees, its own included; `None`: all up to its own.
    pub window: Option<usize>,
    /// How queries and keys are turned. All layers of a model turn the same elements.
    pub rope: Rope,
    /// What queries are multiplied by after rotation.
    pub scale: f32,
    /// Soft cap of the scores.
    pub score_cap: Option<f32>,
    /// What the gate of the feed-forward goes through.
    pub activation: Activation,
}

impl Recipe {
    /// The recipe of a model.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Self {
        let gemma = config.architecture == Architecture::Gemma3;
        let layer = |index: usize| {
            let local = config.local.as_ref().filter(|local| !(index + 1).is_multiple_of(local.period));
            LayerRecipe {
                head_norms: config.qk_norm,
                biases: config.attention_bias,
                output_bias: config.attention_output_bias,
                norms_after: config.norms_after,
                window: local.map(|local| local.window),
                rope: local.map_or(&config.rope, |local| &local.rope).clone(),
                scale: config.attention_scale,
                score_cap: None,
                activation: if gemma { Activation::Gelu } else { Activation::Silu },
            }
        };
        Self {
            embed_scale: gemma.then(|| (config.width as f32).sqrt()),
            layers: (0..config.layers).map(layer).collect(),
            logit_cap: config.logit_cap,
        }
    }
}
