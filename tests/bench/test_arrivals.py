"""When requests are due: the rate that was asked for, exactly, and bursts as drawn."""

import math

import numpy as np
import pytest

from qinfer.bench.arrivals import Arrivals
from qinfer.errors import UserError


def test_all_at_once():
    assert Arrivals().due(3, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_n_requests_take_n_over_rate(burstiness):
    due = Arrivals(rate=4.0, burstiness=burstiness).due(1000, 7)
    assert due[-1] == pytest.approx(250.0)
    assert due == sorted(due)
    gaps = np.diff(due)
    spread = float(gaps.std() / gaps.mean())  # of a Gamma distribution: one over the root of its shape
    assert spread == pytest.approx(0.0 if math.isinf(burstiness) else burstiness**-0.5, rel=0.12, abs=1e-9)


def test_the_seed_decides():
    assert Arrivals(2.0).due(9, 1) == Arrivals(2.0).due(9, 1) != Arrivals(2.0).due(9, 2)


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 5.5), ("exponential", 10**0.5)])
def test_a_ramp_goes_from_one_rate_to_the_other(ramp, middle):
    arrivals = Arrivals(burstiness=math.inf, ramp=ramp, ramp_start=1.0, ramp_end=10.0)
    gaps = np.diff([0.0, *arrivals.due(101, 0)])
    assert [1 / gaps[i] for i in (0, 50, 100)] == pytest.approx([1.0, middle, 10.0])


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"rate": 0.0}, "--request-rate must be more than 0"),
        ({"rate": math.nan}, "--request-rate must be more than 0"),
        ({"burstiness": -1.0}, "--burstiness must be more than 0"),
        ({"ramp_start": 1.0}, "need --ramp-up-strategy"),
        ({"ramp": "quick"}, "one of linear, exponential, not 'quick'"),
        ({"ramp": "linear", "ramp_start": 1.0}, "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        ({"ramp": "linear", "ramp_start": 1.0, "ramp_end": 2.0, "rate": 3.0}, "take one of them"),
    ],
)
def test_mistakes(keywords, said):
    with pytest.raises(UserError, match=said):
        Arrivals(**keywords)
