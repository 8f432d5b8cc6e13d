"""A server over HTTP for tests: a scripted engine behind the real app, uvicorn and sockets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from qinfer.async_llm import AsyncLLM
from qinfer.detokenizer import Detokenizer
from qinfer.engine.bad_words import BadWords
from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineStats, StepCounts, StepLimits
from qinfer.engine.pages import PagePool
from qinfer.engine.structured import Grammars
from qinfer.errors import UserError
from qinfer.evals.certificate import GateStatus
from qinfer.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from qinfer.quant import W4A16, W8A8Int8
from qinfer.sampling_params import SamplingParams
from qinfer.server.app import build_app
from qinfer.server.door import Door
from qinfer.server.options import ServerOptions
from qinfer.server.protocol_errors import JsonH11
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

MODEL = "tiny"
CONTEXT = 256
_DENSE = Ledger("float32", 1000, 600, 50, 0, 0, 320, 10, 16, CONTEXT)
LEDGER = Ledger("int8", 1000, 300, 50, 5, 1, 640, 40, 16, CONTEXT, _DENSE)
Script = Callable[[Sequence[int], int], Sequence[int]]  # prompt ids, choice -> the tokens that are "sampled"


def hashed_script(prompt_ids: Sequence[int], choice: int) -> list[int]:
    """300 printable ASCII tokens that follow from the prompt and the choice."""
    seed = hashlib.sha256(repr((list(prompt_ids), choice)).encode()).digest()
    return [97 + (seed[i % 32] + i * i) % 26 for i in range(300)]


@dataclass
class _Sequence:
    text: Detokenizer
    script: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class _Job:
    prompt_ids: list[int]
    prompt: str | None
    params: SamplingParams
    sequences: list[_Sequence]
    times: RequestStateStats


class ScriptedEngine:
    """The engine's interface with tokens from a script: one token per sequence and step.

    `fail_at_step` makes that step raise; `seconds_per_step` makes steps take time; `seen` lists the
    parameters of every request; steps make nothing while `hold` is set.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script = hashed_script) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.limits = StepLimits(CONTEXT, 64, 1024, 16)
        self.ledger = LEDGER
        self.vocab_size = tokenizer.vocab_size
        self.grammars = Grammars(tokenizer, tokenizer.vocab_size)
        self.bad_words = BadWords(tokenizer, CONTEXT)
        self.jobs: dict[str, _Job] = {}
        self.seen: list[SamplingParams] = []
        self.extras: list[tuple[int, str | None]] = []
        self.aborted: list[str] = []
        self.num_steps = self.num_resets = 0
        self.hold = False
        self.fail_at_step: int | None = None
        self.seconds_per_step = 0.0
        self.kv_cache_dtype = "int8"
        self.pages = PagePool(LEDGER.pages, LEDGER.block_size)
        self._prompt_tokens = self._generated = 0
        self._last_step = StepCounts()

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, **more: Any
    ) -> None:
        if request_id in self.jobs:
            raise UserError(f"request id {request_id!r} is in use", "request_id")
        for token in prompt_token_ids:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise UserError(f"token id {token} is not in the vocabulary", "prompt")
        self.seen.append(params)
        self.extras.append((more["priority"], more["cache_salt"]))
        sequences = [self._sequence(prompt_token_ids, params, k) for k in range(params.n)]
        times = RequestStateStats(arrival_time=more["arrival_time"], queued_ts=time.monotonic())
        self.jobs[request_id] = _Job(list(prompt_token_ids), more["prompt"], params, sequences, times)

    def _sequence(self, prompt_ids: Sequence[int], params: SamplingParams, choice: int) -> _Sequence:
        text = Detokenizer(
            self.tokenizer,
            prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        return _Sequence(text, self.script(prompt_ids, choice))

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True

    def has_unfinished(self) -> bool:
        return bool(self.jobs)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.jobs.pop(request_id, None)

    def stats(self) -> EngineStats:
        running = sum(len(job.sequences) for job in self.jobs.values())
        numbers = (running, 0, running / 64, 4096, 0, self._prompt_tokens, 0, self._generated, 0, 0)
        return EngineStats(*numbers, self._last_step)

    def step(self) -> list[RequestOutput]:
        if self.hold:
            time.sleep(0.005)
            return []
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("scripted failure with a secret /path")
        self.num_steps += 1
        time.sleep(self.seconds_per_step)
        self._last_step = self._count()
        outputs = [self._advance(request_id, job) for request_id, job in list(self.jobs.items())]
        for output in outputs:
            if output.finished:
                del self.jobs[output.request_id]
        return outputs

    def _count(self) -> StepCounts:
        new = [job for job in self.jobs.values() if not job.times.scheduled_ts]
        live = [s for job in self.jobs.values() for s in job.sequences if s.finish_reason is None]
        num_prefills = sum(len(job.sequences) for job in new)
        prefill = sum(len(job.prompt_ids) for job in new)
        return StepCounts(prefill, len(live), num_prefills, len(live) - num_prefills)

    def _advance(self, request_id: str, job: _Job) -> RequestOutput:
        now = time.monotonic()
        job.times.scheduled_ts = job.times.scheduled_ts or now
        job.times.first_token_ts = job.times.first_token_ts or now
        job.times.last_token_ts = now
        for sequence in job.sequences:
            if sequence.finish_reason is None:
                self._push(sequence, job.params)
        finished = all(sequence.finish_reason is not None for sequence in job.sequences)
        choices = [_choice(k, s, job.params) for k, s in enumerate(job.sequences)]
        prompt_logprobs = None
        if job.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *({t: Logprob(-0.25, 1)} for t in job.prompt_ids[1:])]
        return RequestOutput(
            request_id, job.prompt, job.prompt_ids, prompt_logprobs, choices, finished, job.times, 0
        )

    def _push(self, sequence: _Sequence, params: SamplingParams) -> None:
        token = sequence.script[len(sequence.token_ids)]
        sequence.token_ids.append(token)
        self._generated += 1
        if token in self.tokenizer.eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = "stop"
        sequence.text.push([token])
        if sequence.text.stop_reason is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", sequence.text.stop_reason
        elif params.max_tokens is not None and len(sequence.token_ids) >= params.max_tokens:
            sequence.finish_reason = sequence.finish_reason or "length"
        if sequence.finish_reason is not None:
            sequence.text.finish()


