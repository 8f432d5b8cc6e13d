"""Faults of benchmarks that people report, on a real engine: what counts, and from when the clock runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from qinfer.async_llm import AsyncLLM
from qinfer.bench.http_client import Address
from qinfer.bench.sample import Sample, Target, ask, since
from qinfer.bench.serving_numbers import numbers
from qinfer.cli import main
from qinfer.llm import LLM
from qinfer.server.app import build_app
from qinfer.server.options import ServerOptions
from qinfer.testing import FakeRunner

PATIENCE = 120.0  # seconds
EOS = 258  # <|im_end|> of the tiny tokenizer
Serve = Callable[..., Any]


@pytest.fixture
def serve(model_dir: Path, run_app: Callable[..., Any]) -> Serve:
    @contextmanager
    def start(
        script: Any = None,
        seconds: float = 0.0,
        keys: tuple[str, ...] = (),
        held: Event | None = None,
        **more: Any,
    ) -> Iterator[str]:
        llm = LLM(str(model_dir), served_model_name="tiny", **{"num_kv_blocks": 256, **more})
        if script is not None:
            llm.engine.runner = SlowRunner(llm.engine.vocab_size, script, seconds, held)
        engine = AsyncLLM(llm)
        try:
            with run_app(build_app(engine, ServerOptions(api_keys=keys))) as url:
                yield url
        finally:
            assert engine.shutdown()

    return start


class SlowRunner(FakeRunner):
    """Says what it is told to; each step takes its time, the first begins when `held` is set."""

    def __init__(self, vocab_size: int, script: Any, seconds: float, held: Event | None) -> None:
        super().__init__(vocab_size, script)
        self.seconds, self.held = seconds, held

    def run(self, *args: Any, **more: Any) -> Any:
        if self.held:
            assert self.held.wait(PATIENCE)
        time.sleep(self.seconds)
        return super().run(*args, **more)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench(url, words...) -> exit code, stdout, stderr; no key in the environment."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(url: str, *words: object) -> tuple[int, str, str]:
        common = ("bench", "serve", "--base-url", url, "--tokenizer", model_dir, "--disable-tqdm")
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in (*common, *words)])
        return (left.value.code or 0, *capsys.readouterr())

    return run


def asked(url: str, prompts: list[list[int]], max_tokens: int) -> tuple[list[Sample], float]:
    """Samples of streamed completions, all sent at once, and how long the last took."""
    target = Target(Address.of(url), "/v1/completions", False, {})
    samples = [Sample(len(prompt)) for prompt in prompts]
    fields = {"model": "tiny", "temperature": 0.0, "max_tokens": max_tokens}
    bodies = [target.body("", max_tokens, {**fields, "prompt": prompt}) for prompt in prompts]
    clock = since(time.perf_counter())

    async def together() -> None:
        await asyncio.gather(*(ask(target, b, s, clock) for b, s in zip(bodies, samples, strict=True)))

    asyncio.run(together())
    return samples, clock()


def metric(url: str, name: str) -> float:
    found = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(f"{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_b01_output_is_what_was_said_not_what_was_allowed(serve):
    def script(prompt: list[int]) -> list[int]:
        return [70, 71, EOS] if prompt[0] == 3 else [70] * 10

    with serve(script) as url:
        samples, duration = asked(url, [[i] * 100 for i in range(4)], 10)
    document = numbers(samples, duration, [99.0], {})
    assert sorted(sample.output_len for sample in samples) == [3, 10, 10, 10]
    assert (document["total_output_tokens"], document["total_input_tokens"]) == (33, 400)
    assert document["output_throughput"] == pytest.approx(33 / duration)
    assert document["total_token_throughput"] == pytest.approx(433 / duration)


def test_b03_chunks_of_several_tokens():
    three = Sample(8, arrivals=[1.0, 1.2, 1.4, 1.6], sent=0.0, output_len=12)
    one = Sample(8, arrivals=[0.5], sent=0.0, output_len=1)
    document = numbers([three, one], 1.6, [99.0], {})
    assert document["mean_tpot_ms"] == pytest.approx(1e3 * 0.6 / 11)
    assert document["max_output_tokens_per_s"] == 12
    assert document["max_output_tokens_per_s"] >= document["output_throughput"] == 13 / 1.6
    alone = numbers([one], 1.0, [99.0], {})
    assert alone["mean_tpot_ms"] == 0.0


def test_b04_the_same_prompts_again_are_told(serve, bench, caplog):
    words = ("--num-prompts", 6, "--random-input-len", 40, "--random-output-len", 2, "--json")
    with serve() as url:
        first = bench(url, *words)
        assert first[0] == 0, first[2]
        assert json.loads(first[1])["prefix_cache_hit_rate"] < 0.01
        assert "prefix cache" not in caplog.text
        code, out, err = bench(url, *words)
        assert code == 0, err
        assert json.loads(out)["prefix_cache_hit_rate"] > 0.5
        assert "prefix cache" in caplog.text
        caplog.clear()
        other = bench(url, *words, "--seed", 1)
        assert json.loads(other[1])["prefix_cache_hit_rate"] < 0.01
        assert "prefix cache" not in caplog.text


def test_b06_the_clock_begins_before_the_queue(serve):
    seconds, tokens, held = 0.03, 6, Event()

    def let_go_when_all_have_come() -> None:
        while httpx.get(f"{url}/load").json()["server_load"] < 4:
            time.sleep(0.01)
        held.set()

    with serve([70] * tokens, seconds, held=held, max_num_seqs=1) as url:
        Thread(target=let_go_when_all_have_come).start()
        samples, _ = asked(url, [[i] * 20 for i in range(4)], tokens)
        told = metric(url, "qinfer_time_to_first_token_seconds_sum")
        waited = metric(url, "qinfer_request_queue_seconds_sum")
    assert all(sample.ok for sample in samples)
    began = min(sample.sent for sample in samples)
    ends = sorted(sample.sent + sample.first_token - began for sample in samples)
    for k, end in enumerate(ends):
        assert end >= (k * tokens + 1) * seconds
    for sample in samples:
        assert sample.arrivals == sorted(sample.arrivals)
        assert sample.sent <= sample.arrivals[0] <= sample.arrivals[-1]
    # as seen by the server: what the steps took, less what a request may arrive after the first (a clock that
    # began behind the queue would tell of no waiting), and no more than the clients saw
    late = 3
    least = sum(max(0, k * tokens - late) for k in range(4)) * seconds
    assert least + 4 * seconds <= told <= sum(sample.first_token for sample in samples)
    assert least <= waited <= told


def test_b07_no_key_is_no_header(serve, bench):
    words = ("--num-prompts", 2, "--random-input-len", 5, "--random-output-len", 2, "--json")
    with serve() as url:
        code, _, err = bench(url, *words)
        assert code == 0, err
    with serve(keys=("secret-key",)) as url:
        code, out, err = bench(url, *words)
        assert (code, out) == (2, "")
        assert "answers 401" in err
        assert "--api-key" in err
        assert "None" not in err
        code, out, err = bench(url, *words, "--api-key", "secret-key")
        assert code == 0, err
        assert json.loads(out)["completed"] == 2
