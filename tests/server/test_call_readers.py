"""Calls in a text: what readers make of it is the same in whatever pieces it comes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.server.call_object import CallObject
from qinfer.server.call_readers import ArrayReader, CallReader, HermesReader, JsonReader, NamedReader, Part

TOOLS = ["get", "put"]
Reading = tuple[str, list[tuple[str, str]]]


def read(make: Callable[[], CallReader], pieces: list[str]) -> Reading:
    """(content, calls as (name, arguments)); checks that names come first, once and alone."""
    reader = make()
    parts: list[Part] = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    content, calls = "", []
    for part in parts:
        assert part
        if isinstance(part, str):
            content += part
        elif part.name is not None:
            assert part.index == len(calls)
            assert part.arguments == ""
            calls.append([part.name, ""])
        else:
            assert part.index == len(calls) - 1
            calls[-1][1] += part.arguments
    return content, [(name, arguments) for name, arguments in calls]


def json_reader() -> JsonReader:
    return JsonReader(TOOLS)


A = '{"city": "x}\\"{ </tool_call>", "n": [1, {"a": null}]}'
HERMES = [
    ("Just text.\n", ("Just text.\n", [])),
    ("  ", ("  ", [])),
    ("a < b <tool", ("a < b <tool", [])),
    (f'<tool_call>\n{{"name": "get", "arguments": {A}}}\n</tool_call>', ("", [("get", A)])),
    (f'<tool_call>{{"arguments": {A}, "name": "get"}}</tool_call>', ("", [("get", A)])),
    (
        f'Wait.\n<tool_call>\n{{"name": "get", "arguments": {A}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "put", "arguments": {}}\n</tool_call> done',
        ("Wait. done", [("get", A), ("put", "{}")]),
    ),
    ('<tool_call>{"name": "get"}</tool_call>', ("", [("get", "{}")])),
    ('<tool_call>{"name": "get", "arguments": null}</tool_call>', ("", [("get", "{}")])),
    ('<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("get", '{"a": 1}')])),
    ('<tool_call>{"name": "get", "arguments": {"a": ', ("", [("get", '{"a": ')])),
    ('<tool_call>{"na', ('<tool_call>{"na', [])),
    ("<tool_call>nothing like it</tool_call>", ("<tool_call>nothing like it</tool_call>", [])),
    ('<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', [])),
    ('<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    ('<tool_call>{"name": "get", "arguments": {}} and', ("and", [("get", "{}")])),
]
JSON = [
    ("Just text.", ("Just text.", [])),
    ("", ("", [])),
    (f'{{"name": "get", "parameters": {A}}}', ("", [("get", A)])),
    (f'<|python_tag|>{{"name": "get", "parameters": {A}}}', ("", [("get", A)])),
    (
        f'\n{{"type": "function", "name": "get", "parameters": {A}}}; {{"name": "put", "parameters": {{}}}}',
        ("", [("get", A), ("put", "{}")]),
    ),
    ('{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    ('{"age": 3, "name": "Bob"} and so on', ('{"age": 3, "name": "Bob"} and so on', [])),
    (' {"a": 1}', (' {"a": 1}', [])),
    ("<|python_tag|>print(5)", ("<|python_tag|>print(5)", [])),
    ("<|pyth", ("<|pyth", [])),
    ('{"na', ('{"na', [])),
    ('{"name": "get", "parameters": {"a": ', ("", [("get", '{"a": ')])),
]
ARRAY = [
    (f'[{{"name": "get", "arguments": {A}}}]', ("", [("get", A)])),
    (
        f'[{{"name": "get", "arguments": {A}}}, {{"name": "put", "arguments": {{}}}}]',
        ("", [("get", A), ("put", "{}")]),
    ),
    ('[{"name": "get", "arguments": {"a', ("", [("get", '{"a')])),
    ('[{"na', ("", [])),
]
CASES = [
    *((HermesReader, text, expected) for text, expected in HERMES),
    *((json_reader, text, expected) for text, expected in JSON),
    *((ArrayReader, text, expected) for text, expected in ARRAY),
    (lambda: NamedReader("get"), A, ("", [("get", A)])),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_whole_and_by_the_character(make, text, expected):
    assert read(make, [text]) == expected
    assert read(make, list(text)) == expected
    for cut in range(len(text) + 1):
        assert read(make, [text[:cut], text[cut:]]) == expected


@given(st.data())
def test_arguments_of_any_json_come_out_as_they_went_in(data):
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    )
    arguments = data.draw(st.dictionaries(st.text(max_size=4), values, max_size=3))
    indent = data.draw(st.sampled_from([None, 1]))
    call = json.dumps({"x": arguments, "name": "get", "arguments": arguments}, indent=indent)
    text = f"<tool_call>\n{call}\n</tool_call>"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, ((name, written),) = read(HermesReader, pieces)
    assert (content, name) == ("", "get")
    assert json.loads(written) == arguments


def test_arguments_are_passed_on_while_they_are_written():
    reader = HermesReader()
    reader.feed('<tool_call>{"name": "get", "arguments": {"text": "')
    assert [part.arguments for part in reader.feed("long and ")] == ["long and "]


@pytest.mark.parametrize("text", ["[1]", "5", '{"a"}', '{"name": "x"]', '{5: "name"}', "{}"])
def test_what_is_no_call_is_broken(text):
    call = CallObject()
    call.feed(text + " ")
    assert call.is_broken
    assert not call.is_done
