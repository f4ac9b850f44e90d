//! Llama, SmolLM2, Mistral: RMSNorm, grouped-query attention with rotary embedding, SwiGLU; each half adds to the stream.
use super::{AttentionBiases, LayerLoader, Stored};
use crate::cpu::engine::Engine;
use crate::stage::StageError;
use crate::weights::ModelConfig;

pub(super) struct Block {
    attention_norm: Vec<f32>,
    q: Stored,
    k: Stored,
    v: Stored,
    output: Stored,
    biases: AttentionBiases,
    ffn_norm: Vec<f32>,
    gate: Stored,
    up: Stored,
    down: Stored,
}

impl Block {
    pub(super) fn load(layer: &mut LayerLoader<'_, '_>, config: &ModelConfig) -> Result<Self, StageError> {
        Ok(Self {
            attention_norm: layer.vector("attn_norm")?,
            q: layer.matrix("attn_q")?,
            k: layer.matrix("attn_k")?,
            v: layer.matrix("attn_v")?,
            output: layer.matrix("attn_output")?,
            biases: layer.attention_biases(config)?,
            ffn_norm: layer.vector("ffn_norm")?,
            gate: layer.matrix("ffn_gate")?,
            up: layer.matrix("ffn_up")?,
            down: layer.matrix("ffn_down")?,
        })
    }

    /// `layer` counts within the stage.
    pub(super) fn forward(&self, engine: &mut Engine, layer: usize) {
        engine.norm(&self.attention_norm);
        let matrices = [self.q.matrix(), self.k.matrix(), self.v.matrix()];
        engine.queries_keys_values(matrices, self.biases.inputs());
        engine.attend(layer);
        engine.attention_output(self.output.matrix(), self.biases.output());

        engine.norm(&self.ffn_norm);
        engine.feed_forward(self.gate.matrix(), self.up.matrix(), self.down.matrix());
    }
}
