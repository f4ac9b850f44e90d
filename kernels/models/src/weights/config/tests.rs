//! Tests of model configurations read from metadata, and of invalid metadata.
use kernels::order::Activation;
use kernels::order::experts::Gating;
use kernels::quant::{QuantType, random_blocks};

use crate::recipe::Recipe;
use crate::stage::Activations;
use crate::weights::testing::{GgufWriter, TinyModel};
use crate::weights::{
    Architecture, Experts, HeadNorms, ModelConfig, ModelFile, Rope, RopeKind, RopeScaling, ShardIndex, SharedExpert,
    Temperature, WeightsError, Window,
};

fn open(w: &GgufWriter) -> Result<std::sync::Arc<ModelFile>, WeightsError> {
    ModelFile::from_bytes(w.write().into())
}

fn rejects(w: &GgufWriter, part: &str) {
    let error = open(w).expect_err(part).to_string();
    assert!(error.contains(part), "expected {part:?} in {error:?}");
}

#[test]
fn each_architecture_has_its_configuration() {
    let config = |architecture| TinyModel { architecture, ..TinyModel::default() }.open().config().clone();
    let llama = config(Architecture::Llama);
    assert_eq!(
        (llama.attention_bias, llama.head_norms.is_some(), llama.rope.kind),
        (false, false, RopeKind::Interleaved)
    );
    let qwen2 = config(Architecture::Qwen2);
    assert_eq!((qwen2.attention_bias, qwen2.head_norms.is_some(), qwen2.rope.kind), (true, false, RopeKind::Halves));
    let qwen3 = config(Architecture::Qwen3);
    assert_eq!((qwen3.attention_bias, qwen3.head_norms.is_some(), qwen3.rope.kind), (false, true, RopeKind::Halves));
    let gemma3 = config(Architecture::Gemma3);
    assert_eq!((gemma3.attention_bias, gemma3.head_norms.is_some(), gemma3.norms_after), (false, true, true));
    assert_eq!((gemma3.rope.base, gemma3.logit_cap, gemma3.context), (1e6, Some(30.0), 512));
    let recipe = Recipe::of(&gemma3);
    let seen: Vec<_> = recipe.layers.iter().map(|layer| (layer.window, layer.rope.base)).collect();
    assert_eq!(seen, [(Some(Window::Sliding(9)), 10_000.0), (Some(Window::Sliding(9)), 10_000.0), (None, 1e6)]);
    assert_eq!((recipe.embed_scale, recipe.layers[0].scale), (Some(16.0), 0.125));
    let gemma2 = config(Architecture::Gemma2);
    assert_eq!((gemma2.head_norms.is_some(), gemma2.norms_after, gemma2.rope.kind), (false, true, RopeKind::Halves));
    assert_eq!((gemma2.score_cap, gemma2.logit_cap), (Some(2.0), Some(30.0)));
    let seen: Vec<_> = Recipe::of(&gemma2).layers.iter().map(|layer| (layer.window, layer.rope.base)).collect();
    assert_eq!(seen, [(Some(Window::Sliding(9)), 10_000.0), (None, 10_000.0), (Some(Window::Sliding(9)), 10_000.0)]);
    let smollm3 = TinyModel { architecture: Architecture::SmolLm3, layers: 8, ..TinyModel::default() }.open();
    let recipe = Recipe::of(smollm3.config());
    let still =
        |index: usize| smollm3.rotary_frequencies(&recipe.layers[index].rope, 64).expect("valid").inverse[0] == 0.0;
    assert_eq!((0..8).filter(|index| still(*index)).collect::<Vec<_>>(), [3, 7]);
    let oss = config(Architecture::GptOss);
    assert!(oss.attention_bias && oss.attention_output_bias && oss.sinks && !oss.norms_after);
    let layers = Recipe::of(&oss).layers;
    assert_eq!(
        layers.iter().map(|layer| layer.window).collect::<Vec<_>>(),
        [Some(Window::Sliding(9)), None, Some(Window::Sliding(9))]
    );
    assert_eq!((layers[0].activation, layers[0].ffn_norm), (Activation::Clamped, "post_attention_norm.weight"));
    let qwen2moe = config(Architecture::Qwen2Moe);
    assert_eq!(
        (qwen2moe.attention_bias, qwen2moe.head_norms.is_some(), qwen2moe.rope.kind),
        (true, false, RopeKind::Halves)
    );
    let experts = Experts {
        count: 6,
        used: 2,
        width: 512,
        shared: Some(SharedExpert { width: 512, gated: true }),
        gating: Gating::Softmax,
        corrected: false,
        normalised: false,
        scale: 1.0,
        on_input: false,
        biases: false,
        first: 0,
        period: 1,
    };
    assert_eq!(qwen2moe.experts, Some(experts));
    let qwen3moe = config(Architecture::Qwen3Moe);
    assert_eq!(
        (qwen3moe.attention_bias, qwen3moe.head_norms.is_some(), qwen3moe.rope.kind),
        (false, true, RopeKind::Halves)
    );
    assert_eq!(qwen3moe.experts, Some(Experts { shared: None, normalised: true, ..experts }));
    let glm = config(Architecture::Glm4Moe);
    let sigmoids = Experts { gating: Gating::Sigmoid, normalised: true, ..experts };
    let shared = Some(SharedExpert { width: 1024, gated: false });
    assert_eq!(glm.experts, Some(Experts { shared, corrected: true, scale: 1.5, first: 1, ..sigmoids }));
    assert_eq!((glm.ffn, glm.rope.dims, glm.rope.kind, glm.predictors), (768, 32, RopeKind::Halves, 0));
    let shown = |config: &ModelConfig| -> Vec<bool> {
        Recipe::of(config).layers.iter().map(|layer| layer.experts.is_some()).collect()
    };
    assert_eq!(shown(&glm), [false, true, true]);
    let llama4 = TinyModel::of(Architecture::Llama4).open().config().clone();
    let shared = Some(SharedExpert { width: 512, gated: false });
    assert_eq!(llama4.experts, Some(Experts { shared, normalised: false, on_input: true, period: 2, ..sigmoids }));
    assert_eq!(shown(&llama4), [false, true, false, true]);
    let layers = Recipe::of(&llama4).layers;
    assert_eq!((layers[0].window, layers[0].head_norms), (Some(Window::Chunk(10)), Some(HeadNorms::Plain)));
    assert_eq!((layers[3].window, layers[3].head_norms, layers[0].temperature), (None, None, None));
    assert_eq!(layers[3].temperature, Some(Temperature { scale: f64::from(0.3f32), every: 4, offset: 1 }));
    let phi3 = config(Architecture::Phi3);
    let scaling = RopeScaling::Long { original_context: 64, attention_factor: f64::from(1.19f32) };
    assert_eq!((phi3.rope.scaling, phi3.rope.dims, phi3.context), (scaling, 48, 512));
    assert!(Recipe::of(&phi3).layers.iter().all(|layer| layer.window == Some(Window::Sliding(9))));
    let mistral3 = config(Architecture::Mistral3);
    assert!(Recipe::of(&mistral3).layers.iter().all(|layer| layer.temperature.is_some_and(|t| t.every == 8)));
    let mixtral = TinyModel { experts: Some([4, 2]), ..TinyModel::default() }.open().config().experts;
    assert_eq!(mixtral, Some(Experts { count: 4, shared: None, normalised: true, ..experts }));
    for (architecture, output) in [
        (Architecture::Llama, true),
        (Architecture::Qwen2, false),
        (Architecture::Qwen2Moe, false),
        (Architecture::Qwen3, true),
        (Architecture::Qwen3Moe, true),
        (Architecture::Gemma2, true),
        (Architecture::Gemma3, true),
        (Architecture::SmolLm3, true),
        (Architecture::GptOss, true),
    ] {
        let biased = TinyModel { architecture, biases: true, ..TinyModel::default() }.open();
        assert_eq!((biased.config().attention_bias, biased.config().attention_output_bias), (true, output));
    }
    assert_eq!((llama.layers, llama.width, llama.heads, llama.kv_heads, llama.head_dim), (3, 256, 4, 2, 64));
    assert_eq!((llama.q_width(), llama.kv_width(), llama.ffn, llama.context), (256, 128, 512, 512));
    assert!(llama.tied);
    let untied = TinyModel { tied: false, ..TinyModel::default() }.open();
    assert_eq!((untied.config().tied, untied.config().head_tensor()), (false, "output.weight"));
}

