"""Calibrating mixtures: experts are quantized, routers never; experts that saw no token are named (C12)."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qinfer.calibrate import pipeline
from qinfer.calibrate.block import dense_layer, embed_batches, load_block
from qinfer.calibrate.mappings import apply_scale, scale_mappings
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.calibrate.stages import walk
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules, layer_groups, router
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import Dense
from qinfer.testing import MIXTURES, error_ratio, tiny_model
from qinfer.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)]


def quantized(path: Path, out: Path, **arguments: Any) -> Any:
    arguments = {"calibration": TEXT, "max_seq_len": 32, "num_samples": 6, **arguments}
    job = prepare_job(open_checkpoint(path), Tokenizer.load(path), out, Settings(**arguments))
    return pipeline.run(replace(job, dtype=torch.float32), progress=False)


def logits(path: Path) -> Tensor:
    decoder = load_decoder(open_checkpoint(path), dtype=torch.float32)
    ids = torch.arange(24) * 7 % 256
    with torch.inference_mode():
        return decoder.logits(decoder.forward(ids, torch.arange(24), CausalAttention(1)))


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(
    ("scheme", "method", "bound"),
    [
        ("w8a8-int8", "smoothquant", 0.04),
        ("w8a8-fp8-static", None, 0.15),
        ("w4a16", "awq", 0.4),
        ("w4a16", "gptq", 0.4),
        ("w8a16-int8", "rtn", 0.025),
    ],
)
def test_experts_are_quantized_and_routers_are_not(
    family: str, scheme: str, method: str | None, bound: float, tmp_path: Path
) -> None:
    # all four experts chosen: a choice that flips would change more than any rounding of weights
    source = tiny_model(family, tmp_path / "source", num_experts_per_tok=4)
    text = {} if method != "rtn" else {"calibration": None}
    report = quantized(source, tmp_path / "out", scheme=scheme, method=method, **text)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert {after.scheme(module).name for module in all_modules(after.config)} == {scheme}
    for i in range(2):
        name = f"model.layers.{i}.{router(after.config)}"
        assert after.scheme(name) == Dense()
        assert torch.equal(after.tensor(f"{name}.weight"), before.tensor(f"{name}.weight"))
    assert error_ratio(logits(tmp_path / "out"), logits(source)) < bound
    if method != "rtn":
        groups = {group.name for group in layer_groups(after.config)}
        assert all(set(layer.output_errors) == groups for layer in report.layers)


@pytest.mark.parametrize("family", MIXTURES)
def test_walk_is_the_layer_in_slow_motion(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model(family, tmp_path))
    layer = dense_layer(checkpoint.config, 0, load_block(checkpoint, 0), device=CPU, dtype=torch.float32)
    sequences = [[i * j % 256 for i in range(12)] for j in (3, 5)]
    (batch,) = embed_batches(checkpoint, sequences, search_tokens=64, device=CPU, dtype=torch.float32)
    expected = layer(batch.hidden, batch.rope, batch.attend)
    seen = {group: [x.shape for x in inputs] for group, inputs in walk(layer, [batch], [batch.attend])}
    torch.testing.assert_close(batch.hidden, expected, rtol=1e-5, atol=1e-6)
    assert list(seen) == [group.name for group in layer_groups(checkpoint.config)]
    assert seen["gate_up.3"] == [(24, 64)]
    assert seen["down.3"] == [(24, checkpoint.config.intermediate_size)]


@pytest.mark.parametrize("family", MIXTURES)
def test_scales_that_move_leave_the_layers_function_alone(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model(family, tmp_path))
    config, block = checkpoint.config, load_block(checkpoint, 1)
    (batch,) = embed_batches(checkpoint, [[*range(20)]], search_tokens=64, device=CPU, dtype=torch.float32)
    expected = dense_layer(config, 1, block, device=CPU, dtype=torch.float32)(
        batch.hidden, batch.rope, batch.attend
    )
    mappings = scale_mappings(config)
    assert [m.name for m in mappings] == ["norm->qkv", "v->o", *(f"up->down.{i}" for i in range(4))]
    for mapping in mappings:
        width = block[f"{mapping.source}.weight"].shape[0]
        scale = torch.rand(width) * 3 + 0.2
        apply_scale(block, mapping, scale, norm_offset=0.0, dtype=torch.float32)
    moved = dense_layer(config, 1, block, device=CPU, dtype=torch.float32)
    out = moved(batch.hidden, batch.rope, batch.attend)
    assert error_ratio(out, expected) < 1e-5


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_c12_experts_that_saw_no_token(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tiny_model("qwen3_moe", tmp_path / "source", num_experts=16, num_experts_per_tok=1)
    with caplog.at_level(logging.WARNING):
        report = quantized(
            source,
            tmp_path / "out",
            scheme="w4a16",
            method=method,
            **{"calibration": ["8 tokens"], "num_samples": 1, "max_seq_len": 8},
        )
    said = [record.getMessage() for record in caplog.records if "router chose" in record.getMessage()]
    assert [text.partition(":")[0] for text in said] == ["layer 0", "layer 1"]
    assert " of 16 experts for none of 8 calibration tokens" in said[0]
    starved = {group for group, note in report.layers[0].notes.items() if "no calibration token" in note}
    assert 16 <= len(starved) <= 30  # eight tokens reach eight experts at most, of two groups each
    result = open_checkpoint(tmp_path / "out")
    schemes = {result.scheme(module) for module in all_modules(result.config)}
    assert len(schemes) == 1
    for module in all_modules(result.config):
        scale = result.module(module)["weight_scale"]
        assert bool((scale > 0).all() and scale.isfinite().all()), module
        meant = next(iter(schemes)).dequantize(result.module(module))
        if ".experts." in module and module.endswith(("gate_proj", "up_proj")) and method == "gptq":
            assert error_ratio(meant, open_checkpoint(source).tensor(f"{module}.weight")) < 0.15
