//! Tests of the API over real HTTP against a fake node: bytes are tokens, and it generates a fixed script.
use super::body::BODY_BYTES_MAX;
use super::engine::{Served, Tokens};
use super::*;
use crate::handle::{BanReport, GenerateRequest, ModelOptions, ModelRef, NodeError, PlanReport, StateView, TokenEvent};
use crate::submissions::Submissions;
use crate::views::JobView;
use node_core::work::serve::{DoneReason, Sampled};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use text::{Bytes, FIRST_BYTE};
use tokio::sync::mpsc;

mod access;
mod anthropic;
mod choices;
mod embeddings;
mod grids;
mod idempotency;
mod mutations;
mod responses;
mod sampling;
mod text;
mod tools;

/// Answers every request with `script`, then `done`. `endless` repeats the script until cancelled.
#[derive(Clone)]
pub(super) struct FakeNode {
    script: &'static str,
    template: &'static str,
    /// Elements of an embedding, instead of text.
    embedding: Option<u32>,
    context: u32,
    done: DoneReason,
    endless: bool,
    /// An answer begins at the byte that its seed says, so that choices differ.
    varied: bool,
    running: Arc<AtomicUsize>,
    requests: Arc<Mutex<Vec<GenerateRequest>>>,
    stopped: Arc<Mutex<Vec<String>>>,
    jobs: Arc<Mutex<Vec<JobView>>>,
    simulations: Option<Arc<Submissions>>,
}

impl FakeNode {
    pub(super) fn generating(script: &'static str) -> Self {
        let (running, requests) = (Arc::default(), Arc::default());
        Self {
            script,
            template: "",
            embedding: None,
            context: 64,
            done: DoneReason::Stop,
            endless: false,
            varied: false,
            running,
            requests,
            stopped: Arc::default(),
            jobs: Arc::default(),
            simulations: None,
        }
    }

    fn served(&self) -> Served {
        let text = Arc::new(Bytes { template: self.template, embedding: self.embedding });
        Served { name: "tiny".into(), context: self.context, created: 7, text, elsewhere: None }
    }
}

pub(super) struct Running {
    events: mpsc::Receiver<TokenEvent>,
    count: Arc<AtomicUsize>,
}

