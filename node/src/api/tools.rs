//! Tools of a chat request: how a model is shown them, and the grammar of the calls that it may write.
use super::engine::Text;
use super::error::ApiError;
use super::grammar::{JsonStyle, embedded, quoted, whole};
use super::output::Thoughts;
use kernels_models::chat_template::ChatMessage;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Tools per request: OpenAI's limit.
const TOOLS_MAX: usize = 128;
/// Characters of a tool's name: OpenAI's limit.
const NAME_CHARS_MAX: usize = 64;

/// The form in which a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name", "arguments"}</tool_call>`: Hermes, Qwen, SmolLM, GLM.
    Hermes,
    /// `[TOOL_CALLS] [{"name", "arguments"}]`: Mistral.
    Mistral,
    /// `{"name", "parameters"}` and nothing else: Llama 3.
    Llama,
}

impl ToolFormat {
    /// The form that the model's chat template uses. `None`: the template knows no tools.
    fn of(text: &dyn Text) -> Option<Self> {
        if !text.template_mentions("tools") {
            return None;
        }
        let forms = [("[TOOL_CALLS]", Self::Mistral), ("<tool_call>", Self::Hermes), ("\"parameters\"", Self::Llama)];
        forms.into_iter().find(|(mark, _)| text.template_mentions(mark)).map(|(_, form)| form)
    }
}

/// The tools of a request.
#[derive(Debug)]
pub(crate) struct Tools {
    list: Vec<Tool>,
    choice: Choice,
    parallel: bool,
}

#[derive(Debug)]
struct Tool {
    name: String,
    parameters: Map<String, Value>,
    /// As the client described it.
    described: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Auto,
    /// At least one call.
    Required,
    /// A call of this tool.
    Named(usize),
}

impl Tools {
    /// The tools of a request. `None`: it has none, or does not want them used.
    ///
    /// # Errors
    /// A tool is malformed, or the choice names none of them.
    pub(crate) fn read(
        tools: Option<Vec<Value>>,
        choice: Option<&Value>,
        parallel: Option<bool>,
    ) -> Result<Option<Self>, ApiError> {
        let tools = tools.unwrap_or_default();
        if tools.len() > TOOLS_MAX {
            let message = format!("`tools` has {} entries, at most {TOOLS_MAX} are allowed", tools.len());
            return Err(ApiError::invalid("tools", message));
        }
        let list =
            tools.into_iter().enumerate().map(|(at, tool)| Tool::read(at, tool)).collect::<Result<Vec<_>, _>>()?;
        let mut names = BTreeSet::new();
        if let Some(twice) = list.iter().position(|tool| !names.insert(&tool.name)) {
            let message = format!("the tool `{}` is there twice: give each tool a name of its own", list[twice].name);
            return Err(ApiError::invalid_at(format!("tools[{twice}].function.name"), message));
        }
        let choice = match choice {
            None | Some(Value::Null) => Choice::Auto,
            Some(Value::String(word)) if word == "auto" => Choice::Auto,
            Some(Value::String(word)) if word == "none" => return Ok(None),
            Some(Value::String(word)) if word == "required" => Choice::Required,
            Some(choice) => {
                let name = choice["function"]["name"].as_str().or_else(|| choice["name"].as_str());
                let named = name.map(|name| (name, list.iter().position(|tool| tool.name == name)));
                match named {
                    Some((_, Some(at))) => Choice::Named(at),
                    Some((name, None)) => {
                        let message = format!("`tool_choice` names `{name}`, which is not in `tools`");
                        return Err(ApiError::invalid("tool_choice", message));
                    }
                    None => {
                        let message = "`tool_choice` must be \"none\", \"auto\", \"required\", or \
                                       {\"type\": \"function\", \"function\": {\"name\": …}}";
                        return Err(ApiError::invalid("tool_choice", message));
                    }
                }
            }
        };
        if list.is_empty() {
            return match choice {
                Choice::Auto => Ok(None),
                Choice::Required | Choice::Named(_) => {
                    Err(ApiError::invalid("tool_choice", "`tool_choice` requires a call, but `tools` is empty"))
                }
            };
        }
        Ok(Some(Self { list, choice, parallel: parallel.unwrap_or(true) }))
    }

