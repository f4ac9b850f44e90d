//! Answers of OpenAI's `/v1/chat/completions` and `/v1/completions`.
use super::super::error::ApiError;
use super::super::events::{Ending, Head, SentEvent, Total, Writer};
use super::super::generation::SpelledLogprobs;
use super::super::output::{Delta, Part, ToolCall, append};
use super::spelled;
use serde_json::{Value, json};

/// Ids of the last events, as offsets to the number of tokens: held-back text, finish reason, usage, end mark. The id of a
/// token's event is the number of tokens.
const END_TEXT: u64 = 1;
const END_REASON: u64 = 2;
const END_USAGE: u64 = 3;
const END_MARK: u64 = 4;

#[derive(Clone, Copy)]
enum Shape {
    Chat,
    Completion,
}

/// Writes a choice as chunks with deltas.
pub(super) struct Chunks {
    shape: Shape,
    head: Head,
    include_usage: bool,
    /// What has been read of an answer that is not streamed.
    parts: Vec<Part>,
    /// The answer has calls.
    called: bool,
    /// Log-probabilities of the tokens since the last chunk.
    logprobs: Vec<SpelledLogprobs>,
    /// Characters of the tokens that were written with log-probabilities.
    offset: usize,
}

impl Chunks {
    pub(super) fn chat(head: Head, include_usage: bool) -> Self {
        Self::new(Shape::Chat, head, include_usage)
    }

    pub(super) fn completion(head: Head, include_usage: bool) -> Self {
        Self::new(Shape::Completion, head, include_usage)
    }

    fn new(shape: Shape, head: Head, include_usage: bool) -> Self {
        Self { shape, head, include_usage, parts: Vec::new(), called: false, logprobs: Vec::new(), offset: 0 }
    }

    /// The data of one event.
    fn chunk(&mut self, delta: &Delta, finish: Option<&str>) -> String {
        self.called |= !delta.calls.is_empty();
        let logprobs = self.take_logprobs();
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
                json!({"index": self.head.choice, "delta": fields, "logprobs": logprobs, "finish_reason": finish})
            }
            Shape::Completion => {
                json!({"index": self.head.choice, "text": delta.content, "logprobs": logprobs, "finish_reason": finish})
            }
        };
        self.event_data(choice)
    }

    fn event_data(&self, choice: Value) -> String {
        let mut value = self.envelope(self.chunk_object(), vec![choice]);
        if self.include_usage {
            value["usage"] = Value::Null;
        }
        value.to_string()
    }

    fn call(&self, call: &ToolCall) -> Value {
        let function = json!({"name": call.name, "arguments": call.arguments});
        json!({"id": self.head.call_id(call.index), "type": "function", "function": function})
    }

    fn usage_chunk(&self, total: &Total) -> String {
        let mut value = self.envelope(self.chunk_object(), vec![]);
        value["usage"] = self.usage(total);
        value.to_string()
    }

    fn usage(&self, total: &Total) -> Value {
        let (prompt, completion) = (self.head.prompt_tokens, total.tokens as usize);
        json!({
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
        })
    }

    /// The log-probabilities of the tokens since the last chunk, in the form of the endpoint.
    fn take_logprobs(&mut self) -> Value {
        let tokens = std::mem::take(&mut self.logprobs);
        if tokens.is_empty() {
            return Value::Null;
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match self.shape {
            Shape::Chat => {
                json!({"content": tokens.iter().map(spelled).collect::<Vec<_>>(), "refusal": null})
            }
            Shape::Completion => {
                let top = |logprobs: &SpelledLogprobs| {
                    let top = logprobs.top.iter().map(|(bytes, log)| (text(bytes), json!(log)));
                    Value::Object(top.collect())
                };
                let mut offsets = Vec::with_capacity(tokens.len());
                for logprobs in &tokens {
                    offsets.push(self.offset);
                    self.offset += text(&logprobs.token.0).chars().count();
                }
                json!({
                    "tokens": tokens.iter().map(|logprobs| text(&logprobs.token.0)).collect::<Vec<_>>(),
                    "token_logprobs": tokens.iter().map(|logprobs| logprobs.token.1).collect::<Vec<_>>(),
                    "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
                    "text_offset": offsets,
                })
            }
        }
    }

    fn chunk_object(&self) -> &'static str {
        match self.shape {
            Shape::Chat => "chat.completion.chunk",
            Shape::Completion => "text_completion",
        }
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        let prefix = match self.shape {
            Shape::Chat => "chatcmpl",
            Shape::Completion => "cmpl",
        };
        json!({
            "id": format!("{prefix}-{:016x}", self.head.seed), "object": object, "created": self.head.created,
            "model": self.head.model, "system_fingerprint": null, "choices": choices,
        })
    }

    /// The finish reason: an answer that ends after calls waits for their results.
    fn reason(&self, ending: &Ending) -> &'static str {
        let word = ending.finish.word();
        if word == "stop" && self.called { "tool_calls" } else { word }
    }
}

