"""`quantize` in mixed precision, on a tiny random model: to a budget, and until the gate says PASS."""

from __future__ import annotations

from pathlib import Path

import pytest

from qinfer import jobs
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.errors import UserError
from qinfer.evals.gate import GateResult, Verdict
from qinfer.testing import tiny_model

ARGUMENTS = {"scheme": "w4a16", "method": "rtn", "num_samples": 6, "max_seq_len": 48, "progress": False}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(
        "\n\n".join(f"Paragraph {i} has a number and some words, as many others do." for i in range(90))
    )
    return str(path)


def eight_bit_modules(folder: Path) -> int:
    checkpoint = open_checkpoint(folder)
    return sum(checkpoint.scheme(module).name == "w8a16-int8" for module in all_modules(checkpoint.config))


def test_a_budget_without_a_gate(tmp_path: Path, text: str) -> None:
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    result = jobs.quantize(
        str(source), tmp_path / "out", budget=5.5, gate=False, calibration=text, **ARGUMENTS
    )  # type: ignore[arg-type]
    assert 0 < result.report.average_bits <= 5.5
    assert eight_bit_modules(result.out) > 0
    assert result.gate is None


def test_units_are_raised_until_the_gate_passes(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    raised: list[int] = []

    def certify(comparison: jobs.compare.Comparison, *_: object, **__: object) -> GateResult:
        raised.append(eight_bit_modules(comparison.candidate.checkpoint.path))
        verdict = Verdict.PASS if len(raised) == 3 else Verdict.FAIL
        return GateResult(verdict, ("so it is",), (), {})

    monkeypatch.setattr(jobs, "certify", certify)
    result = jobs.quantize(str(source), tmp_path / "out", until_gate=True, calibration=text, **ARGUMENTS)  # type: ignore[arg-type]
    assert result.gate is not None
    assert result.gate.verdict == "PASS"
    assert raised[0] == 0
    assert raised[0] < raised[1] < raised[2] == eight_bit_modules(tmp_path / "out")
    assert len(result.report.mix) == 2


def test_until_gate_needs_a_gate(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="until_gate raises units until the gate passes"):
        jobs.quantize("nowhere", tmp_path / "out", until_gate=True, gate=False)


def test_only_the_last_failure_is_looked_into(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    explained: list[bool] = []

    def certify(comparison: jobs.compare.Comparison, *_: object, **__: object) -> GateResult:
        explained.append(comparison.explain)
        return GateResult(Verdict.FAIL, ("so it is",), (), {})

    monkeypatch.setattr(jobs, "certify", certify)
    result = jobs.quantize(
        str(source), tmp_path / "out", until_gate=True, budget=5.5, calibration=text, **ARGUMENTS
    )  # type: ignore[arg-type]
    assert result.gate is not None
    assert result.gate.verdict == "FAIL"
    assert result.report.average_bits <= 5.5
    assert explained == [False] * (len(explained) - 1) + [True]
    assert len(explained) > 2
