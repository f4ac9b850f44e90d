//! Draft tokens change no answer, whatever the temperature, and survive the loss of a stage.
use crate::harness::{Mesh, model, require};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const TOKENS: u32 = 160;

/// A file, and the beginning of a copy of it: what a model repeats.
fn edit() -> String {
    let lines: Vec<String> = (0..9)
        .map(|i| format!("    let x{i} = read(base + {});\n    check(x{i} <= limit, \"register {i}\")?;\n", 4 * i))
        .collect();
    format!(
        "fn verify(base: usize, limit: u32) {{\n{}}}\n\nfn validate(base: usize, limit: u32) {{\n{}",
        lines.concat(),
        lines[0]
    )
}

fn request(model: &Path, temperature: f64, drafts: u8) -> Value {
    json!({
        "model": model, "prompt": edit(), "raw": true, "max_tokens": TOKENS, "temperature": temperature, "seed": 5,
        "ignore_eos": true, "draft_tokens": drafts,
    })
}

/// The tokens of an answer. `at` is called with the number of tokens so far.
fn answer(mesh: &mut Mesh, request: &Value, mut at: impl FnMut(&mut Mesh, usize)) -> Vec<u64> {
    let lines = mesh.nodes[0].post_lines("/api/v1/generate", request).expect("a stream");
    let mut tokens = Vec::new();
    for line in lines {
        let event: Value = serde_json::from_str(&line.expect("an intact stream")).expect("JSON lines");
        if let Some(token) = event["token"].as_u64() {
            tokens.push(token);
            at(mesh, tokens.len());
        }
    }
    assert_eq!(tokens.len(), TOKENS as usize);
    tokens
}

/// Draft tokens of the job so far, and those of them that were right.
fn drafts(mesh: &Mesh) -> (u64, u64) {
    let served = |state: &Value| state["jobs"][0]["draft_tokens"].is_u64();
    let state = mesh.nodes[0].wait_state(Duration::from_secs(10), served).expect("a job");
    let count = |name: &str| state["jobs"][0][name].as_u64().expect("a number");
    (count("draft_tokens"), count("draft_tokens_right"))
}

#[test]
fn answers_are_the_same_with_drafts_also_after_a_loss() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let bytes = mesh.model_bytes(&model);
    for i in 0..4 {
        // Two nodes fit the model and its cache; the others have room for their standbys.
        mesh.start(&format!("n{i}"), Some((bytes as f64 * 0.8) as u64 + (96 << 20)));
    }
    mesh.wait_members(4);
    let options = json!({"int8": true, "context": 4096, "sequences": 1});
    mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("it is served");
    let mut references = Vec::new();
    for temperature in [0.0, 1.0] {
        let (before, _) = drafts(&mesh);
        let reference = answer(&mut mesh, &request(&model, temperature, 0), |_, _| {});
        assert_eq!(drafts(&mesh).0, before, "none were asked for");
        assert_eq!(answer(&mut mesh, &request(&model, temperature, 7), |_, _| {}), reference, "at {temperature}");
        references.push(reference);
    }
    let (sent, right) = drafts(&mesh);
    assert!(right > 50, "{right} of {sent} drafts were right");
    let placed = |state: &Value| {
        let current = |standby: &Value| standby["state"] == "current";
        let stages = state["jobs"][0]["stages"].as_array().map_or(0, Vec::len);
        stages > 1
            && state["jobs"][0]["standbys"].as_array().is_some_and(|all| !all.is_empty() && all.iter().any(current))
    };
    mesh.nodes[0].wait_state(Duration::from_secs(60), placed).expect("stages and a standby");
    let greedy = request(&model, 0.0, 7);
    let after = answer(&mut mesh, &greedy, |mesh, tokens| {
        if tokens == 40 {
            mesh.kill_stage_of(0);
        }
    });
    assert_eq!(after, references[0], "after the loss of a stage");
}
