//! Answers of Anthropic's `/v1/messages`: blocks of thoughts, text and tool calls.
use super::super::blocks::{BlockEvent, Blocks, TextKind};
use super::super::error::ApiError;
use super::super::events::{Ending, EventIds, Head, SentEvent, Writer};
use super::super::generation::Finish;
use super::super::output::{Part, ToolCall};
use serde_json::{Map, Value, json};

/// Writes an answer as content blocks.
pub(super) struct Message {
    head: Head,
    blocks: Blocks,
    ids: EventIds,
}

impl Message {
    pub(super) fn new(head: Head) -> Self {
        Self { head, blocks: Blocks::default(), ids: EventIds::default() }
    }

    fn event(&mut self, name: &'static str, mut data: Value) -> SentEvent {
        data["type"] = json!(name);
        SentEvent { id: Some(self.ids.next()), name: Some(name), data: data.to_string() }
    }

    fn message(&self, content: Vec<Value>, reason: [Option<&str>; 2], usage: Value) -> Value {
        let [stop_reason, stop_sequence] = reason;
        json!({
            "id": format!("msg_{:016x}", self.head.seed), "type": "message", "role": "assistant", "model": self.head.model,
            "content": content, "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage,
        })
    }

    /// Cached tokens of the prompt are counted apart from the others.
    fn usage(&self, tokens: u32, cached_tokens: u32) -> Value {
        let input_tokens = self.head.prompt_tokens.saturating_sub(cached_tokens as usize);
        json!({
            "input_tokens": input_tokens, "output_tokens": tokens,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached_tokens,
        })
    }

    /// The reason and the stop sequence. An answer with calls waits for their results.
    fn reason<'a>(&self, ending: &'a Ending) -> [Option<&'a str>; 2] {
        let called = self.blocks.parts().iter().any(|part| matches!(part, Part::Call(_)));
        match &ending.finish {
            Finish::Length => [Some("max_tokens"), None],
            Finish::Stop | Finish::StopString(_) if called => [Some("tool_use"), None],
            Finish::StopString(stop) => [Some("stop_sequence"), Some(stop)],
            Finish::Stop => [Some("end_turn"), None],
        }
    }

    fn push(&mut self, parts: Vec<Part>) -> Vec<SentEvent> {
        let changes: Vec<BlockEvent> = parts.into_iter().flat_map(|part| self.blocks.push(part)).collect();
        changes.into_iter().flat_map(|change| self.change(change)).collect()
    }

    fn change(&mut self, change: BlockEvent) -> Vec<SentEvent> {
        match change {
            BlockEvent::Opened { at, kind } => {
                let block = match kind {
                    TextKind::Thoughts => json!({"type": "thinking", "thinking": "", "signature": ""}),
                    TextKind::Answer => json!({"type": "text", "text": ""}),
                };
                vec![self.event("content_block_start", json!({"index": at, "content_block": block}))]
            }
            BlockEvent::Grown { at, kind, text } => {
                let delta = match kind {
                    TextKind::Thoughts => json!({"type": "thinking_delta", "thinking": text}),
                    TextKind::Answer => json!({"type": "text_delta", "text": text}),
                };
                vec![self.event("content_block_delta", json!({"index": at, "delta": delta}))]
            }
            BlockEvent::Closed { at, .. } => vec![self.event("content_block_stop", json!({"index": at}))],
            BlockEvent::Called { at, call } => {
                let input = Value::Object(input(&call)).to_string();
                let block = self.call(&call, Map::new());
                let delta = json!({"type": "input_json_delta", "partial_json": input});
                vec![
                    self.event("content_block_start", json!({"index": at, "content_block": block})),
                    self.event("content_block_delta", json!({"index": at, "delta": delta})),
                    self.event("content_block_stop", json!({"index": at})),
                ]
            }
        }
    }

    fn call(&self, call: &ToolCall, input: Map<String, Value>) -> Value {
        json!({"type": "tool_use", "id": self.head.call_id(call.index), "name": call.name, "input": input})
    }
}

/// The arguments of a call as an object. Without a grammar a model may write something else.
fn input(call: &ToolCall) -> Map<String, Value> {
    match serde_json::from_str(&call.arguments) {
        Ok(Value::Object(input)) => input,
        Ok(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) | Err(_) => {
            Map::from_iter([("arguments".to_owned(), json!(call.arguments))])
        }
    }
}

impl Writer for Message {
    fn read(&mut self, parts: Vec<Part>) {
        for part in parts {
            self.blocks.push(part);
        }
    }

    fn whole(&mut self, parts: Vec<Part>, ending: &Ending) -> Value {
        self.read(parts);
        let block = |part: &Part| match part {
            Part::Thoughts(text) => json!({"type": "thinking", "thinking": text.trim(), "signature": ""}),
            Part::Text(text) => json!({"type": "text", "text": text}),
            Part::Call(call) => self.call(call, input(call)),
        };
        let content = self.blocks.parts().iter().map(block).collect();
        self.message(content, self.reason(ending), self.usage(ending.tokens, ending.cached_tokens))
    }

    fn begin(&mut self) -> Vec<SentEvent> {
        let message = self.message(Vec::new(), [None, None], self.usage(0, 0));
        vec![self.event("message_start", json!({"message": message}))]
    }

    fn step(&mut self, tokens: u32, parts: Vec<Part>) -> Vec<SentEvent> {
        self.ids.after(tokens);
        self.push(parts)
    }

    fn end(&mut self, parts: Vec<Part>, ending: &Ending) -> Vec<SentEvent> {
        self.ids.after(ending.tokens.saturating_add(1));
        let mut events = self.push(parts);
        if let Some(closed) = self.blocks.close() {
            events.extend(self.change(closed));
        }
        let [stop_reason, stop_sequence] = self.reason(ending);
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let usage = self.usage(ending.tokens, ending.cached_tokens);
        events.push(self.event("message_delta", json!({"delta": delta, "usage": usage})));
        events.push(self.event("message_stop", json!({})));
        events
    }

    fn failed(&mut self, error: &ApiError) -> Vec<SentEvent> {
        vec![SentEvent { id: None, name: Some("error"), data: error.anthropic_body().to_string() }]
    }
}
