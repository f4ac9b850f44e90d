//! The model in float64, one position after the other, nothing fast: what a device's results are compared with.
use kernels::weights::{ModelConfig, ModelFile, RopeKind, RotaryFrequencies};

/// Logits `[vocab]` after each token of a sequence.
///
/// # Panics
/// If the file lacks a tensor of its architecture, which opening it has ruled out, or a token is no row of its embedding.
#[must_use]
pub fn logits(file: &ModelFile, tokens: &[u32]) -> Vec<Vec<f64>> {
    let config = file.config();
    let frequencies = file.rotary_frequencies().expect("frequencies of an opened file");
    let mut caches = vec![(Vec::new(), Vec::new()); config.layers];
    let embedding = Matrix::new(file, "token_embd.weight");
    let output = Matrix::new(file, config.head_tensor());
    let layers: Vec<Layer> = (0..config.layers).map(|i| Layer::new(file, config, i)).collect();
    let mut all = Vec::new();
    for (position, &token) in tokens.iter().enumerate() {
        let mut hidden = embedding.row(token as usize).to_vec();
        for (layer, (keys, values)) in layers.iter().zip(&mut caches) {
            layer.forward(&mut hidden, keys, values, position, config, &frequencies);
        }
        all.push(output.times(&rms_norm(&hidden, &Matrix::new(file, "output_norm.weight").weights, config)));
    }
    all
}

struct Matrix {
    weights: Vec<f64>,
    cols: usize,
}

impl Matrix {
    fn new(file: &ModelFile, name: &str) -> Self {
        let view = file.tensor(name).expect(name);
        let mut weights = vec![0.0; view.rows * view.cols];
        view.quant.dequantize_f64(view.bytes, &mut weights);
        Self { weights, cols: view.cols }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.weights[row * self.cols..(row + 1) * self.cols]
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        self.weights.chunks_exact(self.cols).map(|row| dot(row, x)).collect()
    }
}

struct Layer {
    attention_norm: Matrix,
    /// Query, key, value: matrix, bias, norm of each head.
    projections: [(Matrix, Option<Matrix>, Option<Matrix>); 3],
    attention_output: Matrix,
    attention_output_bias: Option<Matrix>,
    feed_norm: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Layer {
    fn new(file: &ModelFile, config: &ModelConfig, index: usize) -> Self {
        let matrix = |part: &str| Matrix::new(file, &format!("blk.{index}.{part}"));
        let projections = ["attn_q", "attn_k", "attn_v"].map(|part| {
            let bias = config.attention_bias.then(|| matrix(&format!("{part}.bias")));
            let norm = (config.qk_norm && part != "attn_v").then(|| matrix(&format!("{part}_norm.weight")));
            (matrix(&format!("{part}.weight")), bias, norm)
        });
        Self {
            attention_norm: matrix("attn_norm.weight"),
            projections,
            attention_output: matrix("attn_output.weight"),
            attention_output_bias: config.attention_output_bias.then(|| matrix("attn_output.bias")),
            feed_norm: matrix("ffn_norm.weight"),
            gate: matrix("ffn_gate.weight"),
            up: matrix("ffn_up.weight"),
            down: matrix("ffn_down.weight"),
        }
    }

    fn forward(
        &self,
        hidden: &mut [f64],
        keys: &mut Vec<Vec<f64>>,
        values: &mut Vec<Vec<f64>>,
        position: usize,
        config: &ModelConfig,
        frequencies: &RotaryFrequencies,
    ) {
        let x = rms_norm(hidden, &self.attention_norm.weights, config);
        let [mut query, mut key, value] = self.projections.each_ref().map(|(matrix, bias, norm)| {
            let mut y = matrix.times(&x);
            if let Some(bias) = bias {
                add(&mut y, &bias.weights);
            }
            match norm {
                Some(norm) => y.chunks(config.head_dim).flat_map(|h| rms_norm(h, &norm.weights, config)).collect(),
                None => y,
            }
        });
        for head in query.chunks_mut(config.head_dim).chain(key.chunks_mut(config.head_dim)) {
            rotate(head, position, config, frequencies);
        }
        keys.push(key);
        values.push(value);
        let mixed: Vec<f64> = query
            .chunks(config.head_dim)
            .enumerate()
            .flat_map(|(head, query)| {
                let of = head / (config.heads / config.kv_heads) * config.head_dim;
                attend(query, keys, values, of..of + config.head_dim)
            })
            .collect();
        add(hidden, &self.attention_output.times(&mixed));
        self.attention_output_bias.iter().for_each(|bias| add(hidden, &bias.weights));
        let x = rms_norm(hidden, &self.feed_norm.weights, config);
        let wide: Vec<f64> =
            self.gate.times(&x).iter().zip(self.up.times(&x)).map(|(g, u)| u * g / (1.0 + (-g).exp())).collect();
        add(hidden, &self.down.times(&wide));
    }
}

/// One head over everything held.
pub(crate) fn attend(query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], head: std::ops::Range<usize>) -> Vec<f64> {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let scores: Vec<f64> = keys.iter().map(|key| dot(query, &key[head.clone()]) * scale).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    head.map(|d| weights.iter().zip(values).map(|(w, value)| w / total * value[d]).sum()).collect()
}

fn rotate(head: &mut [f64], position: usize, config: &ModelConfig, frequencies: &RotaryFrequencies) {
    let pairs = config.rope.dims / 2;
    for (i, inverse) in frequencies.inverse.iter().enumerate() {
        let (a, b) = match config.rope.kind {
            RopeKind::Interleaved => (2 * i, 2 * i + 1),
            RopeKind::Halves => (i, i + pairs),
        };
        let angle = position as f64 * inverse;
        let (sine, cosine) =
            (angle.sin() * f64::from(frequencies.magnitude), angle.cos() * f64::from(frequencies.magnitude));
        (head[a], head[b]) = (head[a] * cosine - head[b] * sine, head[a] * sine + head[b] * cosine);
    }
}

fn rms_norm(x: &[f64], weight: &[f64], config: &ModelConfig) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(config.norm_eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
