"""A certificate lets exactly those bytes be served that were measured, in no riskier way, while it lasts."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import qinfer
from qinfer.errors import GateError, UserError
from qinfer.evals import certificate, clearance
from qinfer.evals.certificate import GateStatus
from qinfer.evals.clearance import Clearance
from qinfer.evals.coverage import Use
from qinfer.evals.hashes import hash_file, hash_files
from qinfer.evals.signature import Signer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text("{}")
    return folder


def certify(
    folder: Path,
    verdict: str = "PASS",
    *,
    settings: dict[str, Any] | None = None,
    found: Mapping[str, Any] | None = None,
    **options,
) -> None:
    measured = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "qinfer": qinfer.__version__}
    contents = {
        "verdict": verdict,
        "reasons": ["KL is low" if verdict == "PASS" else "mean KL too high"],
        "settings": {**measured, **(settings or {})},
        **(found or {}),
    }
    certificate.write(folder, contents, hash_files(folder), f"# {verdict}\n", **options)


def require(folder: Path, *, allow_ungated: bool = False, **use: Any) -> GateStatus:
    return clearance.require(folder, Use(**use), allow_ungated=allow_ungated)


def test_dense_needs_no_certificate(folder: Path) -> None:
    assert clearance.require(folder, kind="dense").state == "dense"


def test_dummy_weights_are_judged_by_nobody(folder: Path) -> None:
    certify(folder)
    with pytest.raises(GateError, match="random numbers"):
        clearance.require(folder, kind="dummy")
    assert clearance.require(folder, kind="dummy", allow_ungated=True).state == "ungated"


def test_pass_serves(folder: Path) -> None:
    certify(folder)
    assert require(folder) == ("passed", "gate passed: KL is low")


@pytest.mark.parametrize("verdict", ["UNDECIDED", "pass", ""])
def test_what_is_not_decided_wants_more_evidence(folder: Path, verdict: str) -> None:
    certify(folder, verdict)
    line = refused(folder)
    assert "mean KL too high" in line
    assert "; measure more: a longer --budget or none" in line
    assert require(folder, allow_ungated=True).state == "ungated"


@pytest.mark.parametrize(
    ("found", "way_out"),
    [
        ({"measures": [{}]}, "; see that --against is what it was made from, quantize with --until-gate"),
        ({"measures": [{}], "blame": {"line": "none", "culprit": None}}, "quantize with --until-gate"),
        (
            {"measures": [{}], "blame": {"line": "x", "culprit": 5}, "offer": {"how": ["odd"]}},
            "quantize with --until-gate",
        ),
        ({"measures": [{}], "offer": {"how": "do this"}}, "; what passes in its place: do this;"),
        (
            {"measures": [{}], "blame": {"line": "x", "culprit": "layer 1"}, "offer": {"how": "do this"}},
            "place: do this;",
        ),
        (
            {"measures": [{}], "blame": {"line": "x", "culprit": "layer 17"}},
            "; layer 17 alone is to blame: make the checkpoint anew",
        ),
        ({}, "; give it its source's tokenizer files and chat template"),
    ],
)
def test_after_a_fail_judging_again_is_not_the_way_out(
    folder: Path, found: dict[str, Any], way_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    certify(folder, "FAIL", found=found)
    line = refused(folder)
    assert "is FAIL (mean KL too high)" in line
    assert way_out in line
    assert "qinfer eval" not in line
    with caplog.at_level(logging.WARNING, "qinfer"):
        status = require(folder, allow_ungated=True)
    assert status.state == "failed"
    assert status.line.startswith("served in spite of a FAIL: the gate's verdict on")
    assert [record.message for record in caplog.records] == [status.line]


def test_the_way_to_a_verdict_is_a_command_that_gives_it(folder: Path) -> None:
    assert f"; get a verdict with `qinfer eval {folder} --against REF`; or serve" in refused(folder)
    certify(folder, settings={"against": "my source"})
    for use, options in (
        ({"kv_cache_dtype": "fp8"}, " --kv-cache-dtype fp8"),
        ({"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, " --kv-cache-dtype fp8"),
        ({"dtype": "float16", "kv_cache_dtype": "float16"}, " --dtype float16"),
        ({"lm_head_dtype": "int8"}, " --lm-head-dtype int8"),
    ):
        assert f"`qinfer eval {folder} --against 'my source'{options}`" in refused(folder, **use)
    certify(folder, settings={"against": "two\nlines"}, valid_days=0)
    assert f"`qinfer eval {folder} --against REF`" in refused(folder)


def refused(folder: Path, **use: Any) -> str:
    with pytest.raises(GateError) as caught:
        require(folder, **use)
    line = str(caught.value)
    assert "\n" not in line
    assert line.endswith("or serve it all the same with --allow-ungated (allow_ungated=True)")
    return line


def test_ungated_is_served_where_allowed_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(GateError, match="has no verdict"):
        require(folder)
    with caplog.at_level(logging.WARNING, "qinfer"):
        status = require(folder, allow_ungated=True)
    assert status.state == "ungated"
    assert [record.message for record in caplog.records] == [status.line]
    assert "served without a valid verdict of the gate" in status.line
    certify(folder)
    caplog.clear()
    assert require(folder, allow_ungated=True).state == "passed"
    assert caplog.records == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_a_changed_or_removed_file_makes_it_stale(folder: Path, name: str) -> None:
    certify(folder)
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(before + b" ")
    with pytest.raises(GateError, match=f"stale: {name}"):
        require(folder, kv_cache_dtype="bfloat16")
    (folder / name).unlink()
    with pytest.raises(GateError, match=f"stale: {name}"):
        require(folder, kv_cache_dtype="bfloat16")
    (folder / name).write_bytes(before)
    assert require(folder, kv_cache_dtype="bfloat16").state == "passed"


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
    certify(folder, settings={"kv_cache_dtype": measured})
    if allowed:
        assert require(folder, kv_cache_dtype=served).state == "passed"
    else:
        with pytest.raises(GateError, match=f"measured with a {measured} KV cache"):
            require(folder, kv_cache_dtype=served)
    with pytest.raises(UserError, match="unknown kv_cache_dtype 'int4'"):
        require(folder, kv_cache_dtype="int4", allow_ungated=True)


@pytest.mark.parametrize(
    ("measured", "served", "allowed"),
    [
        ("float32", "float16", False),  # overflows
        ("float32", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float32", True),
        ("float16", "float16", True),
        (None, "bfloat16", False),
        (None, "float32", True),
    ],
)
def test_activations_in_another_dtype_are_not_covered(
    folder: Path, measured: str | None, served: str, allowed: bool
) -> None:
    """Whatever the KV cache holds: here it is the safest one."""
    certify(folder, settings={"dtype": measured, "kv_cache_dtype": "float32"})
    if allowed:
        assert require(folder, dtype=served, kv_cache_dtype="float32").state == "passed"
    else:
        with pytest.raises(GateError, match=f"activations in {measured} and does not cover {served}"):
            require(folder, dtype=served, kv_cache_dtype="float32")


def test_an_int8_head_needs_a_verdict_measured_with_one(folder: Path) -> None:
    certify(folder)
    with pytest.raises(
        GateError, match=r"measured with a dense lm_head.*--against REF --lm-head-dtype int8`"
    ):
        require(folder, lm_head_dtype="int8")
    certify(folder, settings={"lm_head_dtype": "int8"})
    assert require(folder, lm_head_dtype="int8").state == "passed"
    assert require(folder).state == "passed"  # a dense one is nearer to the source


def test_another_template_or_tokenizer_is_not_covered(folder: Path, tmp_path: Path) -> None:
    certify(folder)
    assert require(folder, chat_template="{{ messages }}").state == "passed"
    with pytest.raises(GateError, match="its own chat template and does not cover another"):
        require(folder, chat_template="{{ messages }} ")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert require(folder, tokenizer=copy).state == "passed"
    (copy / "merges.txt").write_text("a b")
    with pytest.raises(GateError, match="its own tokenizer and chat template and does not cover those"):
        require(folder, tokenizer=copy)


def test_it_ends_when_it_says(folder: Path) -> None:
    certify(folder, valid_days=1)
    assert require(folder).state == "passed"
    certify(folder, valid_days=0)
    with pytest.raises(GateError, match="expired at 20"):
        require(folder)
    assert require(folder, allow_ungated=True).state == "ungated"


def test_another_qinfer_may_compute_something_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qinfer, "__version__", "3.1.0")
    certify(folder)
    monkeypatch.setattr(qinfer, "__version__", "3.1.7")
    assert require(folder).state == "passed"
    monkeypatch.setattr(qinfer, "__version__", "3.2.0")
    with pytest.raises(GateError, match=r"given by qinfer 3\.1 and this is 3\.2\.0"):
        require(folder)


def test_trust_demands_a_signature_by_that_key(folder: Path, keys, signer: Signer) -> None:
    certify(folder)
    with pytest.raises(GateError, match="is not to be trusted: it is not signed"):
        require(folder, trust=(keys.public,))
    status = require(folder, trust=(keys.public,), allow_ungated=True)
    assert status.state == "ungated"
    certify(folder, signer=signer)
    status = require(folder, trust=(keys.public,))
    assert status.state == "passed"
    assert "signed by SHA256:" in status.line
    forged = certificate.CERTIFICATE_NAME
    (folder / forged).write_text((folder / forged).read_text().replace("KL is low", "KL is very low"))
    with pytest.raises(GateError, match="changed after signing"):
        require(folder, trust=(keys.public,))
    certify(folder, "FAIL", signer=signer)  # a signature says who judged, not that it passed
    with pytest.raises(GateError, match="is FAIL"):
        require(folder, trust=(keys.public,))


def test_other_kernels_are_said_and_not_refused(folder: Path) -> None:
    certify(folder, settings={"device": "cpu"})
    assert require(folder, device="cpu").line == "gate passed: KL is low"
    assert require(folder, device="cuda").line.endswith("measured on cpu, served on cuda by other kernels")


def test_weights_changed_while_they_were_measured_are_stale(folder: Path) -> None:
    hashes = hash_files(folder)
    (folder / "model.safetensors").write_bytes(b"other weights")
    contents = {"verdict": "PASS", "reasons": [], "settings": {"kv_cache_dtype": "bfloat16"}}
    certificate.write(folder, contents, hashes, "")
    with pytest.raises(GateError, match=r"stale: model\.safetensors"):
        require(folder)


def test_the_weights_are_hashed_while_they_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is checked at once; what the weights' hashes say is known at the end."""
    certify(folder)
    go_on = threading.Event()

    def slow(path: Path, *more: Any) -> str:
        assert go_on.wait(60)
        return hash_file(path, *more)

    monkeypatch.setattr(clearance, "hash_file", slow)
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    with Clearance(folder, Use()) as check:  # "loading" happens here
        go_on.set()
        with pytest.raises(GateError, match=r"stale: model\.safetensors"):
            check.result()


