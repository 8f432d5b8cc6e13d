"""AsyncLLM: outputs, aborts, deaths and ends, without HTTP."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from qinfer.async_llm import AsyncLLM
from qinfer.errors import EngineDeadError, EngineStoppedError, UserError
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import RequestOutputKind, SamplingParams


@pytest.fixture
def engine(fake_llm: Any) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(fake_llm)
    engine.scripted = fake_llm.engine
    yield engine
    assert engine.shutdown()


async def collect(engine: AsyncLLM, prompt: Any, request_id: str, **params: Any) -> list[RequestOutput]:
    return [out async for out in engine.generate(prompt, SamplingParams(**params), request_id)]


def scripted_text(engine: AsyncLLM, ids: list[int], count: int) -> str:
    return "".join(map(chr, engine.scripted.script(ids, 0)[:count]))


@pytest.mark.parametrize("prompt", ["ab", [97, 98], {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}])
def test_prompts_of_every_kind(engine, prompt):
    outputs = asyncio.run(collect(engine, prompt, "r", max_tokens=6))
    ids = engine.tokenizer.encode("ab") if "ab" in (prompt, *getattr(prompt, "values", tuple)()) else [97, 98]
    assert outputs[-1].finished
    assert outputs[-1].prompt_token_ids == ids
    assert outputs[-1].outputs[0].text == scripted_text(engine, ids, 6)
    for earlier, later in itertools.pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)


def test_a_slow_reader_sees_fewer_outputs_and_all_text(engine):
    async def slow() -> list[str]:
        texts = []
        async for output in engine.generate([97], SamplingParams(max_tokens=50), "slow"):
            texts.append(output.outputs[0].text)
            while engine.scripted.jobs:
                await asyncio.sleep(0.01)
        return texts

    texts = asyncio.run(slow())
    assert len(texts) <= 2
    assert texts[-1] == scripted_text(engine, [97], 50)


def test_deltas_join_to_the_whole(engine):
    outputs = asyncio.run(
        collect(engine, [97], "d", max_tokens=20, logprobs=1, output_kind=RequestOutputKind.DELTA)
    )
    parts = [output.outputs[0] for output in outputs]
    assert "".join(part.text for part in parts) == scripted_text(engine, [97], 20)
    assert [len(part.token_ids) for part in parts] == [len(part.logprobs) for part in parts]
    assert sum(len(part.token_ids) for part in parts) == 20


def test_many_at_once_do_not_mix(engine):
    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, [97 + i], f"r{i}", max_tokens=20) for i in range(20)))

    for i, outputs in enumerate(asyncio.run(all_of_them())):
        assert outputs[-1].outputs[0].text == scripted_text(engine, [97 + i], 20)


def test_mistakes_are_the_callers(engine):
    async def twice() -> None:
        engine.scripted.seconds_per_step = 0.02
        first = engine.generate([97], SamplingParams(max_tokens=100), "same")
        await anext(first)
        with pytest.raises(UserError, match="same"):
            await collect(engine, [97], "same")
        assert not (await anext(first)).finished, "the first one goes on"
        await first.aclose()
        await collect(engine, [97], "same", max_tokens=1)  # the id is free again

    asyncio.run(twice())
    with pytest.raises(UserError, match="vocabulary"):
        asyncio.run(collect(engine, [10**6], "big"))
    for prompt in ({}, {"prompt": 5}):
        with pytest.raises(UserError, match="prompt"):
            asyncio.run(collect(engine, prompt, "odd"))
    with pytest.raises(UserError, match="surrogate"):
        asyncio.run(collect(engine, "\ud83d", "half"))


def test_cancelling_the_consumer_aborts(engine):
    engine.scripted.hold = True

    async def cancelled() -> None:
        task = asyncio.create_task(collect(engine, [97], "c", max_tokens=200))
        while not engine.scripted.jobs:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not engine.scripted.aborted or engine.stats.num_running:
            await asyncio.sleep(0.01)

    asyncio.run(cancelled())
    assert engine.scripted.aborted == ["c"]
    assert engine.stats.num_running == 0


def test_an_aborted_request_for_the_last_output_alone_ends_with_what_there_is(engine):
    engine.scripted.seconds_per_step = 0.01
    params = {"max_tokens": 200, "output_kind": RequestOutputKind.FINAL_ONLY}

    async def aborted() -> list[RequestOutput]:
        task = asyncio.create_task(collect(engine, [97], "f", **params))
        while engine.scripted.num_steps < 4:
            await asyncio.sleep(0.01)
        await engine.abort("f")
        return await task

    (last,) = asyncio.run(aborted())
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) >= 3
    assert last.outputs[0].text == scripted_text(engine, [97], len(last.outputs[0].token_ids))


def test_outputs_that_were_kept_do_not_change(engine):
    async def kept() -> list[tuple[RequestOutput, RequestOutput]]:
        stream = engine.generate([97], SamplingParams(max_tokens=20, n=2, logprobs=1), "k")
        return [(output, copy.deepcopy(output)) async for output in stream]

    pairs = asyncio.run(kept())
    assert len(pairs) > 1
    assert all(output == then for output, then in pairs)
    assert pairs[-1][0].metrics.last_token_ts > pairs[0][0].metrics.last_token_ts


def test_abort_by_id_ends_the_stream_with_what_there_is(engine):
    engine.scripted.seconds_per_step = 0.01

    async def aborted() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate([97], SamplingParams(max_tokens=200, n=2), "a"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort(["unknown", "a"])
        return outputs

    last = asyncio.run(aborted())[-1]
    assert last.finished
    assert [choice.finish_reason for choice in last.outputs] == ["abort", "abort"]
    assert len(last.outputs[0].token_ids) >= 3
    assert engine.scripted.aborted == ["a"]


def test_h14_death_reaches_everyone(engine, caplog):
    engine.scripted.seconds_per_step = 0.01
    engine.scripted.fail_at_step = 3

    async def die() -> list[Any]:
        await engine.check_health()
        requests = (collect(engine, [97 + i], f"r{i}", max_tokens=50) for i in range(3))
        return await asyncio.gather(*requests, return_exceptions=True)

    assert [type(result) for result in asyncio.run(die())] == [EngineDeadError] * 3
    assert engine.errored
    assert not engine.is_running
    assert "RuntimeError" in str(engine.dead_error)
    assert "scripted failure" in caplog.text
    for late in (collect(engine, [97], "late"), engine.check_health()):
        with pytest.raises(EngineDeadError):
            asyncio.run(late)


def test_a_bug_in_add_is_a_death_too(engine, monkeypatch, caplog):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.scripted, "add", broken)
    with pytest.raises(EngineDeadError):
        asyncio.run(collect(engine, [97], "r"))
    assert engine.errored
    assert "ZeroDivisionError" in caplog.text


def test_shutdown_ends_requests_and_joins_the_thread(engine):
    engine.scripted.hold = True

    async def stopped() -> None:
        task = asyncio.create_task(collect(engine, [97], "s", max_tokens=200))
        while not engine.scripted.jobs:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineStoppedError):
            await task
        with pytest.raises(EngineStoppedError):
            await collect(engine, [97], "later")
        with pytest.raises(EngineStoppedError):
            await engine.check_health()

    asyncio.run(stopped())
    assert engine.scripted.aborted == ["s"]


def test_a_loop_that_is_gone_does_not_hurt_the_others(engine):
    engine.scripted.seconds_per_step = 0.02

    async def leave() -> None:
        stream = engine.generate([97], SamplingParams(max_tokens=30), "gone")
        await anext(stream)
        streams.append(stream)  # kept, so that nothing closes it

    streams: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    outputs = asyncio.run(collect(engine, [98], "here", max_tokens=5))
    assert outputs[-1].outputs[0].text == scripted_text(engine, [98], 5)
    assert not engine.errored
