"""Tests a node with OpenAI's own client, as a user's program would use it. Usage: openai_client.py BASE_URL MODEL

Prints one line per check; exits with an error at the first failed check.
"""

import concurrent.futures
import json
import sys

import openai

base_url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=300)
question = [{"role": "user", "content": "Name the capital of France."}]


def check(name, condition, seen=""):
    print(f"{'ok' if condition else 'WRONG'}: {name} {seen!r}", flush=True)
    if not condition:
        sys.exit(1)


models = client.models.list().data
check("the model is listed", [m.id for m in models] == [model], [m.id for m in models])
check("the model is retrieved", client.models.retrieve(model).id == model)

whole = client.chat.completions.create(model=model, messages=question, max_tokens=24, temperature=0)
text = whole.choices[0].message.content
check("a chat completes", "Paris" in text, text)
usage = whole.usage
check("usage adds up", usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > usage.prompt_tokens, usage)
check("the finish reason is set", whole.choices[0].finish_reason in ("stop", "length"), whole.choices[0].finish_reason)

stream = client.chat.completions.create(
    model=model, messages=question, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
check("a stream has the same text", streamed == text, streamed)
check("the role comes first", chunks[0].choices[0].delta.role == "assistant")
check("the last chunk has the usage", chunks[-1].choices == [] and chunks[-1].usage == usage, chunks[-1].usage)

parts = [{"role": "user", "content": [{"type": "text", "text": question[0]["content"]}]}]
again = client.chat.completions.create(model=model, messages=parts, max_completion_tokens=24, temperature=0)
check("content in parts gives the same text", again.choices[0].message.content == text)

word = text.split()[2]
stopped = client.chat.completions.create(model=model, messages=question, max_tokens=24, temperature=0, stop=[word])
check("a stop string ends the text", stopped.choices[0].message.content == text[: text.index(word)], stopped.choices[0].message.content)
check("a stop string sets the finish reason", stopped.choices[0].finish_reason == "stop")

plain = client.completions.create(model=model, prompt="The capital of France is", max_tokens=5, temperature=0)
check("a completion continues the prompt", plain.choices[0].text.strip() != "" and plain.usage.completion_tokens <= 5, plain.choices[0].text)
short = client.completions.create(model=model, prompt="One two three four", max_tokens=2, temperature=0)
check("max_tokens is respected", short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 2, short.usage)
pieces = client.completions.create(model=model, prompt="The capital of France is", max_tokens=5, temperature=0, stream=True)
check("a streamed completion has the same text", "".join(c.choices[0].text for c in pieces) == plain.choices[0].text)

seeded = [
    client.chat.completions.create(
        model=model, messages=question, max_tokens=16, temperature=1, top_p=0.9, seed=seed, extra_body={"top_k": 50}
    ).choices[0].message.content
    for seed in (7, 7, 8, 9, 10)
]
check("the same seed gives the same text", seeded[0] == seeded[1], seeded)
check("other seeds differ", len(set(seeded)) > 1)

with concurrent.futures.ThreadPoolExecutor(6) as pool:
    ask = lambda _: client.chat.completions.create(model=model, messages=question, max_tokens=24, temperature=0)
    answers = {a.choices[0].message.content for a in pool.map(ask, range(6))}
check("six concurrent clients get the same text", answers == {text}, answers)

ask = {"model": model, "max_tokens": 5, "temperature": 0}
likely = client.chat.completions.create(messages=question, logprobs=True, top_logprobs=3, **ask)
entries = likely.choices[0].logprobs.content
check("every token has its log-probability", len(entries) == likely.usage.completion_tokens == 5, entries)
check("the tokens are the text", "".join(entry.token for entry in entries) == likely.choices[0].message.content)
greedy = all(len(e.top_logprobs) == 3 and e.top_logprobs[0].token == e.token and e.logprob <= 0 for e in entries)
check("a greedy answer takes the most likely tokens", greedy, entries)
chunks = list(client.chat.completions.create(messages=question, logprobs=True, top_logprobs=3, stream=True, **ask))
streamed = [e for c in chunks for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
check("a stream has the same log-probabilities", streamed == entries)
old = client.completions.create(prompt="The capital of France is", logprobs=2, **ask).choices[0].logprobs
check("a completion has them, too", len(old.tokens) == len(old.token_logprobs) == 5 and len(old.top_logprobs[0]) == 2, old)

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
as_schema = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}}


def animal(seed):
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Invent an animal."}], max_tokens=80, temperature=1, seed=seed,
        response_format=as_schema,
    ).choices[0]
    value = json.loads(answer.message.content)
    fits = set(value) == {"name", "age", "kind"} and 1 <= len(value["name"]) <= 12 and 0 <= value["age"] <= 120
    return fits and value["kind"] in ("cat", "dog") and answer.finish_reason == "stop", answer.message.content


with concurrent.futures.ThreadPoolExecutor(4) as pool:
    animals = list(pool.map(animal, range(200)))
check("200 answers match their schema", all(fits for fits, _ in animals), [text for fits, text in animals if not fits])
check("their contents vary", len({text for _, text in animals}) > 50)
listed = client.chat.completions.create(
    model=model, messages=question, max_tokens=40, temperature=0, response_format={"type": "json_object"}
)
check("any JSON object", listed.choices[0].message.content.startswith("{"), listed.choices[0].message.content)

