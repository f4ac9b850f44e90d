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

/// Logits of the last token, or its embedding, all in f64, without a KV cache. `context`: of the stage.
fn naive(file: &ModelFile, tokens: &[u32], context: usize) -> Vec<f64> {
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
        let [phi, glm, llama4, mistral] =
            [Architecture::Phi3, Architecture::Glm4Moe, Architecture::Llama4, Architecture::Mistral3]
                .map(|architecture| c.architecture == architecture);
        let banded = local || phi || (oss && layer % 2 == 0);
        let still = (llama4 || c.architecture == Architecture::SmolLm3) && layer % 4 == 3;
        // The small Llama 4: chunks of 10 positions, and a temperature that changes every four. Mistral 3's changes every eight.
        let temperature = |position: usize| match (llama4 && still, mistral) {
            (true, _) => 1.0 + 0.3 * (1.0 + ((position + 1) / 4) as f64).ln(),
            (_, true) => 1.0 + 0.3 * (1.0 + (position / 8) as f64).ln(),
            _ => 1.0,
        };
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
                    let mut head =
                        if turn && !still { rotate(file, &head, position, local && gemma3, context) } else { head };
                    if turn && llama4 && !still {
                        head = norm(&head, &vec![1.0; c.head_dim], c.norm_eps);
                    }
                    head
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
                    let score = temperature(position) * dot(&q[position][head], &k[p][kv]) / (c.head_dim as f64).sqrt();
                    if gemma && !gemma3 { 2.0 * (score / 2.0).tanh() } else { score }
                };
                let first = match (banded, llama4 && !still) {
                    (true, _) => (position + 1).saturating_sub(9),
                    (_, true) => position - position % 10,
                    _ => 0,
                };
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
            let block = |x: &[f64], kind: &str, index: usize, count: usize| -> Vec<f64> {
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
                let gate = biased("ffn_gate", product(&part("ffn_gate"), x));
                let up = biased("ffn_up", product(&part("ffn_up"), x));
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
            // The first layer of GLM-4.5 and every other one of the small Llama 4 are dense.
            let dense = glm && layer == 0 || llama4 && layer % 2 == 0;
            let mut out = match c.experts.filter(|_| !dense) {
                None => block(&x, "", 0, 1),
                Some(Experts { count, used, normalised, .. }) => {
                    let mut scores = product(&rows(file, &name("ffn_gate_inp.weight")), &x);
                    if oss {
                        let bias = &rows(file, &name("ffn_gate_inp.bias"))[0];
                        scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
                    }
                    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
                    let mut keys = scores.clone();
                    if glm {
                        let corrections = &rows(file, &name("exp_probs_b.bias"))[0];
                        keys = scores.iter().zip(corrections).map(|(score, more)| sigmoid(*score) + more).collect();
                    }
                    let share =
                        |expert: usize| if glm || llama4 { sigmoid(scores[expert]) } else { scores[expert].exp() };
                    let mut order: Vec<usize> = (0..count).collect();
                    order.sort_by(|a, b| keys[*b].total_cmp(&keys[*a]));
                    let sum_of = |experts: &[usize]| experts.iter().map(|e| share(*e)).sum::<f64>();
                    let sum = match normalised {
                        true => sum_of(&order[..used]),
                        false if llama4 => 1.0,
                        false => sum_of(&order),
                    };
                    let scale = if glm { 1.5 } else { 1.0 };
                    let mut out = vec![0.0; c.width];
                    let mut add = |factor: f64, part: Vec<f64>| {
                        out.iter_mut().zip(part).for_each(|(out, part)| *out += factor * part);
                    };
                    for &expert in &order[..used] {
                        let factor = scale * share(expert) / sum;
                        if llama4 {
                            let x: Vec<f64> = x.iter().map(|x| factor * x).collect();
                            add(1.0, block(&x, "_exps", expert, count));
                        } else {
                            add(factor, block(&x, "_exps", expert, count));
                        }
                    }
                    if c.architecture == Architecture::Qwen2Moe {
                        let gate = dot(&rows(file, &name("ffn_gate_inp_shexp.weight"))[0], &x);
                        add(sigmoid(gate), block(&x, "_shexp", 0, 1));
                    }
                    if glm || llama4 {
                        add(1.0, block(&x, "_shexp", 0, 1));
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

fn rotate(file: &ModelFile, head: &[f64], position: usize, local: bool, context: usize) -> Vec<f64> {
    let c = file.config();
    let rope = &c.rope;
    let mut out = head.to_vec();
    for i in 0..rope.dims / 2 {
        let base = if local { 1e4 } else { f64::from(rope.base) };
        let mut frequency = base.powf(-2.0 * i as f64 / rope.dims as f64);
        let mut magnitude = 1.0;
        if c.architecture == Architecture::Phi3 {
            // The small Phi-3: other factors for contexts above 64.
            let factors = if context > 64 { "rope_factors_long.weight" } else { "rope_factors_short.weight" };
            frequency /= rows(file, factors)[0][i];
            magnitude = f64::from(1.19f32);
        }
        if c.architecture == Architecture::Mistral3 {
            // YaRN from 8 positions to 32: Peng et al., arXiv 2309.00071, section 3.2, with the usual bounds of 32 turns and 1.
            let pair = |turns: f64| rope.dims as f64 * (8.0 / (turns * 2.0 * PI)).ln() / (2.0 * base.ln());
            let (low, high) = (pair(32.0).floor().max(0.0), pair(1.0).ceil().min(rope.dims as f64 - 1.0));
            let divided = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            frequency *= divided / 4.0 + 1.0 - divided;
            magnitude = (1.0 + 0.1 * 4f64.ln()) / (1.0 + 0.05 * 4f64.ln());
        }
        let angle = position as f64 * frequency;
        let (a, b) = match rope.kind {
            RopeKind::Interleaved => (2 * i, 2 * i + 1),
            RopeKind::Halves => (i, i + rope.dims / 2),
        };
        out[a] = magnitude * (head[a] * angle.cos() - head[b] * angle.sin());
        out[b] = magnitude * (head[a] * angle.sin() + head[b] * angle.cos());
    }
    out
}

/// A small model with scaled-down norm weights, so that attention spreads over many positions instead of one.
fn gentle(tiny: TinyModel) -> Arc<ModelFile> {
    let mut writer = tiny.writer();
    for tensor in writer.tensors_mut() {
        if matches!(tensor.name.rsplit('.').nth(1), Some("attn_norm" | "ffn_norm" | "output_norm"))
            || (matches!(tiny.architecture, Architecture::GptOss | Architecture::Glm4Moe)
                && tensor.name.ends_with("post_attention_norm.weight"))
        {
            for number in tensor.bytes.chunks_exact_mut(4) {
                let scaled = f32::from_le_bytes([number[0], number[1], number[2], number[3]]) * 0.06;
                number.copy_from_slice(&scaled.to_le_bytes());
            }
        }
    }
    ModelFile::from_bytes(writer.write().into()).unwrap()
}

fn logits(file: &Arc<ModelFile>, activations: Activations, tokens: &[u32], context: usize) -> Vec<f64> {
    let layers = 0..file.config().layers;
    let options = StageOptions { layers, sequences: 1, context, activations, ram: 0, threads: 2 };
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
            let layers = if TinyModel::of(architecture).layers == 4 { 4 } else { 2 };
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
            let tiny = TinyModel { quant, tied, pooled: true, ..TinyModel::of(architecture) };
            agrees(tiny, &tokens);
        }
    }
}

/// Phi-3 has other rotary factors for long contexts.
#[test]
fn a_long_context_agrees_with_f64() {
    let tokens: Vec<u32> = (0..41).map(|i| (i * 41 + 13) % 250).collect();
    let tiny = TinyModel { quant: QuantType::Q8_0, layers: 2, ..TinyModel::of(Architecture::Phi3) };
    agrees_within(tiny, &tokens, 65);
    let file = gentle(tiny);
    let [short, long] = [64, 65].map(|context| logits(&file, Activations::F32, &tokens, context));
    assert!(error(&short, &long) > 1e-3, "the factors differ");
}

fn agrees(tiny: TinyModel, tokens: &[u32]) {
    agrees_within(tiny, tokens, 64);
}

fn agrees_within(tiny: TinyModel, tokens: &[u32], context: usize) {
    let TinyModel { architecture, quant, .. } = tiny;
    let file = gentle(tiny);
    let exact = naive(&file, tokens, context);
    let strict = error(&logits(&file, Activations::F32, tokens, context), &exact);
    let fast = error(&logits(&file, Activations::Int8, tokens, context), &exact);
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
