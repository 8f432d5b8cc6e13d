"""deploy/: the unit and the container file name only what there is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import typer.main

from qinfer.cli import app

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
SERVE = typer.main.get_command(app).commands["serve"]
OPTIONS = {flag for option in SERVE.params for flag in (*option.opts, *option.secondary_opts)}


def settings(text: str) -> dict[str, list[str]]:
    """The values of a file of NAME=VALUE lines, by name."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_the_unit_starts_what_there_is_with_what_its_settings_say() -> None:
    unit = settings((DEPLOY / "qinfer.service").read_text())
    environment = settings((DEPLOY / "serve.env").read_text())
    (command,) = unit["ExecStart"]
    words = shlex.split(command)
    assert words[:2] == ["/opt/qinfer/bin/qinfer", "serve"]
    assert flags(words) == {"--host", "--port", "--shutdown-timeout"} & OPTIONS
    assert set(re.findall(r"\$\{?(\w+)", command)) == set(environment)
    assert "#QINFER_API_KEY=" in (DEPLOY / "serve.env").read_text()
    grace = int(words[words.index("--shutdown-timeout") + 1])
    assert int(unit["TimeoutStopSec"][0]) > grace
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == (["on-failure"], ["2"])


def test_the_container_file_copies_and_starts_what_there_is() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().split()
    for step, rest in steps:
        if step == "COPY" and not rest.startswith("--from"):
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists(), name
                assert f"!{name}" in ignored
    (start,) = (json.loads(rest) for step, rest in steps if step == "CMD")
    assert start[0] == "serve"
    assert flags(start) <= OPTIONS
    (ports,) = (rest for step, rest in steps if step == "EXPOSE")
    assert start[start.index("--port") + 1] == ports
    assert f"127.0.0.1:{ports}/health" in text


def test_the_guide_names_only_what_there_is() -> None:
    guide = (DEPLOY / "README.md").read_text()
    ours = flags(re.findall(r"--[a-z][a-z-]+", guide))
    theirs = {
        "--build-arg",
        "--format",
        "--device",
        "--gpus",
        "--system",
        "--home-dir",
        "--now",
        "--config",
        "--worker-urls",
        "--policy",
    }
    assert ours - theirs <= OPTIONS
    for name in re.findall(r"`(?:deploy/)?(\w[\w./]+\.(?:service|env|yml|json)|Containerfile)`", guide):
        assert (DEPLOY / name).exists(), name
