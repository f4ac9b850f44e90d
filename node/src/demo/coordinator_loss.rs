//! The loss of the node that a client is connected to and that coordinates its request: the client sends the request again to another
//! node, with the id of the last event that it has, and the stream goes on there.
use super::{Demo, PROMPT};
use crate::cluster::LocalNode;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Error, Result};
use std::time::{Duration, Instant};

/// Longest wait for another node to go on.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Between two attempts: a client that waits for its answer asks soon.
const AGAIN: Duration = Duration::from_millis(100);

/// One answer, of which the coordinator was lost half-way.
pub(super) struct Resumed {
    /// All of it, as the client put it together.
    pub(super) text: String,
    /// Every event came once and in order, up to the end mark.
    pub(super) complete: bool,
    /// From the kill to the first event from another node.
    pub(super) pause: Duration,
}

/// What a client has of an answer.
#[derive(Default)]
struct Answer {
    text: String,
    last: Option<u64>,
    tokens: usize,
    ended: bool,
    again: bool,
}

impl Answer {
    /// Takes an event with its id.
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
    /// Streams an answer from the coordinator, which is killed after `moment` tokens, and the rest from the others.
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

/// Sends a request under a key; none while the node says that it may work in a moment.
fn ask(node: &LocalNode, key: &str, body: &Value, last: Option<u64>) -> Result<Option<ureq::Body>> {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let mut request = agent.post(format!("http://{}/v1/chat/completions", node.api)).header("Idempotency-Key", key);
    if let Some(last) = last {
        request = request.header("Last-Event-ID", last.to_string());
    }
    let answer = request.send_json(body).map_err(Error::other)?;
    Ok((answer.status().as_u16() == 200).then(|| answer.into_body()))
}

/// Reads events until the stream breaks or ends; `seen` after each.
fn read(stream: ureq::Body, answer: &mut Answer, mut seen: impl FnMut(&Answer)) -> Result<()> {
    let (mut id, mut error) = (None, false);
    for line in BufReader::new(stream.into_reader()).lines() {
        let Ok(line) = line else { return Ok(()) };
        if let Some(number) = line.strip_prefix("id: ") {
            id = number.parse().ok();
        } else if let Some(data) = line.strip_prefix("data: ") {
            // The node says that it cannot go on: another one may.
            error |= data.starts_with("{\"error\"");
            if let Some(id) = id.take().filter(|_| !error) {
                answer.take(id, data)?;
                seen(answer);
            }
        }
    }
    Ok(())
}
