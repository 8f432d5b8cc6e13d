"""What would pass in the place of a candidate that failed: schemes tried on the spot, and what they made.

A trial is the source with all its linears in another scheme, its weights rounded to nearest, reading the
beginning of the same text. It passes when its mean KL lies within the limit with its whole interval and its
other measures do with their values: less text than a verdict reads, but the same limits. A method that
searches (smoothquant, awq, gptq) leaves less damage than rounding does, so it passes where rounding did; the
gate has the last word.

Where the candidate's own scheme passes when made anew, its files are at fault and not the scheme; where the
same files pass with a plain KV cache and head, those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from qinfer.evals.gate import Measure, Verdict

MEAN_KL = "mean KL"


class Trial(NamedTuple):
    """One thing that was tried: its name, the words that would make it, what was measured."""

    name: str  # "w8a16-int8"
    how: str  # "qinfer quantize SOURCE --scheme w8a16-int8"
    measures: tuple[Measure, ...]

    @property
    def kl(self) -> Measure:
        """The measure that decides first."""
        return next(measure for measure in self.measures if measure.name == MEAN_KL)

    @property
    def passes(self) -> bool:
        """Mean KL within its limit for certain, the others as far as so little text tells."""
        judged = [measure for measure in self.measures if measure.verdict]
        return self.kl.verdict is Verdict.PASS and all(_value_within(measure) for measure in judged)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name,
            "how": self.how,
            "passes": self.passes,
            "measures": [measure.to_dict() for measure in self.measures],
        }


class Offer(NamedTuple):
    """Trials in the order in which they were made; the last is the first one that passed, if any did."""

    trials: Sequence[Trial]
    tokens: int
    own: str | None = None  # name of the candidate's own scheme, where it was tried

    @property
    def found(self) -> Trial | None:
        """What to do instead."""
        return next((trial for trial in self.trials if trial.passes), None)

    @property
    def line(self) -> str:
        """One line for a person."""
        failed = ", ".join(f"{t.name} {t.kl.interval.value:.3g}" for t in self.trials if not t.passes)
        besides = f"; tried before it: {failed}" if failed else ""
        if self.found is None:
            return (
                f"no scheme of 8 bits passes when rounded to nearest (mean KL {failed}, on {self.tokens} "
                "tokens): --until-gate leaves the layers that do most damage dense"
            )
        value, low, high = self.found.kl.interval
        measured = (
            f"mean KL {value:.3g} [{low:.3g}, {high:.3g}] on {self.tokens} tokens, at most "
            f"{self.found.kl.limit:.3g}"
        )
        if self.found.name == self.own:
            return (
                f"{self.own} itself passes when made anew ({measured}), so these files are damaged: "
                f"{self.found.how}"
            )
        return f"the next that passes is {self.found.name} ({measured}): {self.found.how}{besides}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "line": self.line,
            "found": None if self.found is None else self.found.name,
            "how": None if self.found is None else self.found.how,
            "tokens": self.tokens,
            "trials": [trial.to_dict() for trial in self.trials],
        }


def _value_within(measure: Measure) -> bool:
    assert measure.limit is not None
    value = measure.interval.value
    return value >= measure.limit if measure.bound == "at least" else value <= measure.limit
