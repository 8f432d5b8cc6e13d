"""`qinfer bench serve`: a load of streaming clients on a server, and what each of them saw.

Flags, keys and definitions are vLLM's, so that what reads its files reads these. Different on purpose:
requests that warm the server up have prompts of their own, so that no measured one lies in the prefix cache;
the time that a request waits on the client is told; objectives are counted over requests sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tqdm.auto import tqdm

from qinfer import __version__
from qinfer.bench.arrivals import Arrivals
from qinfer.bench.dataset import Dataset
from qinfer.bench.probes import probe_numbers, probing
from qinfer.bench.prompts import Prompt, texts_of
from qinfer.bench.sample import Sample, Target, ask, since
from qinfer.bench.server_facts import Counters, first_model, hit_rate, status_of, wait_until_ready
from qinfer.bench.serving_numbers import METRICS, numbers
from qinfer.errors import UserError
from qinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_LEAST_WARMUPS = 4
_MOST_HITS = 0.01  # of prompt tokens that nobody repeats
_WARM_CACHE = (
    "%.0f %% of the prompts' tokens lay in the server's prefix cache, as after a run with the same prompts: "
    "what is measured is faster for it; another --seed draws other prompts"
)


@dataclass(frozen=True)
class Load:
    """What is asked of the server; `slo` in milliseconds by metric, `fields` go into every body.

    `probe_rate` short questions a second are asked beside it.
    """

    dataset: Dataset
    arrivals: Arrivals = field(default_factory=Arrivals)
    max_concurrency: int | None = None
    num_warmups: int | None = None  # None: as many as run at once, and at least 4
    percentiles: Sequence[float] = (99.0,)
    slo: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    profile: bool = False
    probe_rate: float = 0.0

    def __post_init__(self) -> None:
        """UserError for probes without a pause between them."""
        if not math.isfinite(self.probe_rate):
            raise UserError(
                f"--probe-request-rate must be a number, 0 for none, not {self.probe_rate}",
                "probe_request_rate",
            )

    @property
    def warmups(self) -> int:
        """Requests before the clock."""
        at_once = min(self.max_concurrency or self.dataset.num_prompts, self.dataset.num_prompts)
        return max(_LEAST_WARMUPS, at_once) if self.num_warmups is None else self.num_warmups


def parse_slo(words: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric from `ttft:500 tpot:50`; UserError for anything else."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in METRICS or name == "itl" or not limit > 0:
            raise UserError(f"--goodput {word!r}: say ttft:MS, tpot:MS or e2el:MS", "goodput")
        found[name] = limit
    return found


async def served_model(target: Target, timeout: float) -> str:
    """The server's first model; it has `timeout` seconds to come up. UserError where there is none."""
    await wait_until_ready(target.address, target.headers, timeout)
    return await first_model(target.address, target.headers)


async def measure(
    target: Target, model: str, tokenizer: Tokenizer, load: Load, *, progress: bool = True
) -> tuple[dict[str, Any], list[Sample]]:
    """The document of one load on a server that is up, and its samples; UserError where all requests fail."""
    fields = {"model": model, **load.fields}
    dataset = load.dataset
    prompts = texts_of(dataset.draw(tokenizer.vocab_size, tokenizer), tokenizer, dataset.seed)
    warm = await _warm_up(target, tokenizer, load, fields)
    before = await Counters.read(target.address)
    if load.profile:
        await _profile(target, "start")
    async with probing(target, load.probe_rate, fields) as probes:
        samples, duration = await run(target, prompts, load, fields, progress=progress)
    if load.profile:
        await _profile(target, "stop")
    after = await Counters.read(target.address)
    if all(not sample.ok for sample in samples):
        raise UserError(f"every request failed; the first: {samples[0].error}")
    for sample in samples:
        if sample.ok and not sample.output_len:  # the server does not count
            sample.output_len = len(tokenizer.encode(sample.text, add_special_tokens=False))
    grown = after.since(before)
    hits = hit_rate(grown)
    if hits is not None and hits > _MOST_HITS and not dataset.prefix_len:
        logger.warning(_WARM_CACHE, 100 * hits)
    document = {
        "schema_version": SCHEMA_VERSION,
        "qinfer_version": __version__,
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        **after.about,
        "dataset_name": dataset.name,
        "num_prompts": len(samples),
        "seed": dataset.seed,
        "request_rate": "inf" if math.isinf(load.arrivals.rate) else load.arrivals.rate,
        "burstiness": load.arrivals.burstiness,
        "max_concurrency": load.max_concurrency,
        "warmup": warm,
        **numbers(samples, duration, load.percentiles, load.slo),
        **probe_numbers(probes, load.probe_rate),
        "prefix_cache_hit_rate": hits,
        "server_metrics": grown,
    }
    return document, samples


async def _profile(target: Target, what: str) -> None:
    """Has the server record itself, or end that; UserError where it does not let us."""
    status = await status_of(target.address, "POST", f"/{what}_profile", target.headers)
    if status != 200:
        raise UserError(
            f"--profile: the server answers {status} to /{what}_profile (QINFER_SERVER_DEV_MODE=1 opens it)",
            "profile",
        )


async def _warm_up(
    target: Target, tokenizer: Tokenizer, load: Load, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Asks for other prompts of the same kind; then the prefix cache is emptied where the server lets us."""
    began = time.perf_counter()
    count, dataset = load.warmups, load.dataset
    if count:
        drawn = replace(dataset, num_prompts=count).draw(tokenizer.vocab_size, tokenizer, stream=1)
        prompts = texts_of(drawn, tokenizer, dataset.seed + 1)
        samples, _ = await run(target, prompts, replace(load, arrivals=Arrivals()), fields)
        if not any(sample.ok for sample in samples):
            raise UserError(f"every request of the warm-up failed; the first: {samples[0].error}")
    reset = await status_of(target.address, "POST", "/reset_prefix_cache", target.headers)
    return {
        "requests": count,
        "seconds": time.perf_counter() - began,
        "prefix_cache_reset": reset == 200,
    }


async def run(
    target: Target,
    prompts: Sequence[Prompt],
    load: Load,
    fields: Mapping[str, Any],
    *,
    progress: bool = False,
) -> tuple[list[Sample], float]:
    """Asks for all prompts at their times; samples in order, and seconds until the last answer."""
    due = load.arrivals.due(len(prompts), load.dataset.seed)
    bodies = [target.body(one.text, one.output_len, fields) for one in prompts]
    limit = asyncio.Semaphore(load.max_concurrency or len(prompts))
    samples = [Sample(one.num_tokens, when) for one, when in zip(prompts, due, strict=True)]
    clock = since(time.perf_counter())
    with tqdm(total=len(prompts), desc="requests", disable=not progress, dynamic_ncols=True) as bar:

        async def one(body: bytes, sample: Sample) -> None:
            async with limit:
                await ask(target, body, sample, clock)
            bar.update()

        async with asyncio.TaskGroup() as group:
            for body, sample in zip(bodies, samples, strict=True):
                if (early := sample.due - clock()) > 0:  # towards the schedule, so that no delay adds up
                    await asyncio.sleep(early)
                group.create_task(one(body, sample))
    return samples, clock()
