"""`quantize` in mixed precision, on a tiny random model: to a budget, and until the gate says PASS."""

from __future__ import annotations

from pathlib import Path

import pytest

from qinfer import certifying, jobs, waiting
from qinfer.calibrate import mixed_run
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.compare import Comparison
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
    )
    assert 0 < result.report.average_bits <= 5.5
    assert eight_bit_modules(result.out) > 0
    assert result.gate is None


def test_units_are_raised_until_the_gate_passes(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    raised: list[int] = []

    def certify(comparison: Comparison, *_: object, **__: object) -> GateResult:
        raised.append(eight_bit_modules(comparison.candidate.checkpoint.path))
        verdict = Verdict.PASS if len(raised) == 3 else Verdict.FAIL
        return GateResult(verdict, ("so it is",), (), {})

    monkeypatch.setattr(certifying, "certify", certify)
    result = jobs.quantize(str(source), tmp_path / "out", until_gate=True, calibration=text, **ARGUMENTS)
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

    def certify(comparison: Comparison, *_: object, **__: object) -> GateResult:
        explained.append(comparison.explain)
        return GateResult(Verdict.FAIL, ("so it is",), (), {})

    monkeypatch.setattr(certifying, "certify", certify)
    result = jobs.quantize(
        str(source), tmp_path / "out", until_gate=True, budget=5.5, calibration=text, **ARGUMENTS
    )
    assert result.gate is not None
    assert result.gate.verdict == "FAIL"
    assert result.report.average_bits <= 5.5
    assert explained == [False] * (len(explained) - 1) + [True]
    assert len(explained) > 2


def test_until_gate_goes_on_with_the_step_at_which_it_was_stopped(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    steps: list[int] = []
    stop_at: list[int] = []

    def certify(comparison: Comparison, *_: object, **__: object) -> GateResult:
        steps.append(eight_bit_modules(comparison.candidate.checkpoint.path))
        if len(steps) in stop_at:
            raise KeyboardInterrupt
        waiting.is_over(comparison.candidate.checkpoint.path)
        return GateResult(Verdict.PASS if steps[-1] >= whole[-1] else Verdict.FAIL, ("so it is",), (), {})

    def run(out: Path) -> bytes:
        options = {"until_gate": True, "calibration": text, **ARGUMENTS}
        return (jobs.quantize(str(source), out, **options).out / "model.safetensors").read_bytes()

    monkeypatch.setattr(certifying, "certify", certify)
    whole = [4]
    expected = run(tmp_path / "whole")
    whole, steps[:], stop_at[:] = list(steps), [], [1, 4]  # before the first verdict, and after the second
    out = tmp_path / "stopped"
    for _ in stop_at:
        with pytest.raises(KeyboardInterrupt):
            run(out)
        monkeypatch.setattr(mixed_run, "with_costs", None)  # they are known
    assert run(out) == expected
    assert steps == [whole[0], *whole[:3], *whole[2:]]
    with pytest.raises(UserError, match="is not empty"):  # it has its verdict
        run(out)
