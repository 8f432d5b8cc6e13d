"""HF/DeepSeek fp8 and fbgemm_fp8: what transformers quantizes is read here, and what it reads is the same.

transformers' own quantizing step (`Fp8Quantize`) writes the weights, and its loader, which dequantizes on a
CPU, is the reference. What fbgemm's own packer wrote is in test_dialects.py.
"""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import Dense, Scheme, W8A8Fp8, W8A8Fp8Block, W8A8Fp8Static
from qinfer.testing import error_ratio, tiny_model

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "head_dim": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "fmt": "e4m3",
}


def edit(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def quantized_by_transformers(folder: Path, config: dict[str, Any], **sizes: Any) -> Path:
    tiny_model("llama", folder, dtype="bfloat16", **{**SIZES, **sizes})
    settings = SimpleNamespace(
        weight_block_size=config["weight_block_size"], scale_fmt=config.get("scale_fmt")
    )
    step = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors = load_file(folder / "model.safetensors")
    for module in all_modules(open_checkpoint(folder).config):
        tensors |= step.convert({f"{module}.weight": tensors[f"{module}.weight"]})
    edit(folder, config, tensors)
    return folder


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {
        module: checkpoint.scheme(module).dequantize(checkpoint.module(module))
        for module in all_modules(checkpoint.config)
    }


def logits(checkpoint: Checkpoint) -> Tensor:
    token_ids = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))
    decoder = load_decoder(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return decoder.logits(decoder.forward(token_ids, torch.arange(24), CausalAttention(1)))


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_blocks_as_transformers_writes_and_reads_them(scale_fmt: str, tmp_path: Path) -> None:
    config = {**BLOCK, "modules_to_not_convert": ["lm_head"], "scale_fmt": scale_fmt}
    checkpoint = open_checkpoint(quantized_by_transformers(tmp_path, config))
    assert {checkpoint.scheme(module) for module in all_modules(checkpoint.config)} == {W8A8Fp8Block()}
    stored = checkpoint.header("model.layers.0.mlp.up_proj.weight_scale_inv")
    assert stored == ((2, 1), "F8_E8M0" if scale_fmt == "ue8m0" else "F32")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for module, weight in weights(checkpoint).items():
        assert torch.equal(weight, reference[f"{module}.weight"].float()), module


def test_exponents_in_plain_bytes(tmp_path: Path) -> None:
    folder = quantized_by_transformers(tmp_path, {**BLOCK, "scale_fmt": "ue8m0"})
    expected = weights(open_checkpoint(folder))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("_scale_inv"):
            tensors[name] = tensors[name].view(torch.uint8)
    edit(folder, {**BLOCK, "scale_fmt": "ue8m0"}, tensors)
    assert all(torch.equal(weight, expected[m]) for m, weight in weights(open_checkpoint(folder)).items())


def test_edge_blocks_cover_what_is_there(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path, **{**SIZES, "intermediate_size": 192})
    tensors = load_file(tmp_path / "model.safetensors")
    expected: dict[str, Tensor] = {}
    for module in all_modules(open_checkpoint(tmp_path).config):
        weight = tensors[f"{module}.weight"]
        codes, scale = (
            torch.empty(weight.shape, dtype=torch.float8_e4m3fn),
            torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)),
        )
        expected[module] = torch.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale[i, j] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                expected[module][part] = codes[part].float() * scale[i, j]
        tensors |= {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}
    edit(tmp_path, BLOCK, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.header("model.layers.0.mlp.up_proj.weight_scale_inv")[0] == (2, 1)
    for module, weight in weights(checkpoint).items():
        assert torch.equal(weight, expected[module]), module
    assert logits(checkpoint).isfinite().all()


def by_hand(folder: Path, config: dict[str, Any], scale: str, kind: str, **more: float) -> dict[str, Tensor]:
    """A float8 model with one scale per row or per weight; returns what its weights mean."""
    tiny_model("llama", folder, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    meant = {}
    for module in all_modules(open_checkpoint(folder).config):
        weight = tensors[f"{module}.weight"]
        absmax = weight.abs().amax() if kind == "tensor" else weight.abs().amax(1, keepdim=True)
        codes = (weight / (absmax / 448)).to(torch.float8_e4m3fn)
        meant[module] = codes.float() * (absmax / 448)
        tensors |= {f"{module}.weight": codes, f"{module}.{scale}": absmax / 448}
        tensors |= {f"{module}.{name}": torch.tensor(value) for name, value in more.items()}
    edit(folder, config, tensors)
    return meant


PER_TENSOR = {**BLOCK, "weight_block_size": None}
STATIC = {**PER_TENSOR, "activation_scheme": "static"}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize(
    ("config", "scale", "kind", "more", "scheme"),
    [
        (PER_TENSOR, "weight_scale_inv", "tensor", {}, W8A8Fp8()),
        (PER_TENSOR, "weight_scale", "tensor", {}, W8A8Fp8()),
        (PER_TENSOR, "weight_scale", "row", {}, W8A8Fp8()),
        (STATIC, "weight_scale_inv", "tensor", {"activation_scale": 0.02}, W8A8Fp8Static()),
        (STATIC, "weight_scale", "tensor", {"input_scale": 0.02}, W8A8Fp8Static()),
        (STATIC, "weight_scale", "row", {"input_scale": 0.02}, Dense()),
        (FBGEMM, "weight_scale", "row", {}, W8A8Fp8()),
        (FBGEMM, "weight_scale", "row", {"input_scale_ub": 1200.0}, W8A8Fp8()),
    ],
    ids=lambda value: str(value)[:40],
)
def test_scales_per_tensor_and_row(
    config: dict[str, Any], scale: str, kind: str, more: dict[str, float], scheme: Scheme, tmp_path: Path
) -> None:
    meant = by_hand(tmp_path, config, scale, kind, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the one that runs dense
        checkpoint = open_checkpoint(tmp_path)
    assert {checkpoint.scheme(module) for module in meant} == {scheme}
    for module, weight in weights(checkpoint).items():
        assert torch.equal(weight, meant[module]), module
    if "input_scale" in more and scheme != Dense():
        assert checkpoint.module(next(iter(meant)))["input_scale"].tolist() == [pytest.approx(0.02)]


def test_q12_each_of_q_k_v_keeps_its_scale(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    by_hand(folder, PER_TENSOR, "weight_scale", "tensor")
    tensors = load_file(folder / "model.safetensors")
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.k_proj.weight_scale"] *= 1e-6
    edit(folder, PER_TENSOR, tensors)
    checkpoint = open_checkpoint(folder)
    scheme = checkpoint.scheme("model.layers.0.self_attn.q_proj")
    shards = [checkpoint.module(f"model.layers.0.self_attn.{m}_proj") for m in "qkv"]
    fused = scheme.dequantize(scheme.fuse(shards))
    assert torch.equal(fused, torch.cat([scheme.dequantize(shard) for shard in shards]))
    assert 0 < fused[128:256].abs().max() < 1e-5


def test_q18_static_without_its_scales_is_refused(tmp_path: Path) -> None:
    by_hand(tmp_path, STATIC, "weight_scale", "tensor")
    with pytest.raises(CheckpointError, match=r"missing: .*q_proj.activation_scale"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_q16_other_float8_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    by_hand(tmp_path, PER_TENSOR, "weight_scale", "tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = tensors[name].view(torch.uint8).view(dtype)
    edit(tmp_path, PER_TENSOR, tensors)
    with pytest.raises(UnsupportedModelError, match=rf"{name} is F8_.*, which is not supported"):
        open_checkpoint(tmp_path)


def test_logits_of_blocks_are_near_those_of_the_dense_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantized_by_transformers(tmp_path / "fp8", BLOCK))
    tiny_model("llama", tmp_path / "dense", dtype="bfloat16", **SIZES)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for module, weight in weights(checkpoint).items():
        dense[f"{module}.weight"] = weight
    save_file(dense, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    token_ids = torch.randint(0, 384, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(token_ids).logits[0]
    assert 0.005 < error_ratio(logits(checkpoint), expected) < 0.1  # activations are rounded to float8
