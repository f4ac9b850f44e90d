//! The loss of a request's entry node, the one node whose loss the client sees: the connection breaks immediately, and
//! the same request with the same `Idempotency-Key` completes on another node, with the same text.
use crate::client::{listen, seed, solo};
use crate::harness::{Mesh, deploy};
use meshnode::cluster::LocalNode;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};
use system_tests::relay::Random;

/// Longest wait of a client for any data.
const HANG: Duration = Duration::from_secs(60);
/// Longest wait for the error: the operating system closes a dead process's connections immediately.
const ERROR_MAX: Duration = Duration::from_secs(5);

/// Sends a chat request with a key.
fn ask(node: &LocalNode, key: &str, body: &Value) -> ureq::http::Response<ureq::Body> {
    ask_for(node, "/v1/chat/completions", &[("Idempotency-Key", key)], body)
}

/// Sends a request; repeats it while the node answers that it may succeed later, as OpenAI's clients do.
fn ask_for(node: &LocalNode, path: &str, headers: &[(&str, &str)], body: &Value) -> ureq::http::Response<ureq::Body> {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let url = format!("http://{}{path}", node.api);
    let end = Instant::now() + HANG;
    loop {
        let request = headers.iter().fold(agent.post(&url), |request, (name, value)| request.header(*name, *value));
        let answer = request.send_json(body).expect("an answer");
        match answer.status().as_u16() {
            200 => return answer,
            status @ (409 | 429 | 503) if Instant::now() < end => {
                let said = answer.into_body().read_to_string().unwrap_or_default();
                eprintln!("  asked again after {status}: {said}");
                std::thread::sleep(Duration::from_secs(1));
            }
            status => panic!("{status}: {}", answer.into_body().read_to_string().unwrap_or_default()),
        }
    }
}

/// The text of a complete response.
fn text_of(answer: ureq::http::Response<ureq::Body>) -> String {
    let text = answer.into_body().read_to_string().expect("a body");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    value["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

#[test]
fn the_same_key_completes_on_another_node_after_the_entry_node_is_killed() {
    let Some(solo) = solo() else { return };
    let seed = seed("the_same_key_completes_on_another_node_after_the_entry_node_is_killed");
    let (key, mut random) = (format!("test-{seed}"), Random(seed));

    let mut alone = Mesh::new();
    alone.start("alone", None);
    let served = alone.nodes[0].post("/api/v1/deploy", &deploy(&solo.model)).expect("the model is served");
    // Sampled without a seed: only the key makes two nodes sample the same tokens.
    let mut body = json!({
        "model": served["model"], "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": 64, "temperature": 0.9, "ignore_eos": true,
    });
    let expected = text_of(ask(&alone.nodes[0], &key, &body));
    assert_ne!(expected, text_of(ask(&alone.nodes[0], "another-key", &body)), "the text is sampled");
    drop(alone);

    let mut mesh = Mesh::new();
    for i in 0..4 {
        mesh.give_model(&format!("n{i}"), &solo.model);
        mesh.start(&format!("n{i}"), Some(solo.memory(0.8)));
    }
    mesh.wait_members(4);
    mesh.deploy(0, &solo.model);
    let next = mesh.remote_stages(0)[0];

    body["stream"] = json!(true);
    let moment = 4 + random.below(40);
    let stream = BufReader::new(ask(&mesh.nodes[0], &key, &body).into_body().into_reader());
    let (arrived, mut chunks, mut killed) = (listen(stream.lines()), 0, None);
    let ended = loop {
        match arrived.recv_timeout(HANG) {
            Ok((_, Ok(line))) if line == "data: [DONE]" => panic!("the answer ended before the entry node was killed"),
            Ok((_, Ok(line))) => chunks += usize::from(line.starts_with("data:")),
            Ok((at, Err(_))) => break at,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break Instant::now(),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("the client of a killed node received no error"),
        }
        if chunks == moment && killed.is_none() {
            killed = Some(Instant::now());
            mesh.nodes[0].kill();
        }
    };
    let delay = ended - killed.expect("the stream lasts until the entry node is killed");
    eprintln!("SIGKILL of the entry node after {moment} chunks: its client sees the error after {:.0} ms", ms(delay));
    assert!(delay < ERROR_MAX, "{delay:?}");

    body.as_object_mut().expect("an object").remove("stream");
    let start = Instant::now();
    let text = text_of(ask(&mesh.nodes[next], &key, &body));
    eprintln!("n{next} answers the same request completely after {:.0} ms", ms(start.elapsed()));
    assert_eq!(text, expected);
}

/// The ids and the data of a stream's events, until it ends or breaks. `seen` is called after each with their number.
fn events(answer: ureq::http::Response<ureq::Body>, mut seen: impl FnMut(usize)) -> Vec<(String, String)> {
    let arrived = listen(BufReader::new(answer.into_body().into_reader()).lines());
    let (mut events, mut id) = (Vec::new(), String::new());
    loop {
        match arrived.recv_timeout(HANG) {
            Ok((_, Ok(line))) => {
                if let Some(number) = line.strip_prefix("id: ") {
                    number.clone_into(&mut id);
                } else if let Some(data) = line.strip_prefix("data: ").filter(|data| !data.contains("\"ping\"")) {
                    events.push((id.clone(), data.to_owned()));
                    seen(events.len());
                }
            }
            Ok((_, Err(_))) | Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return events,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("neither an event nor an error: {events:?}"),
        }
    }
}

/// The events of an API in which one token has several: their ids are the same on every node.
#[test]
fn a_stream_of_blocks_continues_on_another_node_after_the_entry_node_is_killed() {
    let Some(solo) = solo() else { return };
    let seed = seed("a_stream_of_blocks_continues_on_another_node_after_the_entry_node_is_killed");
    let (key, mut random) = (format!("test-{seed}"), Random(seed));
    let mut alone = Mesh::new();
    alone.start("alone", None);
    let served = alone.nodes[0].post("/api/v1/deploy", &deploy(&solo.model)).expect("the model is served");
    let body = json!({
        "model": served["model"], "messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 64,
        "temperature": 0, "stream": true,
    });
    let keyed = [("Idempotency-Key", key.as_str())];
    let expected = events(ask_for(&alone.nodes[0], "/v1/messages", &keyed, &body), |_| ());
    assert!(expected.len() > 40 && expected[expected.len() - 1].1.contains("message_stop"), "{expected:?}");
    drop(alone);

    let mut mesh = Mesh::new();
    for i in 0..4 {
        mesh.give_model(&format!("n{i}"), &solo.model);
        mesh.start(&format!("n{i}"), Some(solo.memory(0.8)));
    }
    mesh.wait_members(4);
    mesh.deploy(0, &solo.model);
    let next = mesh.remote_stages(0)[0];
    let moment = 1 + random.below(30);
    let stream = ask_for(&mesh.nodes[0], "/v1/messages", &keyed, &body);
    let mut received = events(stream, |count| {
        if count == moment {
            mesh.nodes[0].kill();
        }
    });
    assert!(received.len() < expected.len(), "the answer ended before the entry node was killed");
    let last = received[received.len() - 1].0.clone();
    eprintln!("the entry node was killed after {moment} events; its client received {}", received.len());
    let resumed = [keyed[0], ("Last-Event-ID", last.as_str())];
    received.extend(events(ask_for(&mesh.nodes[next], "/v1/messages", &resumed, &body), |_| ()));
    assert_eq!(received, expected, "each event once");
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
