"""Tools over HTTP: what is offered to the model, calls of scripted answers, and requests that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from qinfer.server.tools import parser_of

PATH = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get", "description": "Gets.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "put"}},
]
NAMED = {"type": "function", "function": {"name": "get"}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
TWO_CALLS = (
    'Wait.\n<tool_call>\n{"name": "get", "arguments": {"city": "Ö"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
)
LLAMA = '{"name": "get", "parameters": {"city": "Ö"}}; {"name": "put", "parameters": {}}'
CALLS = [("get", '{"city": "Ö"}'), ("put", "{}")]
# a template that shows tools and past calls
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "<{{ c['function']['name'] }} {{ c['function']['arguments']['city'] }}>{% endfor %};{% endfor %}"
)


@pytest.fixture
def saying(serve_scripted: Any, tokenizer: Any) -> Callable[..., Any]:
    """A context manager: a server whose model always says this text."""

    def start(text: str, **options: Any) -> Any:
        ids = [*tokenizer.encode(text), max(tokenizer.eos_token_ids)]
        return serve_scripted(script=lambda prompt, choice: ids, **options)

    return start


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]


def joined(chunks: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]], list[str | None]]:
    """Content, calls and finish reasons of a stream of one choice; checks the order of a call's pieces."""
    content, calls, reasons = "", [], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        reasons.append(choice["finish_reason"])
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert sorted(call) == ["function", "id", "index", "type"]
                assert call["id"].startswith("chatcmpl-tool-")
                assert call["function"]["arguments"] == ""
                assert call["index"] == len(calls)
                calls.append((call["function"]["name"], ""))
            else:
                assert sorted(call) == ["function", "index"]
                name, arguments = calls[call["index"]]
                calls[call["index"]] = name, arguments + call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    return content, calls, reasons


@pytest.mark.parametrize(
    ("parser", "text", "content"), [("hermes", TWO_CALLS, "Wait."), ("llama3_json", LLAMA, None)]
)
def test_auto_calls_whole_and_streamed(saying, parser, text, content):
    body = {"messages": HELLO, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    with saying(text, tool_call_parser=parser) as served:
        choice = served.post(PATH, body).json()["choices"][0]
        served.scripted.seconds_per_step = 0.002
        chunks = served.stream(PATH, body)
    assert choice["message"]["content"] == content
    assert calls_of(choice["message"]) == CALLS
    assert choice["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    assert all(sorted(call) == ["function", "id", "type"] for call in choice["message"]["tool_calls"])
    streamed, calls, reasons = joined(chunks)
    assert (streamed or None) == content
    assert calls == CALLS
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [t for part in parts for t in part.get("token_ids", ())] == choice["token_ids"]
    tokens = [e["token"] for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in choice["logprobs"]["content"]]


def test_without_parallel_calls_only_the_first_counts(saying):
    body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    with saying(TWO_CALLS, tool_call_parser="hermes") as served:
        assert calls_of(served.post(PATH, body).json()["choices"][0]["message"]) == CALLS[:1]
        assert joined(served.stream(PATH, body))[1] == CALLS[:1]


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tool_choice": "auto"}, {}])
def test_text_without_calls_is_content(saying, more):
    with saying("Just a <text>.\n", tool_call_parser="hermes") as served:
        body = {"messages": HELLO, "tools": TOOLS, **more}
        choice = served.post(PATH, body).json()["choices"][0]
        chunks = served.stream(PATH, body)
    assert choice["message"] == {"role": "assistant", "content": "Just a <text>.\n", "refusal": None}
    assert choice["finish_reason"] == "stop"
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == "Just a <text>.\n"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_ends_with_length(saying, tokenizer):
    text = '<tool_call>{"name": "get", "arguments": {"city": "' + "0" * 50
    with saying(text, tool_call_parser="hermes") as served:
        body = {"messages": HELLO, "tools": TOOLS, "max_tokens": len(tokenizer.encode(text)) - 10}
        choice = served.post(PATH, body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert calls_of(choice["message"]) == [("get", '{"city": "' + "0" * 40)]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [(None, "[get][put]"), ("auto", "[get][put]"), ("required", "[get][put]"), ("none", "")],
)
def test_the_template_shows_the_tools_and_past_calls(serve_scripted, choice, shown):
    past = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ]
    body = {"messages": messages, "tools": TOOLS, "chat_template": TEMPLATE, "tool_choice": choice}
    body |= {"max_tokens": 1, "return_token_ids": True}
    with serve_scripted(trust_request_chat_template=True, tool_call_parser="hermes") as served:
        answer = served.post(PATH, body)
        prompt = served.engine.tokenizer.decode(answer.json()["prompt_token_ids"])
    assert prompt == f"{shown}user:Hello;assistant:<get Rome>;tool:12;"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ('{% if tools %}{{ \'{"name": f, "parameters": arguments}\' }}{% endif %}', "llama3_json"),
        ("{{ messages }}", "none"),
    ],
)
def test_the_parser_follows_the_template(template, parser):
    assert parser_of(template) == parser


