"""Tests the embeddings of a node with OpenAI's own client. Usage: openai_embeddings.py BASE_URL MODEL

Prints one line per check; exits with an error at the first failed check.
"""

import math
import sys

import openai

base_url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=300)


def check(name, condition, seen=""):
    print(f"{'ok' if condition else 'WRONG'}: {name} {seen!r}", flush=True)
    if not condition:
        sys.exit(1)


texts = ["Oslo is in Norway.", "Where is Oslo?", "fn main() {}"]
packed = client.embeddings.create(model=model, input=texts)  # the client asks for base64
rows = [entry.embedding for entry in packed.data]
lengths = [math.sqrt(sum(x * x for x in row)) for row in rows]
check("each text has an embedding of length 1", len(rows) == 3 and all(abs(1 - length) < 1e-5 for length in lengths), lengths)
check("they come in order", [entry.index for entry in packed.data] == [0, 1, 2])
check("usage counts the tokens", packed.usage.total_tokens == packed.usage.prompt_tokens > 3, packed.usage)

plain = client.embeddings.create(model=model, input=texts[1], encoding_format="float")
near = max(abs(a - b) for a, b in zip(plain.data[0].embedding, rows[1]))
check("a single text has the same embedding, as numbers", near < 1e-6, near)
short = client.embeddings.create(model=model, input=texts[1], dimensions=64).data[0].embedding
scale = math.sqrt(sum(x * x for x in rows[1][:64]))
check("leading elements", len(short) == 64 and max(abs(a - b / scale) for a, b in zip(short, rows[1])) < 1e-5)

for name, call in {
    "a chat is refused": lambda: client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}]),
    "too many dimensions are refused": lambda: client.embeddings.create(model=model, input="a", dimensions=100_000),
}.items():
    try:
        call()
        check(name, False)
    except openai.BadRequestError as error:
        check(name, True, error.message)

print("all ok")
