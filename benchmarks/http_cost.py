"""What HTTP costs: the same prompts through `LLM.generate` and through a server, turn by turn.

    python benchmarks/http_cost.py MODEL [--clients 64] [--prompts 128] [--input-len 64] [--output-len 64]
                              [--rounds 5] [--client-processes 1] [--out FILE]
                              [--load-format dummy --scheme S --tokenizer DIR --gpu-memory-utilization 0.45]

Two engines of the same model, each in a process of its own, take turns on the same machine: `LLM.generate`
with all prompts at once, then as many clients as said on the server, streaming, then the same without
streams. Both engines take as many sequences at once as there are clients, greedily and without a prefix
cache. Clients keep their connections, as SDKs do, and must not be what limits: they read without looking, and
a fast engine wants several processes of them. The figure is the ratio of output tokens per second, over HTTP
to without, in the median of the rounds; rounds alternate, since the speed of a shared machine drifts. Beside
it stands the processor time per token, of the process that generates or of the two that serve, which a busy
machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import torch

from qinfer import LLM, SamplingParams
from qinfer.bench.dataset import Dataset
from qinfer.bench.prompts import Prompt, texts_of
from qinfer.bench.report import machine_of

COLUMNS = ("generate", "streams", "whole")
END = b"0\r\n\r\n"  # of a body in chunks
FIELDS = {"temperature": 0, "ignore_eos": True}
ENGINE = {
    **dict.fromkeys(("load_format", "scheme", "tokenizer", "kv_cache_dtype"), str),
    "gpu_memory_utilization": float,
}


class Rate(NamedTuple):
    """One measurement: output tokens per second, and milliseconds of processor time for each."""

    tokens_per_second: float
    cpu_ms: float


@contextmanager
def server(model: str, words: Sequence[str]) -> Iterator[Callable[[], tuple[str, psutil.Process]]]:
    """A `qinfer serve` process that loads meanwhile; what is yielded waits for it and says its URL."""
    command = [sys.executable, "-m", "qinfer", "serve", model, "--port", "0", "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

        def ready() -> tuple[str, psutil.Process]:
            assert process.stdout
            lines: list[str] = []
            while not lines or lines[-1].rstrip() != "}":
                lines.append(process.stdout.readline())
                assert lines[-1], "the server did not start"
            return str(json.loads("".join(lines))["url"]), psutil.Process(process.pid)

        try:
            yield ready
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def spent(processes: Sequence[psutil.Process]) -> float:
    """Seconds of processor time so far."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def rate(processes: Sequence[psutil.Process], work: Callable[[], int]) -> Rate:
    """Runs `work`, which returns how many tokens `processes` have made for it."""
    before, began = spent(processes), time.perf_counter()
    tokens = work()
    seconds = time.perf_counter() - began
    return Rate(tokens / seconds, 1e3 * (spent(processes) - before) / tokens)


def generated(llm: LLM, prompts: Sequence[Prompt]) -> int:
    """LLM.generate, all at once."""
    params = [SamplingParams(temperature=0, max_tokens=p.output_len, ignore_eos=True) for p in prompts]
    outputs = llm.generate([prompt.text for prompt in prompts], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


class Client(asyncio.Protocol):
    """Asks one request after another on a connection of its own; of a stream it reads nothing but its end."""

    def __init__(self) -> None:
        self.content = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.content += data
        if self._is_whole():
            self.ended.set_result(bytes(self.content))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(f"cut off: {bytes(self.content[-300:])!r}"))

    def _is_whole(self) -> bool:
        if self.content.endswith(END):
            return True
        head, between, _ = self.content[:1000].partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        size = len(self.content) - len(head) - len(between)
        return length is not None and bool(between) and size == int(length[1])

    async def answered(self, body: dict[str, Any]) -> int:
        """The tokens of one complete answer."""
        content = json.dumps(body).encode()
        self.content.clear()
        self.ended = asyncio.get_running_loop().create_future()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        answer = await self.ended
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:500]
        assert not body["stream"] or answer.endswith(b"data: [DONE]\n\n\r\n" + END), answer[-500:]
        return int(re.findall(rb'"completion_tokens":(\d+)', answer)[-1])


