//! Options of `config.json` that only some families have: rotary scaling, experts, attention temperature, and stored formats.
use serde_json::Value as Json;

use super::{Builder, WeightsError, malformed};
use crate::weights::metadata::Value;

/// Rejects weights in formats of quantisation tools, which store the columns of a matrix in an order of their own or beside tensors of
/// scales.
pub(super) fn reject_quantised(config: &Json) -> Result<(), WeightsError> {
    let Some(method) = config["quantization_config"]["quant_method"].as_str() else { return Ok(()) };
    // What llama.cpp's converter reads.
    let converts = ["fp8", "gptq", "compressed-tensors", "mxfp4"].contains(&method);
    let next = if converts {
        "convert the folder with llama.cpp: python convert_hf_to_gguf.py FOLDER --outtype q8_0 --outfile OUT.gguf"
    } else {
        "fetch the model as a GGUF file, or its folder without quantisation"
    };
    Err(WeightsError::Unsupported(format!(
        "config.json: the weights are quantised by {method:?}; supported in a folder: F32, F16, BF16; {next}"
    )))
}

/// Rejects families whose folders store what their GGUF files store otherwise.
pub(super) fn reject_folder(kind: &str) -> Result<(), WeightsError> {
    let why = if kind.starts_with("gemma") {
        "its folder stores norm weights minus one"
    } else if kind.starts_with("llama4") {
        "its folder stores experts transposed"
    } else if kind == "mistral3" {
        "its folder holds a model of pictures, too"
    } else {
        return Ok(());
    };
    Err(WeightsError::Unsupported(format!(
        "config.json: a {kind:?} model is supported in GGUF files only ({why}); use the .gguf file"
    )))
}

/// Factors of LongRoPE for contexts of both lengths, as tensors with the names of a GGUF file.
pub(super) fn long_factors(config: &Json) -> Result<Vec<(&'static str, Vec<f32>)>, WeightsError> {
    let mut all = Vec::new();
    for (theirs, ours) in [("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")] {
        let Some(listed) = rope(config)[theirs].as_array() else { continue };
        let numbers: Option<Vec<f32>> = listed.iter().map(|number| number.as_f64().map(|x| x as f32)).collect();
        let numbers =
            numbers.ok_or_else(|| malformed(&format!("config.json: {theirs}: expected a list of numbers")))?;
        all.push((ours, numbers));
    }
    Ok(all)
}

/// The options of rotary embedding: newer files have another name for them.
fn rope(config: &Json) -> &Json {
    if config["rope_parameters"].is_object() { &config["rope_parameters"] } else { &config["rope_scaling"] }
}

impl Builder {
    /// The mixture of GLM-4.5.
    pub(super) fn glm4_moe(&mut self, config: &Json) -> Result<(), WeightsError> {
        if config["n_group"].as_u64().unwrap_or(1) != 1 {
            return Err(WeightsError::Unsupported("config.json: n_group: expected 1, experts in one group".to_owned()));
        }
        for (theirs, ours) in [
            ("n_routed_experts", "expert_count"),
            ("n_shared_experts", "expert_shared_count"),
            ("first_k_dense_replace", "leading_dense_block_count"),
        ] {
            if let Some(value) = config[theirs].as_u64() {
                self.set(&format!("glm4moe.{ours}"), Value::Unsigned(value));
            }
        }
        if let Some(scale) = config["routed_scaling_factor"].as_f64() {
            self.set("glm4moe.expert_weights_scale", Value::Float(scale));
        }
        Ok(())
    }

    /// Base, rotated elements and scaling of the rotary embedding. `partial`: the rotated part of a head unless the file says it.
    pub(super) fn rope(&mut self, arch: &str, config: &Json, partial: Option<f64>) -> Result<(), WeightsError> {
        let options = rope(config);
        if let Some(base) = config["rope_theta"].as_f64().or(options["rope_theta"].as_f64()) {
            self.set(&format!("{arch}.rope.freq_base"), Value::Float(base));
        }
        let given = config["partial_rotary_factor"].as_f64().or(options["partial_rotary_factor"].as_f64());
        if let Some(partial) = given.or(partial) {
            let divided = || config["hidden_size"].as_u64()?.checked_div(config["num_attention_heads"].as_u64()?);
            let head = config["head_dim"].as_u64().or_else(divided).unwrap_or(0);
            self.set(&format!("{arch}.rope.dimension_count"), Value::Unsigned((head as f64 * partial) as u64));
        }
        if let Some(scale) = options["llama_4_scaling_beta"].as_f64().filter(|_| arch == "mistral3") {
            self.set("mistral3.attention.temperature_scale", Value::Float(scale));
        }
        self.rope_scaling(arch, config, options)
    }

    fn rope_scaling(&mut self, arch: &str, config: &Json, options: &Json) -> Result<(), WeightsError> {
        let Some(kind) = options["rope_type"].as_str().or(options["type"].as_str()) else { return Ok(()) };
        let kind = match kind {
            "default" => "none",
            // Older files of Phi-3 call LongRoPE so.
            "su" | "yarn" if arch == "phi3" => "longrope",
            other => other,
        };
        self.set(&format!("{arch}.rope.scaling.type"), Value::Text(kind.to_owned()));
        for (theirs, ours) in [
            ("low_freq_factor", "low_freq_factor"),
            ("high_freq_factor", "high_freq_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ] {
            if let Some(value) = options[theirs].as_f64() {
                self.set(&format!("{arch}.rope.scaling.{ours}"), Value::Float(value));
            }
        }
        let original = "original_max_position_embeddings";
        let original = options[original].as_f64().or(config[original].as_f64()).filter(|context| *context >= 1.0);
        if let Some(original) = original {
            let key = format!("{arch}.rope.scaling.original_context_length");
            self.set(&key, Value::Unsigned(original as u64));
        }
        let longer = || Some(config["max_position_embeddings"].as_f64()? / original?);
        let factor = options["factor"].as_f64().or_else(longer).unwrap_or(1.0);
        if kind != "longrope" && kind != "none" {
            self.set(&format!("{arch}.rope.scaling.factor"), Value::Float(factor));
        }
        if let Some(scale) = attention_factor(kind, factor, original, options) {
            self.set(&format!("{arch}.rope.scaling.attn_factor"), Value::Float(scale));
        }
        Ok(())
    }
}

/// The scale of cosine and sine as a GGUF file gives it: for YaRN beside the usual one, 1 + 0.1 ln(factor). By
/// `modeling_rope_utils.py` of Hugging Face's transformers.
fn attention_factor(kind: &str, factor: f64, original: Option<f64>, options: &Json) -> Option<f64> {
    let given = options["attention_factor"].as_f64();
    let magnitude = |scale: f64| 1.0 + 0.1 * scale * factor.max(1.0).ln();
    match kind {
        "yarn" => {
            let scales = [&options["mscale"], &options["mscale_all_dim"]].map(|scale| scale.as_f64().unwrap_or(0.0));
            let ratio = || magnitude(scales[0]) / magnitude(1.0) / magnitude(scales[1]);
            let ratio = (scales[0] != 0.0 && scales[1] != 0.0).then(ratio);
            given.map(|given| given / magnitude(1.0)).or(ratio)
        }
        "longrope" => {
            let usual = || Some((1.0 + factor.max(1.0).ln() / original?.ln()).sqrt());
            given.or_else(usual)
        }
        _ => None,
    }
}
