"""What is more than an engine takes on at once is refused before a stream begins, and may come back."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from qinfer.async_llm import AsyncEngineArgs, AsyncLLM
from qinfer.errors import OverloadedError, UserError
from qinfer.intake import Intake
from qinfer.sampling_params import SamplingParams
from qinfer.server.door import Door
from qinfer.testing import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_intake_counts_in_and_out():
    intake = Intake(4, 100)
    intake.enter(3, 60)
    for more, reason in (((2, 1), "queue_full"), ((1, 41), "queued_tokens")):
        with pytest.raises(OverloadedError, match="try again later") as raised:
            intake.enter(*more)
        assert raised.value.reason == reason
    assert (intake.num_sequences, intake.num_tokens) == (3, 60), "what was refused is not in"
    intake.enter(1, 40)
    intake.leave(3, 60)
    intake.enter(3, 60)
    with pytest.raises(UserError, match="5 sequences, and at most 4"):
        intake.check(5, 1)
    Intake().enter(10**9, 10**12)
    with pytest.raises(UserError, match="max_num_queued_reqs must be a whole number of at least 1"):
        Intake(0)


async def _read(engine: AsyncLLM, request_id: str, **params: Any) -> int:
    seen = 0
    async for output in engine.generate([97], SamplingParams(**params), request_id):
        seen = len(output.outputs[0].token_ids)
    return seen


@pytest.mark.parametrize("end", ["finished", "aborted", "refused", "died"])
def test_whatever_ends_a_request_makes_room(fake_llm, end):
    async def run() -> None:
        engine = AsyncLLM(fake_llm, max_num_queued_reqs=2)
        scripted = fake_llm.engine
        try:
            if end == "finished":
                assert await _read(engine, "a", max_tokens=3, n=2) == 3
            elif end == "aborted":
                stream = engine.generate([97], SamplingParams(max_tokens=200, n=2), "a")
                await anext(stream)
                await stream.aclose()
            elif end == "refused":
                with pytest.raises(UserError, match="vocabulary"):
                    await anext(engine.generate([10**6], SamplingParams(n=2), "a"))
            else:
                scripted.fail_at_step = scripted.num_steps
                with pytest.raises(Exception, match="the engine has died"):
                    await _read(engine, "a", max_tokens=3, n=2)
            await engine.wait_for_requests_to_drain(60)
            if end != "died":
                assert await _read(engine, "b", max_tokens=3, n=2) == 3
        finally:
            assert await asyncio.to_thread(engine.shutdown, 60)

    asyncio.run(run())


def test_over_the_limit_a_request_is_refused_and_the_others_go_on(fake_llm):
    async def run() -> None:
        engine = AsyncLLM(fake_llm, max_num_queued_reqs=3, max_num_queued_tokens=100)
        fake_llm.engine.hold = True
        try:
            first = asyncio.ensure_future(_read(engine, "a", max_tokens=100, n=2))
            while not fake_llm.engine.jobs:
                await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError):
                await _read(engine, "b", n=2)
            third = asyncio.ensure_future(_read(engine, "c", max_tokens=2))
            while len(fake_llm.engine.jobs) < 2:
                await asyncio.sleep(0.01)
            fake_llm.engine.hold = False
            assert (await third, await first) == (2, 100)
        finally:
            assert await asyncio.to_thread(engine.shutdown, 60)

    asyncio.run(run())


def test_limits_are_engine_arguments(model_dir):
    arguments = AsyncEngineArgs(str(model_dir), num_kv_blocks=16, max_num_queued_reqs=1)
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        engine.require_room(1, 10**6)
        with pytest.raises(UserError, match="at most 1"):
            engine.require_room(2, 1)
    finally:
        assert engine.shutdown(60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_before_a_stream_begins(serve_scripted, stream):
    with ThreadPoolExecutor(1) as pool, serve_scripted(max_num_queued_reqs=4) as served:
        served.scripted.hold = True
        first = pool.submit(served.post, COMPLETIONS, {"prompt": "a", "n": 3, "max_tokens": 200})
        wait_until(lambda: served.scripted.jobs)
        for path, body in (
            (COMPLETIONS, {"prompt": ["a", "b"]}),
            (CHAT, {"messages": HELLO, "n": 2}),
            ("/v1/embeddings", {"input": ["a", "b"]}),
        ):
            answer = served.post(path, {**body, "stream": stream})
            assert answer.status_code == 503, (path, answer.text)
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert served.post(COMPLETIONS, {"prompt": "a", "n": 5}).status_code == 400
        served.scripted.hold = False
        assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert first.result().status_code == 200
        metrics = served.get("/metrics").text
    assert 'qinfer_requests_rejected_total{model_name="tiny",reason="queue_full"} 3.0' in metrics


def test_a_shut_door_lets_operators_in_only(serve_scripted):
    door = Door()
    with serve_scripted(door=door) as served:
        assert served.get("/health").status_code == 200
        door.shut()
        assert served.get("/health").status_code == served.get("/ping").status_code == 503
        for answer in (served.post(COMPLETIONS, {"prompt": "a"}), served.get("/v1/models")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["message"] == "the server is shutting down"
        metrics = served.get("/metrics").text
    assert 'qinfer_requests_rejected_total{model_name="tiny",reason="draining"} 2.0' in metrics


def test_long_words_of_one_request_hold_up_nobody(serve_scripted, monkeypatch):
    with serve_scripted() as served:
        spelling, go_on = threading.Event(), threading.Event()
        encode = served.scripted.tokenizer.encode

        def slow(text: str, **more: Any) -> list[int]:
            if "forbidden" in text:
                spelling.set()
                assert go_on.wait(60)
            return encode(text, **more)

        monkeypatch.setattr(served.scripted.tokenizer, "encode", slow)
        body = {"prompt": "a", "max_tokens": 40, "bad_words": ["forbidden"]}
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=served.url, timeout=60) as other:
            answer = pool.submit(other.post, "/v1/completions", json=body)
            assert spelling.wait(60)
            assert served.post("/v1/completions", {"prompt": "b", "max_tokens": 4}).status_code == 200
            assert not answer.done()
            go_on.set()
            assert answer.result().status_code == 200
        assert len(served.scripted.seen) == 2
