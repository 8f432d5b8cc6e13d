"""Ends of a sequence, by id, by count and by text, on scripted tokens: T03, T05, T06, T08."""

from collections.abc import Callable
from typing import Any

import pytest

from qinfer.engine.engine import Engine
from qinfer.outputs import CompletionOutput, RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.testing import FakeRunner

EOS, OTHER_EOS = 258, 256  # <|im_end|> of tokenizer and config; generation_config also has <|endoftext|>
Generate = Callable[..., dict[str, RequestOutput]]


@pytest.fixture
def say(make_engine: Callable[..., Engine], generate: Generate) -> Callable[..., CompletionOutput]:
    """Runs one request whose tokens are scripted: text (bytes are ids), then the ids given."""

    def run(text: str, *ids: int, **fields: Any) -> CompletionOutput:
        engine = make_engine(runner=FakeRunner(384, [*_ids(engine_tokenizer(make_engine), text), *ids]))
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **fields})
        return generate(engine, [[5, 6, 7]], params)["0"].outputs[0]

    return run


def engine_tokenizer(make_engine: Callable[..., Engine]) -> Any:
    return make_engine()._admission.tokenizer


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [tokenizer.encode(letter)[0] for letter in text]


def test_t08_any_end_of_sequence_id_stops_and_stop_reason_is_none(
    say: Callable[..., CompletionOutput],
) -> None:
    for end in (EOS, OTHER_EOS):
        out = say("ab", end, 70)
        assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", None)
        assert out.token_ids[-1] == end


def test_t08_ignore_eos_gives_exactly_max_tokens(say: Callable[..., CompletionOutput]) -> None:
    out = say("ab", EOS, OTHER_EOS, ignore_eos=True)
    assert len(out.token_ids) == 20
    assert out.finish_reason == "length"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_t05_text_is_whole_and_the_marker_appears_once_when_asked(
    skip: bool, include: bool, say: Callable[..., CompletionOutput]
) -> None:
    out = say(
        "injury.", EOS, stop_token_ids=[EOS], skip_special_tokens=skip, include_stop_str_in_output=include
    )
    assert out.text == "injury." + ("<|im_end|>" if include and not skip else "")


def test_t06_a_stop_string_that_is_a_special_token(say: Callable[..., CompletionOutput]) -> None:
    out = say("abc", 257, 70, 71, stop=["<|im_start|>"])
    assert (out.text, out.finish_reason, out.stop_reason) == ("abc", "stop", "<|im_start|>")
    assert len(out.token_ids) == 4


def test_t03_a_stop_string_over_several_tokens(say: Callable[..., CompletionOutput]) -> None:
    out = say("ABCDEFGHIJ", stop=["DEFGHIJ"])
    assert (out.text, out.finish_reason, out.stop_reason) == ("ABC", "stop", "DEFGHIJ")
    near = say("ABCDEFGX", EOS, stop=["DEFGHIJ"])
    assert (near.text, near.stop_reason) == ("ABCDEFGX", None)


def test_held_back_text_is_given_out_at_the_end(say: Callable[..., CompletionOutput]) -> None:
    out = say("ABCDEF", max_tokens=5, stop=["DEFG"])
    assert (out.text, out.finish_reason) == ("ABCDE", "length")


def test_a_stop_id_is_the_reason_and_stays_in_token_ids(say: Callable[..., CompletionOutput]) -> None:
    out = say("ab", 70, 71, stop_token_ids=[70])
    assert (out.text, out.finish_reason, out.stop_reason, out.token_ids[-1]) == ("ab", "stop", 70, 70)


def test_min_tokens_keeps_ends_from_being_chosen(say: Callable[..., CompletionOutput]) -> None:
    out = say("ab", EOS, min_tokens=6)
    assert len(out.token_ids) == 7
    assert EOS not in out.token_ids[:-1]
    assert out.token_ids[-1] == EOS


def test_without_detokenizing_there_is_no_text(say: Callable[..., CompletionOutput]) -> None:
    out = say("ab", EOS, detokenize=False)
    assert (out.text, len(out.token_ids)) == ("", 3)
