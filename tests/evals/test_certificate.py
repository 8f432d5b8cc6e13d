"""A certificate names the bytes it is about, when it was given, and when it ends."""

from __future__ import annotations

import hashlib
import json
import math
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from qinfer.errors import GateError, UserError
from qinfer.evals import certificate
from qinfer.evals.hashes import _BLOCK, hash_file, hash_files
from qinfer.evals.signature import Signer

SETTINGS = {"kv_cache_dtype": "bfloat16", "qinfer": "0.3.1"}
MADE_AT = "2026-01-01T00:00:00+00:00"
CONTENTS = {"verdict": "PASS", "reasons": ["KL is low"], "settings": SETTINGS}


def test_what_decides_the_tokens_is_covered_and_what_does_not_is_not(tmp_path: Path) -> None:
    covered = {
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("model.safetensors.index.json", "config.json", "hf_quant_config.json", "kv_scales.json"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "merges.txt", "vocab.json"),
        *("chat_template.jinja", "special_tokens_map.json", "spiece.model", "qwen.tiktoken", "vocab.txt"),
    }
    left_out = {"generation_config.json", "quantize_report.json", "qinfer_gate.json", "qinfer_waiting.json"}
    for name in covered | left_out | {"README.md", "LICENSE.txt", "qinfer_gate.md"}:
        (tmp_path / name).write_text(name)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    hashes = hash_files(tmp_path)
    assert set(hashes) == covered
    assert hashes["config.json"] == hashlib.sha256(b"config.json").hexdigest()


def test_a_file_longer_than_a_block_is_hashed_whole(tmp_path: Path) -> None:
    data = bytes(range(256)) * (3 * _BLOCK // 256) + b"end"
    (tmp_path / "model.safetensors").write_bytes(data)
    expected = hashlib.sha256(data).hexdigest()
    assert hash_file(tmp_path / "model.safetensors") == expected
    assert hash_file(tmp_path / "model.safetensors", lambda: True) != expected


def test_both_files_lie_there_and_say_when_it_ends(tmp_path: Path) -> None:
    certificate.write(tmp_path, CONTENTS, {"config.json": "00"}, "# PASS\n", valid_days=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qinfer_gate.json", "qinfer_gate.md"]
    assert (tmp_path / "qinfer_gate.md").read_text() == "# PASS\n"
    document = certificate.read(tmp_path)
    made, end = (datetime.fromisoformat(text) for text in (document["made_at"], document["expires"]["at"]))
    assert end - made == timedelta(days=30)
    assert document["expires"]["qinfer"] == "0.3"
    assert document["expires"]["rules"] == [
        "any file under `hashes` changed, or one of such a name added or removed",
        "a KV cache riskier than bfloat16",
        "another tokenizer or chat template than the folder's",
        "an lm_head quantized while loading",
        "a qinfer other than 0.3",
        f"after {document['expires']['at']}",
    ]
    assert document["hashes"] == {"config.json": "00"}
    assert "signature" not in document


def test_without_an_end_it_ends_with_its_conditions_alone(tmp_path: Path) -> None:
    settings = {"kv_cache_dtype": "fp8", "lm_head_dtype": "int8"}
    certificate.write(tmp_path, {**CONTENTS, "settings": settings}, {}, "")
    expires = certificate.read(tmp_path)["expires"]
    assert (expires["at"], expires["qinfer"]) == (None, None)
    assert [rule for rule in expires["rules"] if "lm_head" in rule or "after" in rule] == []


def test_signing_later_changes_nothing_else(tmp_path: Path, signer: Signer) -> None:
    certificate.write(tmp_path, {**CONTENTS, "verdict": "FAIL"}, {"config.json": "00"}, "# FAIL\n")
    before = certificate.read(tmp_path)
    after = certificate.sign(tmp_path, signer)
    assert certificate.read(tmp_path) == after
    assert {**after, "signature": None} == {**before, "signature": None}
    assert (tmp_path / "qinfer_gate.md").read_text() == "# FAIL\n"
    with pytest.raises(GateError, match="has no verdict"):
        certificate.sign(tmp_path / "nowhere", signer)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 2}', '{"format": 1, "verdict": "PASS"}', '"PASS"', "\x00\xff"]
    + ["[" * 100_000]
    + [
        json.dumps(
            {"format": 2, "verdict": "PASS", "reasons": [], "hashes": {}, "settings": settings}
            | {"expires": expires, "made_at": made_at}
        )
        for settings, expires, made_at in (
            ({}, {"at": None}, MADE_AT),
            ({"kv_cache_dtype": "fp4"}, {"at": None}, MADE_AT),
            ({"kv_cache_dtype": []}, {"at": None}, MADE_AT),
            ({**SETTINGS, "limit": math.nan}, {"at": None}, MADE_AT),
            ({**SETTINGS, "name": "\ud800"}, {"at": None}, MADE_AT),
            ([], {"at": None}, MADE_AT),
            (SETTINGS, None, MADE_AT),
            (SETTINGS, {"at": "soon"}, MADE_AT),
            (SETTINGS, {"at": "2099-01-01T00:00:00"}, MADE_AT),  # in which zone?
            (SETTINGS, {"at": 5}, MADE_AT),
            (SETTINGS, {"at": None}, None),
            (SETTINGS, {"at": None}, "lately"),
        )
    ],
)
def test_an_unreadable_certificate_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / certificate.CERTIFICATE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(GateError, match="certificate") as caught:
        certificate.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_unknown_kv_dtype_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown kv_cache_dtype 'int4'"):
        certificate.resolve_kv_cache_dtype("int4", tmp_path)


def test_nan_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        certificate.write(tmp_path, {**CONTENTS, "kl": float("nan")}, {}, "")
    assert not (tmp_path / certificate.CERTIFICATE_NAME).exists()


def test_a_folder_that_cannot_be_written_to_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        certificate.write(tmp_path / "file", CONTENTS, {}, "")


def test_series_is_what_comes_before_the_patch() -> None:
    assert [certificate.series(version) for version in ("0.3.1", "1.12", "2")] == ["0.3", "1.12", "2"]


@pytest.mark.parametrize("kind", ["folder", "dangling", "pipe"])
def test_what_is_no_file_is_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        os.mkfifo(path)
    with pytest.raises(GateError, match=r"x\.json is covered by the gate and is no file"):
        hash_files(tmp_path)