tools = [
    {"type": "function", "function": {"name": "weather", "description": "The weather in a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"], "additionalProperties": False,
    }}},
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"], "additionalProperties": False,
    }}},
]
about = [{"role": "user", "content": "What is the weather in Oslo?"}]
chosen = client.chat.completions.create(
    model=model, messages=about, tools=tools, max_tokens=80, temperature=0,
    tool_choice={"type": "function", "function": {"name": "weather"}},
).choices[0]
call = chosen.message.tool_calls[0]
check("a tool of choice is called", (chosen.finish_reason, call.function.name) == ("tool_calls", "weather"), chosen)
check("its arguments match its schema", set(json.loads(call.function.arguments)) == {"city", "unit"}, call.function.arguments)
answer = client.chat.completions.create(
    model=model, tools=tools, max_tokens=30, temperature=0, tool_choice="none",
    messages=about + [chosen.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "7 C, rain"}],
).choices[0]
check("the result is answered", answer.message.content and answer.finish_reason in ("stop", "length"), answer.message.content)
pieces = list(client.chat.completions.create(
    model=model, messages=about, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=80, temperature=0, stream=True
))
calls = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
check("a required call is streamed", len(calls) == 1 and pieces[-1].choices[0].finish_reason == "tool_calls", calls)
check("its arguments are JSON", isinstance(json.loads(calls[0].function.arguments), dict), calls[0].function.arguments)
free = client.chat.completions.create(model=model, messages=about, tools=tools, max_tokens=60, temperature=0).choices[0]
check("tools may be left alone", free.finish_reason in ("stop", "length", "tool_calls"), free)

response = client.responses.create(model=model, input=question[0]["content"], max_output_tokens=24, temperature=0)
check("a response has the same text", response.output_text == text and response.status == "completed", response.output_text)
counts = (response.usage.input_tokens, response.usage.output_tokens)
check("a response has the same usage", counts == (usage.prompt_tokens, usage.completion_tokens), response.usage)
with client.responses.stream(model=model, input=question, max_output_tokens=24, temperature=0) as stream:
    events = list(stream)
    final = stream.get_final_response()
streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
check("a streamed response has the same text", streamed == text == final.output_text, streamed)
check("its events are numbered", [event.sequence_number for event in events] == list(range(len(events))))
check("its events are in order", [event.type for event in events[:4]] == ["response.created", "response.in_progress",
      "response.output_item.added", "response.content_part.added"] and events[-1].type == "response.completed")
short = client.responses.create(model=model, input=question, max_output_tokens=2, temperature=0)
check("a response is incomplete", (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens"), short)
flat = [{"type": "function", **tool["function"]} for tool in tools]
chosen = client.responses.create(
    model=model, input=about, tools=flat, max_output_tokens=80, temperature=0, tool_choice={"type": "function", "name": "weather"}
)
call = chosen.output[-1]
check("a response calls the tool of choice", (call.type, call.name) == ("function_call", "weather"), chosen.output)
check("its arguments match the schema", set(json.loads(call.arguments)) == {"city", "unit"}, call.arguments)
answer = client.responses.create(
    model=model, tools=flat, max_output_tokens=30, temperature=0, tool_choice="none",
    input=about + chosen.output + [{"type": "function_call_output", "call_id": call.call_id, "output": "7 C, rain"}],
)
check("the call's output is answered", answer.output_text, answer.output)
with client.responses.stream(
    model=model, input=about, tools=flat, tool_choice="required", parallel_tool_calls=False, max_output_tokens=80, temperature=0
) as stream:
    required = stream.get_final_response()
check("a required call is streamed as an item", [item.type for item in required.output] == ["function_call"], required.output)
structured = client.responses.create(
    model=model, input="Invent an animal.", max_output_tokens=80, temperature=0,
    text={"format": {"type": "json_schema", "name": "animal", "strict": True, "schema": schema}},
)
check("a response matches its schema", set(json.loads(structured.output_text)) == {"name", "age", "kind"}, structured.output_text)

abandoned = client.chat.completions.create(model=model, messages=question, max_tokens=400, stream=True)
next(abandoned)
abandoned.close()


def rejected(name, error, create=client.chat.completions.create, **request):
    conversation = {"input": question} if create == client.responses.create else {"messages": question, "max_tokens": 4}
    try:
        create(**{"model": model, **conversation, **request})
    except error as e:
        check(name, "message" in (e.body or {}), e.body)
    else:
        check(name, False, "the request was accepted")


rejected("an unknown model", openai.NotFoundError, model="gpt-4o")
rejected("too many log-probabilities", openai.BadRequestError, logprobs=True, top_logprobs=21)
rejected("too many choices", openai.BadRequestError, n=65)
rejected("an impossible schema", openai.BadRequestError, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}})
rejected("a tool without a name", openai.BadRequestError, tools=[{"type": "function", "function": {}}])
rejected("a hot temperature", openai.BadRequestError, temperature=9)
rejected("a prompt beyond the context", openai.BadRequestError, messages=[{"role": "user", "content": "word " * 20000}])
rejected("a stored response", openai.BadRequestError, client.responses.create, previous_response_id="resp_1")
rejected("a built-in tool", openai.BadRequestError, client.responses.create, tools=[{"type": "web_search"}])
print("all ok")
