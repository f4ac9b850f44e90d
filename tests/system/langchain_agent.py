"""Runs LangChain's agent on a node: it calls a tool and answers with the result. Usage: langchain_agent.py BASE_URL MODEL

The test's model is too small to choose well, so the first answer must be a call, and the next one text. Prints one line per
check; exits with an error at the first failed check.
"""

import sys
from typing import Annotated

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.messages import ToolMessage
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import Field

base_url, model = sys.argv[1:3]
asked = []


def check(name, condition, seen=""):
    print(f"{'ok' if condition else 'WRONG'}: {name} {seen!r}", flush=True)
    if not condition:
        sys.exit(1)


@tool
def stock(item: Annotated[str, Field(max_length=20)]) -> str:
    """The number of pieces of an item in the warehouse."""
    asked.append(item)
    return "There are 17 pieces."


@wrap_model_call
def call_once(request, handler):
    has_result = any(isinstance(message, ToolMessage) for message in request.messages)
    # Strict: without fields of its own, which a small model would invent.
    settings = {**request.model_settings, "strict": True}
    return handler(request.override(tool_choice="none" if has_result else "stock", model_settings=settings))


def run(use_responses_api):
    asked.clear()
    llm = ChatOpenAI(
        base_url=base_url, model=model, api_key="unused", temperature=0, max_tokens=60, max_retries=0, timeout=300,
        use_responses_api=use_responses_api,
    )
    agent = create_agent(llm, [stock], system_prompt="You look up items in a warehouse.", middleware=[call_once])
    messages = agent.invoke({"messages": [{"role": "user", "content": "How many bolts are there?"}]})["messages"]
    kinds = [message.type for message in messages]
    name = "responses" if use_responses_api else "chat completions"
    check(f"{name}: the agent calls the tool and answers", kinds == ["human", "ai", "tool", "ai"], kinds)
    call = messages[1].tool_calls[0]
    check(f"{name}: the tool has run once", asked == [call["args"]["item"]], call)
    check(f"{name}: the result belongs to the call", messages[2].tool_call_id == call["id"], messages[2])
    check(f"{name}: the last answer is text", messages[3].text and not messages[3].tool_calls, messages[3].text)
    usage = messages[1].usage_metadata
    check(f"{name}: tokens are counted", usage["input_tokens"] > 0 and usage["output_tokens"] > 0, usage)


run(use_responses_api=False)
run(use_responses_api=True)
print("all ok")
