"""Structured output as clients ask for it; the texts of a random model obey, and bad grammars are 400."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

HELLO: list[Any] = [{"role": "user", "content": "Say something."}]
KINDS = ["cat", "dog \u2603"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": KINDS}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}


class Animal(BaseModel):
    kind: Literal["cat", "dog \u2603"]
    legs: Literal[2, 4]


def check_animal(text: str) -> None:
    animal = json.loads(text)
    assert list(animal) == ["kind", "legs"]
    assert animal["kind"] in KINDS
    assert 0 <= animal["legs"] <= 9


def test_parse_gives_the_users_own_class(client):
    answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Animal, seed=2)
    assert isinstance(answer.choices[0].message.parsed, Animal)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_json_schema_streamed_and_whole(client, strictly, seed):
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "response_format": FORMAT, "seed": seed}
    answer = client.chat.completions.create(**asked, n=3)
    strictly(ChatCompletion, answer)
    for choice in answer.choices:
        check_animal(choice.message.content)
        assert choice.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content


def test_the_sdks_stream_reader_parses(client):
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 1, "response_format": Animal}
    with client.chat.completions.stream(**asked) as stream:
        assert [event.parsed for event in stream if event.type == "content.done"]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Animal)


def test_json_object(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, seed=4, logit_bias={"125": 100}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[ab]{4}c"}, "[ab]{4}c"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= [0-9] "x"'}, "[0-9]x"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
        ({"json": '{"enum": [1, 2]}', "disable_any_whitespace": True, "new_field": 1}, "[12]"),
    ],
)
def test_vllms_spelling(client, form, pattern):
    body = {"structured_outputs": form}
    chat = client.chat.completions.create(model="tiny", messages=HELLO, extra_body=body)
    plain = client.completions.create(model="tiny", prompt="A", max_tokens=50, extra_body=body)
    for text in (chat.choices[0].message.content, plain.choices[0].text):
        assert re.fullmatch(pattern, text)


def schema_format(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **more}}}


def structured(more: dict[str, Any] | None = None, **form: Any) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": form, **(more or {})}}


MANY = " | ".join(f'"{i}" end' for i in range(2500)) + '\nend ::= "." | "," end'


def test_a_grammar_that_fails_in_mid_answer_ends_it_with_error(client):
    body = structured(grammar=f'root ::= "x" more\nmore ::= "y" more | "z" many\nmany ::= {MANY}')
    chat = client.chat.completions.create(model="tiny", messages=HELLO, **body)
    plain = client.completions.create(model="tiny", prompt="A", max_tokens=50, **body)
    for choice, text in (
        (chat.choices[0], chat.choices[0].message.content),
        (plain.choices[0], plain.choices[0].text),
    ):
        assert choice.finish_reason == "error"
        assert re.fullmatch("xy*z", text)
    *_, last = client.completions.create(model="tiny", prompt="A", max_tokens=50, stream=True, **body)
    assert last.choices[0].finish_reason == "error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (schema_format(), "response_format.json_schema.schema"),
        (schema_format(schema={"type": "y"}), "response_format"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        (structured(regex="("), "structured_outputs.regex"),
        (structured(regex="a", choice=["a"]), "structured_outputs"),
        (structured(), "structured_outputs"),
        (structured(choice=[]), "structured_outputs.choice"),
        (structured(json="{"), "structured_outputs.json"),
        (structured(grammar="start: nowhere"), "structured_outputs.grammar"),
        (
            structured(grammar="root ::= " + " | ".join(f'"{i}"' for i in range(2500))),
            "structured_outputs.grammar",
        ),
        (structured({"min_tokens": 3}, regex="a"), "min_tokens"),
        ({**structured(regex="a"), "response_format": {"type": "json_object"}}, None),
    ],
)
def test_mistakes_are_400_and_named_before_a_stream_begins(client, changes, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream, **changes)
    assert caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]
    assert caught.value.param == param
