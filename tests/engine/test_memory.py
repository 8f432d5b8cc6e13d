"""The ledger's arithmetic: published sizes of SmolLM2-135M, the cases M01, M02, M05, and laws of a plan."""

import dataclasses
import logging

import pytest
import torch

from qinfer.config import ModelConfig, RopeConfig
from qinfer.engine import footprint, memory
from qinfer.engine.footprint import Pages, WeightFormat
from qinfer.engine.memory import Demand, Ledger, Space
from qinfer.engine.options import EngineOptions, settle_limits
from qinfer.engine.sizing import tensor_bytes
from qinfer.errors import UserError
from qinfer.model.linear import Linear
from qinfer.quant import W4A16, Dense, W8A8Fp8, W8A8Int8, W8A16Int8

GIB = footprint.GIB

SMOLLM2_135M = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    activation="silu",
    tie_word_embeddings=True,
    dtype="bfloat16",
    rope=RopeConfig(theta=100000.0),
)
LLAMA_31_8B = dataclasses.replace(
    SMOLLM2_135M,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("512MiB", 1 << 29),
        ("24gb", 24 * 10**9),
        ("4096B", 4096),
        ("1048576", 1 << 20),
        (1 << 30, GIB),
        ("0", 0),
    ],
)
def test_parse_size(text, num_bytes):
    assert footprint.parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "24G", "GiB", "-1GiB", "24 GiB free", "nan", "1e9"])
