"""Requests of a benchmark: how many tokens, from where, and the same again from the same seed."""

import json

import pytest

from qinfer.bench.dataset import Dataset
from qinfer.errors import UserError
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(tiny_model("llama", tmp_path_factory.mktemp("dataset") / "model"))


def lengths(requests):
    return [len(r.prompt) for r in requests], [r.output_len for r in requests]


def test_random_lengths_are_exact_without_a_range():
    requests = Dataset(num_prompts=7, input_len=20, output_len=5).draw(100, None)
    assert lengths(requests) == ([20] * 7, [5] * 7)
    assert {token for r in requests for token in r.prompt} <= set(range(100))


def test_random_lengths_lie_evenly_within_their_range():
    requests = Dataset(num_prompts=4000, input_len=100, output_len=252, range_ratio=0.5).draw(10, None)
    prompts, outputs = lengths(requests)
    assert (min(prompts), max(prompts)) == (50, 150)
    assert sum(prompts) / 4000 == pytest.approx(100, rel=0.03)
    assert (min(outputs), max(outputs)) == (126, 378)


def test_log_lengths_are_mostly_short():
    drawn = Dataset(num_prompts=4000, input_len=1, output_len=252, range_ratio=0.98, spread="log")
    outputs = lengths(drawn.draw(10, None))[1]
    assert 5 <= min(outputs) <= 6
    assert 490 <= max(outputs) <= 499
    assert sorted(outputs)[2000] == pytest.approx((5 * 500) ** 0.5, rel=0.15)


def test_a_seed_gives_the_same_and_a_stream_others():
    dataset = Dataset(num_prompts=20, input_len=30, range_ratio=0.5, seed=3)
    assert dataset.draw(1000, None) == dataset.draw(1000, None)
    prompts = {tuple(r.prompt) for r in dataset.draw(1000, None)}
    assert not prompts & {tuple(r.prompt) for r in dataset.draw(1000, None, stream=1)}
    assert not prompts & {tuple(r.prompt) for r in Dataset(num_prompts=20, seed=4).draw(1000, None)}


def test_a_prefix_is_shared_and_comes_on_top():
    requests = Dataset(num_prompts=5, input_len=10, prefix_len=8).draw(1000, None)
    assert {len(r.prompt) for r in requests} == {18}
    assert len({tuple(r.prompt[:8]) for r in requests}) == 1
    assert len({tuple(r.prompt[8:]) for r in requests}) == 5


def test_special_tokens_are_never_drawn(tokenizer):
    special = tokenizer.special_ids
    requests = Dataset(num_prompts=50, input_len=100).draw(tokenizer.vocab_size, tokenizer)
    assert special
    assert not special & {token for r in requests for token in r.prompt}


def test_sharegpt_takes_lengths_from_what_was_said(tokenizer, tmp_path):
    def said(*turns):
        return {"conversations": [{"from": "x", "value": text} for text in turns]}

    entries = [said("hello there", "general"), said("alone"), said("a", "too short a prompt"), {}]
    entries.append(said("word " * 900, "a prompt of too many tokens"))
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    (request,) = Dataset(name="sharegpt", path=str(path)).draw(384, tokenizer)
    assert request == (tokenizer.encode("hello there"), len(tokenizer.encode("general")))
    (request,) = Dataset(name="sharegpt", path=str(path), output_len=33).draw(384, tokenizer)
    assert request.output_len == 33


def test_custom_is_lines_of_text_or_of_json(tokenizer, tmp_path):
    text, jsonl = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("first line\n\nsecond\n")
    requests = Dataset(name="custom", path=str(text), output_len=9).draw(384, tokenizer)
    assert requests == [(tokenizer.encode("first line"), 9), (tokenizer.encode("second"), 9)]
    jsonl.write_text('{"prompt": "one", "output_tokens": 3}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    requests = Dataset(name="custom", path=str(jsonl), num_prompts=2).draw(384, tokenizer)
    assert requests == [(tokenizer.encode("one"), 3), (tokenizer.encode("two"), 128)]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"name": "sonnet"}, "random, sharegpt, custom"),
        ({"spread": "normal"}, "uniform, log"),
        ({"range_ratio": 1.0}, r"\[0, 1\)"),
        ({"name": "sharegpt"}, "needs --dataset-path"),
        ({"path": "x.json"}, "has no --dataset-path"),
        ({"name": "custom", "path": "x", "input_len": 3}, "for random prompts"),
    ],
)
def test_senseless_choices_are_refused(choice, said):
    with pytest.raises(UserError, match=said):
        Dataset(**choice)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("[", "is not JSON"),
        ("[]", "holds no prompt"),
        ("{}", "a JSON list"),
        ("\n", "is not JSON"),
    ],
)
def test_a_bad_file_is_named(tokenizer, tmp_path, content, said):
    path = tmp_path / "prompts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        Dataset(name="sharegpt", path=str(path)).draw(384, tokenizer)


def test_text_needs_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        Dataset(name="custom", path=str(tmp_path)).draw(384, None)
