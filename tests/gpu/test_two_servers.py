"""Two servers share a GPU: started at once, each plans within its own budget, and both answer at once."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.engine.footprint import GIB
from qinfer.testing import tiny_model

pytestmark = pytest.mark.gpu

LIMITS = ("--memory", "3GiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "512")
Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server on a port of its own; every one that was started must end cleanly."""
    folder = tiny_model("qwen3", tmp_path / "model", dtype="bfloat16", head_dim=64)
    command = [sys.executable, "-m", "qinfer", "serve", str(folder), "--port", "0", "--json", *LIMITS]
    servers: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        servers.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE))
        return servers[-1]

    yield begin
    for server in servers:
        server.send_signal(signal.SIGTERM)
    assert [server.communicate()[0] for server in servers] == [""] * len(servers)
    assert [server.returncode for server in servers] == [0] * len(servers)


def ready(server: subprocess.Popen[str]) -> dict[str, Any]:
    """The document that it tells once requests are answered."""
    assert server.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] not in ("}\n", ""):  # "": it ended
        lines.append(server.stdout.readline())
    document: dict[str, Any] = json.loads("".join(lines))
    return document


def load(url: str, answers: list[dict[str, Any]]) -> None:
    """Thirty-two choices, more than run at a time, and one that is bound to a form."""
    with httpx.Client(base_url=url, timeout=None) as client:
        body = {"prompt": [list(range(3 * i, 3 * i + 40)) for i in range(32)], "max_tokens": 64}
        answers.append(client.post("/v1/completions", json={**body, "ignore_eos": True}).json())
        form = {"prompt": "A year:", "max_tokens": 8, "structured_outputs": {"regex": "(19|20)[0-9]{2}"}}
        answers.append(client.post("/v1/completions", json=form).json())


def test_two_servers_keep_to_their_budgets_and_answer_at_once(start: Start) -> None:
    documents = [ready(server) for server in [start(), start()]]
    ledgers = [document["ledger"] for document in documents]
    assert [ledger["budget"] for ledger in ledgers] == [3 * GIB] * 2
    tokens = [ledger["tokens"] for ledger in ledgers]
    assert min(tokens) >= 0.98 * max(tokens), ledgers  # what the other one takes is no part of either's use
    answers: list[list[dict[str, Any]]] = [[], []]
    clients = [
        threading.Thread(target=load, args=(document["url"], found))
        for document, found in zip(documents, answers, strict=True)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for many, bound in answers:
        assert many["usage"]["completion_tokens"] == 32 * 64
        assert [choice["finish_reason"] for choice in many["choices"]] == ["length"] * 32
        (year,) = bound["choices"]
        assert year["text"].isdecimal()
        assert year["text"][:2] in ("19", "20")
        assert len(year["text"]) == 4
