"""The command killed in the middle, and the same command again."""

import json
import signal
import subprocess
import sys

import pytest

from qinfer.calibrate.journal import finished_layers
from qinfer.testing import tiny_model

LAYERS = 3
TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("resume") / "source", num_hidden_layers=LAYERS)


_KILLED = """
import os, signal, sys
from qinfer.calibrate import pipeline
from qinfer.cli import main
real, calls = pipeline._quantize_layer, []

def killed(*arguments):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)

pipeline._quantize_layer = killed
main(sys.argv[1:])
"""


def test_sigkill_of_the_command_and_the_same_command_again(qinfer, source, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(TEXT))
    command = ["quantize", str(source), "--scheme", "awq", "--no-gate", "--num-samples", "4"]
    command += ["--calibration", str(tmp_path / "text.txt"), "--max-seq-len", "16", "--out"]
    out, whole = str(tmp_path / "out"), str(tmp_path / "whole")
    killed = subprocess.run([sys.executable, "-c", _KILLED, *command, out], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert finished_layers(tmp_path / "out.partial")
    other = qinfer(*command, out, "--seed", 7)
    assert other.code == 2
    assert "unfinished work of another command (seed was 42, is now 7)" in other.stderr
    again = json.loads(qinfer(*command, out, "--json").stdout)["report"]
    assert len(again["layers"]) == LAYERS
    assert again["resumed"] == 1  # and of their seconds none is counted
    assert qinfer(*command, whole).code == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]


def test_dry_run_says_how_many_layers_are_finished_and_touches_nothing(qinfer, source, tmp_path):
    out = tmp_path / "out"
    command = ["quantize", str(source), "--scheme", "fp8", "--no-gate", "--device", "cpu", "--out", str(out)]
    fresh = qinfer(*command, "--dry-run", "--json")
    assert fresh.code == 0
    plan = json.loads(fresh.stdout)
    assert (plan["finished"], plan["device"], plan["gpu_peak"]) == (0, "cpu", 0)
    unknown = qinfer(*command, "--device", "tpu")
    assert unknown.code == 2
    assert "unknown device 'tpu'; choose auto, cpu, cuda or cuda:N" in unknown.stderr
    assert list(tmp_path.iterdir()) == []
    killed = subprocess.run([sys.executable, "-c", _KILLED, *command], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    text = qinfer(*command, "--dry-run").stdout
    assert "1 layers are finished: the command that began them goes on behind them" in text
    assert finished_layers(tmp_path / "out.partial") == 1
    assert qinfer(*command, "--sym", "--dry-run").code == 2


def test_a_write_that_fails_is_one_line(source, tmp_path):
    out = tmp_path / "out"
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "from qinfer.cli import main; main(sys.argv[1:])"
    )
    command = ["quantize", str(source), "--scheme", "fp8", "--no-gate", "--out", str(out)]
    failed = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, check=False)
    assert failed.returncode == 2
    assert b"Traceback" not in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith(b"qinfer: File too large: ")