def test_parse_size_refuses_in_one_line(text):
    with pytest.raises(UserError, match="such as 24GiB") as error:
        footprint.parse_size(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", ["4", 24, "1048575", "2.5"])
def test_a_small_number_without_a_unit_is_asked_for_one(size):
    with pytest.raises(UserError, match=f"{size} bytes: write a unit") as error:
        footprint.parse_size(size)
    assert "\n" not in str(error.value)


def test_m01_pool_is_own_share_less_own_use():
    gib = {"total": 80 * GIB, "free": 50 * GIB}
    budget = memory.budget_for(**gib, utilization=0.5)
    ledger = memory.plan(
        "x", budget, Demand(weights=10 * GIB, activations=2 * GIB, graphs=GIB), Pages(16, 1 << 20), 16
    )
    assert ledger.kv_pool == 27 * GIB
    with pytest.raises(UserError, match=r"72\.00 GiB .* 50\.00 GiB"):
        memory.budget_for(**gib, utilization=0.9)


def test_m01_hard_budget_below_the_weights_names_both_numbers():
    with pytest.raises(UserError, match=r"needs 16\.00 GiB .* budget is 12\.00 GiB"):
        memory.plan("x", 12 * GIB, Demand(weights=15 * GIB), Pages(16, GIB), 16)


def test_m01_weights_beyond_the_budget_are_refused_before_loading():
    memory.require_weights_fit(2 * GIB, available=3 * GIB, memory=None)
    memory.require_weights_fit(GIB, available=3 * GIB, memory=2 * GIB)
    with pytest.raises(UserError, match=r"weights alone need 4\.00 GiB .* free is 3\.00 GiB"):
        memory.require_weights_fit(4 * GIB, available=3 * GIB, memory=None)
    with pytest.raises(UserError, match=r"weights alone need 2\.00 GiB .* budget is 1\.00 GiB"):
        memory.require_weights_fit(2 * GIB, available=3 * GIB, memory=GIB)
    with pytest.raises(UserError, match=r"4\.00 GiB .* 3\.00 GiB that are free"):
        memory.require_weights_fit(GIB, available=3 * GIB, memory=4 * GIB)


def test_m02_growing_free_memory_is_a_warning_and_never_negative_use(caplog):
    with caplog.at_level(logging.WARNING):
        assert memory.measured_use(free_before=int(82.9 * GIB), free_after=int(90.2 * GIB)) == 0
    assert "82.90 GiB to 90.20 GiB" in caplog.text
    caplog.clear()
    assert memory.measured_use(5 * GIB, 3 * GIB) == 2 * GIB
    assert not caplog.text


def test_m05_every_size_follows_the_kv_dtype():
    assert (
        footprint.kv_bytes_per_token(SMOLLM2_135M)
        == footprint.kv_bytes_per_token(SMOLLM2_135M, "float16")
        == 23_040
    )
    assert footprint.kv_bytes_per_token(SMOLLM2_135M, "fp8") == 11_520
    assert footprint.kv_bytes_per_token(SMOLLM2_135M, "float32") == 46_080
    assert footprint.kv_bytes_per_token(SMOLLM2_135M, "int8") == 11_520 + 30 * 2 * 3 * 4
    assert footprint.blocks_for(GIB, SMOLLM2_135M, "bfloat16") == 2_912
    assert footprint.blocks_for(GIB, SMOLLM2_135M, "fp8_e4m3") == 5_825
    max_model_len = int(1.9 * 2_912 * 16)
    for kv_cache_dtype, sequences in (("bfloat16", 0), ("fp8", 1)):
        page = footprint.pages_of(SMOLLM2_135M, kv_cache_dtype, 16)
        ledger = memory.plan("x", GIB, Demand(weights=0), page, max_model_len)
        assert ledger.sequences == sequences
        if sequences:
            assert memory.settle_length(ledger, chosen=True) == ledger
            continue
        with pytest.raises(UserError, match=rf"max_model_len {max_model_len} .* {2912 * 16} tokens") as error:
            memory.settle_length(ledger, chosen=True)
        assert f"lower it to {2912 * 16} or less" in str(error.value)
        settled = memory.settle_length(ledger, chosen=False)
        assert (settled.max_model_len, settled.sequences) == (2912 * 16, 1)
        assert dataclasses.replace(settled, max_model_len=max_model_len) == ledger


def test_weights_of_known_models():
    assert footprint.weight_bytes(SMOLLM2_135M) == 134_515_008 * 2  # the published parameter count
    assert footprint.weight_bytes(LLAMA_31_8B) == 8_030_261_248 * 2
    assert footprint.weight_bytes(LLAMA_31_8B, dtype="float32") == 8_030_261_248 * 4


def test_unknown_names_are_user_errors():
    with pytest.raises(UserError, match="w2a2"):
        footprint.weight_bytes(SMOLLM2_135M, WeightFormat("w2a2"))
    with pytest.raises(UserError, match=r"int4.*fp8"):
        footprint.kv_bytes_per_token(SMOLLM2_135M, "int4")


@pytest.mark.parametrize("num_pages", [None, 7])
def test_ledger_adds_up_and_never_exceeds_its_budget(num_pages):
    demand = Demand(weights=3 * GIB, activations=1234, graphs=56, reserve=789)
    page = footprint.pages_of(SMOLLM2_135M, "int8", 64)
    ledger = memory.plan("x", 4 * GIB, demand, page, 100, num_pages)
    used = demand.total + ledger.kv_pool
    assert used <= 4 * GIB
    assert ledger.kv_pool == ledger.pages * page.num_bytes
    assert ledger.pages == (num_pages or (4 * GIB - demand.total) // page.num_bytes)
    assert ledger.sequences == ledger.pages // 2  # 100 tokens take two pages of 64


def test_fixed_pages_must_fit():
    with pytest.raises(UserError, match=r"needs 2\.00 GiB .* budget is 1\.00 GiB"):
        memory.plan("x", GIB, Demand(weights=GIB), Pages(16, GIB // 8), 16, num_pages=8)


def test_ledger_tells_what_quantizing_bought():
    def ledger(weights: int, kv_cache_dtype: str, unquantized: Ledger | None = None) -> Ledger:
        page = footprint.pages_of(LLAMA_31_8B, kv_cache_dtype, 64)
        made = memory.plan(kv_cache_dtype, 24 * GIB, Demand(weights, 2**30), page, 8192)
        return dataclasses.replace(made, unquantized=unquantized)

    dense = ledger(footprint.weight_bytes(LLAMA_31_8B), "bfloat16")
    small = ledger(footprint.weight_bytes(LLAMA_31_8B, WeightFormat("w8a8-fp8")), "fp8", dense)
    assert small.tokens > 232_000 > 3 * dense.tokens  # issue: 63 k -> 232 k under 24 GiB
    assert small.ratio == small.tokens / dense.tokens
    assert f"{dense.tokens:,} → {small.tokens:,} tokens" in small.to_text()
    told = small.to_dict()
    assert told["unquantized"]["tokens"] == dense.tokens
    assert told["tokens"] == small.pages * 64
    assert (
        "does not fit"
        in dataclasses.replace(small, unquantized=dataclasses.replace(dense, pages=0)).to_text()
    )


def test_cpu_budget_is_modest_by_default_and_obeys():
    page, demand = Pages(16, 16 << 20), Demand(weights=GIB)
    assert memory.cpu_budget(64 * GIB, demand, page, max_tokens=32) == GIB + (32 << 20)
    assert memory.cpu_budget(64 * GIB, demand, page, max_tokens=10**6) == GIB + memory.CPU_POOL
    assert memory.cpu_budget(2 * GIB, demand, page, max_tokens=10**6) == int(1.8 * GIB)
    assert memory.cpu_budget(2 * GIB, demand, page, max_tokens=32, memory=GIB) == GIB
    with pytest.raises(UserError, match=r"3\.00 GiB .* 2\.00 GiB"):
        memory.cpu_budget(2 * GIB, demand, page, max_tokens=32, memory=3 * GIB)


def test_a_budget_is_the_cpus_pool_or_a_share_of_the_gpu():
    page, demand = Pages(16, 16 << 20), Demand(weights=GIB)
    limits = settle_limits(EngineOptions(max_num_seqs=2, max_model_len=32), 64, on_gpu=False)
    cpu, gpu = Space(False, 64 * GIB, 60 * GIB), Space(True, 80 * GIB, 79 * GIB)
    options = EngineOptions()
    assert memory.budget_of(cpu, demand, page, limits, options) == GIB + (64 << 20)  # 2 x 32 tokens
    assert memory.budget_of(gpu, demand, page, limits, options) == int(80 * GIB * 0.92)
    for space in (cpu, gpu):
        assert memory.budget_of(space, demand, page, limits, EngineOptions(memory=5 * GIB)) == 5 * GIB


def test_the_unquantized_model_has_the_same_budget_and_needs():
    demand = Demand(footprint.weight_bytes(SMOLLM2_135M, WeightFormat("w8a8-int8")), 5000, 0, 600)
    page = footprint.pages_of(SMOLLM2_135M, "fp8", 16)
    other = memory.unquantized(SMOLLM2_135M, memory.plan("x", GIB, demand, page, 8192))
    assert (other.budget, other.weights, other.activations, other.reserve) == (
        GIB,
        2 * 134_515_008,
        5000,
        600,
    )
    assert other.tokens == (GIB - 2 * 134_515_008 - 5600) // (16 * 23_040) * 16
    assert memory.unquantized(SMOLLM2_135M, memory.plan("x", GIB // 4, demand, page, 8192)) is None


def test_activations_follow_the_larger_of_layers_and_logits():
    few_rows = footprint.activation_bytes(SMOLLM2_135M, 16, 64, 2)
    assert few_rows == 64 * 49152 * 20
    many_rows = footprint.activation_bytes(LLAMA_31_8B, 8192, 256, 2)
    assert many_rows == 8192 * (3 * 4096 + 3 * 14336) * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(192, 576), (1, 32), (13, 96), (1536, 128)])
@pytest.mark.parametrize(
    ("weight_format", "scheme"),
    [
        (WeightFormat("dense"), Dense()),
        (WeightFormat("w8a8-int8"), W8A8Int8()),
        (WeightFormat("w8a16-int8"), W8A16Int8()),
        (WeightFormat("w8a8-fp8"), W8A8Fp8()),
        (WeightFormat("w4a16", 32, True), W4A16(32, True)),
        (WeightFormat("w4a16", 32, False), W4A16(32, False)),
    ],
)
def test_linear_bytes_are_those_of_the_tensors_in_the_file(weight_format, scheme, rows, columns, dtype):
    torch_dtype = getattr(torch, dtype)
    tensors = scheme.quantize(torch.randn(rows, columns), dtype=torch_dtype)
    written = sum(tensor.nbytes for tensor in tensors.values())
    assert footprint.linear_bytes(weight_format, rows, columns, footprint.ITEM_BYTES[dtype]) == written


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(192, 576), (24, 64), (1536, 128)])
@pytest.mark.parametrize(
    ("weight_format", "scheme"),
    [
        (WeightFormat("dense"), Dense()),
        (WeightFormat("w8a8-int8"), W8A8Int8()),
        (WeightFormat("w8a16-int8"), W8A16Int8()),
        (WeightFormat("w8a8-fp8"), W8A8Fp8()),
        (WeightFormat("w4a16", 32, True), W4A16(32, True)),
        (WeightFormat("w4a16", 64, False), W4A16(64, False)),
    ],
)
def test_a_cpu_holds_the_bytes_that_are_planned(weight_format, scheme, rows, columns, dtype):
    torch_dtype = getattr(torch, dtype)
    tensors = scheme.quantize(torch.randn(rows, columns), dtype=torch_dtype)
    linear = Linear([(scheme, tensors)], device=torch.device("cpu"), dtype=torch_dtype)
    assert footprint.cpu_linear_bytes(weight_format, rows, columns, dtype) == tensor_bytes(linear.prepared)
