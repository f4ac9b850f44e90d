//! Tests of requests retried with the same idempotency key.
use super::*;

#[test]
fn a_retry_with_the_same_key_gets_the_first_answer() {
    let server = start(FakeNode::generating("naïve"));
    for (path, extra) in [
        ("/v1/chat/completions", json!({})),
        ("/v1/chat/completions", json!({"stream": true, "stream_options": {"include_usage": true}})),
        ("/v1/completions", json!({"messages": null, "prompt": "x", "stream": true})),
    ] {
        let (body, key) = (chat_body(extra).to_string(), format!("key-{}", server.engine.requests.lock().len()));
        let before = server.engine.requests.lock().len();
        let first = server.call(&keyed(path, &key), &body);
        let again = server.call(&keyed(path, &key), &body);
        assert_eq!((first.0, again.0), (200, 200), "{}", first.2);
        assert!(
            again.1.contains("idempotent-replayed: true") && !first.1.contains("idempotent-replayed"),
            "{}",
            again.1
        );
        assert_eq!(server.engine.requests.lock().len(), before + 1, "it ran once");
        assert_eq!(gist(&first.2), gist(&again.2));
        let other = server.call(&keyed(path, &key), &body.replacen('{', "{\"user\": \"me\", ", 1));
        assert_eq!(other.0, 422, "{}", other.2);
        assert!(other.2.contains("idempotency_key_reused"), "{}", other.2);
    }
}

/// Id, text, finish reasons and usage of an answer, whole or in chunks.
fn gist(text: &str) -> (String, String, Vec<Value>) {
    let chunks: Vec<Value> =
        text.lines().filter_map(|l| serde_json::from_str(l.strip_prefix("data: ").unwrap_or(l)).ok()).collect();
    let choice = |c: &Value| c["choices"][0].clone();
    let words = |c: &Value| {
        let choice = choice(c);
        let places = [&choice["delta"]["content"], &choice["message"]["content"], &choice["text"]];
        places.iter().find_map(|p| p.as_str()).unwrap_or_default().to_owned()
    };
    let rest = chunks.iter().flat_map(|c| [choice(c)["finish_reason"].clone(), c["usage"].clone()]);
    let id = chunks[0]["id"].as_str().unwrap().to_owned();
    (id, chunks.iter().map(words).collect(), rest.filter(|v| !v.is_null()).collect())
}

/// The events of a stream: id and data.
pub(super) fn events(text: &str) -> Vec<(u64, String)> {
    let mut id = None;
    let mut events = Vec::new();
    for line in text.lines() {
        if let Some(number) = line.strip_prefix("id: ") {
            id = number.parse().ok();
        } else if let Some(data) = line.strip_prefix("data: ") {
            events.push((id.take().expect("each event has an id"), data.to_owned()));
        }
    }
    events
}

/// The events of a stream: id, name and data.
pub(super) fn named_events(text: &str) -> Vec<(Option<u64>, String, Value)> {
    let event = |block: &str| {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let data = serde_json::from_str(field("data")?).unwrap_or_else(|error| panic!("{error}: {block}"));
        Some((field("id").map(|id| id.parse().unwrap()), field("event").unwrap_or_default().to_owned(), data))
    };
    text.split("\n\n").filter_map(event).collect()
}

pub(super) fn resuming(path: &str, key: &str, last: &str) -> String {
    format!("{}Last-Event-ID: {last}\r\n", keyed(path, key))
}