def _choice(index: int, sequence: _Sequence, params: SamplingParams) -> CompletionOutput:
    logprobs = None
    if params.logprobs is not None:
        others = [
            (300 + r, Logprob(-1.0 - r if r < 2 else float("-inf"), r + 2))
            for r in range(params.logprobs - 1)
        ]
        logprobs = [dict([(token, Logprob(-0.5, 1)), *others]) for token in sequence.token_ids]
    return CompletionOutput(
        index,
        sequence.text.text,
        list(sequence.token_ids),
        None,
        logprobs,
        sequence.finish_reason,
        sequence.stop_reason,
    )


class FakeLLM:
    """What AsyncLLM needs of an LLM, around a scripted engine."""

    def __init__(self, tokenizer: Tokenizer, script: Script, defaults: SamplingParams | None) -> None:
        self.engine = ScriptedEngine(tokenizer, script)
        self.gate = GateStatus("passed", "gate passed: PASS")
        self.config = SimpleNamespace(name="tiny", hidden_size=64)
        self.path = Path("tiny")
        self.served_model_names = (MODEL,)
        self.schemes, self.dtype = (W4A16(64, symmetric=True), W8A8Int8()), torch.bfloat16
        self._tokenizer, self._defaults = tokenizer, defaults or SamplingParams()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self._defaults


@dataclass
class Served:
    """A running server and what is behind it."""

    url: str
    engine: AsyncLLM
    scripted: Any
    client: httpx.Client

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """POSTs JSON to a route."""
        return self.client.post(path, json=body, **more)

    def stream(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must be a 200 that ends with [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def get(self, path: str, **more: Any) -> httpx.Response:
        """GETs a route."""
        return self.client.get(path, **more)


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Runs an app in uvicorn on a free port of 127.0.0.1, in a thread; yields its URL."""
    quiet: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 5}
    config = uvicorn.Config(app, port=0, http=JsonH11, **quiet)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("smollm2", tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="session")
def run_app() -> Callable[..., Any]:
    return running


@pytest.fixture
def fake_llm(tokenizer: Tokenizer) -> FakeLLM:
    return FakeLLM(tokenizer, hashed_script, None)


@pytest.fixture(scope="session")
def serve_scripted(tokenizer: Tokenizer) -> Callable[..., Any]:
    """A context manager: a server with a scripted engine; keywords are ServerOptions, gate and door."""

    @contextmanager
    def start(
        script: Script = hashed_script,
        defaults: SamplingParams | None = None,
        gate: GateStatus | None = None,
        door: Door | None = None,
        **options: Any,
    ) -> Iterator[Served]:
        llm, settled = FakeLLM(tokenizer, script, defaults), ServerOptions(**options)
        engine = AsyncLLM(
            llm,
            max_num_queued_reqs=settled.max_num_queued_reqs,
            max_num_queued_tokens=settled.max_num_queued_tokens,
        )
        try:
            with (
                running(build_app(engine, settled, gate=gate, door=door)) as url,
                httpx.Client(base_url=url, timeout=None) as client,
            ):
                yield Served(url, engine, llm.engine, client)
        finally:
            assert engine.shutdown()

    return start


@pytest.fixture(scope="session")
def _shared(serve_scripted: Callable[..., Any]) -> Iterator[Served]:
    with serve_scripted() as served:
        yield served


@pytest.fixture
def served(_shared: Served) -> Served:
    """One server for all tests that leave it as it was; what it has seen is forgotten in between."""
    assert not _shared.scripted.jobs, "the test before left requests behind"
    for record in (_shared.scripted.seen, _shared.scripted.extras, _shared.scripted.aborted):
        record.clear()
    return _shared