#[test]
fn unsupported_features_are_rejected_by_name() {
    let tiny = || TinyModel::default().writer();
    rejects(
        tiny().text("general.architecture", "mamba"),
        "\"mamba\"; supported: llama, qwen2, qwen2moe, qwen3, qwen3moe, gemma2, gemma3, smollm3, gpt-oss",
    );
    rejects(tiny().without("general.architecture"), "general.architecture");
    let with_experts = |architecture| TinyModel { architecture, ..TinyModel::default() }.writer();
    rejects(with_experts(Architecture::Qwen3).u32("qwen3.expert_count", 8), "expected no experts in a qwen3 model");
    let moe = || with_experts(Architecture::Qwen3Moe);
    rejects(moe().u32("qwen3moe.expert_count", 0), "expert_count: expected 1 to 1024, found 0");
    rejects(moe().u32("qwen3moe.expert_count", 5000), "expert_count: expected 1 to 1024, found 5000");
    rejects(moe().u32("qwen3moe.expert_used_count", 7), "expert_used_count: expected 1 to 6, found 7");
    rejects(moe().u32("qwen3moe.expert_count", 5), "blk.0.ffn_gate_inp.weight");
    rejects(moe().u32("qwen3moe.expert_gating_func", 2), "expert_gating_func: expected 1, found 2");
    rejects(moe().u32("qwen3moe.expert_feed_forward_length", 500), "in multiples of 16");
    rejects(tiny().f32("llama.attn_logit_softcapping", 30.0), "attn_logit_softcapping");
    rejects(tiny().bool("llama.attention.causal", false), "attention.causal");
    rejects(tiny().text("llama.rope.scaling.type", "longrope"), "\"longrope\" is not supported");
    rejects(tiny().u32("llama.attention.value_length", 32), "value heads as wide as key heads");
    rejects(tiny().i32s("llama.attention.head_count_kv", &[2, 2, 1]), "found an array of 3");
    let bytes = vec![0; 1024];
    rejects(tiny().tensor("blk.0.ffn_gate_inp.weight", QuantType::F32, [1, 256], bytes.clone()), "not part of a llama");
    rejects(tiny().tensor("blk.3.attn_norm.weight", QuantType::F32, [1, 256], bytes.clone()), "not part of a llama");
    rejects(tiny().tensor("blk.00.attn_norm.weight", QuantType::F32, [1, 256], bytes.clone()), "not part of a llama");
    // A bias on a single matrix of one layer, or one that the architecture lacks.
    rejects(tiny().tensor("blk.1.attn_q.bias", QuantType::F32, [1, 256], bytes.clone()), "not part of a llama");
    rejects(
        tiny().tensor("blk.0.attn_q.bias", QuantType::F32, [1, 256], bytes.clone()),
        "\"blk.0.attn_k.bias\" is missing",
    );
    rejects(
        tiny().tensor("blk.0.attn_output.bias", QuantType::F32, [1, 256], bytes.clone()),
        "\"blk.1.attn_output.bias\" is missing",
    );
    rejects(tiny().tensor("blk.0.ffn_up.bias", QuantType::F32, [1, 512], vec![0; 2048]), "not part of a llama");
    let mut qwen2 = TinyModel { architecture: Architecture::Qwen2, ..TinyModel::default() }.writer();
    rejects(qwen2.tensor("blk.0.attn_output.bias", QuantType::F32, [1, 256], bytes), "not part of a qwen2");
}

