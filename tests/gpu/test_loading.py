"""Loading on a GPU: dummy weights in every scheme, and files, without more memory than they need."""

import json
from pathlib import Path

import pytest
import torch

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.dummy import PANEL, open_dummy
from qinfer.llm import LLM
from qinfer.model.decoder import load_decoder
from qinfer.model.storage import tensor_bytes
from qinfer.quant import SCHEMES
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_config, tiny_model

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "head_dim": 128}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    changes = {**WIDE, "num_key_value_heads": 4, "vocab_size": 8192, "num_hidden_layers": 6}
    config = tiny_config("llama3", dtype="bfloat16", **changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dummy_weights_are_made_layer_by_layer(folder: Path, scheme: str) -> None:
    checkpoint = open_dummy(folder, scheme)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = load_decoder(checkpoint, device=GPU)
    peak = torch.cuda.max_memory_allocated() - before
    layer = checkpoint.num_bytes // 6
    assert tensor_bytes(decoder) == pytest.approx(checkpoint.num_bytes, rel=0.04)
    # beside the weights: a layer's file tensors and their joined copies, and what quantizing a panel takes
    assert peak < tensor_bytes(decoder) + 3 * layer + 40 * PANEL


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dummy_models_speak_finite_numbers(folder: Path, scheme: str) -> None:
    llm = LLM(folder, load_format="dummy", scheme=scheme, allow_ungated=True, num_kv_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    (answer,) = llm.generate(list(range(70)), params, use_tqdm=False)[0].outputs
    assert answer.finish_reason == "length"
    assert answer.cumulative_logprob is not None
    assert -200 < answer.cumulative_logprob < 0


def test_files_in_shards_load_as_they_do_on_the_cpu(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model", dtype="bfloat16", shards=3)
    on_gpu = load_decoder(open_checkpoint(folder), device=GPU)
    on_cpu = load_decoder(open_checkpoint(folder))
    assert torch.equal(on_gpu.embedding.cpu(), on_cpu.embedding)
    for ours, theirs in zip(on_gpu.layers, on_cpu.layers, strict=True):
        assert torch.equal(ours.input_norm.cpu(), theirs.input_norm)
        for name in ("qkv", "o"):
            weights = [getattr(layer.attention, name).prepared["weight"] for layer in (ours, theirs)]
            assert torch.equal(weights[0].cpu(), weights[1])
