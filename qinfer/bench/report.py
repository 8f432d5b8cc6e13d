"""What both benchmarks tell besides their own numbers: the machine, the model, the roofline, the memory.

One flat JSON document with vLLM's keys, so that scripts which read its files read ours, and more beside
them. The text says the roofline first: a number of tokens per second means little without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qinfer import __version__
from qinfer.backend import model_device
from qinfer.bench.machine import measure
from qinfer.bench.roofline import Costs, Machine, Roofline, Work, roofline
from qinfer.bench.run import Measured
from qinfer.engine.footprint import format_size
from qinfer.llm import LLM

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Bench:
    """A loaded model on a measured machine; make one with `load`."""

    model: str  # as it was asked for
    llm: LLM
    machine: Machine
    load_seconds: float

    def roofline(self, work: Sequence[Work]) -> Roofline:
        """The least time that this machine could take for that work, within the engine's limits."""
        llm, limits = self.llm, self.llm.engine.limits
        costs = Costs.of(llm.config, llm.weight_bytes, llm.engine.kv_cache_dtype)
        if llm.lm_head_dtype == "int8":
            costs = costs.with_int8_head()
        return roofline(costs, self.machine, work, limits.max_num_seqs, limits.max_num_batched_tokens)

    def about(self, seed: int) -> dict[str, Any]:
        """What was measured, and on what."""
        llm = self.llm
        return {
            "schema_version": SCHEMA_VERSION,
            "qinfer_version": __version__,
            "torch_version": torch.__version__,
            "model_id": self.model,
            "quantization": llm.engine.ledger.label,
            "weight_bits": _weight_bits(llm),
            "kv_cache_dtype": llm.engine.kv_cache_dtype,
            "device": self.machine.name,
            "seed": seed,
            "load_seconds": self.load_seconds,
            "limits": llm.engine.limits._asdict(),
            "gate": {"state": llm.gate.state, "line": llm.gate.line},
            "ledger": llm.engine.ledger.to_dict(),
        }


def load(model: str, llm_keywords: Mapping[str, Any]) -> Bench:
    """Loads the model, whatever the gate says, and measures the machine; raises like LLM."""
    start = time.perf_counter()
    llm = LLM(model, allow_ungated=True, **llm_keywords)
    seconds = time.perf_counter() - start
    return Bench(model, llm, machine_of(llm), seconds)


def machine_of(llm: LLM) -> Machine:
    """The rates of the machine that this model runs on, for the format that its layers multiply."""
    return measure(model_device(), llm.dtype, llm.schemes[0].activations)


def roofline_keys(bound: Roofline, machine: Machine, output_tokens: int, seconds: float) -> dict[str, Any]:
    """The roofline of a run of `seconds` that made `output_tokens`, and the fraction of it reached."""
    return {
        "roofline": {
            "bandwidth": machine.bandwidth,
            "operations_per_second": machine.rate,
            "bytes": bound.bytes_moved,
            "operations": bound.operations,
            "prefill_seconds": bound.prefill_seconds,
            "decode_seconds": bound.decode_seconds,
            "seconds": bound.seconds,
            "output_tokens_per_second": output_tokens / bound.seconds,
        },
        "roofline_fraction": bound.seconds / seconds,
    }


def _weight_bits(llm: LLM) -> int:
    """Bits of the layers' weights, scales not counted."""
    group = llm.schemes[0].group()
    return 8 * llm.dtype.itemsize if group is None else int(group["weights"]["num_bits"])


def step_keys(measured: Measured, max_num_seqs: int) -> dict[str, Any]:
    """How full the steps were and how long they took."""
    running = measured.occupancy
    mean = sum(running) / len(running)
    return {
        "batch_occupancy": {
            "steps": len(running),
            "mean_running": mean,
            "max_running": max(running),
            "share": mean / max_num_seqs,
        },
        "step_ms": {
            "mean": 1e3 * sum(measured.steps) / len(measured.steps),
            **{f"p{p}": 1e3 * percentile(measured.steps, p) for p in (50, 90, 99)},
        },
        "num_preemptions": measured.preemptions,
        "prefix_cache": {
            "queries": measured.prefix_queries,
            "hits": measured.prefix_hits,
            "hit_rate": measured.prefix_hits / measured.prefix_queries if measured.prefix_queries else 0.0,
        },
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest, as numpy's default does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def heading(document: Mapping[str, Any]) -> list[str]:
    """The first lines for a person: machine, roofline, model, memory, gate."""
    bound, ledger = document["roofline"], document["ledger"]
    return [
        f"{document['device']}: {bound['bandwidth'] / 1e9:,.0f} GB/s copied, "
        f"{bound['operations_per_second'] / 1e12:,.2f} T operations/s",
        f"roofline: {bound['output_tokens_per_second']:,.1f} output tokens/s = prefill "
        f"{bound['prefill_seconds']:.3f} s + decode {bound['decode_seconds']:.3f} s",
        f"model: {document['model_id']}, {document['quantization']}, weights "
        f"{format_size(ledger['weights'])}, KV pool {format_size(ledger['kv_pool'])} = "
        f"{ledger['tokens']:,} tokens ({document['gate']['line']})",
    ]
