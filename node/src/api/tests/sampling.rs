//! Tests of sampling parameters and log-probabilities at the API, against a fake node that gives every token the same ones.
use super::*;
use node_core::work::serve::Logprobs;

/// Those of the fake node: -0.5 for the token, and less for each of the letters from A on.
pub(super) fn fake(most: u8) -> Box<Logprobs> {
    let top = |at: u8| (u32::from(b'A' + at) + FIRST_BYTE, -1_000_000 * (i32::from(at) + 1));
    Box::new(Logprobs { sampled_e6: -500_000, top_e6: (0..most).map(top).collect() })
}

fn entry(token: &str) -> Value {
    let one = |token: &str, log: f64| json!({"token": token, "logprob": log, "bytes": token.as_bytes()});
    let mut entry = one(token, -0.5);
    entry["top_logprobs"] = json!([one("A", -1.0), one("B", -2.0)]);
    entry
}

#[test]
fn a_chat_has_the_log_probabilities_of_each_token() {
    let server = start(FakeNode::generating("Hé."));
    let asks = json!({"logprobs": true, "top_logprobs": 2});
    let (status, whole) = server.post("/v1/chat/completions", chat_body(asks));
    assert_eq!(status, 200, "{whole}");
    let content = whole["choices"][0]["logprobs"]["content"].as_array().expect("one entry per token").clone();
    assert_eq!((content.len(), &content[0], &content[3]), (4, &entry("H"), &entry(".")));
    assert_eq!((&content[1]["token"], &content[1]["bytes"]), (&json!("\u{fffd}"), &json!([0xc3])), "half a letter");
    // Streamed: tokens without text of their own come with the next one.
    let asks = json!({"logprobs": true, "top_logprobs": 2, "stream": true});
    let events = server.events("/v1/chat/completions", chat_body(asks));
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let streamed: Vec<Value> = chunks
        .flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, content);
    let (_, plain) = server.post("/v1/chat/completions", chat_body(json!({})));
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    let (_, bare) = server.post("/v1/chat/completions", chat_body(json!({"logprobs": true})));
    assert_eq!(bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[test]
fn a_completion_has_them_in_its_own_form() {
    let server = start(FakeNode::generating("Hi."));
    let (status, whole) = server.post("/v1/completions", json!({"model": "tiny", "prompt": "x", "logprobs": 1}));
    assert_eq!(status, 200, "{whole}");
    let expected = json!({
        "tokens": ["H", "i", "."], "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"A": -1.0}, {"A": -1.0}, {"A": -1.0}], "text_offset": [0, 1, 2],
    });
    assert_eq!(whole["choices"][0]["logprobs"], expected);
}

#[test]
fn penalties_and_bias_reach_the_sampler_in_millionths() {
    let server = start(FakeNode::generating("x"));
    let extra = json!({"presence_penalty": -0.5, "frequency_penalty": 1.25, "logit_bias": {"65": -100, "7": 0.5}});
    let (status, answer) = server.post("/v1/chat/completions", chat_body(extra));
    assert_eq!(status, 200, "{answer}");
    let sampling = server.engine.requests.lock()[0].sampling.clone();
    assert_eq!((sampling.presence_penalty_e6, sampling.frequency_penalty_e6), (-500_000, 1_250_000));
    assert_eq!(sampling.logit_bias_e6, [(7, 500_000), (65, -100_000_000)]);
}
