"""Structured output: the bits of a grammar by brute force, and texts of random models that obey it."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qinfer.engine import sampler, structured
from qinfer.engine.engine import Engine
from qinfer.engine.structured import Grammars, constrain
from qinfer.errors import UserError
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.structured_outputs import StructuredOutputsParams
from qinfer.testing import FakeRunner

MakeEngine = Callable[..., Engine]
Generate = Callable[..., dict[str, RequestOutput]]
VOCAB = 384
COLOURS = ["red", "red\n\"green'", "blé", "the|se(.*)\x01", "\U0001f600"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y z"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def asks(seed: int = 0, max_tokens: int = 200, n: int = 1, **form: Any) -> SamplingParams:
    return SamplingParams(
        seed=seed, max_tokens=max_tokens, n=n, structured_outputs=StructuredOutputsParams(**form)
    )


def allowed(engine: Engine, request_id: str = "0") -> list[set[int]]:
    """Ids that the grammar leaves to each sequence of a request."""
    sequences = engine._roster.requests[request_id].sequences
    rows = constrain(torch.zeros(len(sequences), VOCAB), sequences)
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in rows]


def test_bits_are_those_of_brute_force(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokenizer = engine._admission.tokenizer
    assert tokenizer is not None
    spelled = {token: tokenizer.token_bytes(token) for token in set(range(VOCAB)) - tokenizer.special_ids}
    engine.add("0", [65], asks(n=len(COLOURS), choice=COLOURS))
    sequences = engine._roster.requests["0"].sequences
    said = [b""] * len(COLOURS)
    while any(seq.token_ids[-1] not in tokenizer.eos_token_ids for seq in sequences):
        found = allowed(engine)
        for seq, text, wanted, ids in zip(sequences, said, COLOURS, found, strict=True):
            if seq.token_ids[-1] in tokenizer.eos_token_ids:
                continue
            whole = [choice.encode() for choice in COLOURS]
            expected = {
                token
                for token, data in spelled.items()
                if data and any(choice.startswith(text + data) for choice in whole)
            }
            ends = ids - spelled.keys()
            assert ends == (tokenizer.eos_token_ids if text in whole else set())
            # where the bytes to come are forced, only their usual tokens are left: not all, but enough
            next_bytes = {choice[len(text)] for choice in whole if choice != text and choice.startswith(text)}
            assert {spelled[token][0] for token in ids - ends} == next_bytes
            assert ids - ends <= expected
            rest = wanted.encode()[len(text) :]
            own = [token for token in ids if token in spelled and rest.startswith(spelled[token])]
            seq.token_ids.append(max(own) if rest else max(tokenizer.eos_token_ids))
        said = [b"".join(spelled.get(token, b"") for token in seq.token_ids[1:]) for seq in sequences]
    assert said == [choice.encode() for choice in COLOURS]
    assert allowed(engine) == [set(tokenizer.eos_token_ids)] * len(COLOURS)


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 5
        and 0 <= person["age"] <= 150
        and 1 <= len(person["tags"]) <= 3
        and set(person["tags"]) <= {"x", "y z"}
    )


@pytest.mark.parametrize(
    ("form", "obeys"),
    [
        ({"regex": r"[a-c]{3}-(xx|yy)+0"}, re.compile(r"[a-c]{3}-(xx|yy)+0").fullmatch),
        ({"choice": COLOURS}, COLOURS.__contains__),
        ({"json": SCHEMA}, is_person),
        ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, is_person),
        ({"grammar": 'start: "a" | "b" start "b"'}, re.compile("(b*)a(b*)").fullmatch),
        ({"grammar": 'root ::= "a" | "b" root "b"\n'}, re.compile("(b*)a(b*)").fullmatch),
    ],
)
@pytest.mark.parametrize("overlaps", [None, True])
def test_texts_of_a_random_model_obey(
    make_engine: MakeEngine, generate: Generate, form: Any, obeys: Any, overlaps: bool | None
) -> None:
    runner = None if overlaps is None else FakeRunner(VOCAB, [70, 71], overlaps=overlaps)
    plain = SamplingParams(seed=1, max_tokens=30)
    prompts = [[65, 66], [67], [68, 69, 70]]
    outputs = generate(make_engine(runner=runner), prompts, [asks(n=4, **form), plain, asks(7, **form)])
    for request in ("0", "2"):
        for completion in outputs[request].outputs:
            assert completion.finish_reason == "stop"
            assert obeys(completion.text), completion.text
    fresh = None if overlaps is None else FakeRunner(VOCAB, [70, 71], overlaps=overlaps)
    alone = generate(make_engine(runner=fresh), [prompts[1]], plain)["0"]
    assert list(outputs["1"].outputs[0].token_ids) == list(alone.outputs[0].token_ids)


def test_any_json_object(make_engine: MakeEngine, generate: Generate) -> None:
    outputs = generate(make_engine(max_num_seqs=16), [[65 + i] for i in range(8)], asks(json_object=True))
    for output in outputs.values():
        assert output.outputs[0].text[:1] == "{"
        if output.outputs[0].finish_reason == "stop":
            assert isinstance(json.loads(output.outputs[0].text), dict)


def test_greedy_takes_the_likeliest_that_is_allowed(make_engine: MakeEngine, generate: Generate) -> None:
    engine, letters = make_engine(), "kqwxz"
    (logits,) = engine.prompt_logits([80, 81, 82])
    params = SamplingParams(
        temperature=0.0, logprobs=1, structured_outputs=StructuredOutputsParams(choice=list(letters))
    )
    (completion,) = generate(engine, [[80, 81, 82]], params)["0"].outputs
    assert completion.text == max(letters, key=lambda letter: logits[2, ord(letter)])
    assert completion.logprobs is not None
    first = completion.logprobs[0][completion.token_ids[0]].logprob  # under the model's own distribution
    assert first == pytest.approx(logits[2].log_softmax(-1)[ord(completion.text)].item(), abs=1e-5)


def test_masks_are_filled_between_the_launch_of_a_step_and_the_choice_of_its_tokens(
    make_engine: MakeEngine, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the launch returns at once, as on a GPU, that is while it computes."""
    engine = make_engine()
    order: list[str] = []

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            found = call(*given, **named)
            order.append(what)
            return found

        return run

    monkeypatch.setattr(engine.runner, "run", noted("launched", engine.runner.run))
    monkeypatch.setattr(structured, "_bits", noted("filled", structured._bits))
    monkeypatch.setattr(sampler, "choose", noted("chosen", sampler.choose))
    generate(engine, [[65], [66]], [asks(choice=["abc"]), SamplingParams(max_tokens=3, ignore_eos=True)])
    assert order[:9] == ["launched", "filled", "chosen"] * 3


