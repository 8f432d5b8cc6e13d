"""`qinfer bench latency`: one batch at a time, again and again, and how long each takes.

The prompts are the same in every iteration, so the prefix cache is off unless it is asked for; an iteration
computes everything. The first iterations are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from qinfer.bench.dataset import Dataset
from qinfer.bench.report import Bench, heading, load, percentile, roofline_keys, step_keys
from qinfer.bench.run import Driver, Measured

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Latency:
    """What is to be measured; lengths in tokens."""

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    n: int = 1
    num_iters_warmup: int = 10
    num_iters: int = 30
    temperature: float = 1.0
    detokenize: bool = True
    seed: int = 0


def run(model: str, setting: Latency, llm_keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the model, measures, and returns the document; raises like LLM."""
    return measure(load(model, {"enable_prefix_caching": False, **llm_keywords}), setting)


def measure(bench: Bench, setting: Latency) -> dict[str, Any]:
    """The document of a loaded model."""
    llm, engine = bench.llm, bench.llm.engine
    requests = Dataset(
        num_prompts=setting.batch_size,
        input_len=setting.input_len,
        output_len=setting.output_len,
        seed=setting.seed,
    ).draw(llm.config.vocab_size, llm.tokenizer)
    driver = Driver(engine, n=setting.n, temperature=setting.temperature, detokenize=setting.detokenize)
    for _ in tqdm(range(setting.num_iters_warmup), "warming up", delay=1.0, leave=False):
        driver.run(requests)
    runs = [driver.run(requests) for _ in tqdm(range(setting.num_iters), "iterations", delay=1.0)]
    latencies = [measured.elapsed for measured in runs]
    average = sum(latencies) / len(latencies)
    together = _together(runs)
    return {
        **bench.about(setting.seed),
        **{name: getattr(setting, name) for name in ("input_len", "output_len", "batch_size", "n")},
        "temperature": setting.temperature,
        "warmup": {"iterations": setting.num_iters_warmup},
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTILES},
        "avg_first_token_seconds": sum(together.first_tokens) / len(together.first_tokens),
        "output_tokens_per_second": runs[0].output_tokens / average,
        **roofline_keys(bench.roofline(runs[0].work), bench.machine, runs[0].output_tokens, average),
        **step_keys(together, engine.limits.max_num_seqs),
    }


def to_text(document: Mapping[str, Any]) -> str:
    """The document for a person."""
    lines = [
        f"Avg latency: {document['avg_latency']:.4f} seconds ({document['roofline_fraction']:.0%} of the "
        f"roofline), first token after {document['avg_first_token_seconds']:.4f}, "
        f"{document['output_tokens_per_second']:.2f} output tokens/s"
    ]
    lines += [f"{p}% percentile latency: {value:.4f} seconds" for p, value in document["percentiles"].items()]
    return "\n".join([*heading(document), *lines])


def _together(runs: list[Measured]) -> Measured:
    """The steps of all runs."""
    return Measured(
        occupancy=[running for one in runs for running in one.occupancy],
        steps=[seconds for one in runs for seconds in one.steps],
        first_tokens=[seconds for one in runs for seconds in one.first_tokens],
        preemptions=sum(one.preemptions for one in runs),
        prefix_queries=sum(one.prefix_queries for one in runs),
        prefix_hits=sum(one.prefix_hits for one in runs),
    )
