"""The ledger's arithmetic: published sizes of SmolLM2-135M, the cases M01, M02, M05, and laws of a plan."""

import dataclasses
import logging

import pytest
import torch

from qinfer.config import ModelConfig, RopeConfig
from qinfer.engine import activations, budget, footprint, memory
from qinfer.engine.activations import Build, gpu_step_bytes
from qinfer.engine.budget import Demand, Space
from qinfer.engine.footprint import Pages, WeightFormat
from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineOptions, StepLimits, settle_limits
from qinfer.engine.plan import shapes
from qinfer.errors import UserError
from qinfer.kernels.panels import to_fragments, to_panels
from qinfer.kernels.w4a16 import pack_fragments
from qinfer.model.linear import Linear
from qinfer.model.storage import tensor_bytes
from qinfer.quant import W4A16, Dense, W8A8Fp8, W8A8Fp8Block, W8A8Fp8Static, W8A8Int8, W8A16Fp8, W8A16Int8

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
    total = budget.budget_for(**gib, utilization=0.5)
    ledger = memory.plan(
        "x", total, Demand(weights=10 * GIB, activations=2 * GIB, graphs=GIB), Pages(16, 1 << 20), 16
    )
    assert ledger.kv_pool == 27 * GIB
    with pytest.raises(UserError, match=r"72\.00 GiB .* 50\.00 GiB"):
        budget.budget_for(**gib, utilization=0.9)


def test_m01_hard_budget_below_the_weights_names_both_numbers():
    with pytest.raises(UserError, match=r"needs 16\.00 GiB .* budget is 12\.00 GiB"):
        memory.plan("x", 12 * GIB, Demand(weights=15 * GIB), Pages(16, GIB), 16)


def test_m01_weights_beyond_the_budget_are_refused_before_loading():
    cpu, gpu = Space(False, 4 * GIB, 3 * GIB), Space(True, 4 * GIB, 3 * GIB)
    half, two = EngineOptions(gpu_memory_utilization=0.5), EngineOptions(memory=2 * GIB)
    for weights, space, options in ((2 * GIB, cpu, EngineOptions()), (GIB, cpu, two), (GIB, gpu, half)):
        budget.require_weights_fit(weights, space, options)
    fixed = EngineOptions(num_kv_blocks=4)  # no share of the device is asked for
    budget.require_weights_fit(2 * GIB, gpu, fixed)
    for weights, space, options, said in (
        (4 * GIB, cpu, EngineOptions(), r"weights alone need 4\.00 GiB .* free is 3\.00 GiB"),
        (2 * GIB, cpu, EngineOptions(memory=GIB), r"weights alone need 2\.00 GiB .* budget is 1\.00 GiB"),
        (GIB, cpu, EngineOptions(memory=4 * GIB), r"4\.00 GiB .* 3\.00 GiB that are free"),
        (3 * GIB, gpu, half, r"weights alone need 3\.00 GiB .* budget is 2\.00 GiB"),
        (GIB, gpu, EngineOptions(), r"3\.68 GiB \(0\.92 of 4\.00 GiB\) is more than the 3\.00 GiB"),
        (3 * GIB, gpu, fixed, r"weights alone need 3\.00 GiB .* free is 3\.00 GiB"),
    ):
        with pytest.raises(UserError, match=said):
            budget.require_weights_fit(weights, space, options)


def test_m02_growing_free_memory_is_a_warning_and_never_negative_use(caplog):
    with caplog.at_level(logging.WARNING):
        budget.warn_if_released(free_before=int(82.9 * GIB), free_after=int(90.2 * GIB))
    assert "82.90 GiB to 90.20 GiB" in caplog.text
    caplog.clear()
    budget.warn_if_released(5 * GIB, 3 * GIB)
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
    assert "planned" not in small.to_text()
    measured = dataclasses.replace(small, planned=dataclasses.replace(small, pages=small.pages * 2))
    assert f"planned were {2 * small.tokens:,} tokens: -50.0%" in measured.to_text()
    assert measured.to_dict()["planned"]["tokens"] == 2 * small.tokens
    assert (
        "does not fit"
        in dataclasses.replace(small, unquantized=dataclasses.replace(dense, pages=0)).to_text()
    )


