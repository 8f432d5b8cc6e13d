"""Sixty-four streaming clients, again and again: no error, no word lost, no memory that only grows.

The server is a process of its own, on a tiny random model. A stream says exactly what the same request says
whole: greedily or with a seed, whatever else runs beside it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from qinfer.bench.http_client import Address
from qinfer.bench.sample import Sample, Target, ask, since
from qinfer.testing import tiny_model

CLIENTS = 64
PROMPTS = 40
GROWTH = 1.05  # of the resident memory, in the last third of the load


@pytest.fixture
def server(tmp_path: Path, serve_process: Any) -> Iterator[Any]:
    folder = tiny_model("smollm2", tmp_path / "tiny", max_position_embeddings=256)
    with serve_process(str(folder), "--served-model-name", "tiny") as server:
        yield server


def asked(i: int) -> dict[str, Any]:
    """The fields of one of the requests; lengths, samplings and chats differ."""
    prompt = f"{i} is a number that " + "and so on " * (i % 12)
    how: dict[str, Any] = {"temperature": 0} if i % 3 else {"temperature": 1, "seed": i}
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8 + i % 30,
        **how,
    }


async def load(server: Any, seconds: float) -> tuple[list[tuple[int, Sample]], list[int]]:
    """What the clients got, each with the number of its request; and the memory of both processes."""
    server_process = psutil.Process(server.pid)
    processes = [server_process, *server_process.children()]
    target = Target(Address.of(server.url), "/v1/chat/completions", True, {})
    memory: list[int] = []
    clock = since(time.perf_counter())
    found: list[tuple[int, Sample]] = []

    async def client(number: int) -> None:
        turn = number
        while clock() < seconds:
            i = turn % PROMPTS
            body = {**asked(i), "stream": True, "stream_options": {"include_usage": True}}
            sample = Sample(0)
            await ask(target, json.dumps(body).encode(), sample, clock)
            found.append((i, sample))
            turn += 7

    async def watch() -> None:
        while True:
            memory.append(sum(process.memory_info().rss for process in processes))
            await asyncio.sleep(0.2)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*map(client, range(CLIENTS)))
    watching.cancel()
    return found, memory


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_every_stream_is_whole_and_memory_is_flat(server: Any, seconds: int):
    with httpx.Client(base_url=server.url, timeout=300) as client:
        whole = [client.post("/v1/chat/completions", json=asked(i)).json() for i in range(PROMPTS)]
        found, memory = asyncio.run(load(server, seconds))
        stats = client.get("/metrics").text.splitlines()
    assert [sample.error for _, sample in found if not sample.ok] == []
    assert len(found) >= CLIENTS
    for i, sample in found:
        assert sample.text == whole[i]["choices"][0]["message"]["content"]
        assert sample.output_len == whole[i]["usage"]["completion_tokens"]
    third = len(memory) // 3
    assert max(memory[-third:]) <= GROWTH * max(memory[:-third])
    for name in ("qinfer_requests_running", "qinfer_requests_waiting", "qinfer_kv_cache_usage_ratio"):
        (value,) = [line.rsplit(" ", 1)[1] for line in stats if line.startswith(name)]
        assert float(value) == 0
