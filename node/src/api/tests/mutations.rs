//! Bodies that are wrong in one place: they are rejected with the form of their API, and nothing panics.
use super::*;

/// What stands for a value.
fn others() -> [Value; 9] {
    [
        json!(null),
        json!(true),
        json!(-1),
        json!(1.5),
        json!("x"),
        json!([]),
        json!({}),
        json!([[5]]),
        json!([{"type": "x"}]),
    ]
}

/// The JSON pointers to all values below `value`.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Array(list) => list.iter().enumerate().map(|(i, child)| (i.to_string(), child)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, child)| (name.clone(), child)).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    };
    for (name, child) in children {
        let place = format!("{at}/{name}");
        places(child, &place, found);
        found.push(place);
    }
}

fn bodies() -> Vec<(&'static str, Value)> {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let function = json!({"name": "weather", "description": "Now", "parameters": schema});
    let call = json!({"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}});
    let chat = json!({
        "model": "tiny", "max_tokens": 9, "stop": ["z"], "temperature": 0, "logit_bias": {"7": 1},
        "messages": [
            {"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "d"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    });
    let messages = json!({
        "model": "tiny", "max_tokens": 9, "stop_sequences": ["z"], "top_k": 5, "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "c", "signature": ""}, {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "e"}], "is_error": false},
            ]},
        ],
        "tools": [{"name": "weather", "description": "Now", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": true},
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    });
    let mut counted = messages.clone();
    for field in ["max_tokens", "stop_sequences", "top_k"] {
        counted.as_object_mut().unwrap().remove(field);
    }
    let responses = json!({
        "model": "tiny", "max_output_tokens": 9, "instructions": "a", "metadata": {"k": "v"}, "reasoning": {"effort": "low"},
        "input": [
            {"role": "developer", "content": "b"}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}], "content": [{"type": "reasoning_text", "text": "e"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "f"}]},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": schema}],
        "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": {"type": "json_schema", "name": "x", "strict": true, "schema": schema}},
    });
    vec![
        ("/v1/chat/completions", chat),
        ("/v1/messages", messages),
        ("/v1/messages/count_tokens", counted),
        ("/v1/responses", responses),
    ]
}

#[test]
fn a_wrong_value_anywhere_is_answered_in_the_form_of_its_api() {
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    let server = start(FakeNode { template: "tools <tool_call>", context: 4096, ..FakeNode::generating(call) });
    for (path, body) in bodies() {
        let (status, answer) = server.post(path, body.clone());
        assert_eq!(status, 200, "{path}: {answer}");
        let mut found = Vec::new();
        places(&body, "", &mut found);
        assert!(found.len() > 30, "{path}: {found:?}");
        for place in found {
            for other in others() {
                let mut wrong = body.clone();
                *wrong.pointer_mut(&place).unwrap() = other.clone();
                let (status, answer) = server.post(path, wrong);
                let context = format!("{path}: {other} at {place} gave {status} {answer}");
                assert!(!answer["error"]["message"].as_str().unwrap_or_default().contains("panicked"), "{context}");
                match status {
                    200 => assert!(answer["error"].is_null(), "{context}"),
                    // A schema that the fake node's fixed answer does not match.
                    503 => assert!(answer.to_string().contains("grammar"), "{context}"),
                    400 | 404 => {
                        let error = &answer["error"];
                        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{context}");
                        assert_eq!(path.starts_with("/v1/messages"), answer["type"] == "error", "{context}");
                    }
                    _ => panic!("{context}"),
                }
            }
        }
    }
}