def test_cpu_budget_is_modest_by_default_and_obeys():
    page, demand = Pages(16, 16 << 20), Demand(weights=GIB)
    assert budget.cpu_budget(64 * GIB, demand, page, max_tokens=32) == GIB + (32 << 20)
    assert budget.cpu_budget(64 * GIB, demand, page, max_tokens=10**6) == GIB + budget.CPU_POOL
    assert budget.cpu_budget(2 * GIB, demand, page, max_tokens=10**6) == int(1.8 * GIB)
    assert budget.cpu_budget(2 * GIB, demand, page, max_tokens=32, memory=GIB) == GIB
    with pytest.raises(UserError, match=r"3\.00 GiB .* 2\.00 GiB"):
        budget.cpu_budget(2 * GIB, demand, page, max_tokens=32, memory=3 * GIB)


def test_a_budget_is_the_cpus_pool_or_a_share_of_the_gpu():
    page, demand = Pages(16, 16 << 20), Demand(weights=GIB)
    limits = settle_limits(EngineOptions(max_num_seqs=2, max_model_len=32), 64, on_gpu=False)
    cpu, gpu = Space(False, 64 * GIB, 60 * GIB), Space(True, 80 * GIB, 79 * GIB)
    options = EngineOptions()
    assert budget.budget_of(cpu, demand, page, limits, options) == GIB + (64 << 20)  # 2 x 32 tokens
    assert budget.budget_of(gpu, demand, page, limits, options) == int(80 * GIB * 0.92)
    for space in (cpu, gpu):
        assert budget.budget_of(space, demand, page, limits, EngineOptions(memory=5 * GIB)) == 5 * GIB


