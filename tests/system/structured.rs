//! Structured answers of a model that several nodes run: the node with the last layers keeps to the schema, also after a loss.
use crate::harness::{Mesh, model, require};
use serde_json::{Value, json};
use std::path::Path;

fn request(model: &Path) -> Value {
    let item = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "price"],
        "properties": {"name": {"type": "string", "maxLength": 12}, "price": {"type": "integer", "maximum": 999}},
    });
    let schema = json!({"type": "array", "items": item, "minItems": 6, "maxItems": 6});
    json!({
        "model": model, "messages": [{"role": "user", "content": "List things in a shop."}], "max_tokens": 300,
        "temperature": 1, "seed": 11, "stream": true,
        "response_format": {"type": "json_schema", "json_schema": {"name": "things", "schema": schema}},
    })
}

/// The text of a streamed answer. `after` is called after each piece with their number so far.
fn answer(mesh: &mut Mesh, model: &Path, mut after: impl FnMut(&mut Mesh, usize)) -> String {
    let lines = mesh.nodes[0].post_lines("/v1/chat/completions", &request(model)).expect("a stream");
    let (mut text, mut pieces, mut ended) = (String::new(), 0, false);
    for line in lines {
        let line = line.expect("the stream is intact");
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            ended = true;
            continue;
        }
        let event: Value = serde_json::from_str(data).expect("JSON");
        assert!(event["error"].is_null(), "{event}");
        if let Some(piece) = event["choices"][0]["delta"]["content"].as_str().filter(|piece| !piece.is_empty()) {
            text.push_str(piece);
            pieces += 1;
            after(mesh, pieces);
        }
    }
    assert!(ended, "{text}");
    text
}

#[test]
fn an_answer_keeps_to_its_schema_when_a_stage_is_lost() {
    let Some(model) = require(model()) else { return };
    let mut alone = Mesh::new();
    alone.solo(&model);
    let reference = answer(&mut alone, &model, |_, _| {});
    let things: Vec<Value> = serde_json::from_str(&reference).expect("an array");
    assert!(things.len() == 6 && things.iter().all(|thing| thing["price"].as_i64() <= Some(999)), "{reference}");
    drop(alone);

    let mut mesh = Mesh::new();
    let bytes = mesh.model_bytes(&model);
    for i in 0..4 {
        mesh.start(&format!("n{i}"), Some((bytes as f64 * 0.8) as u64));
    }
    mesh.wait_members(4);
    mesh.deploy(0, &model);
    let survived = answer(&mut mesh, &model, |mesh, pieces| {
        if matches!(pieces, 15 | 45) {
            mesh.kill_stage_of(0);
        }
    });
    assert_eq!(survived, reference, "the same answer as one node");
}
