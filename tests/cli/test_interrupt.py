"""Ctrl-C at any moment: one line, exit code 130, no half of a model; the same command works afterwards."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from qinfer import compare
from qinfer.calibrate import pipeline
from qinfer.checkpoint import writer
from qinfer.cli import main
from qinfer.engine.engine import Engine
from qinfer.evals import thresholds
from qinfer.testing import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("interrupt") / "source", dtype="bfloat16")


@pytest.fixture(autouse=True)
def interruptible():
    """Whoever runs the tests in the background may have them ignore SIGINT, which children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def quick_profile(monkeypatch):
    monkeypatch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(2048, 3.0))


@pytest.fixture
def interrupted_in(monkeypatch):
    """interrupted_in(owner, name, call): Ctrl-C when that function is called for the `call`th time."""

    def arrange(owner, name, call):
        real, calls = getattr(owner, name), []

        def function(*arguments, **keywords):
            calls.append(name)
            if len(calls) == call:
                signal.raise_signal(signal.SIGINT)
            return real(*arguments, **keywords)

        monkeypatch.setattr(owner, name, function)

    return arrange


@pytest.mark.parametrize(
    ("owner", "name", "call", "left"),
    [
        (pipeline, "_quantize_layer", 1, []),
        (writer.CheckpointWriter, "add", 5, []),
        (pipeline, "_quantize_layer", 2, ["b.partial"]),
        (writer.CheckpointWriter, "add", 30, ["b.partial"]),
        (writer, "open_checkpoint", 1, ["b.partial"]),  # the last look before the folder gets its name
    ],
)
def test_quantize_leaves_what_is_finished_and_works_afterwards(
    qinfer, source, tmp_path, interrupted_in, owner, name, call, left
):
    command = ("quantize", source, "--scheme", "w8a16-int8", "--out", tmp_path / "a" / "b", "--no-gate")
    interrupted_in(owner, name, call)
    code, out, err = qinfer(*command)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "qinfer: interrupted"
    assert [path.name for path in tmp_path.glob("a/*")] == left
    assert left or list(tmp_path.iterdir()) == []
    assert qinfer(*command).code == 0
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_overwriting_keeps_the_old_one_until_the_new_one_is_whole(qinfer, source, tmp_path, interrupted_in):
    command = ("quantize", source, "--scheme", "w8a16-int8", "--out", tmp_path / "out", "--no-gate")
    assert qinfer(*command).code == 0
    before = (tmp_path / "out" / "qinfer_report.json").read_text()
    interrupted_in(writer, "open_checkpoint", 1)
    assert qinfer(*command, "--overwrite").code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out" / "qinfer_report.json").read_text() == before


def test_judging_that_was_interrupted_goes_on(qinfer, source, tmp_path, interrupted_in, caplog):
    out = tmp_path / "out"
    command = ("quantize", source, "--scheme", "w8a16-int8", "--out", out, "--profile", "quick")
    interrupted_in(Engine, "prompt_logits", 3)
    code, text, err = qinfer(*command)
    assert (code, text) == (130, "")
    assert err.splitlines()[-1] == "qinfer: interrupted"
    assert f"{out} is written but not judged: the same command goes on with judging" in caplog.text
    caplog.clear()
    report = json.loads((out / "qinfer_report.json").read_text())
    assert qinfer("generate", out, "-p", "hi").code == 1  # whole, but nobody has judged it

    other = qinfer(*command, "--seed", 7)
    assert other.code == 2
    assert "is not empty" in other.stderr

    code, text, err = qinfer(*command, "--json")
    assert code == 0
    assert "waits for its verdict: judging it" in caplog.text
    document = json.loads(text)
    assert document["gate"]["verdict"] == "PASS"
    assert document["report"] == report  # not quantized again
    names = [f"qinfer_gate.{kind}" for kind in ("html", "json", "md")]
    assert sorted(path.name for path in out.glob("qinfer_gate*")) == names
    assert not (out / "qinfer_waiting.json").exists()
    assert "not judged" not in caplog.text
    assert qinfer(*command).code == 2  # with its verdict it is finished