    /// The conversation as the model's template takes it, the tools to pass to it, and the form of the calls. A model whose
    /// template knows no tools gets them in its system message, in the form that most models have seen.
    pub(crate) fn show(&self, text: &dyn Text, messages: &mut Vec<ChatMessage>) -> (ToolFormat, Vec<Value>) {
        let described = || self.list.iter().map(|tool| tool.described.clone());
        match ToolFormat::of(text) {
            Some(format) => (format, described().collect()),
            None => {
                let lines: Vec<String> = described().map(|tool| tool.to_string()).collect();
                let about = format!(
                    "You may call functions. Each line between <tools> and </tools> describes one:\n<tools>\n{}\n</tools>\n\n\
                     To call a function, write its name and its arguments as a JSON object:\n<tool_call>\n\
                     {{\"name\": \"the name\", \"arguments\": {{}}}}\n</tool_call>",
                    lines.join("\n")
                );
                match messages.first_mut().filter(|first| first.role == "system") {
                    Some(first) => first.content = format!("{}\n\n{about}", first.content),
                    None => messages.insert(0, ChatMessage::new("system", about)),
                }
                (ToolFormat::Hermes, Vec::new())
            }
        }
    }

    /// The grammar of the answer in Lark, if the form allows one. `answer`: a rule for an answer that is no call, if that
    /// has a form of its own.
    pub(crate) fn grammar(
        &self,
        format: ToolFormat,
        text: &dyn Text,
        thoughts: Thoughts,
        answer: Option<&str>,
    ) -> Option<String> {
        let tools: Vec<&Tool> = match self.choice {
            Choice::Named(at) => self.list.iter().skip(at).take(1).collect(),
            Choice::Auto | Choice::Required => self.list.iter().collect(),
        };
        let several = self.parallel && !matches!(self.choice, Choice::Named(_));
        let names: Vec<String> = (0..tools.len()).map(|at| format!("call_{at}")).collect();
        let bodies: Vec<String> = tools.iter().zip(&names).map(|(tool, name)| tool.rule(name, format)).collect();
        let rules = format!("call: {}\n{}", names.join(" | "), bodies.join("\n"));
        let marker = |name: &str| text.control_token(name).map_or_else(|| quoted(name), |id| format!("<[{id}]>"));
        let calls = match format {
            ToolFormat::Hermes => {
                let [open, close] = [marker("<tool_call>"), marker("</tool_call>")];
                let one = format!("{open} \"\\n\" call \"\\n\" {close}");
                if several { format!("{one} (\"\\n\" {one})*") } else { one }
            }
            ToolFormat::Mistral => {
                let more = if several { "(\", \" call)*" } else { "" };
                format!("{} \" \"? \"[\" call {more} \"]\"", marker("[TOOL_CALLS]"))
            }
            ToolFormat::Llama => if several { "call (\"; \" call)*" } else { "call" }.to_owned(),
        };
        let calls = format!("calls: {calls}\n{rules}");
        if self.choice != Choice::Auto {
            return Some(whole(thoughts, "calls", &calls));
        }
        if let Some(answer) = answer {
            return Some(whole(thoughts, "(calls | answer)", &format!("answer: {answer}\n{calls}")));
        }
        match format {
            ToolFormat::Hermes => {
                let close = marker("</tool_call>");
                let (before, open) = match text.control_token("<tool_call>") {
                    Some(id) => ("before: TEXT".to_owned(), format!("<[{id}]>")),
                    None => ("before[lazy]: /(.|\\n)*<tool_call>/".to_owned(), String::new()),
                };
                let repeat = if several { "*" } else { "?" };
                Some(format!(
                    "start: (before {open} \"\\n\" call \"\\n\" {close}){repeat} TEXT\n{before}\nTEXT: /(.|\\n)*/\n{rules}\n"
                ))
            }
            // Text before a control token needs no trigger.
            ToolFormat::Mistral if text.control_token("[TOOL_CALLS]").is_some() => {
                Some(format!("start: TEXT calls?\nTEXT: /(.|\\n)*/\n{calls}\n"))
            }
            ToolFormat::Mistral | ToolFormat::Llama => None,
        }
    }

