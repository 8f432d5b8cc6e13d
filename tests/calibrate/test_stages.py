"""A walk through a layer gives what the layer gives, for every family; what is replaced counts at once."""

import pytest
import torch

from qinfer.calibrate.block import dense_layer, embed_batches, load_block, observe
from qinfer.calibrate.stages import get_linear, set_linear, walk
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import layer_groups
from qinfer.model.linear import Linear
from qinfer.quant import Dense
from qinfer.testing import FAMILIES, error_ratio, tiny_model

CPU = torch.device("cpu")
SEQUENCES = [tuple(range(1, 20)), tuple(range(30, 49)), tuple(range(60, 71))]


def _start(path, index=0):
    checkpoint = open_checkpoint(path)
    block = load_block(checkpoint, index)
    layer = dense_layer(checkpoint.config, index, block, device=CPU, dtype=torch.float32)
    batches = embed_batches(checkpoint, SEQUENCES, search_tokens=10**6, device=CPU, dtype=torch.float32)
    return checkpoint.config, block, layer, batches


@pytest.mark.parametrize("family", FAMILIES)
def test_a_walk_is_the_layer(family, tmp_path):
    _, _, layer, batches = _start(tiny_model(family, tmp_path / "source"), index=1)
    tap = observe(layer, batches)
    expected = [layer(batch.hidden, batch.rope, batch.attend) for batch in batches]
    stops = []
    for group, inputs in walk(layer, batches, [batch.attend for batch in batches]):
        stops.append(group)
        assert all(error_ratio(x, y) < 1e-6 for x, y in zip(inputs, tap.inputs[group], strict=True))
    assert stops == ["qkv", "o", "gate_up", "down"]
    assert all(error_ratio(b.hidden, out) < 1e-6 for b, out in zip(batches, expected, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_linear_replaced_at_its_stop_is_met_by_all_that_follow(family, tmp_path):
    """Doubled weights one group at a time, against a layer that had them from the start."""
    config, block, layer, batches = _start(tiny_model(family, tmp_path / "source"))
    doubled = {name: t * 2 if name.endswith("_proj.weight") else t for name, t in block.items()}
    whole = dense_layer(config, 0, doubled, device=CPU, dtype=torch.float32)
    tap = observe(whole, batches)
    expected = [whole(batch.hidden, batch.rope, batch.attend) for batch in batches]
    modules = {group.name: group.modules for group in layer_groups(config)}
    for group, inputs in walk(layer, batches, [batch.attend for batch in batches]):
        assert all(error_ratio(x, y) < 1e-6 for x, y in zip(inputs, tap.inputs[group], strict=True))
        shards = [(Dense(), {"weight": doubled[f"{module}.weight"]}) for module in modules[group]]
        bias = get_linear(layer, group).bias
        set_linear(layer, group, Linear(shards, bias, device=CPU, dtype=torch.float32))
    assert all(error_ratio(b.hidden, out) < 1e-6 for b, out in zip(batches, expected, strict=True))
