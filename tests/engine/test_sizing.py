"""A pool on a GPU that is only described: what is measured fills the ledger; small budgets shorten steps."""

import logging
from typing import Any

import pytest
import torch

from qinfer.engine import sizing
from qinfer.engine.activations import RUNTIME
from qinfer.engine.budget import Space
from qinfer.engine.footprint import GIB
from qinfer.engine.options import EngineOptions, settle_limits
from qinfer.engine.profile import StepUse
from qinfer.errors import UserError

MIB = 1 << 20
ON_GPU = Space(True, 24 * GIB, 23 * GIB)


@pytest.fixture
def size(load_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """size(**options) -> limits and ledger of a tiny model there; `asked` collects what was measured."""
    decoder, _ = load_tiny("llama3")
    asked: list[Any] = []

    def measure(decoder: Any, options: Any, limits: Any, kv_cache_dtype: str) -> StepUse:
        asked.append((limits, kv_cache_dtype))
        return StepUse(30 * MIB, 7 * MIB)

    monkeypatch.setattr(sizing, "measure_use", measure)
    monkeypatch.setattr(sizing, "space_of", lambda device: ON_GPU)
    monkeypatch.setattr(sizing, "available_memory", lambda device: ON_GPU.available)

    def sized(**options: Any) -> Any:
        chosen = EngineOptions(**options)
        limits = settle_limits(chosen, decoder.config.context_len, on_gpu=True)
        found = sizing.size_pool(decoder, chosen, limits, "fp8", "tiny")
        assert asked.pop() == (found.limits, "fp8")
        return found

    return sized


def test_the_ledger_has_what_was_measured_and_adds_up(size: Any) -> None:
    limits, ledger = size(memory=2 * GIB)
    page = ledger.kv_pool // ledger.pages
    assert (ledger.activations, ledger.graphs, ledger.reserve) == (30 * MIB, 7 * MIB, RUNTIME + page)
    parts = ledger.weights + ledger.activations + ledger.graphs + ledger.reserve + ledger.kv_pool
    assert 2 * GIB - page < parts <= 2 * GIB
    assert limits.max_model_len == ledger.max_model_len
    planned = ledger.planned
    assert (planned.budget, planned.weights) == (2 * GIB, pytest.approx(ledger.weights, rel=0.01))
    assert f"planned were {planned.tokens:,} tokens" in ledger.to_text()
    assert ledger.unquantized.budget == 2 * GIB
    assert ledger.unquantized.tokens < ledger.tokens


def test_a_share_of_the_device_or_what_is_free(size: Any) -> None:
    assert size(gpu_memory_utilization=0.5).ledger.budget == 12 * GIB
    with pytest.raises(UserError, match=r"23\.76 GiB \(0\.99 of 24\.00 GiB\) is more than the 23\.00 GiB"):
        size(gpu_memory_utilization=0.99)


def test_a_pool_that_was_chosen_is_not_planned(size: Any) -> None:
    ledger = size(num_kv_blocks=10).ledger
    assert (ledger.pages, ledger.planned) == (10, None)
    assert (
        ledger.budget == ledger.weights + ledger.activations + ledger.graphs + ledger.reserve + ledger.kv_pool
    )


def test_steps_are_shortened_where_nobody_chose_them_and_it_is_said(
    size: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "qinfer.engine.budget.gpu_step_bytes", lambda build, limits: limits.max_num_batched_tokens * MIB // 64
    )
    with caplog.at_level(logging.WARNING):
        limits = size(memory=900 * MIB, max_num_seqs=64).limits
    assert limits.max_num_batched_tokens == 1024  # 16 MiB, less than a 48th of 900
    assert "max_num_batched_tokens is 1,024 instead of 8,192" in caplog.text
    caplog.clear()
    chosen = size(memory=900 * MIB, max_num_seqs=64, max_num_batched_tokens=8192).limits
    assert chosen.max_num_batched_tokens == 8192
    assert not caplog.text


def test_where_every_op_is_checked_nothing_is_measured(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences share a page in the step that is measured, for which the twins would be called different."""
    monkeypatch.setattr(sizing.backend, "settings", lambda: sizing.backend.Settings("auto", True))
    with pytest.raises(IndexError):  # nothing was asked
        size(num_kv_blocks=10)


def test_the_build_of_a_model_names_its_formats(load_tiny: Any) -> None:
    decoder, _ = load_tiny("qwen3")
    build = sizing.build_of(decoder, "int8")
    assert build[1:] == (("dense", 128, True), "float32", "int8")
    assert torch.device("cpu") == decoder.device