    /// The place of the first tool whose parameters cannot be a grammar, and the reason.
    pub(crate) fn culprit(&self, text: &dyn Text) -> Option<(String, String)> {
        self.list.iter().enumerate().find_map(|(at, tool)| {
            let grammar = format!("start: {}", embedded(&tool.parameters, JsonStyle::Lenient));
            let reason = text.constrain(&grammar).err()?;
            Some((format!("tools[{at}].function.parameters"), reason))
        })
    }
}

impl Tool {
    fn read(at: usize, described: Value) -> Result<Self, ApiError> {
        let place = |field: &str| format!("tools[{at}]{field}");
        let wrong = |field: &str, message: &str| Err(ApiError::invalid_at(place(field), message));
        if described["type"] != "function" {
            return wrong(".type", "the type of a tool must be \"function\"");
        }
        let function = &described["function"];
        let fits = |name: &&str| {
            let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'));
            letters && (1..=NAME_CHARS_MAX).contains(&name.len())
        };
        let Some(name) = function["name"].as_str().filter(fits) else {
            return wrong(".function.name", "a tool's name must be 1 to 64 letters, digits, `_`, `-` or `.`");
        };
        let parameters = match &function["parameters"] {
            Value::Null => Map::from_iter([
                ("type".to_owned(), json!("object")),
                ("additionalProperties".to_owned(), json!(false)),
            ]),
            Value::Object(schema) => {
                let mut schema = schema.clone();
                schema.entry("type").or_insert_with(|| json!("object"));
                schema
            }
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                return wrong(".function.parameters", "`parameters` must be a JSON schema, which is an object");
            }
        };
        Ok(Self { name: name.to_owned(), parameters, described })
    }

    /// A rule for one call of this tool.
    fn rule(&self, rule: &str, format: ToolFormat) -> String {
        let key = if format == ToolFormat::Llama { "parameters" } else { "arguments" };
        let open = quoted(&format!("{{\"name\": \"{}\", \"{key}\": ", self.name));
        format!("{rule}: {open} {} \"}}\"", embedded(&self.parameters, JsonStyle::Lenient))
    }
}

/// A call that the assistant made earlier in the conversation.
#[derive(Debug, Deserialize)]
pub(crate) struct CallBody {
    id: Option<String>,
    function: FunctionBody,
}

#[derive(Debug, Deserialize)]
struct FunctionBody {
    name: String,
    arguments: Option<Value>,
}

impl CallBody {
    /// The call as templates take it: arguments as an object, not as text.
    pub(crate) fn for_template(self) -> Value {
        let arguments = match self.function.arguments {
            None => json!({}),
            Some(Value::String(text)) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
            Some(arguments) => arguments,
        };
        json!({"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}})
    }
}

/// Rewrites calls and their results as text, for a template that knows no tools.
pub(crate) fn as_text(messages: Vec<ChatMessage>) -> Vec<ChatMessage> {
    let mut out: Vec<ChatMessage> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for message in messages {
        let is_result = message.role == "tool";
        if is_result {
            let result = format!("<tool_response>\n{}\n</tool_response>", message.content);
            match out.last_mut().filter(|_| after_result) {
                Some(last) => last.content = format!("{}\n{result}", last.content),
                None => out.push(ChatMessage::new("user", result)),
            }
        } else {
            let calls = message.tool_calls.iter().map(|call| {
                let function = &call["function"];
                let call = json!({"name": function["name"], "arguments": function["arguments"]});
                format!("<tool_call>\n{call}\n</tool_call>")
            });
            let texts = Some(message.content.clone()).filter(|text| !text.is_empty()).into_iter().chain(calls);
            out.push(ChatMessage::new(message.role, texts.collect::<Vec<_>>().join("\n")));
        }
        after_result = is_result;
    }
    out
}

/// Whether the model's template knows tools.
pub(crate) fn are_native(text: &dyn Text) -> bool {
    ToolFormat::of(text).is_some()
}
