"""Tests a node with Anthropic's own client, as a user's program would use it. Usage: anthropic_client.py BASE_URL MODEL

Prints one line per check; exits with an error at the first failed check.
"""

import sys

import anthropic

base_url, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0, timeout=300)
question = [{"role": "user", "content": "Name the capital of France."}]
# Newer clients have no argument of their own for it.
greedy = {"temperature": 0}


def check(name, condition, seen=""):
    print(f"{'ok' if condition else 'WRONG'}: {name} {seen!r}", flush=True)
    if not condition:
        sys.exit(1)


def ask(**request):
    return client.messages.create(**{"model": model, "max_tokens": 24, "messages": question, "extra_body": greedy, **request})


whole = ask()
text = whole.content[0].text
check("a message is answered", "Paris" in text and (whole.type, whole.role) == ("message", "assistant"), text)
check("usage is counted", whole.usage.input_tokens > 0 and 0 < whole.usage.output_tokens <= 24, whole.usage)
check("the stop reason is set", whole.stop_reason in ("end_turn", "max_tokens"), whole.stop_reason)
check("the request has an id", whole._request_id.startswith("req-"), whole._request_id)

with client.messages.stream(model=model, max_tokens=24, messages=question, extra_body=greedy) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
check("a stream has the same text", "".join(pieces) == text == final.content[0].text and len(pieces) > 3, pieces)
check("a stream has the same usage", (final.usage.input_tokens, final.usage.output_tokens) ==
      (whole.usage.input_tokens, whole.usage.output_tokens), final.usage)
names = [event.type for event in ask(stream=True)]
check("the events are in order", names[:2] + names[-3:] == ["message_start", "content_block_start", "content_block_stop",
      "message_delta", "message_stop"] and set(names[2:-3]) == {"content_block_delta"}, names)

blocks = [{"role": "user", "content": [{"type": "text", "text": question[0]["content"], "cache_control": {"type": "ephemeral"}}]}]
check("content in blocks gives the same text", ask(messages=blocks).content[0].text == text)
system = ask(system=[{"type": "text", "text": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}])
check("a system prompt is used", system.usage.input_tokens >= whole.usage.input_tokens, system.usage)
word = text.split()[2]
stopped = ask(stop_sequences=["never written", word])
check("a stop sequence ends the text", stopped.content[0].text == text[: text.index(word)], stopped.content)
check("the stop sequence is named", (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word), stopped)
short = ask(max_tokens=2)
check("max_tokens is respected", (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2), short.usage)

counted = client.messages.count_tokens(model=model, messages=question)
check("tokens are counted", counted.input_tokens == whole.usage.input_tokens, counted)

tools = [
    {"name": "weather", "description": "The weather in a city", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"], "additionalProperties": False,
    }},
    {"name": "add", "input_schema": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"], "additionalProperties": False,
    }},
]
about = [{"role": "user", "content": "What is the weather in Oslo?"}]
chosen = ask(messages=about, tools=tools, max_tokens=80, tool_choice={"type": "tool", "name": "weather"})
call = chosen.content[-1]
check("a tool of choice is called", (chosen.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather"), chosen)
check("its input matches its schema", set(call.input) == {"city", "unit"}, call.input)
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7 C, rain"}]}
conversation = about + [{"role": "assistant", "content": chosen.content}, {"role": "user", "content": [result]}]
answer = ask(messages=conversation, tools=tools, max_tokens=30, tool_choice={"type": "none"})
check("the result is answered", answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens"), answer.content)
choice = {"type": "any", "disable_parallel_tool_use": True}
with client.messages.stream(model=model, max_tokens=80, messages=about, tools=tools, tool_choice=choice, extra_body=greedy) as stream:
    parts = [event.partial_json for event in stream if event.type == "input_json"]
    required = stream.get_final_message()
uses = [block for block in required.content if block.type == "tool_use"]
check("a required call is streamed", len(uses) == 1 and required.stop_reason == "tool_use" and parts, required)
check("its input is an object", isinstance(uses[0].input, dict) and uses[0].input, uses[0].input)
more = client.messages.count_tokens(model=model, messages=about, tools=tools)
check("tools are counted", more.input_tokens > counted.input_tokens, more)


def rejected(name, error, kind, **request):
    try:
        ask(**{"max_tokens": 4, **request})
    except error as e:
        check(name, e.body["type"] == "error" and e.body["error"]["type"] == kind, e.body)
    else:
        check(name, False, "the request was accepted")


invalid = (anthropic.BadRequestError, "invalid_request_error")
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
rejected("an unknown model", anthropic.NotFoundError, "not_found_error", model="claude-x")
rejected("an image", *invalid, messages=[{"role": "user", "content": [image]}])
rejected("a server's tool", *invalid, tools=[{"type": "web_search_20250305", "name": "web_search"}])
rejected("an impossible schema", *invalid, tools=[{"name": "f", "input_schema": {"type": "nothing"}}], tool_choice={"type": "any"})
rejected("a prompt beyond the context", *invalid, messages=[{"role": "user", "content": "word " * 20000}])
print("all ok")
