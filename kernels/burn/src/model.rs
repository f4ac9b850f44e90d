//! Oracle for models: computes a model from its recipe in plain burn operations, all positions of a sequence at once.
use bimm_contracts::{assert_shape_contract, define_shape_contract, unpack_shape_contract};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use kernels::order::experts::Gating;
use kernels::order::{Activation, CLAMPED};
use kernels_models::recipe::{LayerRecipe, Recipe};
use kernels_models::weights::{
    Experts, HeadNorms, ModelConfig, ModelFile, Rope, RopeKind, SharedExpert, Temperature, Window,
};
use std::ops::Range;

// burn broadcasts axes of length 1, so a wrong shape may give numbers instead of an error.
define_shape_contract!(HIDDEN, ["tokens", "width"]);
define_shape_contract!(HEADS, ["tokens", "heads" * "head_dim"]);
define_shape_contract!(TURNS, ["tokens", "one", "pairs"]);

/// Logits `[tokens, vocabulary]` after each token of a sequence, for a context that is no longer.
///
/// # Panics
/// If the file lacks a tensor of its architecture (opening it rules that out) or cannot be read, or if a token is outside the
/// vocabulary.
#[must_use]
pub fn logits<B: Backend>(file: &ModelFile, tokens: &[u32], device: &B::Device) -> Vec<Vec<f32>> {
    let model = Model::<B> { file, config: file.config(), device };
    let recipe = Recipe::of(model.config);
    let mut hidden = model.embed(tokens, recipe.embed_scale);
    for (index, layer) in recipe.layers.iter().enumerate() {
        let turns = model.turns(tokens.len(), &layer.rope);
        hidden = model.layer(hidden, layer, index, &turns);
    }
    let normed = model.norm(hidden, "output_norm.weight");
    let mut logits = model.product(normed, model.config.head_tensor());
    if let Some(cap) = recipe.logit_cap {
        logits = (logits / cap).tanh() * cap;
    }
    let logits = logits.into_data().into_vec::<f32>().expect("floats");
    logits.chunks_exact(model.config.vocab).map(<[f32]>::to_vec).collect()
}

struct Model<'a, B: Backend> {
    file: &'a ModelFile,
    config: &'a ModelConfig,
    device: &'a B::Device,
}

