//! Whole small models of every architecture and format against a naive f64 forward pass.
#![expect(clippy::needless_range_loop, reason = "loops over indices, as the formulas are written")]
#![expect(clippy::print_stdout, reason = "human-readable figures")]
use std::f64::consts::PI;
use std::ops::Range;
use std::sync::Arc;

use kernels::quant::{QUANT_TYPES, QuantType};
use kernels::threads::Threads;
use kernels_models::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, StageOptions};
use kernels_models::weights::testing::TinyModel;
use kernels_models::weights::{Architecture, Experts, ModelFile, RopeKind};

/// Logits of the last token, or its embedding, all in f64, without a KV cache.
fn naive(file: &ModelFile, tokens: &[u32]) -> Vec<f64> {
    let c = file.config();
    let gemma3 = c.architecture == Architecture::Gemma3;
    let gemma = gemma3 || c.architecture == Architecture::Gemma2;
    let mut hidden: Vec<Vec<f64>> =
        tokens.iter().map(|t| rows(file, "token_embd.weight")[*t as usize].clone()).collect();
    if gemma {
        hidden.iter_mut().flatten().for_each(|x| *x *= (c.width as f64).sqrt());
    }
    for layer in 0..c.layers {
        // The small Gemma 3: every third layer has global attention and RoPE base 1e6, the others a window of 9 and
        // base 1e4. Gemma 2: every second layer has global attention.
        let local = gemma && if gemma3 { layer % 3 != 2 } else { layer % 2 == 0 };
        // The small gpt-oss: every other layer has a window of 9.
        let oss = c.architecture == Architecture::GptOss;
        let banded = local || (oss && layer % 2 == 0);
        let still = c.architecture == Architecture::SmolLm3 && layer % 4 == 3;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let normed: Vec<_> =
            hidden.iter().map(|h| norm(h, &rows(file, &name("attn_norm.weight"))[0], c.norm_eps)).collect();
        let project = |part: &str, turn: bool| -> Vec<Vec<Vec<f64>>> {
            let each = normed.iter().enumerate().map(|(position, x)| {
                let mut y = product(&rows(file, &name(&format!("{part}.weight"))), x);
                if file.tensor(&name(&format!("{part}.bias"))).is_some() {
                    y.iter_mut().zip(&rows(file, &name(&format!("{part}.bias")))[0]).for_each(|(y, b)| *y += b);
                }
                let heads = y.chunks_exact(c.head_dim).map(|head| {
                    let mut head = head.to_vec();
                    if file.tensor(&name(&format!("{part}_norm.weight"))).is_some() {
                        head = norm(&head, &rows(file, &name(&format!("{part}_norm.weight")))[0], c.norm_eps);
                    }
                    if turn && !still { rotate(file, &head, position, local && gemma3) } else { head }
                });
                heads.collect()
            });
            each.collect()
        };
        let (q, k, v) = (project("attn_q", true), project("attn_k", true), project("attn_v", false));
        for position in 0..tokens.len() {
            let mut attended = Vec::new();
            for head in 0..c.heads {
                let kv = head / (c.heads / c.kv_heads);
                let score = |p: usize| {
                    let score = dot(&q[position][head], &k[p][kv]) / (c.head_dim as f64).sqrt();
                    if gemma && !gemma3 { 2.0 * (score / 2.0).tanh() } else { score }
                };
                let first = if banded { (position + 1).saturating_sub(9) } else { 0 };
                let scores: Vec<f64> = (first..=position).map(score).collect();
                let sink = if oss { rows(file, &name("attn_sinks.weight"))[0][head] } else { f64::NEG_INFINITY };
                let max = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
                attended.extend(
                    (0..c.head_dim)
                        .map(|d| weights.iter().zip(&v[first..]).map(|(w, v)| w * v[kv][d]).sum::<f64>() / sum),
                );
            }
            let mut out = product(&rows(file, &name("attn_output.weight")), &attended);
            if file.tensor(&name("attn_output.bias")).is_some() {
                out.iter_mut().zip(&rows(file, &name("attn_output.bias"))[0]).for_each(|(o, b)| *o += b);
            }
            if gemma {
                out = norm(&out, &rows(file, &name("post_attention_norm.weight"))[0], c.norm_eps);
            }
            hidden[position].iter_mut().zip(out).for_each(|(h, o)| *h += o);
            let x = norm(&hidden[position], &rows(file, &name(c.ffn_norm_tensor()))[0], c.norm_eps);
            let gelu = |g: f64| 0.5 * g * (1.0 + ((2.0 / PI).sqrt() * (g + 0.044_715 * g.powi(3))).tanh());
            let silu = |g: f64| g / (1.0 + (-g).exp());
            // Expert `index` of `count`: the matrices of all experts are stacked.
            let block = |kind: &str, index: usize, count: usize| -> Vec<f64> {
                let part = |part: &str| {
                    let name = name(&format!("{part}{kind}.weight"));
                    let each = file.tensor(&name).unwrap().rows / count;
                    rows_of(file, &name, index * each..(index + 1) * each)
                };
                let biased = |part: &str, mut y: Vec<f64>| {
                    let bias = name(&format!("{part}{kind}.bias"));
                    if file.tensor(&bias).is_some() {
                        y.iter_mut().zip(&rows(file, &bias)[index]).for_each(|(y, b)| *y += b);
                    }
                    y
                };
                let gate = biased("ffn_gate", product(&part("ffn_gate"), &x));
                let up = biased("ffn_up", product(&part("ffn_up"), &x));
                let gated = |g: f64, u: f64| match (gemma, oss) {
                    (true, _) => gelu(g) * u,
                    (_, true) => {
                        let (g, u) = (g.min(7.0), u.clamp(-7.0, 7.0));
                        g / (1.0 + (-1.702 * g).exp()) * (u + 1.0)
                    }
                    _ => silu(g) * u,
                };
                let gated: Vec<f64> = gate.iter().zip(up).map(|(g, u)| gated(*g, u)).collect();
                biased("ffn_down", product(&part("ffn_down"), &gated))
            };
            let mut out = match c.experts {
                None => block("", 0, 1),
                Some(Experts { count, used, shared, normalised, biases }) => {
                    let mut scores = product(&rows(file, &name("ffn_gate_inp.weight")), &x);
                    if biases {
                        let bias = &rows(file, &name("ffn_gate_inp.bias"))[0];
                        scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
                    }
                    let mut order: Vec<usize> = (0..count).collect();
                    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
                    let sum_of = |experts: &[usize]| experts.iter().map(|e| scores[*e].exp()).sum::<f64>();
                    let sum = if normalised { sum_of(&order[..used]) } else { sum_of(&order) };
                    let mut out = vec![0.0; c.width];
                    let mut add = |factor: f64, part: Vec<f64>| {
                        out.iter_mut().zip(part).for_each(|(out, part)| *out += factor * part);
                    };
                    for &expert in &order[..used] {
                        add(scores[expert].exp() / sum, block("_exps", expert, count));
                    }
                    if shared.is_some() {
                        let gate = dot(&rows(file, &name("ffn_gate_inp_shexp.weight"))[0], &x);
                        add(1.0 / (1.0 + (-gate).exp()), block("_shexp", 0, 1));
                    }
                    out
                }
            };
            if gemma {
                out = norm(&out, &rows(file, &name("post_ffw_norm.weight"))[0], c.norm_eps);
            }
            hidden[position].iter_mut().zip(out).for_each(|(h, o)| *h += o);
        }
    }
    let last = norm(hidden.last().unwrap(), &rows(file, "output_norm.weight")[0], c.norm_eps);
    if c.pooled {
        return last;
    }
    let mut logits = product(&rows(file, c.head_tensor()), &last);
    if gemma {
        logits.iter_mut().for_each(|logit| *logit = 30.0 * (*logit / 30.0).tanh());
    }
    logits
}

