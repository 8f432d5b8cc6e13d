"""A server in a process of its own, as an operator has it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import pytest


class Running(NamedTuple):
    """A process that serves, and where."""

    pid: int
    url: str


ServeProcess = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def serve_process() -> ServeProcess:
    """A context manager: `qinfer serve` with these words, on a free port; it must end with 0."""

    @contextmanager
    def start(*words: str) -> Iterator[Running]:
        command = [sys.executable, "-m", "qinfer", "serve", *words, "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            lines = []
            for line in server.stdout:  # one document, and nothing after it
                lines.append(line)
                if line.rstrip() == "}":
                    break
            try:
                yield Running(server.pid, json.loads("".join(lines))["url"])
            finally:
                server.send_signal(signal.SIGTERM)
                assert server.wait(120) == 0

    return start
