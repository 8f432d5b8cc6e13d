"""What a unit costs, against a model that was changed by hand; and the estimate against the measurement."""

import pytest
import torch

from qinfer.calibrate.block import load_block
from qinfer.calibrate.grid import Grid
from qinfer.calibrate.ranges import full_ranges
from qinfer.calibrate.sensitivity import sensitivities, shorten
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import layer_groups
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.model.linear import Linear
from qinfer.quant import W4A16, Dense, W8A8Int8, W8A16Int8
from qinfer.testing import tiny_model

CPU = torch.device("cpu")
SEQUENCES = [list(range(i, i + 40)) for i in range(1, 60, 7)]
SETTINGS = {"storage": torch.float32, "dtype": torch.float32, "progress": False}


def _by_hand(path, index, group_name, bits_of):
    """KL of the whole model when the group's weights are rounded by an independent rule."""
    checkpoint = open_checkpoint(path)
    ids = torch.tensor(SEQUENCES)
    positions = torch.arange(40).repeat(len(ids))
    logits = []
    for changed in (False, True):
        model = load_decoder(checkpoint, dtype=torch.float32)
        if changed:
            group = next(g for g in layer_groups(checkpoint.config) if g.name == group_name)
            block = load_block(checkpoint, index)
            shards = [(Dense(), {"weight": bits_of(block[f"{m}.weight"])}) for m in group.modules]
            old = model.layers[index].attention if group_name in ("qkv", "o") else model.layers[index].mlp
            bias = getattr(old, group_name).bias
            setattr(old, group_name, Linear(shards, bias, device=CPU, dtype=torch.float32))
        with torch.inference_mode():
            hidden = model.forward(ids.flatten(), positions, CausalAttention(len(ids)))
            logits.append(model.logits(hidden).double().log_softmax(-1))
    p, q = logits
    return float((p.exp() * (p - q)).sum(-1).mean())


def _eight_bits(weight):
    grid = Grid.of(W8A16Int8(), full_ranges(weight, weight.shape[1], symmetric=True), torch.float32)
    return grid.nearest(weight)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_measured_is_the_kl_of_the_model_with_that_unit_changed(family, tmp_path, monkeypatch):
    from qinfer.calibrate import sensitivity

    # ranges found by a search would not be those of the rule above
    monkeypatch.setattr(sensitivity, "HowToRound", lambda s, _, g, d: _absmax(s, g, d))
    source = tiny_model(family, tmp_path / "source")
    costs = sensitivities(open_checkpoint(source), SEQUENCES, W8A16Int8(), measured=True, **SETTINGS)
    assert set(costs) == {(i, g) for i in (0, 1) for g in ("qkv", "o", "gate_up", "down")}
    for unit in [(0, "qkv"), (1, "gate_up"), (1, "down")]:
        assert costs[unit] == pytest.approx(_by_hand(source, *unit, _eight_bits), rel=0.02)


def _absmax(scheme, by_gptq, storage):
    from qinfer.calibrate.groups import HowToRound

    return HowToRound(scheme, "absmax", by_gptq, storage)


@pytest.mark.parametrize("scheme", [W4A16(32, False), W8A8Int8()], ids=lambda s: s.label)
def test_the_estimate_ranks_units_as_the_measurement_does(scheme, tmp_path):
    source = tiny_model("smollm2", tmp_path / "source")
    measured = sensitivities(open_checkpoint(source), SEQUENCES, scheme, measured=True, **SETTINGS)
    estimated = sensitivities(open_checkpoint(source), SEQUENCES, scheme, measured=False, **SETTINGS)
    assert measured.keys() == estimated.keys()
    units = sorted(measured)
    logs = torch.tensor([[measured[u] for u in units], [estimated[u] for u in units]]).log()
    assert torch.corrcoef(logs)[0, 1] > 0.8
    ratios = (logs[1] - logs[0]).exp()
    assert ((ratios > 0.2) & (ratios < 5)).all(), ratios


def test_sequences_are_cut_to_one_length_that_keeps_most():
    lengths = [300, 300, 40, 200]
    cut = shorten([list(range(n)) for n in lengths], 600)
    assert [len(s) for s in cut] == [200, 200, 200]  # 3 x 200 is more than 2 x 256 and 4 x 40
    assert [len(s) for s in shorten([[1, 2, 3]], 1024)] == [3]