fn rows(file: &ModelFile, name: &str) -> Vec<Vec<f64>> {
    rows_of(file, name, 0..file.tensor(name).unwrap().rows)
}

fn rows_of(file: &ModelFile, name: &str, rows: Range<usize>) -> Vec<Vec<f64>> {
    let tensor = file.tensor(name).unwrap();
    let mut all = vec![0.0; rows.len() * tensor.cols];
    tensor.quant.dequantize_f64(&tensor.read(rows).unwrap(), &mut all);
    all.chunks_exact(tensor.cols).map(<[f64]>::to_vec).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn product(matrix: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| dot(row, x)).collect()
}

fn norm(x: &[f64], weight: &[f64], eps: f32) -> Vec<f64> {
    let rms = (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x / rms * w).collect()
}

fn rotate(file: &ModelFile, head: &[f64], position: usize, local: bool) -> Vec<f64> {
    let rope = &file.config().rope;
    let mut out = head.to_vec();
    for i in 0..rope.dims / 2 {
        let base = if local { 1e4 } else { f64::from(rope.base) };
        let angle = position as f64 * base.powf(-2.0 * i as f64 / rope.dims as f64);
        let (a, b) = match rope.kind {
            RopeKind::Interleaved => (2 * i, 2 * i + 1),
            RopeKind::Halves => (i, i + rope.dims / 2),
        };
        out[a] = head[a] * angle.cos() - head[b] * angle.sin();
        out[b] = head[a] * angle.sin() + head[b] * angle.cos();
    }
    out
}