/// Metadata in Gemma 3 files, and the defaults for what they omit.
#[test]
fn gemma_3_defaults_apply_to_missing_metadata() {
    let gemma = |layers| {
        let tiny = TinyModel { architecture: Architecture::Gemma3, layers, ffn: 256, heads: 8, ..TinyModel::default() };
        let mut w = tiny.writer();
        for key in ["attention.sliding_window_pattern", "rope.freq_base", "final_logit_softcapping"] {
            w.without(&format!("gemma3.{key}"));
        }
        w
    };
    let file = open(gemma(7).u32("gemma3.attention.sliding_window", 512)).expect("opens");
    let recipe = Recipe::of(file.config());
    let global: Vec<usize> = (0..7).filter(|layer| recipe.layers[*layer].window.is_none()).collect();
    assert_eq!((global, recipe.layers[5].rope.base, recipe.layers[6].rope.base), (vec![5], 1e6, 1e4));
    assert_eq!((recipe.layers[0].window, recipe.logit_cap), (Some(Window::Sliding(512)), None));
    // The largest model scales by width over heads (256 / 8) instead of the 64 elements per head.
    let mut largest = gemma(62);
    largest.f32("gemma3.attention.scale", 0.0);
    assert_eq!(open(&largest).expect("opens").config().attention_scale, 1.0 / 32f32.sqrt());
    assert_eq!(open(gemma(1).f32("gemma3.attention.scale", 0.5)).expect("opens").config().attention_scale, 0.5);
    rejects(gemma(1).without("gemma3.attention.sliding_window"), "gemma3.attention.sliding_window");
    rejects(gemma(1).u32("gemma3.attention.sliding_window_pattern", 0), "sliding_window_pattern: expected 1 to");
}

