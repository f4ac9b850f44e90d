//! Answers of OpenAI's `/v1/responses`: items of thoughts, text and function calls.
use super::super::blocks::{BlockEvent, Blocks, TextKind};
use super::super::error::ApiError;
use super::super::events::{Ending, EventIds, Head, SentEvent, Writer};
use super::super::generation::{Finish, SpelledLogprobs};
use super::super::output::{Part, ToolCall};
use super::spelled;
use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

const IN_PROGRESS: &str = "in_progress";
const COMPLETED: &str = "completed";
const INCOMPLETE: &str = "incomplete";

/// Writes an answer as output items.
pub(super) struct Items {
    head: Head,
    /// The fields of the request that an answer repeats.
    request: Arc<Map<String, Value>>,
    blocks: Blocks,
    /// Log-probabilities of the tokens since the last text.
    logprobs: Vec<SpelledLogprobs>,
    /// The log-probabilities of each item of text, by its place.
    of_items: BTreeMap<usize, Vec<Value>>,
    ids: EventIds,
    /// The number of the next event in the stream.
    sequence: u64,
}

impl Items {
    pub(super) fn new(head: Head, request: Arc<Map<String, Value>>) -> Self {
        let (blocks, logprobs, of_items) = (Blocks::default(), Vec::new(), BTreeMap::new());
        Self { head, request, blocks, logprobs, of_items, ids: EventIds::default(), sequence: 0 }
    }

    fn event(&mut self, name: &'static str, data: Value) -> SentEvent {
        let id = Some(self.ids.next());
        SentEvent { id, ..self.numbered(name, data) }
    }

    fn numbered(&mut self, name: &'static str, mut data: Value) -> SentEvent {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        SentEvent { id: None, name: Some(name), data: data.to_string() }
    }

    /// The response so far; the last item has the status `last`.
    fn response(&self, status: &str, last: &str) -> Value {
        let parts = self.blocks.parts();
        let item = |(at, part): (usize, &Part)| {
            let is_cut = at + 1 == parts.len() && !matches!(part, Part::Call(_));
            self.item(at, part, if is_cut { last } else { COMPLETED })
        };
        let output: Vec<Value> = parts.iter().enumerate().map(item).collect();
        let mut response = json!({
            "id": format!("resp_{:016x}", self.head.seed), "object": "response", "created_at": self.head.created,
            "status": status, "error": null, "incomplete_details": null, "model": self.head.model, "output": output,
            "usage": null,
        });
        for (name, value) in &*self.request {
            response[name] = value.clone();
        }
        response
    }

