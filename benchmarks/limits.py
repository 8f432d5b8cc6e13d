"""The rows that thresholds.py and recovery.py wrote, and the gate's limits beside what they must separate.

    python benchmarks/limits.py benchmarks/results/thresholds-cpu.json benchmarks/results/recovery-cpu.json

For each class of scheme and each measure: the worst upper bound of what must pass, over all models and
texts, the best lower bound of what must fail, their geometric mean, and the limit in evals/thresholds.py. A
class's must-fails are must-passes of the next coarser one: a limit that lets those through says nothing.
Losses throughout: disagreement is 1 - agreement, excess the perplexity's ratio - 1. Those on another than the
built-in text are divided by what widens its limits.

Of tasks: what each checkpoint keeps of its source's accuracy above chance; the standard error of that; what a
checkpoint as good as its source must be allowed to lose if so many questions are to find it good enough four
times in five; and the limit of its class.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from qinfer.evals.gate import POWER
from qinfer.evals.statistics import CONFIDENCE
from qinfer.evals.thresholds import LIMITS, OTHER_TEXT, Limits, SchemeClass, scheme_class


class Roles(NamedTuple):
    """Checkpoints, by the names of thresholds.py's rows."""

    must_pass: tuple[str, ...]
    must_fail: tuple[str, ...]


ROLES: Mapping[SchemeClass, Roles] = {
    "w8a16": Roles(("source", "w8a16-int8-rtn"), ("w8a8-fp8",)),
    "w8a8": Roles(("source", "w8a16-int8-rtn", "w8a8-int8-smoothquant", "w8a8-fp8"), ("w4a16-awq",)),
    "w4a16": Roles(("w4a16-awq",), ("w4a16-g32-asym-rtn", "w4a16-channel-sym-rtn")),
}
_MEASURES = {
    "mean_kl": "mean KL",
    "p99_kl": "p99 KL",
    "disagreement": "top-1 agreement",
    "perplexity_excess": "perplexity ratio",
}


def main() -> None:
    _print_text(json.loads(Path(sys.argv[1]).read_text())["rows"])
    _print_tasks(json.loads(Path(sys.argv[2]).read_text())["rows"])


def _print_tasks(rows: Sequence[Mapping[str, Any]]) -> None:
    print("\n| model | checkpoint | questions | flips | recovery | standard error | decidable | limit |")
    print("|---|---|---|---|---|---|---|---|")
    to_bound, to_power = (NormalDist().inv_cdf(p) for p in ((1 + CONFIDENCE) / 2, POWER))
    for row in rows:
        value, low, high = row["recovery"]
        error = (high - low) / 2 / to_bound
        kind = scheme_class([label.split(" ")[0] for label in row["schemes"]])
        cells = (
            *(row["model"], row["checkpoint"], str(row["questions"]), f"{100 * row['flips']:.1f} %"),
            *(f"{value:.3f} [{low:.3f}, {high:.3f}]", f"{error:.3f}"),
            *(f"{1 - (to_bound + to_power) * error:.3f}", f"{1 - LIMITS[kind][0].accuracy_lost:.3f}"),
        )
        print(f"| {' | '.join(cells)} |")


def _print_text(rows: Sequence[Mapping[str, Any]]) -> None:
    print("| model | text | checkpoint | " + " | ".join(_MEASURES.values()) + " |")
    print("|---|---|---|" + "---|" * len(_MEASURES))
    for row in rows:
        cells = (f"{row[m][0]:.4g} [{row[m][1]:.4g}, {row[m][2]:.4g}]" for m in _MEASURES.values())
        print(f"| {row['model']} | {row['text']} | {row['checkpoint']} | {' | '.join(cells)} |")
    print("\n| class | measure | worst that must pass | best that must fail | geometric mean | limit |")
    print("|---|---|---|---|---|---|")
    for kind, roles in ROLES.items():
        for field, measure in _MEASURES.items():
            passed = [_loss(row, measure, upper=True) for row in rows if row["checkpoint"] in roles.must_pass]
            failed = [
                _loss(row, measure, upper=False) for row in rows if row["checkpoint"] in roles.must_fail
            ]
            low, high = max(passed), min(failed)
            limit = getattr(LIMITS[kind][0], field)
            between = f"{math.sqrt(low * high):.3g}" if high > low else "they overlap"
            mark = "" if low <= limit < high else " (not between)"
            print(f"| {kind} | {measure} | {low:.3g} | {high:.3g} | {between} | {limit:.3g}{mark} |")


def _loss(row: Mapping[str, Any], measure: str, *, upper: bool) -> float:
    """The measure's bound as a loss on the built-in text; `upper` is the end where more is lost."""
    _, low, high = row[measure]
    loss: float = high if upper else low
    if measure == "top-1 agreement":
        loss = 1 - (low if upper else high)
    elif measure == "perplexity ratio":
        loss -= 1
    return loss if row["text"] == "built-in" else loss / OTHER_TEXT


if __name__ == "__main__":
    assert set(_MEASURES) < set(Limits._fields)
    main()