/// A small model with scaled-down norm weights, so that attention spreads over many positions instead of one.
fn gentle(tiny: TinyModel) -> Arc<ModelFile> {
    let mut writer = tiny.writer();
    for tensor in writer.tensors_mut() {
        if matches!(tensor.name.rsplit('.').nth(1), Some("attn_norm" | "ffn_norm" | "output_norm"))
            || (tiny.architecture == Architecture::GptOss && tensor.name.ends_with("post_attention_norm.weight"))
        {
            for number in tensor.bytes.chunks_exact_mut(4) {
                let scaled = f32::from_le_bytes([number[0], number[1], number[2], number[3]]) * 0.06;
                number.copy_from_slice(&scaled.to_le_bytes());
            }
        }
    }
    ModelFile::from_bytes(writer.write().into()).unwrap()
}

fn logits(file: &Arc<ModelFile>, activations: Activations, tokens: &[u32]) -> Vec<f64> {
    let layers = 0..file.config().layers;
    let options = StageOptions { layers, sequences: 1, context: 64, activations, threads: 2 };
    let mut stage = kernels_models::load_cpu_stage(Arc::clone(file), options).unwrap();
    let mut out = Vec::new();
    for (position, tokens) in [(0, &tokens[..tokens.len() - 2]), (tokens.len() - 2, &tokens[tokens.len() - 2..])] {
        out = stage
            .forward(
                &mut Threads::new(2).unwrap(),
                &[Rows { sequence: 0, position, input: RowsIn::Tokens(tokens), output: RequestedOutput::Logits }],
            )
            .unwrap();
    }
    let Some(RowsOut::Logits(logits) | RowsOut::Embedding(logits)) = out.pop() else { panic!("expected logits") };
    logits.into_iter().map(f64::from).collect()
}

/// Relative error in the L2 norm.
fn error(found: &[f64], exact: &[f64]) -> f64 {
    let difference: Vec<f64> = found.iter().zip(exact).map(|(f, e)| f - e).collect();
    (dot(&difference, &difference) / dot(exact, exact)).sqrt()
}

#[test]
fn every_architecture_and_format_agrees_with_f64() {
    let tokens: Vec<u32> = (0..37).map(|i| (i * 29 + 7) % 250).collect();
    for architecture in Architecture::ALL {
        for quant in QUANT_TYPES {
            // Query heads wider than the model, and widths that are not whole groups where the format's blocks allow.
            let (ffn, heads) = if quant.block_len() == 256 { (512, 8) } else { (480, 6) };
            let tied = quant == QuantType::Q8_0;
            // Every fourth layer of SmolLM3 is special.
            let layers = if architecture == Architecture::SmolLm3 { 4 } else { 2 };
            let tiny = TinyModel { architecture, quant, ffn, tied, layers, heads, ..TinyModel::default() };
            agrees(tiny, &tokens);
        }
    }
}

