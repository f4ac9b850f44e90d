//! Reads a model's options from the keys of its architecture, with the defaults of files that lack them.
use std::ops::Range;

use kernels::order::experts::{EXPERTS_MAX, Gating, USED_MAX};

use super::{
    Architecture, CONTEXT_MAX, Experts, LAYERS_MAX, LocalLayers, QueryKeyOrder, ROPE_BASES, ROPE_FACTORS, Rope,
    RopeKind, RopeScaling, STILL_PERIOD, SharedExpert, Temperature, WIDTH_MAX, Window, inconsistent, missing,
};
use crate::weights::error::WeightsError;
use crate::weights::metadata::Metadata;

/// Metadata under an architecture's prefix.
pub(super) struct Keys<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) prefix: &'static str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(super) fn size(&self, name: &str, default: Option<usize>, max: usize) -> Result<usize, WeightsError> {
        let key = self.key(name);
        let value = match self.metadata.unsigned(&key)? {
            Some(value) => usize::try_from(value).unwrap_or(usize::MAX),
            None => default.ok_or_else(|| missing(&key))?,
        };
        if value == 0 || value > max {
            return Err(WeightsError::Malformed(format!("{key}: expected 1 to {max}, found {value}")));
        }
        Ok(value)
    }

    /// As [`Self::size`], `None` if the key is missing.
    pub(super) fn optional(&self, name: &str, max: usize) -> Result<Option<usize>, WeightsError> {
        let given = self.metadata.unsigned(&self.key(name))?;
        given.map(|_| self.size(name, None, max)).transpose()
    }

    fn float(&self, name: &str, default: Option<f64>, range: Range<f64>) -> Result<f64, WeightsError> {
        let key = self.key(name);
        let value = self.metadata.float(&key)?.or(default).ok_or_else(|| missing(&key))?;
        if !range.contains(&value) {
            return Err(WeightsError::Malformed(format!("{key}: expected a number in {range:?}, found {value}")));
        }
        Ok(value)
    }

    /// Rejects options that change the arithmetic in unsupported ways.
    pub(super) fn reject_unsupported(&self) -> Result<(), WeightsError> {
        let reject = |key: &str, what: &str| {
            Err(WeightsError::Unsupported(format!("{}: {what} is not supported", self.key(key))))
        };
        if self.metadata.bool(&self.key("attention.causal"))? == Some(false) {
            return reject("attention.causal", "attention to later positions");
        }
        for key in ["attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale"] {
            if self.metadata.float(&self.key(key))?.unwrap_or(0.0) != 0.0 {
                return reject(key, "this option");
            }
        }
        Ok(())
    }

    /// Blocks that compute a token: all but the predictors at the end.
    pub(super) fn layers(&self, predictors: usize) -> Result<usize, WeightsError> {
        let all = self.size("block_count", None, LAYERS_MAX)?;
        match all.checked_sub(predictors) {
            None | Some(0) => Err(inconsistent("more blocks than those that predict later tokens", &[all, predictors])),
            Some(layers) => Ok(layers),
        }
    }

    /// GLM-4.5's files end with blocks that predict later tokens.
    pub(super) fn predictors(&self, architecture: Architecture) -> Result<usize, WeightsError> {
        let given = self.metadata.unsigned(&self.key("nextn_predict_layers"))?.unwrap_or(0);
        if given == 0 || architecture == Architecture::Glm4Moe {
            return Ok(usize::try_from(given).unwrap_or(usize::MAX));
        }
        let (key, name) = (self.key("nextn_predict_layers"), architecture.name());
        Err(WeightsError::Unsupported(format!("{key}: expected none in a {name} model, found {given}")))
    }

    pub(super) fn experts(&self, architecture: Architecture, biases: bool) -> Result<Option<Experts>, WeightsError> {
        // Llama's files may say that there are none.
        let none = self.metadata.unsigned(&self.key("expert_count"))?.unwrap_or(0) == 0;
        match architecture {
            Architecture::Qwen2Moe
            | Architecture::Qwen3Moe
            | Architecture::GptOss
            | Architecture::Glm4Moe
            | Architecture::Llama4 => {}
            Architecture::Llama | Architecture::Mistral3 if !none => {}
            Architecture::Llama
            | Architecture::Mistral3
            | Architecture::Qwen2
            | Architecture::Qwen3
            | Architecture::Gemma2
            | Architecture::Gemma3
            | Architecture::SmolLm3
            | Architecture::Phi3
                if none =>
            {
                return Ok(None);
            }
            Architecture::Llama
            | Architecture::Mistral3
            | Architecture::Qwen2
            | Architecture::Qwen3
            | Architecture::Gemma2
            | Architecture::Gemma3
            | Architecture::SmolLm3
            | Architecture::Phi3 => {
                let (key, name) = (self.key("expert_count"), architecture.name());
                return Err(WeightsError::Unsupported(format!("{key}: expected no experts in a {name} model")));
            }
        }
        let count = self.size("expert_count", None, EXPERTS_MAX)?;
        let used = self.size("expert_used_count", None, USED_MAX.min(count))?;
        // Mixtral's files have the width under the usual name.
        let width = match self.optional("expert_feed_forward_length", WIDTH_MAX)? {
            Some(width) => width,
            None => self.size("feed_forward_length", None, WIDTH_MAX)?,
        };
        let llama4 = architecture == Architecture::Llama4;
        let glm = architecture == Architecture::Glm4Moe;
        let shared = if architecture == Architecture::Qwen2Moe {
            let width = self.size("expert_shared_feed_forward_length", None, WIDTH_MAX)?;
            Some(SharedExpert { width, gated: true })
        } else if glm && self.metadata.unsigned(&self.key("expert_shared_count"))?.unwrap_or(0) > 0 {
            // They are stored as one.
            let width = self.size("expert_shared_count", None, WIDTH_MAX / width)? * width;
            Some(SharedExpert { width, gated: false })
        } else {
            llama4.then_some(SharedExpert { width, gated: false })
        };
        let gating = self.gating(architecture)?;
        let usual = !matches!(architecture, Architecture::Qwen2Moe | Architecture::Llama4);
        let normalised = self.metadata.bool(&self.key("expert_weights_norm"))?.unwrap_or(usual);
        // Some files say 0 where there is none.
        let scale = match self.float("expert_weights_scale", Some(1.0), 0.0..1e6)? as f32 {
            0.0 => 1.0,
            scale => scale,
        };
        let first = match self.metadata.unsigned(&self.key("leading_dense_block_count"))?.unwrap_or(0) {
            0 => 0,
            _ if glm => self.size("leading_dense_block_count", None, LAYERS_MAX)?,
            _ => {
                let key = self.key("leading_dense_block_count");
                return Err(WeightsError::Unsupported(format!("{key}: expected experts in every layer")));
            }
        };
        let period = if llama4 { self.size("interleave_moe_layer_step", Some(1), LAYERS_MAX)? } else { 1 };
        Ok(Some(Experts {
            count,
            used,
            width,
            shared,
            gating,
            corrected: glm,
            normalised,
            scale,
            on_input: llama4,
            biases,
            first,
            period,
        }))
    }

    /// `expert_gating_func` is `llama_expert_gating_func_type` of llama.cpp: 1 a softmax, 2 a sigmoid, 3 the softmax of the chosen
    /// scores, which is the softmax of all, normalised.
    fn gating(&self, architecture: Architecture) -> Result<Gating, WeightsError> {
        let (usual, gating) = if matches!(architecture, Architecture::Glm4Moe | Architecture::Llama4) {
            (2, Gating::Sigmoid)
        } else {
            (if architecture == Architecture::GptOss { 3 } else { 1 }, Gating::Softmax)
        };
        let key = self.key("expert_gating_func");
        match self.metadata.unsigned(&key)?.unwrap_or(0) {
            0 => Ok(gating),
            given if given == usual || (given == 1 && gating == Gating::Softmax) => Ok(gating),
            other => Err(WeightsError::Unsupported(format!(
                "{key}: expected {usual}, found {other}, which is another router than that of {}",
                architecture.name()
            ))),
        }
    }

    /// Files of Ministral 3 give the factor. Llama 4's do not; the values are those of its reference implementation.
    pub(super) fn temperature(&self, architecture: Architecture) -> Result<Option<Temperature>, WeightsError> {
        let llama4 = architecture == Architecture::Llama4;
        if !llama4 && architecture != Architecture::Mistral3 {
            return Ok(None);
        }
        let (usual, offset) = if llama4 { (0.1, 1) } else { (0.0, 0) };
        let scale = self.float("attention.temperature_scale", Some(usual), 0.0..1e3)?;
        if scale == 0.0 {
            return Ok(None);
        }
        let every = if llama4 {
            self.size("attention.temperature_length", Some(8192), CONTEXT_MAX)?
        } else {
            self.size("rope.scaling.original_context_length", None, CONTEXT_MAX)?
        };
        Ok(Some(Temperature { scale, every, offset }))
    }

    /// `pooling_type` is `llama_pooling_type` of llama.cpp's `llama.h`: 0 none, 1 mean, 2 first token, 3 last token, 4 rank.
    pub(super) fn pooled(&self) -> Result<bool, WeightsError> {
        match self.metadata.unsigned(&self.key("pooling_type"))?.unwrap_or(0) {
            0 => Ok(false),
            3 => Ok(true),
            other => Err(WeightsError::Unsupported(format!(
                "{}: expected 0 (none) or 3 (the last token), found {other}",
                self.key("pooling_type")
            ))),
        }
    }

    /// A sliding window on all layers limits the context: within one window it equals full attention.
    pub(super) fn context(&self, architecture: Architecture) -> Result<usize, WeightsError> {
        let context = self.size("context_length", None, CONTEXT_MAX)?;
        let window = self.metadata.unsigned(&self.key("attention.sliding_window"))?.unwrap_or(0);
        let all_layers = window > 0 && !architecture.has_windows();
        Ok(if all_layers { context.min(usize::try_from(window).unwrap_or(context)) } else { context })
    }

    /// Gemma 3 (technical report, section 2.1): five local layers per global one; local layers use the RoPE base of the
    /// family's earlier models. Files specify only the window.
    pub(super) fn local(&self, architecture: Architecture, rope: &Rope) -> Result<Option<LocalLayers>, WeightsError> {
        let sliding = "attention.sliding_window";
        let (window, period, rope) = match architecture {
            Architecture::Gemma3 => {
                let window = self.size(sliding, None, CONTEXT_MAX)?;
                let period = self.size("attention.sliding_window_pattern", Some(6), LAYERS_MAX)?;
                let base = self.float("rope.freq_base_swa", Some(10_000.0), ROPE_BASES)? as f32;
                let rope = Rope { base, scaling: RopeScaling::None, ..rope.clone() };
                (Window::Sliding(window), Some(period), rope)
            }
            // Technical report of Gemma 2, section 2: local and global layers alternate, the first one is local.
            Architecture::Gemma2 => {
                (Window::Sliding(self.size(sliding, Some(4096), CONTEXT_MAX)?), Some(2), rope.clone())
            }
            // Model card of gpt-oss, 2025: banded and full attention alternate, the first layer is banded.
            Architecture::GptOss => {
                (Window::Sliding(self.size(sliding, Some(128), CONTEXT_MAX)?), Some(2), rope.clone())
            }
            // Files of Phi-4 say 0 where there is none.
            Architecture::Phi3 if self.metadata.unsigned(&self.key(sliding))?.unwrap_or(0) == 0 => return Ok(None),
            Architecture::Phi3 => (Window::Sliding(self.size(sliding, None, CONTEXT_MAX)?), None, rope.clone()),
            Architecture::Llama4 => {
                if self.metadata.unsigned(&self.key(sliding))? == Some(0) {
                    let key = self.key(sliding);
                    return Err(WeightsError::Unsupported(format!(
                        "{key}: expected attention within chunks, found 0 (none)"
                    )));
                }
                let chunk = self.size("attention.chunk_size", Some(8192), CONTEXT_MAX)?;
                (Window::Chunk(chunk), Some(STILL_PERIOD), rope.clone())
            }
            Architecture::Llama
            | Architecture::Qwen2
            | Architecture::Qwen2Moe
            | Architecture::Qwen3
            | Architecture::Qwen3Moe
            | Architecture::SmolLm3
            | Architecture::Glm4Moe
            | Architecture::Mistral3 => return Ok(None),
        };
        Ok(Some(LocalLayers { window, period, rope }))
    }

    /// 1 / √(elements per head). The largest models of Gemma 2 and 3 use width / heads instead; their files do not record that, so
    /// they are recognised by their layers.
    pub(super) fn attention_scale(
        &self,
        architecture: Architecture,
        width_per_head: usize,
        head_dim: usize,
    ) -> Result<f32, WeightsError> {
        const LARGEST: [(Architecture, usize); 2] = [(Architecture::Gemma2, 46), (Architecture::Gemma3, 62)];
        let largest = LARGEST.contains(&(architecture, self.size("block_count", None, LAYERS_MAX)?));
        let usual = 1.0 / (if largest { width_per_head } else { head_dim } as f32).sqrt();
        // A zero means that the scale is not specified.
        let given = self.float("attention.scale", Some(0.0), 0.0..1e3)? as f32;
        Ok(if given == 0.0 { usual } else { given })
    }

    pub(super) fn logit_cap(&self, architecture: Architecture) -> Result<Option<f32>, WeightsError> {
        self.cap("final_logit_softcapping", if architecture == Architecture::Gemma2 { 30.0 } else { 0.0 })
            .map(|cap| cap.filter(|_| architecture.is_gemma()))
    }

    pub(super) fn score_cap(&self, architecture: Architecture) -> Result<Option<f32>, WeightsError> {
        let key = "attn_logit_softcapping";
        let cap = self.cap(key, if architecture == Architecture::Gemma2 { 50.0 } else { 0.0 })?;
        if cap.is_some() && architecture != Architecture::Gemma2 {
            return Err(WeightsError::Unsupported(format!("{}: this option is not supported", self.key(key))));
        }
        Ok(cap)
    }

    /// A soft cap; 0 means that there is none.
    fn cap(&self, key: &str, usual: f64) -> Result<Option<f32>, WeightsError> {
        match self.metadata.float(&self.key(key))?.unwrap_or(usual) {
            0.0 => Ok(None),
            _ => Ok(Some(self.float(key, Some(usual), 1e-3..1e6)? as f32)),
        }
    }

    pub(super) fn norm_eps(&self) -> Result<f32, WeightsError> {
        Ok(self.float("attention.layer_norm_rms_epsilon", None, 0.0..1.0)? as f32)
    }

    pub(super) fn rope(
        &self,
        architecture: Architecture,
        layout: QueryKeyOrder,
        head_dim: usize,
        long: bool,
    ) -> Result<Rope, WeightsError> {
        let usual = if architecture == Architecture::Gemma3 { 1e6 } else { 10_000.0 };
        let base = self.float("rope.freq_base", Some(usual), ROPE_BASES)? as f32;
        let dims = self.size("rope.dimension_count", Some(head_dim), head_dim)?;
        if dims % 2 == 1 {
            return Err(inconsistent("an even number of rotary dimensions", &[dims]));
        }
        let kind = match (architecture, layout) {
            (Architecture::Llama | Architecture::SmolLm3 | Architecture::Mistral3, QueryKeyOrder::Gguf)
            | (Architecture::Llama4, _) => RopeKind::Interleaved,
            (
                Architecture::Llama
                | Architecture::Qwen2
                | Architecture::Qwen2Moe
                | Architecture::Qwen3
                | Architecture::Qwen3Moe
                | Architecture::Gemma2
                | Architecture::Gemma3
                | Architecture::SmolLm3
                | Architecture::GptOss
                | Architecture::Phi3
                | Architecture::Glm4Moe
                | Architecture::Mistral3,
                _,
            ) => RopeKind::Halves,
        };
        Ok(Rope { kind, base, dims, scaling: self.rope_scaling(architecture, long)? })
    }

    /// `long`: the file has factors of LongRoPE.
    fn rope_scaling(&self, architecture: Architecture, long: bool) -> Result<RopeScaling, WeightsError> {
        let factors = 1e-3..1e6;
        let legacy = self.float("rope.scale_linear", Some(1.0), factors.clone())?;
        let factor = self.float("rope.scaling.factor", Some(legacy), factors.clone())?;
        // Files with factors of LongRoPE need not say so.
        let default = match (long, factor) {
            (true, _) => "longrope",
            (false, 1.0) => "none",
            (false, _) => "linear",
        };
        match self.metadata.text(&self.key("rope.scaling.type"))?.unwrap_or(default) {
            "none" => Ok(RopeScaling::None),
            "linear" if factor == 1.0 => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor }),
            "longrope" if long => {
                let context = self.size("context_length", None, CONTEXT_MAX)?;
                Ok(RopeScaling::Long {
                    original_context: self.size("rope.scaling.original_context_length", Some(context), CONTEXT_MAX)?,
                    attention_factor: self.float("rope.scaling.attn_factor", Some(1.0), factors)?,
                })
            }
            "yarn" => {
                // Ministral 3 divides the scale of cosine and sine by a second one.
                let mistral = architecture == Architecture::Mistral3;
                let log = self.float("rope.scaling.yarn_log_multiplier", Some(0.0), 0.0..1e3)?;
                let log = if mistral { log } else { 0.0 };
                let divisor = 1.0 + 0.1 * log * factor.max(1.0).ln();
                let context = self.size("context_length", None, CONTEXT_MAX)?;
                Ok(RopeScaling::Yarn {
                    factor,
                    original_context: self.size("rope.scaling.original_context_length", Some(context), CONTEXT_MAX)?,
                    attention_factor: self.float("rope.scaling.attn_factor", Some(1.0), factors)? / divisor,
                    beta_fast: self.float("rope.scaling.yarn_beta_fast", Some(32.0), 1e-3..1e6)?,
                    beta_slow: self.float("rope.scaling.yarn_beta_slow", Some(1.0), 1e-3..1e6)?,
                })
            }
            "llama3" => {
                let low = self.float("rope.scaling.low_freq_factor", Some(1.0), 1e-3..1e6)?;
                Ok(RopeScaling::Llama3 {
                    factor,
                    original_context: self.size("rope.scaling.original_context_length", Some(8192), CONTEXT_MAX)?,
                    low,
                    high: self.float("rope.scaling.high_freq_factor", Some(4.0), low + 1e-6..1e7)?,
                })
            }
            other => Err(WeightsError::Unsupported(format!(
                "{}: {other:?} is not supported; supported: none, linear, llama3, yarn, longrope in a phi3 model, \
                 and factors in {ROPE_FACTORS}",
                self.key("rope.scaling.type")
            ))),
        }
    }
}
