//! Each turn of a conversation computes only what is new, also after the loss of a node, with the answers of one node.
use crate::harness::{Mesh, model, require};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const TURNS: usize = 10;
/// New tokens of each turn, as in a chat with long messages.
const NEW: usize = 200;
const ANSWER: u64 = 12;
/// Positions in a page of the cache.
const PAGE: usize = 128;

/// Serves the model with room for the whole conversation.
fn serve(mesh: &Mesh, node: usize, model: &Path) {
    let options = json!({"int8": true, "context": 4096, "sequences": 1});
    mesh.nodes[node].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("it is served");
}

/// Continues a text of token ids. Returns the answer's ids, and the number of prompt tokens that were computed.
fn ask(mesh: &Mesh, model: &Path, prompt: &[u64]) -> (Vec<u64>, usize) {
    let request = json!({
        "model": model, "prompt": prompt, "raw": true, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": true,
    });
    let lines = mesh.nodes[0].post_lines("/api/v1/generate", &request).expect("a stream");
    let lines: Vec<Value> =
        lines.map(|line| serde_json::from_str(&line.expect("an intact stream")).expect("JSON lines")).collect();
    let last = lines.last().expect("an end");
    let cached = last["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{last}"));
    let tokens = lines.iter().filter_map(|line| line["token"].as_u64()).collect();
    (tokens, prompt.len() - usize::try_from(cached).expect("a number of tokens"))
}

/// The answers of a conversation. `before` is called before each turn.
fn converse(mesh: &mut Mesh, model: &Path, mut before: impl FnMut(&mut Mesh, usize)) -> Vec<Vec<u64>> {
    let (mut text, mut answers, mut known) = (Vec::new(), Vec::new(), 0);
    for turn in 0..TURNS {
        before(mesh, turn);
        text.extend((0..NEW as u64).map(|at| 1000 + (at * 37 + 211 * turn as u64) % 20_000));
        let (answer, computed) = ask(mesh, model, &text);
        let new = text.len() - known;
        eprintln!("turn {turn}: {new} of {} tokens are new, {computed} were computed", text.len());
        assert!(computed <= new + PAGE, "turn {turn}: {computed} tokens were computed, {new} are new");
        text.extend(&answer);
        // The last token of an answer is not computed before the next turn.
        known = text.len() - 1;
        answers.push(answer);
    }
    answers
}

/// Waits until a placement with what rests and a current standby of each stage has held for 8 s: new stages and standbys
/// compute what rests again, once no request runs.
fn wait_settled(mesh: &Mesh) {
    let current = |standby: &Value| standby["state"] == "current";
    let covered = |state: &Value| {
        let job = &state["jobs"][0];
        let stages = job["stages"].as_array().map_or(0, Vec::len);
        stages > 1
            && job["cached_requests"].as_u64() > Some(0)
            && job["standbys"].as_array().is_some_and(|all| all.len() == stages && all.iter().all(current))
    };
    let mut settled = None;
    for _ in 0..10 {
        let state =
            mesh.nodes[0].wait_state(Duration::from_secs(60), covered).expect("every stage has a current standby");
        let names = |what: &str| -> Vec<Value> {
            state["jobs"][0][what].as_array().expect("a list").iter().map(|node| node["name"].clone()).collect()
        };
        let placed = Some([names("stages"), names("standbys")]);
        if placed == settled {
            return;
        }
        settled = placed;
        std::thread::sleep(Duration::from_secs(8));
    }
    panic!("the placement changes all the time: {settled:?}");
}

#[test]
fn a_turn_computes_only_what_is_new_also_after_a_loss() {
    let Some(model) = require(model()) else { return };
    let mut alone = Mesh::new();
    alone.start("solo", None);
    serve(&alone, 0, &model);
    let reference = converse(&mut alone, &model, |_, _| {});
    drop(alone);

    let mut mesh = Mesh::new();
    let bytes = mesh.model_bytes(&model);
    for i in 0..4 {
        // Two nodes fit the model and its cache; the others have room for their standbys.
        mesh.start(&format!("n{i}"), Some((bytes as f64 * 0.8) as u64 + (96 << 20)));
    }
    mesh.wait_members(4);
    serve(&mesh, 0, &model);
    let survived = converse(&mut mesh, &model, |mesh, turn| {
        if turn == 5 {
            wait_settled(mesh);
            mesh.kill_stage_of(0);
        }
    });
    assert_eq!(survived, reference, "the answers of one node");
}
