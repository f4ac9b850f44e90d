//! Tests of OpenAI's Responses API against a fake node that writes a fixed answer.
use super::idempotency::named_events;
use super::*;

const HERMES: &str = "tools <tool_call>";
const CALLS: &str =
    "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";

fn node(script: &'static str, template: &'static str) -> FakeNode {
    FakeNode { template, context: 4096, ..FakeNode::generating(script) }
}

fn body(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "input": "Hi", "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([{"type": "function", "name": "weather", "description": "Now", "parameters": city, "strict": true}])
}

fn streamed(server: &Server, mut request: Value) -> Vec<(Option<u64>, String, Value)> {
    request["stream"] = json!(true);
    let (status, head, text) = server.call("POST /v1/responses", &request.to_string());
    assert_eq!(status, 200, "{text}");
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    let events = named_events(&text);
    for (at, (_, name, data)) in events.iter().enumerate() {
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(at)), "{data}");
    }
    events
}

/// The output items that the events of a stream add up to.
fn assembled(events: &[(Option<u64>, String, Value)]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    let mut done = 0;
    for (_, name, data) in events {
        let at = data["output_index"].as_u64().unwrap_or_default() as usize;
        match name.as_str() {
            "response.output_item.added" => {
                assert_eq!((at, done), (items.len(), items.len()), "one item is open at a time");
                assert_eq!(data["item"]["status"], "in_progress");
                items.push(data["item"].clone());
            }
            "response.content_part.added" => items[at]["content"] = json!([data["part"]]),
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                assert_eq!(items[at]["id"], data["item_id"]);
                let text = &mut items[at]["content"][0]["text"];
                *text = json!(text.as_str().unwrap().to_owned() + data["delta"].as_str().unwrap());
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(items[at]["content"][0]["text"], data["text"]);
            }
            "response.content_part.done" => assert_eq!(items[at]["content"][0], data["part"]),
            "response.function_call_arguments.delta" => items[at]["arguments"] = data["delta"].clone(),
            "response.function_call_arguments.done" => assert_eq!(items[at]["arguments"], data["arguments"]),
            "response.output_item.done" => {
                done += 1;
                items[at]["status"] = data["item"]["status"].clone();
                assert_eq!(items[at], data["item"]);
            }
            _ => {}
        }
    }
    items
}