#[test]
fn impossible_sizes_are_rejected() {
    let tiny = || TinyModel::default().writer();
    for key in ["block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"] {
        let key = format!("llama.{key}");
        rejects(tiny().u32(&key, 0), &key);
        rejects(tiny().u32(&key, u32::MAX), &key);
        rejects(tiny().without(&key), &key);
        rejects(tiny().text(&key, "3"), "found a string");
        rejects(tiny().raw(&key, 5, &(-3i32).to_le_bytes()), "found the integer -3");
    }
    rejects(tiny().u32("llama.attention.head_count_kv", 3), "a multiple of the key heads");
    rejects(tiny().u32("llama.attention.head_count_kv", 0), "head_count_kv");
    rejects(tiny().u32("llama.block_count", 4), "\"blk.3.attn_norm.weight\" is missing");
    rejects(tiny().u32("llama.block_count", 2), "not part of a llama model of 2 layers");
    rejects(tiny().u32("llama.feed_forward_length", 256), "expected [256, 256]");
    rejects(tiny().u32("llama.rope.dimension_count", 63), "even number of rotary");
    rejects(tiny().u32("llama.rope.dimension_count", 128), "rope.dimension_count");
    rejects(tiny().f32("llama.rope.freq_base", f32::NAN), "a finite number");
    rejects(tiny().f32("llama.rope.freq_base", 0.5), "rope.freq_base");
    rejects(tiny().f32("llama.attention.layer_norm_rms_epsilon", -1.0), "epsilon");
    rejects(tiny().texts("tokenizer.ggml.tokens", &["a", "b"]), "one embedding row per token");
    let mut short = tiny();
    short.tensors_mut().retain(|t| t.name != "output_norm.weight");
    rejects(&short, "\"output_norm.weight\" is missing");
}

#[test]
fn a_sliding_window_bounds_the_context() {
    let file = open(TinyModel::default().writer().u32("llama.attention.sliding_window", 100)).expect("opens");
    assert_eq!(file.config().context, 100);
}

fn rope(scaling: RopeScaling) -> Rope {
    Rope { kind: RopeKind::Interleaved, base: 500_000.0, dims: 128, scaling }
}

