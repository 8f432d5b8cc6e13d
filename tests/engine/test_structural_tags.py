"""Structural tags: free text, and from a trigger on a structure that nothing leaves before its end."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from qinfer.engine.engine import Engine
from qinfer.engine.structured import Grammars
from qinfer.errors import UserError
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.structural_tags import Tag, parse_tags
from qinfer.structured_outputs import StructuredOutputsParams
from qinfer.testing import FakeRunner
from qinfer.tokenizer import Tokenizer

MakeEngine = Callable[..., Engine]
Generate = Callable[..., dict[str, RequestOutput]]
NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
NUMBER |= {"additionalProperties": False}


def tag(begin: str, end: str = "</f>", schema: Any = NUMBER) -> dict[str, Any]:
    return {"begin": begin, "schema": schema, "end": end}


TAGS = {"structures": [tag("<f=get>"), tag("<f=bär>", "")], "triggers": ["<f="]}


@pytest.fixture(scope="module")
def grammars(byte_level_folder: Any) -> Grammars:
    return Grammars(Tokenizer.load(byte_level_folder), 384)


def accepts(grammars: Grammars, text: str, **form: Any) -> bool:
    """Whether an answer may be this text, whole."""
    assert grammars._tokenizer is not None
    ids = grammars._tokenizer.encode(text, add_special_tokens=False)
    matcher = grammars.compile(StructuredOutputsParams(**form)).deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("", True),
        ("Nothing is\ncalled.", True),
        ('Well: <f=get>{"a": 3}</f> and <f=get>{"a":4}</f>', True),
        ('<f=bär>{"a": 3}<f=get>{"a": 4}</f>', True),
        ("a <f but not the trigger", True),
        ("<f=put>", False),
        ('<f=get>{"a": 3}', False),
        ('<f=get>{"b": 3}</f>', False),
        ('<f=get>{"a": 100}</f>', False),
    ],
)
def test_text_is_free_and_structures_are_not(grammars: Grammars, text: str, is_one: bool) -> None:
    assert accepts(grammars, text, structural_tag=TAGS) is is_one
    assert accepts(grammars, text, structural_tag=json.dumps(TAGS)) is is_one


def test_a_trigger_may_be_a_special_token(grammars: Grammars) -> None:
    tags = {"structures": [tag("<|im_start|>call ", "")], "triggers": ["<|im_start|>"]}
    assert accepts(grammars, 'x <|im_start|>call {"a": 1} y', structural_tag=tags)
    assert not accepts(grammars, "x <|im_start|>user", structural_tag=tags)


def test_spacing_is_bounded_or_none(grammars: Grammars) -> None:
    wide = '<f=get>{"a":' + " " * 40 + "1}</f>"
    assert not accepts(grammars, wide, structural_tag=TAGS)
    tight = {"structural_tag": TAGS, "disable_any_whitespace": True}
    assert accepts(grammars, '<f=get>{"a":1}</f>', **tight)
    assert not accepts(grammars, '<f=get>{"a": 1}</f>', **tight)


def test_a_model_that_begins_one_ends_it(make_engine: MakeEngine, generate: Generate) -> None:
    wish = list(b'Hm. <f=get>{"wrong": true} and on and on')
    engine = make_engine(runner=FakeRunner(384, wish))
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(structural_tag=TAGS),
    )
    text = generate(engine, [[65]], params)["0"].outputs[0].text
    assert text.startswith("Hm. <f=get>{")
    called = text.removeprefix("Hm. <f=get>").split("</f>")[0]
    assert list(json.loads(called)) == ["a"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "is no valid JSON"),
        ([], "is an object"),
        ({}, "needs structures"),
        ({**TAGS, "structures": [{}] * 300}, "a list of 1 to 256"),
        ({**TAGS, "triggers": []}, "needs triggers"),
        ({**TAGS, "triggers": [""]}, "needs triggers"),
        ({**TAGS, "structures": [tag("<g>")]}, "begins with none of its triggers"),
        ({**TAGS, "structures": [{"schema": {}, "end": ""}]}, "without a begin"),
        ({**TAGS, "structures": [{"begin": "<f=x>", "schema": {}}]}, "without an end"),
        ({**TAGS, "structures": [tag("<f=x>", schema=5)]}, "schema is no object"),
        ({**TAGS, "structures": [tag("<f=\ud800>")]}, "not valid Unicode"),
    ],
)
def test_what_is_no_structural_tag(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        StructuredOutputsParams(structural_tag=given)
    assert raised.value.parameter == "structural_tag"


def test_trees_of_formats_are_absent_and_say_so() -> None:
    with pytest.raises(NotImplementedError, match=r"structured_outputs\.structural_tag\.format"):
        parse_tags({"format": {"type": "any_text"}})


def test_the_trigger_of_a_structure_is_one_that_it_begins_with() -> None:
    tags = parse_tags({"structures": [tag("<g=x>")], "triggers": ["<f=", "<g="]})
    assert tags == (Tag("<g=", "<g=x>", NUMBER, "</f>"),)