#[test]
fn a_response_has_items_status_and_usage() {
    let server = start(node("Hello.", ""));
    let (status, answer) = server.post("/v1/responses", body(json!({"instructions": "Be brief.", "store": true})));
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"), "{answer}");
    let item = &answer["output"][0];
    let text = json!({"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []});
    assert_eq!(
        (&item["type"], &item["role"], &item["content"]),
        (&json!("message"), &json!("assistant"), &json!([text]))
    );
    assert_eq!((&answer["usage"]["input_tokens"], &answer["usage"]["total_tokens"]), (&json!(25), &json!(31)));
    assert_eq!((&answer["store"], &answer["instructions"]), (&json!(false), &json!("Be brief.")));
    assert_eq!((&answer["tool_choice"], &answer["temperature"]), (&json!("auto"), &json!(0.0)));
    assert_eq!(prompt(&server), "<system>Be brief.<user>Hi");
    assert_eq!(server.engine.requests.lock()[0].max_tokens, 4096 - 25, "the rest of the context");
}

#[test]
fn a_streamed_response_has_openais_events_in_order() {
    let server = start(node(CALLS, HERMES));
    let events = streamed(&server, body(json!({"tools": weather()})));
    let mut names: Vec<&str> = events.iter().map(|(_, name, _)| name.strip_prefix("response.").unwrap()).collect();
    names.dedup();
    let expected = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(names, expected);
    let ids: Vec<u64> = events.iter().map(|(id, _, _)| id.unwrap()).collect();
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
    assert_eq!(
        (&events[0].2["response"]["status"], &events[0].2["response"]["output"]),
        (&json!("in_progress"), &json!([]))
    );
}

#[test]
fn a_stream_adds_up_to_the_whole_response() {
    let length = DoneReason::Length;
    for (script, template, done, extra) in [
        ("naïve", "", DoneReason::Stop, json!({})),
        ("", "", DoneReason::Stop, json!({})),
        ("<think>hm</think>\nYes.", "<think>", DoneReason::Stop, json!({})),
        ("<think>hm", "<think>", length.clone(), json!({"max_output_tokens": 9})),
        (CALLS, HERMES, DoneReason::Stop, json!({"tools": weather(), "metadata": {"a": "b"}})),
        ("abc", "", length, json!({"max_output_tokens": 3})),
    ] {
        let server = start(FakeNode { done: done.clone(), ..node(script, template) });
        let key = |path: &str| keyed(path, "k");
        let (_, _, whole) = server.call(&key("/v1/responses"), &body(extra.clone()).to_string());
        let whole: Value = serde_json::from_str(&whole).unwrap();
        let other = start(FakeNode { done, ..node(script, template) });
        let mut request = body(extra);
        request["stream"] = json!(true);
        let (_, _, text) = other.call(&key("/v1/responses"), &request.to_string());
        let events = named_events(&text);
        let mut last = events.last().unwrap().2["response"].clone();
        last["created_at"] = whole["created_at"].clone();
        assert_eq!(last, whole, "{script}");
        assert_eq!(json!(assembled(&events)), whole["output"], "{script}");
    }
}

#[test]
fn an_answer_that_is_cut_off_is_incomplete() {
    let server = start(FakeNode { done: DoneReason::Length, ..node("<think>hm</think>abc", "<think>") });
    let (_, answer) = server.post("/v1/responses", body(json!({"max_output_tokens": 20})));
    assert_eq!(
        (&answer["status"], &answer["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let statuses: Vec<&Value> = answer["output"].as_array().unwrap().iter().map(|item| &item["status"]).collect();
    assert_eq!(statuses, ["completed", "incomplete"]);
    assert_eq!(answer["output"][0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["output_tokens"], &usage["output_tokens_details"]["reasoning_tokens"]),
        (&json!(20), &json!(11))
    );
    let events = streamed(&server, body(json!({})));
    assert_eq!(events.last().unwrap().1, "response.incomplete");
}

#[test]
fn a_conversation_of_items_reaches_the_template() {
    let server = start(node("Rain.", HERMES));
    let input = json!([
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{\"city\": \"Oslo\"}"},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "no city"}]},
    ]);
    let request = body(json!({"tools": weather(), "input": input, "instructions": "You help."}));
    let (status, answer) = server.post("/v1/responses", request);
    assert_eq!(status, 200, "{answer}");
    let seen = prompt(&server);
    assert!(seen.starts_with("<tool>{\"type\":\"function\",\"function\":{\"name\":\"weather\""), "{seen}");
    assert!(
        seen.contains("<system>You help.\nBe brief.<user>Weather?<assistant>Let me see.<call>{\"id\":\"a\""),
        "{seen}"
    );
    assert!(
        seen.contains("\"arguments\":{\"city\":\"Oslo\"}}") && seen.contains("<call>{\"id\":\"b\""),
        "as an object: {seen}"
    );
    assert!(seen.ends_with("<tool>rain<tool>no city"), "{seen}");
}

#[test]
fn a_choice_of_tools_or_a_format_becomes_a_grammar() {
    let grammar = |script, extra: Value| {
        let server = start(node(script, HERMES));
        let (status, answer) = server.post("/v1/responses", body(extra));
        let requests = server.engine.requests.lock();
        (status, answer, requests.last().and_then(|request| request.sampling.grammar.clone()))
    };
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    for choice in [json!("required"), json!({"type": "function", "name": "weather"})] {
        let request = json!({"tools": weather(), "tool_choice": choice, "parallel_tool_calls": false});
        let (status, answer, text) = grammar(call, request);
        assert_eq!(status, 200, "{answer}");
        let item = &answer["output"][0];
        assert_eq!((&item["type"], &item["name"]), (&json!("function_call"), &json!("weather")));
        assert_eq!((&item["arguments"], &answer["tools"]), (&json!("{\"city\":\"Oslo\"}"), &weather()));
        assert_eq!(item["call_id"].as_str().unwrap().len(), 9, "the length that Mistral's templates require");
        assert!(text.unwrap().contains("weather"));
    }
    assert_eq!(grammar("Hi", json!({"tools": weather(), "tool_choice": "none"})).2, None);
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "name": "x", "strict": true, "schema": schema}});
    let (status, answer, _) = grammar("{\"a\": 12}", json!({"text": format}));
    assert_eq!((status, &answer["output"][0]["content"][0]["text"]), (200, &json!("{\"a\": 12}")), "{answer}");
    assert_eq!(grammar("{\"b\": 1}", json!({"text": format})).0, 503, "the fake node left the schema");
    assert!(grammar("{}", json!({"text": {"format": {"type": "json_object"}}})).2.is_some());
}

