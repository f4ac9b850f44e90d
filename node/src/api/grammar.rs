//! Grammars of answers: `response_format` as a grammar in llguidance's dialect of Lark.
use super::error::ApiError;
use super::output::Thoughts;
use serde_json::{Map, Value, json};

/// How strictly a schema is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonStyle {
    /// Keywords that are not supported are errors.
    Strict,
    /// Keywords that are not supported are ignored.
    Lenient,
}

/// A whole grammar: the thoughts that may come first, then `answer`, whose rules follow. A lazy rule matches as soon as its end
/// tag arrives.
pub(crate) fn whole(thoughts: Thoughts, answer: &str, rules: &str) -> String {
    match thoughts {
        Thoughts::Never => format!("start: {answer}\n{rules}\n"),
        Thoughts::Possible => format!(
            "start: (think WS?)? {answer}\nthink[lazy]: /[ \\n]*<think>(.|\\n)*<\\/think>/\nWS: /[ \\n]+/\n{rules}\n"
        ),
        Thoughts::Opened => {
            format!("start: think WS? {answer}\nthink[lazy]: /(.|\\n)*<\\/think>/\nWS: /[ \\n]+/\n{rules}\n")
        }
    }
}

/// A schema as a part of a rule. The answer has no white space but one space after `,` and `:`, because small models repeat
/// white space for ever where they may.
pub(crate) fn embedded(schema: &Map<String, Value>, style: JsonStyle) -> String {
    let style = json!({
        "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ",
        "lenient": style == JsonStyle::Lenient,
    });
    let mut schema = schema.clone();
    schema.insert("x-guidance".into(), style);
    format!("%json {}", Value::Object(schema))
}

/// A string of Lark.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The rule that `response_format` requires of an answer; `None` for text.
///
/// # Errors
/// The format is malformed or not supported.
pub(crate) fn rule(format: Option<&Value>) -> Result<Option<String>, ApiError> {
    let Some(format) = format.filter(|format| !format.is_null()) else { return Ok(None) };
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => {
            let object = Map::from_iter([("type".to_owned(), json!("object"))]);
            Ok(Some(embedded(&object, JsonStyle::Lenient)))
        }
        Some("json_schema") => {
            let described = &format["json_schema"];
            let schema = described.get("schema").or_else(|| format.get("schema"));
            let style = if described["strict"] == Value::Bool(true) { JsonStyle::Strict } else { JsonStyle::Lenient };
            match schema {
                Some(Value::Object(schema)) => Ok(Some(embedded(schema, style))),
                Some(_) | None => Err(ApiError::invalid_at(
                    "response_format.json_schema.schema".into(),
                    "`response_format` of type json_schema must have a JSON schema, which is an object, in `json_schema.schema`",
                )),
            }
        }
        Some(_) | None => Err(ApiError::invalid_at(
            "response_format.type".into(),
            "the type of `response_format` must be \"text\", \"json_object\" or \"json_schema\"; for a grammar of your own send `grammar`",
        )),
    }
}
