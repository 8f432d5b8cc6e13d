"""Mixtures of experts: logits of Mixtral and Qwen3-MoE are transformers', and both ways to run them agree."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import layer_groups, layer_modules
from qinfer.config import ModelConfig
from qinfer.engine.footprint import WeightFormat, weight_bytes
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.llm import LLM
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.model.experts import Experts
from qinfer.sampling_params import SamplingParams
from qinfer.testing import MIXTURES, error_ratio, tiny_config, tiny_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MIXTURES},
    "mixtral-window": ("mixtral", {"sliding_window": 16}),
    "mixtral-all-chosen": ("mixtral", {"num_experts_per_tok": 4}),
    "qwen3_moe-raw-weights": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe-one-of-16": ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 1}),
    "qwen3_moe-window": ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": True}),
}


def logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        hidden = decoder.forward(token_ids, torch.arange(len(token_ids)), CausalAttention(1))
        return decoder.logits(hidden)


def prompt(length: int = 50) -> Tensor:
    return torch.randint(0, 384, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    path = tiny_model(family, tmp_path, **changes)
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        expected = model(prompt()[None]).logits[0]
    out = logits(load_decoder(open_checkpoint(path)), prompt())
    assert (out - expected).abs().max() < 1e-4
    assert error_ratio(out, expected) < 1e-5


@pytest.mark.parametrize("family", MIXTURES)
def test_all_experts_on_all_tokens_give_the_same(family: str, tmp_path: Path) -> None:
    decoder = load_decoder(open_checkpoint(tiny_model(family, tmp_path)))
    experts = decoder.layers[0].mlp
    assert isinstance(experts, Experts)
    x = torch.randn(40, 64)
    seen: dict[str, list[int]] = {}
    out = experts(x, lambda group, inputs: seen.setdefault(group, []).append(len(inputs)))
    torch.testing.assert_close(out, experts(x), rtol=1e-5, atol=1e-6)
    groups = [f"{name}.{i}" for i in range(4) for name in ("gate_up", "down")]
    assert seen == {group: [40] for group in groups}
    weights = experts.route(x)
    assert ((weights > 0).sum(1) == 2).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(40))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_served_through_pages(family: str, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = prompt(20).tolist()
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    llm = LLM(str(path), num_kv_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, min_tokens=12)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params)
    assert list(output.outputs[0].token_ids) == expected[0, 20:].tolist()


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8", "w4a16"])
def test_one_token_at_a_time_is_served_as_many_are(family: str, scheme: str, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path, dtype="bfloat16")
    llm = LLM(str(path), load_format="dummy", scheme=scheme, num_kv_blocks=64, allow_ungated=True)
    ids = prompt(20).tolist()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params)
    tokens, pairs = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert pairs is not None
    rows = torch.cat(list(llm.engine.prompt_logits([*ids, *tokens])))[19:27]
    for token, logprobs, row in zip(tokens, pairs, rows, strict=True):
        best, second = sorted((pair.logprob for pair in logprobs.values()), reverse=True)[:2]
        assert token == int(row.argmax()) or best - second < 0.1  # a near tie of bfloat16


def test_a_copy_has_linears_of_its_own(tmp_path: Path) -> None:
    decoder = load_decoder(open_checkpoint(tiny_model("mixtral", tmp_path)))
    experts = decoder.layers[0].mlp
    assert isinstance(experts, Experts)
    before = experts.experts[2].down
    copied = copy.copy(experts)
    copied.experts[2].down = experts.experts[1].down
    assert experts.experts[2].down is before
    assert copied.experts[3].down is experts.experts[3].down


def test_groups_are_each_experts_own_and_the_router_is_none() -> None:
    config = ModelConfig.from_dict(tiny_config("mixtral"))
    names = [group.name for group in layer_groups(config)]
    assert names == ["qkv", "o", *(f"{name}.{i}" for i in range(4) for name in ("gate_up", "down"))]
    assert layer_groups(config)[4].modules == tuple(
        f"block_sparse_moe.experts.1.{name}" for name in ("w1", "w3")
    )
    assert not any(module.endswith("gate") for module in layer_modules(config))


@pytest.mark.parametrize("family", MIXTURES)
def test_weights_are_counted_as_they_lie_in_the_file(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model(family, tmp_path, dtype="bfloat16"))
    tensors = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
    assert weight_bytes(checkpoint.config, WeightFormat("dense")) == tensors


def test_missing_expert_is_named(tmp_path: Path) -> None:
    path = tiny_model("qwen3_moe", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "num_experts": 5}))
    with pytest.raises(CheckpointError, match=r"missing: .*layers.0.mlp.experts.4.down_proj.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("change", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeForCausalLM has layers without experts"):
        ModelConfig.from_dict(tiny_config("qwen3_moe", **change))
