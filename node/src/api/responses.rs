//! Request bodies of OpenAI's Responses API, translated into a chat request. What cannot be translated is rejected with its
//! place.
use super::error::ApiError;
use super::fields::Field;
use super::request::{Body, Settings};
use super::turns::{Turns, string, texts, unsupported};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Fields of [`ResponsesBody`].
pub(crate) const RESPONSES: &[Field] = &[
    Field::text("model").required().about("Name of the model"),
    Field::text_or_objects("input").required().about("A text, or the items of the conversation"),
    Field::text("instructions").about("The system prompt"),
    Field::bool("stream").about("Answer with server-sent events"),
    Field::count("max_output_tokens").about("Most tokens of the answer"),
    Field::number("temperature").about("0 to 2"),
    Field::number("top_p").about("Above 0 to 1"),
    Field::objects("tools").about("Tools of type `function`, at most 128"),
    Field::any("tool_choice").about("`none`, `auto`, `required`, or a function"),
    Field::bool("parallel_tool_calls").about("Whether an answer may have several calls"),
    Field::object("text").about("`format`: form of the answer, `text`, `json_object` or `json_schema`"),
    Field::object("reasoning").about("Repeated in the answer, without effect"),
    Field::object("metadata").about("Repeated in the answer"),
    Field::bool("store").about("Nothing is stored"),
    Field::text("previous_response_id").about("Not supported: send the items again"),
    Field::any("conversation").about("Not supported: send the items again"),
    Field::bool("background").about("Only false"),
    Field::object("prompt").about("Not supported: send `instructions` and `input`"),
    Field::texts("include").about("`message.output_text.logprobs`: log-probabilities; others have no effect"),
    Field::long("top_logprobs").about("Most likely tokens with their log-probabilities, 0 to 20"),
];

/// The body of `/v1/responses`. Other fields (`user`, `truncation`, …) do not change the answer and are ignored.
#[cfg_attr(test, derive(serde::Serialize))]
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ResponsesBody {
    model: Option<String>,
    input: Value,
    instructions: Option<String>,
    stream: Option<bool>,
    max_output_tokens: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<Value>,
    reasoning: Option<Value>,
    metadata: Option<Value>,
    store: Option<bool>,
    previous_response_id: Option<String>,
    conversation: Option<Value>,
    background: Option<bool>,
    prompt: Option<Value>,
    include: Option<Vec<String>>,
    top_logprobs: Option<u64>,
}

impl ResponsesBody {
    /// The fields that an answer repeats.
    pub(crate) fn repeated(&self) -> Map<String, Value> {
        let mut text = self.text.as_ref().and_then(Value::as_object).cloned().unwrap_or_default();
        if text.get("format").is_none_or(Value::is_null) {
            text.insert("format".into(), json!({"type": "text"}));
        }
        let repeated = json!({
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata.clone().unwrap_or_else(|| json!({})),
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "reasoning": self.reasoning.clone().unwrap_or_else(|| json!({"effort": null, "summary": null})),
            "temperature": self.temperature.unwrap_or(1.0), "top_p": self.top_p.unwrap_or(1.0), "text": text,
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            "tools": self.tools.clone().unwrap_or_default(), "truncation": "disabled",
            // Nothing is stored, whatever `store` says.
            "store": false, "background": false, "previous_response_id": null,
            "top_logprobs": self.top_logprobs.unwrap_or(0),
        });
        match repeated {
            Value::Object(fields) => fields,
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => Map::new(),
        }
    }

    /// The chat request that means the same.
    ///
    /// # Errors
    /// Items that are malformed or not supported.
    pub(crate) fn chat_body(self) -> Result<Body, ApiError> {
        self.check_supported()?;
        let mut turns = Turns::default();
        if let Some(instructions) = self.instructions.filter(|text| !text.is_empty()) {
            turns.text("system", instructions);
        }
        if let Some(items) = self.input.as_array() {
            for (at, one) in items.iter().enumerate() {
                item(&mut turns, one, &format!("input[{at}]"))?;
            }
        } else {
            turns.text("user", self.input.as_str().unwrap_or_default().to_owned());
        }
        let tools = self.tools.map(|tools| tools.iter().enumerate().map(|(at, one)| tool(one, at)).collect());
        let includes = self.include.unwrap_or_default();
        let asks_logprobs = includes.iter().any(|name| name == "message.output_text.logprobs")
            || self.top_logprobs.is_some_and(|n| n > 0);
        let settings = Settings {
            max_tokens: self.max_output_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            ..Settings::default()
        };
        Ok(Body {
            model: self.model,
            messages: Some(turns.messages()),
            stream: self.stream,
            settings,
            tools: tools.transpose()?,
            tool_choice: choice(self.tool_choice)?,
            parallel_tool_calls: self.parallel_tool_calls,
            response_format: response_format(self.text.as_ref())?,
            logprobs: asks_logprobs.then_some(Value::Bool(true)),
            top_logprobs: self.top_logprobs,
            ..Body::default()
        })
    }

    fn check_supported(&self) -> Result<(), ApiError> {
        let some = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
        let stored = "nothing is stored: send the items of the conversation again in `input`";
        let refused = [
            (self.previous_response_id.is_some(), "previous_response_id", stored),
            (some(&self.conversation), "conversation", stored),
            (self.background == Some(true), "background", "nothing is stored: send `stream` instead"),
            (some(&self.prompt), "prompt", "no prompts are stored: send `instructions` and `input`"),
        ];
        match refused.iter().find(|(wrong, _, _)| *wrong) {
            Some((_, param, message)) => Err(ApiError::unsupported(param, format!("`{param}`: {message}"))),
            None => Ok(()),
        }
    }
}

