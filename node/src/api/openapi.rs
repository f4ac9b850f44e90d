//! `GET /openapi.json`: a description of the API for programs, in the form of OpenAPI 3.1.
use super::fields::Field;
use super::guard::Access;
use axum::Json;
use operations::OPERATIONS;
use serde_json::{Map, Value, json};

mod operations;

/// One method of one path.
struct Operation {
    method: &'static str,
    /// As in the list of routes.
    path: &'static str,
    access: Access,
    summary: &'static str,
    input: Input,
    output: Output,
}

/// What a request has besides its path.
enum Input {
    Nothing,
    /// Parameters of the query: name and type.
    Query(&'static [(&'static str, &'static str)]),
    /// A JSON object.
    Body(Body),
    /// A JSON object, with the headers of requests that may be sent again.
    Retried(Body),
}

/// The fields of a body: those of all lists, except some.
struct Body {
    lists: &'static [&'static [Field]],
    except: &'static [&'static str],
    /// Fields that this endpoint requires, besides those that all endpoints with the list do.
    required: &'static [&'static str],
}

impl Body {
    const fn of(lists: &'static [&'static [Field]]) -> Self {
        Self { lists, except: &[], required: &[] }
    }

    const fn except(self, except: &'static [&'static str]) -> Self {
        Self { except, ..self }
    }

    const fn required(self, required: &'static [&'static str]) -> Self {
        Self { required, ..self }
    }

    fn fields(&self) -> impl Iterator<Item = &Field> {
        self.lists.iter().copied().flatten().filter(|field| !self.except.contains(&field.name()))
    }
}

/// What a request is answered with.
enum Output {
    /// An object with these fields.
    Object(&'static [&'static str]),
    /// An array of objects.
    List,
    /// An object with these fields, or server-sent events.
    ObjectOrEvents(&'static [&'static str]),
    /// Something else than JSON, with its media type.
    Other(&'static str),
}

pub(crate) async fn openapi() -> Json<Value> {
    Json(document())
}

/// The description of the API.
fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for operation in OPERATIONS {
        let path = operation.path.replace("{*", "{");
        paths.entry(path).or_insert_with(|| json!({}))[operation.method.to_lowercase()] = operation.view();
    }
    let text = json!({"type": "string"});
    let nullable = json!({"type": ["string", "null"]});
    let error = json!({"message": text, "type": text, "param": nullable, "code": nullable});
    let anthropic = json!({"type": text, "message": text});
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "meshnode",
            "version": "1",
            "description": "The API of a node. `/v1` is compatible with the APIs of OpenAI and Anthropic.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {
                "Error": {"type": "object", "required": ["error"], "properties": {"error": object(error)}},
                "AnthropicError": {
                    "type": "object",
                    "required": ["type", "error"],
                    "properties": {"type": {"const": "error"}, "error": object(anthropic)},
                },
            },
        },
    })
}

impl Operation {
    fn view(&self) -> Value {
        let (parameters, body) = self.parameters_and_body();
        let error = if self.path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
        let error = json!({"schema": {"$ref": format!("#/components/schemas/{error}")}});
        let id = format!("{}{}", self.method.to_lowercase(), self.path);
        let id: String = id.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let mut view = json!({
            "operationId": id,
            "summary": self.summary,
            "parameters": parameters,
            "responses": {
                "200": {"description": "The answer", "content": self.output.content()},
                "default": {"description": "An error", "content": {"application/json": error}},
            },
            "security": security(self.access),
        });
        if let Some(body) = body {
            view["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": body}}});
        }
        view
    }

    fn parameters_and_body(&self) -> (Vec<Value>, Option<Value>) {
        let parameter = |place: &str, name: &str, kind: &str, required: bool| json!({"name": name, "in": place, "required": required, "schema": {"type": kind}});
        let in_path = self.path.split(['{', '}']).skip(1).step_by(2);
        let mut parameters: Vec<Value> =
            in_path.map(|name| parameter("path", name.trim_start_matches('*'), "string", true)).collect();
        let body = match &self.input {
            Input::Nothing => None,
            Input::Query(query) => {
                parameters.extend(query.iter().map(|(name, kind)| parameter("query", name, kind, false)));
                None
            }
            Input::Body(body) => Some(schema(body)),
            Input::Retried(body) => {
                parameters.push(parameter("header", "Idempotency-Key", "string", false));
                parameters.push(parameter("header", "Last-Event-ID", "integer", false));
                Some(schema(body))
            }
        };
        (parameters, body)
    }
}

impl Output {
    fn content(&self) -> Value {
        let text = json!({"schema": {"type": "string"}});
        let fields = |names: &[&str]| {
            let properties: Map<String, Value> = names.iter().map(|name| ((*name).to_owned(), json!({}))).collect();
            json!({"schema": object(Value::Object(properties))})
        };
        match self {
            Output::Object(names) => json!({"application/json": fields(names)}),
            Output::List => json!({"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}}),
            Output::ObjectOrEvents(names) => json!({"application/json": fields(names), "text/event-stream": text}),
            Output::Other(media) => Value::Object(Map::from_iter([((*media).to_owned(), text)])),
        }
    }
}

fn object(properties: Value) -> Value {
    json!({"type": "object", "properties": properties})
}

fn schema(body: &Body) -> Value {
    let properties: Map<String, Value> = body.fields().map(|field| (field.name().to_owned(), field.schema())).collect();
    let is_required = |field: &&Field| field.is_required() || body.required.contains(&field.name());
    let required: Vec<&str> = body.fields().filter(is_required).map(Field::name).collect();
    json!({"type": "object", "properties": properties, "required": required})
}

/// The keys that a route requires. An empty entry: none is needed, on a node without a key for all callers.
fn security(access: Access) -> Value {
    match access {
        Access::Public => json!([]),
        Access::Open => json!([{}, {"bearer": []}, {"key": []}]),
        Access::Administer => json!([{"bearer": []}, {"key": []}]),
    }
}

#[cfg(test)]
mod tests;