    fn ended(&self, ending: &Ending) -> Value {
        let status = status(ending);
        let mut response = self.response(status, status);
        if status == INCOMPLETE {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let (input, output) = (self.head.prompt_tokens, ending.tokens as usize);
        response["usage"] = json!({
            "input_tokens": input, "input_tokens_details": {"cached_tokens": ending.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output, "output_tokens_details": {"reasoning_tokens": ending.thought_tokens},
            "total_tokens": input + output,
        });
        response
    }

    fn item(&self, at: usize, part: &Part, status: &str) -> Value {
        match part {
            Part::Thoughts(text) => {
                self.text_item(at, TextKind::Thoughts, vec![self.content(at, TextKind::Thoughts, text)], status)
            }
            Part::Text(text) => {
                self.text_item(at, TextKind::Answer, vec![self.content(at, TextKind::Answer, text)], status)
            }
            Part::Call(call) => self.call(at, call, &call.arguments, status),
        }
    }

    fn text_item(&self, at: usize, kind: TextKind, content: Vec<Value>, status: &str) -> Value {
        let id = self.item_id(at, kind);
        match kind {
            TextKind::Thoughts => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": content, "status": status})
            }
            TextKind::Answer => {
                json!({"id": id, "type": "message", "role": "assistant", "content": content, "status": status})
            }
        }
    }

    fn call(&self, at: usize, call: &ToolCall, arguments: &str, status: &str) -> Value {
        json!({
            "id": self.call_item_id(at), "type": "function_call", "call_id": self.head.call_id(call.index),
            "name": call.name, "arguments": arguments, "status": status,
        })
    }

    fn item_id(&self, at: usize, kind: TextKind) -> String {
        let prefix = match kind {
            TextKind::Thoughts => "rs",
            TextKind::Answer => "msg",
        };
        format!("{prefix}_{:016x}_{at}", self.head.seed)
    }

    fn call_item_id(&self, at: usize) -> String {
        format!("fc_{:016x}_{at}", self.head.seed)
    }

    /// The events for a change of the blocks. A block that is closed now has this status.
    fn change(&mut self, change: BlockEvent, status: &str) -> Vec<SentEvent> {
        match change {
            BlockEvent::Opened { at, kind } => {
                let item = self.text_item(at, kind, Vec::new(), IN_PROGRESS);
                let part = self.place(at, kind, "part", self.content(at, kind, ""));
                vec![
                    self.event("response.output_item.added", json!({"output_index": at, "item": item})),
                    self.event("response.content_part.added", part),
                ]
            }
            BlockEvent::Grown { at, kind, text } => {
                let name = match kind {
                    TextKind::Thoughts => "response.reasoning_text.delta",
                    TextKind::Answer => "response.output_text.delta",
                };
                let mut data = self.place(at, kind, "delta", json!(text));
                let logprobs: Vec<Value> = std::mem::take(&mut self.logprobs).iter().map(spelled).collect();
                if kind == TextKind::Answer {
                    data["logprobs"] = json!(logprobs);
                    self.of_items.entry(at).or_default().extend(logprobs);
                }
                vec![self.event(name, data)]
            }
            BlockEvent::Closed { at, kind, text } => {
                let name = match kind {
                    TextKind::Thoughts => "response.reasoning_text.done",
                    TextKind::Answer => "response.output_text.done",
                };
                let part = self.content(at, kind, &text);
                let item = self.text_item(at, kind, vec![part.clone()], status);
                let mut whole = self.place(at, kind, "text", json!(text));
                if kind == TextKind::Answer {
                    whole["logprobs"] = part["logprobs"].clone();
                }
                let part = self.place(at, kind, "part", part);
                vec![
                    self.event(name, whole),
                    self.event("response.content_part.done", part),
                    self.event("response.output_item.done", json!({"output_index": at, "item": item})),
                ]
            }
            BlockEvent::Called { at, call } => {
                self.logprobs.clear();
                let (begun, done) =
                    (self.call(at, &call, "", IN_PROGRESS), self.call(at, &call, &call.arguments, COMPLETED));
                let place = |field: &str, value: &str| {
                    let mut data = json!({"item_id": self.call_item_id(at), "output_index": at});
                    data[field] = json!(value);
                    data
                };
                let (delta, mut whole) = (place("delta", &call.arguments), place("arguments", &call.arguments));
                whole["name"] = json!(call.name);
                vec![
                    self.event("response.output_item.added", json!({"output_index": at, "item": begun})),
                    self.event("response.function_call_arguments.delta", delta),
                    self.event("response.function_call_arguments.done", whole),
                    self.event("response.output_item.done", json!({"output_index": at, "item": done})),
                ]
            }
        }
    }

    /// The data of an event about the content of a text item.
    fn place(&self, at: usize, kind: TextKind, field: &str, value: Value) -> Value {
        let mut data = json!({"item_id": self.item_id(at, kind), "output_index": at, "content_index": 0});
        data[field] = value;
        data
    }

    /// The content of a text item.
    fn content(&self, at: usize, kind: TextKind, text: &str) -> Value {
        match kind {
            TextKind::Thoughts => json!({"type": "reasoning_text", "text": text}),
            TextKind::Answer => {
                let logprobs = self.of_items.get(&at).cloned().unwrap_or_default();
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
            }
        }
    }

    fn push(&mut self, parts: Vec<Part>) -> Vec<SentEvent> {
        let changes: Vec<BlockEvent> = parts.into_iter().flat_map(|part| self.blocks.push(part)).collect();
        changes.into_iter().flat_map(|change| self.change(change, COMPLETED)).collect()
    }
}

fn status(ending: &Ending) -> &'static str {
    match ending.finish {
        Finish::Stop | Finish::StopString(_) => COMPLETED,
        Finish::Length => INCOMPLETE,
    }
}

impl Writer for Items {
    fn logprobs(&mut self, logprobs: &SpelledLogprobs, is_thought: bool) {
        if !is_thought {
            self.logprobs.push(logprobs.clone());
        }
    }

    fn read(&mut self, parts: Vec<Part>) {
        self.push(parts);
    }

    fn whole(&mut self, parts: Vec<Part>, ending: &Ending) -> Value {
        self.read(parts);
        self.ended(ending)
    }

    fn begin(&mut self) -> Vec<SentEvent> {
        let response = self.response(IN_PROGRESS, IN_PROGRESS);
        vec![
            self.event("response.created", json!({"response": response})),
            self.event("response.in_progress", json!({"response": response})),
        ]
    }

    fn step(&mut self, tokens: u32, parts: Vec<Part>) -> Vec<SentEvent> {
        self.ids.after(tokens);
        self.push(parts)
    }

    fn end(&mut self, parts: Vec<Part>, ending: &Ending) -> Vec<SentEvent> {
        self.ids.after(ending.tokens.saturating_add(1));
        let mut events = self.push(parts);
        if let Some(closed) = self.blocks.close() {
            events.extend(self.change(closed, status(ending)));
        }
        let name = if status(ending) == COMPLETED { "response.completed" } else { "response.incomplete" };
        let response = self.ended(ending);
        events.push(self.event(name, json!({"response": response})));
        events
    }

    fn failed(&mut self, error: &ApiError) -> Vec<SentEvent> {
        let code = match error.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_exceeded",
            status if status.is_client_error() => "invalid_prompt",
            _ => "server_error",
        };
        let mut response = self.response("failed", INCOMPLETE);
        response["error"] = json!({"code": code, "message": error.message});
        vec![self.numbered("response.failed", json!({"response": response}))]
    }
}
