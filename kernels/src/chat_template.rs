//! A conversation as the one string that a model was trained on: its own Jinja template, run by minijinja.
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};

use crate::weights::{Metadata, WeightsError};

/// Used for models without a template: ChatML, the most common format. What such a model makes of it is not known, so
/// callers tell their user ([`ChatTemplate::is_fallback`]).
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
                      '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' \
                      }}{% endif %}";
/// Steps of a template: a conversation of a hundred thousand messages, but no endless loop.
const FUEL: u64 = 50_000_000;
/// Bytes of a rendered prompt; what the tokenizer takes at once.
const RENDERED_BYTES_MAX: usize = crate::tokenizer::TEXT_BYTES_MAX;

/// One turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`; templates may know more.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// A parsed template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    fallback: bool,
}

impl ChatTemplate {
    /// The template in `tokenizer.chat_template`, ChatML where there is none.
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

    /// A template with the texts of its beginning- and end-of-text tokens; `None` is ChatML.
    ///
    /// # Errors
    /// [`ChatTemplateError::Syntax`].
    pub fn parse(source: Option<&str>, bos: String, eos: String) -> Result<Self, ChatTemplateError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", to_json);
        environment.add_function("strftime_now", |format: String| strftime(&format, std::time::SystemTime::now()));
        environment
            .add_template_owned("chat", source.unwrap_or(CHATML).to_owned())
            .map_err(|e| ChatTemplateError::Syntax(describe(&e)))?;
        Ok(Self { environment, bos, eos, fallback: source.is_none() })
    }

    /// The model has no template of its own: this is ChatML.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        self.fallback
    }

    /// The prompt of a conversation; `add_generation_prompt` opens the assistant's turn. To be encoded with control
    /// tokens parsed.
    ///
    /// # Errors
    /// [`ChatTemplateError::Render`]: the template refused the conversation (such as two user turns in a row) or failed;
    /// [`ChatTemplateError::TooLong`].
    pub fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, ChatTemplateError> {
        let failed = |e: Error| ChatTemplateError::Render(describe(&e));
        let template = self.environment.get_template("chat").map_err(failed)?;
        let messages = Value::from_serialize(messages);
        let (bos_token, eos_token) = (&self.bos, &self.eos);
        let mut out = Bounded(Vec::new());
        let result = template.render_captured_to(
            context! { messages, add_generation_prompt, bos_token, eos_token, tools => Value::from(()) },
            &mut out,
        );
        match result {
            Ok(_) => String::from_utf8(out.0).map_err(|e| ChatTemplateError::Render(e.to_string())),
            Err(_) if out.0.len() >= RENDERED_BYTES_MAX => Err(ChatTemplateError::TooLong),
            Err(e) => Err(failed(e)),
        }
    }
}

/// Takes bytes up to the bound, then fails the rendering.
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let room = RENDERED_BYTES_MAX - self.0.len();
        self.0.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if bytes.len() > room { Err(std::io::ErrorKind::WriteZero.into()) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The error with its causes on one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// JSON as Python's `json.dumps` spaces it, which is what models saw in training; nothing is escaped for HTML.
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
        // Wider than any template asks for is an attack on memory.
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

/// The current date (UTC) in the directives that templates use.
fn strftime(format: &str, now: std::time::SystemTime) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    // A clock before 1970 reads as 1970.
    let seconds = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        out += &match chars.next() {
            Some('Y') => format!("{year:04}"),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => format!("{:02}", second / 3600),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('%') => "%".to_owned(),
            other => {
                let what = format!("strftime_now: directive %{} is not supported", other.unwrap_or(' '));
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        };
    }
    Ok(out)
}

/// Year, month and day of a day counted from 1970-01-01 (the Gregorian calendar in eras of 400 years that begin in March).
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateError {
    /// The metadata is of the wrong type.
    #[error("chat template: {0}")]
    Metadata(String),
    /// The model's template is not valid Jinja.
    #[error("the model's chat template cannot be parsed: {0}")]
    Syntax(String),
    /// The template refused the conversation or failed.
    #[error("the model's chat template does not take these messages: {0}")]
    Render(String),
    /// A longer prompt than is encoded at once.
    #[error("the rendered prompt exceeds {RENDERED_BYTES_MAX} bytes")]
    TooLong,
}

impl From<WeightsError> for ChatTemplateError {
    fn from(error: WeightsError) -> Self {
        Self::Metadata(error.to_string())
    }
}

#[cfg(test)]
mod tests;
