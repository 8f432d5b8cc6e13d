"""A suffix: the middle is asked for as the model was trained to say it, or the suffix means nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qinfer.server.infill import Marks, marks_of
from qinfer.tokenizer import Tokenizer

PATH = "/v1/completions"


@pytest.fixture(scope="module", params=["<fim_{}>", "<|fim_{}|>"])
def coder(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """The tiny model's tokenizer with three more special tokens."""
    folder = tmp_path_factory.mktemp("coder")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, folder / name)
    written = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for i, part in enumerate(("prefix", "suffix", "middle")):
        written["added_tokens"].append({"id": 384 + i, "content": request.param.format(part), **plain})
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return Tokenizer.load(folder)


def prompt_ids(served, **body) -> list[int]:
    answer = served.post(PATH, {"max_tokens": 1, "return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["prompt_token_ids"]


def test_the_marks_are_found_by_their_names(coder, tokenizer):
    assert marks_of(coder) == Marks(384, 385, 386)
    assert marks_of(tokenizer) is None


def test_prompt_and_suffix_stand_behind_their_marks(coder, serve_scripted, monkeypatch):
    with serve_scripted() as served:
        monkeypatch.setattr(served.engine, "tokenizer", coder)
        monkeypatch.setattr(served.scripted, "tokenizer", coder)
        monkeypatch.setattr(served.engine, "card", replace(served.engine.card, vocab_size=387))
        before, after = coder.encode("def f("), coder.encode("): pass")
        expected = [384, *before, 385, *after, 386]
        assert prompt_ids(served, prompt="def f(", suffix="): pass") == expected
        assert prompt_ids(served, prompt=before, suffix="): pass") == expected
        assert prompt_ids(served, prompt="def f(", suffix="") == before
        echoed = served.post(PATH, {"prompt": "def f(", "suffix": ")", "max_tokens": 1, "echo": True})
        assert echoed.json()["choices"][0]["text"].startswith("def f(")
        assert served.post(PATH, {"prompt": "a", "suffix": "b" * 4000}).status_code == 400


def test_another_model_ignores_it_and_says_so(serve_scripted, caplog):
    with serve_scripted() as served:
        assert prompt_ids(served, prompt="Hi", suffix="Bye") == served.engine.tokenizer.encode("Hi")
        answer = served.post(PATH, {"prompt": ["Hi", "Ho"], "suffix": "Bye", "max_tokens": 1})
        assert answer.headers["x-qinfer-ignored"] == "suffix"
        assert "x-qinfer-ignored" not in served.post(PATH, {"prompt": "Hi", "suffix": ""}).headers
    said = [record.getMessage() for record in caplog.records if "suffix" in record.getMessage()]
    assert said == ["the field suffix means nothing here and is ignored"]  # once
    assert "Bye" not in caplog.text
