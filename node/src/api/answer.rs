//! Answers in OpenAI's form: whole, or as the events of a stream.
use super::generation::Figures;
use super::output::{Delta, OutputReader, Reading, ToolCall};
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

/// What all chunks of an answer share.
pub(super) struct Answer {
    shape: Shape,
    id: String,
    seed: u64,
    created: u64,
    model: String,
    reading: Reading,
}

impl Answer {
    /// `seed`: of the request's key, so that the answer has the same ids on every node.
    pub(super) fn new(shape: Shape, seed: u64, model: &str, reading: Reading) -> Self {
        let prefix = match shape {
            Shape::Chat => "chatcmpl",
            Shape::Completion => "cmpl",
        };
        let created = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let id = format!("{prefix}-{seed:016x}");
        Self { shape, id, seed, created, model: model.to_owned(), reading }
    }

    /// The whole answer, if it is not streamed. `text`: as the model wrote it.
    pub(super) fn whole(&self, text: &str, finish: &str, figures: &Figures) -> Value {
        let (object, choice) = match self.shape {
            Shape::Chat => {
                let mut reader = OutputReader::new(self.reading);
                let mut read = reader.push(text);
                read.append(reader.finish());
                let finish = reason(finish, &reader);
                let content = if read.content.is_empty() && !read.calls.is_empty() { None } else { Some(read.content) };
                let mut message = json!({"role": "assistant", "content": content, "refusal": null});
                if !read.reasoning.is_empty() {
                    message["reasoning_content"] = json!(read.reasoning.trim());
                }
                if !read.calls.is_empty() {
                    message["tool_calls"] = read.calls.iter().map(|call| self.call(call)).collect();
                }
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
            Shape::Chat => {
                let delta = json!({"role": "assistant", "content": ""});
                let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null});
                Some((0, self.event_data(choice, include_usage)))
            }
            Shape::Completion => None,
        }
    }

    /// The last events of a stream, beginning with the held-back `text`.
    pub(super) fn end(
        &self,
        reader: &mut OutputReader,
        text: &str,
        finish: &str,
        figures: &Figures,
        include_usage: bool,
    ) -> Vec<SentEvent> {
        let tokens = u64::from(figures.tokens);
        let mut events = Vec::new();
        let mut rest = reader.push(text);
        rest.append(reader.finish());
        if !rest.is_empty() {
            events.push((tokens + END_TEXT, self.chunk(&rest, None, include_usage)));
        }
        let finish = reason(finish, reader);
        events.push((tokens + END_REASON, self.chunk(&Delta::default(), Some(finish), include_usage)));
        if include_usage {
            events.push((tokens + END_USAGE, self.usage_chunk(figures)));
        }
        events.push((tokens + END_MARK, "[DONE]".into()));
        events
    }

    /// The data of one event.
    pub(super) fn chunk(&self, delta: &Delta, finish: Option<&str>, include_usage: bool) -> String {
        let choice = match self.shape {
            Shape::Chat => {
                let mut fields = serde_json::Map::new();
                if !delta.reasoning.is_empty() {
                    fields.insert("reasoning_content".into(), json!(delta.reasoning));
                }
                if !delta.content.is_empty() {
                    fields.insert("content".into(), json!(delta.content));
                }
                if !delta.calls.is_empty() {
                    let call = |call: &ToolCall| {
                        let mut value = self.call(call);
                        value["index"] = json!(call.index);
                        value
                    };
                    fields.insert("tool_calls".into(), delta.calls.iter().map(call).collect());
                }
                json!({"index": 0, "delta": fields, "logprobs": null, "finish_reason": finish})
            }
            Shape::Completion => {
                json!({"index": 0, "text": delta.content, "logprobs": null, "finish_reason": finish})
            }
        };
        self.event_data(choice, include_usage)
    }

    fn event_data(&self, choice: Value, include_usage: bool) -> String {
        let mut value = self.envelope(self.chunk_object(), vec![choice]);
        if include_usage {
            value["usage"] = Value::Null;
        }
        value.to_string()
    }

    /// A tool call. Its id has nine letters and digits, as the templates of Mistral require.
    fn call(&self, call: &ToolCall) -> Value {
        const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
        let mut seed = blake3::Hasher::new_derive_key("meshnode 2026 id of a tool call");
        seed.update(&self.seed.to_le_bytes()).update(&(call.index as u64).to_le_bytes());
        let id: String =
            seed.finalize().as_bytes()[..9].iter().map(|&b| char::from(DIGITS[usize::from(b) % 36])).collect();
        json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
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

/// The finish reason: an answer that ends after calls waits for their results.
fn reason<'a>(finish: &'a str, reader: &OutputReader) -> &'a str {
    if finish == "stop" && reader.calls() > 0 { "tool_calls" } else { finish }
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
                let (received, rest) =
                    self.text.split_at_checked(known.map_or(0, |(_, length)| *length)).unwrap_or((&self.text, ""));
                let mut reader = OutputReader::new(self.answer.reading);
                reader.push(received);
                let begin = self.answer.begin(include_usage);
                let end = self.answer.end(&mut reader, rest, self.finish, &self.figures, include_usage);
                let events = begin.into_iter().chain(end).filter(|sent| is_new(sent, after));
                Sse::new(stream::iter(events.map(event).collect::<Vec<_>>())).into_response()
            }
        }
    }

    #[cfg(test)]
    pub(super) fn sample(text: &str) -> Self {
        let reading = Reading::default();
        let answer =
            Answer { shape: Shape::Chat, id: String::new(), seed: 0, created: 0, model: String::new(), reading };
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