impl Tokens for Running {
    async fn next(&mut self) -> Option<TokenEvent> {
        self.events.recv().await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Engine for FakeNode {
    type Tokens = Running;

    fn models(&self) -> Vec<Served> {
        vec![self.served()]
    }

    async fn submit(&self, _: &Served, request: GenerateRequest) -> Result<Running, NodeError> {
        let (sender, events) = mpsc::channel(4);
        self.running.fetch_add(1, Ordering::SeqCst);
        let position = request.prompt.len() as u32;
        let sampling = request.sampling.clone();
        self.requests.lock().push(request);
        let (done, endless, most) = (self.done.clone(), self.endless, sampling.logprobs);
        let embedding = self.embedding.map(|_| embeddings::fake(self.requests.lock().last().expect("this one")));
        let script = if self.varied { &self.script[sampling.seed as usize..] } else { self.script };
        tokio::spawn(async move {
            let bytes: Box<dyn Iterator<Item = u8> + Send> =
                if endless { Box::new(script.bytes().cycle()) } else { Box::new(script.bytes()) };
            for (i, byte) in bytes.enumerate() {
                let event = TokenEvent::Token {
                    position: position + i as u32,
                    sampled: Sampled {
                        token: u32::from(byte) + FIRST_BYTE,
                        logprobs: most.map(sampling::fake),
                        embedding: embedding.clone(),
                    },
                    cached: 0,
                };
                if sender.send(event).await.is_err() {
                    return;
                }
                if endless {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
            let _ = sender.send(TokenEvent::Done { reason: done }).await;
        });
        Ok(Running { events, count: self.running.clone() })
    }

    async fn deploy(&self, model: ModelRef, _: ModelOptions) -> Result<Served, NodeError> {
        if model.0 == "tiny" { Ok(self.served()) } else { Err(NodeError::NotFound(format!("no model `{}`", model.0))) }
    }

    fn has(&self, name: &str) -> bool {
        name == "cached"
    }

    async fn serve_on_demand(&self, name: &str) -> Result<Served, NodeError> {
        Ok(Served { name: name.to_owned(), ..self.served() })
    }

    async fn is_held(&self, name: &str) -> bool {
        self.jobs.lock().iter().any(|job| !job.head && job.model == name)
    }

    async fn undeploy(&self, model: &str) -> Result<(), NodeError> {
        self.stopped.lock().push(model.to_owned());
        Ok(())
    }

    async fn plan(&self, _: ModelRef, _: ModelOptions) -> Result<PlanReport, NodeError> {
        Err(NodeError::Plan(partitioner::PlanError::Memory { need: 10, offered: 4, ram: 0, missing: 6 }.to_string()))
    }

    async fn state(&self) -> StateView {
        StateView {
            node: "00".into(),
            name: "fake".into(),
            peer_id: "12D3".into(),
            mesh: "m".into(),
            membership_ends: 0,
            banned: None,
            peers: vec![],
            jobs: self.jobs.lock().clone(),
            waiting: vec![],
            weights: crate::transfer::view::WeightsView::default(),
            boundary: crate::boundary::BoundaryView::default(),
        }
    }

    async fn invite(&self, ttl: Duration, uses: u32) -> Result<String, NodeError> {
        Ok(format!("mesh1{}x{uses}", ttl.as_secs()))
    }

    async fn approve(&self, peer: String) -> Result<(), NodeError> {
        Err(NodeError::NotFound(format!("no peer {peer} waits")))
    }

    async fn ban(&self, peer: String) -> Result<BanReport, NodeError> {
        Ok(BanReport { banned: peer, with_it: vec!["12D3guest".into()], ..BanReport::default() })
    }

    fn submissions(&self) -> Option<Arc<Submissions>> {
        self.simulations.clone()
    }

    fn drain(&self, draining: bool) {
        self.stopped.lock().push(format!("draining: {draining}"));
    }

    async fn leave(&self) {}
}

/// The key that administers the test servers.
const KEY: &str = "the key of the node's data directory";

/// Serves `engine` on a free port until dropped.
pub(super) struct Server {
    address: SocketAddr,
    engine: FakeNode,
    _runtime: tokio::runtime::Runtime,
}

pub(super) fn start(engine: FakeNode) -> Server {
    start_with_key(engine, None)
}

fn start_with_key(engine: FakeNode, key: Option<&str>) -> Server {
    start_with(engine, key, Folders::default())
}

fn start_with(engine: FakeNode, key: Option<&str>, folders: Folders) -> Server {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let api = runtime.block_on(Api::bind("127.0.0.1:0".parse().unwrap(), key.map(str::to_owned))).unwrap();
    let address = api.address().unwrap();
    let api = api.administered_with(ApiKey::given(KEY)).writing_below(folders);
    runtime.spawn(api.serve(engine.clone(), Metrics::default(), std::future::pending()));
    Server { address, engine, _runtime: runtime }
}

impl Server {
    fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let host = if head.contains("Host:") { String::new() } else { format!("Host: {}\r\n", self.address) };
        let media = if head.contains("Content-Type:") { "" } else { "Content-Type: application/json\r\n" };
        // A test of keys sets its own header, or an empty one.
        let key =
            if head.contains("Authorization:") { String::new() } else { format!("Authorization: Bearer {KEY}\r\n") };
        let (line, rest) = head.split_once("\r\n").unwrap_or((head, ""));
        write!(
            stream,
            "{line} HTTP/1.1\r\n{host}{media}{key}{rest}Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        stream
    }

    /// Status, head and body (with chunked encoding removed).
    pub(super) fn call(&self, head: &str, body: &str) -> (u16, String, String) {
        let mut answer = Vec::new();
        self.send(head, body).read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let head = head.to_ascii_lowercase();
        let body = if head.contains("transfer-encoding: chunked") { dechunk(body) } else { body.to_owned() };
        (status, head, body)
    }

    fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let (status, _, text) = self.call(&format!("POST {path}"), &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    fn events(&self, path: &str, body: Value) -> Vec<String> {
        let (status, head, text) = self.call(&format!("POST {path}"), &body.to_string());
        assert_eq!(status, 200, "{text}");
        assert!(head.contains("content-type: text/event-stream"), "{head}");
        text.lines().filter_map(|l| l.strip_prefix("data: ").map(str::to_owned)).collect()
    }
}

/// The prompt of the last request.
fn prompt(server: &Server) -> String {
    let bytes = server.engine.requests.lock().last().unwrap().prompt.iter().map(|id| *id as u8).collect();
    String::from_utf8(bytes).unwrap()
}

fn dechunk(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text.push_str(&rest[..size]);
        body = rest[size..].strip_prefix("\r\n").unwrap_or("");
    }
    text
}

fn chat_body(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[test]
fn a_chat_completion_has_text_reason_and_usage() {
    let server = start(FakeNode::generating("Hello."));
    let (status, answer) = server.post("/v1/chat/completions", chat_body(json!({"temperature": 0, "seed": -1})));
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["message"], json!({"role": "assistant", "content": "Hello.", "refusal": null}));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let details = json!({"cached_tokens": 0});
    let usage =
        json!({"prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14, "prompt_tokens_details": details});
    assert_eq!(answer["usage"], usage);
    let request = server.engine.requests.lock()[0].clone();
    assert_eq!(request.prompt, "<user>Hi".bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!((request.sampling.temperature_e6, request.sampling.seed), (0, u64::MAX));
    assert_eq!(request.max_tokens, 64 - 8, "the rest of the context");
}

#[test]
fn a_streamed_chat_begins_with_the_role_and_ends_with_done() {
    let server = start(FakeNode::generating("naïve"));
    let body = chat_body(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = server.events("/v1/chat/completions", body);
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> = events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "naïve");
    let count = chunks.len();
    assert_eq!(chunks[count - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks[count - 1]["choices"], json!([]));
    assert_eq!(chunks[count - 1]["usage"]["completion_tokens"], 6);
    assert!(chunks[..count - 1].iter().all(|c| c["object"] == "chat.completion.chunk" && c["usage"].is_null()));
    assert!(chunks.iter().all(|c| c["id"] == chunks[0]["id"]));
}

#[test]
fn a_stop_string_ends_the_text_and_the_request() {
    let server = start(FakeNode { endless: true, ..FakeNode::generating("one. two. three. ") });
    let body = json!({"model": "tiny", "prompt": "count", "max_tokens": 1000, "stop": [". th", "zzz"]});
    let (status, answer) = server.post("/v1/completions", body.clone());
    assert_eq!(status, 200);
    assert_eq!(answer["choices"][0]["text"], "one. two");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let mut streaming = body;
    streaming["stream"] = json!(true);
    let events = server.events("/v1/completions", streaming);
    let text: String = events
        .iter()
        .filter_map(|e| serde_json::from_str::<Value>(e).ok())
        .map(|c| c["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, "one. two");
    wait_until_idle(&server.engine);
}

#[test]
fn a_disconnected_client_cancels_its_request() {
    let server = start(FakeNode { endless: true, ..FakeNode::generating("more ") });
    for stream in [true, false] {
        let body = chat_body(json!({"stream": stream})).to_string();
        let mut connection = server.send("POST /v1/chat/completions", &body);
        if stream {
            let mut some = [0; 512];
            connection.read_exact(&mut some).unwrap();
        } else {
            wait_until(|| server.engine.running.load(Ordering::SeqCst) == 1);
        }
        assert_eq!(server.engine.running.load(Ordering::SeqCst), 1);
        drop(connection);
        wait_until_idle(&server.engine);
    }
}

fn wait_until_idle(engine: &FakeNode) {
    wait_until(|| engine.running.load(Ordering::SeqCst) == 0);
}

fn wait_until(condition: impl Fn() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(std::time::Instant::now() < end, "condition not met within 20 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn rejections_have_the_right_status_and_openais_format() {
    let busy = start(FakeNode { done: DoneReason::Busy, ..FakeNode::generating("") });
    let (status, head, body) = busy.call("POST /v1/chat/completions", &chat_body(json!({"stream": true})).to_string());
    assert_eq!(status, 429, "{body}");
    assert!(head.contains("retry-after: 1"), "{head}");
    assert!(body.contains("\"code\":\"queue_full\""), "{body}");

    let failed = start(FakeNode { done: DoneReason::Failed("no plan".into()), ..FakeNode::generating("") });
    assert_eq!(failed.post("/v1/chat/completions", chat_body(json!({}))).0, 503);
    let invalid = start(FakeNode { done: DoneReason::Invalid("too long".into()), ..FakeNode::generating("") });
    assert_eq!(invalid.post("/v1/chat/completions", chat_body(json!({}))).0, 400);
}

#[test]
fn a_failure_in_mid_stream_is_an_error_event() {
    let server = start(FakeNode { done: DoneReason::Failed("a stage died".into()), ..FakeNode::generating("abc") });
    let events = server.events("/v1/chat/completions", chat_body(json!({"stream": true})));
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["message"], "a stage died");
    assert!(!events.contains(&"[DONE]".to_owned()));
}

#[test]
fn errors_name_the_wrong_parameter() {
    let server = start(FakeNode::generating("x"));
    for (extra, param) in [
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"n": 65}), "n"),
        (json!({"n": 2, "best_of": 3}), "best_of"),
        (json!({"tools": 5}), "tools"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function.name"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
            "tools[0].function.parameters",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}], "tool_choice": "required"}),
            "tools[0].function.parameters",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}]}),
            "tools[1].function.name",
        ),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "often"}), "tool_choice"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
            "tool_choice",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/a"}}}}),
            "response_format",
        ),
        (json!({"response_format": {"type": "json_object"}, "ignore_eos": true}), "ignore_eos"),
        (json!({"response_format": {"type": "json_object"}, "grammar": "start: \"a\""}), "grammar"),
        (json!({"grammar": "start: \"a"}), "grammar"),
        (
            json!({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}),
            "messages[0].tool_calls",
        ),
        (json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}), "messages[0].tool_calls"),
        (json!({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}), "messages[0].tool_call_id"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_k": -5}), "top_k"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"stop": [""]}), "stop"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "narrator", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages"),
        (json!({"messages": [{"role": "assistant", "content": "x"}]}), "messages"),
        (json!({"messages": [{"role": "user", "content": "x".repeat(80)}]}), "messages"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 1e20}), "max_tokens"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"presence_penalty": 2.5}), "presence_penalty"),
        (json!({"frequency_penalty": -3}), "frequency_penalty"),
        (json!({"logit_bias": [7]}), "logit_bias"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"256": 1}}), "logit_bias"),
        (json!({"logit_bias": {"7": 101}}), "logit_bias"),
        (json!({"logit_bias": {"7": "a"}}), "logit_bias"),
        (json!({"model": ""}), "model"),
    ] {
        let (status, answer) = server.post("/v1/chat/completions", chat_body(extra.clone()));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{extra} gave {answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
    }
    for extra in [
        json!({"n": 1, "logprobs": false, "tools": [], "user": "me", "response_format": {"type": "text"}}),
        json!({"stop": ""}),
        json!({"logit_bias": {}}),
        json!({"logit_bias": null}),
        json!({"logprobs": null, "stop": null, "temperature": null, "presence_penalty": 0, "stream_options": null}),
        json!({"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]}),
    ] {
        let (status, answer) = server.post("/v1/chat/completions", chat_body(extra.clone()));
        assert_eq!(status, 200, "{extra} gave {answer}");
    }
    let wrong = |body: Value| server.post("/v1/completions", body);
    assert_eq!(wrong(json!({"model": "tiny", "prompt": [300]})).0, 400);
    assert_eq!(wrong(json!({"model": "tiny", "prompt": ""})).0, 400);
    assert_eq!(wrong(json!({"model": "tiny", "prompt": ["a", "b"]})).0, 400);
    assert_eq!(wrong(json!({"model": "tiny", "prompt": [65, 66]})).0, 200);
    assert_eq!(wrong(json!({"prompt": "x"})).0, 400);
    let (status, answer) = wrong(json!({"model": "gpt-4", "prompt": "x"}));
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(answer["error"]["param"], "model");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("it serves tiny") && !message.contains("serve gpt-4"), "{message}");
    let (status, _, body) = server.call("DELETE /api/v1/models/nosuch", "");
    assert!(status == 404 && body.contains("nothing to stop"), "{body}");
}

#[test]
fn bodies_that_are_not_json_are_rejected() {
    let server = start(FakeNode::generating("x"));
    assert_eq!(server.call("POST /v1/completions", "{\"model\": ").0, 400);
    assert_eq!(server.call("POST /v1/completions", "[]").0, 400);
    assert_eq!(server.call("POST /v1/completions\r\nContent-Type: text/plain\r\n", "{}").0, 415);
    assert_eq!(server.call("GET /v1/completions", "").0, 405);
    let (status, _, body) = server.call("GET /v2/nothing", "");
    assert_eq!(status, 404);
    assert!(body.contains("\"error\""), "{body}");
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(server.call("POST /v1/completions", &deep).0, 400);
    let large = format!("{{\"model\":\"tiny\",\"prompt\":\"{}\"}}", "x".repeat(BODY_BYTES_MAX));
    assert_eq!(server.call("POST /v1/completions", &large).0, 413);
}

/// 400 sockets that send nothing, or half a request, must not block other callers.
#[test]
fn silent_sockets_neither_block_callers_nor_cut_streams() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("800 sockets at once");
    let server = start(FakeNode { endless: true, ..FakeNode::generating("more ") });
    let body = chat_body(json!({"stream": true})).to_string();
    let mut stream = server.send("POST /v1/chat/completions", &body);
    stream.read_exact(&mut [0; 512]).unwrap();
    let crowd: Vec<TcpStream> = (0..400)
        .map(|i| {
            let mut silent = TcpStream::connect(server.address).unwrap();
            if i % 2 == 0 {
                silent.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le").unwrap();
            }
            silent
        })
        .collect();
    for _ in 0..5 {
        assert_eq!(server.call("GET /healthz", "").0, 200);
        assert_eq!(server.call("GET /api/v1/state", "").0, 200);
    }
    stream.read_exact(&mut [0; 4096]).expect("the stream continues");
    drop(crowd);
}

