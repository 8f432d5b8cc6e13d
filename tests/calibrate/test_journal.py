"""A run that was killed goes on where it was, and ends with the very bytes of one that was not."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch

from qinfer.calibrate import pipeline
from qinfer.calibrate.journal import FOLDER, Journal, finished_layers
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint import shard_writer
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.errors import CheckpointError, UserError
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)]
LAYERS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("journal") / "source", num_hidden_layers=LAYERS)


def _job(source, out, *, resume=True, **arguments):
    arguments = {"calibration": TEXT, "max_seq_len": 32, "num_samples": 6, "scheme": "awq", **arguments}
    settings = Settings(**arguments)
    job = prepare_job(open_checkpoint(source), Tokenizer.load(source), out, settings, resume=resume)
    return replace(job, dtype=torch.float32)


def _weights(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors*"))}


class _Killed(BaseException):
    """Stops a run at once, as a signal would."""


def _stop_at(monkeypatch, owner, name, call):
    real, calls = getattr(owner, name), []

    def function(*arguments, **keywords):
        calls.append(name)
        if len(calls) == call:
            raise _Killed
        return real(*arguments, **keywords)

    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize(
    ("scheme", "method", "more"),
    [
        ("awq", "awq", {}),
        ("w4a16", "gptq", {}),
        ("int8", "smoothquant", {"kv_scales": "int8-head"}),
        ("w8a8-fp8-static", "rtn", {"kv_scales": "fp8"}),
        ("fp8", "rtn", {}),
    ],
)
def test_stopped_at_every_layer_ends_with_the_same_bytes(source, tmp_path, monkeypatch, scheme, method, more):
    arguments = {"scheme": scheme, "method": method, **more}
    whole = pipeline.run(_job(source, tmp_path / "whole", **arguments), progress=False)
    for _ in range(LAYERS - 1):  # each attempt gets one layer further
        with monkeypatch.context() as patch:
            _stop_at(patch, pipeline, "_quantize_layer", 2)
            with pytest.raises(_Killed):
                pipeline.run(_job(source, tmp_path / "out", **arguments), progress=False)
    report = pipeline.run(_job(source, tmp_path / "out", **arguments), progress=False)
    assert _weights(tmp_path / "out") == _weights(tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )
    sidecars = [
        (tmp_path / out / "qinfer_kv_scales.json").read_text()
        for out in ("out", "whole")
        if more.get("kv_scales") == "int8-head"
    ]
    assert len(set(sidecars)) <= 1
    for after, before in zip(report.layers, whole.layers, strict=True):
        assert replace(after, seconds=0) == replace(before, seconds=0)


@pytest.mark.parametrize(
    ("owner", "name", "max_shard_bytes"),
    [
        (shard_writer, "_save", 10**9),
        (shard_writer.Path, "rename", 10**9),
        (shard_writer.Path, "rename", 60_000),
        (shard_writer.Path, "unlink", 60_000),
    ],
)
def test_stopped_at_any_moment_of_writing(source, tmp_path, monkeypatch, owner, name, max_shard_bytes):
    """Every single write, rename and removal is the last one of some process."""
    monkeypatch.setattr(CheckpointWriter.__init__, "__kwdefaults__", _defaults(max_shard_bytes))
    pipeline.run(_job(source, tmp_path / "whole", scheme="fp8"), progress=False)
    job = _job(source, tmp_path / "out", scheme="fp8")
    for call in range(1, 100):
        with monkeypatch.context() as patch:
            _stop_at(patch, owner, name, call)
            try:
                pipeline.run(job, progress=False)
            except _Killed:
                patch.undo()
            else:
                assert call > LAYERS
                break
        pipeline.run(job, progress=False)
        assert _weights(tmp_path / "out") == _weights(tmp_path / "whole")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]
        shutil.rmtree(tmp_path / "out")


def _defaults(max_shard_bytes):
    return {**CheckpointWriter.__init__.__kwdefaults__, "max_shard_bytes": max_shard_bytes}


def test_another_commands_work_is_not_deleted(source, tmp_path, monkeypatch):
    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    for change, name in (
        ({"seed": 7}, "seed was 42, is now 7"),
        ({"group_size": 32}, 'scheme was "w4a16 g64 asym"'),
        ({"method": "rtn"}, 'method was "awq", is now "rtn"'),
        ({"kv_scales": "fp8"}, "kv_scales was null"),
        ({"calibration": TEXT[:3]}, "calibration kinds was"),
    ):
        with pytest.raises(UserError, match=rf"unfinished work of another command \({name}"):
            pipeline.run(_job(source, tmp_path / "out", **change), progress=False)
    assert finished_layers(tmp_path / "out.partial")
    pipeline.run(_job(source, tmp_path / "out", seed=7, resume=False), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _leave_unfinished(source, out, monkeypatch):
    with monkeypatch.context() as patch:
        _stop_at(patch, pipeline, "_quantize_layer", 3)
        with pytest.raises(_Killed):
            pipeline.run(_job(source, out), progress=False)
    assert finished_layers(out.with_name(out.name + ".partial"))


def test_changed_weights_are_another_command(source, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    _leave_unfinished(copy, tmp_path / "out", monkeypatch)
    os.utime(copy / "model.safetensors")
    with pytest.raises(UserError, match=r"another command \(weights model.safetensors was "):
        pipeline.run(_job(copy, tmp_path / "out"), progress=False)


def test_faults_of_the_weights_leave_nothing(source, tmp_path, monkeypatch):
    def faulty(*_):
        raise CheckpointError("model.layers.2.mlp.up_proj.weight holds NaN or infinity")

    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    monkeypatch.setattr(pipeline, "_quantize_layer", faulty)
    with pytest.raises(CheckpointError):
        pipeline.run(_job(source, tmp_path / "out"), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_what_is_finished(source, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        _leave_unfinished(source, tmp_path / "out", monkeypatch)
        patch.setattr(pipeline, "_quantize_layer", full)
        with pytest.raises(OSError, match="No space"):
            pipeline.run(_job(source, tmp_path / "out"), progress=False)
    assert f"stopped with 2 of {LAYERS} layers finished" in caplog.text
    pipeline.run(_job(source, tmp_path / "out"), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_half_a_line_counts_as_nothing(source, tmp_path, monkeypatch):
    pipeline.run(_job(source, tmp_path / "whole"), progress=False)
    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    file = tmp_path / "out.partial" / FOLDER / "layers.jsonl"
    assert len(file.read_bytes().splitlines()) == 2
    with file.open("a") as stream:
        stream.write('{"report": {"index": 2, "seco')
    pipeline.run(_job(source, tmp_path / "out"), progress=False)
    assert _weights(tmp_path / "out") == _weights(tmp_path / "whole")


def _bytes_of(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_any_damaged_byte_of_a_line_is_told_with_its_file_and_nothing_is_deleted(
    source, tmp_path, monkeypatch
):
    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    folder = tmp_path / "out.partial"
    identity = json.loads((folder / FOLDER / "begun.json").read_text())
    file = folder / FOLDER / "layers.jsonl"
    whole = file.read_bytes()
    assert len(Journal(folder, identity).done) == 2
    told = (
        re.escape(f"{file}, line ")
        + r"[12], is damaged, [^\n]*: begin anew with --no-resume \(resume=False\)"
    )
    kept = _bytes_of(folder)
    for place in range(0, len(whole) - 1, 61):  # but for the last newline
        _flip(file, place)
        with pytest.raises(CheckpointError, match=f"^{told}$"):
            Journal(folder, identity)
        _flip(file, place)
    for line in (b"\xff", b"{", b"[]", b"{}", b"5", b"[" * 100_000, whole.splitlines()[0][:-2] + b"0}"):
        file.write_bytes(line + b"\n")
        with pytest.raises(CheckpointError, match=f"^{told}$"):
            Journal(folder, identity)
    file.write_bytes(whole)
    assert _bytes_of(folder) == kept
    file.write_bytes(whole[:-1] + b"\x0b")  # no longer a whole line: what the layer before left is gone
    with pytest.raises(CheckpointError, match=r"states-00001.draft/hidden.0 is damaged, .* --no-resume"):
        Journal(folder, identity)


@pytest.mark.parametrize("fault", ["flipped", "cut", "gone"])
def test_damaged_states_never_change_a_result(source, tmp_path, monkeypatch, fault):
    pipeline.run(_job(source, tmp_path / "whole"), progress=False)
    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    folder = tmp_path / "out.partial"
    file = folder / FOLDER / "states-00002.draft" / "hidden.0"
    if fault == "flipped":
        _flip(file, -1)
    elif fault == "cut":
        os.truncate(file, file.stat().st_size - 4)
    else:
        file.unlink()
    kept = _bytes_of(folder)
    with pytest.raises(CheckpointError, match=r"hidden.0 is damaged, [^\n]*--no-resume \(resume=False\)$"):
        pipeline.run(_job(source, tmp_path / "out"), progress=False)
    assert _bytes_of(folder) == kept
    pipeline.run(_job(source, tmp_path / "out", resume=False), progress=False)
    assert _weights(tmp_path / "out") == _weights(tmp_path / "whole")


def test_a_damaged_beginning_says_how_to_begin_anew(source, tmp_path, monkeypatch):
    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    (tmp_path / "out.partial" / FOLDER / "begun.json").write_text('{"a" 1}')
    with pytest.raises(CheckpointError, match=r"begun.json cannot be read: .*: begin anew with --no-resume"):
        pipeline.run(_job(source, tmp_path / "out"), progress=False)


def test_a_piece_that_somebody_deleted_is_named(source, tmp_path, monkeypatch):
    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    next((tmp_path / "out.partial").glob("piece-*")).unlink()
    with pytest.raises(CheckpointError, match=r"piece-0000.\.draft is gone"):
        pipeline.run(_job(source, tmp_path / "out"), progress=False)


def test_states_of_one_layer_are_kept_and_none_at_the_end(source, tmp_path, monkeypatch):
    _leave_unfinished(source, tmp_path / "out", monkeypatch)
    journal = tmp_path / "out.partial" / FOLDER
    assert [file.name for file in journal.glob("states-*")] == ["states-00002.draft"]
    pipeline.run(_job(source, tmp_path / "out"), progress=False)
    assert not list((tmp_path / "out").glob(".*"))
