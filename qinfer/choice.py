"""Several candidates of one source, to choose between: size, speed and how much is left of the source.

Each is judged as it would be alone; the source is read and asked once for all of them. Then each is timed,
one model in memory at a time, on one greedy answer. A candidate is worth choosing when it passed and no other
one that passed is at least as small, as fast and as good, and better in one of the three.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from qinfer.compare import Comparison
from qinfer.evals.gate import GateResult, Verdict
from qinfer.evals.scorer import Scorer
from qinfer.evals.statistics import Interval, finite
from qinfer.evals.store import Store
from qinfer.evidence import Answerer
from qinfer.reading import OpenModel, Reader, Serving
from qinfer.sampling_params import SamplingParams

ROUNDS = 5
TOKENS = 48  # generated in each round
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
_QUALITIES = ("recovery on tasks", "top-1 agreement")  # the first that was measured


class Option(NamedTuple):
    """One candidate: `speed` in tokens/s of one greedy answer, `quality` a share of the source."""

    name: str
    schemes: tuple[str, ...]
    num_bytes: int  # of the weight files
    speed: float
    quality: Interval
    result: GateResult

    def beaten_by(self, other: Option) -> bool:
        """Whether the other is at least as good in all three, and better in one."""
        ours = (-self.num_bytes, self.speed, self.quality.value)
        theirs = (-other.num_bytes, other.speed, other.quality.value)
        return theirs != ours and all(b >= a for a, b in zip(ours, theirs, strict=True))


class Choice(NamedTuple):
    """All candidates in the order given, and the source as it would be served without quantization."""

    options: tuple[Option, ...]
    quality: str  # what the options' quality is
    source: str
    source_bytes: int
    source_speed: float

    @property
    def verdict(self) -> Verdict:
        """PASS only where all pass."""
        found = {option.result.verdict for option in self.options}
        if Verdict.FAIL in found:
            return Verdict.FAIL
        return Verdict.UNDECIDED if Verdict.UNDECIDED in found else Verdict.PASS

    def worth_choosing(self) -> list[Option]:
        """Those that passed and that no other one that passed beats."""
        passed = [option for option in self.options if option.result.verdict is Verdict.PASS]
        return [one for one in passed if not any(one.beaten_by(other) for other in passed)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        best = self.worth_choosing()
        source = {"name": self.source, "bytes": self.source_bytes, "tokens_per_second": self.source_speed}
        return {
            "verdict": str(self.verdict),
            "quality": self.quality,
            "source": source,
            "options": [_told(option, option in best) for option in self.options],
        }

    def to_text(self) -> str:
        """For a terminal: a line for each, then what is worth choosing."""
        width = max(len(name) for name in (self.source, *(option.name for option in self.options)))
        lines = [
            f"{'':{width}}  {'MB':>8}  {'tok/s':>7}  {self.quality:>26}",
            f"{self.source:{width}}  {self.source_bytes / 1e6:8.1f}  {self.source_speed:7.1f}",
        ]
        for option in self.options:
            value, low, high = (f"{100 * number:.1f}" for number in option.quality)
            lines.append(
                f"{option.name:{width}}  {option.num_bytes / 1e6:8.1f}  {option.speed:7.1f}  "
                f"{f'{value} % [{low}, {high}]':>26}  {option.result.verdict}"
            )
        best = [option.name for option in self.worth_choosing()]
        return "\n".join([*lines, f"worth choosing: {', '.join(best)}" if best else "none of them passed"])


def choose(comparisons: Sequence[Comparison], results: Sequence[GateResult]) -> Choice:
    """Times the judged candidates and their source, and puts all together."""
    first = comparisons[0]
    measured = {measure.name for result in results for measure in result.measures}
    quality = next((name for name in _QUALITIES if name in measured), _QUALITIES[-1])
    with first.opened_store() as store:
        source_speed = _speed(first.source, Serving.settle("auto", "auto", first.source.checkpoint), store)
        options = [
            Option(
                comparison.candidate.name,
                tuple(sorted(comparison.candidate.schemes())),
                comparison.candidate.checkpoint.num_bytes,
                _speed(comparison.candidate, comparison.serving, store),
                _quality(result, quality),
                result,
            )
            for comparison, result in zip(comparisons, results, strict=True)
        ]
    return Choice(tuple(options), quality, first.source.name, first.source.checkpoint.num_bytes, source_speed)


def _speed(model: OpenModel, serving: Serving, store: Store) -> float:
    """Tokens/s of one greedy answer, the median of ROUNDS after one to warm up."""
    scorer = Answerer(Reader(model, serving, 1), store, progress=False).scorer()
    return statistics.median([_tokens_per_second(scorer) for _ in range(ROUNDS + 1)][1:])


def _tokens_per_second(scorer: Scorer) -> float:
    prompt = scorer.encode(_PROMPT)[-(scorer.max_length - TOKENS) :]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    scorer.generate([(prompt, params)])
    return TOKENS / (time.perf_counter() - start)


def _quality(result: GateResult, name: str) -> Interval:
    """Not a number where it was not measured: such a candidate failed before."""
    nothing = Interval(math.nan, math.nan, math.nan)
    return next((measure.interval for measure in result.measures if measure.name == name), nothing)


def _told(option: Option, best: bool) -> dict[str, Any]:
    return {
        "name": option.name,
        "schemes": list(option.schemes),
        "bytes": option.num_bytes,
        "tokens_per_second": option.speed,
        "quality": {key: finite(number) for key, number in option.quality._asdict().items()},
        "worth_choosing": best,
        "result": option.result.to_dict(),
    }
