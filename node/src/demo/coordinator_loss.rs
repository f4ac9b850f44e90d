//! Loss of the coordinator that is also the client's entry node: the client retries the request at another node with
//! `Last-Event-ID`, and the stream resumes there.
use super::{Demo, PROMPT};
use crate::cluster::LocalNode;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Error, Result};
use std::time::{Duration, Instant};

/// Timeout for another node to continue the answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Retry interval of the client.
const AGAIN: Duration = Duration::from_millis(100);

/// An answer whose coordinator was killed during generation.
pub(super) struct Resumed {
    /// The complete text, as assembled by the client.
    pub(super) text: String,
    /// Every event arrived once and in order, up to the end mark.
    pub(super) complete: bool,
    /// Time from the kill to the first event from another node.
    pub(super) pause: Duration,
}

/// The part of an answer that the client has received.
#[derive(Default)]
struct Answer {
    text: String,
    last: Option<u64>,
    tokens: usize,
    ended: bool,
    /// An event arrived twice or out of order.
    again: bool,
}

impl Answer {
    /// Processes an event with its id.
    fn take(&mut self, id: u64, data: &str) -> Result<()> {
        self.again |= self.last.is_some_and(|last| id <= last);
        self.last = Some(id);
        if data == "[DONE]" {
            self.ended = true;
            return Ok(());
        }
        let chunk: Value = serde_json::from_str(data)?;
        if let Some(text) = chunk["choices"][0]["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
            self.text.push_str(text);
            self.tokens += 1;
        }
        Ok(())
    }
}

impl Demo {
    /// Streams an answer from the coordinator, kills it after `moment` tokens, and streams the rest from other nodes.
    pub(super) fn resumed(
        &self,
        nodes: &mut [LocalNode],
        coordinator: usize,
        moment: usize,
        model: &str,
        key: &str,
    ) -> Result<Resumed> {
        let body = json!({
            "model": model, "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": self.options.tokens, "temperature": 0.0, "ignore_eos": true, "stream": true,
        });
        let mut answer = Answer::default();
        let mut killed = None;
        let first =
            ask(&nodes[coordinator], key, &body, None)?.ok_or_else(|| Error::other("the model is not served"))?;
        read(first, &mut answer, |answer| {
            if answer.tokens >= moment && killed.is_none() {
                killed = Some(Instant::now());
                nodes[coordinator].kill();
            }
        })?;
        let killed = killed.ok_or_else(|| Error::other(format!("the stream ended after {} tokens", answer.tokens)))?;
        let mut pause = None;
        while !answer.ended && killed.elapsed() < ANSWER_MAX {
            for node in (1..nodes.len()).map(|step| &nodes[(coordinator + step) % nodes.len()]) {
                if let Ok(Some(stream)) = ask(node, key, &body, answer.last) {
                    read(stream, &mut answer, |_| _ = pause.get_or_insert_with(|| killed.elapsed()))?;
                }
                if answer.ended {
                    break;
                }
            }
            std::thread::sleep(AGAIN);
        }
        let Answer { text, ended, again, .. } = answer;
        Ok(Resumed { text, complete: ended && !again, pause: pause.unwrap_or(ANSWER_MAX) })
    }
}

/// Sends a request with an idempotency key; `None` if the node cannot answer it yet (any status but 200).
fn ask(node: &LocalNode, key: &str, body: &Value, last: Option<u64>) -> Result<Option<ureq::Body>> {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let mut request = agent.post(format!("http://{}/v1/chat/completions", node.api)).header("Idempotency-Key", key);
    if let Some(last) = last {
        request = request.header("Last-Event-ID", last.to_string());
    }
    let answer = request.send_json(body).map_err(Error::other)?;
    Ok((answer.status().as_u16() == 200).then(|| answer.into_body()))
}

/// Reads events until the stream breaks or ends. Calls `seen` after each.
fn read(stream: ureq::Body, answer: &mut Answer, mut seen: impl FnMut(&Answer)) -> Result<()> {
    let (mut id, mut error) = (None, false);
    for line in BufReader::new(stream.into_reader()).lines() {
        let Ok(line) = line else { return Ok(()) };
        if let Some(number) = line.strip_prefix("id: ") {
            id = number.parse().ok();
        } else if let Some(data) = line.strip_prefix("data: ") {
            // The node reports an error; another node may continue.
            error |= data.starts_with("{\"error\"");
            if let Some(id) = id.take().filter(|_| !error) {
                answer.take(id, data)?;
                seen(answer);
            }
        }
    }
    Ok(())
}
