"""Bodies nested ever deeper are refused before anything descends into them; templates fail as requests do."""

from __future__ import annotations

from typing import Any

import pytest

from qinfer.server.open_body import MAX_DEPTH, check_depth

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": HELLO, "max_tokens": 1}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"messages": HELLO},
    "/detokenize": {"tokens": [72]},
}


def nested(depth: int, kind: str = "object") -> Any:
    value: Any = {} if kind == "object" else []
    for _ in range(depth - 1):
        value = {"a": value} if kind == "object" else [value]
    return value


@pytest.mark.parametrize("kind", ["object", "list"])
def test_the_depth_is_that_of_objects_and_lists(kind):
    check_depth(nested(MAX_DEPTH, kind))
    for deeper in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match=f"more than {MAX_DEPTH}"):
            check_depth(nested(deeper, kind))
    check_depth([1, "[[[", {"a": [{}]}, None])


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 900])
@pytest.mark.parametrize("path", ROUTES)
def test_a_deep_body_is_400_on_every_route(served, path, depth):
    error = served.post(path, {**ROUTES[path], "x": nested(depth)}).json()["error"]
    assert error["code"] == 400
    assert error["message"].endswith("objects and lists within each other are not read")


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"x": nested(MAX_DEPTH - 3)}},
        {"documents": [{"title": "a", "text": "b", "x": nested(MAX_DEPTH - 4)}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(MAX_DEPTH - 5)}}]},
    ],
)
def test_what_is_let_in_is_read_without_fail(served, more):
    assert served.post("/v1/chat/completions", {**CHAT, **more, "tool_choice": "none"}).status_code == 200


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 900, 100_000])
def test_arguments_of_a_past_call_are_a_body_of_their_own(served, depth):
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, *HELLO]
    error = served.post("/v1/chat/completions", {**CHAT, "messages": turns}).json()["error"]
    assert (error["code"], error["param"]) == (400, "messages.1.tool_calls.0.function.arguments")


@pytest.mark.parametrize("name", ["self", "messages", "tokenize", "conversation"])
def test_a_variable_of_a_template_may_not_be_called_like_an_argument(served, name):
    error = served.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: 1}}).json()["error"]
    assert (error["code"], error["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ [].pop() }}",
        "{{ {}['a'].b }}",
        "{{ messages | sum }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_fails_of_is_the_requests_fault(serve_scripted, template):
    with serve_scripted(trust_request_chat_template=True) as served:
        error = served.post("/v1/chat/completions", {**CHAT, "chat_template": template}).json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")


def test_documents_and_effort_are_the_templates(serve_scripted):
    template = "{{ documents[0].title }} {{ reasoning_effort }}"
    body = {
        "documents": [{"title": "Tea", "text": "hot"}],
        "reasoning_effort": "low",
        "include_reasoning": True,
    }
    with serve_scripted(trust_request_chat_template=True) as served:
        asked = {**CHAT, **body, "chat_template": template, "return_token_ids": True}
        answer = served.post("/v1/chat/completions", asked)
        assert "x-qinfer-ignored" not in answer.headers
        assert answer.json()["prompt_token_ids"] == served.engine.tokenizer.encode("Tea low")
