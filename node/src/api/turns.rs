//! Conversations of other APIs as the messages of a chat request: what follows each other in one role becomes one message, as
//! chat templates require it.
use super::error::ApiError;
use super::request::{Content, MessageBody};
use serde_json::{Value, json};

/// A conversation so far.
#[derive(Default)]
pub(super) struct Turns(Vec<MessageBody>);

impl Turns {
    /// Adds text.
    pub(super) fn text(&mut self, role: &str, text: String) {
        join(&mut self.turn(role).content, text);
    }

    /// Adds thoughts of the assistant.
    pub(super) fn thoughts(&mut self, text: &str) {
        let turn = self.turn("assistant");
        match &mut turn.reasoning_content {
            Some(before) => *before = format!("{before}\n{text}"),
            None => turn.reasoning_content = Some(text.to_owned()),
        }
    }

    /// Adds a call of the assistant. `arguments`: an object, or its text.
    pub(super) fn call(&mut self, id: &str, name: &str, arguments: &Value) {
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        self.turn("assistant").tool_calls.get_or_insert_default().push(call);
    }

    /// Adds the result of a call.
    pub(super) fn result(&mut self, id: &str, text: String) {
        let (content, tool_call_id) = (Some(Content::Text(text)), Some(id.to_owned()));
        self.0.push(MessageBody { role: "tool".into(), content, tool_call_id, ..MessageBody::default() });
    }

    /// Whether the last message is the assistant's.
    pub(super) fn ends_with_the_assistant(&self) -> bool {
        self.0.last().is_some_and(|last| last.role == "assistant")
    }

    /// The messages.
    pub(super) fn messages(self) -> Vec<MessageBody> {
        self.0
    }

    /// The last message if it has this role, or else a new one.
    fn turn(&mut self, role: &str) -> &mut MessageBody {
        if self.0.last().is_none_or(|last| last.role != role) {
            self.0.push(MessageBody { role: role.to_owned(), ..MessageBody::default() });
        }
        let last = self.0.len() - 1;
        &mut self.0[last]
    }
}

fn join(content: &mut Option<Content>, text: String) {
    match content {
        Some(Content::Text(before)) => *before = format!("{before}\n{text}"),
        Some(Content::Parts(_)) | None => *content = Some(Content::Text(text)),
    }
}

/// The texts of a content, which is a string or an array of parts, each with a type of `kinds` and its `text`.
///
/// # Errors
/// The content is something else, or has other parts; the place.
pub(super) fn texts(content: &Value, place: &str, kinds: &[&str]) -> Result<Vec<String>, ApiError> {
    match content {
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(parts) => {
            let part = |(at, part): (usize, &Value)| {
                let place = format!("{place}[{at}]");
                match part["type"].as_str() {
                    Some(kind) if kinds.contains(&kind) => string(part, "text", &place).map(str::to_owned),
                    Some(_) | None => Err(unsupported(part, &place, kinds)),
                }
            };
            parts.iter().enumerate().map(part).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            let message = format!("`{place}` must be a string or an array of objects with `type`");
            Err(ApiError::invalid_at(place.to_owned(), message))
        }
    }
}

/// A field that must be a string.
///
/// # Errors
/// It is not; its place.
pub(super) fn string<'a>(object: &'a Value, field: &str, place: &str) -> Result<&'a str, ApiError> {
    let place = if place.is_empty() { field.to_owned() } else { format!("{place}.{field}") };
    let wrong = || ApiError::invalid_at(place.clone(), format!("`{place}` must be a string"));
    object[field].as_str().ok_or_else(wrong)
}

/// The error for an object whose `type` is none of `kinds`.
pub(super) fn unsupported(object: &Value, place: &str, kinds: &[&str]) -> ApiError {
    let expected = kinds.iter().map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(", ");
    let message = match object["type"].as_str() {
        Some(kind) => format!("`{place}`: the type `{kind}` is not supported here: expected {expected}"),
        None => format!("`{place}.type` must be a string: expected {expected}"),
    };
    ApiError::unsupported_at(place.to_owned(), message)
}
