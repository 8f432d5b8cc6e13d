"""The rows that thresholds.py wrote, and the gate's limits beside what they must separate.

    python benchmarks/limits.py benchmarks/results/thresholds-cpu.json

For each class of scheme and each measure: the worst upper bound of what must pass, over all models and
texts, the best lower bound of what must fail, their geometric mean, and the limit in evals/thresholds.py. A
class's must-fails are must-passes of the next coarser one: a limit that lets those through says nothing.
Losses throughout: disagreement is 1 - agreement, excess the perplexity's ratio - 1. Those on another than the
built-in text are divided by what widens its limits.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.evals.thresholds import LIMITS, OTHER_TEXT, Limits, SchemeClass


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
    rows = json.loads(Path(sys.argv[1]).read_text())["rows"]
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
