//! Several processes share one model by layers: the same tokens as on one node, also after the loss of a process.
use crate::harness::{Mesh, generate, greedy, model, require, tokens_of};
use serde_json::{Value, json};
use std::time::Duration;

/// One, two and three stages give the tokens of one node.
#[test]
fn any_number_of_nodes_gives_the_same_tokens() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let solo = mesh.solo(&model);
    let reference = tokens_of(&generate(&mesh.nodes[solo], &greedy(&model, 40)));
    assert_eq!(reference.len(), 40);
    // Both of two stages hold the shared embedding: together they need about 1.35 times the memory of one node.
    for (stages, share) in [(2, 0.8), (3, 0.62)] {
        let mut mesh = Mesh::new();
        let bytes = mesh.model_bytes(&model);
        for i in 0..3 {
            mesh.start(&format!("n{i}"), Some((bytes as f64 * share) as u64));
        }
        mesh.wait_members(3);
        let plan = mesh.nodes[0].post("/api/v1/plan", &crate::harness::deploy(&model)).expect("a plan");
        assert_eq!(plan["stages"].as_array().map(Vec::len), Some(stages), "{plan}");
        mesh.deploy(0, &model);
        let tokens = tokens_of(&generate(&mesh.nodes[0], &greedy(&model, 40)));
        assert_eq!(tokens, reference, "{stages} stages");
    }
}

/// A stage is killed while the answer streams, then another; the client's stream continues with the same tokens.
#[test]
fn a_stream_survives_the_loss_of_two_stages_in_turn() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let solo = mesh.solo(&model);
    let reference = tokens_of(&generate(&mesh.nodes[solo], &greedy(&model, 90)));
    let mut mesh = Mesh::new();
    let bytes = mesh.model_bytes(&model);
    // The coordinator and one other node suffice, so two of the other three may be lost in turn.
    for i in 0..4 {
        mesh.start(&format!("n{i}"), Some((bytes as f64 * 0.8) as u64));
    }
    mesh.wait_members(4);
    mesh.deploy(0, &model);
    let lines = mesh.nodes[0].post_lines("/api/v1/generate", &greedy(&model, 90)).expect("a stream");
    let mut events = Vec::new();
    for line in lines {
        let event: Value = serde_json::from_str(&line.expect("the stream is intact")).expect("JSON lines");
        events.push(event);
        if matches!(events.len(), 20 | 50) {
            mesh.kill_stage_of(0);
        }
    }
    assert_eq!(tokens_of(&events), reference);
    assert!(events.last().is_some_and(|e| e["done"].is_string()), "{:?}", events.last());
}

/// When a client disconnects, its request stops soon, and the next request is served.
#[test]
fn a_client_that_disconnects_stops_its_work() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let node = mesh.solo(&model);
    let mut lines = mesh.nodes[node].post_lines("/api/v1/generate", &greedy(&model, 400)).expect("a stream");
    lines.next().expect("a first token").expect("text");
    drop(lines);
    mesh.nodes[node]
        .wait_state(Duration::from_secs(5), |state| state["jobs"][0]["running"] == 0)
        .expect("no request is still running");
    let next = generate(&mesh.nodes[node], &greedy(&model, 3));
    assert_eq!(tokens_of(&next).len(), 3);
}

/// The request is rejected with the reason instead of being served in part.
#[test]
fn a_prompt_longer_than_the_context_is_rejected() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    let node = mesh.solo(&model);
    let request = json!({"model": model, "prompt": "word ".repeat(3000), "raw": true, "max_tokens": 5});
    let answer = mesh.nodes[node].post_lines("/api/v1/generate", &request);
    let text = match answer {
        Err(e) => e.to_string(),
        Ok(lines) => lines.map_while(Result::ok).collect::<Vec<_>>().join("\n"),
    };
    assert!(text.contains("512") && text.contains("context"), "the error names the context limit: {text}");
}

/// A model larger than the whole mesh: the error reports the missing bytes.
#[test]
fn a_model_larger_than_the_mesh_says_what_is_missing() {
    let Some(model) = require(model()) else { return };
    let mut mesh = Mesh::new();
    mesh.start("small", Some(20 << 20));
    let error =
        mesh.nodes[0].post("/api/v1/deploy", &crate::harness::deploy(&model)).expect_err("does not fit").to_string();
    assert!(error.contains("missing"), "{error}");
}