def test_s05_preemption_does_not_disturb_a_grammar(make_engine: MakeEngine, generate: Generate) -> None:
    prompts = [[70 + i] * 12 for i in range(4)]
    params = [asks(i, regex="[a-z ]{60}") for i in range(4)]
    ample = generate(make_engine(), prompts, params)
    engine = make_engine(num_kv_blocks=8)
    tight = generate(engine, prompts, params)
    assert engine.stats().num_preemptions > 0
    for request, output in ample.items():
        assert list(tight[request].outputs[0].token_ids) == list(output.outputs[0].token_ids)
        assert re.fullmatch("[a-z ]{60}", output.outputs[0].text)


def test_a_grammar_that_fails_ends_its_own_request(make_engine: MakeEngine, caplog: Any) -> None:
    engine = make_engine()
    engine.add("bad", [65], asks(regex="a+"))
    engine.add("good", [65], asks(regex="a{5}"))
    constraint = engine._roster.requests["bad"].sequences[0].constraint
    assert constraint is not None
    assert not constraint.matcher.consume_token(66)
    finished = {}
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert finished["bad"].outputs[0].finish_reason == "error"
    assert finished["good"].outputs[0].text == "aaaaa"
    (said,) = (record.getMessage() for record in caplog.records)  # and nothing of logits
    assert re.fullmatch(r"request bad ends: its grammar failed \([^\n]+\)", said)


