"""Vectors of texts: what transformers' hidden states give, in any chunks and any company."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.model.decoder import load_decoder
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
PROMPTS = [[65 + i] * (5 + 17 * i) + [70, 71] for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def make(folder: Path) -> Callable[..., Engine]:
    decoder, tokenizer = load_decoder(open_checkpoint(folder)), Tokenizer.load(folder)
    return lambda **options: Engine(decoder, tokenizer, EngineOptions(**{"num_kv_blocks": 64, **options}))


def embeddings(engine: Engine, pooling: Any, company: bool = False) -> list[list[float]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, ONE_TOKEN, pooling=pooling)
        if company:
            engine.add(f"talk {i}", prompt, SamplingParams(seed=i, max_tokens=20))
    found: dict[str, list[float]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished and not output.request_id.startswith("talk"):
                assert output.embedding is not None
                found[output.request_id] = output.embedding
            elif output.request_id.startswith("talk"):
                assert output.embedding is None
    return [found[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_transformers(make: Callable[..., Engine], folder: Path, pooling: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, vector in zip(PROMPTS, embeddings(make(), pooling), strict=True):
        with torch.no_grad():
            (rows,) = model.model(torch.tensor([prompt])).last_hidden_state.double()
        expected = rows[-1] if pooling == "last" else rows.mean(0)
        assert torch.allclose(torch.tensor(vector).double(), expected / expected.norm(), atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_company_and_a_warm_cache_change_nothing(make: Callable[..., Engine], pooling: str) -> None:
    expected = torch.tensor(embeddings(make(), pooling))
    busy = make(max_num_batched_tokens=7)
    for _ in range(2):
        assert torch.allclose(torch.tensor(embeddings(busy, pooling, company=True)), expected, atol=1e-5)


def test_preemption_starts_the_rows_again(make: Callable[..., Engine]) -> None:
    expected = torch.tensor(embeddings(make(), "mean")[2])
    engine = make(num_kv_blocks=6, max_num_batched_tokens=2)
    engine.add("first", [80] * 30, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    engine.add("pooled", PROMPTS[2], ONE_TOKEN, pooling="mean")
    found = {}
    while engine.has_unfinished():
        found |= {output.request_id: output.embedding for output in engine.step() if output.finished}
    assert engine.stats().num_preemptions > 0
    assert torch.allclose(torch.tensor(found["pooled"]), expected, atol=1e-5)
    assert found["first"] is None
