//! Chat templates: renders a conversation into the model's prompt format by running its own Jinja template with minijinja.
use std::collections::BTreeSet;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::tokenizer::{Tokenizer, TokenizerError};
use crate::weights::error::WeightsError;
use crate::weights::metadata::Metadata;

mod guard;

/// Fallback for models without a template: ChatML, the most common format. Whether such a model understands it is unknown, so
/// callers warn the user ([`ChatTemplate::is_fallback`]).
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
                      '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' \
                      }}{% endif %}";
/// Maximum bytes of a rendered prompt: the limit of the tokenizer.
const RENDERED_BYTES_MAX: usize = crate::tokenizer::TEXT_BYTES_MAX;

/// One message of a conversation. Templates see an empty list and `None` as undefined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`, or `tool` if the template has tools; templates may accept more.
    pub role: String,
    /// Message text.
    pub content: String,
    /// Tools that the assistant called: `{"id", "type": "function", "function": {"name", "arguments"}}` with the arguments as an
    /// object.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<serde_json::Value>,
    /// The call that a `tool` message answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the tool that answers, or of the speaker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the assistant thought before its answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

impl ChatMessage {
    /// A message of text.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }

    /// The message with each of its texts changed.
    fn map(&self, text: &mut dyn FnMut(&str) -> String) -> Self {
        Self {
            role: self.role.clone(),
            content: text(&self.content),
            tool_calls: self.tool_calls.iter().map(|call| map_value(call, text)).collect(),
            tool_call_id: self.tool_call_id.as_deref().map(&mut *text),
            name: self.name.as_deref().map(&mut *text),
            reasoning_content: self.reasoning_content.as_deref().map(&mut *text),
        }
    }
}

/// A JSON value with each of its strings changed, keys included.
fn map_value(value: &serde_json::Value, text: &mut dyn FnMut(&str) -> String) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::String(string) => Value::String(text(string)),
        Value::Array(list) => Value::Array(list.iter().map(|entry| map_value(entry, text)).collect()),
        Value::Object(object) => {
            Value::Object(object.iter().map(|(key, entry)| (text(key), map_value(entry, text))).collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// A validated template. Each rendering parses it again, because the engine's instructions borrow from the text; the first
/// token of a prompt takes a thousand times longer.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
    fallback: bool,
}

impl ChatTemplate {
    /// The template in `tokenizer.chat_template`, or ChatML if absent.
    ///
    /// # Errors
    /// [`ChatTemplateError`]: not valid Jinja, or metadata of the wrong type.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ChatTemplateError> {
        let source = metadata.text("tokenizer.chat_template")?.filter(|s| !s.is_empty());
        let token = |key: &str| -> Result<String, ChatTemplateError> {
            let id = metadata.unsigned(key)?;
            let tokens = metadata.texts("tokenizer.ggml.tokens")?;
            let text = id.zip(tokens).and_then(|(id, mut t)| t.nth(usize::try_from(id).ok()?));
            Ok(text.map(|t| String::from_utf8_lossy(t).into_owned()).unwrap_or_default())
        };
        let (bos, eos) = (token("tokenizer.ggml.bos_token_id")?, token("tokenizer.ggml.eos_token_id")?);
        Self::parse(source, bos, eos)
    }

    /// Validates a template; `None` selects ChatML. `bos` and `eos` are the texts of the beginning- and end-of-text tokens.
    ///
    /// # Errors
    /// [`ChatTemplateError::Syntax`].
    pub fn parse(source: Option<&str>, bos: String, eos: String) -> Result<Self, ChatTemplateError> {
        let fallback = source.is_none();
        let source = source.unwrap_or(CHATML).to_owned();
        guard::run(&source, None).map_err(|e| ChatTemplateError::Syntax(describe(&e)))?;
        Ok(Self { source, bos, eos, fallback })
    }

    /// Whether the model has no template of its own and ChatML is used.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        self.fallback
    }

    /// Whether the template shows the model its tools, or thoughts, or whatever else it calls by that name.
    #[must_use]
    pub fn mentions(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// Token ids of a conversation; `add_generation_prompt` opens the assistant's turn. `tools` are described as in OpenAI's API.
    /// Only the template can produce control tokens: a message or a tool that spells one (`<|im_end|>`) is encoded as text, so a
    /// user cannot end a turn or impersonate another role. To achieve this, the template sees such a text with a marker character
    /// inserted that occurs nowhere else.
    ///
    /// # Errors
    /// As [`Self::render`], or a text that cannot be encoded.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatTemplateError> {
        let Some(mark) = self.unused_mark(messages, tools) else { return Err(ChatTemplateError::NoMark) };
        let mut spelt = false;
        let mut marked = |text: &str| match tokenizer.mark_control(text, mark) {
            Some(marked) => {
                spelt = true;
                marked
            }
            None => text.to_owned(),
        };
        let messages: Vec<ChatMessage> = messages.iter().map(|message| message.map(&mut marked)).collect();
        let tools: Vec<serde_json::Value> = tools.iter().map(|tool| map_value(tool, &mut marked)).collect();
        let prompt = self.render(&messages, &tools, add_generation_prompt)?;
        Ok(if spelt { tokenizer.encode_marked_prompt(&prompt, mark)? } else { tokenizer.encode_prompt(&prompt)? })
    }

    /// A private-use character that occurs nowhere: trimming, case folding and JSON leave it as it is.
    fn unused_mark(&self, messages: &[ChatMessage], tools: &[serde_json::Value]) -> Option<char> {
        let is_private =
            |c: &char| matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..='\u{ffffd}' | '\u{100000}'..='\u{10fffd}');
        let mut used: BTreeSet<char> = self.source.chars().filter(is_private).collect();
        let mut collect = |text: &str| {
            used.extend(text.chars().filter(is_private));
            String::new()
        };
        messages.iter().for_each(|message| drop(message.map(&mut collect)));
        tools.iter().for_each(|tool| drop(map_value(tool, &mut collect)));
        let mut marks = ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}');
        marks.find(|mark| !used.contains(mark))
    }

    /// Renders the prompt of a conversation as text; `add_generation_prompt` opens the assistant's turn. Use [`Self::encode`]
    /// to get its tokens.
    ///
    /// # Errors
    /// [`ChatTemplateError::Render`]: the template rejected the conversation (for example two user turns in a row) or failed;
    /// [`ChatTemplateError::TooLong`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatTemplateError> {
        let messages = Value::from_serialize(messages);
        // Templates ask `if tools` or `tools is not none`.
        let tools = if tools.is_empty() { Value::from(()) } else { Value::from_serialize(tools) };
        let (bos_token, eos_token) = (&self.bos, &self.eos);
        let context = context! { messages, add_generation_prompt, bos_token, eos_token, tools };
        match guard::run(&self.source, Some(context)) {
            Ok(text) if text.len() > RENDERED_BYTES_MAX => Err(ChatTemplateError::TooLong),
            Ok(text) => Ok(text),
            Err(e) => Err(ChatTemplateError::Render(describe(&e))),
        }
    }
}