/// An error of the chat request in the names of this API.
pub(crate) fn in_its_words(error: ApiError) -> ApiError {
    error.renamed(&[
        (".function.parameters", ".parameters"),
        (".function.name", ".name"),
        ("response_format", "text.format"),
        ("`max_tokens`", "`max_output_tokens`"),
        ("`messages`", "`input`"),
    ])
}

/// Adds an item to the conversation.
fn item(turns: &mut Turns, item: &Value, place: &str) -> Result<(), ApiError> {
    const KINDS: [&str; 4] = ["message", "function_call", "function_call_output", "reasoning"];
    match item["type"].as_str() {
        Some("message") => message(turns, item, place),
        None if item["type"].is_null() && item["role"].is_string() => message(turns, item, place),
        Some("function_call") => {
            let (id, name) = (string(item, "call_id", place)?, string(item, "name", place)?);
            string(item, "arguments", place)?;
            turns.call(id, name, &item["arguments"]);
            Ok(())
        }
        Some("function_call_output") => {
            let id = string(item, "call_id", place)?;
            let output = texts(&item["output"], &format!("{place}.output"), &["input_text"])?;
            turns.result(id, output.join("\n"));
            Ok(())
        }
        Some("reasoning") => {
            let field = if item["content"].is_array() { "content" } else { "summary" };
            if item[field].is_array() {
                let kinds = ["reasoning_text", "summary_text"];
                let thoughts = texts(&item[field], &format!("{place}.{field}"), &kinds)?;
                thoughts.iter().for_each(|text| turns.thoughts(text));
            }
            Ok(())
        }
        Some("item_reference") => {
            let message = format!("`{place}` refers to an item, but nothing is stored: send the item itself");
            Err(ApiError::unsupported_at(place.to_owned(), message))
        }
        Some(_) | None => Err(unsupported(item, place, &KINDS)),
    }
}

fn message(turns: &mut Turns, item: &Value, place: &str) -> Result<(), ApiError> {
    let role = match item["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        Some("developer") => "system",
        Some(_) | None => {
            return Err(ApiError::invalid_at(
                format!("{place}.role"),
                format!("`{place}.role` is {}, expected user, assistant, system or developer", item["role"]),
            ));
        }
    };
    let kinds: &[&str] = if role == "assistant" { &["output_text"] } else { &["input_text"] };
    let texts = texts(&item["content"], &format!("{place}.content"), kinds)?;
    texts.into_iter().for_each(|text| turns.text(role, text));
    Ok(())
}

/// A tool as the chat request describes it.
fn tool(tool: &Value, at: usize) -> Result<Value, ApiError> {
    let place = format!("tools[{at}]");
    match tool["type"].as_str() {
        Some("function") => {}
        Some(kind) => {
            let message = format!("`{place}`: the built-in tool `{kind}` is not supported: expected type `function`");
            return Err(ApiError::unsupported_at(place, message));
        }
        None => return Err(unsupported(tool, &place, &["function"])),
    }
    let mut function = json!({"name": tool["name"], "parameters": tool["parameters"]});
    if let Some(description) = tool["description"].as_str() {
        function["description"] = json!(description);
    }
    Ok(json!({"type": "function", "function": function}))
}

/// The choice of tools as the chat request has it.
fn choice(choice: Option<Value>) -> Result<Option<Value>, ApiError> {
    let Some(choice) = choice.filter(|choice| !choice.is_null()) else { return Ok(None) };
    match choice.as_str().or_else(|| choice["type"].as_str()) {
        Some("auto" | "none" | "required") if choice.is_string() => Ok(Some(choice)),
        Some("function") if choice.is_object() => {
            let name = string(&choice, "name", "tool_choice")?;
            Ok(Some(json!({"type": "function", "function": {"name": name}})))
        }
        Some(_) | None => {
            let message = format!(
                "`tool_choice` is {choice}, expected \"auto\", \"none\", \"required\", or {{\"type\": \"function\", \"name\": …}}"
            );
            Err(ApiError::unsupported("tool_choice", message))
        }
    }
}

/// The form of the answer as the chat request has it.
fn response_format(text: Option<&Value>) -> Result<Option<Value>, ApiError> {
    let format = text.map_or(&Value::Null, |text| &text["format"]);
    if format.is_null() {
        return Ok(None);
    }
    match format["type"].as_str() {
        Some(kind @ ("text" | "json_object")) => Ok(Some(json!({"type": kind}))),
        Some("json_schema") if format["schema"].is_object() => {
            let schema = json!({"schema": format["schema"], "strict": format["strict"]});
            Ok(Some(json!({"type": "json_schema", "json_schema": schema})))
        }
        Some("json_schema") => {
            let place = "text.format.schema";
            Err(ApiError::invalid(place, format!("`{place}` must be a JSON schema, which is an object")))
        }
        Some(_) | None => {
            let place = "text.format.type";
            let expected = "expected \"text\", \"json_object\" or \"json_schema\"";
            Err(ApiError::invalid(place, format!("`{place}` is {}, {expected}", format["type"])))
        }
    }
}
