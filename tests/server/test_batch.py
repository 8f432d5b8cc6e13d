"""A batch on a scripted engine: every line as the server would answer it, in order, and what ends a run."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from qinfer.async_llm import AsyncLLM
from qinfer.batch.check import check
from qinfer.batch.output import written_before
from qinfer.batch.run import Batch, BatchFiles, FailedLineError, Pace
from qinfer.errors import EngineDeadError
from qinfer.server.options import ServerOptions
from qinfer.server.state import ServerState

ROUTES = {
    "/v1/completions": {"prompt": "x y z", "max_tokens": 5, "logprobs": 1, "echo": True, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}
REFUSED = [
    ("/v1/completions", {"prompt": "x", "temperature": 7}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 400}]}),
    ("/v1/completions", {"prompt": "x", "model": "other"}),
    ("/v1/responses", {"input": "x", "conversation": "c"}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
]


def entry(custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in entries))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(llm: Any, files: BatchFiles, first: int = 0, **pace: Any) -> dict[str, Any]:
    """Runs a batch on a fresh engine of that LLM; the engine is shut down whatever comes."""
    engine = AsyncLLM(llm)
    try:
        state = ServerState(engine, ("tiny",), llm.gate, ServerOptions())
        count = check(files.source, ("tiny",)).num_lines
        batch = Batch(state, files, Pace(**{"max_inflight": 16, **pace}), count, first)
        return asyncio.run(batch.run())
    finally:
        assert engine.shutdown(60)


def anonymous(body: Any) -> Any:
    """Without what is new every time."""
    if isinstance(body, dict):
        names = ("id", "created", "created_at", "completed_at", "system_fingerprint")
        return {name: anonymous(value) for name, value in body.items() if name not in names}
    return [anonymous(value) for value in body] if isinstance(body, list) else body


def test_lines_are_answered_and_refused_as_over_http(tmp_path, served, fake_llm):
    asked = [*ROUTES.items(), *REFUSED]
    entries = [entry(str(i), url, body) for i, (url, body) in enumerate(asked)]
    files = BatchFiles(written(tmp_path / "in", entries), tmp_path / "out")
    document = run(fake_llm, files)
    assert (document["num_lines"], document["num_failed"]) == (10, 7)
    assert document["output_tokens"] == 5 * 2 + 6 + 4
    for (url, body), line in zip(asked, answers(files.output), strict=True):
        expected = served.post(url, body)
        assert line["response"]["status_code"] == expected.status_code
        assert anonymous(line["response"]["body"]) == anonymous(expected.json())
        assert (line["error"] is None) == (expected.status_code == 200)
        if line["error"]:
            assert line["error"]["message"] == expected.json()["error"]["message"]


def test_output_is_in_order_and_the_longest_are_asked_first(tmp_path, fake_llm):
    generator = random.Random(3)
    lengths = [generator.randint(1, 60) for _ in range(100)]
    entries = [{"prompt": f"{i}", "max_tokens": length} for i, length in enumerate(lengths)]
    files = BatchFiles(written(tmp_path / "in", entries), tmp_path / "out")
    run(fake_llm, files, max_inflight=4, block_lines=100)
    lines = answers(files.output)
    assert [line["custom_id"] for line in lines] == [f"line-{i + 1}" for i in range(100)]
    counts = [line["response"]["body"]["usage"]["completion_tokens"] for line in lines]
    assert counts == lengths
    asked = [params.max_tokens for params in fake_llm.engine.seen]
    assert min(asked[:4]) > 0.7 * max(lengths)
    assert min(asked[:45]) > max(asked[55:])


def test_never_more_under_way_than_allowed(tmp_path, fake_llm):
    most = 0
    step = fake_llm.engine.step

    def counted() -> Any:
        nonlocal most
        most = max(most, len(fake_llm.engine.jobs))
        return step()

    fake_llm.engine.step = counted
    entries = [{"prompt": f"{i}", "max_tokens": 9} for i in range(60)]
    files = BatchFiles(written(tmp_path / "in", entries), tmp_path / "out")
    run(fake_llm, files, max_inflight=7, block_lines=10)
    assert 1 <= most <= 7


def test_an_engine_that_dies_leaves_a_beginning_to_go_on_from(tmp_path, fake_llm):
    entries = [{"prompt": f"{i}", "max_tokens": 1 + i % 20} for i in range(50)]
    files = BatchFiles(written(tmp_path / "in", entries), tmp_path / "out")
    fake_llm.engine.fail_at_step = 100  # after the first block, before the last, however many run at once
    with pytest.raises(EngineDeadError):
        run(fake_llm, files, max_inflight=4, block_lines=10)
    first = written_before(files.source, files.output, None).num_lines
    assert 0 < first < 50
    fake_llm.engine.fail_at_step = None
    fake_llm.engine.jobs.clear()
    document = run(fake_llm, files, first, max_inflight=4, block_lines=10)
    assert (document["num_lines"], document["num_resumed"]) == (50, first)
    lines = answers(files.output)
    assert [line["custom_id"] for line in lines] == [f"line-{i + 1}" for i in range(50)]
    fresh = BatchFiles(files.source, tmp_path / "fresh")
    run(fake_llm, fresh)
    texts = [line["response"]["body"]["choices"][0]["text"] for line in lines]
    assert texts == [line["response"]["body"]["choices"][0]["text"] for line in answers(fresh.output)]


def test_the_first_failure_may_end_it(tmp_path, fake_llm):
    entries = [{"prompt": "x", "max_tokens": 3}, {"prompt": "x", "temperature": 7}, {"prompt": "x"}]
    files = BatchFiles(written(tmp_path / "in", entries), tmp_path / "out")
    with pytest.raises(FailedLineError, match="line 2 failed: temperature must be"):
        run(fake_llm, files, fail_fast=True)
    assert written_before(files.source, files.output, None).num_lines < 3


def test_errors_in_a_file_of_their_own(tmp_path, fake_llm):
    entries = [{"prompt": "x", "temperature": 7 if i % 2 else 1} for i in range(6)]
    files = BatchFiles(written(tmp_path / "in", entries), tmp_path / "out", tmp_path / "err")
    assert run(fake_llm, files)["num_failed"] == 3
    assert [line["custom_id"] for line in answers(files.output)] == ["line-1", "line-3", "line-5"]
    assert files.errors is not None
    assert [line["response"] for line in answers(files.errors)] == [None] * 3
