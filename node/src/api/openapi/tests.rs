//! The API's description says what the routes are, what they read and what they answer.
use super::super::anthropic::{MESSAGES, MessagesBody};
use super::super::request::{BODY, Body as ChatBody, Settings};
use super::super::responses::{RESPONSES, ResponsesBody};
use super::super::tests::{FakeNode, Server, start};
use super::super::{fields::Field, routes};
use super::*;
use serde::Serialize;
use std::collections::BTreeSet;

type Names = BTreeSet<String>;

fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> Names {
    names.into_iter().map(str::to_owned).collect()
}

fn keys(value: &Value) -> Names {
    value.as_object().unwrap_or_else(|| panic!("{value}")).keys().cloned().collect()
}

/// The fields that a request is parsed into.
fn parsed<T: Default + Serialize>() -> Names {
    keys(&serde_json::to_value(T::default()).unwrap())
}

fn documented(document: &Value, method: &str, path: &str) -> Value {
    document["paths"][path][method].clone()
}

fn fields_of(document: &Value, path: &str) -> Names {
    let body = &documented(document, "post", path)["requestBody"]["content"]["application/json"];
    keys(&body["schema"]["properties"])
}

#[test]
fn operations_are_the_routes() {
    let routes: Vec<(&str, &str, Access)> =
        routes::<FakeNode>().into_iter().map(|(method, path, access, _)| (method, path, access)).collect();
    let listed: Vec<(&str, &str, Access)> =
        OPERATIONS.iter().map(|operation| (operation.method, operation.path, operation.access)).collect();
    assert_eq!(listed, routes, "describe each route in `operations.rs`, in the order of the routes");

    let document = document();
    let described: Names = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, methods)| keys(methods).into_iter().map(move |method| format!("{method} {path}")))
        .collect();
    let expected =
        routes.iter().map(|(method, path, _)| format!("{} {}", method.to_lowercase(), path.replace("{*", "{")));
    assert_eq!(described, expected.collect());
}

#[test]
fn documented_fields_are_those_that_are_read() {
    let document = document();
    let of = |path: &str| fields_of(&document, path);
    let listed = |fields: &[Field]| names(fields.iter().map(Field::name));
    let completions: Names = of("/v1/chat/completions").union(&of("/v1/completions")).cloned().collect();
    assert_eq!(completions, parsed::<ChatBody>());
    assert_eq!(listed(BODY), parsed::<ChatBody>());
    assert_eq!(of("/v1/messages"), parsed::<MessagesBody>());
    assert_eq!(listed(MESSAGES), parsed::<MessagesBody>());
    assert!(of("/v1/messages/count_tokens").is_subset(&parsed::<MessagesBody>()));
    assert_eq!(of("/v1/responses"), parsed::<ResponsesBody>());
    assert_eq!(listed(RESPONSES), parsed::<ResponsesBody>());
    let generate: Names = parsed::<Settings>().union(&names(["model", "messages", "prompt", "raw"])).cloned().collect();
    assert_eq!(of("/api/v1/generate"), generate);
    let schema =
        &documented(&document, "post", "/v1/completions")["requestBody"]["content"]["application/json"]["schema"];
    assert_eq!(schema["required"], json!(["model", "prompt"]));
    // Each has a description.
    for operation in OPERATIONS {
        if let Input::Body(body) | Input::Retried(body) = &operation.input {
            for field in body.fields() {
                let schema = field.schema();
                let about = schema["description"].as_str().unwrap();
                assert!(!about.is_empty(), "{} of {}", field.name(), operation.path);
            }
        }
    }
}

#[test]
fn documented_answers_are_those_that_are_given() {
    let server: Server = start(FakeNode::generating("x"));
    let document = document();
    let message = json!([{"role": "user", "content": "Hi"}]);
    for (line, body) in [
        ("GET /v1/models", Value::Null),
        ("GET /v1/models/{name}", Value::Null),
        ("POST /v1/chat/completions", json!({"model": "tiny", "messages": message})),
        ("POST /v1/completions", json!({"model": "tiny", "prompt": "Hi"})),
        ("POST /v1/responses", json!({"model": "tiny", "input": "Hi"})),
        ("POST /v1/messages", json!({"model": "tiny", "max_tokens": 5, "messages": message})),
        ("POST /v1/messages/count_tokens", json!({"model": "tiny", "messages": message})),
        ("GET /openapi.json", Value::Null),
        ("GET /readyz", Value::Null),
        ("GET /api/v1/state", Value::Null),
        ("POST /api/v1/open", json!({})),
        ("POST /api/v1/deploy", json!({"model": "tiny"})),
        ("DELETE /api/v1/models/{name}", Value::Null),
        ("POST /api/v1/invite", json!({"ttl_s": 60, "uses": 1})),
        ("POST /api/v1/ban", json!({"peer": "12D3"})),
        ("POST /api/v1/drain", json!({"on": true})),
        ("POST /api/v1/leave", json!({})),
    ] {
        let (method, path) = line.split_once(' ').unwrap();
        let answer = &documented(&document, &method.to_lowercase(), path)["responses"]["200"]["content"];
        let described = keys(&answer["application/json"]["schema"]["properties"]);
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, _, text) = server.call(&line.replace("{name}", "tiny"), &body);
        assert_eq!(status, 200, "{line}: {text}");
        assert_eq!(keys(&serde_json::from_str(&text).unwrap()), described, "{line}");
    }
}

/// Programs find everything that the description refers to.
#[test]
fn references_and_parameters_are_there() {
    let document = document();
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(document.pointer(reference).is_some_and(Value::is_object), "{reference}");
    }
    let mut ids = Names::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let in_path = operation["parameters"].as_array().unwrap().iter().filter(|one| one["in"] == "path");
            let names: Vec<&str> = in_path.map(|one| one["name"].as_str().unwrap()).collect();
            let expected: Vec<&str> = path.split(['{', '}']).skip(1).step_by(2).collect();
            assert_eq!(names, expected, "{method} {path}");
            assert!(ids.insert(operation["operationId"].clone().to_string()), "{method} {path}");
        }
    }
}
