"""The largest step, which a GPU's engine runs to measure its peak: nothing that comes later is larger."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer import ops
from qinfer.engine import profile
from qinfer.engine.kv_pool import KVPool
from qinfer.engine.options import StepLimits
from qinfer.engine.runner import Runner
from qinfer.engine.sampler import slice_rows
from qinfer.engine.warmup import largest_step


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(0, 9000), st.sampled_from([16, 64]))
@settings(max_examples=100)
def test_the_largest_step_reaches_every_limit(longest: int, seqs: int, more: int, block_size: int) -> None:
    limits = StepLimits(longest, seqs, seqs + more, block_size)
    chunks, pages = largest_step(limits)
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    assert len(chunks) == seqs
    assert all(chunk.sample for chunk in chunks)
    assert sum(lengths) == min(limits.max_num_batched_tokens, seqs * longest)
    assert min(lengths) >= 1
    assert max(chunk.stop for chunk in chunks) == longest
    assert all(len(pages[chunk.lane]) * block_size >= chunk.stop for chunk in chunks)
    assert {page for held in pages.values() for page in held} == {1}
    assert [chunk.lane for chunk in chunks] == list(range(seqs))


@pytest.mark.parametrize("max_logprobs", [5, -1])
def test_all_that_copies_logits_is_asked_for_at_once(
    load_tiny: Any, monkeypatch: pytest.MonkeyPatch, max_logprobs: int
) -> None:
    decoder, _ = load_tiny("qwen3")
    limits = StepLimits(200, 9, 64, 16)
    monkeypatch.setattr("qinfer.engine.sampler.SLICE_BYTES", 4 * 4 * decoder.config.vocab_size)
    assert slice_rows(decoder.config.vocab_size) == 4
    seen: dict[str, list[tuple[int, int]]] = {"describe": [], "penalties": []}

    def note_describe(logits: torch.Tensor, ids: Any, num_top: int, spell: Any) -> Any:
        seen["describe"].append((len(logits), num_top))
        return describe(logits, ids, num_top, spell)

    def note_counts(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        seen["penalties"].append(tuple(ids.shape))
        return counts(ids, vocab_size)

    describe, counts = profile.describe, ops.token_counts
    monkeypatch.setattr(profile, "describe", note_describe)
    monkeypatch.setattr("qinfer.engine.sampler.describe", note_describe)
    monkeypatch.setattr("qinfer.ops.token_counts", note_counts)
    pool = KVPool(decoder.config, 1, 16, "float32", device=torch.device("cpu"))
    profile.run_largest(Runner(decoder, pool, limits), max_logprobs)
    assert seen["describe"] == [(4, max_logprobs)] * 2  # sampled rows, and a prompt's
    assert seen["penalties"] == [(4, 199), (4, 200)]  # what was said, and everything
