"""Moving scales changes no function, for every family; the mapping of grouped heads and fused rows."""

import pytest
import torch

from qinfer.calibrate.block import dense_layer
from qinfer.calibrate.mappings import apply_scale, scale_mappings
from qinfer.checkpoint.names import layer_tensors, module_has_bias
from qinfer.config import ModelConfig
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import Decoder
from qinfer.testing import FAMILIES, error_ratio, tiny_config

CPU = torch.device("cpu")


def _block(config, seed=0, bias=0.2):
    generator = torch.Generator().manual_seed(seed)
    block = {}
    for name, shape in layer_tensors(config, 0).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = (1 - config.norm_offset) + 0.2 * noise
        elif name.endswith(".bias"):
            noise = bias + 0.2 * noise
        else:
            noise = noise * shape[-1] ** -0.5
        block[name.removeprefix("model.layers.0.")] = noise
    return block


def _outputs(config, block):
    """Two sequences of 12 tokens through the layer, and what each group's linears saw."""
    layer = dense_layer(config, 0, block, device=CPU, dtype=torch.float32)
    stem = Decoder(config, torch.zeros(1, config.hidden_size), [], torch.ones(config.hidden_size), None)
    torch.manual_seed(1)
    hidden = torch.randn(24, config.hidden_size)
    seen = {}
    rope = stem.rope(torch.arange(12).repeat(2))
    out = layer(hidden, rope, CausalAttention(2), lambda group, x: seen.setdefault(group, x.clone()))
    return out, seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_scales_leave_the_function_unchanged(family, storage):
    config = ModelConfig.from_dict(tiny_config(family))
    block = _block(config)
    if storage is torch.bfloat16:  # a checkpoint's norms are exact in its own dtype
        block = {n: t.to(storage).float() if n.endswith("norm.weight") else t for n, t in block.items()}
    before, seen_before = _outputs(config, block)
    for i, mapping in enumerate(scale_mappings(config)):
        width = seen_before[mapping.group].shape[1]
        width = width // mapping.heads.repeats if mapping.heads else width
        scale = torch.exp(torch.randn(width, generator=torch.Generator().manual_seed(i)))
        columns = apply_scale(block, mapping, scale, norm_offset=config.norm_offset, dtype=storage)
        after, seen = _outputs(config, block)
        assert error_ratio(after, before) < 1e-5, mapping.name
        assert error_ratio(seen[mapping.group] * columns, seen_before[mapping.group]) < 1e-5
        assert error_ratio(seen[mapping.group], seen_before[mapping.group]) > 0.1  # something did move
    for name, tensor in block.items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, tensor.to(storage).float()), name


def test_q22_bias_of_ten_is_added_once_after_smoothing():
    config = ModelConfig.from_dict(tiny_config("qwen2"))
    block = _block(config, bias=10.0)
    assert module_has_bias(config, "self_attn.v_proj")
    before, _ = _outputs(config, block)
    untouched = {n: t.clone() for n, t in block.items() if n.endswith(("q_proj.bias", "k_proj.bias"))}
    for mapping in scale_mappings(config):
        width = {"norm->qkv": 64, "v->o": 32, "norm->gate_up": 64, "up->down": 128}[mapping.name]
        apply_scale(block, mapping, torch.rand(width) * 4 + 0.1, norm_offset=0.0, dtype=torch.float32)
    after, _ = _outputs(config, block)
    assert error_ratio(after, before) < 1e-5
    assert all(torch.equal(block[name], tensor) for name, tensor in untouched.items())


def test_fused_rows_of_phi3_are_those_of_v_and_up():
    config = ModelConfig.from_dict(tiny_config("phi3"))
    mappings = {m.name: m for m in scale_mappings(config)}
    block = _block(config)
    before = {name: tensor.clone() for name, tensor in block.items()}
    for name, width in (("v->o", 32), ("up->down", 128)):
        apply_scale(block, mappings[name], torch.full((width,), 2.0), norm_offset=0.0, dtype=torch.float32)
    qkv, gate_up = block["self_attn.qkv_proj.weight"], block["mlp.gate_up_proj.weight"]
    assert torch.equal(qkv[:96], before["self_attn.qkv_proj.weight"][:96])
    assert torch.equal(qkv[96:], before["self_attn.qkv_proj.weight"][96:] / 2)
    assert torch.equal(gate_up[:128], before["mlp.gate_up_proj.weight"][:128])
    assert torch.equal(gate_up[128:], before["mlp.gate_up_proj.weight"][128:] / 2)


def test_c11_grouped_heads_share_one_scale():
    config = ModelConfig.from_dict(
        tiny_config("smollm2", hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    )
    mapping = next(m for m in scale_mappings(config) if m.name == "v->o")
    per_kv = torch.arange(32.0)
    columns = mapping.expand(per_kv).view(6, 16)
    for head in range(6):
        assert torch.equal(columns[head], per_kv.view(2, 16)[head // 3])
    assert torch.equal(mapping.reduce(mapping.expand(per_kv)), per_kv)
    spread = torch.zeros(6, 16)
    spread[0, 5], spread[1, 5], spread[2, 5] = 3.0, 6.0, 0.0
    assert mapping.reduce(spread.flatten()).view(2, 16)[0, 5] == 3.0


def test_gain_that_would_round_to_zero_is_left_alone():
    config = ModelConfig.from_dict(tiny_config("gemma2"))
    block = _block(config)
    name = "input_layernorm.weight"
    block[name][:3] = torch.tensor([0.0, -1.0, 0.5])  # gains 1, 0, 1.5
    scale = torch.ones(64)
    scale[:3] = 1e4  # (1 + w) / 1e4 - 1 is -1 in bfloat16: a dead channel
    mapping = scale_mappings(config)[0]
    block = {n: t.to(torch.bfloat16).float() if n.endswith("norm.weight") else t for n, t in block.items()}
    before, _ = _outputs(config, block)
    columns = apply_scale(block, mapping, scale, norm_offset=1.0, dtype=torch.bfloat16)
    assert columns[:3].tolist() == [1.0, 1.0, 1.0]
    assert block[name][:3].tolist() == [0.0, -1.0, 0.5]
    after, _ = _outputs(config, block)
    assert error_ratio(after, before) < 1e-5
