"""Calls that a grammar demands of a random model, through the openai client; answers are valid JSON."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

HELLO: list[Any] = [{"role": "user", "content": "What is the weather?"}]
UNITS = ["C", 'F "x"']
WEATHER = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": UNITS}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time.now-1"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Answer(BaseModel):
    yes: bool


def check_call(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "time.now-1":
        assert found == {}
    else:
        assert name == "weather"
        assert found["unit"] in UNITS
        assert 1 <= found["days"] <= 9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parallel", [True, False])
def test_required(client, strictly, seed, parallel):
    # the closing bracket is made likely, so that the list of calls ends within the context
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": parallel, "seed": seed, "logit_bias": {"93": 3, "32": -5, "9": -5}}
    answer = client.chat.completions.create(**asked)
    strictly(ChatCompletion, answer)
    (choice,) = answer.choices
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    for call in calls:
        check_call(*call)
    assert parallel or len(calls) == 1
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    streamed: list[list[str]] = []
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id:
                streamed.append([call.function.name, ""])
            streamed[call.index][1] += call.function.arguments
    assert [tuple(call) for call in streamed] == calls
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("seed", range(3))
def test_named(client, strictly, seed):
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": NAMED}
    answer = client.chat.completions.create(**asked, seed=seed)
    strictly(ChatCompletion, answer)
    (call,) = answer.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)
    assert call.function.name == "weather"
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked, seed=seed) as stream:
        deltas = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(deltas) == call.function.arguments
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_parsed_arguments(client):
    tool = openai.pydantic_function_tool(Answer)
    choice: Any = {"type": "function", "function": {"name": "Answer"}}
    answer = client.chat.completions.parse(model="tiny", messages=HELLO, tools=[tool], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Answer)


def test_the_conversation_goes_on_with_the_tools_result(client):
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS}
    answer = client.chat.completions.create(**asked, messages=HELLO, tool_choice=NAMED, seed=1)
    message = answer.choices[0].message
    turns = [*HELLO, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12"}]
    more = client.chat.completions.create(**asked, messages=turns, tool_choice="none", max_tokens=5)
    assert more.choices[0].message.tool_calls is None