fn close(found: &[f64], expected: impl Fn(usize) -> f64) {
    for (i, f) in found.iter().enumerate() {
        let w = expected(i);
        assert!((f - w).abs() <= 1e-12 * w.abs(), "pair {i}: {f} for {w}");
    }
}

#[test]
fn frequencies_are_powers_of_the_base() {
    for (base, dims) in [(10_000.0, 64), (100_000.0, 64), (500_000.0, 128), (1e6, 2), (1.5, 256), (1e12, 1024)] {
        let rope = Rope { kind: RopeKind::Halves, base, dims, scaling: RopeScaling::None };
        let found = rope.frequencies(None).expect("valid");
        assert_eq!((found.inverse.len(), found.magnitude), (dims / 2, 1.0));
        close(&found.inverse, |i| f64::from(base).powf(-2.0 * i as f64 / dims as f64));
    }
    let plain = |i: usize| 500_000f64.powf(-(i as f64) / 64.0);
    let linear = rope(RopeScaling::Linear { factor: 4.0 }).frequencies(None).expect("valid");
    close(&linear.inverse, |i| plain(i) / 4.0);
    let factors: Vec<f32> = (0..64).map(|i| 1.0 + i as f32 / 8.0).collect();
    let llama3 = rope(RopeScaling::None).frequencies(Some(("factors", &factors))).expect("valid");
    close(&llama3.inverse, |i| plain(i) / f64::from(factors[i]));
    for wrong in [vec![1.0; 63], vec![0.0; 64], vec![f32::NAN; 64], vec![-1.0; 64]] {
        assert!(rope(RopeScaling::None).frequencies(Some(("factors", &wrong))).is_err());
    }
}

/// The paper's formula in terms of wavelengths instead of dimensions, at both ends and on the ramp.
#[test]
fn yarn_keeps_short_waves_and_divides_long_ones() {
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 32_768,
        attention_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    let yarn = Rope { base: 1e6, ..rope(scaling) }.frequencies(None).expect("valid");
    let plain = |i: usize| 1e6f64.powf(-(i as f64) / 64.0);
    let turns = |i: usize| 32_768.0 * plain(i) / std::f64::consts::TAU;
    assert!((yarn.magnitude - 1.138_629_4).abs() < 1e-6);
    let mut ratios = Vec::new();
    for i in 0..64 {
        let ratio = yarn.inverse[i] / plain(i);
        // The ends of the ramp are rounded outward to whole dimensions, hence one dimension of tolerance.
        if turns(i.saturating_sub(1)) > 40.0 && turns(i) > 40.0 {
            assert!((ratio - 1.0).abs() < 1e-12, "pair {i} turns {} times, ratio {ratio}", turns(i));
        }
        if turns(i) < 0.5 {
            assert!((ratio - 0.25).abs() < 1e-12, "pair {i} turns {} times, ratio {ratio}", turns(i));
        }
        ratios.push(ratio);
    }
    assert!(ratios.windows(2).all(|r| r[1] <= r[0] + 1e-12));
    assert!(ratios.iter().any(|r| *r > 0.3 && *r < 0.95), "no ramp");
}

