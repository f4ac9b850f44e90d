//! Checks request bodies field by field before parsing, so that errors use JSON's terms and `param` names the field.
//! serde's own errors speak of structs and `u32`.
use super::error::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// A checked field of a body. Unlisted fields pass unchecked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    name: &'static str,
    expects: Expects,
    required: bool,
    /// For the API's description.
    about: &'static str,
}

/// The type of a field. A field that is not required may also be null.
#[derive(Clone, Copy, Debug)]
enum Expects {
    /// Anything: what reads the field checks it.
    Any,
    Text,
    Bool,
    /// A whole number, with inclusive bounds.
    Whole(i128, i128),
    Number,
    Object,
    /// A string, or an array of strings.
    Texts,
    /// An array of objects.
    Objects,
    /// A string, or an array of objects.
    TextOrObjects,
    /// The messages of a conversation.
    Messages,
    /// A string, an array of strings, token ids, or lists of token ids.
    Prompt,
}

impl Field {
    const fn new(name: &'static str, expects: Expects) -> Self {
        Self { name, expects, required: false, about: "" }
    }

    /// A value that is checked where it is read.
    pub(crate) const fn any(name: &'static str) -> Self {
        Self::new(name, Expects::Any)
    }

    /// A string.
    pub(crate) const fn text(name: &'static str) -> Self {
        Self::new(name, Expects::Text)
    }

    /// true or false.
    pub(crate) const fn bool(name: &'static str) -> Self {
        Self::new(name, Expects::Bool)
    }

    /// An unsigned 32-bit number.
    pub(crate) const fn count(name: &'static str) -> Self {
        Self::new(name, Expects::Whole(0, u32::MAX as i128))
    }

    /// An unsigned 64-bit number.
    pub(crate) const fn long(name: &'static str) -> Self {
        Self::new(name, Expects::Whole(0, u64::MAX as i128))
    }

    /// A signed 64-bit number.
    pub(crate) const fn signed(name: &'static str) -> Self {
        Self::new(name, Expects::Whole(i64::MIN as i128, i64::MAX as i128))
    }

    /// Any number.
    pub(crate) const fn number(name: &'static str) -> Self {
        Self::new(name, Expects::Number)
    }

    /// An object.
    pub(crate) const fn object(name: &'static str) -> Self {
        Self::new(name, Expects::Object)
    }

    /// An array of objects.
    pub(crate) const fn objects(name: &'static str) -> Self {
        Self::new(name, Expects::Objects)
    }

    /// A string, or an array of objects.
    pub(crate) const fn text_or_objects(name: &'static str) -> Self {
        Self::new(name, Expects::TextOrObjects)
    }

    /// A string, or an array of strings.
    pub(crate) const fn texts(name: &'static str) -> Self {
        Self::new(name, Expects::Texts)
    }

    /// A conversation.
    pub(crate) const fn messages(name: &'static str) -> Self {
        Self::new(name, Expects::Messages)
    }

    /// The prompt of a completion, as text or token ids.
    pub(crate) const fn prompt(name: &'static str) -> Self {
        Self::new(name, Expects::Prompt)
    }

