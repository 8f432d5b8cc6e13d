"""A tiny random Llama in every scheme, loaded by transformers, against the same model on our weights.

The reference is transformers' own dense Llama in which each linear holds what the scheme says that the file
means, and whose inputs are what the scheme says that the linear sees. In float32 nothing is left to blur.
"""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import all_modules
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.quant import W4A16, Scheme, W8A8Fp8, W8A8Fp8Block, W8A8Fp8Static, W8A8Int8, W8A16Fp8, W8A16Int8
from qinfer.testing import error_ratio, tiny_model

FLOAT8 = [W8A8Fp8(), W8A8Fp8Static(), W8A8Fp8Block(), W8A16Fp8()]
SCHEMES = [W8A8Int8(), W8A16Int8(), *FLOAT8, W4A16(64, True), W4A16(64, False), W4A16(128, False)]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
INPUTS_UP_TO = 4.0  # of a static scheme; some are larger and saturate
TOKEN_IDS = torch.randint(0, 384, (2, 16), generator=torch.Generator().manual_seed(1))


def quantized(source: Checkpoint, scheme: Scheme, out, dtype: torch.dtype) -> dict[str, Tensor]:
    """Writes the checkpoint; returns the dequantized weight of every linear."""
    writer = CheckpointWriter(source, out)
    modules, meant = all_modules(source.config), {}
    for module in modules:
        tensors = scheme.quantize(source.tensor(f"{module}.weight"), dtype=dtype)
        if isinstance(scheme, W8A8Fp8Static):
            tensors = scheme.with_input_range(tensors, INPUTS_UP_TO)
        meant[module] = scheme.dequantize(tensors)
        for suffix, tensor in tensors.items():
            writer.add(f"{module}.{suffix}", tensor)
    for name in source.names() - {f"{module}.weight" for module in modules}:
        writer.add(name, source.tensor(name))
    writer.finish(quantization_config(scheme, ignore=["lm_head"]))
    return meant


def seen_by_compressed_tensors(scheme: Scheme, x: Tensor) -> Tensor:
    """A linear's input as compressed-tensors simulates it, which differs from ours in two things that the
    file does not say: it computes in x's dtype, and an int8 token has scale absmax / 127.5 (ours / 127)."""
    absmax = x.abs().amax(-1, keepdim=True)
    if isinstance(scheme, W8A8Int8):
        scale = absmax / 127.5
        return (x / scale).clamp(-128, 127).round() * scale
    if isinstance(scheme, W8A8Fp8Block):
        absmax = x.unflatten(-1, (-1, 128)).abs().amax(-1).repeat_interleave(128, -1)
    if isinstance(scheme, W8A8Fp8Static):
        absmax = torch.tensor(INPUTS_UP_TO).to(x.dtype)
    if scheme in FLOAT8 and not isinstance(scheme, W8A16Fp8):
        scale = (absmax / 448).to(x.dtype)
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return scheme.fake_quantize(x)


def reference_logits(source_path, meant: dict[str, Tensor], scheme: Scheme, dtype: torch.dtype) -> Tensor:
    model = LlamaForCausalLM.from_pretrained(source_path, dtype=dtype)
    for module, weight in meant.items():
        linear = model.get_submodule(module)
        linear.weight.data = weight.to(dtype)
        linear.register_forward_pre_hook(lambda _, inputs: (seen_by_compressed_tensors(scheme, inputs[0]),))
    with torch.inference_mode():
        return model(TOKEN_IDS).logits


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_transformers_loads_it_whole_with_the_same_logits(scheme, tied, dtype, tmp_path):
    name = str(dtype).removeprefix("torch.")
    changes = SIZES | {"tie_word_embeddings": tied, "head_dim": 64}
    path = tiny_model("llama", tmp_path / "source", dtype=name, **changes)
    meant = quantized(open_checkpoint(path), scheme, tmp_path / "out", dtype)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=dtype, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        logits = model(TOKEN_IDS).logits
    assert error_ratio(logits, reference_logits(path, meant, scheme, dtype)) < 1e-5


def test_transformers_loads_mixed_precision_whole(tmp_path):
    """Symmetric: zero points in a mixed model are read by qinfer and vLLM, and by no newer transformers."""
    path = tiny_model("llama", tmp_path / "source", **SIZES, head_dim=64)
    source, base = open_checkpoint(path), W4A16(64, symmetric=True)
    raised = {m: W8A16Int8() for m in all_modules(source.config) if ".0.self_attn." in m or "1.mlp.down" in m}
    writer, meant = CheckpointWriter(source, tmp_path / "out"), {}
    for module in all_modules(source.config):
        scheme = raised.get(module, base)
        tensors = scheme.quantize(source.tensor(f"{module}.weight"), dtype=torch.float32)
        meant[module] = scheme.dequantize(tensors)
        for suffix, tensor in tensors.items():
            writer.add(f"{module}.{suffix}", tensor)
    for name in source.names() - {f"{module}.weight" for module in meant}:
        writer.add(name, source.tensor(name))
    writer.finish(quantization_config(base, ignore=["lm_head"], exceptions=raised))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        logits = model(TOKEN_IDS).logits
    assert error_ratio(logits, reference_logits(path, meant, base, torch.float32)) < 1e-5
