"""The report says the verdict first, then why; JSON and Markdown hold the same numbers."""

from __future__ import annotations

import json
import math

import pytest

from qinfer.evals import report
from qinfer.evals.gate import GateResult, Measure, Verdict
from qinfer.evals.statistics import Interval

RESULT = GateResult(
    Verdict.FAIL,
    ("mean KL is too high",),
    (
        Measure("mean KL", "nats/token", Interval(0.5, 0.4, 0.6), 0.2),
        Measure("top-1 agreement", "of positions", Interval(0.7, 0.6, 0.8), 0.78, "at least"),
        Measure("p99 KL", "nats", Interval(math.nan, -math.inf, math.inf), 1.5),
        Measure("perplexity of the source", "per token", Interval(16.3, 15.0, 17.0)),
    ),
    {"model": "a|b", "schemes": ["w4a16 g64 asym"], "seed": 0},
)


def test_verdict_first_then_reasons_then_measures_then_settings() -> None:
    lines = report.markdown(RESULT.to_dict()).splitlines()
    assert lines[0].startswith("# FAIL")
    assert lines[2] == "* mean KL is too high"
    assert "| mean KL | 0.5 nats/token | 0.4 to 0.6 | at most 0.2 | FAIL |" in lines
    assert "| top-1 agreement | 0.7 of positions | 0.6 to 0.8 | at least 0.78 | UNDECIDED |" in lines
    assert "| p99 KL | not finite nats | not finite to not finite | at most 1.5 | FAIL |" in lines
    assert "| perplexity of the source | 16.3 per token | 15 to 17 |  | reported |" in lines
    assert "| model | a\\|b |" in lines
    assert '| schemes | ["w4a16 g64 asym"] |' in lines
    order = [lines.index("* mean KL is too high"), lines.index("## Settings"), lines.index("| seed | 0 |")]
    assert order == sorted(order)


def test_json_is_standard_and_complete() -> None:
    document = json.loads(json.dumps(RESULT.to_dict(), allow_nan=False))
    assert document["verdict"] == "FAIL"
    assert document["confidence"] == 0.9
    mean_kl, _, p99, perplexity = document["measures"]
    assert mean_kl.pop("power") == pytest.approx({"passes_at": 0.04883, "fails_at": 0.35117}, abs=1e-5)
    assert mean_kl == {
        "name": "mean KL",
        "unit": "nats/token",
        "value": 0.5,
        "low": 0.4,
        "high": 0.6,
        "confidence": 0.9,
        "bound": "at most",
        "limit": 0.2,
        "verdict": "FAIL",
    }
    assert (p99["value"], p99["high"], p99["verdict"]) == (None, None, "FAIL")
    assert (perplexity["limit"], perplexity["verdict"], perplexity["bound"]) == (None, None, None)


def test_text_for_a_terminal() -> None:
    lines = RESULT.to_text().splitlines()
    assert lines[0] == "FAIL"
    assert lines[1] == "  mean KL is too high"
    assert lines[2] == "  perplexity of the source 16.3 [15, 17] per token"
