"""What AsyncLLM offers beside requests: pausing, draining, forgetting, the log; and loading by arguments."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qinfer import AsyncEngineArgs
from qinfer.async_llm import AsyncLLM
from qinfer.engine.options import EngineStats
from qinfer.errors import EngineStoppedError, UserError
from qinfer.llm import LLM
from qinfer.sampling_params import SamplingParams
from qinfer.stat_log import INTERVAL, StatLog


@pytest.fixture
def engine(fake_llm: Any) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(fake_llm)
    engine.scripted = fake_llm.engine
    yield engine
    assert engine.shutdown()


async def ask(engine: AsyncLLM, request_id: str, count: int) -> str:
    text = ""
    async for output in engine.generate([97], SamplingParams(max_tokens=count), request_id):
        text = output.outputs[0].text
    return text


def test_an_engine_is_loaded_by_arguments(model_dir):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model_dir), num_kv_blocks=64, max_model_len=64))
    try:
        assert engine.max_model_len == 64
        assert asyncio.run(ask(engine, "r", 3))
    finally:
        assert engine.shutdown()


def test_a_paused_engine_goes_on_where_it_stopped(engine):
    async def run() -> tuple[str, int, int]:
        scripted = engine.scripted
        scripted.seconds_per_step = 0.01
        answer = asyncio.ensure_future(ask(engine, "r", 250))
        while not scripted.num_steps:
            await asyncio.sleep(0.005)
        await engine.pause_generation()
        await engine.ask(lambda _: None)  # behind the pause in the queue
        before = scripted.num_steps
        await asyncio.sleep(0.1)
        during = scripted.num_steps
        await engine.resume_generation()
        return await answer, before, during

    text, before, during = asyncio.run(run())
    assert before == during < 250
    assert text == "".join(map(chr, engine.scripted.script([97], 0)[:250]))


def test_draining_waits_for_the_last_request(engine):
    async def run() -> None:
        engine.scripted.hold = True
        answers = [asyncio.ensure_future(ask(engine, str(i), 20)) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await engine.wait_for_requests_to_drain(0.01)
        engine.scripted.hold = False
        await engine.wait_for_requests_to_drain()
        assert not engine.scripted.jobs
        assert all(await asyncio.gather(*answers))
        await engine.wait_for_requests_to_drain(0.5)

    asyncio.run(run())


def test_the_prefix_cache_is_forgotten_on_the_engines_thread(engine):
    assert asyncio.run(engine.reset_prefix_cache())
    assert engine.scripted.num_resets == 1
    engine.shutdown()
    with pytest.raises(EngineStoppedError):
        asyncio.run(engine.reset_prefix_cache())


def test_what_is_not_there_says_so(engine):
    async def run() -> None:
        async for _ in engine.generate([97], None, "r", lora_request="x"):
            pass

    with pytest.raises(NotImplementedError, match="lora_request"):
        asyncio.run(run())
    for name in ("sleep", "wake_up", "collective_rpc"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(engine, name)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = engine.nonsense


def test_a_question_that_is_a_mistake_is_its_askers(engine):
    def mistaken(_: Any) -> None:
        raise UserError("no such thing")

    with pytest.raises(UserError, match="no such thing"):
        asyncio.run(engine.ask(mistaken))
    assert asyncio.run(ask(engine, "after", 3))


def test_an_asker_who_leaves_does_the_engine_no_harm(engine):
    async def run() -> str:
        go_on = threading.Event()
        first = asyncio.ensure_future(engine.ask(lambda _: go_on.wait()))
        left = asyncio.ensure_future(engine.ask(lambda _: "nobody listens"))
        await asyncio.sleep(0)  # both are put
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        go_on.set()
        assert await first
        return await engine.ask(lambda _: "answered")

    assert asyncio.run(run()) == "answered"
    assert not engine.errored
    assert asyncio.run(ask(engine, "after", 3))


def test_vectors_and_recordings_of_a_real_engine(model_dir, tmp_path, monkeypatch):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model_dir), num_kv_blocks=64))

    async def run() -> tuple[list[Any], Path]:
        with pytest.raises(UserError, match="QINFER_TORCH_PROFILER_DIR"):
            await engine.start_profile()
        monkeypatch.setenv("QINFER_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
        with pytest.raises(UserError, match="start it first"):
            await engine.stop_profile()
        await engine.start_profile("mine")
        with pytest.raises(UserError, match="stop it first"):
            await engine.start_profile()
        found = [output async for output in engine.encode("One text", None, "v")]
        return found, await engine.stop_profile()

    try:
        (vector,), path = asyncio.run(run())
    finally:
        assert engine.shutdown()
    (expected,) = LLM(str(model_dir), num_kv_blocks=64).embed("One text", use_tqdm=False)
    assert vector.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=1e-5)
    assert path.name.startswith("mine-qinfer-")
    assert b"aten::" in gzip.decompress(path.read_bytes())


def stats(**counts: float) -> EngineStats:
    empty = EngineStats(0, 0, 0.0, 1000, 0, 0, 0, 0, 0, 0)
    return empty._replace(**counts)


def test_the_log_has_averages_since_its_last_line(caplog):
    caplog.set_level(logging.INFO, logger="qinfer")
    log, start = StatLog(stats()), time.monotonic()
    busy = stats(num_running=2, num_waiting=1, kv_usage=0.25, generation_tokens=500, prompt_tokens=100)
    busy = busy._replace(prefix_queries=200, prefix_hits=50, num_preemptions=3)
    log.tick(busy, start + INTERVAL / 2)
    assert caplog.text == ""
    log.tick(busy, start + INTERVAL)
    (line,) = caplog.messages
    assert line.startswith("Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 50.0 tokens/s, ")
    assert "Running: 2 reqs, Waiting: 1 reqs, Preemptions: 3, KV cache usage: 25.0%" in line
    assert line.endswith("Prefix cache hit rate: 25.0%")
    log.write(busy._replace(num_running=0, num_waiting=0), start + 2 * INTERVAL)  # nothing new: DEBUG
    assert len(caplog.messages) == 1


def test_the_log_may_be_asked_for(engine, caplog):
    caplog.set_level(logging.DEBUG, logger="qinfer")
    asyncio.run(engine.do_log_stats())
    assert "Avg generation throughput: 0.0 tokens/s" in caplog.text
