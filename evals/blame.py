"""Which part of a model a failed verdict is due to.

Two numbers for each part, a layer or one of the ends. Its *error*: how far its output lies from that of the
source's part for the source's own input, so that what earlier parts did wrong is not held against it. And,
for those with the largest errors, its *share*: the mean KL when this part alone stands in the source. One
part is to blame when it alone makes most of the damage and much more than any other; else the damage is
spread, as it is when a format is too coarse, and saying so is the answer.

Shares need not add up to the whole: damages may hide or feed one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from qinfer.evals.statistics import finite

NUM_SUSPECTS = 3  # layers with the largest errors, whose shares are measured
_MOST = 0.5  # of the whole damage
_APART = 3.0  # times the next part's share


class Part(NamedTuple):
    """One part of the candidate: "embedding", "layer 7", "head" (with the final norm), or both ends."""

    name: str
    error: float  # ||candidate's - source's|| / ||source's|| of what the part adds, for equal input
    share: float | None = None  # nats/token when it alone stands in the source; None: not measured


class Blame(NamedTuple):
    """All parts in the order in which a token passes them, and the mean KL of all of them together."""

    parts: tuple[Part, ...]
    total: float  # nats/token
    tokens: int

    @property
    def suspects(self) -> list[Part]:
        """Parts whose shares were measured, the largest first; one that gave no number is the worst."""
        measured = [part for part in self.parts if part.share is not None]
        return sorted(measured, key=lambda part: _size(part.share), reverse=True)

    @property
    def culprit(self) -> Part | None:
        """The part that is to blame, if one is."""
        worst, *others = self.suspects
        alone, next_one = _size(worst.share), max((_size(part.share) for part in others), default=0.0)
        apart = alone > next_one and (math.isinf(alone) or alone >= _APART * next_one)
        return worst if apart and alone >= _MOST * _size(self.total) else None

    @property
    def line(self) -> str:
        """One line for a person."""
        worst, *others = self.suspects
        beside = f"; next {others[0].name} with {_nats(others[0].share)}" if others else ""
        if self.culprit is None:
            return (
                f"no part alone is to blame: the whole moved by {_nats(self.total)} nats/token, "
                f"{worst.name} alone by {_nats(worst.share)}{beside}"
            )
        return (
            f"{worst.name} is to blame: alone in the source it makes a mean KL of {_nats(worst.share)} "
            f"nats/token, of {_nats(self.total)} in all{beside}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that is not finite becomes null."""
        return {
            "line": self.line,
            "culprit": None if self.culprit is None else self.culprit.name,
            "total_kl": finite(self.total),
            "tokens": self.tokens,
            "parts": [
                {
                    "name": part.name,
                    "error": finite(part.error),
                    "kl_alone": None if part.share is None else finite(part.share),
                }
                for part in self.parts
            ],
        }


def suspects_of(layer_errors: Sequence[float]) -> list[int]:
    """Indices of the layers with the largest errors, the largest first; NaN is larger than any number."""
    order = sorted(range(len(layer_errors)), key=lambda i: _size(layer_errors[i]), reverse=True)
    return order[:NUM_SUSPECTS]


def _size(number: float | None) -> float:
    """As far as "worse" goes: what is no number is worse than any."""
    return math.inf if number is None or math.isnan(number) else number


def _nats(number: float | None) -> str:
    return "not a number" if number is None or not math.isfinite(number) else f"{number:.3g}"