    /// Marks the field as required.
    pub(crate) const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    /// What it is for.
    pub(crate) const fn about(self, about: &'static str) -> Self {
        Self { about, ..self }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Whether a body must have it.
    pub(crate) fn is_required(&self) -> bool {
        self.required
    }

    /// The JSON schema of its value.
    pub(crate) fn schema(&self) -> Value {
        let list = |items: Value| json!({"type": "array", "items": items});
        let (text, ids) = (json!({"type": "string"}), list(json!({"type": "integer", "minimum": 0})));
        let mut kinds = match self.expects {
            Expects::Any => Vec::new(),
            Expects::Text => vec![text],
            Expects::Bool => vec![json!({"type": "boolean"})],
            // The bounds of 64 bits say nothing, and a float cannot hold them.
            Expects::Whole(0, most) if most > u32::MAX.into() => vec![json!({"type": "integer", "minimum": 0})],
            Expects::Whole(0, _) => vec![json!({"type": "integer", "minimum": 0, "maximum": u32::MAX})],
            Expects::Whole(..) => vec![json!({"type": "integer"})],
            Expects::Number => vec![json!({"type": "number"})],
            Expects::Object => vec![json!({"type": "object"})],
            Expects::Texts => vec![text.clone(), list(text)],
            Expects::Objects => vec![list(json!({"type": "object"}))],
            Expects::TextOrObjects => vec![text, list(json!({"type": "object"}))],
            Expects::Messages => {
                let content = json!({"anyOf": [text, list(json!({"type": "object"})), {"type": "null"}]});
                let properties = json!({
                    "role": text, "content": content, "name": text, "tool_call_id": text, "reasoning_content": text,
                    "tool_calls": list(json!({"type": "object"})),
                });
                vec![list(json!({"type": "object", "required": ["role"], "properties": properties}))]
            }
            Expects::Prompt => vec![text.clone(), list(text), ids.clone(), list(ids)],
        };
        if !self.required && !kinds.is_empty() {
            kinds.push(json!({"type": "null"}));
        }
        let mut schema = match <[Value; 1]>::try_from(kinds) {
            Ok([kind]) => kind,
            Err(kinds) if kinds.is_empty() => json!({}),
            Err(kinds) => json!({"anyOf": kinds}),
        };
        schema["description"] = json!(self.about);
        schema
    }

    fn check(&self, value: &Value) -> Result<(), ApiError> {
        let name = self.name;
        let wrong = |expected: &str| Err(mismatch(name, expected, value));
        if value.is_null() && !self.required {
            return Ok(());
        }
        match self.expects {
            Expects::Any => Ok(()),
            Expects::Text if value.is_string() => Ok(()),
            Expects::Text => wrong("a string"),
            Expects::Bool if value.is_boolean() => Ok(()),
            Expects::Bool => wrong("true or false"),
            Expects::Whole(least, most) => {
                let whole = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
                match whole.is_some_and(|whole| (least..=most).contains(&whole)) {
                    true => Ok(()),
                    false => wrong(&format!("a whole number from {least} to {most}")),
                }
            }
            Expects::Number if value.is_number() => Ok(()),
            Expects::Number => wrong("a number"),
            Expects::Object if value.is_object() => Ok(()),
            Expects::Object => wrong("an object"),
            Expects::Texts if value.is_string() || all(value, Value::is_string) => Ok(()),
            Expects::Texts => wrong("a string or an array of strings"),
            Expects::Objects if all(value, Value::is_object) => Ok(()),
            Expects::Objects => wrong("an array of objects"),
            Expects::TextOrObjects if value.is_string() || all(value, Value::is_object) => Ok(()),
            Expects::TextOrObjects => wrong("a string or an array of objects"),
            Expects::Messages => messages(name, value),
            Expects::Prompt => {
                let ids = |value: &Value| all(value, is_token);
                match value.is_string() || all(value, Value::is_string) || ids(value) || all(value, ids) {
                    true => Ok(()),
                    false => wrong("a string, an array of strings, or token ids"),
                }
            }
        }
    }
}

fn is_token(value: &Value) -> bool {
    value.as_u64().is_some_and(|id| u32::try_from(id).is_ok())
}

fn all(value: &Value, is: impl Fn(&Value) -> bool) -> bool {
    value.as_array().is_some_and(|list| list.iter().all(is))
}

/// Checks messages; errors name the place, as in `name[0].content`.
fn messages(name: &str, value: &Value) -> Result<(), ApiError> {
    let Some(list) = value.as_array() else { return Err(mismatch(name, "an array of messages", value)) };
    for (i, message) in list.iter().enumerate() {
        let place = |field: &str| format!("{name}[{i}]{field}");
        if !message.is_object() {
            return Err(mismatch(&place(""), "an object with `role` and `content`", message));
        }
        if !message["role"].is_string() {
            return Err(mismatch(&place(".role"), "a string", &message["role"]));
        }
        for field in ["tool_call_id", "name", "reasoning_content"] {
            if !(message[field].is_string() || message[field].is_null()) {
                return Err(mismatch(&place(&format!(".{field}")), "a string", &message[field]));
            }
        }
        if !(message["tool_calls"].is_null() || all(&message["tool_calls"], Value::is_object)) {
            return Err(mismatch(&place(".tool_calls"), "an array of objects", &message["tool_calls"]));
        }
        let content = &message["content"];
        let Some(parts) = content.as_array() else {
            if content.is_string() || content.is_null() {
                continue;
            }
            return Err(mismatch(&place(".content"), "a string or an array of parts", content));
        };
        for (j, part) in parts.iter().enumerate() {
            let place = |field: &str| format!("{name}[{i}].content[{j}]{field}");
            if !part["type"].is_string() {
                return Err(mismatch(&place(".type"), "a string", &part["type"]));
            }
            if !(part["text"].is_string() || part["text"].is_null()) {
                return Err(mismatch(&place(".text"), "a string", &part["text"]));
            }
        }
    }
    Ok(())
}

fn mismatch(place: &str, expected: &str, found: &Value) -> ApiError {
    let message = match found {
        Value::Null => format!("`{place}` must be {expected}, but it is missing or null"),
        Value::Bool(_) | Value::Number(_) => format!("`{place}` must be {expected}, not {found}"),
        Value::String(_) => format!("`{place}` must be {expected}, not a string"),
        Value::Array(_) => format!("`{place}` must be {expected}, not an array of other values"),
        Value::Object(_) => format!("`{place}` must be {expected}, not an object"),
    };
    ApiError::invalid_at(place.to_owned(), message)
}

/// Parses a body that must be a JSON object with `fields`.
pub(crate) fn read<T: DeserializeOwned>(bytes: &[u8], fields: &[Field]) -> Result<T, ApiError> {
    let value = checked(bytes, fields)?;
    serde_json::from_slice(bytes).map_err(|_| culprit::<T>(&value))
}

/// Checks a body that must be a JSON object with `fields`.
pub(crate) fn checked(bytes: &[u8], fields: &[Field]) -> Result<Value, ApiError> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|e| ApiError::invalid(None, format!("the body is not valid JSON: {e}")))?;
    let Some(object) = value.as_object() else {
        return Err(ApiError::invalid(None, "the body must be a JSON object"));
    };
    for field in fields {
        match object.get(field.name) {
            Some(value) => field.check(value)?,
            None if field.required => {
                return Err(ApiError::invalid(field.name, format!("`{}` is missing", field.name)));
            }
            None => {}
        }
    }
    Ok(value)
}

