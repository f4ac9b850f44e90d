//! Request bodies of Anthropic's Messages API, translated into a chat request. What cannot be translated is rejected with its
//! place.
use super::error::ApiError;
use super::fields::Field;
use super::request::{Body, Settings, Stop};
use super::turns::{Turns, string, texts, unsupported};
use serde::Deserialize;
use serde_json::{Value, json};

/// Fields of [`MessagesBody`] in a request to `/v1/messages`.
pub(crate) const MESSAGES: &[Field] = &[
    MODEL,
    CONVERSATION,
    Field::count("max_tokens").required().about("Most tokens of the answer"),
    SYSTEM,
    Field::bool("stream").about("Answer with server-sent events"),
    Field::texts("stop_sequences").about("Texts that end the answer, at most 16"),
    Field::number("temperature").about("0 to 2"),
    Field::number("top_p").about("Above 0 to 1"),
    Field::signed("top_k").about("0 or -1: off"),
    TOOLS,
    CHOICE,
    CONFIG,
];

/// Fields of [`MessagesBody`] in a request to `/v1/messages/count_tokens`.
pub(crate) const COUNT_TOKENS: &[Field] = &[MODEL, CONVERSATION, SYSTEM, TOOLS, CHOICE, CONFIG];

const MODEL: Field = Field::text("model").required().about("Name of the model");
const CONVERSATION: Field = Field::objects("messages").required().about("The conversation, ending with the user");
const SYSTEM: Field = Field::text_or_objects("system").about("The system prompt: a text, or blocks of text");
const TOOLS: Field = Field::objects("tools").about("Tools with `name`, `description` and `input_schema`, at most 128");
const CHOICE: Field = Field::object("tool_choice").about("Type `auto`, `any`, `tool` or `none`");
const CONFIG: Field = Field::object("output_config").about("`format`: a JSON schema for the answer");

/// The body of `/v1/messages`. Other fields (`metadata`, `thinking`, `service_tier`, …) do not change the answer and are
/// ignored.
#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct MessagesBody {
    model: Option<String>,
    messages: Vec<Value>,
    max_tokens: Option<u32>,
    system: Option<Value>,
    stream: Option<bool>,
    stop_sequences: Option<Stop>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    output_config: Option<Value>,
}

impl MessagesBody {
    /// The chat request that means the same.
    ///
    /// # Errors
    /// Content that is malformed or not supported.
    pub(crate) fn chat_body(self) -> Result<Body, ApiError> {
        let mut turns = Turns::default();
        if let Some(system) = self.system.filter(|system| !system.is_null()) {
            texts(&system, "system", &["text"])?.into_iter().for_each(|text| turns.text("system", text));
        }
        for (at, one) in self.messages.iter().enumerate() {
            message(&mut turns, one, &format!("messages[{at}]"))?;
        }
        if turns.ends_with_the_assistant() {
            return Err(ApiError::invalid(
                "messages",
                "the last message is the assistant's, but an answer cannot be continued: end with a message of the user",
            ));
        }
        let tools = self.tools.map(|tools| tools.iter().enumerate().map(|(at, one)| tool(one, at)).collect());
        let (tool_choice, parallel_tool_calls) = choice(self.tool_choice.as_ref())?;
        let settings = Settings {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            stop: self.stop_sequences,
            ..Settings::default()
        };
        Ok(Body {
            model: self.model,
            messages: Some(turns.messages()),
            stream: self.stream,
            settings,
            tools: tools.transpose()?,
            tool_choice,
            parallel_tool_calls,
            response_format: response_format(self.output_config.as_ref())?,
            ..Body::default()
        })
    }
}

/// An error of the chat request in the names of this API.
pub(crate) fn in_its_words(error: ApiError) -> ApiError {
    error.renamed(&[
        ("stop[", "stop_sequences["),
        ("`stop`", "`stop_sequences`"),
        (".function.parameters", ".input_schema"),
        (".function.name", ".name"),
        ("response_format", "output_config.format"),
    ])
}

/// Adds a message to the conversation.
fn message(turns: &mut Turns, message: &Value, place: &str) -> Result<(), ApiError> {
    let (content, place_of) = (&message["content"], format!("{place}.content"));
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        Some(_) | None => {
            return Err(ApiError::invalid_at(
                format!("{place}.role"),
                format!("`{place}.role` is {}, expected \"user\" or \"assistant\"", message["role"]),
            ));
        }
    };
    let Some(blocks) = content.as_array().filter(|_| role != "system") else {
        texts(content, &place_of, &["text"])?.into_iter().for_each(|text| turns.text(role, text));
        return Ok(());
    };
    for (at, block) in blocks.iter().enumerate() {
        let place = format!("{place_of}[{at}]");
        if role == "user" { user(turns, block, &place)? } else { assistant(turns, block, &place)? }
    }
    Ok(())
}