def test_auto_without_a_known_form_says_what_to_do(served):
    answer = served.post(PATH, {"messages": HELLO, "tools": TOOLS, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
    assert served.post(PATH, body).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": []}, None),
        ({"tools": None, "tool_choice": "required"}, None),
        ({"tools": None, "tool_choice": NAMED}, None),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, None),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, None),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": ["get"]}, "tools.0"),
        ({"tools": TOOLS * 200}, "tools"),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [BAD_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tools"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_mistakes_are_400_and_named(served, changes, param):
    body = {"messages": HELLO, "tools": TOOLS, "stream": True, **changes}
    answer = served.post(PATH, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "\n" not in error["message"]
    assert served.scripted.seen == []


def test_tools_with_a_form_of_the_text_that_is_no_json_are_not_there(serve_scripted):
    body = {"messages": HELLO, "tools": TOOLS, "structured_outputs": {"regex": "a"}}
    with serve_scripted(tool_call_parser="hermes") as served:
        assert served.post(PATH, body).status_code == 501


ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def test_auto_with_a_form_leaves_json_or_calls(serve_scripted, tokenizer):
    schema = {**ANSWER, "additionalProperties": False}
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 1}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with serve_scripted(tool_call_parser="hermes") as served:
        assert served.post(PATH, body).status_code == 200
        (params,) = served.scripted.seen
        matcher = served.scripted.grammars.compile(params.structured_outputs)
    for text in ('{"ok": true}', '<tool_call>\n{"name": "get", "arguments": {"city": "x"}}\n</tool_call>'):
        trial = matcher.deep_copy()
        assert trial.consume_tokens(tokenizer.encode(text)), text
        assert trial.is_accepting()
    for text in ("ok", '{"name": "get"', '<tool_call>\n{"name": "set"'):
        assert not matcher.deep_copy().consume_tokens(tokenizer.encode(text)), text
    with serve_scripted(tool_call_parser="llama3_json") as served:
        assert served.post(PATH, body).status_code == 501


def test_the_template_may_be_counted_with_tools(serve_scripted):
    with serve_scripted(trust_request_chat_template=True) as served:
        body = {"messages": HELLO, "tools": TOOLS, "chat_template": TEMPLATE}
        assert served.post("/tokenize", body).json()["tokens"] == served.engine.tokenizer.encode(
            "[get][put]user:Hello;"
        )


def test_arguments_reach_the_client_while_they_are_written(saying):
    text = '<tool_call>{"name": "get", "arguments": {"city": "' + "x" * 30 + '"}}</tool_call>'
    with saying(text, tool_call_parser="hermes") as served:
        served.scripted.seconds_per_step = 0.005
        chunks = served.stream(PATH, {"messages": HELLO, "tools": TOOLS})
    pieces = [
        call["function"]["arguments"]
        for c in chunks
        for call in c["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert len(pieces) > 10
    assert json.loads("".join(pieces)) == {"city": "x" * 30}
