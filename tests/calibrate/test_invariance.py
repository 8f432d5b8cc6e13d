"""What the searches move through whole models, without any rounding, leaves the logits as they were."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.calibrate.block import dense_layer, embed_batches, load_block, observe
from qinfer.calibrate.transform import Workbench, transform
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import layer_groups
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import W4A16, W8A8Int8
from qinfer.testing import FAMILIES, tiny_model

CPU = torch.device("cpu")
SEQUENCES = [tuple(range(i, i + 24)) for i in range(8)]


def _shake(folder):
    """Gains and biases far from one and zero, and channels of the stream that make scaling worth while."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor += 0.3 * torch.randn_like(tensor)
        elif name.endswith(".bias"):
            tensor += torch.randn_like(tensor)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[[5, 40]] *= 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _logits(model):
    ids = torch.tensor(SEQUENCES)
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    return model.logits(model.forward(ids.flatten(), positions, CausalAttention(len(ids))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("method", "scheme"), [("smoothquant", W8A8Int8()), ("awq", W4A16(32, False))])
def test_moved_scales_leave_the_logits_unchanged(family, method, scheme, tmp_path):
    path = tiny_model(family, tmp_path, hidden_size=64)
    _shake(path)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    schemes = {group.name: scheme for group in layer_groups(config)}
    moved = 0
    with torch.inference_mode():
        model = load_decoder(checkpoint, dtype=torch.float32)
        before = _logits(model)
        batches = embed_batches(checkpoint, SEQUENCES, search_tokens=96, device=CPU, dtype=torch.float32)
        for index in range(config.num_layers):
            block = load_block(checkpoint, index)
            layer = dense_layer(config, index, block, device=CPU, dtype=torch.float32)
            kept = [batch for batch in batches if batch.keep]
            tap = observe(layer, batches)
            bench = Workbench(config, index, layer, kept, tap, schemes, torch.float32, CPU, torch.float32)
            choices = transform(bench, block, method)
            moved += sum(bool((choice.scale != 1).any()) for choice in choices)
            model.layers[index] = dense_layer(config, index, block, device=CPU, dtype=torch.float32)
            for batch in batches:
                batch.hidden = layer(batch.hidden, batch.rope, batch.attend)
        after = _logits(model)
    assert moved >= config.num_layers  # scales other than one were really found
    assert (after - before).abs().max() < 1e-4 * max(1.0, float(before.abs().max()))
