//! The tensors of a model: which ones its configuration requires, with which shapes, and which ones a stage needs.
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{Architecture, Experts, HeadNorms, ModelConfig, RopeScaling};
use crate::weights::error::WeightsError;
use crate::weights::tensor::TensorInfo;

/// Per-dimension RoPE factors for long contexts in Llama 3 files.
pub(in crate::weights) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Per-dimension RoPE factors of Phi-3 for contexts beyond the original one.
pub(in crate::weights) const ROPE_FACTORS_LONG: &str = "rope_factors_long.weight";
/// Those for contexts up to the original one.
pub(in crate::weights) const ROPE_FACTORS_SHORT: &str = "rope_factors_short.weight";
/// The joined matrices of Phi-3's files and their parts, in the order of their rows.
const FUSED: [(&str, &[&str]); 2] = [
    (".attn_qkv.weight", &[".attn_q.weight", ".attn_k.weight", ".attn_v.weight"]),
    (".ffn_up.weight", &[".ffn_gate.weight", ".ffn_up.weight"]),
];
/// What is added to the factors of experts before they are chosen.
pub(crate) const CORRECTIONS: &str = "exp_probs_b.bias";
/// The gate of a shared expert: one row, but a matrix.
pub(super) const SHARED_GATE: &str = "ffn_gate_inp_shexp.weight";