@pytest.mark.parametrize("how", ["written to", "set back", "replaced", "removed"])
def test_a_file_that_moves_while_it_is_loaded_is_stale(folder: Path, how: str) -> None:
    """Even where the bytes that were hashed are the right ones."""
    weights = folder / "model.safetensors"
    certify(folder)
    with Clearance(folder, Use()) as check:
        for future in check._hashes.values():
            future.result()
        if how == "written to":
            weights.write_bytes(b"weights")
            os.utime(weights, ns=(1, 1))
        elif how == "set back":
            time.sleep(0.02)  # the clock of a file system ticks every few milliseconds
            stat = weights.stat()
            weights.write_bytes(b"WEIGHTS")
            os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        elif how == "replaced":
            (folder / "new").write_bytes(b"WEIGHTS")
            (folder / "new").replace(weights)
        else:
            weights.unlink()
        with pytest.raises(GateError, match=r"stale: model\.safetensors"):
            check.result()


def test_hashing_stops_where_loading_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def endless(path: Path, stopped: Any) -> str:
        while not stopped():
            stop_seen.wait(0.01)
        seen.append(True)
        return ""

    stop_seen = threading.Event()
    certify(folder)
    monkeypatch.setattr(clearance, "hash_file", endless)
    with pytest.raises(RuntimeError, match="out of memory"), Clearance(folder, Use()):
        raise RuntimeError("out of memory")
    assert seen == [True]


