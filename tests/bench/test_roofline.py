"""The roofline's arithmetic, by hand on a tiny shape and with round numbers on Llama-3.1-8B's."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.bench.roofline import Costs, Machine, Work, _seen, roofline
from qinfer.config import ModelConfig
from qinfer.engine.footprint import WeightFormat, weight_bytes
from qinfer.testing import tiny_config

LLAMA = Path(__file__).parents[2] / "benchmarks" / "models" / "llama-3.1-8b" / "config.json"


def test_by_hand():
    config = ModelConfig.from_dict(tiny_config("llama"))  # 2 layers, hidden 64
    costs = Costs(config, step_bytes=1000, token_bytes=10, token_ops=500, head_ops=70)
    pair = 4 * 2 * config.num_heads * config.head_dim
    machine = Machine("slow memory", bandwidth=1.0, rate=1e30)  # seconds are bytes
    bound = roofline(costs, machine, [Work(5, 4), Work(3, 2)], max_num_seqs=2, max_num_batched_tokens=4)
    assert bound.prefill_seconds == 2 * 1000 + 8 * 10  # 8 tokens in steps of 4, each written once
    # 3 steps for the longer answer; its tokens see 6, 7, 8 tokens, the shorter's one sees 4
    assert bound.decode_seconds == 3 * 1000 + (6 + 7 + 8 + 4) * 10
    machine = Machine("slow products", bandwidth=1e30, rate=1.0)  # seconds are operations
    bound = roofline(costs, machine, [Work(5, 4), Work(3, 2)], max_num_seqs=2, max_num_batched_tokens=4)
    assert bound.prefill_seconds == 8 * 500 + 2 * 70 + pair * (15 + 6)
    assert bound.decode_seconds == 4 * (500 + 70) + pair * (6 + 7 + 8 + 4)
    assert bound.seconds == bound.operations
    costs = costs._replace(last_ops=200)  # which six of the eight tokens do without
    bound = roofline(costs, machine, [Work(5, 4), Work(3, 2)], max_num_seqs=2, max_num_batched_tokens=4)
    assert bound.prefill_seconds == 8 * 500 - 6 * 200 + 2 * 70 + pair * (15 + 6)


def test_cached_tokens_and_more_answers():
    config = ModelConfig.from_dict(tiny_config("llama"))
    costs = Costs(config, step_bytes=0, token_bytes=1, token_ops=1, head_ops=0)
    machine = Machine("", bandwidth=1.0, rate=1e30)
    bound = roofline(costs, machine, [Work(8, 2, n=3, cached=6)], 256, 8192)
    assert bound.prefill_seconds == 2
    assert bound.decode_seconds == 3 * 9


@given(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_seen_counts_pairs_within_the_window(start, length, window):
    positions = range(start, start + length)
    counted = sum(min(p + 1, window) if window else p + 1 for p in positions)
    assert _seen(start, start + length, window) == counted


def test_windows_count_by_layer():
    config = ModelConfig.from_dict(tiny_config("gemma2", sliding_window=4))
    assert set(config.windows) == {4, None}
    assert Costs.of(config, 0, "auto").seen(0, 6) == ((1 + 2 + 3 + 4 + 4 + 4) + 21) / 2


@pytest.mark.parametrize(
    ("weights", "layer_bytes", "kv_cache_dtype", "token_bytes", "rate"),
    [
        (WeightFormat(), 2.0, "auto", 131072, 790e12),
        (WeightFormat("w8a8-fp8"), 1.0, "fp8", 65536, 1400e12),
        (WeightFormat("w4a16"), 0.5 + 2 / 128, "auto", 131072, 790e12),
    ],
)
def test_llama_at_the_usual_setting(weights, layer_bytes, kv_cache_dtype, token_bytes, rate):
    """1000 prompts of 512 tokens, 256 answered to each, 256 at a time, worked out with round numbers."""
    config = ModelConfig.from_dict(json.loads(LLAMA.read_text()))
    costs = Costs.of(config, weight_bytes(config, weights), kv_cache_dtype)
    bound = roofline(costs, Machine("", 4.3e12, rate), [Work(512, 256)] * 1000, 256, 8192)
    layers, head = 6.98e9, 0.525e9
    pairs = 4 * 32 * 32 * 128  # operations for one key
    last = 4096 * 4096 + 3 * 4096 * 14336  # weights after the last attention
    prefill = 1000 * (512 * 2 * layers - 511 * 2 * last + pairs * 512**2 / 2) / rate
    steps, context = 1000 * 255 / 256, 255_000 * (512 + 128)
    decode = (steps * (layers * layer_bytes + head * 2) + context * token_bytes) / 4.3e12
    assert bound.prefill_seconds == pytest.approx(prefill, rel=0.01)
    assert bound.decode_seconds == pytest.approx(decode, rel=0.01)


def test_the_head_counts_once_and_an_untied_embedding_not_at_all():
    config = ModelConfig.from_dict(json.loads(LLAMA.read_text()))
    total = weight_bytes(config)
    assert total == 2 * 8_030_261_248  # the published number of parameters
    costs = Costs.of(config, total, "auto")
    assert costs.step_bytes == total - 2 * 128256 * 4096
    assert costs.head_ops == 2 * 128256 * 4096
    assert costs.token_bytes == 131072
    assert costs.token_ops + costs.head_ops == pytest.approx(costs.step_bytes, rel=1e-4)  # 2 bytes, 2 ops


def test_an_int8_head_is_read_at_half_the_bytes():
    config = ModelConfig.from_dict(json.loads(LLAMA.read_text()))
    costs = Costs.of(config, weight_bytes(config), "auto")
    saved = costs.step_bytes - costs.with_int8_head().step_bytes
    assert saved == 128256 * 4096 - 2 * 128256