/// Widths that are not multiples of the group of 64 columns nor, for float formats, of the block of 32.
#[test]
fn any_width_agrees_with_f64() {
    let tokens: Vec<u32> = (0..21).map(|i| (i * 23 + 5) % 250).collect();
    for architecture in Architecture::ALL {
        for quant in QUANT_TYPES.into_iter().filter(|quant| quant.block_len() < 256) {
            let (width, ffn) = if quant.block_len() == 1 { (250, 333) } else { (288, 352) };
            let tiny =
                TinyModel { architecture, quant, width, ffn, layers: 2, heads: 3, kv_heads: 1, ..TinyModel::default() };
            if quant.block_len() == 1 && has_experts(architecture) {
                continue; // experts are whole rows of tiles
            }
            agrees(tiny, &tokens);
        }
    }
}

fn has_experts(architecture: Architecture) -> bool {
    TinyModel { architecture, ..TinyModel::default() }.open().config().experts.is_some()
}

/// Mixtral is Llama with experts; a router that chooses one or all of them.
#[test]
fn any_number_of_experts_agrees_with_f64() {
    let tokens: Vec<u32> = (0..21).map(|i| (i * 23 + 5) % 250).collect();
    for architecture in [Architecture::Llama, Architecture::Qwen2Moe, Architecture::Qwen3Moe] {
        for experts in [[4, 1], [8, 2], [5, 5], [40, 8]] {
            let (width, ffn) = (160, 96);
            let sizes = TinyModel { width, ffn, heads: 2, kv_heads: 1, layers: 2, ..TinyModel::default() };
            agrees(TinyModel { architecture, quant: QuantType::Q8_0, experts: Some(experts), ..sizes }, &tokens);
        }
    }
}

#[test]
fn biases_in_attention_are_applied() {
    let tokens: Vec<u32> = (0..19).map(|i| (i * 31 + 3) % 250).collect();
    for architecture in Architecture::ALL {
        for quant in [QuantType::Q4_1, QuantType::Q8_0, QuantType::F32] {
            let tiny = TinyModel { architecture, quant, biases: true, layers: 2, ..TinyModel::default() };
            agrees(tiny, &tokens);
        }
    }
}

#[test]
fn an_embedding_is_the_normalised_row_of_the_last_token() {
    let tokens: Vec<u32> = (0..23).map(|i| (i * 37 + 11) % 250).collect();
    for architecture in Architecture::ALL {
        for (quant, tied) in [(QuantType::Q8_0, true), (QuantType::F16, false)] {
            let tiny = TinyModel { architecture, quant, tied, pooled: true, layers: 2, ..TinyModel::default() };
            agrees(tiny, &tokens);
        }
    }
}

fn agrees(tiny: TinyModel, tokens: &[u32]) {
    let TinyModel { architecture, quant, .. } = tiny;
    let file = gentle(tiny);
    let exact = naive(&file, tokens);
    let strict = error(&logits(&file, Activations::F32, tokens), &exact);
    let fast = error(&logits(&file, Activations::Int8, tokens), &exact);
    println!("{architecture:?} {quant:?}: f32 {strict:.1e}, int8 {fast:.1e}");
    assert!(strict < 1e-4, "{architecture:?} {quant:?}: f32 path is off by {strict}");
    // A row whose scores are close may choose another expert.
    let experts = file.config().experts.is_some();
    let bound = if experts {
        0.6
    } else if quant.block_len() == 1 {
        2e-2
    } else {
        6e-2
    };
    assert!(fast < bound, "{architecture:?} {quant:?}: int8 path is off by {fast}");
}
