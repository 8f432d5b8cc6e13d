"""A certificate lets exactly those bytes be served that were measured, with a KV cache no riskier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import GateError, UserError
from qinfer.evals import certificate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text("{}")
    return tmp_path


def certify(
    folder: Path, verdict: str = "PASS", kv: str = "bfloat16", reasons: tuple[str, ...] = ("KL is low",)
) -> None:
    contents = {"verdict": verdict, "reasons": list(reasons), "settings": {"kv_cache_dtype": kv}}
    certificate.write(folder, contents, certificate.hash_files(folder), f"# {verdict}\n")


def require(folder: Path, kv: str = "auto", **changes: Any) -> certificate.GateStatus:
    options = {"is_quantized": True, "kv_cache_dtype": kv, "allow_ungated": False, **changes}
    return certificate.require(folder, **options)


def test_dense_needs_no_certificate(folder: Path) -> None:
    assert require(folder, is_quantized=False).state == "dense"


def test_pass_serves_and_both_files_lie_there(folder: Path) -> None:
    certify(folder)
    assert require(folder) == ("passed", "gate passed: KL is low")
    assert (folder / "qinfer_gate.md").read_text() == "# PASS\n"
    assert sorted(path.name for path in folder.iterdir() if "partial" in path.name) == []


@pytest.mark.parametrize("verdict", ["FAIL", "UNDECIDED", "pass", ""])
def test_any_other_verdict_is_refused_in_one_line_that_names_the_way_out(folder: Path, verdict: str) -> None:
    certify(folder, verdict, reasons=("mean KL too high",))
    with pytest.raises(GateError) as caught:
        require(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert "mean KL too high" in line
    assert f"`qinfer eval {folder} --against REF`" in line
    status = require(folder, allow_ungated=True)
    assert status.state == "ungated"
    assert "mean KL too high" in status.line


def test_missing_certificate(folder: Path) -> None:
    with pytest.raises(GateError, match="has no verdict"):
        require(folder)
    assert require(folder, allow_ungated=True).state == "ungated"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 2, "verdict": "PASS"}',
        '"PASS"',
        "\x00\xff",
        "[" * 100_000,
    ]
    + [
        json.dumps({"format": 1, "verdict": "PASS", "reasons": [], "hashes": {}, "settings": settings})
        for settings in ({}, {"kv_cache_dtype": "fp4"}, [])
    ],
)
def test_unreadable_certificate_is_one_line(folder: Path, text: str) -> None:
    (folder / certificate.CERTIFICATE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(GateError, match=r"certificate.*qinfer eval") as caught:
        require(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_a_changed_or_removed_file_makes_it_stale(folder: Path, name: str) -> None:
    certify(folder)
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(before + b" ")
    with pytest.raises(GateError, match=f"stale: {name}"):
        require(folder, kv="bfloat16")
    (folder / name).unlink()
    with pytest.raises(GateError, match=f"stale: {name}"):
        require(folder, kv="bfloat16")
    (folder / name).write_bytes(before)
    assert require(folder, kv="bfloat16").state == "passed"


def test_an_added_weight_or_template_makes_it_stale_and_sampling_defaults_do_not(folder: Path) -> None:
    certify(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    assert require(folder).state == "passed"
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"more")
    with pytest.raises(GateError, match="stale: model-00002"):
        require(folder)


@pytest.mark.parametrize(
    ("measured", "served", "allowed"),
    [
        ("float32", "float32", True),
        ("float32", "bfloat16", False),
        ("bfloat16", "float16", True),
        ("bfloat16", "auto", True),
        ("float32", "auto", False),
        ("bfloat16", "int8", False),
        ("int8", "bfloat16", True),
        ("int8", "fp8", False),
        ("fp8", "fp8_e4m3", True),
        ("fp8", "int8", True),
    ],
)
def test_a_riskier_kv_cache_is_not_covered(folder: Path, measured: str, served: str, allowed: bool) -> None:
    certify(folder, kv=measured)
    if allowed:
        assert require(folder, kv=served).state == "passed"
    else:
        with pytest.raises(GateError, match=f"measured with a {measured} KV cache"):
            require(folder, kv=served)


def test_weights_changed_while_they_were_measured_are_stale(folder: Path) -> None:
    hashes = certificate.hash_files(folder)
    (folder / "model.safetensors").write_bytes(b"other weights")
    contents = {"verdict": "PASS", "reasons": [], "settings": {"kv_cache_dtype": "bfloat16"}}
    certificate.write(folder, contents, hashes, "")
    with pytest.raises(GateError, match=r"stale: model\.safetensors"):
        require(folder)


def test_unknown_kv_dtype_is_a_user_error(folder: Path) -> None:
    with pytest.raises(UserError, match="unknown kv_cache_dtype 'int4'"):
        require(folder, kv="int4")


def test_nan_is_never_written(folder: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        certificate.write(folder, {"verdict": "PASS", "kl": float("nan")}, {}, "")
    assert not (folder / certificate.CERTIFICATE_NAME).exists()


def test_an_int8_head_needs_a_verdict_measured_with_one(folder: Path) -> None:
    certify(folder)
    with pytest.raises(
        GateError, match=r"measured with a dense lm_head.*--against REF --lm-head-dtype int8`"
    ):
        require(folder, lm_head_dtype="int8")
    settings = {"kv_cache_dtype": "bfloat16", "lm_head_dtype": "int8"}
    contents = {"verdict": "PASS", "reasons": [], "settings": settings}
    certificate.write(folder, contents, certificate.hash_files(folder), "# PASS\n")
    assert require(folder, lm_head_dtype="int8").state == "passed"
    assert require(folder).state == "passed"  # a dense one is nearer to the source
