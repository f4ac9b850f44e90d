//! Chat templates: renders a conversation into the model's prompt format by running its own Jinja template with minijinja.
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

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`; templates may accept more.
    pub role: String,
    /// Message text.
    pub content: String,
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

    /// Token ids of a conversation; `add_generation_prompt` opens the assistant's turn. Only the template can produce control
    /// tokens: a message that spells one (`<|im_end|>`) is encoded as text, so a user cannot end a turn or impersonate another
    /// role. To achieve this, the template sees such a message with a marker character inserted that occurs nowhere else.
    ///
    /// # Errors
    /// As [`Self::render`], or a text that cannot be encoded.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatTemplateError> {
        let used = |mark: &char| self.source.contains(*mark) || messages.iter().any(|m| m.content.contains(*mark));
        // Private-use characters are unaffected by trimming, case folding and JSON.
        let mut marks = ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}');
        let Some(mark) = marks.find(|mark| !used(mark)) else { return Err(ChatTemplateError::NoMark) };
        let mut spelt = false;
        let marked = messages.iter().map(|message| match tokenizer.mark_control(&message.content, mark) {
            Some(content) => {
                spelt = true;
                ChatMessage { role: message.role.clone(), content }
            }
            None => message.clone(),
        });
        let prompt = self.render(&marked.collect::<Vec<_>>(), add_generation_prompt)?;
        Ok(if spelt { tokenizer.encode_marked_prompt(&prompt, mark)? } else { tokenizer.encode_prompt(&prompt)? })
    }

    /// Renders the prompt of a conversation as text; `add_generation_prompt` opens the assistant's turn. Use [`Self::encode`]
    /// to get its tokens.
    ///
    /// # Errors
    /// [`ChatTemplateError::Render`]: the template rejected the conversation (for example two user turns in a row) or failed;
    /// [`ChatTemplateError::TooLong`].
    pub fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, ChatTemplateError> {
        let messages = Value::from_serialize(messages);
        let (bos_token, eos_token) = (&self.bos, &self.eos);
        let context = context! { messages, add_generation_prompt, bos_token, eos_token, tools => Value::from(()) };
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
