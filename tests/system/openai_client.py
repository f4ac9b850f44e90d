"""Tests a node with OpenAI's own client, as a user's program would use it. Usage: openai_client.py BASE_URL MODEL

Prints one line per check; exits with an error at the first failed check.
"""

import concurrent.futures
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

abandoned = client.chat.completions.create(model=model, messages=question, max_tokens=400, stream=True)
next(abandoned)
abandoned.close()


def rejected(name, error, **request):
    try:
        client.chat.completions.create(**{"model": model, "messages": question, "max_tokens": 4, **request})
    except error as e:
        check(name, "message" in (e.body or {}), e.body)
    else:
        check(name, False, "the request was accepted")


rejected("an unknown model", openai.NotFoundError, model="gpt-4o")
rejected("log probabilities", openai.BadRequestError, logprobs=True)
rejected("several choices", openai.BadRequestError, n=2)
rejected("a hot temperature", openai.BadRequestError, temperature=9)
rejected("a prompt beyond the context", openai.BadRequestError, messages=[{"role": "user", "content": "word " * 20000}])
print("all ok")
