//! Answers in OpenAI's form: whole, or as the events of a stream.
use super::generation::Figures;
use axum::Json;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};
use std::convert::Infallible;

/// The kind of answer.
#[derive(Clone, Copy)]
pub(super) enum Shape {
    Chat,
    Completion,
}

impl Shape {
    /// The path of its endpoint.
    pub(super) fn path(self) -> &'static str {
        match self {
            Shape::Chat => "/v1/chat/completions",
            Shape::Completion => "/v1/completions",
        }
    }
}

/// The fields that all chunks of an answer share.
pub(super) struct Answer {
    shape: Shape,
    id: String,
    created: u64,
    model: String,
}

impl Answer {
    /// `seed`: of the request's key, so that the answer has the same id on every node.
    pub(super) fn new(shape: Shape, seed: u64, model: &str) -> Self {
        let prefix = match shape {
            Shape::Chat => "chatcmpl",
            Shape::Completion => "cmpl",
        };
        let created = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self { shape, id: format!("{prefix}-{seed:016x}"), created, model: model.to_owned() }
    }

    /// The whole answer, if it is not streamed.
    pub(super) fn whole(&self, text: &str, finish: &str, figures: &Figures) -> Value {
        let (object, choice) = match self.shape {
            Shape::Chat => {
                let message = json!({"role": "assistant", "content": text, "refusal": null});
                ("chat.completion", json!({"index": 0, "message": message, "logprobs": null, "finish_reason": finish}))
            }
            Shape::Completion => {
                ("text_completion", json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish}))
            }
        };
        let mut value = self.envelope(object, vec![choice]);
        value["usage"] = usage(figures);
        value
    }

    /// The first event of a stream.
    pub(super) fn begin(&self, include_usage: bool) -> Option<SentEvent> {
        match self.shape {
            Shape::Chat => Some((0, self.chunk(Some(""), None, include_usage, true))),
            Shape::Completion => None,
        }
    }

    /// The last events of a stream, beginning with the held-back `text`.
    pub(super) fn end(&self, text: &str, finish: &str, figures: &Figures, include_usage: bool) -> Vec<SentEvent> {
        let tokens = u64::from(figures.tokens);
        let mut events = Vec::new();
        if !text.is_empty() {
            events.push((tokens + END_TEXT, self.chunk(Some(text), None, include_usage, false)));
        }
        events.push((tokens + END_REASON, self.chunk(None, Some(finish), include_usage, false)));
        if include_usage {
            events.push((tokens + END_USAGE, self.usage_chunk(figures)));
        }
        events.push((tokens + END_MARK, "[DONE]".into()));
        events
    }

    /// The data of one event.
    pub(super) fn chunk(&self, text: Option<&str>, finish: Option<&str>, include_usage: bool, begin: bool) -> String {
        let choice = match self.shape {
            Shape::Chat => {
                let delta = match (begin, text) {
                    (true, _) => json!({"role": "assistant", "content": ""}),
                    (false, Some(text)) => json!({"content": text}),
                    (false, None) => json!({}),
                };
                json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish})
            }
            Shape::Completion => {
                json!({"index": 0, "text": text.unwrap_or(""), "logprobs": null, "finish_reason": finish})
            }
        };
        let mut value = self.envelope(self.chunk_object(), vec![choice]);
        if include_usage {
            value["usage"] = Value::Null;
        }
        value.to_string()
    }

    fn usage_chunk(&self, figures: &Figures) -> String {
        let mut value = self.envelope(self.chunk_object(), vec![]);
        value["usage"] = usage(figures);
        value.to_string()
    }

    fn chunk_object(&self) -> &'static str {
        match self.shape {
            Shape::Chat => "chat.completion.chunk",
            Shape::Completion => "text_completion",
        }
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": null, "choices": choices,
        })
    }
}

fn usage(figures: &Figures) -> Value {
    let (prompt, completion) = (figures.prompt_tokens, figures.tokens as usize);
    json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
}

/// A completed answer.
pub(super) struct Finished {
    pub(super) answer: Answer,
    pub(super) text: String,
    /// Event ids, and the length of the text (bytes) after each.
    pub(super) marks: Vec<(u64, usize)>,
    pub(super) finish: &'static str,
    pub(super) figures: Figures,
}

impl Finished {
    /// Approximate memory use.
    pub(super) fn bytes(&self) -> usize {
        let marks = self.marks.len() * size_of::<(u64, usize)>();
        self.text.len() + marks + self.answer.id.len() + self.answer.model.len() + size_of::<Self>()
    }

    /// Replays the answer. `Some(include_usage)` streams the events that follow `after`.
    pub(super) fn replay(&self, stream: Option<bool>, after: Option<u64>) -> Response {
        match stream {
            None => Json(self.answer.whole(&self.text, self.finish, &self.figures)).into_response(),
            Some(include_usage) => {
                let known = self.marks.iter().rev().find(|(event, _)| after.is_some_and(|after| *event <= after));
                let rest = self.text.get(known.map_or(0, |(_, length)| *length)..).unwrap_or_default();
                let begin = self.answer.begin(include_usage);
                let end = self.answer.end(rest, self.finish, &self.figures, include_usage);
                let events = begin.into_iter().chain(end).filter(|sent| is_new(sent, after));
                Sse::new(stream::iter(events.map(event).collect::<Vec<_>>())).into_response()
            }
        }
    }

    #[cfg(test)]
    pub(super) fn sample(text: &str) -> Self {
        let answer = Answer { shape: Shape::Chat, id: String::new(), created: 0, model: String::new() };
        Self { answer, text: text.to_owned(), marks: Vec::new(), finish: "stop", figures: Figures::none() }
    }
}

/// An event of a stream: its increasing id, and its data. The id of a token is the number of tokens so far, so it is
/// the same on every node that streams the answer.
pub(super) type SentEvent = (u64, String);

/// Whether a client has not received an event yet.
pub(super) fn is_new(sent: &SentEvent, after: Option<u64>) -> bool {
    after.is_none_or(|after| sent.0 > after)
}

/// The server-sent event.
pub(super) fn event((id, data): SentEvent) -> Result<Event, Infallible> {
    Ok(Event::default().id(id.to_string()).data(data))
}

/// Ids of the last events, as offsets to the number of tokens: held-back text, finish reason, usage, end mark.
pub(super) const END_TEXT: u64 = 1;
const END_REASON: u64 = 2;
const END_USAGE: u64 = 3;
const END_MARK: u64 = 4;
