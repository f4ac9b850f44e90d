//! The real model against four independent engines: token ids of prompts, teacher-forced greedy tokens, and the error
//! of int8.
#![expect(clippy::print_stdout, reason = "human-readable figures")]
use std::sync::Arc;

use kernels::threads::Threads;
use kernels_models::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, Stage, StageOptions};
use kernels_models::weights::ModelFile;
use kernels_models::weights::testing::real_model_path;
use serde_json::Value;

/// Below this top-2 logit margin f32 engines may pick different tokens: their logits differ by 1e-4.
const MARGIN_F32: f64 = 0.01;
/// Below this margin int8 activations may pick a different token; llama.cpp's largest such margin on the same file is
/// 0.52.
const MARGIN_INT8: f64 = 0.6;
const MEAN_KL: f64 = 0.005;

struct Prompt {
    text: String,
    ids: Vec<u32>,
    greedy: Vec<u32>,
    margins: Vec<f64>,
    top: Vec<(usize, f32)>,
}

fn prompts() -> Vec<Prompt> {
    let json: Value = serde_json::from_str(include_str!("../../../tests/oracles/smollm2_greedy.json")).unwrap();
    let numbers =
        |v: &Value| -> Vec<u32> { v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect() };
    let prompt = |p: &Value| Prompt {
        text: p["text"].as_str().unwrap().to_owned(),
        ids: numbers(&p["ids"]),
        greedy: numbers(&p["numpy_f32"]["greedy_ids"]),
        margins: p["numpy_f32"]["margins"].as_array().unwrap().iter().map(|m| m.as_f64().unwrap()).collect(),
        top: p["numpy_f32"]["top5_last_prompt"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap() as f32))
            .collect(),
    };
    json["prompts"].as_array().unwrap().iter().map(prompt).collect()
}

fn stage(file: &Arc<ModelFile>, activations: Activations) -> Box<dyn Stage> {
    let layers = 0..file.config().layers;
    let options = StageOptions { layers, sequences: 4, context: 512, activations, ram: 0, threads: 2 };
    kernels_models::load_cpu_stage(Arc::clone(file), options).unwrap()
}

/// Logits after the prompt and after each token of the oracle's answer except the last (teacher forcing).
fn forced(stage: &mut dyn Stage, prompt: &Prompt) -> Vec<Vec<f32>> {
    let mut next = |position: usize, tokens: &[u32]| {
        let rows = Rows { sequence: 7, position, input: RowsIn::Tokens(tokens), output: RequestedOutput::Logits };
        match stage.forward(&mut Threads::new(2).unwrap(), &[rows]).unwrap().remove(0) {
            RowsOut::Logits(logits) => logits,
            other @ (RowsOut::Hidden(_)
            | RowsOut::Encoded(_)
            | RowsOut::Token(_)
            | RowsOut::Tokens(_)
            | RowsOut::Embedding(_)
            | RowsOut::Nothing) => {
                panic!("expected logits, found {other:?}")
            }
        }
    };
    let mut all = vec![next(0, &prompt.ids)];
    for (i, &token) in prompt.greedy[..prompt.greedy.len() - 1].iter().enumerate() {
        all.push(next(prompt.ids.len() + i, &[token]));
    }
    stage.release(7);
    all
}

fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, l) in logits.iter().enumerate() {
        if *l > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// KL(p ‖ q) of the softmax distributions of two logit vectors.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |x: &[f32]| -> Vec<f64> {
        let max = x.iter().fold(f64::NEG_INFINITY, |m, v| m.max(f64::from(*v)));
        let sum = x.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln();
        x.iter().map(|v| f64::from(*v) - max - sum).collect()
    };
    log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[test]
fn both_paths_agree_with_the_oracles() {
    let Some(path) = real_model_path() else { return };
    let file = ModelFile::open(&path).unwrap();
    let tokenizer = file.tokenizer().unwrap();
    let (mut strict, mut fast) = (stage(&file, Activations::F32), stage(&file, Activations::Int8));
    let (mut compared, mut kl, mut worst_logit) = ([0; 2], Vec::new(), 0f32);
    for prompt in prompts() {
        assert_eq!(tokenizer.encode(&prompt.text, true).unwrap(), prompt.ids, "ids of {:?}", prompt.text);
        let exact = forced(&mut *strict, &prompt);
        let rounded = forced(&mut *fast, &prompt);
        for &(id, logit) in &prompt.top {
            worst_logit = worst_logit.max((exact[0][id] - logit).abs());
        }
        for (i, (&token, &margin)) in prompt.greedy.iter().zip(&prompt.margins).enumerate() {
            if margin > MARGIN_F32 {
                assert_eq!(argmax(&exact[i]), token, "f32, token {i} after {:?}, margin {margin}", prompt.text);
                compared[0] += 1;
            }
            if margin >= MARGIN_INT8 {
                assert_eq!(argmax(&rounded[i]), token, "int8, token {i} after {:?}, margin {margin}", prompt.text);
                compared[1] += 1;
            }
            kl.push(divergence(&exact[i], &rounded[i]));
        }
    }
    let mean = kl.iter().sum::<f64>() / kl.len() as f64;
    println!("{compared:?} tokens compared (f32, int8); top-5 logits within {worst_logit}; mean KL {mean:.6}");
    assert!(worst_logit < 2e-3, "top-5 logits after the prompts differ by {worst_logit}");
    assert!(mean <= MEAN_KL, "mean KL of int8 from f32: {mean}");
}