#[test]
fn monitoring_and_command_endpoints_answer() {
    let server = start(FakeNode::generating("ab"));
    assert_eq!(server.call("GET /healthz", "").2, "ok\n");
    assert_eq!(server.call("GET /readyz", "").0, 200);
    server.post("/v1/completions", json!({"model": "tiny", "prompt": "x"}));
    let metrics = server.call("GET /metrics", "").2;
    assert!(metrics.contains("meshnode_tokens_generated_total{model=\"tiny\"} 2"), "{metrics}");
    assert!(metrics.contains("meshnode_requests_total{model=\"tiny\",outcome=\"stop\"} 1"), "{metrics}");
    let models: Value = serde_json::from_str(&server.call("GET /v1/models", "").2).unwrap();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(server.call("GET /v1/models/tiny", "").0, 200);
    assert_eq!(server.call("GET /v1/models//some/dir/tiny.gguf", "").0, 200, "by the path of its file");
    assert_eq!(server.call("GET /v1/models/other", "").0, 404);
    assert_eq!(server.post("/api/v1/invite", json!({"ttl_s": 60, "uses": 2})).1["ticket"], "mesh160x2");
    assert_eq!(server.post("/api/v1/invite", json!({"ttl_s": 60, "uses": 0})).0, 400);
    assert_eq!(server.post("/api/v1/approve", json!({"peer": "12D3"})).0, 404);
    let (status, banned) = server.post("/api/v1/ban", json!({"peer": "12D3"}));
    assert_eq!((status, &banned["banned"], &banned["with_it"]), (200, &json!("12D3"), &json!(["12D3guest"])));
    let (status, answer) = server.post("/api/v1/plan", json!({"model": "tiny"}));
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("no_plan")));
    assert!(answer["error"]["message"].as_str().unwrap().contains("6 B are missing"), "{answer}");
    assert_eq!(server.post("/api/v1/deploy", json!({"model": "other"})).0, 404);
    assert_eq!(server.call("GET /api/v1/state", "").0, 200);
}

