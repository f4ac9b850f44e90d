//! Tests of requests for several choices, against a fake node whose answers differ by their seeds.
use super::*;

const SCRIPT: &str = "naïve answer";

fn node() -> FakeNode {
    FakeNode { varied: true, ..FakeNode::generating(SCRIPT) }
}

fn body(extra: Value) -> Value {
    let mut body = chat_body(json!({"n": 3, "seed": 0, "logprobs": true}));
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The text of each choice in a stream.
fn texts(events: &[(u64, String)]) -> Vec<String> {
    let mut texts = vec![String::new(); 3];
    for chunk in events.iter().filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok()) {
        for choice in chunk["choices"].as_array().unwrap() {
            let text = choice["delta"]["content"].as_str().unwrap_or_default();
            texts[choice["index"].as_u64().unwrap() as usize].push_str(text);
        }
    }
    texts
}

#[test]
fn each_choice_has_its_own_seed_and_the_usage_is_their_sum() {
    let server = start(node());
    let (status, answer) = server.post("/v1/chat/completions", body(json!({})));
    assert_eq!(status, 200, "{answer}");
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (at, choice) in choices.iter().enumerate() {
        assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(at), &json!("stop")));
        assert_eq!(choice["message"]["content"], SCRIPT[at..], "choice {at}");
        assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), SCRIPT.len() - at);
    }
    assert_eq!(answer["usage"]["completion_tokens"], 3 * SCRIPT.len() - 3);
    let asked = server.engine.requests.lock();
    assert_eq!(asked[0].prompt.len(), answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize);
    let names: std::collections::BTreeSet<[u8; 16]> = asked.iter().map(|request| request.key.0).collect();
    assert_eq!(names.len(), 3, "each choice is a request of its own");
}

#[test]
fn completions_have_choices_too() {
    let request = json!({"model": "tiny", "prompt": "x", "n": 2, "best_of": 2, "seed": 0});
    let (status, answer) = start(node()).post("/v1/completions", request);
    assert_eq!((status, &answer["choices"][1]["text"]), (200, &json!(SCRIPT[1..])), "{answer}");
}

/// Repeated by the same node or generated again by another, the events before and after the reconnection are those of the
/// unbroken stream, although the choices have different lengths.
#[test]
fn a_stream_of_choices_resumes_after_any_event() {
    let here = start(node());
    let request = body(json!({"stream": true, "stream_options": {"include_usage": true}})).to_string();
    let events = |text: &str| {
        let created = |(id, data): (u64, String)| match serde_json::from_str::<Value>(&data) {
            Ok(mut chunk) => {
                chunk["created"] = json!(0); // each node has its own clock
                (id, chunk.to_string())
            }
            Err(_) => (id, data),
        };
        idempotency::events(text).into_iter().map(created).collect::<Vec<_>>()
    };
    let whole = events(&here.call(&keyed("/v1/chat/completions", "k"), &request).2);
    assert!(whole.windows(2).all(|pair| pair[0].0 < pair[1].0), "{whole:?}");
    assert_eq!(texts(&whole), [0, 1, 2].map(|at| SCRIPT[at..].to_owned()));
    assert_eq!(whole.last().unwrap().1, "[DONE]");
    assert_eq!(whole.iter().filter(|(_, data)| data == "[DONE]").count(), 1);
    let usage: Value = serde_json::from_str(&whole[whole.len() - 2].1).unwrap();
    assert_eq!((&usage["usage"]["completion_tokens"], &usage["choices"]), (&json!(3 * SCRIPT.len() - 3), &json!([])));
    for at in 0..whole.len() {
        let last = whole[at].0.to_string();
        for (server, replays) in [(&here, true), (&start(node()), false)] {
            let (status, head, rest) =
                server.call(&idempotency::resuming("/v1/chat/completions", "k", &last), &request);
            assert_eq!((status, head.contains("idempotent-replayed: true")), (200, replays), "{rest}");
            assert_eq!(events(&rest), whole[at + 1..], "after {last}");
        }
    }
    let again = body(json!({})).to_string();
    let first = here.call(&keyed("/v1/chat/completions", "w"), &again).2;
    assert_eq!(here.call(&keyed("/v1/chat/completions", "w"), &again).2, first, "the whole answer again");
}

#[test]
fn one_failed_choice_fails_the_answer_and_stops_the_others() {
    let failing = || FakeNode { done: DoneReason::Failed("a stage died".into()), ..node() };
    let server = start(failing());
    let (status, answer) = server.post("/v1/chat/completions", body(json!({})));
    assert_eq!((status, &answer["error"]["message"]), (503, &json!("a stage died")), "{answer}");
    let events = server.events("/v1/chat/completions", body(json!({"stream": true})));
    assert!(events.last().unwrap().contains("a stage died"), "{events:?}");
    wait_until_idle(&server.engine);
}