@pytest.mark.parametrize("name", ["model.weights", "qinfer_w.safetensors"])
def test_weights_are_covered_whatever_the_index_calls_them(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"w": "{name}"}}}}')
    certify(folder)
    assert require(folder).state == "passed"
    (folder / name).write_bytes(b"WEIGHTS")
    with pytest.raises(GateError, match=f"stale: {name}"):
        require(folder)


def test_a_file_that_was_opened_and_is_not_covered_is_stale(folder: Path) -> None:
    certify(folder)
    with Clearance(folder, Use(), reads=[folder / "model.safetensors"]) as check:
        assert check.result().state == "passed"
    with pytest.raises(GateError, match=r"stale: .*other\.bin"):
        Clearance(folder, Use(), reads=[folder / "other.bin"])


def test_a_further_template_is_covered(folder: Path) -> None:
    certify(folder)
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools }}")
    with pytest.raises(GateError, match=r"stale: additional_chat_templates/tool_use\.jinja"):
        require(folder)
    certify(folder)
    assert require(folder).state == "passed"


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/a.jinja",
        "tokenizer_config.json",
    ],
)
def test_the_template_of_another_tokenizer_folder_is_not_covered(
    folder: Path, tmp_path: Path, name: str
) -> None:
    certify(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text('{"chat_template": "EVIL"}')
    with pytest.raises(GateError, match="does not cover those of"):
        require(folder, tokenizer=copy)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(GateError, match="does not cover those of"):
        require(folder, tokenizer=copy)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/new.jinja"])
def test_a_template_that_changes_while_weights_are_loaded_is_stale(folder: Path, name: str) -> None:
    certify(folder)
    with Clearance(folder, Use()) as check:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("EVIL")
        with pytest.raises(GateError, match=f"stale: {name}"):
            check.result()


def test_another_tokenizer_that_changes_while_weights_are_loaded_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    certify(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    with Clearance(folder, Use(tokenizer=copy)) as check:
        (copy / "chat_template.jinja").write_text("EVIL")
        with pytest.raises(GateError, match="does not cover those of"):
            check.result()