impl<B: Backend> Model<'_, B> {
    /// A tensor of the file as f32 `[rows, cols]`.
    fn tensor(&self, name: &str) -> Tensor<B, 2> {
        let view = self.file.tensor(name).unwrap_or_else(|| panic!("the file lacks {name}"));
        Tensor::from_data(TensorData::new(view.to_f32().expect("a readable file"), [view.rows, view.cols]), self.device)
    }

    fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    fn product(&self, x: Tensor<B, 2>, name: &str) -> Tensor<B, 2> {
        x.matmul(self.tensor(name).transpose())
    }

    fn embed(&self, tokens: &[u32], scale: Option<f32>) -> Tensor<B, 2> {
        let table = self.file.tensor("token_embd.weight").expect("an embedding");
        let mut rows = vec![0f32; tokens.len() * table.cols];
        for (row, token) in rows.chunks_exact_mut(table.cols).zip(tokens) {
            let token = *token as usize;
            table.quant.dequantize(&table.read(token..token + 1).expect("a readable file"), row);
        }
        let rows = Tensor::from_data(TensorData::new(rows, [tokens.len(), table.cols]), self.device);
        match scale {
            Some(scale) => rows * scale,
            None => rows,
        }
    }

    fn norm(&self, x: Tensor<B, 2>, weight: &str) -> Tensor<B, 2> {
        let mean = (x.clone() * x.clone()).mean_dim(1);
        x / (mean + self.config.norm_eps).sqrt() * self.tensor(weight)
    }

    /// Rotary cosines and sines of each position: `[positions, 1, pairs]`.
    fn turns(&self, positions: usize, rope: &Rope) -> [Tensor<B, 3>; 2] {
        let frequencies = self.file.rotary_frequencies(rope, positions).expect("frequencies of an opened file");
        let table = |of: fn(f64) -> f64| {
            let angles = (0..positions).flat_map(|p| frequencies.inverse.iter().map(move |i| p as f64 * i));
            let numbers: Vec<f32> = angles.map(|angle| (of(angle) * f64::from(frequencies.magnitude)) as f32).collect();
            Tensor::from_data(TensorData::new(numbers, [positions, 1, frequencies.inverse.len()]), self.device)
        };
        [table(f64::cos), table(f64::sin)]
    }

    fn layer(
        &self,
        hidden: Tensor<B, 2>,
        recipe: &LayerRecipe,
        index: usize,
        turns: &[Tensor<B, 3>; 2],
    ) -> Tensor<B, 2> {
        let width = self.config.width;
        let [tokens] = unpack_shape_contract!(HIDDEN, &hidden.dims(), &["tokens"], &[("width", width)]);
        let name = |part: &str| format!("blk.{index}.{part}");
        let after = |x: Tensor<B, 2>, part: &str| {
            if recipe.norms_after { self.norm(x, &name(&format!("{part}.weight"))) } else { x }
        };
        let x = self.norm(hidden.clone(), &name("attn_norm.weight"));
        let attended = self.attend(x, recipe, index, turns);
        let ModelConfig { heads, head_dim, .. } = *self.config;
        let sizes = [("tokens", tokens), ("heads", heads), ("head_dim", head_dim)];
        assert_shape_contract!(HEADS, &attended.dims(), &sizes);
        let mut given = self.product(attended, &name("attn_output.weight"));
        if recipe.output_bias {
            given = given + self.tensor(&name("attn_output.bias"));
        }
        let hidden = hidden + after(given, "post_attention_norm");
        let x = self.norm(hidden.clone(), &name(recipe.ffn_norm));
        let given = match recipe.experts {
            None => self.gated(x, recipe, index, "", 0..1, 1),
            Some(experts) => self.mixture(x, recipe, index, experts),
        };
        hidden + after(given, "post_ffw_norm")
    }

    /// Gated feed-forward block `expert` of `count`, which are stacked in the rows of its tensors.
    fn gated(
        &self,
        x: Tensor<B, 2>,
        recipe: &LayerRecipe,
        index: usize,
        kind: &str,
        expert: Range<usize>,
        count: usize,
    ) -> Tensor<B, 2> {
        let product = |x: Tensor<B, 2>, part: &str| {
            let all = self.tensor(&format!("blk.{index}.{part}{kind}.weight"));
            let [rows, cols] = all.dims();
            let y = x.matmul(all.slice([expert.start * rows / count..expert.end * rows / count, 0..cols]).transpose());
            let bias = format!("blk.{index}.{part}{kind}.bias");
            if self.has(&bias) { y + self.tensor(&bias).slice([expert.clone(), 0..rows / count]) } else { y }
        };
        let gate = product(x.clone(), "ffn_gate");
        let mut up = product(x, "ffn_up");
        let gate = match recipe.activation {
            Activation::Clamped => {
                let [factor, limit] = CLAMPED;
                up = up.clamp(-limit, limit) + 1.0;
                let gate = gate.clamp_max(limit);
                gate.clone() * sigmoid(gate * factor)
            }
            Activation::Silu => gate.clone() * sigmoid(gate),
            Activation::Gelu => {
                let inner =
                    (gate.clone() + gate.clone().powi_scalar(3) * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
                gate * (inner.tanh() + 1.0) * 0.5
            }
        };
        product(gate * up, "ffn_down")
    }

    /// Every expert computes every row; the factors of those that were not chosen are zero.
    fn mixture(&self, x: Tensor<B, 2>, recipe: &LayerRecipe, index: usize, experts: Experts) -> Tensor<B, 2> {
        let Experts { count, used, .. } = experts;
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        let [tokens, _] = x.dims();
        let mut scores = self.product(x.clone(), &name("ffn_gate_inp"));
        if experts.biases {
            scores = scores + self.tensor(&format!("blk.{index}.ffn_gate_inp.bias"));
        }
        let shares = match experts.gating {
            Gating::Softmax => softmax(scores, 1),
            Gating::Sigmoid => sigmoid(scores),
        };
        let mut keys = shares.clone();
        if experts.corrected {
            keys = keys + self.tensor(&format!("blk.{index}.exp_probs_b.bias"));
        }
        let lowest = keys.clone().sort_descending(1).slice([0..tokens, used - 1..used]);
        let mut factors = shares * keys.greater_equal(lowest).float();
        if experts.normalised {
            factors = factors.clone() / factors.sum_dim(1);
        }
        let factors = factors * experts.scale;
        let output = |expert: usize| {
            let factor = factors.clone().slice([0..tokens, expert..expert + 1]);
            let block = |x| self.gated(x, recipe, index, "_exps", expert..expert + 1, count);
            if experts.on_input { block(x.clone() * factor) } else { block(x.clone()) * factor }
        };
        let mut sum = (1..count).fold(output(0), |sum, expert| sum + output(expert));
        if let Some(SharedExpert { gated, .. }) = experts.shared {
            let output = self.gated(x.clone(), recipe, index, "_shexp", 0..1, 1);
            let gate = || sigmoid(self.product(x, &name("ffn_gate_inp_shexp")));
            sum = sum + if gated { output * gate() } else { output };
        }
        sum
    }

    fn attend(&self, x: Tensor<B, 2>, recipe: &LayerRecipe, index: usize, turns: &[Tensor<B, 3>; 2]) -> Tensor<B, 2> {
        let ModelConfig { heads, kv_heads, head_dim, .. } = *self.config;
        let [n, _] = x.dims();
        let project = |part: &str, heads: usize, turned: bool| {
            let name = |end: &str| format!("blk.{index}.attn_{part}{end}");
            let mut y = self.product(x.clone(), &name(".weight"));
            if recipe.biases {
                y = y + self.tensor(&name(".bias"));
            }
            let mut y = y.reshape([n * heads, head_dim]);
            if recipe.head_norms == Some(HeadNorms::Weighted) && self.has(&name("_norm.weight")) {
                y = self.norm(y, &name("_norm.weight"));
            }
            let y = y.reshape([n, heads, head_dim]);
            if !turned {
                return y;
            }
            let y = self.turn(y, turns);
            if recipe.head_norms != Some(HeadNorms::Plain) {
                return y;
            }
            let mean = (y.clone() * y.clone()).mean_dim(2);
            y / (mean + self.config.norm_eps).sqrt()
        };
        let mut queries = project("q", heads, true) * recipe.scale;
        if let Some(Temperature { scale, every, offset }) = recipe.temperature {
            let factor = |position: usize| 1.0 + scale * (1.0 + ((position + offset) / every) as f64).ln();
            let factors: Vec<f32> = (0..n).map(|position| factor(position) as f32).collect();
            queries = queries * Tensor::<B, 3>::from_data(TensorData::new(factors, [n, 1, 1]), self.device);
        }
        let (keys, values) = (project("k", kv_heads, true), project("v", kv_heads, false));
        let group = heads / kv_heads;
        let queries = queries.reshape([n, kv_heads, group, head_dim]).permute([1, 2, 0, 3]).reshape([
            kv_heads,
            group * n,
            head_dim,
        ]);
        let mut scores = queries.matmul(keys.permute([1, 2, 0]));
        if let Some(cap) = recipe.score_cap {
            scores = (scores / cap).tanh() * cap;
        }
        let hidden = |row: usize, p: usize| match recipe.window {
            None => p > row,
            Some(Window::Sliding(window)) => p > row || p + window <= row,
            Some(Window::Chunk(chunk)) => p > row || p / chunk != row / chunk,
        };
        let mask: Vec<f32> =
            (0..group * n).flat_map(|row| (0..n).map(move |p| if hidden(row % n, p) { -1e30 } else { 0.0 })).collect();
        let mask = Tensor::<B, 3>::from_data(TensorData::new(mask, [1, group * n, n]), self.device);
        let mut scores = scores + mask;
        if recipe.sinks {
            // One more column, whose value is zero: [kv_heads, group * n, 1].
            let sinks = self.tensor(&format!("blk.{index}.attn_sinks.weight")).reshape([kv_heads, group, 1]);
            let sinks = sinks.repeat_dim(2, n).reshape([kv_heads, group * n, 1]);
            scores = Tensor::cat(vec![scores, sinks], 2);
        }
        let weights = softmax(scores, 2).slice([0..kv_heads, 0..group * n, 0..n]);
        let mixed = weights.matmul(values.swap_dims(0, 1));
        mixed.reshape([kv_heads, group, n, head_dim]).permute([2, 0, 1, 3]).reshape([n, heads * head_dim])
    }

    /// Applies rotary embedding to the first `2 · pairs` elements of each head of `[positions, heads, head_dim]`.
    fn turn(&self, x: Tensor<B, 3>, [cosine, sine]: &[Tensor<B, 3>; 2]) -> Tensor<B, 3> {
        let [n, heads, head_dim] = unpack_shape_contract!(["tokens", "heads", "head_dim"], &x.dims());
        let [pairs] = unpack_shape_contract!(TURNS, &cosine.dims(), &["pairs"], &[("tokens", n), ("one", 1)]);
        let turning = x.clone().slice([0..n, 0..heads, 0..2 * pairs]);
        let (a, b) = match self.config.rope.kind {
            RopeKind::Interleaved => {
                let pair = turning.reshape([n, heads, pairs, 2]);
                let side =
                    |i: usize| pair.clone().slice([0..n, 0..heads, 0..pairs, i..i + 1]).reshape([n, heads, pairs]);
                (side(0), side(1))
            }
            RopeKind::Halves => {
                let side = |from: usize| turning.clone().slice([0..n, 0..heads, from..from + pairs]);
                (side(0), side(pairs))
            }
        };
        let first = a.clone() * cosine.clone() - b.clone() * sine.clone();
        let second = a * sine.clone() + b * cosine.clone();
        let turned = match self.config.rope.kind {
            RopeKind::Interleaved => Tensor::stack::<4>(vec![first, second], 3).reshape([n, heads, 2 * pairs]),
            RopeKind::Halves => Tensor::cat(vec![first, second], 2),
        };
        if 2 * pairs == head_dim {
            return turned;
        }
        Tensor::cat(vec![turned, x.slice([0..n, 0..heads, 2 * pairs..head_dim])], 2)
    }
}
