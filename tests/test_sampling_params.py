"""SamplingParams: defaults, normalisation and every refusal with the field's name."""

import logging
import math
from typing import Any

import pytest

from qinfer.errors import UserError
from qinfer.sampling_params import RepetitionDetectionParams, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 10**6),
        ("n", 1.5),
        ("n", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 0.5),
        ("min_p", 1.1),
        ("seed", 2**70),
        ("seed", -(2**70)),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", ["\ud83d"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("bad_words", [""]),
        ("max_tokens", 0),
        ("max_tokens", 10**12),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", 1.0),
        ("allowed_token_ids", []),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("stream_interval", 0),
        ("logprob_token_ids", [-1]),
        ("logprob_token_ids", list(range(129))),
    ],
)
def test_p01_p03_p15_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError) as raised:
        SamplingParams(**{name: value})
    assert raised.value.parameter == name
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])


def test_normalisation() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[3, 1, 3], seed=-1, top_k=-1, logprobs=True)
    assert (params.stop, params.stop_token_ids) == (["a"], [3, 1])
    assert (params.seed, params.top_k, params.logprobs) == (None, 0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-12, 1e-45])
def test_greedy_switches_the_filters_off(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.1)
    assert params.greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_small_temperatures_are_raised_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=1e-3)
    assert params.temperature == 0.01
    assert not params.greedy
    assert "0.001" in caplog.text


def test_several_greedy_answers_are_refused() -> None:
    with pytest.raises(UserError) as raised:
        SamplingParams(n=2, temperature=0.0)
    assert raised.value.parameter == "n"


def test_stop_strings_need_text() -> None:
    with pytest.raises(UserError) as raised:
        SamplingParams(stop="a", detokenize=False)
    assert raised.value.parameter == "stop"


@pytest.mark.parametrize(
    "name",
    [
        *("extra_args", "truncate_prompt_tokens", "logits_processors"),
    ],
)
def test_absent_fields_say_so(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        SamplingParams(**{name: [1]})


def test_from_optional_reads_json() -> None:
    params = SamplingParams.from_optional(
        temperature=None, max_tokens=None, logit_bias={"5": 300.0, "6": -7.0}
    )
    assert params.temperature == 1.0
    assert params.max_tokens is None
    assert params.logit_bias == {5: 100.0, 6: -7.0}
    assert SamplingParams.from_optional().max_tokens == 16


def test_clone_is_independent() -> None:
    params = SamplingParams(stop=["a"])
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")
    assert params.stop == ["a"]


@pytest.mark.parametrize(
    ("tokens", "is_one"),
    [
        ([7, 7, 7], True),
        ([1, 7, 7], False),
        ([1, 2, 3, 2, 3, 2, 3], True),
        ([1, 2, 3, 2, 3, 2, 3, 4], False),
        ([2, 3, 2, 3], False),
        ([5, 1, 2, 3, 4] * 3, False),
        ([], False),
    ],
)
def test_repetitions_are_found_at_the_end(tokens: list[int], is_one: bool) -> None:
    found = RepetitionDetectionParams(max_pattern_size=4, min_count=3).found_in(tokens)
    assert found is is_one


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_pattern_size": 0}, "max_pattern_size"),
        ({"max_pattern_size": 3, "min_pattern_size": 4}, "min_pattern_size"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count"),
    ],
)
def test_a_repetition_that_cannot_be_is_refused(fields: dict[str, int], name: str) -> None:
    with pytest.raises(UserError) as raised:
        RepetitionDetectionParams(**fields)
    assert raised.value.parameter == name
    with pytest.raises(UserError, match="must be RepetitionDetectionParams"):
        SamplingParams(repetition_detection=fields)