# more alternatives than the parser can keep in mind at once
PLAIN = " | ".join(f'"{i}"' for i in range(2500))
ENDED = " | ".join(f'"{i}" end' for i in range(2500))


@pytest.mark.parametrize("overlaps", [None, True])
def test_alternatives_too_many_in_the_middle_of_an_answer_end_it_with_error(
    make_engine: MakeEngine, generate: Generate, caplog: Any, overlaps: bool | None
) -> None:
    runner = None if overlaps is None else FakeRunner(VOCAB, [70, 71], overlaps=overlaps)
    rules = [
        'root ::= "x" more',
        'more ::= "y" more | "z" many',
        f"many ::= {ENDED}",
        'end ::= "." | "," end',
    ]
    form = StructuredOutputsParams(grammar="\n".join(rules))
    params = SamplingParams(seed=0, max_tokens=90, structured_outputs=form)
    (completion,) = generate(make_engine(runner=runner), [[65]], params)["0"].outputs
    assert completion.finish_reason == "error"
    assert re.fullmatch(r"xy*z", completion.text)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("request 0 ends: its grammar failed (Parser Error: Current row has 250")


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": nested(depth - 2)}} if depth > 1 else {"type": "null"}


@pytest.mark.parametrize(
    ("form", "parameter"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regex": "("}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": "a\x00"}, "regex"),
        ({"regex": "\ud83d"}, "regex"),
        ({"regex": 5}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "((a{300}){300}){300}"}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": ["\ud83d"]}, "choice"),
        ({"grammar": " "}, "grammar"),
        ({"grammar": "start: nowhere"}, "grammar"),
        ({"grammar": "root ::= nowhere"}, "grammar"),
        ({"grammar": "nonsense $$"}, "grammar"),
        ({"grammar": f"root ::= {PLAIN}"}, "grammar"),
        ({"json": "{"}, "json"),
        ({"json": "[1]"}, "json"),
        ({"json": "[" * 100_000}, "json"),
        ({"json": {"type": "nonsense"}}, "json"),
        ({"json": {"$ref": "http://a.example/schema"}}, "json"),
        ({"json": nested(80)}, "json"),
        ({"json": {"const": "\ud800"}}, "json"),
        ({"json": {"type": "object", "properties": {"\ud800": {}}}}, "json"),
        ({"json": {"type": "integer", "minimum": -(10**400)}}, "json"),
        ({"json": {"type": "object"}, "whitespace_pattern": "("}, "json"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    make_engine: MakeEngine, form: dict[str, Any], parameter: str
) -> None:
    engine = make_engine()
    with pytest.raises(UserError) as raised:
        engine.add("0", [65], SamplingParams(structured_outputs=StructuredOutputsParams(**form)))
    assert raised.value.parameter == parameter
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert not engine.has_unfinished()


def test_a_schema_of_sixty_levels_is_taken(make_engine: MakeEngine) -> None:
    make_engine().add("0", [65], asks(json=nested(60)))


@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"bad_words": ["x"]}, {"allowed_token_ids": [5]}])
def test_what_could_leave_nothing_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **more)
    assert raised.value.parameter == next(iter(more))


def test_mistaken_forms_say_so() -> None:
    with pytest.raises(UserError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_a_grammar_is_compiled_once(make_engine: MakeEngine) -> None:
    grammars = make_engine().grammars
    form = StructuredOutputsParams(regex="a+")
    assert grammars.compile(form) is grammars.compile(StructuredOutputsParams(regex="a+"))
    assert grammars.compile(form) is not grammars.compile(StructuredOutputsParams(choice=["a+"]))
    with pytest.raises(UserError, match="needs a tokenizer"):
        Grammars(None, VOCAB).compile(form)


def test_the_first_step_of_a_huge_grammar_is_taken_while_it_is_compiled(make_engine: MakeEngine) -> None:
    grammars, form = make_engine().grammars, StructuredOutputsParams(regex="(a{300}){300}")
    start = time.thread_time()  # what others do on the machine does not count
    grammars.compile(form)
    compiled = time.thread_time()
    constraint = grammars.start(form)
    constraint.matcher.compute_bitmask()
    assert time.thread_time() - compiled < (compiled - start) / 2
