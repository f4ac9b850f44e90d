//! The loss of the one node that a request does not survive, the one its client is connected to: how soon the client hears
//! of it, and how soon another node answers the same request under the same `Idempotency-Key`.
use super::{Demo, PROMPT};
use crate::cluster::LocalNode;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Error, Result};
use std::time::{Duration, Instant};

/// Longest wait for another node to place the model and answer.
const ANSWER_MAX: Duration = Duration::from_secs(180);
/// Between two attempts, as OpenAI's clients wait.
const AGAIN: Duration = Duration::from_millis(500);

/// What a client saw of it.
#[derive(Clone, Debug, Serialize)]
pub struct HeadLoss {
    /// From the kill to the error of the running stream.
    pub error_ms: f64,
    /// From the first attempt at another node to its whole answer, the attempts it refused included.
    pub same_answer_elsewhere_ms: f64,
    /// That is the answer of one undisturbed node.
    pub equal: bool,
}

impl Demo {
    /// Kills the head when so many tokens have come, and asks `other`, which has the model's file, again. The head must serve
    /// the model.
    pub(super) fn lose_head(
        &self,
        head: &mut LocalNode,
        other: &LocalNode,
        moment: usize,
        expected: &str,
    ) -> Result<HeadLoss> {
        let served = head.post("/api/v1/deploy", &self.model_request())?;
        let mut body = json!({
            "model": served["model"], "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": self.options.tokens, "temperature": 0.0, "ignore_eos": true, "stream": true,
        });
        let key = format!("demo-{}", head.pid());
        let stream = BufReader::new(ask(head, &key, &body)?.into_body().into_reader());
        let (mut chunks, mut killed) = (0, None);
        for line in stream.lines() {
            let Ok(line) = line else { break };
            if line == "data: [DONE]" {
                return Err(Error::other("the answer was over before the head was killed"));
            }
            chunks += usize::from(line.starts_with("data:"));
            if chunks == moment && killed.is_none() {
                killed = Some(Instant::now());
                head.kill();
            }
        }
        let killed = killed.ok_or_else(|| Error::other(format!("the stream ended after {chunks} chunks")))?;
        let error_ms = killed.elapsed().as_secs_f64() * 1e3;
        if let Some(body) = body.as_object_mut() {
            body.remove("stream");
        }
        let start = Instant::now();
        let answer = ask(other, &key, &body)?.into_body().read_to_string().map_err(Error::other)?;
        let same_answer_elsewhere_ms = start.elapsed().as_secs_f64() * 1e3;
        let answer: Value = serde_json::from_str(&answer)?;
        let equal = answer["choices"][0]["message"]["content"] == expected;
        Ok(HeadLoss { error_ms, same_answer_elsewhere_ms, equal })
    }
}

/// Sends a request under a key, and again while the node says that it may work in a moment.
fn ask(node: &LocalNode, key: &str, body: &Value) -> Result<ureq::http::Response<ureq::Body>> {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let url = format!("http://{}/v1/chat/completions", node.api);
    let end = Instant::now() + ANSWER_MAX;
    loop {
        let answer = agent.post(&url).header("Idempotency-Key", key).send_json(body).map_err(Error::other)?;
        match answer.status().as_u16() {
            200 => return Ok(answer),
            409 | 429 | 503 if Instant::now() < end => std::thread::sleep(AGAIN),
            status => {
                let said = answer.into_body().read_to_string().unwrap_or_default();
                return Err(Error::other(format!("`{}` answered {status}: {said}", node.name)));
            }
        }
    }
}
