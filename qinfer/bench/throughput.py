"""`qinfer bench throughput`: all requests at once, and how long until the last is answered.

Before the clock starts the model is loaded, its kernels compiled, and some requests of the same kind but
with other prompts are answered; then the prefix cache is emptied. So what is measured is a warm engine with
a cold cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qinfer.bench.dataset import BenchRequest, Dataset
from qinfer.bench.report import Bench, heading, load, roofline_keys, step_keys
from qinfer.bench.run import SCHEDULINGS, Driver
from qinfer.errors import UserError

WARMUP_LEN = 8  # tokens of a warm-up's answer


@dataclass(frozen=True)
class Throughput:
    """What is to be measured; `num_warmups` requests are answered before."""

    dataset: Dataset
    scheduling: str = "continuous"
    sort_by_length: bool = False
    num_warmups: int = 8
    n: int = 1
    temperature: float = 1.0
    detokenize: bool = True

    def __post_init__(self) -> None:
        """Raises UserError for an unknown scheduling."""
        if self.scheduling not in SCHEDULINGS:
            raise UserError(
                f"--scheduling must be one of {', '.join(SCHEDULINGS)}, not {self.scheduling!r}", "scheduling"
            )


def run(model: str, setting: Throughput, llm_keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the model, measures, and returns the document; raises like LLM, and for a bad dataset."""
    return measure(load(model, llm_keywords), setting)


def measure(bench: Bench, setting: Throughput) -> dict[str, Any]:
    """The document of a loaded model; raises UserError for a bad dataset."""
    llm, engine = bench.llm, bench.llm.engine
    driver = Driver(engine, n=setting.n, temperature=setting.temperature, detokenize=setting.detokenize)
    requests = setting.dataset.draw(llm.config.vocab_size, llm.tokenizer)
    if setting.sort_by_length:
        requests.sort(key=_length)
    warm_seconds = _warm_up(driver, bench, setting)
    measured = driver.run(requests, setting.scheduling, progress=True)
    seconds, output = measured.elapsed, measured.output_tokens
    total = measured.prompt_tokens + output
    return {
        **bench.about(setting.dataset.seed),
        "dataset_name": setting.dataset.name,
        "scheduling": setting.scheduling,
        "sort_by_length": setting.sort_by_length,
        "n": setting.n,
        "temperature": setting.temperature,
        "warmup": {"requests": setting.num_warmups, "seconds": warm_seconds},
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": total,
        "total_input_tokens": measured.prompt_tokens,
        "total_output_tokens": output,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": output / seconds,
        **roofline_keys(bench.roofline(measured.work), bench.machine, output, seconds),
        **step_keys(measured, engine.limits.max_num_seqs),
    }


def _warm_up(driver: Driver, bench: Bench, setting: Throughput) -> float:
    """Answers other requests of the same kind, shortly, and forgets their prefixes; seconds that it took."""
    start, llm = time.perf_counter(), bench.llm
    if setting.num_warmups:
        warmups = replace(setting.dataset, num_prompts=setting.num_warmups)
        drawn = warmups.draw(llm.config.vocab_size, llm.tokenizer, stream=1)
        driver.run([one._replace(output_len=min(one.output_len, WARMUP_LEN)) for one in drawn])
        llm.engine.reset_prefix_cache()
    return time.perf_counter() - start


def to_text(document: Mapping[str, Any]) -> str:
    """The document for a person."""
    occupancy, cache = document["batch_occupancy"], document["prefix_cache"]
    return "\n".join(
        [
            *heading(document),
            f"steps: {occupancy['steps']:,}, {occupancy['mean_running']:.1f} sequences in each "
            f"({occupancy['share']:.0%} of the largest batch), median {document['step_ms']['p50']:.2f} ms; "
            f"{document['num_preemptions']} preemptions, prefix cache hit rate {cache['hit_rate']:.1%}",
            f"Throughput: {document['requests_per_second']:.2f} requests/s, "
            f"{document['tokens_per_second']:.2f} total tokens/s, "
            f"{document['output_tokens_per_second']:.2f} output tokens/s "
            f"({document['roofline_fraction']:.0%} of the roofline)",
        ]
    )


def _length(request: BenchRequest) -> int:
    return len(request.prompt) + request.output_len
