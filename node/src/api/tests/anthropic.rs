//! Tests of Anthropic's Messages API against a fake node that writes a fixed answer.
use super::idempotency::named_events;
use super::*;

const HERMES: &str = "tools <tool_call>";
const CALLS: &str =
    "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";

fn node(script: &'static str, template: &'static str) -> FakeNode {
    FakeNode { template, context: 4096, ..FakeNode::generating(script) }
}

fn body(extra: Value) -> Value {
    let mut body =
        json!({"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([{"name": "weather", "description": "Now", "input_schema": city}])
}

/// The message that the events of a stream add up to, put together as Anthropic's client does it.
fn assembled(events: &[(Option<u64>, String, Value)]) -> Value {
    let mut message = Value::Null;
    let mut json = String::new();
    let mut open = None;
    for (_, name, data) in events {
        assert_eq!(data["type"], name.as_str());
        let at = data["index"].as_u64().map(|at| at as usize);
        match name.as_str() {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                assert_eq!((open, at), (None, message["content"].as_array().map(Vec::len)), "{data}");
                open = at;
                message["content"].as_array_mut().unwrap().push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(open, at, "{data}");
                let (block, delta) = (&mut message["content"][at.unwrap()], &data["delta"]);
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "input_json_delta" => {
                        json.push_str(delta["partial_json"].as_str().unwrap());
                        continue;
                    }
                    other => panic!("{other}"),
                };
                block[field] = json!(block[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap());
            }
            "content_block_stop" => {
                assert_eq!(open.take(), at, "{data}");
                if !json.is_empty() {
                    message["content"][at.unwrap()]["input"] = serde_json::from_str(&json).unwrap();
                    json.clear();
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                message["stop_reason"] = data["delta"]["stop_reason"].clone();
                message["stop_sequence"] = data["delta"]["stop_sequence"].clone();
                message["usage"]["output_tokens"] = data["usage"]["output_tokens"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

fn streamed(server: &Server, mut request: Value) -> Vec<(Option<u64>, String, Value)> {
    request["stream"] = json!(true);
    let (status, head, text) = server.call("POST /v1/messages", &request.to_string());
    assert_eq!(status, 200, "{text}");
    assert!(head.contains("content-type: text/event-stream") && head.contains("\r\nrequest-id: req-"), "{head}");
    named_events(&text)
}

#[test]
fn a_message_has_blocks_reason_and_usage() {
    let server = start(node("Hello.", ""));
    let (status, answer) = server.post("/v1/messages", body(json!({"system": "Be brief."})));
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["type"], &answer["role"]), (&json!("message"), &json!("assistant")));
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"), "{answer}");
    assert_eq!(answer["content"], json!([{"type": "text", "text": "Hello."}]));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    assert_eq!((&answer["usage"]["input_tokens"], &answer["usage"]["output_tokens"]), (&json!(25), &json!(6)));
    assert_eq!(prompt(&server), "<system>Be brief.<user>Hi");
    assert_eq!(server.engine.requests.lock()[0].max_tokens, 1000);
}

#[test]
fn a_streamed_message_has_anthropics_events_in_order() {
    let server = start(node(
        "<think>hm</think>Hi\n<tool_call>{\"name\": \"weather\"}</tool_call> Bye",
        "tools <tool_call> <think>",
    ));
    let events = streamed(&server, body(json!({"tools": weather(), "tool_choice": {"type": "none"}})));
    let mut names: Vec<&str> = events.iter().map(|(_, name, _)| name.as_str()).collect();
    names.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected = [&["message_start"][..], &block, &block, &["message_delta", "message_stop"]].concat();
    assert_eq!(names, expected, "without tools the call is text");
    let ids: Vec<u64> = events.iter().map(|(id, _, _)| id.unwrap()).collect();
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");

    let request = body(json!({"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}));
    let whole = start(node(
        "<think>hm</think>Hi\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>",
        HERMES,
    ));
    let events = streamed(&whole, request);
    let kinds: Vec<&str> = events.iter().filter_map(|(_, _, data)| data["content_block"]["type"].as_str()).collect();
    assert_eq!(kinds, ["text", "tool_use"], "this model does not think");
}

#[test]
fn a_stream_adds_up_to_the_whole_message() {
    let thinking = "<think>hm</think>\nYes.";
    for (script, template, extra) in [
        ("naïve", "", json!({})),
        ("", "", json!({})),
        (thinking, "<think>", json!({})),
        (CALLS, HERMES, json!({"tools": weather()})),
        ("one. two. three", "", json!({"stop_sequences": ["zzz", ". th"]})),
    ] {
        let server = start(node(script, template));
        let (status, mut whole) = server.post("/v1/messages", body(extra.clone()));
        assert_eq!(status, 200, "{whole}");
        let mut message = assembled(&streamed(&server, body(extra)));
        for message in [&mut whole, &mut message] {
            message["id"] = Value::Null; // of the request's key
            message["content"].as_array_mut().unwrap().iter_mut().for_each(|block| block["id"] = Value::Null);
        }
        assert_eq!(message, whole, "{script}");
    }
}

#[test]
fn reasons_to_stop_are_anthropics() {
    let reason = |node: FakeNode, extra: Value| {
        let (status, answer) = start(node).post("/v1/messages", body(extra));
        assert_eq!(status, 200, "{answer}");
        (answer["stop_reason"].as_str().unwrap().to_owned(), answer["stop_sequence"].clone(), answer["content"].clone())
    };
    let text = |text: &str| json!([{"type": "text", "text": text}]);
    let cut = FakeNode { done: DoneReason::Length, ..node("abc", "") };
    assert_eq!(reason(cut, json!({})), ("max_tokens".into(), Value::Null, text("abc")));
    let stopped = reason(node("one. two. three", ""), json!({"stop_sequences": ["zzz", ". th"]}));
    assert_eq!(stopped, ("stop_sequence".into(), json!(". th"), text("one. two")));
    let (why, _, content) = reason(node(CALLS, HERMES), json!({"tools": weather()}));
    assert_eq!((why.as_str(), &content[0]), ("tool_use", &text("Let me see.")[0]));
    let call = &content[1];
    assert_eq!(
        (&call["type"], &call["name"], &call["input"]),
        (&json!("tool_use"), &json!("weather"), &json!({"city": "Oslo"}))
    );
    assert_eq!(call["id"].as_str().unwrap().len(), 9, "the length that Mistral's templates require");
}

#[test]
fn a_conversation_with_tools_reaches_the_template() {
    let server = start(node("Rain.", HERMES));
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "7 C"}, {"type": "text", "text": "rain"}]},
            {"type": "tool_result", "tool_use_id": "b", "content": "no city", "is_error": true},
            {"type": "text", "text": "So?"},
        ]},
        {"role": "user", "content": "Well?"},
    ]);
    let system = json!([{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]);
    let (status, answer) =
        server.post("/v1/messages", body(json!({"tools": weather(), "messages": messages, "system": system})));
    assert_eq!(status, 200, "{answer}");
    let seen = prompt(&server);
    let start = "<tool>{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":{\"type\":\"object\"";
    assert!(seen.starts_with(start) && seen.contains("\"description\":\"Now\""), "{seen}");
    assert!(seen.contains("<system>One.\nTwo.<user>Weather?<assistant>Let me see.<call>{\"id\":\"a\""), "{seen}");
    assert!(seen.contains("\"function\":{\"name\":\"weather\",\"arguments\":{\"city\":\"Oslo\"}}"), "{seen}");
    assert!(seen.ends_with("<tool>7 C\nrain<tool>Error: no city<user>So?\nWell?"), "{seen}");
}

#[test]
fn a_choice_of_tools_or_a_schema_becomes_a_grammar() {
    let grammar = |script, extra: Value| {
        let server = start(node(script, HERMES));
        let (status, answer) = server.post("/v1/messages", body(extra));
        let requests = server.engine.requests.lock();
        (status, answer, requests.last().and_then(|request| request.sampling.grammar.clone()))
    };
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "weather"})] {
        let (status, answer, text) = grammar(call, json!({"tools": weather(), "tool_choice": choice}));
        assert_eq!((status, &answer["stop_reason"]), (200, &json!("tool_use")), "{answer}");
        assert!(text.unwrap().contains("weather"));
        let (status, answer, _) = grammar("no call", json!({"tools": weather(), "tool_choice": choice}));
        assert_eq!((status, &answer["error"]["type"]), (503, &json!("api_error")), "the fake node left the grammar");
    }
    let several = |disabled: bool| {
        let choice = json!({"type": "any", "disable_parallel_tool_use": disabled});
        grammar(call, json!({"tools": weather(), "tool_choice": choice})).2.unwrap()
    };
    assert_ne!(several(true), several(false));
    assert_eq!(grammar("Hi", json!({"tools": weather(), "tool_choice": {"type": "none"}})).2, None);
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "schema": schema}});
    let (status, answer, _) = grammar("{\"a\": 12}", json!({"output_config": format}));
    assert_eq!((status, &answer["content"][0]["text"]), (200, &json!("{\"a\": 12}")), "{answer}");
}

