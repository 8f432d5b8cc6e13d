"""openai's client, from the oldest that knows responses to the newest, against the built-in model.

Each version lies in a folder of its own (`pip install --target`, kept in pytest's cache), with what it needs,
and runs its suite in a process that finds that folder first; the server has this environment's packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from qinfer.hub import BUILTIN

SUITE = Path(__file__).parent / "openai_suite.py"
VERSIONS = ("1.66.5", "2.0.0", version("openai"))  # responses came with 1.66


@pytest.fixture(scope="module")
def url(serve_process: Any) -> Iterator[str]:
    options = ("--api-key", "key", "--max-model-len", "1024", "--max-num-seqs", "8")
    with serve_process(BUILTIN, *options) as server:
        yield f"{server.url}/v1"


def installed(folder: Path, wanted: str) -> Path:
    """A folder with that version of openai, made where it is missing."""
    done = folder / "complete"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), f"openai=={wanted}"], check=True)
        done.touch()
    return folder


@pytest.fixture(scope="module")
def outcomes(url: str, pytestconfig: pytest.Config, tmp_path_factory: Any) -> dict[str, tuple[int, str]]:
    """Exit code and output of each version's suite; they run side by side, as clients do."""
    ini = tmp_path_factory.mktemp("suite") / "pytest.ini"
    ini.write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(ini), "--rootdir", str(ini.parent), str(SUITE)]
    running = {}
    for wanted in VERSIONS:
        folder = installed(pytestconfig.cache.mkdir(f"openai-{wanted}"), wanted)
        variables = {"PYTHONPATH": str(folder), "QINFER_URL": url, "QINFER_MODEL": BUILTIN}
        variables["OPENAI_VERSION"] = wanted
        environment = {**os.environ, **variables}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running[wanted] = subprocess.Popen(command, env=environment, **pipes)
    told = {wanted: process.communicate()[0] for wanted, process in running.items()}
    return {wanted: (process.returncode, told[wanted]) for wanted, process in running.items()}


@pytest.mark.parametrize("wanted", VERSIONS)
def test_the_client_sees_what_it_knows(wanted: str, outcomes: dict[str, tuple[int, str]]):
    code, told = outcomes[wanted]
    assert code == 0, told[-6000:]
