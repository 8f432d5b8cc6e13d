"""Bits are those of the file, budgets are kept, and what gains most per bit is raised first."""

from dataclasses import replace

import pytest
import torch

from qinfer.calibrate import pipeline
from qinfer.calibrate.mixing import average_bits, cure_of, next_step, ranked, within_budget
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.quant import W4A16, Dense, W8A8Int8, W8A16Fp8, W8A16Int8
from qinfer.testing import tiny_config, tiny_model
from qinfer.tokenizer import Tokenizer

CONFIG = ModelConfig.from_dict(tiny_config("llama"))
FOUR = W4A16(32, False)
UNITS = [(i, g) for i in (0, 1) for g in ("qkv", "o", "gate_up", "down")]
COSTS = {unit: 0.01 * (n + 1) for n, unit in enumerate(UNITS)}


def test_a_mixed_checkpoint_has_the_bits_that_were_counted(tmp_path):
    source = tiny_model("qwen2", tmp_path / "source", dtype="bfloat16")
    checkpoint = open_checkpoint(source)
    mix = {(0, "qkv"): W8A16Int8(), (1, "down"): W8A16Int8(), (1, "o"): Dense()}
    job = prepare_job(
        checkpoint, Tokenizer.load(source), tmp_path / "out", Settings(scheme="w4a16", method="rtn")
    )
    report = pipeline.run(replace(job, mix=mix), progress=False)
    assert report.mix == {"layer 0 qkv": "w8a16-int8", "layer 1 down": "w8a16-int8", "layer 1 o": "dense"}
    result = open_checkpoint(tmp_path / "out")
    raw = result.raw_config["quantization_config"]
    assert raw["format"] == "mixed-precision"
    assert {g["format"] for g in raw["config_groups"].values()} == {"pack-quantized"}
    assert "dequantize" not in raw  # readers of that key unpack all groups by the first one's rule
    bits = weights = 0
    for module in all_modules(result.config):
        bits += sum(8 * tensor.nbytes for tensor in result.module(module).values())
        weights += checkpoint.tensor(f"{module}.weight").numel()
    assert average_bits(result.config, job.recipe.scheme, mix, 2) == pytest.approx(bits / weights, rel=1e-9)
    labels = {module: result.scheme(module).label for module in all_modules(result.config)}
    assert labels["model.layers.0.self_attn.k_proj"] == "w8a16-int8"
    assert labels["model.layers.1.self_attn.k_proj"] == "w4a16 g64 asym"
    assert labels["model.layers.1.self_attn.o_proj"] == "dense"


def test_the_budget_is_spent_on_what_gains_most_per_bit_and_never_exceeded():
    order = ranked(CONFIG, COSTS, FOUR, 2)
    least, most = (average_bits(CONFIG, FOUR, mix, 2) for mix in ({}, dict.fromkeys(UNITS, W8A16Int8())))
    assert within_budget(CONFIG, order, FOUR, least, 2) == {}
    assert set(within_budget(CONFIG, order, FOUR, most, 2)) == set(UNITS)
    for budget in (least + 0.5, least + 1.5):
        mix = within_budget(CONFIG, order, FOUR, budget, 2)
        assert average_bits(CONFIG, FOUR, mix, 2) <= budget
        for unit in set(UNITS) - set(mix):
            assert average_bits(CONFIG, FOUR, {**mix, unit: W8A16Int8()}, 2) > budget
    allowed = rf"is not between {least:.2f}, which w4a16 g32 asym itself takes, and {most:.2f} with every"
    for budget in (4.0, 99.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=f"a budget of {budget:g} bits per weight {allowed}"):
            within_budget(CONFIG, order, FOUR, budget, 2)


def test_small_units_come_before_large_ones_of_equal_damage():
    order = ranked(CONFIG, dict.fromkeys(UNITS, 0.1), FOUR, 2)
    assert {group for _, group in order[:2]} == {"o"}
    assert {group for _, group in order[-2:]} == {"gate_up"}


def test_steps_raise_a_tenth_until_nothing_is_left():
    order = list(COSTS)
    mix = {}
    for raised in range(1, 9):
        mix = next_step(order, mix, FOUR)
        assert list(mix) == order[:raised]
    assert next_step(order, mix, FOUR) == mix


def test_cures():
    assert cure_of(FOUR) == cure_of(W8A8Int8()) == W8A16Int8()
    assert cure_of(W8A16Int8()) == cure_of(W8A16Fp8()) == Dense()


def test_8_bits_of_mixed_weights_are_exactly_those_of_the_scheme_alone(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    checkpoint = open_checkpoint(source)
    job = prepare_job(
        checkpoint, Tokenizer.load(source), tmp_path / "out", Settings(scheme="w4a16", method="rtn")
    )
    pipeline.run(replace(job, mix={(1, "o"): W8A16Int8()}), progress=False)
    got = open_checkpoint(tmp_path / "out").module("model.layers.1.self_attn.o_proj")
    weight = checkpoint.tensor("model.layers.1.self_attn.o_proj.weight")
    expected = W8A16Int8().quantize(weight, dtype=torch.float32)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