#[test]
fn errors_name_the_place() {
    let server = start(node("x", HERMES));
    let user = |part: Value| json!({"input": [{"role": "user", "content": [part]}]});
    let call = json!({"type": "function_call", "call_id": "a", "name": "f", "arguments": {}});
    for (extra, place) in [
        (user(json!({"type": "input_image", "image_url": "x"})), "input[0].content[0]"),
        (user(json!({"type": "input_text"})), "input[0].content[0].text"),
        (json!({"input": [{"role": "narrator", "content": "x"}]}), "input[0].role"),
        (json!({"input": [{"role": "user"}]}), "input[0].content"),
        (json!({"input": [call]}), "input[0].arguments"),
        (json!({"input": [{"type": "function_call_output", "output": "x"}]}), "input[0].call_id"),
        (json!({"input": [{"type": "item_reference", "id": "msg_1"}]}), "input[0]"),
        (json!({"input": [{"type": "web_search_call", "id": "x"}]}), "input[0]"),
        (json!({"input": []}), "input"),
        (json!({"input": null}), "input"),
        (json!({"input": [{"role": "user", "content": "x".repeat(5000)}]}), "input"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0]"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "function", "name": "f", "parameters": []}]}), "tools[0].parameters"),
        (json!({"tool_choice": "often"}), "tool_choice"),
        (json!({"tool_choice": {"type": "web_search_preview"}}), "tool_choice"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {"$ref": "#/$defs/a"}}}}), "text.format"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"prompt": {"id": "pmpt_1"}}), "prompt"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
    ] {
        let (status, answer) = server.post("/v1/responses", body(extra.clone()));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(place)), "{extra} gave {answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(!message.contains("function.") && !message.contains("response_format"), "{message}");
    }
    let again = server.post("/v1/responses", body(json!({"previous_response_id": "resp_1"}))).1;
    assert!(again["error"]["message"].as_str().unwrap().contains("send the items"), "{again}");
    for extra in [
        json!({"user": "me", "include": [], "truncation": "auto", "reasoning": {"effort": "low"}, "top_logprobs": 0}),
        json!({"tools": null, "text": {"verbosity": "low"}, "previous_response_id": null, "stream_options": null}),
    ] {
        let (status, answer) = server.post("/v1/responses", body(extra.clone()));
        assert_eq!(status, 200, "{extra} gave {answer}");
    }
}

#[test]
fn a_failure_in_mid_stream_ends_with_a_failed_response() {
    let server = start(FakeNode { done: DoneReason::Failed("a stage died".into()), ..node("abc", "") });
    let events = streamed(&server, body(json!({})));
    let (id, name, data) = events.last().unwrap();
    assert_eq!((id, name.as_str()), (&None, "response.failed"), "a client that resumes continues after the last token");
    assert_eq!(data["response"]["error"], json!({"code": "server_error", "message": "a stage died"}));
    assert_eq!(data["response"]["status"], "failed");
}

/// Repeated by the same node or generated again by another, the events before and after the reconnection are those of the
/// unbroken stream.
#[test]
fn a_stream_of_items_resumes_after_any_event() {
    let script = "<think>é</think>Well.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    let nodes = || start(node(script, "tools <tool_call> <think>"));
    let here = nodes();
    let request = body(json!({"tools": weather(), "stream": true})).to_string();
    // Each node has its own clock.
    let events = |text: &str| {
        let mut events = named_events(text);
        events.iter_mut().filter(|event| event.2["response"].is_object()).for_each(|(_, _, data)| {
            data["response"]["created_at"] = json!(0);
        });
        events
    };
    let whole = events(&here.call(&keyed("/v1/responses", "k"), &request).2);
    assert!(whole.len() > 15, "{whole:?}");
    for at in 0..whole.len() {
        let last = whole[at].0.unwrap().to_string();
        for (server, replays) in [(&here, true), (&nodes(), false)] {
            let (status, head, rest) = server.call(&idempotency::resuming("/v1/responses", "k", &last), &request);
            assert_eq!((status, head.contains("idempotent-replayed: true")), (200, replays), "{rest}");
            assert_eq!(events(&rest), whole[at + 1..], "after {last}");
        }
    }
}

/// Each text has the log-probabilities of its own tokens, without those of the thoughts.
#[test]
fn texts_have_their_log_probabilities() {
    let server = start(node("<think>hm</think>Hé.", "<think>"));
    let asks = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let (status, whole) = server.post("/v1/responses", body(asks.clone()));
    assert_eq!((status, &whole["top_logprobs"]), (200, &json!(2)), "{whole}");
    let content = &whole["output"][1]["content"][0];
    let tokens: Vec<&str> =
        content["logprobs"].as_array().unwrap().iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, ["H", "\u{fffd}", "\u{fffd}", "."]);
    assert_eq!(content["logprobs"][0]["top_logprobs"][1], json!({"token": "B", "logprob": -2.0, "bytes": [66]}));
    let events = streamed(&server, body(asks));
    let of = |name: &str| events.iter().filter(|event| event.1 == name).map(|event| &event.2).collect::<Vec<_>>();
    let deltas: Vec<Value> = of("response.output_text.delta")
        .iter()
        .flat_map(|data| data["logprobs"].as_array().cloned().unwrap())
        .collect();
    assert_eq!(json!(deltas), content["logprobs"]);
    assert_eq!(of("response.output_text.done")[0]["logprobs"], content["logprobs"]);
    assert_eq!(of("response.completed")[0]["response"]["output"][1]["content"][0], *content);
    let (_, plain) = server.post("/v1/responses", body(json!({})));
    assert_eq!(plain["output"][1]["content"][0]["logprobs"], json!([]));
}
