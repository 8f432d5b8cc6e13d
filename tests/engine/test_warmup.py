"""Which layers speak for all while kernels are compiled."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.engine.warmup import _few_layers, _kind, speakers


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_all_that_follows_on_each_other_still_does(kinds: list[str]) -> None:
    chosen = speakers(kinds)
    assert chosen == sorted(set(chosen))
    assert (chosen[0], chosen[-1]) == (0, len(kinds) - 1)
    assert set(pairwise(kinds)) <= set(pairwise([kinds[i] for i in chosen]))
    assert len(chosen) <= 2 * len(set(pairwise(kinds))) + 2


@pytest.mark.parametrize("family", ["gemma3", "smollm3"])
def test_layers_of_one_kind_are_three_at_most(family: str, load_tiny: Any) -> None:
    """Gemma 3 has layers that see a window, SmolLM3 some that turn no heads: another kernel."""
    assert speakers(["a"] * 32) == [0, 1, 31]
    decoder, _ = load_tiny(family)
    layers = list(decoder.layers)
    kinds = [_kind(layer) for layer in layers]
    assert len(set(kinds)) == 2
    with _few_layers(decoder):
        assert {_kind(layer) for layer in decoder.layers} == set(kinds)
        assert all(layer in layers for layer in decoder.layers)
    assert decoder.layers == layers
