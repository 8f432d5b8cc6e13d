"""Clients that leave in the middle of anything: nothing runs on, and every page is free again."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import httpx

TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
HELLO = [{"role": "user", "content": "Say something."}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "n": 2}),
    ("/chat/completions", {"messages": HELLO, "ignore_eos": True, "stream": True}),
    ("/chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}),
    ("/chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}, "stream": True}),
    ("/responses", {"input": "x", "ignore_eos": True, "stream": True}),
    ("/embeddings", {"input": ["word " * 40] * 64}),
    ("/completions", {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "n": 4, "use_beam_search": True}),
]


def test_three_hundred_clients_leave_nothing_behind(url, llm):
    def leave(i: int) -> str:
        path, body = REQUESTS[i % len(REQUESTS)]
        patience = 0.02 + 0.01 * (i % 9)
        try:
            httpx.post(url + path, json=body, headers={"authorization": "Bearer key"}, timeout=patience)
        except httpx.TimeoutException:
            return "left"
        return "answered"

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        ends = list(pool.map(leave, range(300)))
    assert ends.count("left") > 60
    end = time.monotonic() + 120
    while llm.engine.has_unfinished() or llm.engine.stats().kv_usage:
        assert time.monotonic() < end, llm.engine.stats()
        time.sleep(0.05)
    assert llm.engine.stats().num_running == llm.engine.stats().num_waiting == 0
    body = {"prompt": "x", "max_tokens": 3}
    answer = httpx.post(f"{url}/completions", json=body, headers={"authorization": "Bearer key"}, timeout=120)
    assert answer.status_code == 200
