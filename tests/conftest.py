"""Two tiny tokenizers that every test may use: byte-level BPE and SentencePiece-style BPE, as folders."""

import os

import torch

if not torch.cuda.is_available():  # read once, when the first test imports triton, whichever that is
    os.environ["TRITON_INTERPRET"] = "1"

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings

from qinfer import env
from qinfer.testing import tiny_model

settings.register_profile("same-everywhere", derandomize=True, deadline=None)
settings.load_profile("same-everywhere")

SPACE = "\u2581"
# merges in order of rank, with every way to split a token
SENTENCEPIECE_MERGES = [
    *((SPACE, "t"), ("h", "e"), ("i", "n"), (SPACE, "a"), ("e", "r"), (SPACE + "t", "he")),
    *((SPACE + "t", "h"), (SPACE + "th", "e"), ("l", "e"), ("d", "in"), ("n", "g"), ("din", "g")),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers in every run, alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_results_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures of a module keep what they measure in a folder of the session's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "results_dir", lambda: tmp_path_factory.getbasetemp() / "results")
        yield


@pytest.fixture(autouse=True)
def _own_results(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one has measured."""
    folder = tmp_path_factory.getbasetemp() / f"results-{uuid4().hex}"
    monkeypatch.setattr(env, "results_dir", lambda: folder)


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer: 0-255 bytes, 256 <|endoftext|>, 258 <|im_end|> (EOS)."""
    return tiny_model("llama", tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<unk> <s> </s>, 256 byte tokens, pieces by rank, letters; a text begins with <s>."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    pieces = list(dict.fromkeys(a + b for a, b in SENTENCEPIECE_MERGES))
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'-0123456789"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    ids = {token: i for i, token in enumerate(tokens)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **plain} for i in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [list(pair) for pair in SENTENCEPIECE_MERGES],
        },
    }
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
