//! A chat request as a prompt in the model's own format, with the form that its answer must have and how to read it.
use super::engine::{Served, Text};
use super::error::ApiError;
use super::grammar;
use super::output::{Reading, Thoughts};
use super::request::MessageBody;
use super::tools::{self, Tools};
use kernels_models::chat_template::ChatMessage;
use serde_json::Value;

/// A conversation, ready to be generated.
pub(crate) struct Chat {
    /// The prompt.
    pub(crate) prompt: Vec<u32>,
    /// The grammar of the answer.
    pub(crate) grammar: Option<String>,
    /// How to read the answer.
    pub(crate) reading: Reading,
}

/// The form that a request requires of its answer.
#[derive(Debug, Default)]
pub(crate) struct Form {
    /// Tools that the model may call.
    pub(crate) tools: Option<Tools>,
    /// `response_format`.
    pub(crate) response: Option<Value>,
    /// A grammar of the client's own.
    pub(crate) grammar: Option<String>,
}

/// Prepares a conversation.
///
/// # Errors
/// The model's template rejects it, or the form cannot be a grammar.
pub(crate) fn chat(messages: Vec<MessageBody>, form: &Form, model: &Served) -> Result<Chat, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty: expected at least one message"));
    }
    let text = &*model.text;
    let mut messages =
        messages.into_iter().enumerate().map(|(at, message)| message.turn(at)).collect::<Result<Vec<_>, _>>()?;
    if !tools::are_native(text) {
        messages = tools::as_text(messages);
    }
    let shown = form.tools.as_ref().map(|tools| tools.show(text, &mut messages));
    let (format, described) = shown.map_or((None, Vec::new()), |(format, described)| (Some(format), described));
    let prompt = match text.chat(&messages, &described) {
        Some(Ok(prompt)) => prompt,
        Some(Err(error)) => {
            let message = format!("the model's chat template rejected the messages: {error}");
            return Err(ApiError::invalid("messages", message));
        }
        None => {
            let message = "this model has no chat template: send `prompt` to /v1/completions";
            return Err(ApiError::invalid("messages", message));
        }
    };
    let reading = Reading { thoughts: thoughts(&prompt, text), tools: format };
    let grammar = grammar_of(form, reading, text)?;
    Ok(Chat { prompt, grammar, reading })
}

/// The grammar of an answer with this form.
///
/// # Errors
/// A schema or grammar that is invalid, not supported or too complex. The error names the place.
pub(crate) fn grammar_of(form: &Form, reading: Reading, text: &dyn Text) -> Result<Option<String>, ApiError> {
    if let Some(grammar) = &form.grammar {
        if form.response.is_some() || form.tools.is_some() {
            let message = "`grammar` replaces `response_format` and `tools`: send one of them";
            return Err(ApiError::invalid("grammar", message));
        }
        let error = |reason| ApiError::invalid("grammar", format!("`grammar` is not a valid Lark grammar: {reason}"));
        return text.constrain(grammar).map(|_| Some(grammar.clone())).map_err(error);
    }
    let answer = grammar::rule(form.response.as_ref())?;
    let grammar = match (&form.tools, reading.tools) {
        (Some(tools), Some(format)) => tools.grammar(format, text, reading.thoughts, answer.as_deref()),
        _ => answer.as_deref().map(|answer| grammar::whole(reading.thoughts, answer, "")),
    };
    let Some(grammar) = grammar else { return Ok(None) };
    let Err(reason) = text.constrain(&grammar) else { return Ok(Some(grammar)) };
    let (place, reason) = form.tools.as_ref().and_then(|tools| tools.culprit(text)).unwrap_or_else(|| {
        match (&form.response, &form.tools) {
            (Some(_), _) => ("response_format".to_owned(), reason),
            (None, _) => ("tools".to_owned(), reason),
        }
    });
    Err(ApiError::invalid_at(place.clone(), format!("`{place}` cannot be enforced: {reason}")))
}

/// Whether the model thinks before it answers this prompt.
fn thoughts(prompt: &[u32], text: &dyn Text) -> Thoughts {
    if !text.template_mentions("<think>") {
        return Thoughts::Never;
    }
    // Some templates open the thoughts, as the last thing in the prompt.
    const TAIL_TOKENS: usize = 8;
    let tail = &prompt[prompt.len().saturating_sub(TAIL_TOKENS)..];
    let bytes: Vec<u8> = tail.iter().flat_map(|token| text.spelled(*token)).collect();
    let ends_open = String::from_utf8_lossy(&bytes).trim_end().ends_with("<think>");
    if ends_open { Thoughts::Opened } else { Thoughts::Possible }
}

impl MessageBody {
    /// The message as templates take it. `at`: its number in the conversation.
    fn turn(self, at: usize) -> Result<ChatMessage, ApiError> {
        let place = |field: &str| format!("messages[{at}].{field}");
        let role = match self.role.as_str() {
            "developer" => "system".to_owned(), // OpenAI's newer name
            "function" => "tool".to_owned(),    // and its older one
            "system" | "user" | "assistant" | "tool" => self.role,
            other => {
                let message =
                    format!("the role `{other}` is not supported: expected system, developer, user, assistant or tool");
                return Err(ApiError::invalid_at(place("role"), message));
            }
        };
        let calls = self.tool_calls.unwrap_or_default();
        if !calls.is_empty() && role != "assistant" {
            let message = "only a message of the assistant can have `tool_calls`";
            return Err(ApiError::invalid_at(place("tool_calls"), message));
        }
        let tool_calls = calls
            .into_iter()
            .map(|call| serde_json::from_value::<tools::CallBody>(call).map(tools::CallBody::for_template))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| ApiError::invalid_at(place("tool_calls"), format!("a call is malformed: {error}")))?;
        let content = self.content.map(super::request::Content::text).transpose()?.unwrap_or_default();
        let (tool_call_id, name, reasoning_content) = (self.tool_call_id, self.name, self.reasoning_content);
        Ok(ChatMessage { role, content, tool_calls, tool_call_id, name, reasoning_content })
    }
}
