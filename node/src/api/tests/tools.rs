//! Tests of tools, structured answers and thoughts at the API, against a fake node that writes a fixed answer.
use super::*;

const HERMES: &str = "tools <tool_call>";

fn node(script: &'static str, template: &'static str) -> FakeNode {
    FakeNode { template, context: 4096, ..FakeNode::generating(script) }
}

fn weather() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([{"type": "function", "function": {"name": "weather", "description": "Now", "parameters": city}}])
}

/// The message that the deltas of a stream add up to.
fn assembled(events: &[String]) -> Value {
    let mut message = json!({"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": null});
    for event in events.iter().filter(|event| *event != "[DONE]") {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let (choice, delta) = (&chunk["choices"][0], &chunk["choices"][0]["delta"]);
        for field in ["content", "reasoning_content"] {
            message[field] = json!(message[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap_or(""));
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], json!(message["tool_calls"].as_array().unwrap().len()));
            message["tool_calls"].as_array_mut().unwrap().push(call.clone());
        }
        if !choice["finish_reason"].is_null() {
            message["finish_reason"] = choice["finish_reason"].clone();
        }
    }
    message
}

#[test]
fn calls_are_returned_whole_and_streamed() {
    let script = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    let server = start(node(script, HERMES));
    let (status, answer) = server.post("/v1/chat/completions", chat_body(json!({"tools": weather()})));
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Let me see.");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "weather", "arguments": "{\"city\":\"Oslo\"}"}));
    assert_eq!(call["id"].as_str().unwrap().len(), 9, "the length that Mistral's templates require");
    assert!(
        prompt(&server).starts_with("<tool>{\"type\":\"function\",\"function\":{\"name\":\"weather\""),
        "{}",
        prompt(&server)
    );

    let events = server.events("/v1/chat/completions", chat_body(json!({"tools": weather(), "stream": true})));
    let message = assembled(&events);
    assert_eq!((&message["content"], &message["finish_reason"]), (&json!("Let me see."), &json!("tool_calls")));
    assert_eq!(message["tool_calls"][0]["function"], call["function"]);
}

#[test]
fn a_conversation_with_results_reaches_the_template() {
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}},
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]);
    let body = || chat_body(json!({"tools": weather(), "messages": messages}));
    let native = start(node("Rain.", HERMES));
    assert_eq!(native.post("/v1/chat/completions", body()).0, 200);
    let seen = prompt(&native);
    assert!(
        seen.contains("\"function\":{\"name\":\"weather\",\"arguments\":{\"city\":\"Oslo\"}}"),
        "as an object: {seen}"
    );
    assert!(seen.ends_with("<tool>rain"), "{seen}");

    // A template without tools gets them as text.
    let plain = start(node("Rain.", ""));
    let (status, answer) = plain.post("/v1/chat/completions", body());
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!("Rain.")), "{answer}");
    let seen = prompt(&plain);
    assert!(seen.starts_with("<system>You may call functions.") && seen.contains("\"name\":\"weather\""), "{seen}");
    assert!(seen.contains("<assistant><tool_call>\n{\"name\":\"weather\""), "{seen}");
    assert!(seen.ends_with("<user><tool_response>\nrain\n</tool_response>"), "{seen}");
}

#[test]
fn a_choice_of_tools_becomes_a_grammar() {
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    let grammar = |choice: Value, script: &'static str| {
        let server = start(node(script, HERMES));
        let body = chat_body(json!({"tools": weather(), "tool_choice": choice}));
        let (status, answer) = server.post("/v1/chat/completions", body);
        let grammar = server.engine.requests.lock().last().and_then(|request| request.sampling.grammar.clone());
        (status, answer, grammar)
    };
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for choice in [json!("required"), named] {
        let (status, answer, text) = grammar(choice.clone(), call);
        assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("tool_calls")), "{answer}");
        assert!(text.unwrap().contains("weather"));
        let (status, answer, _) = grammar(choice, "no call");
        assert_eq!(status, 503, "the fake node left the grammar: {answer}");
    }
    assert_eq!(grammar(json!("none"), "Hi").2, None);
    let (status, answer, text) =
        grammar(json!("auto"), "I <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": 5}}\n</tool_call>");
    assert!(text.is_some(), "arguments are constrained");
    assert_eq!(status, 503, "the city must be a string: {answer}");
    let (status, answer, _) = grammar(json!("auto"), "Just <b>text</b> about <tool_call.");
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("stop")), "{answer}");
}

