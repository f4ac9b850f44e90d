//! Draft tokens change no answer, whatever the temperature, and survive the loss of a stage.
use crate::harness::{Mesh, model, require};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const TOKENS: u32 = 160;

/// A file, and the beginning of a copy of it: what a model repeats.
pub(crate) fn edit() -> String {
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

/// A copy of a GGUF file with only its first layers: a smaller model with the same vocabulary. The data of the other layers stay
/// in the file, unused.
fn first_layers(model: &Path, layers: u32, copy: &Path) {
    let bytes = std::fs::read(model).expect("the model");
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let kind_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let text_end = |at: usize| at + 8 + number(at) as usize;
    // Bytes of a value of a scalar kind.
    let size = |kind: u32| [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][kind as usize];
    let (tensors, keys) = (number(8), number(16));
    let mut file = bytes.clone();
    let (mut at, mut alignment) = (24, 32);
    for _ in 0..keys {
        let (key, kind) = (&bytes[at + 8..text_end(at)], kind_at(text_end(at)));
        let value = text_end(at) + 4;
        if key.ends_with(b".block_count") {
            file[value..value + 4].copy_from_slice(&layers.to_le_bytes());
        }
        if key == b"general.alignment" {
            alignment = kind_at(value) as usize;
        }
        at = match kind {
            8 => text_end(value),
            9 => {
                let (of, count) = (kind_at(value), number(value + 4));
                (0..count).fold(value + 12, |at, _| if of == 8 { text_end(at) } else { at + size(of) })
            }
            scalar => value + size(scalar),
        };
    }
    let (mut kept, mut infos) = (0_u64, Vec::new());
    let end_of_keys = at;
    for _ in 0..tensors {
        let name = std::str::from_utf8(&bytes[at + 8..text_end(at)]).expect("a name");
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        let dims = text_end(at);
        let end = dims + 4 + 8 * kind_at(dims) as usize + 4 + 8;
        if layer.is_none_or(|layer| layer < layers) {
            infos.extend_from_slice(&bytes[at..end]);
            kept += 1;
        }
        at = end;
    }
    let data = at.next_multiple_of(alignment);
    file.truncate(end_of_keys);
    file[8..16].copy_from_slice(&kept.to_le_bytes());
    file.extend(infos);
    file.resize(file.len().next_multiple_of(alignment), 0);
    file.extend_from_slice(&bytes[data..]);
    std::fs::write(copy, file).expect("the smaller model");
}

#[test]
fn answers_are_the_same_with_a_draft_model() {
    let Some(model) = require(model()) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let draft = folder.path().join("first-layer.gguf");
    first_layers(&model, 1, &draft);
    let mut mesh = Mesh::new();
    for name in ["a", "b"] {
        mesh.start(name, None);
    }
    mesh.wait_members(2);
    let options = json!({"int8": true, "context": 2048, "sequences": 2, "draft": draft});
    let served = mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": options})).expect("served");
    let own = json!({"int8": true, "context": 2048, "sequences": 2, "draft": model});
    let error = mesh.nodes[0].post("/api/v1/deploy", &json!({"model": model, "options": own})).expect_err("itself");
    assert!(error.to_string().contains("expected a smaller model"), "{error}");
    let of_model = |mesh: &Mesh| {
        let job = |state: &Value| {
            let jobs = state["jobs"].as_array()?;
            jobs.iter().find(|job| job["model"] == served["model"])?["model_draft_tokens"].as_u64()
        };
        let state = mesh.nodes[0].wait_state(Duration::from_secs(10), |state| job(state).is_some());
        job(&state.expect("a job")).expect("a number")
    };
    let references = [0.0, 1.0].map(|temperature| {
        let reference = answer(&mut mesh, &request(&model, temperature, 0), |_, _| {});
        (temperature, reference)
    });
    assert_eq!(of_model(&mesh), 0, "none were asked for");
    // Whether the draft model is asked depends on measured times. It is always tried, and on a busy machine may be late.
    for round in 0..20 {
        for (temperature, reference) in &references {
            let with = answer(&mut mesh, &request(&model, *temperature, 7), |_, _| {});
            assert_eq!(&with, reference, "at {temperature}");
        }
        let sent = of_model(&mesh);
        if sent > 0 {
            return;
        }
        assert!(round < 19, "no draft of the draft model was sent");
    }
}
