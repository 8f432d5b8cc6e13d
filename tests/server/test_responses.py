"""Responses of scripted answers: text beside calls, failures in mid-stream, and what is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qinfer.server.errors import ApiError
from qinfer.server.response_store import ResponseStore

PATH = "/v1/responses"
TOOLS: list[Any] = [{"type": "function", "name": "get"}, {"type": "function", "name": "put"}]
TWO_CALLS = (
    'Wait.\n<tool_call>\n{"name": "get", "arguments": {"city": "Ö"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
)


def events_of(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def shape(item: dict[str, Any]) -> tuple[str, ...]:
    if item["type"] == "message":
        return "message", item["status"], item["content"][0]["text"]
    return "function_call", item["status"], item["name"], item["arguments"]


def test_text_and_calls_are_items_of_their_own(serve_scripted, tokenizer):
    ids = [*tokenizer.encode(TWO_CALLS), max(tokenizer.eos_token_ids)]
    with serve_scripted(script=lambda prompt, choice: ids, tool_call_parser="hermes") as served:
        served.scripted.seconds_per_step = 0.002
        whole = served.post(PATH, {"input": "x", "tools": TOOLS}).json()
        events = events_of(served.post(PATH, {"input": "x", "tools": TOOLS, "stream": True}))
        kept = served.get(f"{PATH}/{whole['id']}").json()
    expected = [
        ("message", "completed", "Wait."),
        ("function_call", "completed", "get", '{"city": "Ö"}'),
        ("function_call", "completed", "put", "{}"),
    ]
    assert [shape(item) for item in whole["output"]] == expected
    assert [shape(item) for item in events[-1]["response"]["output"]] == expected
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [shape(event["item"]) for event in done] == expected
    assert [event["output_index"] for event in done] == [0, 1, 2]
    assert kept == whole
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert added[0]["content"] == []
    assert [item["arguments"] for item in added[1:]] == ["", ""]


def test_h08_a_failure_in_mid_stream_is_one_error_event(serve_scripted):
    with serve_scripted() as served:
        served.scripted.fail_at_step = 5
        served.scripted.seconds_per_step = 0.01
        events = events_of(served.post(PATH, {"input": "x", "stream": True}))
    assert [event["type"] for event in events].count("error") == 1
    assert events[-1]["type"] == "error"
    assert events[-1]["code"] == "500"
    assert events[-1]["sequence_number"] == len(events) - 1
    assert "secret" not in json.dumps(events)


def test_an_empty_answer_is_an_empty_message(serve_scripted, tokenizer):
    with serve_scripted(script=lambda prompt, choice: [max(tokenizer.eos_token_ids)]) as served:
        answer = served.post(PATH, {"input": "x"}).json()
        events = events_of(served.post(PATH, {"input": "x", "stream": True}))
    assert [shape(item) for item in answer["output"]] == [("message", "completed", "")]
    assert events[-1]["type"] == "response.completed"
    assert "response.output_item.done" in [event["type"] for event in events]


def test_any_text_of_a_model_may_be_built_on(serve_scripted, tokenizer):
    nul = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\x00")
    ids = [65, nul, 66, max(tokenizer.eos_token_ids)]
    with serve_scripted(script=lambda prompt, choice: ids) as served:
        first = served.post(PATH, {"input": "x"}).json()
        second = served.post(PATH, {"input": "y", "previous_response_id": first["id"]})
    assert first["output"][0]["content"][0]["text"] == "A\x00B"
    text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nAB<|im_end|>\n"
    text += "<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    assert second.json()["usage"]["input_tokens"] == len(tokenizer.encode(text))


def test_calls_are_part_of_the_conversation(serve_scripted, tokenizer):
    ids = [*tokenizer.encode(TWO_CALLS), max(tokenizer.eos_token_ids)]
    with serve_scripted(script=lambda prompt, choice: ids, tool_call_parser="hermes") as served:
        first = served.post(PATH, {"input": "x", "tools": TOOLS}).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "12"} for call in calls
        ]
        body = {"input": results, "previous_response_id": first["id"], "tools": TOOLS}
        assert served.post(PATH, body).status_code == 200


@pytest.mark.parametrize("role", ["developer", "system"])
def test_a_developer_is_the_system_to_templates_that_know_none(served, role):
    item = {"type": "message", "role": role, "content": [{"type": "input_text", "text": "Be brief."}]}
    answer = served.post(PATH, {"input": [item], "max_output_tokens": 1}).json()
    prompt = served.engine.tokenizer.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer["usage"]["input_tokens"] == len(prompt)


def test_fields_of_chat_arrive(served):
    served.post(PATH, {"input": "x", "seed": 7, "top_k": 3, "stop": "zz", "max_output_tokens": 2, "n": 5})
    (params,) = served.scripted.seen
    assert (params.seed, params.top_k, params.stop_strings, params.n) == (7, 3, ("zz",), 1)


def test_tools_that_the_client_does_not_run_are_left_out(served):
    body = {"input": "x", "max_output_tokens": 1, "tools": [{"type": "web_search"}]}
    assert served.post(PATH, body).json()["tools"] == []


def test_the_store_forgets_the_oldest():
    store = ResponseStore(max_chars=100)
    for i in range(5):
        store.put({"id": str(i), "text": "x" * 20}, [])
    assert store.get("4").body["id"] == "4"
    for i in (0, 1, 2):
        with pytest.raises(ApiError):
            store.get(str(i))
    store.delete("4")
    with pytest.raises(ApiError):
        store.get("4")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", '{"a": %s}'),
        ("tools", '[{"type": "function", "name": "f", "parameters": {"const": %s}}]'),
        ("tool_choice", '{"type": "function", "name": "f", "x": %s}'),
        ("text", '{"format": {"type": "json_schema", "schema": {"const": %s}}}'),
    ],
)
def test_what_a_response_repeats_is_json(served, field, value, number):
    body = f'{{"input": "Hello", "max_output_tokens": 1, "{field}": {value % number}}}'
    answer = served.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
