"""What HTTP costs: the same prompts through `LLM.generate` and through a server, turn by turn.

    python benchmarks/http_cost.py MODEL [--clients 64] [--prompts 128] [--input-len 64] [--output-len 64]
                              [--rounds 5] [--out FILE]
                              [--load-format dummy --scheme S --tokenizer DIR --gpu-memory-utilization 0.45]

Two engines of the same model, each in a process of its own, take turns on the same machine: `LLM.generate`
with all prompts at once, then as many clients as said on the server, streaming, then the same without
streams. Both engines take as many sequences at once as there are clients, greedily and without a prefix
cache. The figure is the ratio of output tokens per second, over HTTP to without, in the median of the rounds;
rounds alternate, since the speed of a shared machine drifts. Beside it stands the processor time per token of
the process with the engine, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from qinfer import LLM, SamplingParams
from qinfer.bench.dataset import Dataset
from qinfer.bench.http_client import Address, request
from qinfer.bench.prompts import Prompt, texts_of
from qinfer.bench.report import machine_of
from qinfer.bench.sample import Target
from qinfer.bench.serving import Load, run

COLUMNS = ("generate", "streams", "whole")
ENGINE = {
    **dict.fromkeys(("load_format", "scheme", "tokenizer", "kv_cache_dtype"), str),
    "gpu_memory_utilization": float,
}


class Rate(NamedTuple):
    """One measurement: output tokens per second, and milliseconds of processor time for each."""

    tokens_per_second: float
    cpu_ms: float


@contextmanager
def server(model: str, words: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A `qinfer serve` process and its URL."""
    command = [sys.executable, "-m", "qinfer", "serve", model, "--port", "0", "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines: list[str] = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
            assert lines[-1], "the server did not start"
        try:
            yield str(json.loads("".join(lines))["url"]), psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def rate(process: psutil.Process, work: Callable[[], int]) -> Rate:
    """Runs `work`, which returns how many tokens `process` has made for it."""
    cpu, began = sum(process.cpu_times()[:2]), time.perf_counter()
    tokens = work()
    seconds = time.perf_counter() - began
    return Rate(tokens / seconds, 1e3 * (sum(process.cpu_times()[:2]) - cpu) / tokens)


def generated(llm: LLM, prompts: Sequence[Prompt]) -> int:
    """LLM.generate, all at once."""
    params = [SamplingParams(temperature=0, max_tokens=p.output_len, ignore_eos=True) for p in prompts]
    outputs = llm.generate([prompt.text for prompt in prompts], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def streamed(url: str, prompts: Sequence[Prompt], fields: dict[str, Any], load: Load) -> int:
    """Streaming clients; every answer must be complete."""
    target = Target(Address.of(url), "/v1/completions", False, {})
    samples, _ = asyncio.run(run(target, prompts, load, fields))
    assert all(sample.ok for sample in samples), [sample.error for sample in samples if not sample.ok][:3]
    return sum(sample.output_len for sample in samples)


def whole(url: str, prompts: Sequence[Prompt], fields: dict[str, Any], clients: int) -> int:
    """Clients that wait for the whole answer."""
    address, limit = Address.of(url), asyncio.Semaphore(clients)

    async def one(prompt: Prompt) -> int:
        body = {"prompt": prompt.text, "max_tokens": prompt.output_len, **fields}
        async with limit, request(address, "POST", "/v1/completions", json.dumps(body).encode()) as answer:
            return int(json.loads(await answer.text())["usage"]["completion_tokens"])

    async def everyone() -> int:
        return sum(await asyncio.gather(*map(one, prompts)))

    return asyncio.run(everyone())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path)
    sizes = {"clients": 64, "prompts": 128, "input-len": 64, "output-len": 64, "rounds": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, kind in ENGINE.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, help="of both engines, as `qinfer serve` has it")
    return parser.parse_args()


def measured(asked: argparse.Namespace, llm: LLM, words: Sequence[str]) -> Iterator[Sequence[Rate]]:
    """One rate for each of COLUMNS, round after round; the first round, which warms up, is not among them."""
    dataset = Dataset(num_prompts=asked.prompts, input_len=asked.input_len, output_len=asked.output_len)
    tokenizer = llm.get_tokenizer()
    prompts = texts_of(dataset.draw(tokenizer.vocab_size, tokenizer), tokenizer, dataset.seed)
    load = Load(dataset, max_concurrency=asked.clients)
    fields = {"temperature": 0, "ignore_eos": True}
    me = psutil.Process()
    with server(asked.model, words) as (url, process):
        for number in range(asked.rounds + 1):
            found = (
                rate(me, lambda: generated(llm, prompts)),
                rate(process, lambda: streamed(url, prompts, fields, load)),
                rate(process, lambda: whole(url, prompts, fields, asked.clients)),
            )
            if number:
                yield found


def main() -> None:
    """Measures and prints a table, then one JSON document."""
    asked = arguments()
    chosen = {name: value for name in ENGINE if (value := getattr(asked, name)) is not None}
    words = ["--max-num-seqs", str(asked.clients), "--no-enable-prefix-caching", "--allow-ungated"]
    for name, value in chosen.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    limits: dict[str, Any] = {"max_num_seqs": asked.clients, "enable_prefix_caching": False, **chosen}
    llm = LLM(asked.model, allow_ungated=True, **limits)
    rounds = []
    for found in measured(asked, llm, words):
        rounds.append(found)
        told = zip(COLUMNS, found, strict=True)
        print("  ".join(f"{name} {one.tokens_per_second:8.1f}/s {one.cpu_ms:6.2f} ms" for name, one in told))
    ratios = {
        f"{name} {key}": statistics.median(row[i][k] / row[0][k] for row in rounds)
        for i, name in enumerate(COLUMNS)
        for k, key in enumerate(Rate._fields)
    }
    setting = {name: value for name, value in vars(asked).items() if name != "out"}
    machine = {"device": machine_of(llm).name, "torch": torch.__version__, "date": date.today().isoformat()}
    document = {**machine, **setting, "columns": COLUMNS, "rounds": rounds, "median_ratio": ratios}
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