/// Formats an error and its causes on one line, truncated because a template may raise errors of any length.
fn describe(error: &Error) -> String {
    const CHARS_MAX: usize = 1000;
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// JSON spaced as Python's `json.dumps` does, which models saw in training; without HTML escaping.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    struct Python;
    impl serde_json::ser::Formatter for Python {
        fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W, first: bool) -> std::io::Result<()> {
            if first { Ok(()) } else { w.write_all(b", ") }
        }
        fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, w: &mut W, first: bool) -> std::io::Result<()> {
            if first { Ok(()) } else { w.write_all(b", ") }
        }
        fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
            w.write_all(b": ")
        }
    }
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        // Cap the indent: a larger one is an attack on memory.
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let pretty = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Python)),
    };
    let failed = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    written.map_err(|e| failed(e.to_string()))?;
    String::from_utf8(out).map(Value::from_safe_string).map_err(|e| failed(e.to_string()))
}

/// Formats a date (UTC) with the `strftime` directives that templates use.
fn strftime(format: &str, now: std::time::SystemTime) -> Result<String, Error> {
    // A clock before 1970 counts as 1970.
    let seconds = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = i64::try_from(seconds).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    let now =
        now.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "strftime_now: the clock is past the year 9999"))?;
    let (month, weekday) = (now.month().to_string(), now.weekday().to_string());
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        out += &match chars.next() {
            Some('Y') => format!("{:04}", now.year()),
            Some('y') => format!("{:02}", now.year() % 100),
            Some('m') => format!("{:02}", u8::from(now.month())),
            Some('d') => format!("{:02}", now.day()),
            Some('B') => month.clone(),
            Some('b') => month[..3].to_owned(),
            Some('A') => weekday.clone(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => format!("{:02}", now.hour()),
            Some('M') => format!("{:02}", now.minute()),
            Some('S') => format!("{:02}", now.second()),
            Some('%') => "%".to_owned(),
            other => {
                let what = format!("strftime_now: directive %{} is not supported", other.unwrap_or(' '));
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        };
    }
    Ok(out)
}

/// Why a prompt could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateError {
    /// Metadata of the wrong type.
    #[error("chat template: {0}")]
    Metadata(String),
    /// The model's template is not valid Jinja.
    #[error("the model's chat template cannot be parsed: {0}")]
    Syntax(String),
    /// The template rejected the conversation or failed.
    #[error("the model's chat template rejected these messages: {0}")]
    Render(String),
    /// The prompt cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// No unused marker character is left to escape control tokens in the messages.
    #[error("the messages contain every private-use Unicode character; remove some of them")]
    NoMark,
    /// The prompt is longer than the tokenizer's limit.
    #[error("the rendered prompt exceeds {RENDERED_BYTES_MAX} bytes; shorten the messages")]
    TooLong,
}

impl From<WeightsError> for ChatTemplateError {
    fn from(error: WeightsError) -> Self {
        Self::Metadata(error.to_string())
    }
}

#[cfg(test)]
mod tests;
