//! Tests of `/v1/embeddings`, against a fake node whose embeddings tell which text they are of.
use super::*;
use data_encoding::BASE64;

/// The bits of the first token and of the number of tokens, then 0 and 12.
pub(super) fn fake(request: &GenerateRequest) -> Vec<u32> {
    let (first, count) = (request.prompt[0] as f32, request.prompt.len() as f32);
    [first, count, 0.0, 12.0].map(f32::to_bits).to_vec()
}

fn embeds() -> FakeNode {
    FakeNode { embedding: Some(4), done: DoneReason::Length, ..FakeNode::generating("x") }
}

fn ask(server: &Server, extra: Value) -> (u16, Value) {
    let mut body = json!({"model": "tiny"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    server.post("/v1/embeddings", body)
}

/// The expected elements for a first token and a number of tokens.
fn expected(first: f64, count: f64, dimensions: usize) -> Vec<f64> {
    let row = &[first, count, 0.0, 12.0][..dimensions];
    let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
    row.iter().map(|x| x / length).collect()
}

fn elements(value: &Value) -> Vec<f64> {
    value.as_array().expect("numbers").iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn near(found: &[f64], expected: &[f64]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6)
}

#[test]
fn texts_and_token_ids_have_embeddings_of_length_one_in_order() {
    let server = start(embeds());
    let (status, answer) = ask(&server, json!({"input": ["abc", "z"]}));
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("tiny")));
    assert_eq!(answer["usage"], json!({"prompt_tokens": 4, "total_tokens": 4}));
    let rows: Vec<Vec<f64>> =
        answer["data"].as_array().unwrap().iter().map(|entry| elements(&entry["embedding"])).collect();
    assert!(near(&rows[0], &expected(97.0, 3.0, 4)) && near(&rows[1], &expected(122.0, 1.0, 4)), "{rows:?}");
    assert_eq!((&answer["data"][1]["index"], &answer["data"][1]["object"]), (&json!(1), &json!("embedding")));

    for (input, count, first) in [(json!("abc"), 1, 97.0), (json!([5, 6]), 1, 5.0), (json!([[5, 6], [7]]), 2, 5.0)] {
        let (_, answer) = ask(&server, json!({"input": input, "dimensions": 2}));
        let row = elements(&answer["data"][0]["embedding"]);
        assert_eq!(answer["data"].as_array().unwrap().len(), count, "{answer}");
        assert!(near(&row, &expected(first, if first == 97.0 { 3.0 } else { 2.0 }, 2)), "{row:?}");
    }
    let request = server.engine.requests.lock().last().cloned().expect("a request");
    assert_eq!((request.max_tokens, request.ignore_eos), (1, true));

    let (_, packed) = ask(&server, json!({"input": "abc", "encoding_format": "base64"}));
    let bytes = BASE64.decode(packed["data"][0]["embedding"].as_str().expect("text").as_bytes()).expect("base64");
    let floats = bytes.chunks_exact(4).map(|four| f64::from(f32::from_le_bytes(four.try_into().unwrap())));
    assert!(near(&floats.collect::<Vec<f64>>(), &rows[0]));
}

#[test]
fn requests_that_cannot_be_embedded_are_refused() {
    let server = start(embeds());
    let refused = |body: Value, param: &str| {
        let (status, answer) = ask(&server, body);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    };
    refused(json!({}), "input");
    refused(json!({"input": []}), "input");
    refused(json!({"input": 7}), "input");
    refused(json!({"input": vec!["a"; 2049]}), "input");
    refused(json!({"input": ["a", ""]}), "input[1]");
    refused(json!({"input": ["a", "b".repeat(64)]}), "input[1]");
    refused(json!({"input": [300]}), "input");
    refused(json!({"input": "a", "encoding_format": "hex"}), "encoding_format");
    refused(json!({"input": "a", "dimensions": 0}), "dimensions");
    refused(json!({"input": "a", "dimensions": 5}), "dimensions");
    assert!(server.engine.requests.lock().is_empty());

    // Each model only does what it is made for.
    let (status, answer) = server.post("/v1/chat/completions", chat_body(json!({})));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")), "{answer}");
    let chats = start(FakeNode::generating("x"));
    let (status, answer) = ask(&chats, json!({"input": "a"}));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")), "{answer}");
    let silent = start(FakeNode { script: "", ..embeds() });
    let (status, answer) = ask(&silent, json!({"input": "a"}));
    assert!(status >= 500, "{answer}");
}
