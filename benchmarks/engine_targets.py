"""The targets of benchmarks/engine.py on one H200, and a file of its results beside them.

    python benchmarks/engine_targets.py benchmarks/results/engine-nvidia-h200.json

One line for each: what, measured, wanted, met or missed. What a file does not hold is not told.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Documents = Mapping[str, Mapping[str, Any] | None]

SPEED = "output_tokens_per_second"
THROUGHPUT = {"bf16": 10_800, "fp8": 15_500, "fp8 + fp8 KV": 17_000, "int8": 16_000, "w4a16": 11_000}
ONE_SEQUENCE = {"bf16": 220, "fp8": 400, "w4a16": 500}
KV_TOKENS = {
    "bf16 in 24GiB": 63_000,
    "fp8 + fp8 KV in 24GiB": 232_000,
    "w4a16 + fp8 KV in 24GiB": 280_000,
}
TIMES_SPEED = (
    ("fp8 + fp8 KV, 1024 sequences", "fp8 + fp8 KV", 1.0),
    ("fp8 + fp8 KV in 24GiB", "bf16 in 24GiB", 2.2),
    ("w4a16 + fp8 KV in 24GiB", "bf16 in 24GiB", 1.7),
    ("fp8 + fp8 KV in 18GiB", "bf16 in 18GiB", 4.0),
)
TIMES_TOKENS = (("fp8 + fp8 KV in 18GiB", "bf16 in 18GiB", 8.0),)
TIMES_STATIC = 3.0
OVERHEAD = 1.5 * 2**30  # bytes of bf16 in 24 GiB that are neither weights nor pages, at most
OFF_PLAN = 0.02  # of the planned KV tokens, at most


class Comparison(NamedTuple):
    """A figure beside its target; it has to be no less, or no more if `at_most`."""

    what: str
    value: float
    target: float
    at_most: bool = False

    def __str__(self) -> str:
        met = self.value <= self.target if self.at_most else self.value >= self.target
        sign = "<=" if self.at_most else ">="
        value, target = (f"{x:,.0f}" if x >= 100 else f"{x:.3f}" for x in (self.value, self.target))
        return f"{self.what:<56}{value:>14} {sign} {target:<14}{'met' if met else 'MISSED'}"


def comparisons(found: Documents) -> Iterator[Comparison]:
    """All that these documents of settings, by their labels, allow."""
    done = {label: document for label, document in found.items() if isinstance(document, dict)}
    for label, target in THROUGHPUT.items():
        if label in done:
            yield Comparison(f"{label}: tokens/s", done[label][SPEED], target)
    for label, target in ONE_SEQUENCE.items():
        if "one" in done.get(label, {}):
            yield Comparison(f"{label}: one sequence, tokens/s", done[label]["one"][SPEED], target)
    for label, target in KV_TOKENS.items():
        if label in done:
            yield Comparison(f"{label}: KV tokens", done[label]["ledger"]["tokens"], target)
    for label, base, times in TIMES_SPEED:
        if label in done and base in done:
            yield Comparison(f"{label}: times {base}", done[label][SPEED] / done[base][SPEED], times)
    for label, base, times in TIMES_TOKENS:
        if label in done and base in done:
            ratio = done[label]["ledger"]["tokens"] / done[base]["ledger"]["tokens"]
            yield Comparison(f"{label}: KV tokens, times {base}", ratio, times)
    for label, document in done.items():
        if "static" in document:
            ratio = document[SPEED] / document["static"][SPEED]
            yield Comparison(f"{label}: times fixed batches", ratio, TIMES_STATIC)
    yield from _memory(done)


def _memory(done: Mapping[str, Mapping[str, Any]]) -> Iterator[Comparison]:
    if small := done.get("bf16 in 24GiB"):
        ledger = small["ledger"]
        rest = ledger["budget"] - ledger["weights"] - ledger["kv_pool"]
        yield Comparison("bf16 in 24GiB: all but weights and pages, bytes", rest, OVERHEAD, at_most=True)
    for label, document in done.items():
        ledger = document["ledger"]
        if ledger["planned"] is not None:
            off = abs(ledger["tokens"] / ledger["planned"]["tokens"] - 1)
            yield Comparison(f"{label}: off the planned KV tokens", off, OFF_PLAN, at_most=True)


def main() -> None:
    for path in sys.argv[1:]:
        for comparison in comparisons(json.loads(Path(path).read_text())):
            print(comparison)


if __name__ == "__main__":
    main()