def test_the_unquantized_model_has_the_same_budget_and_needs():
    demand = Demand(footprint.weight_bytes(SMOLLM2_135M, WeightFormat("w8a8-int8")), 5000, 0, 600)
    page = footprint.pages_of(SMOLLM2_135M, "fp8", 16)
    limits = settle_limits(EngineOptions(), 8192, on_gpu=False)
    dense = budget.unquantized_demand(SMOLLM2_135M, EngineOptions(), limits, demand, None)
    assert dense == (2 * 134_515_008, 5000, 0, 600)
    other = memory.unquantized(SMOLLM2_135M, memory.plan("x", GIB, demand, page, 8192), dense)
    assert other.budget == GIB
    assert other.tokens == (GIB - 2 * 134_515_008 - 5600) // (16 * 23_040) * 16
    assert memory.unquantized(SMOLLM2_135M, memory.plan("x", GIB // 4, demand, page, 8192), dense) is None


def test_activations_follow_the_larger_of_layers_and_logits():
    def limits(tokens: int, seqs: int) -> StepLimits:
        return StepLimits(8192, seqs, tokens, 16)

    assert activations.cpu_step_bytes(SMOLLM2_135M, limits(16, 64), 2) == 64 * 49152 * 20
    assert activations.cpu_step_bytes(LLAMA_31_8B, limits(8192, 256), 2) == 8192 * (3 * 4096 + 3 * 14336) * 2
    dense = Build.unquantized(LLAMA_31_8B)
    tables = 3 * 256 * 8 * 8192 // 16
    rest = tables + activations.WORKSPACE
    layer = 5 * 4096 * 2 + 2 * 128 * 4 + 3 * 14336 * 2  # the stream, rotations, gate|up and their product
    assert gpu_step_bytes(dense, limits(8192, 256)) == 8192 * layer + rest
    few, more = (gpu_step_bytes(dense, limits(512, seqs)) for seqs in (256, 512))
    assert (
        more - few
        == 256 * 128256 * (2 + 4) - (activations.COPIES * activations.SLICE - 256 * 128256 * 2) + tables
    )
    fp8, w4a16 = (dense._replace(weight_format=WeightFormat(name)) for name in ("w8a8-fp8", "w4a16"))
    assert gpu_step_bytes(fp8, limits(8192, 256)) == gpu_step_bytes(dense, limits(8192, 256)) - 8192 * (
        4096 + 3 * 14336  # codes of the input; act(gate) * up and its codes instead of three as wide as it
    )
    widened = 2 * 14336 * 4096 * 2 - 2048 * 14336 * 2  # instead of the product, which comes later
    assert gpu_step_bytes(w4a16, limits(2048, 256)) == gpu_step_bytes(dense, limits(2048, 256)) + widened
    narrow = dense._replace(kv_cache_dtype="fp8")
    assert gpu_step_bytes(narrow, limits(8192, 256)) == gpu_step_bytes(dense, limits(8192, 256))
    # 20 tokens a row of K and V as wide as the activations, at most 32,768, beside q, k, v and the context
    by_pages = activations.layer_bytes(narrow, 1024) - 1024 * (5 * 4096 * 2 + 1024)
    assert by_pages == 1024 * (80 * 128 * 2 + 20 * 4096)
    assert activations.layer_bytes(narrow, 2048) - 2048 * (5 * 4096 * 2 + 1024 + 80 * 128 * 2) == 128 << 20


def test_only_some_products_end_with_their_gates():
    """Those of many tokens with 8-bit inputs, where gate and up can lie in turns."""
    dense = Build.unquantized(LLAMA_31_8B)

    def of_a_token(build: Build, tokens: int) -> float:
        return activations.layer_bytes(build, tokens) / tokens

    int8 = dense._replace(weight_format=WeightFormat("w8a8-int8"))
    stream = 4096 * 9 + 1024
    assert of_a_token(int8, 4096) == stream + 14336 * (2 + 1)
    assert of_a_token(int8, 256) == stream + 14336 * (4 + 1)
    sizes = [activations.layer_bytes(int8, tokens) for tokens in range(200, 600)]
    assert sizes == sorted(sizes)  # the limit of a step's tokens holds for shorter ones too
    for odd in (
        int8._replace(config=dataclasses.replace(LLAMA_31_8B, mlp_bias=True)),
        int8._replace(config=dataclasses.replace(LLAMA_31_8B, intermediate_size=14336 - 32)),
        int8._replace(weight_format=WeightFormat("w8a8-fp8-static")),
    ):
        assert of_a_token(odd, 4096) == stream + odd.config.intermediate_size * (4 + 1)
    assert of_a_token(int8._replace(dtype="float32"), 4096) == 4096 * 17 + 1024 + 14336 * (8 + 1)


def test_graphs_are_planned_by_number_and_largest():
    build, limits = Build.unquantized(LLAMA_31_8B), StepLimits(8192, 256, 8192, 16)
    captured = shapes(limits)
    largest = captured[0].num_tokens
    assert activations.graph_bytes(build, limits) == (
        activations.layer_bytes(build, largest)
        + 256 * 4096 * 2
        + len(captured) * 32 * activations.GRAPH_LAYER
        + activations.WORKSPACE
    )
    short = activations.graph_bytes(build, limits._replace(max_num_batched_tokens=1024))
    assert short < activations.graph_bytes(build, limits)  # which have a peak of their own


def test_a_small_budget_makes_steps_shorter_and_never_below_what_must_run():
    dense = Build.unquantized(LLAMA_31_8B)

    def tokens(room: int, limits: StepLimits) -> int:
        return budget.shorten_steps(dense, limits, room).max_num_batched_tokens

    few = StepLimits(131072, 64, 8192, 64)
    assert tokens(100 * GIB, few) == 8192
    for room, fits, chosen in ((26, 4096, 4096), (20, 2048, 1024), (10, 1024, 1024)):  # 1024: as graphs
        at_most = room * GIB / activations.SHARE
        assert gpu_step_bytes(dense, few._replace(max_num_batched_tokens=fits)) <= at_most
        assert gpu_step_bytes(dense, few._replace(max_num_batched_tokens=2 * fits)) > at_most
        assert tokens(room * GIB, few) == chosen
    assert tokens(20 * GIB, few._replace(max_num_batched_tokens=2048)) == 2048  # nothing is to be shortened
    assert tokens(20 * GIB, few._replace(max_model_len=1500, chunked_prefill=False)) == 2048  # no graphs
    assert tokens(-GIB, few._replace(max_num_seqs=1, max_model_len=8192)) == 512
    assert tokens(0, few._replace(max_num_seqs=600)) == 4096  # below, 600 rows of logits are the peak
    assert tokens(0, few._replace(max_model_len=5000, chunked_prefill=False)) == 8192


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(192, 576), (1, 32), (13, 96), (1536, 128)])
@pytest.mark.parametrize(
    ("weight_format", "scheme"),
    [
        (WeightFormat("dense"), Dense()),
        (WeightFormat("w8a8-int8"), W8A8Int8()),
        (WeightFormat("w8a16-int8"), W8A16Int8()),
        (WeightFormat("w8a8-fp8"), W8A8Fp8()),
        (WeightFormat("w8a8-fp8-static"), W8A8Fp8Static()),
        (WeightFormat("w8a8-fp8-block"), W8A8Fp8Block()),
        (WeightFormat("w8a16-fp8"), W8A16Fp8()),
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
        (WeightFormat("w8a8-fp8-static"), W8A8Fp8Static()),
        (WeightFormat("w8a8-fp8-block"), W8A8Fp8Block()),
        (WeightFormat("w8a16-fp8"), W8A16Fp8()),
        (WeightFormat("w4a16", 32, True), W4A16(32, True)),
        (WeightFormat("w4a16", 64, False), W4A16(64, False)),
    ],
)
def test_a_cpu_holds_the_bytes_that_are_planned(weight_format, scheme, rows, columns, dtype):
    torch_dtype = getattr(torch, dtype)
    tensors = scheme.quantize(torch.randn(rows, columns), dtype=torch_dtype)
    linear = Linear([(scheme, tensors)], device=torch.device("cpu"), dtype=torch_dtype)
    assert footprint.cpu_linear_bytes(weight_format, rows, columns, dtype) == tensor_bytes(linear.prepared)