def test_the_command_that_an_interrupt_names_judges_what_was_written(
    qinfer, source, tmp_path, interrupted_in, caplog
):
    out = tmp_path / "o ut"
    interrupted_in(Engine, "prompt_logits", 3)
    command = ("quantize", source, "--scheme", "w8a16-int8", "--out", out, "--profile", "quick")
    assert qinfer(*command).code == 130
    (named,) = re.findall("or judge it with `(.*)`", caplog.text)
    assert named == f"qinfer eval '{out}' --against {source} --profile quick"
    assert qinfer(*shlex.split(named)[1:]).code == 0
    assert json.loads((out / "qinfer_gate.json").read_text())["verdict"] == "PASS"
    assert not (out / "qinfer_waiting.json").exists()
    assert qinfer("generate", out, "-p", "hi", "--max-tokens", 1).code == 0


@pytest.fixture
def waiting(qinfer, source, tmp_path, interrupted_in):
    """A quantize command with a text of its own whose judging was interrupted."""
    (tmp_path / "text.txt").write_text("Some text to calibrate on.\n\n" * 20)
    command = ("quantize", source, "--scheme", "int8", "--num-samples", 2, "--max-seq-len", 32)
    command += ("--calibration", tmp_path / "text.txt", "--out", tmp_path / "out", "--profile", "quick")
    interrupted_in(Engine, "prompt_logits", 3)
    assert qinfer(*command, "--overwrite").code == 130
    assert (tmp_path / "out" / "qinfer_waiting.json").exists()
    return (*command, "--overwrite")


def test_judging_goes_on_when_told_to_overwrite(qinfer, tmp_path, waiting, caplog):
    report = json.loads((tmp_path / "out" / "qinfer_report.json").read_text())
    code, text, _ = qinfer(*waiting, "--json")
    assert code == 0
    assert "waits for its verdict: judging it, not overwriting it" in caplog.text
    assert json.loads(text)["report"] == report  # with its seconds: not quantized again
    caplog.clear()
    again = json.loads(qinfer(*waiting, "--json").stdout)
    assert again["report"] != report  # with its verdict it was finished, and is now made anew
    assert "judging it" not in caplog.text


@pytest.mark.parametrize("change", ["argument", "no gate", "text", "weights"])
def test_what_was_made_otherwise_is_overwritten(qinfer, source, tmp_path, waiting, caplog, change):
    report = json.loads((tmp_path / "out" / "qinfer_report.json").read_text())
    more = {"argument": ("--seed", 7), "no gate": ("--no-gate",)}.get(change, ())
    if change == "text":
        (tmp_path / "text.txt").write_text("Another text to calibrate on.\n\n" * 20)
    if change == "weights":
        os.utime(source / "model.safetensors")
    result = qinfer(*waiting, *more, "--json")
    assert result.code == 0
    assert json.loads(result.stdout)["report"] != report
    assert "judging it" not in caplog.text


def test_eval_and_generate(qinfer, source, interrupted_in):
    interrupted_in(compare, "judge", 1)
    interrupted_in(Engine, "step", 3)
    for command in (
        ("eval", source, "--against", source, "--profile", "quick"),
        ("generate", source, "-p", "hi", "--max-tokens", 20),
    ):
        code, out, err = qinfer(*command)
        assert (code, out) == (130, "")
        assert err.splitlines()[-1] == "qinfer: interrupted"
        assert qinfer(*command).code == 0


def test_an_extension_that_turns_the_interrupt_into_an_error(qinfer, source, tmp_path, monkeypatch):
    def swallowing(*arguments):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr(pipeline, "_quantize_layer", swallowing)
    command = ("quantize", source, "--scheme", "w8a16-int8", "--out", tmp_path / "out")
    code, out, err = qinfer(*command)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "qinfer: interrupted"
    assert list(tmp_path.iterdir()) == []

    def broken(*arguments):
        raise ValueError("a bug of ours")

    monkeypatch.setattr(pipeline, "_quantize_layer", broken)
    with pytest.raises(ValueError, match="a bug of ours"):
        main([str(word) for word in command])


def test_an_interrupt_that_the_shell_ignores_stays_ignored(qinfer, source):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert qinfer("inspect", source).code == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert qinfer("inspect", source).code == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_ends_within_seconds_without_a_traceback(source, tmp_path):
    command = [sys.executable, "-m", "qinfer", "quantize", str(source), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        said = b""
        while b"smoothquant:" not in said:
            more = process.stderr.read1()
            assert more, said
            said += more
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, b""), err.decode()
    assert err.splitlines()[-1] == b"qinfer: interrupted"
    assert b"Traceback" not in said + err
    assert not (tmp_path / "out").exists()