def asked_of(url: str, clients: int, stream: bool, prompts: Sequence[Prompt]) -> int:
    """So many clients at once, each with a connection of its own, until all prompts are answered."""
    parts, left = urlsplit(url), iter(prompts)
    fields = {**FIELDS, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}

    async def one() -> int:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(Client, str(parts.hostname), int(parts.port or 80))
        bodies = ({"prompt": prompt.text, "max_tokens": prompt.output_len, **fields} for prompt in left)
        tokens = sum([await client.answered(body) for body in bodies])
        client.transport.close()
        return tokens

    async def everyone() -> int:
        return sum(await asyncio.gather(*[one() for _ in range(clients)]))

    return asyncio.run(everyone())


@dataclass(frozen=True)
class Crowd:
    """All clients, in so many processes."""

    pool: Executor
    num_processes: int
    clients: int
    prompts: Sequence[Prompt]

    def __call__(self, url: str, *, stream: bool) -> int:
        """The tokens that came."""
        shares = [self.prompts[i :: self.num_processes] for i in range(self.num_processes)]
        ask = partial(asked_of, url, self.clients // self.num_processes, stream)
        return sum(self.pool.map(ask, shares))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path)
    sizes = {"clients": 64, "prompts": 128, "input-len": 64, "output-len": 64, "rounds": 5}
    sizes["client-processes"] = 1
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, kind in ENGINE.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, help="of both engines, as `qinfer serve` has it")
    asked = parser.parse_args()
    if asked.clients % asked.client_processes or asked.prompts % asked.clients:
        parser.error("a whole number of prompts for each client, and of clients for each of their processes")
    return asked


def measured(
    asked: argparse.Namespace, words: Sequence[str], limits: dict[str, Any]
) -> tuple[str, list[Sequence[Rate]]]:
    """The device, and a rate for each of COLUMNS, round after round but the first, which warms up."""
    count, me, rounds = asked.client_processes, [psutil.Process()], []
    workers = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    with workers as pool, server(asked.model, words) as ready:
        pool.submit(int)  # starts all of them, which import for seconds, while the engines load
        llm = LLM(asked.model, allow_ungated=True, **limits)
        dataset = Dataset(num_prompts=asked.prompts, input_len=asked.input_len, output_len=asked.output_len)
        tokenizer = llm.get_tokenizer()
        prompts = texts_of(dataset.draw(tokenizer.vocab_size, tokenizer), tokenizer, dataset.seed)
        url, process = ready()
        both = [process, *process.children()]
        crowd = Crowd(pool, count, asked.clients, prompts)
        for _ in range(asked.rounds + 1):
            work = (
                (me, lambda: generated(llm, prompts)),
                (both, lambda: crowd(url, stream=True)),
                (both, lambda: crowd(url, stream=False)),
            )
            found = []
            for name, one in zip(COLUMNS, work, strict=True):
                found.append(rate(*one))
                told = f"{name} {found[-1].tokens_per_second:9.1f}/s {found[-1].cpu_ms:6.3f} ms"
                print(told, end="\n" if name == COLUMNS[-1] else "  ", flush=True)
            rounds.append(found)
    return machine_of(llm).name, rounds[1:]


def main() -> None:
    """Measures and prints a table, then one JSON document."""
    asked = arguments()
    chosen = {name: value for name in ENGINE if (value := getattr(asked, name)) is not None}
    words = ["--max-num-seqs", str(asked.clients), "--no-enable-prefix-caching", "--allow-ungated"]
    for name, value in chosen.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    limits: dict[str, Any] = {"max_num_seqs": asked.clients, "enable_prefix_caching": False, **chosen}
    device, rounds = measured(asked, words, limits)
    ratios = {
        f"{name} {key}": statistics.median(row[i][k] / row[0][k] for row in rounds)
        for i, name in enumerate(COLUMNS)
        for k, key in enumerate(Rate._fields)
    }
    setting = {name: value for name, value in vars(asked).items() if name != "out"}
    machine = {"device": device, "torch": torch.__version__, "date": date.today().isoformat()}
    document = {**machine, **setting, "columns": COLUMNS, "rounds": rounds, "median_ratio": ratios}
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