#[test]
fn tokens_are_counted_without_generating() {
    let server = start(FakeNode::generating("x"));
    let request = json!({"model": "tiny", "system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(server.post("/v1/messages/count_tokens", request), (200, json!({"input_tokens": 25})));
    let long = json!({"model": "tiny", "messages": [{"role": "user", "content": "x".repeat(1000)}]});
    assert_eq!(server.post("/v1/messages/count_tokens", long).1["input_tokens"], 1006, "also beyond the context");
    assert!(server.engine.requests.lock().is_empty());
}

#[test]
fn errors_have_anthropics_form_and_name_the_place() {
    let server = start(node("x", HERMES));
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}});
    for (extra, place) in [
        (user(image.clone()), "messages[0].content[0]"),
        (
            user(json!({"type": "tool_result", "tool_use_id": "a", "content": [image]})),
            "messages[0].content[0].content[0]",
        ),
        (user(json!({"type": "tool_result"})), "messages[0].content[0].tool_use_id"),
        (user(json!({"type": "tool_use", "id": "a", "name": "b", "input": {}})), "messages[0].content[0]"),
        (user(json!({"type": "text", "text": 5})), "messages[0].content[0].text"),
        (user(json!({})), "messages[0].content[0].type"),
        (json!({"messages": [{"role": "narrator", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": 5}), "messages"),
        (json!({"system": [{"type": "image"}]}), "system[0]"),
        (json!({"system": 5}), "system"),
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"stop_sequences": [""]}), "stop_sequences[0]"),
        (json!({"stop_sequences": vec!["x"; 17]}), "stop_sequences"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0]"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (
            json!({"tools": [{"name": "f", "input_schema": {"type": "objekt"}}], "tool_choice": {"type": "any"}}),
            "tools[0].input_schema",
        ),
        (json!({"tool_choice": {"type": "required"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (
            json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}),
            "tool_choice.disable_parallel_tool_use",
        ),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type"),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema"),
        (
            json!({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/$defs/a"}}}}),
            "output_config.format",
        ),
    ] {
        let (status, answer) = server.post("/v1/messages", body(extra.clone()));
        assert_eq!((status, &answer["type"]), (400, &json!("error")), "{extra} gave {answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error", "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(place), "{extra}: {place} is not in: {message}");
        assert!(!message.contains("function") && !message.contains("response_format"), "{message}");
    }
    for extra in [
        json!({"metadata": {"user_id": "me"}, "thinking": {"type": "enabled", "budget_tokens": 1024}, "top_k": 5, "top_p": 0.9}),
        json!({"system": null, "tools": [], "stop_sequences": [], "service_tier": "auto", "output_config": {"effort": "low"}}),
    ] {
        let (status, answer) = server.post("/v1/messages", body(extra.clone()));
        assert_eq!(status, 200, "{extra} gave {answer}");
    }
    let kind = |line: &str, body: &str| {
        let (status, _, text) = server.call(line, body);
        (status, serde_json::from_str::<Value>(&text).unwrap()["error"]["type"].as_str().unwrap().to_owned())
    };
    let unknown = body(json!({"model": "claude"})).to_string();
    assert_eq!(kind("POST /v1/messages", &unknown), (404, "not_found_error".into()));
    assert_eq!(kind("GET /v1/messages", ""), (405, "invalid_request_error".into()));
    assert_eq!(kind("POST /v1/messages/batches", "{}"), (404, "not_found_error".into()));
    assert_eq!(kind("POST /v1/messages", "{"), (400, "invalid_request_error".into()));
    let foreign = "POST /v1/messages\r\nOrigin: https://evil.example\r\n";
    assert_eq!(kind(foreign, &body(json!({})).to_string()), (403, "permission_error".into()));
    let busy = start(FakeNode { done: DoneReason::Busy, ..FakeNode::generating("") });
    let (status, head, text) = busy.call("POST /v1/messages", &body(json!({})).to_string());
    assert!(status == 429 && head.contains("retry-after: 1") && text.contains("rate_limit_error"), "{head}{text}");
}

#[test]
fn a_key_may_be_sent_as_anthropics_clients_do() {
    let server = start_with_key(FakeNode::generating("x"), Some("k"));
    let call = |headers: &str| server.call(&format!("POST /v1/messages\r\n{headers}"), &body(json!({})).to_string());
    assert_eq!(call("Authorization: \r\nx-api-key: k\r\n").0, 200);
    let (status, _, text) = call("Authorization: \r\nx-api-key: other\r\n");
    assert!(status == 401 && text.contains("\"type\":\"authentication_error\""), "{text}");
}

#[test]
fn a_failure_in_mid_stream_is_an_error_event() {
    let server = start(FakeNode { done: DoneReason::Failed("a stage died".into()), ..node("abc", "") });
    let events = streamed(&server, body(json!({})));
    let (id, name, data) = events.last().unwrap();
    assert_eq!((id, name.as_str()), (&None, "error"), "a client that resumes continues after the last token");
    assert_eq!(data["error"], json!({"type": "api_error", "message": "a stage died"}));
}

/// Repeated by the same node or generated again by another, the events before and after the reconnection are those of the
/// unbroken stream.
#[test]
fn a_stream_of_blocks_resumes_after_any_event() {
    let script = "<think>é</think>Well.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    let nodes = || start(node(script, "tools <tool_call> <think>"));
    let here = nodes();
    let request = body(json!({"tools": weather(), "stream": true})).to_string();
    let (_, _, text) = here.call(&keyed("/v1/messages", "k"), &request);
    let whole = named_events(&text);
    assert!(whole.len() > 10, "{text}");
    for at in 0..whole.len() {
        let last = whole[at].0.unwrap().to_string();
        for (server, replays) in [(&here, true), (&nodes(), false)] {
            let (status, head, rest) = server.call(&idempotency::resuming("/v1/messages", "k", &last), &request);
            assert_eq!((status, head.contains("idempotent-replayed: true")), (200, replays), "{rest}");
            assert_eq!(named_events(&rest), whole[at + 1..], "after {last}");
        }
    }
}