#[test]
fn a_node_that_holds_its_part_is_ready_one_that_loads_is_not() {
    let server = start(FakeNode::generating(""));
    let with = |states: &[&str]| {
        let job = |state: &&str| JobView { state: (*state).to_owned(), ..JobView::default() };
        *server.engine.jobs.lock() = states.iter().map(job).collect();
        server.call("GET /readyz", "").0
    };
    assert_eq!(with(&[]), 200);
    assert_eq!(with(&["ready", "holding"]), 200);
    for state in ["planning", "loading", "degraded"] {
        assert_eq!(with(&["ready", state]), 503, "{state}");
    }
}

#[test]
fn a_drained_node_can_accept_work_again() {
    let server = start(FakeNode::generating(""));
    assert_eq!(server.post("/api/v1/drain", json!({"on": true})), (200, json!({"draining": true})));
    assert_eq!(server.post("/api/v1/drain", json!({"on": false})), (200, json!({"draining": false})));
    assert_eq!(*server.engine.stopped.lock(), ["draining: true", "draining: false"]);
    assert_eq!(server.post("/api/v1/drain", json!({})).0, 400);
}

#[test]
fn a_model_is_stopped_by_name_or_path() {
    let server = start(FakeNode::generating(""));
    for path in ["/api/v1/models/tiny", "/api/v1/models//home/me/tiny.gguf", "/api/v1/models/%2Fa%20b%2Ftiny.gguf"] {
        let (status, _, body) = server.call(&format!("DELETE {path}"), "");
        assert_eq!((status, body.as_str()), (200, r#"{"model":"tiny","served":false}"#), "{path}");
    }
    assert_eq!(*server.engine.stopped.lock(), ["tiny"; 3]);
    let (status, _, body) = server.call("DELETE /api/v1/models/other", "");
    assert_eq!(status, 404, "{body}");
}

#[test]
fn missing_options_get_the_nodes_defaults() {
    let options = |text: Value| serde_json::from_value::<ModelOptions>(text).unwrap();
    assert_eq!(options(json!({})), ModelOptions::default());
    assert_eq!(options(json!({"int8": null, "context": null, "sequences": null})), ModelOptions::default());
    let some = ModelOptions { int8: Some(false), context: Some(9), sequences: None, ..ModelOptions::default() };
    assert_eq!(options(json!({"int8": false, "context": 9})), some);
}

#[test]
fn generation_for_the_command_line_streams_json_lines() {
    let server = start(FakeNode::generating("é!"));
    let body = json!({"model": "tiny", "prompt": "Hi", "temperature": 0}).to_string();
    let (status, _, text) = server.call("POST /api/v1/generate", &body);
    assert_eq!(status, 200, "{text}");
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines[0]["templated"], true);
    assert_eq!(lines[1], json!({"position": 8, "token": 0xc3 + FIRST_BYTE, "text": ""}));
    assert_eq!(lines[2]["text"], "é");
    assert_eq!(lines[4]["done"], "stop");
    assert_eq!((&lines[4]["prompt_tokens"], &lines[4]["tokens"]), (&json!(8), &json!(3)));
    let raw = json!({"model": "tiny", "prompt": "Hi", "raw": true}).to_string();
    let text = server.call("POST /api/v1/generate", &raw).2;
    let begin: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(begin["prompt_token_ids"], json!([72, 105]));
}

fn keyed(path: &str, key: &str) -> String {
    format!("POST {path}\r\nIdempotency-Key: {key}\r\n")
}

#[test]
fn a_request_serves_a_model_that_this_node_has() {
    let server = start(FakeNode::generating("Hello."));
    let (status, answer) = server.post("/v1/chat/completions", chat_body(json!({"model": "cached"})));
    assert_eq!((status, &answer["model"]), (200, &json!("cached")), "{answer}");
    assert_eq!(server.call("GET /v1/models/cached", "").0, 404, "only a generation request serves it");
}

#[test]
fn a_request_waits_for_the_successor_of_a_lost_coordinator() {
    let engine = FakeNode::generating("ok");
    let part = JobView { model: "cached".into(), state: "holding".into(), ..JobView::default() };
    engine.jobs.lock().push(part);
    let server = start(engine.clone());
    let asked = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| {
            let answer = server.post("/v1/chat/completions", chat_body(json!({"model": "cached"})));
            asked.store(true, Ordering::SeqCst);
            answer
        });
        std::thread::sleep(Duration::from_millis(600));
        assert!(!asked.load(Ordering::SeqCst), "a second job would take the memory that the successor needs");
        engine.jobs.lock().clear();
        assert_eq!(answer.join().unwrap().0, 200, "no successor came: the model is served here");
    });
}