/// Bounds the search for the wrong field: each candidate costs a parse.
const SUSPECTS_MAX: usize = 64;

/// The field of the wrong type where the checks above do not look (inside `options`): the first without which the body
/// parses.
fn culprit<T: DeserializeOwned>(body: &Value) -> ApiError {
    let mut names = body.as_object().into_iter().flat_map(serde_json::Map::keys).take(SUSPECTS_MAX);
    let parses_without = |name: &&String| {
        let others = body.as_object().into_iter().flatten().filter(|(other, _)| other != name);
        serde_json::from_value::<T>(others.map(|(k, v)| (k.clone(), v.clone())).collect()).is_ok()
    };
    match names.find(parses_without) {
        Some(name) => ApiError::invalid_at(name.clone(), format!("a value in `{name}` has the wrong type")),
        None => ApiError::invalid(None, "the body has fields of the wrong type"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_errors_use_json_terms_and_name_the_field() {
        let fields = [
            Field::text("model").required(),
            Field::count("max_tokens"),
            Field::number("temperature"),
            Field::signed("seed"),
            Field::bool("stream"),
            Field::texts("stop"),
            Field::messages("messages"),
            Field::prompt("prompt"),
        ];
        let error = |mut body: Value| {
            body.as_object_mut().unwrap().entry("model").or_insert(json!("m"));
            read::<Value>(body.to_string().as_bytes(), &fields).unwrap_err()
        };
        for (body, param, words) in [
            (json!({"model": 5}), "model", "a string, not 5"),
            (json!({"max_tokens": -1}), "max_tokens", "from 0 to 4294967295, not -1"),
            (json!({"max_tokens": 1e20}), "max_tokens", "a whole number"),
            (json!({"max_tokens": "5"}), "max_tokens", "not a string"),
            (json!({"max_tokens": 1.5}), "max_tokens", "not 1.5"),
            (json!({"temperature": "hot"}), "temperature", "a number, not a string"),
            (json!({"seed": 0.5}), "seed", "a whole number"),
            (json!({"stream": 1}), "stream", "true or false, not 1"),
            (json!({"stop": [1]}), "stop", "a string or an array of strings"),
            (json!({"messages": {}}), "messages", "an array of messages, not an object"),
            (json!({"messages": ["hi"]}), "messages[0]", "an object with `role`"),
            (json!({"messages": [{"content": "hi"}]}), "messages[0].role", "missing"),
            (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content", "not 5"),
            (json!({"messages": [{"role": "user", "content": [{}]}]}), "messages[0].content[0].type", "missing"),
            (json!({"prompt": [1.5]}), "prompt", "token ids"),
            (json!({"prompt": 5}), "prompt", "token ids"),
        ] {
            let error = error(body.clone());
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {}", error.message);
            assert!(error.message.contains(words), "{body}: {}", error.message);
            for rust in ["u32", "struct", "floating point", "expected value", "untagged"] {
                assert!(!error.message.contains(rust), "{body}: {}", error.message);
            }
        }
        #[derive(Debug, serde::Deserialize)]
        struct Nested {
            #[expect(dead_code, reason = "only whether it parses")]
            options: Option<std::collections::BTreeMap<String, u32>>,
        }
        let error = read::<Nested>(br#"{"x": 1, "options": {"context": "many"}}"#, &[]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("options"), "{}", error.message);
        let missing = read::<Value>(b"{}", &fields).unwrap_err();
        assert_eq!((missing.param.as_deref(), missing.message.as_str()), (Some("model"), "`model` is missing"));
        assert!(read::<Value>(b"[]", &fields).unwrap_err().message.contains("a JSON object"));
        assert!(read::<Value>(b"{\"model\": ", &fields).unwrap_err().message.contains("not valid JSON"));
    }

    #[test]
    fn valid_bodies_pass() {
        let fields = [Field::texts("stop"), Field::prompt("prompt"), Field::messages("messages"), Field::long("seed")];
        for body in [
            json!({"stop": null, "prompt": "x", "seed": u64::MAX}),
            json!({"stop": "a", "prompt": ["x"]}),
            json!({"stop": ["a", "b"], "prompt": [1, 2], "other": {"deep": [1]}}),
            json!({"prompt": [[1], [2]], "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
            json!({"messages": [{"role": "assistant", "content": null}, {"role": "assistant"}]}),
        ] {
            assert!(read::<Value>(body.to_string().as_bytes(), &fields).is_ok(), "{body}");
        }
    }
}
