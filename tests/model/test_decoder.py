"""Loading accounts for every parameter; layers hand out their inputs; fusing changes nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import layer_groups, layer_modules, layer_prefix
from qinfer.errors import CheckpointError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.model.layer import Layer, load_layer
from qinfer.quant import scheme_by_name
from qinfer.testing import error_ratio, tiny_model

CPU = torch.device("cpu")
WITH_ALL_NORMS = ("gemma3", {"attention_bias": True, "tie_word_embeddings": False})
WITH_ALL_BIASES = ("llama3", {"attention_bias": True, "mlp_bias": True})


def rewrite(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("family", "changes"), [WITH_ALL_NORMS, WITH_ALL_BIASES, ("phi3", {})])
def test_each_missing_parameter_is_a_named_error(family: str, changes: dict, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path, **changes)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        rewrite(path, {other: t for other, t in tensors.items() if other != name})
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load_decoder(open_checkpoint(path))


@pytest.mark.parametrize(("family", "changes"), [WITH_ALL_NORMS, WITH_ALL_BIASES])
def test_each_parameter_holding_nan_is_a_named_error(family: str, changes: dict, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path, **changes)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        spoilt = tensor.clone()
        spoilt.view(-1)[-1] = torch.nan
        rewrite(path, {**tensors, name: spoilt})
        with pytest.raises(CheckpointError, match=f"{name} holds NaN".replace(".", r"\.")):
            load_decoder(open_checkpoint(path))


def test_each_misshapen_parameter_is_a_named_error(tmp_path: Path) -> None:
    path = tiny_model("llama3", tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        rewrite(path, {**tensors, name: tensor[:1].clone()})  # would broadcast
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load_decoder(open_checkpoint(path))


def test_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    decoder = load_decoder(open_checkpoint(tiny_model("smollm2", tmp_path)))
    assert decoder.head.prepared["weight"].data_ptr() == decoder.embedding.data_ptr()


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_scaled_embedding_is_bit_equal_to_transformers_in_bfloat16(family: str, tmp_path: Path) -> None:
    """The root of 96 is no bfloat16, and the model was trained with the rounded one."""
    path = tiny_model(family, tmp_path, dtype="bfloat16", hidden_size=96)
    decoder = load_decoder(open_checkpoint(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    token_ids = torch.arange(384)
    expected = model.get_input_embeddings()(token_ids)
    if family == "granite":
        expected = expected * 12.0
    assert decoder.dtype == torch.bfloat16
    assert torch.equal(decoder.embed(token_ids), expected)


def test_dtype_may_differ_from_the_file(tmp_path: Path) -> None:
    path = tiny_model("llama3", tmp_path, dtype="bfloat16")
    decoder = load_decoder(open_checkpoint(path), dtype=torch.float32)
    token_ids = torch.arange(20)
    logits = decoder.logits(decoder.forward(token_ids, token_ids, CausalAttention()))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        assert error_ratio(logits, model(token_ids[None]).logits[0]) < 1e-5


def test_sequences_of_a_batch_do_not_meet(tmp_path: Path) -> None:
    decoder = load_decoder(open_checkpoint(tiny_model("mistral", tmp_path)))
    token_ids = torch.randint(0, 384, (3, 30), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(30)
    together = decoder.forward(token_ids.flatten(), positions.repeat(3), CausalAttention(3)).view(3, 30, -1)
    for sequence, hidden in zip(token_ids, together, strict=True):
        assert error_ratio(decoder.forward(sequence, positions, CausalAttention()), hidden) < 1e-6


@pytest.mark.parametrize("family", ["gemma3", "qwen2", "mixtral", "phi3"])
def test_some_rows_alone_are_those_of_all(family: str, tmp_path: Path) -> None:
    decoder = load_decoder(open_checkpoint(tiny_model(family, tmp_path)))
    token_ids = torch.randint(0, 384, (40,), generator=torch.Generator().manual_seed(0))
    positions, rows = torch.arange(20).repeat(2), torch.tensor([39, 4, 19])
    whole = decoder.forward(token_ids, positions, CausalAttention(2))
    some = decoder.forward(token_ids, positions, CausalAttention(2), rows)
    assert some.shape == (3, whole.shape[1])
    assert error_ratio(some, whole[rows]) < 1e-6


@pytest.mark.parametrize("family", ["gemma3", "phi3"])
def test_taps_hand_out_what_each_group_of_linears_sees(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model(family, tmp_path))
    decoder = load_decoder(checkpoint)
    seen: list[tuple[str, Tensor]] = []
    positions = torch.arange(6)
    hidden = decoder.embed(positions)
    layer = decoder.layers[1]
    out = layer(hidden, decoder.rope(positions), CausalAttention(), lambda name, x: seen.append((name, x)))
    assert [name for name, _ in seen] == ["qkv", "o", "gate_up", "down"]
    assert torch.equal(out, layer(hidden, decoder.rope(positions), CausalAttention()))
    inputs = dict(seen)
    weights = load_file(checkpoint.path / "model.safetensors")
    prefix = layer_prefix(checkpoint.config, 1)
    for group in layer_groups(checkpoint.config):
        for module in group.modules:
            assert inputs[group.name].shape == (6, weights[f"{prefix}{module}.weight"].shape[1])
    down = inputs["down"] @ weights[f"{prefix}mlp.down_proj.weight"].T
    assert error_ratio(layer.mlp(inputs["gate_up"]), down) < 1e-6


def test_fused_quantized_layer_is_the_dense_layer_of_its_meaning(tmp_path: Path) -> None:
    """w8a16-int8 keeps activations: the layer equals a dense one with the dequantized weights."""
    checkpoint = open_checkpoint(tiny_model("qwen2", tmp_path))
    config = checkpoint.config
    scheme, dense = scheme_by_name("w8a16-int8"), scheme_by_name("dense")
    quantized, meant = {}, {}
    for module in layer_modules(config):
        tensors = scheme.quantize(
            checkpoint.tensor(f"{layer_prefix(config, 0)}{module}.weight"), dtype=torch.float32
        )
        quantized[module] = (scheme, tensors)
        meant[module] = (dense, {"weight": scheme.dequantize(tensors)})
    prefix = layer_prefix(config, 0)
    others = {
        name.removeprefix(prefix): checkpoint.tensor(name)
        for name in checkpoint.names()
        if name.startswith(prefix) and name.endswith(("norm.weight", ".bias"))
    }
    decoder = load_decoder(checkpoint)
    positions = torch.arange(6)
    hidden, rope = decoder.embed(positions), decoder.rope(positions)
    a, b, original = (
        Layer.build(config, 0, quantized, others, device=CPU, dtype=torch.float32),
        Layer.build(config, 0, meant, others, device=CPU, dtype=torch.float32),
        load_layer(checkpoint, 0, device=CPU, dtype=torch.float32),
    )
    expected = b(hidden, rope, CausalAttention())
    assert error_ratio(a(hidden, rope, CausalAttention()), expected) < 1e-5
    assert 1e-4 < error_ratio(original(hidden, rope, CausalAttention()), expected) < 2e-2


def test_context_len_chooses_longrope_factors_for_short_prompts_too(tmp_path: Path) -> None:
    """A token's logits must not change when a longer sequence joins the batch, so the length is settled."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    path = tiny_model(
        "phi3",
        tmp_path,
        rope_scaling={"type": "longrope", **factors},
        original_max_position_embeddings=64,
        max_position_embeddings=256,
    )
    decoder = load_decoder(open_checkpoint(path))
    positions = torch.tensor([1])
    long = decoder.rope(positions).full.cos
    decoder.set_context_len(64)
    short = decoder.rope(positions).full.cos
    magnitude = (1 + torch.tensor(4.0).log() / torch.tensor(64.0).log()).sqrt()
    torch.testing.assert_close(long[0, 0], magnitude * torch.tensor(1 / 3).cos())
    torch.testing.assert_close(short[0, 0], magnitude * torch.tensor(1.0).cos())