#[test]
fn scaling_is_read_from_the_header() {
    let read = |change: &dyn Fn(&mut GgufWriter)| {
        let mut w = TinyModel::default().writer();
        change(&mut w);
        open(&w).expect("opens").config().rope.scaling
    };
    assert_eq!(read(&|_| ()), RopeScaling::None);
    assert_eq!(read(&|w| _ = w.f32("llama.rope.scale_linear", 2.0)), RopeScaling::Linear { factor: 2.0 });
    let linear =
        |w: &mut GgufWriter| _ = w.text("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 8.0);
    assert_eq!(read(&linear), RopeScaling::Linear { factor: 8.0 });
    let yarn = |w: &mut GgufWriter| {
        w.text("llama.rope.scaling.type", "yarn").f32("llama.rope.scaling.factor", 4.0);
        w.u32("llama.rope.scaling.original_context_length", 128);
    };
    let RopeScaling::Yarn { factor, original_context, beta_fast, .. } = read(&yarn) else { panic!("not YaRN") };
    assert_eq!((factor, original_context, beta_fast), (4.0, 128, 32.0));
    // Llama 3: factors as a tensor.
    let mut w = TinyModel::default().writer();
    let factors: Vec<u8> = (0..32).flat_map(|i| (1.0 + i as f32).to_le_bytes()).collect();
    w.tensor("rope_freqs.weight", QuantType::F32, [1, 32], factors);
    let file = open(&w).expect("opens");
    let found = file.rotary_frequencies(&file.config().rope, 64).expect("factors");
    close(&found.inverse, |i| 10_000f64.powf(-(i as f64) / 32.0) / (1.0 + i as f64));
}

/// GLM-4.5's files end with blocks that predict later tokens: they are not computed, and no stage holds them.
#[test]
fn predictors_are_not_used() {
    let mut w = TinyModel::of(Architecture::Glm4Moe).writer();
    w.u32("glm4moe.block_count", 4);
    let extra = |w: &mut GgufWriter| {
        for (name, rows) in [("attn_norm.weight", 1), ("nextn.eh_proj.weight", 256)] {
            let numbers = random_blocks(QuantType::F32, rows * 256, 7);
            w.tensor(&format!("blk.3.{name}"), QuantType::F32, [rows, 256], numbers);
        }
    };
    extra(&mut w);
    let error = ModelFile::from_bytes(w.write().into()).expect_err("a block without its matrices").to_string();
    assert!(error.contains("blk.3.attn_q.weight"), "{error}");
    w.u32("glm4moe.nextn_predict_layers", 1);
    let file = ModelFile::from_bytes(w.write().into()).expect("opens");
    assert_eq!((file.config().layers, file.config().predictors), (3, 1));
    let plain = TinyModel::of(Architecture::Glm4Moe).open();
    assert_eq!(file.costs(Activations::Int8), plain.costs(Activations::Int8));
    let last = file.stage_ranges(0..3);
    assert!(last.iter().all(|range| range.end <= file.tensor("blk.3.attn_norm.weight").expect("there").range.start));
    for (count, what) in [(4, "more blocks than"), (u32::MAX, "more blocks than")] {
        w.u32("glm4moe.nextn_predict_layers", count);
        let error = ModelFile::from_bytes(w.write().into()).expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
    }
    let mut w = TinyModel::default().writer();
    w.u32("llama.nextn_predict_layers", 1);
    let error = ModelFile::from_bytes(w.write().into()).expect_err("not of this family").to_string();
    assert!(error.contains("expected none in a llama model"), "{error}");
}

/// The parts of Phi-3's joined matrices are ranges of the file.
#[test]
fn joined_matrices_are_split() {
    let tiny = TinyModel { quant: QuantType::Q4_0, ..TinyModel::of(Architecture::Phi3) };
    let mut w = tiny.writer();
    let joined = w.tensors_mut().iter().find(|tensor| tensor.name == "blk.1.attn_qkv.weight").expect("there").clone();
    let file = ModelFile::from_bytes(w.write().into()).expect("opens");
    let read = |part: &str| {
        let tensor = file.tensor(&format!("blk.1.{part}.weight")).expect("there");
        tensor.read(0..tensor.rows).expect("readable")
    };
    assert!(joined.bytes == [read("attn_q"), read("attn_k"), read("attn_v")].concat());
    assert!(file.tensor("blk.1.attn_qkv.weight").is_none());
    let index = ShardIndex::build(&file, |_| ()).expect("complete");
    assert!(index.matches(&file), "chunks are those of the parts");
    // A part that is there a second time.
    let bytes = random_blocks(QuantType::Q4_0, 256 * 8, 1);
    w.tensor("blk.1.attn_q.weight", QuantType::Q4_0, [256, 256], bytes);
    let error = ModelFile::from_bytes(w.write().into()).expect_err("twice").to_string();
    assert!(error.contains("expected each matrix once"), "{error}");
}
