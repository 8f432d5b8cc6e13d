"""The gate on the built-in model: what must pass passes, what must fail fails (minutes each)."""

from __future__ import annotations

from pathlib import Path

import pytest

from qinfer import jobs
from qinfer.hub import BUILTIN

pytestmark = pytest.mark.slow


def test_the_source_in_its_own_dtype_passes_against_float32() -> None:
    result = jobs.evaluate(BUILTIN, against=BUILTIN, progress=False)
    assert result.verdict == "PASS", result.to_text()


@pytest.mark.parametrize("preset", ["int8", "fp8", "awq"])
def test_every_preset_passes(preset: str, tmp_path: Path) -> None:
    result = jobs.quantize(BUILTIN, tmp_path / preset, scheme=preset, progress=False)
    assert result.gate is not None
    assert result.gate.verdict == "PASS", result.to_text()


@pytest.mark.parametrize("group_size", [64, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_plain_rounding_to_4_bits_fails(group_size: int, symmetric: bool, tmp_path: Path) -> None:
    result = jobs.quantize(
        BUILTIN,
        tmp_path / "rtn",
        scheme="w4a16",
        method="rtn",
        group_size=group_size,
        symmetric=symmetric,
        progress=False,
    )
    assert result.gate is not None
    assert result.gate.verdict == "FAIL", result.to_text()