@pytest.mark.parametrize(("rows", "columns"), [(192, 576), (24, 64), (1536, 128), (300, 1152)])
@pytest.mark.parametrize("group_size", [32, 64])
def test_a_gpu_holds_the_bytes_that_are_planned(rows, columns, group_size):
    """The layouts are plain torch, so they can be made here."""
    codes = torch.zeros(rows, columns, dtype=torch.int8)
    nibbles, groups = torch.zeros(rows, columns // 2, dtype=torch.uint8), columns // group_size
    scale, zero = torch.ones(rows, groups, dtype=torch.bfloat16), torch.zeros(rows, groups, dtype=torch.uint8)
    scales, half_scales = torch.ones(rows), torch.ones(rows, dtype=torch.bfloat16)
    held = {
        WeightFormat("dense"): {"weight": codes.bfloat16()},
        WeightFormat("w8a8-int8"): {"weight": to_panels(codes), "scale": scales},
        WeightFormat("w8a8-fp8"): {"weight": to_panels(codes.view(torch.float8_e4m3fn)), "scale": scales},
        WeightFormat("w8a16-int8"): {"weight": to_fragments(codes), "scale": half_scales},
        WeightFormat("w4a16", group_size): pack_fragments(nibbles, scale, zero),
    }
    for weight_format, tensors in held.items():
        planned = footprint.gpu_linear_bytes(weight_format, rows, columns, "bfloat16")
        assert planned == tensor_bytes(tensors), weight_format
    plain = footprint.gpu_linear_bytes(WeightFormat("w4a16", group_size), rows, columns, "float32")
    assert plain == tensor_bytes([nibbles, scale.float(), zero])


def test_a_fused_product_is_planned_as_one():
    """300 rows of three linears are padded together, not each by itself."""
    config = dataclasses.replace(SMOLLM2_135M, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=50)
    planned = footprint.weight_bytes(config, WeightFormat("w4a16", 64), place="gpu")
    dense = footprint.weight_bytes(config)
    qkv = footprint.gpu_linear_bytes(WeightFormat("w4a16", 64), 250, 576, "bfloat16")
    assert qkv == 256 * (640 // 2 + 4 * 10)
    others = [(576, 150), (2 * 1536, 576), (576, 1536)]
    linears = sum(rows * columns * 2 for rows, columns in [(250, 576), *others])
    packed = qkv + sum(
        footprint.gpu_linear_bytes(WeightFormat("w4a16", 64), *shape, "bfloat16") for shape in others
    )
    assert planned == dense - linears + packed