fn user(turns: &mut Turns, block: &Value, place: &str) -> Result<(), ApiError> {
    match block["type"].as_str() {
        Some("text") => turns.text("user", string(block, "text", place)?.to_owned()),
        Some("tool_result") => {
            let id = string(block, "tool_use_id", place)?;
            let content = block.get("content").filter(|content| !content.is_null());
            let content = content.map(|content| texts(content, &format!("{place}.content"), &["text"])).transpose()?;
            let content = content.unwrap_or_default().join("\n");
            let failed = block["is_error"] == Value::Bool(true);
            turns.result(id, if failed { format!("Error: {content}") } else { content });
        }
        Some(_) | None => return Err(unsupported(block, place, &["text", "tool_result"])),
    }
    Ok(())
}

fn assistant(turns: &mut Turns, block: &Value, place: &str) -> Result<(), ApiError> {
    match block["type"].as_str() {
        Some("text") => turns.text("assistant", string(block, "text", place)?.to_owned()),
        Some("thinking") => turns.thoughts(string(block, "thinking", place)?),
        Some("tool_use") => {
            let (id, name) = (string(block, "id", place)?, string(block, "name", place)?);
            if !block["input"].is_object() {
                let place = format!("{place}.input");
                return Err(ApiError::invalid_at(place.clone(), format!("`{place}` must be an object")));
            }
            turns.call(id, name, &block["input"]);
        }
        Some(_) | None => return Err(unsupported(block, place, &["text", "thinking", "tool_use"])),
    }
    Ok(())
}

/// A tool as the chat request describes it.
fn tool(tool: &Value, at: usize) -> Result<Value, ApiError> {
    let place = format!("tools[{at}]");
    match tool["type"].as_str() {
        None | Some("custom") => {}
        Some(kind) => {
            let message = format!(
                "`{place}`: the tool `{kind}` runs on Anthropic's servers: expected a tool with `name` and `input_schema`"
            );
            return Err(ApiError::unsupported_at(format!("{place}.type"), message));
        }
    }
    if !tool["input_schema"].is_object() {
        let place = format!("{place}.input_schema");
        return Err(ApiError::invalid_at(
            place.clone(),
            format!("`{place}` must be a JSON schema, which is an object"),
        ));
    }
    let mut function = json!({"name": tool["name"], "parameters": tool["input_schema"]});
    if let Some(description) = tool["description"].as_str() {
        function["description"] = json!(description);
    }
    Ok(json!({"type": "function", "function": function}))
}

/// The choice of tools as the chat request has it, and whether several calls are allowed.
fn choice(choice: Option<&Value>) -> Result<(Option<Value>, Option<bool>), ApiError> {
    let Some(choice) = choice.filter(|choice| !choice.is_null()) else { return Ok((None, None)) };
    let chosen = match choice["type"].as_str() {
        Some("auto") => json!("auto"),
        Some("any") => json!("required"),
        Some("none") => json!("none"),
        Some("tool") => {
            let name = string(choice, "name", "tool_choice")?;
            json!({"type": "function", "function": {"name": name}})
        }
        Some(_) | None => {
            return Err(ApiError::invalid_at(
                "tool_choice.type".into(),
                format!("`tool_choice.type` is {}, expected \"auto\", \"any\", \"tool\" or \"none\"", choice["type"]),
            ));
        }
    };
    let parallel = match &choice["disable_parallel_tool_use"] {
        Value::Null => None,
        Value::Bool(disabled) => Some(!disabled),
        Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            let place = "tool_choice.disable_parallel_tool_use";
            return Err(ApiError::invalid(place, format!("`{place}` must be true or false")));
        }
    };
    Ok((Some(chosen), parallel))
}

/// The form of the answer as the chat request has it.
fn response_format(config: Option<&Value>) -> Result<Option<Value>, ApiError> {
    let format = config.map_or(&Value::Null, |config| &config["format"]);
    match (format, format["type"].as_str()) {
        (Value::Null, _) => Ok(None),
        (format, Some("json_schema")) if format["schema"].is_object() => {
            Ok(Some(json!({"type": "json_schema", "json_schema": {"schema": format["schema"]}})))
        }
        (_, Some("json_schema")) => {
            let place = "output_config.format.schema";
            Err(ApiError::invalid(place, format!("`{place}` must be a JSON schema, which is an object")))
        }
        (_, _) => {
            let place = "output_config.format.type";
            Err(ApiError::invalid(place, format!("`{place}` is {}, expected \"json_schema\"", format["type"])))
        }
    }
}
