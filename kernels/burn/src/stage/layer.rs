//! One transformer block, top to bottom: norm, attention, residual, norm, SwiGLU, residual.
use std::collections::BTreeMap;

use burn::tensor::Tensor;
use kernels::gpu::CACHE_CELL_BYTES;
use kernels::stage::{SequenceId, StageError};
use kernels::weights::ModelConfig;

use super::weights::{Linear, Loader};
use super::{Pass, Sequence, read};
use crate::backend::MeshBackend;

/// A block's weights.
#[derive(Debug)]
pub(super) struct Layer<B: MeshBackend> {
    attention_norm: Tensor<B, 1>,
    query: Projection<B>,
    key: Projection<B>,
    value: Projection<B>,
    attention_output: Projection<B>,
    feed_norm: Tensor<B, 1>,
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

/// A matrix with what the architecture adds to its result.
#[derive(Debug)]
struct Projection<B: MeshBackend> {
    matrix: Linear<B>,
    bias: Option<Tensor<B, 1>>,
    /// RMSNorm of each head.
    norm: Option<Tensor<B, 1>>,
}

/// Keys and values of one sequence in one layer, `[context, kv_width]` each.
#[derive(Debug)]
pub(super) struct Cache<B: MeshBackend> {
    /// `None` only while an append has it.
    keys: Option<Tensor<B, 2>>,
    values: Option<Tensor<B, 2>>,
}

impl<B: MeshBackend> Layer<B> {
    pub(super) fn load(loader: &mut Loader<'_, B>, config: &ModelConfig, index: usize) -> Result<Self, StageError> {
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        let mut projection = |part: &str, biased: bool, normed: bool| {
            let bias = biased.then(|| loader.vector(&format!("blk.{index}.{part}.bias"))).transpose()?;
            let norm = normed.then(|| loader.vector(&name(&format!("{part}_norm")))).transpose()?;
            Ok::<_, StageError>(Projection { matrix: loader.linear(&name(part))?, bias, norm })
        };
        Ok(Self {
            query: projection("attn_q", config.attention_bias, config.qk_norm)?,
            key: projection("attn_k", config.attention_bias, config.qk_norm)?,
            value: projection("attn_v", config.attention_bias, false)?,
            attention_output: projection("attn_output", config.attention_output_bias, false)?,
            attention_norm: loader.vector(&name("attn_norm"))?,
            feed_norm: loader.vector(&name("ffn_norm"))?,
            gate: loader.linear(&name("ffn_gate"))?,
            up: loader.linear(&name("ffn_up"))?,
            down: loader.linear(&name("ffn_down"))?,
        })
    }

    /// `hidden[rows, width]` through the block, which is the stage's `index`-th.
    pub(super) fn forward(
        &self,
        hidden: Tensor<B, 2>,
        pass: &Pass<'_, B>,
        sequences: &mut BTreeMap<SequenceId, Sequence<B>>,
        index: usize,
    ) -> Tensor<B, 2> {
        let x = B::rms_norm(hidden.clone(), &self.attention_norm, pass.eps);
        let query = B::rotate(self.query.forward(x.clone(), pass), &pass.table, pass.rotation);
        let key = B::rotate(self.key.forward(x.clone(), pass), &pass.table, pass.rotation);
        let value = self.value.forward(x, pass);
        let mut mixed = Vec::with_capacity(pass.segments.len());
        let mut at = 0;
        for segment in pass.segments {
            let rows = |x: &Tensor<B, 2>| match pass.segments {
                [_] => x.clone(),
                _ => x.clone().slice([at..at + segment.rows.len()]),
            };
            let cache = &mut sequences.get_mut(&segment.sequence).expect("opened before the pass").caches[index];
            let (keys, values) = cache.append(rows(&key), rows(&value), segment.position);
            mixed.push(B::causal_attention(rows(&query), keys, values, segment.position, pass.attention));
            at += segment.rows.len();
        }
        let mixed = if mixed.len() == 1 { mixed.remove(0) } else { Tensor::cat(mixed, 0) };
        let hidden = B::add(hidden, self.attention_output.forward(mixed, pass));
        let x = B::rms_norm(hidden.clone(), &self.feed_norm, pass.eps);
        let wide = B::swiglu(self.gate.forward(x.clone()), self.up.forward(x));
        B::add(hidden, self.down.forward(wide))
    }
}

impl<B: MeshBackend> Projection<B> {
    fn forward(&self, x: Tensor<B, 2>, pass: &Pass<'_, B>) -> Tensor<B, 2> {
        let mut y = self.matrix.forward(x);
        if let Some(bias) = &self.bias {
            y = y + bias.clone().unsqueeze();
        }
        if let Some(norm) = &self.norm {
            let ([n, width], head) = (y.dims(), pass.rotation.head_dim);
            y = B::rms_norm(y.reshape([n * width / head, head]), norm, pass.eps).reshape([n, width]);
        }
        y
    }
}

impl<B: MeshBackend> Cache<B> {
    /// Allocates a pair of caches and proves that they are there: filled with `stamp`, the last row read back.
    pub(super) fn new(shape: [usize; 2], stamp: f32, device: &B::Device) -> Result<Self, StageError> {
        let [context, width] = shape;
        let new = || {
            // By way of one dimension: CUDA pads the rows of tensors with more.
            let cache = Tensor::<B, 1>::full([context * width], stamp, device).reshape(shape);
            let last = read::<B>(cache.clone().slice([context - 1..context, 0..width]), device)?;
            if last.iter().any(|x| *x != stamp) {
                let bytes = context * width * CACHE_CELL_BYTES;
                return Err(StageError::Device(format!("it did not allocate a cache of {bytes} bytes: it is full")));
            }
            Ok(cache)
        };
        Ok(Self { keys: Some(new()?), values: Some(new()?) })
    }

    /// Writes rows from position `at` on and lends both caches.
    fn append(&mut self, key: Tensor<B, 2>, value: Tensor<B, 2>, at: usize) -> (&Tensor<B, 2>, &Tensor<B, 2>) {
        let keys = self.keys.take().expect("both are whole between appends");
        let values = self.values.take().expect("both are whole between appends");
        (self.keys.insert(B::append(keys, key, at)), self.values.insert(B::append(values, value, at)))
    }
}