impl ModelConfig {
    /// Name of the output head's matrix, `[vocab, width]`.
    #[must_use]
    pub fn head_tensor(&self) -> &'static str {
        if self.tied { "token_embd.weight" } else { "output.weight" }
    }

    /// The norm before the feed-forward block, without the `blk.N.` prefix; some families' files give it another name.
    #[must_use]
    pub fn ffn_norm_tensor(&self) -> &'static str {
        let after_attention = matches!(self.architecture, Architecture::GptOss | Architecture::Glm4Moe);
        if after_attention { "post_attention_norm.weight" } else { "ffn_norm.weight" }
    }

    /// The experts of a layer.
    #[must_use]
    pub fn experts_of(&self, layer: usize) -> Option<Experts> {
        self.experts.filter(|experts| experts.in_layer(layer))
    }

    /// The tensors of a block without their `blk.N.` prefix, with shape `[rows, cols]`.
    #[must_use]
    pub fn block_tensors(&self, layer: usize) -> Vec<(&'static str, [usize; 2])> {
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
        match self.experts_of(layer) {
            None => tensors.extend([
                ("ffn_gate.weight", [ffn, width]),
                ("ffn_up.weight", [ffn, width]),
                ("ffn_down.weight", [width, ffn]),
            ]),
            // One expert after another in the rows.
            Some(Experts { count, width: ffn, shared, biases, corrected, .. }) => {
                if biases {
                    tensors.extend([
                        ("ffn_gate_inp.bias", [1, count]),
                        ("ffn_gate_exps.bias", [count, ffn]),
                        ("ffn_up_exps.bias", [count, ffn]),
                        ("ffn_down_exps.bias", [count, width]),
                    ]);
                }
                if corrected {
                    tensors.push((CORRECTIONS, [1, count]));
                }
                tensors.extend([
                    ("ffn_gate_inp.weight", [count, width]),
                    ("ffn_gate_exps.weight", [count * ffn, width]),
                    ("ffn_up_exps.weight", [count * ffn, width]),
                    ("ffn_down_exps.weight", [count * width, ffn]),
                ]);
                tensors.extend(shared.into_iter().flat_map(|shared| {
                    [
                        ("ffn_gate_shexp.weight", [shared.width, width]),
                        ("ffn_up_shexp.weight", [shared.width, width]),
                        ("ffn_down_shexp.weight", [width, shared.width]),
                    ]
                }));
                if shared.is_some_and(|shared| shared.gated) {
                    tensors.push((SHARED_GATE, [1, width]));
                }
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
        if self.head_norms == Some(HeadNorms::Weighted) {
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
            ROPE_FACTORS | ROPE_FACTORS_LONG | ROPE_FACTORS_SHORT => !layers.is_empty(),
            _ => layer_of(name).is_some_and(|layer| layers.contains(&layer)),
        }
    }

    /// Checks that every tensor of the architecture is present with its shape, and that no other tensor would be silently
    /// ignored.
    pub(in crate::weights) fn check_tensors(
        &self,
        tensors: &[TensorInfo],
        by_name: &BTreeMap<String, usize>,
    ) -> Result<(), WeightsError> {
        let check = |name: &str, shape: [usize; 2]| {
            let tensor = by_name.get(name).map(|&i| &tensors[i]).ok_or_else(|| missing_tensor(&self.in_file(name)))?;
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
        if matches!(self.rope.scaling, RopeScaling::Long { .. }) {
            check(ROPE_FACTORS_LONG, [1, self.rope.dims / 2])?;
            check(ROPE_FACTORS_SHORT, [1, self.rope.dims / 2])?;
        }
        let mut used = BTreeSet::new();
        for layer in 0..self.layers {
            for (part, shape) in self.block_tensors(layer) {
                let name = format!("blk.{layer}.{part}");
                check(&name, shape)?;
                used.insert(name);
            }
        }
        for tensor in tensors {
            let known = match tensor.name.as_str() {
                "token_embd.weight" | "output.weight" | "output_norm.weight" | ROPE_FACTORS => true,
                ROPE_FACTORS_LONG | ROPE_FACTORS_SHORT => matches!(self.rope.scaling, RopeScaling::Long { .. }),
                name => used.contains(name) || layer_of(name).is_some_and(|layer| self.predicts(layer)),
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

    /// Whether this block of the file is one of [`Self::predictors`].
    fn predicts(&self, layer: usize) -> bool {
        (self.layers..self.layers + self.predictors).contains(&layer)
    }

    /// The name of a tensor, or of the one in the file that it is a part of.
    fn in_file(&self, name: &str) -> String {
        let fused = FUSED.iter().find_map(|(fused, parts)| {
            let layer = parts.iter().find_map(|part| name.strip_suffix(part))?;
            Some(format!("{layer}{fused}"))
        });
        fused.filter(|_| self.architecture == Architecture::Phi3).unwrap_or_else(|| name.to_owned())
    }

    /// Splits the rows of Phi-3's joined matrices: query, key and value; gate and up. The parts are ranges of the file.
    ///
    /// # Errors
    /// Such a matrix has another shape.
    pub(in crate::weights) fn split_fused(&self, tensors: Vec<TensorInfo>) -> Result<Vec<TensorInfo>, WeightsError> {
        if self.architecture != Architecture::Phi3 {
            return Ok(tensors);
        }
        let rows = [vec![self.q_width(), self.kv_width(), self.kv_width()], vec![self.ffn; 2]];
        let mut all = Vec::with_capacity(2 * tensors.len());
        for tensor in tensors {
            let fused = FUSED.iter().zip(&rows).find_map(|((fused, parts), rows)| {
                let layer = tensor.name.strip_suffix(fused).filter(|layer| layer.starts_with("blk."))?;
                // A part may have the name of the whole. `.mesh` files have the parts.
                let part = parts.iter().zip(rows).find(|(part, _)| *part == fused);
                let apart = part.is_some_and(|(_, rows)| tensor.rows == *rows);
                (!apart).then_some((layer, *parts, rows))
            });
            let Some((layer, parts, rows)) = fused else {
                all.push(tensor);
                continue;
            };
            let shape = [rows.iter().sum(), self.width];
            if shape != [tensor.rows, tensor.cols] {
                return Err(WeightsError::Malformed(format!(
                    "tensor {:?}: expected {shape:?} rows and columns from the sizes in the header, found {:?}",
                    tensor.name,
                    [tensor.rows, tensor.cols]
                )));
            }
            let (mut start, row_bytes) = (tensor.range.start, tensor.row_bytes());
            for (part, &rows) in parts.iter().zip(rows) {
                let range = start..start + rows as u64 * row_bytes;
                start = range.end;
                all.push(TensorInfo { name: format!("{layer}{part}"), rows, range, ..tensor.clone() });
            }
        }
        Ok(all)
    }
}

/// The block that a tensor belongs to, `blk.N.…`.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    let (number, _) = name.strip_prefix("blk.")?.split_once('.')?;
    // Only the canonical spelling counts: "07" is not layer 7.
    number.parse().ok().filter(|n: &usize| n.to_string() == number)
}

pub(super) fn missing_tensor(name: &str) -> WeightsError {
    WeightsError::Malformed(format!("tensor {name:?} is missing"))
}
