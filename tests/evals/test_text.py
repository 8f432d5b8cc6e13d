"""Windows of held-out text: one BOS each where the tokenizer adds it, nothing lost or repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qinfer.corpus import reference_text
from qinfer.evals.text import Window, data_hash, first_tokens, reference_windows, text_windows
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

BOS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("text") / "tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def with_bos(folder: Path) -> Tokenizer:
    """The same tokenizer with Llama's template: BOS before every text."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [BOS], "tokens": ["<|endoftext|>"]}
        },
    }
    path.write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.adds_bos
    return tokenizer


def test_e02_without_bos_windows_are_the_text_in_pieces(plain: Tokenizer) -> None:
    ids = plain.encode("x" * 20 + " and so on, " * 20, add_special_tokens=False)
    length = round(len(ids) / 2.5)
    windows = list(text_windows(plain, "x" * 20 + " and so on, " * 20, length))
    assert [len(w.token_ids) for w in windows][:2] == [length, length]
    assert len(windows) == 3
    assert [i for w in windows for i in w.token_ids] == ids
    assert sum(w.token_ids.count(BOS) for w in windows) == 0


def test_e02_with_bos_every_window_has_exactly_one(with_bos: Tokenizer) -> None:
    text = "x" * 20 + " and so on, " * 20
    ids = with_bos.encode(text, add_special_tokens=False)
    windows = list(text_windows(with_bos, text, 50))
    assert all(w.token_ids[0] == BOS and w.token_ids.count(BOS) == 1 for w in windows)
    assert all(len(w.token_ids) == 50 for w in windows[:-1])
    assert [i for w in windows for i in w.token_ids[1:]] == ids


@pytest.mark.parametrize(("text", "count"), [("", 0), ("x", 0), ("xy", 1)])
def test_a_window_scores_something_or_does_not_exist(plain: Tokenizer, text: str, count: int) -> None:
    assert len(list(text_windows(plain, text, 8))) == count


def test_a_chat_model_reads_raw_text_and_conversations_in_turn(plain: Tokenizer) -> None:
    windows = list(reference_windows(plain, 128))
    assert [w.kind for w in windows[:6]] == ["raw", "chat"] * 3
    first = plain.decode(list(windows[1].token_ids), skip_special_tokens=False)
    title = reference_text("evaluation")[1].partition("\n\n")[0]
    assert first.startswith(f"<|im_start|>user\n{title}<|im_end|>\n<|im_start|>assistant\n")
    assert all(2 <= len(w.token_ids) <= 128 for w in windows)


def test_a_model_without_a_template_reads_raw_text_only(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.hf.chat_template = None
    windows = first_tokens(reference_windows(tokenizer, 64), 640)
    assert {w.kind for w in windows} == {"raw"}


def test_first_tokens_are_exactly_as_many_as_asked(plain: Tokenizer) -> None:
    windows = [Window((1, 2, 3, 4), "raw")] * 3
    assert [len(w.token_ids) for w in first_tokens(windows, 10)] == [4, 4, 2]
    assert [len(w.token_ids) for w in first_tokens(windows, 9)] == [4, 4]  # one token alone scores nothing
    assert [len(w.token_ids) for w in first_tokens(windows, 99)] == [4, 4, 4]
    assert sum(len(w.token_ids) for w in first_tokens(reference_windows(plain, 512), 24_576)) == 24_576


def test_the_hash_sees_every_token_and_every_boundary() -> None:
    one = [Window((1, 2, 3), "raw"), Window((4, 5), "raw")]
    moved = [Window((1, 2), "raw"), Window((3, 4, 5), "raw")]
    changed = [Window((1, 2, 3), "raw"), Window((4, 6), "raw")]
    assert len({data_hash(windows) for windows in (one, moved, changed, [])}) == 4
    assert data_hash(one) == data_hash(list(one))
