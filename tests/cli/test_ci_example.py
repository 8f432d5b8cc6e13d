"""The example of docs/ci stops a pipeline at a bad checkpoint, run as a pipeline would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qinfer import jobs
from qinfer.evals import thresholds
from qinfer.testing import tiny_model

QINFER = str(Path(sys.executable).parent / "qinfer")
CI = Path(__file__).resolve().parents[2] / "docs" / "ci"


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(2048, 1.0))
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    out = tmp_path / "small"
    jobs.quantize(str(source), out, scheme="w8a16-int8", profile="quick", progress=False)
    return out


def run(*arguments, **variables):
    environment = {**os.environ, "QINFER": QINFER, **variables}
    command = ["sh", str(CI / "gate.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_script_lets_a_good_checkpoint_through_and_stops_at_a_bad_one(checkpoint, tmp_path):
    good = run(checkpoint)
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith("served: gate passed")

    with (checkpoint / "chat_template.jinja").open("a") as file:
        file.write("{# harmless? #}")
    changed = run(checkpoint)
    assert changed.returncode == 1
    assert "stale: chat_template.jinja changed" in changed.stdout


@pytest.mark.parametrize(("code", "called"), [(0, ["eval", "gate"]), (1, ["eval"])])
def test_a_failed_judgement_ends_the_script(tmp_path, code, called):
    command, log = tmp_path / "qinfer", tmp_path / "log"
    command.write_text(f'#!/bin/sh\necho "$*" >> "{log}"\nexit {code}\n')
    command.chmod(0o755)
    ran = run("small", "big", QINFER=str(command), PROFILE="strict", TRUST="key.pub")
    assert ran.returncode == code
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == called
    assert lines[0] == "eval small --against big --profile strict --kv-cache-dtype auto"
    assert lines[1:] in ([], ["gate small --kv-cache-dtype auto --trust key.pub"])


def test_the_workflow_runs_the_script_before_it_releases():
    workflow = yaml.safe_load((CI / "github-actions.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["gate"]["steps"]]
    assert any("docs/ci/gate.sh" in step for step in steps)
    assert workflow["jobs"]["release"]["needs"] == "gate"