impl Writer for Chunks {
    fn logprobs(&mut self, logprobs: &SpelledLogprobs, _: bool) {
        self.logprobs.push(logprobs.clone());
    }

    fn read(&mut self, parts: Vec<Part>) {
        append(&mut self.parts, parts);
    }

    fn whole(&mut self, parts: Vec<Part>, ending: &Ending) -> Value {
        self.read(parts);
        let read = Delta::from(std::mem::take(&mut self.parts));
        self.called = !read.calls.is_empty();
        let finish = self.reason(ending);
        let logprobs = self.take_logprobs();
        let index = self.head.choice;
        match self.shape {
            Shape::Chat => {
                let content = if read.content.is_empty() && self.called { None } else { Some(read.content) };
                let mut message = json!({"role": "assistant", "content": content, "refusal": null});
                if !read.reasoning.is_empty() {
                    message["reasoning_content"] = json!(read.reasoning.trim());
                }
                if self.called {
                    message["tool_calls"] = read.calls.iter().map(|call| self.call(call)).collect();
                }
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
            }
            Shape::Completion => {
                json!({"index": index, "text": read.content, "logprobs": logprobs, "finish_reason": finish})
            }
        }
    }

    fn join(&self, choices: Vec<Value>, total: &Total) -> Value {
        let object = match self.shape {
            Shape::Chat => "chat.completion",
            Shape::Completion => "text_completion",
        };
        let mut value = self.envelope(object, choices);
        value["usage"] = self.usage(total);
        value
    }

    fn begin(&mut self) -> Vec<SentEvent> {
        match self.shape {
            Shape::Chat => {
                let delta = json!({"role": "assistant", "content": ""});
                let choice =
                    json!({"index": self.head.choice, "delta": delta, "logprobs": null, "finish_reason": null});
                vec![SentEvent::unnamed(0, self.event_data(choice))]
            }
            Shape::Completion => Vec::new(),
        }
    }

    fn step(&mut self, tokens: u32, parts: Vec<Part>) -> Vec<SentEvent> {
        vec![SentEvent::unnamed(u64::from(tokens), self.chunk(&parts.into(), None))]
    }

    fn end(&mut self, parts: Vec<Part>, ending: &Ending) -> Vec<SentEvent> {
        let tokens = u64::from(ending.tokens);
        let mut events = Vec::new();
        if !parts.is_empty() {
            events.push(SentEvent::unnamed(tokens + END_TEXT, self.chunk(&parts.into(), None)));
        }
        let finish = self.reason(ending);
        events.push(SentEvent::unnamed(tokens + END_REASON, self.chunk(&Delta::default(), Some(finish))));
        events
    }

    fn close(&self, total: &Total) -> Vec<SentEvent> {
        let tokens = u64::from(total.longest);
        let mut events = Vec::new();
        if self.include_usage {
            events.push(SentEvent::unnamed(tokens + END_USAGE, self.usage_chunk(total)));
        }
        events.push(SentEvent::unnamed(tokens + END_MARK, "[DONE]".into()));
        events
    }

    fn failed(&mut self, error: &ApiError) -> Vec<SentEvent> {
        vec![SentEvent { id: None, name: None, data: error.body().to_string() }]
    }
}