#[test]
fn other_families_have_their_own_form() {
    let mistral = start(node(
        "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}]",
        "tools [TOOL_CALLS]",
    ));
    let body = || chat_body(json!({"tools": weather(), "tool_choice": "required"}));
    let (status, answer) = mistral.post("/v1/chat/completions", body());
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &Value::Null), "{answer}");
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "weather");
    let llama = start(node("{\"name\": \"weather\", \"parameters\": {\"city\": \"Oslo\"}}", "tools \"parameters\""));
    let (status, answer) = llama.post("/v1/chat/completions", body());
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("tool_calls")), "{answer}");
}

#[test]
fn thoughts_are_separate_from_the_answer() {
    let server = start(node("<think>\nhm\n</think>\n\nYes.", "<think>"));
    let (status, answer) = server.post("/v1/chat/completions", chat_body(json!({})));
    assert_eq!(status, 200, "{answer}");
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Yes."), &json!("hm")));
    let message = assembled(&server.events("/v1/chat/completions", chat_body(json!({"stream": true}))));
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Yes."), &json!("\nhm\n")));
    // A model that thinks may do so before a structured answer.
    let server = start(node("<think>hm</think>\n{\"a\": 1}", "<think>"));
    let (status, answer) =
        server.post("/v1/chat/completions", chat_body(json!({"response_format": {"type": "json_object"}})));
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!("{\"a\": 1}")), "{answer}");
}

#[test]
fn an_answer_keeps_to_its_schema_or_fails() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    let body = |extra: Value| {
        chat_body(json!({"response_format": format})).as_object_mut().map(|body| {
            body.extend(extra.as_object().unwrap().clone());
            Value::Object(body.clone())
        })
    };
    let good = start(node("{\"a\": 12}", ""));
    let (status, answer) = good.post("/v1/chat/completions", body(json!({})).unwrap());
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!("{\"a\": 12}")), "{answer}");
    for script in ["{\"b\": 1}", "{\"a\": 1", "{\"a\":1}", "hello"] {
        let bad = start(node(script, ""));
        let (status, answer) = bad.post("/v1/chat/completions", body(json!({})).unwrap());
        assert_eq!(status, 503, "{script}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("grammar"), "{answer}");
    }
    let cut = start(FakeNode { done: DoneReason::Length, ..node("{\"a\": 1", "") });
    let (status, answer) = cut.post("/v1/chat/completions", body(json!({})).unwrap());
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("length")), "{answer}");
    let lark = start(node("yes", ""));
    let completion = json!({"model": "tiny", "prompt": "?", "grammar": "start: \"yes\" | \"no\""});
    assert_eq!(lark.post("/v1/completions", completion).1["choices"][0]["text"], "yes");
}

/// A client that resumes gets the rest of a call, whatever part of it it has received.
#[test]
fn a_resumed_stream_of_calls_loses_nothing() {
    let script = "Well.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    let server = start(node(script, HERMES));
    let body = chat_body(json!({"tools": weather(), "stream": true})).to_string();
    let (_, _, first) = server.call(&keyed("/v1/chat/completions", "k"), &body);
    let whole = idempotency::events(&first);
    for at in 0..whole.len() {
        let last = whole[at].0.to_string();
        let (status, _, rest) = server.call(&idempotency::resuming("/v1/chat/completions", "k", &last), &body);
        assert_eq!(status, 200, "{rest}");
        let received = whole[..=at].iter().cloned().chain(idempotency::events(&rest));
        let message = assembled(&received.map(|(_, data)| data).collect::<Vec<_>>());
        assert_eq!(
            (&message["content"], &message["finish_reason"]),
            (&json!("Well."), &json!("tool_calls")),
            "after {last}"
        );
        assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1, "after {last}");
    }
}