/// On the same node (replayed) or on another (generated again), the events before and after the reconnection add up to
/// the whole answer, once.
#[test]
fn a_stream_resumes_after_the_last_event_id() {
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let extra = match path {
            "/v1/completions" => json!({"messages": null, "prompt": "x"}),
            _ => json!({}),
        };
        let body = json!({"stream": true, "stop": ["zz"], "stream_options": {"include_usage": true}});
        let mut request = chat_body(extra);
        request.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        let request = request.to_string();
        let here = start(FakeNode::generating("naïve answerz"));
        let (status, head, text) = here.call(&keyed(path, "k"), &request);
        assert_eq!(status, 200, "{text}");
        assert!(head.contains("x-request-id: k"), "{head}");
        let whole = events(&text);
        assert!(whole.windows(2).all(|pair| pair[0].0 < pair[1].0), "{whole:?}");
        assert_eq!(whole.last().unwrap().1, "[DONE]");
        for at in 0..whole.len() {
            let last = whole[at].0;
            for server in [&here, &start(FakeNode::generating("naïve answerz"))] {
                let (status, _, rest) = server.call(&resuming(path, "k", &last.to_string()), &request);
                assert_eq!(status, 200, "{rest}");
                let rest = events(&rest);
                assert!(rest.iter().all(|(id, _)| *id > last), "after {last}: {rest:?}");
                let words = |events: &[(u64, String)]| -> String {
                    let lines: Vec<String> = events.iter().map(|(_, data)| format!("data: {data}")).collect();
                    let chunks = lines.join("\n");
                    if chunks.contains("{") { gist(&chunks).1 } else { String::new() }
                };
                assert_eq!(words(&whole[..=at]) + &words(&rest), words(&whole), "after {last}");
                assert_eq!(rest.last().map(|(_, data)| data.as_str()), (at + 1 < whole.len()).then_some("[DONE]"));
            }
        }
        let (status, _, text) = here.call(&resuming(path, "k", "seven"), &request);
        assert!(status == 400 && text.contains("Last-Event-ID"), "{text}");
    }
}

#[test]
fn a_request_without_a_key_gets_one() {
    let server = start(FakeNode::generating("x"));
    let (_, head, _) = server.call("POST /v1/chat/completions", &chat_body(json!({})).to_string());
    assert!(head.contains("x-request-id: req-"), "{head}");
}

#[test]
fn a_key_conflicts_while_its_request_runs_and_is_freed_when_its_client_disconnects() {
    let server = start(FakeNode { endless: true, ..FakeNode::generating("more ") });
    let body = chat_body(json!({"stream": true})).to_string();
    let mut connection = server.send(&keyed("/v1/chat/completions", "k"), &body);
    connection.read_exact(&mut [0; 512]).unwrap();
    let (status, head, text) = server.call(&keyed("/v1/chat/completions", "k"), &body);
    assert_eq!(status, 409, "{text}");
    assert!(head.contains("retry-after: 1") && text.contains("idempotency_key_running"), "{head}\n{text}");
    drop(connection);
    wait_until_idle(&server.engine);
    wait_until(|| {
        let mut connection = server.send(&keyed("/v1/chat/completions", "k"), &body);
        let mut start = [0; 12];
        connection.read_exact(&mut start).unwrap();
        start.ends_with(b"200")
    });
}

#[test]
fn a_failed_request_may_be_retried() {
    let server = start(FakeNode { done: DoneReason::Failed("a stage died".into()), ..FakeNode::generating("abc") });
    for stream in [false, true, false] {
        let body = chat_body(json!({"stream": stream})).to_string();
        let (_, _, text) = server.call(&keyed("/v1/chat/completions", "k"), &body);
        assert!(text.contains("a stage died"), "{text}");
    }
    assert_eq!(server.engine.requests.lock().len(), 3);
}

#[test]
fn the_key_is_the_seed_on_every_node_unless_the_client_chose_one() {
    let seed = |key: &str, extra: Value| {
        let server = start(FakeNode::generating("x"));
        assert_eq!(server.call(&keyed("/v1/chat/completions", key), &chat_body(extra).to_string()).0, 200);
        let requests = server.engine.requests.lock();
        requests[0].sampling.seed
    };
    assert_eq!(seed("a", json!({})), seed("a", json!({"user": "me"})));
    assert_ne!(seed("a", json!({})), seed("b", json!({})));
    assert_eq!(seed("a", json!({"seed": 5})), 5);
}

#[test]
fn invalid_keys_are_rejected() {
    let server = start(FakeNode::generating("x"));
    let body = chat_body(json!({})).to_string();
    let long = "k".repeat(256);
    for key in ["", "two words", "schlüssel", long.as_str(), "a\r\nIdempotency-Key: b"] {
        let (status, _, text) = server.call(&keyed("/v1/chat/completions", key), &body);
        assert_eq!(status, 400, "{key}: {text}");
        assert!(text.contains("Idempotency-Key"), "{text}");
    }
    assert!(server.engine.requests.lock().is_empty());
}
