"""When requests of a load are due: at a rate, regular or in bursts, or all at once.

Gaps are drawn from a Gamma distribution whose shape is the burstiness: 1 makes a Poisson process, less makes
bursts, infinity a metronome. A whole schedule is stretched so that N requests take N / rate seconds, as vLLM
does, so that the load is the one asked for and not its luck. A rate that ramps up goes from one to another,
evenly or by a constant factor, over the requests; such a schedule is not stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qinfer.errors import UserError

RAMPS = ("linear", "exponential")


@dataclass(frozen=True)
class Arrivals:
    """Rates in requests per second; infinite: all at once. UserError for what is none."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: str | None = None
    ramp_start: float | None = None
    ramp_end: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("request-rate", self.rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise UserError(f"--{name} must be more than 0, not {value}", name)
        if self.ramp is None:
            if (self.ramp_start, self.ramp_end) != (None, None):
                raise UserError("--ramp-up-start-rps and -end-rps need --ramp-up-strategy", "ramp")
            return
        if self.ramp not in RAMPS:
            raise UserError(
                f"--ramp-up-strategy must be one of {', '.join(RAMPS)}, not {self.ramp!r}", "ramp"
            )
        if not all(value is not None and 0 < value < math.inf for value in (self.ramp_start, self.ramp_end)):
            raise UserError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, more than 0", "ramp"
            )
        if not math.isinf(self.rate):
            raise UserError("--request-rate and --ramp-up-strategy: take one of them", "ramp")

    def due(self, count: int, seed: int) -> list[float]:
        """Seconds after the start at which each of `count` requests is due, in order."""
        generator = np.random.default_rng([seed, 2])
        rates = self._rates(count)
        if math.isinf(rates[0]):
            return [0.0] * count
        gaps = 1 / rates
        if not math.isinf(self.burstiness):
            gaps = generator.gamma(self.burstiness, gaps / self.burstiness)
        due = np.cumsum(gaps)
        if self.ramp is None:
            due *= count / self.rate / due[-1]
        return [float(seconds) for seconds in due]

    def _rates(self, count: int) -> np.ndarray:
        if self.ramp is None:
            return np.full(count, self.rate)
        assert self.ramp_start is not None
        assert self.ramp_end is not None
        progress = np.arange(count) / max(count - 1, 1)
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * progress
        return np.asarray(self.ramp_start * (self.ramp_end / self.ramp_start) ** progress)
