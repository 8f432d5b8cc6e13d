"""Servers as processes of their own, with what they say on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qinfer.testing import wait_until


class Process:
    """`python *arguments`, whose stderr is in `said`."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.said.extend(self.popen.stderr)

    def wait_for(self, text: str) -> str:
        """The first line with this text; AssertionError where the process ends without."""

        def found() -> str | None:
            line = next((line for line in self.said if text in line), None)
            assert line or self._reader.is_alive(), f"no {text!r} in {self.said}"
            return line

        return str(wait_until(found))

    def url(self) -> str:
        """Where it serves, once it does."""
        return self.wait_for("is served at").split("is served at ")[1].split("/v1")[0]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.popen.send_signal(number)

    def exit_code(self) -> int:
        """Waits for the end."""
        wait_until(lambda: self.popen.poll() is not None)
        self._reader.join()
        return self.popen.returncode

    def children(self) -> list[int]:
        """Processes that it has started and that live."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):  # ended meanwhile
                continue
            if parent == self.popen.pid:
                found.append(int(status.parent.name))
        return found

    def close(self) -> None:
        """Kills what still runs."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._reader.join()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts Python with arguments; what still runs is killed after the test."""
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def start_stub(start: Callable[..., Process], tmp_path: Path) -> Callable[..., Process]:
    """Starts a stub server, which lets go of what it holds when there is tmp_path / "release".

    Keywords are ServerOptions.
    """

    def begin(**options: Any) -> Process:
        script = str(Path(__file__).with_name("stub_server.py"))
        return start(script, json.dumps(options), str(tmp_path / "release"))

    return begin
