"""The int8 head: what it computes, what it leaves alone, what it saves, and where it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.llm import LLM
from qinfer.model import head
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.model.head import make_head, saved_bytes
from qinfer.model.storage import tensor_bytes
from qinfer.testing import error_ratio, tiny_model


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_logits_are_those_of_the_rounded_weight(rows: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(400, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    made = make_head(weight, "int8")
    codes, scale = made.prepared["weight"], made.prepared["weight_scale"]
    rounded = codes.double() * scale.double()[:, None]
    assert codes.dtype == torch.int8
    assert bool(((rounded - weight.double()).abs() <= 0.51 * scale.double()[:, None]).all())
    assert error_ratio(made(hidden), hidden.double() @ rounded.T) < bound
    assert error_ratio(made(hidden), hidden.double() @ weight.double().T) < 1e-2
    assert made(hidden).dtype == dtype


def test_a_vocabulary_is_quantized_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 64)
    whole = make_head(weight, "int8").prepared
    monkeypatch.setattr(head, "_ROWS_AT_ONCE", 12)
    for name, tensor in make_head(weight, "int8").prepared.items():
        assert torch.equal(tensor, whole[name])


def both(path: Path) -> tuple[Decoder, Decoder]:
    return tuple(load_decoder(open_checkpoint(path), lm_head_dtype=name) for name in ("auto", "int8"))


@pytest.mark.parametrize("family", ["smollm2", "mistral", "gemma2"])
def test_distributions_hardly_move_and_the_embedding_stays(family: str, tmp_path: Path) -> None:
    """Tied and untied heads, and one whose logits are capped."""
    dense, quantized = both(tiny_model(family, tmp_path))
    assert torch.equal(quantized.embedding, dense.embedding)
    hidden = torch.nn.functional.normalize(torch.randn(64, dense.config.hidden_size)) * 8
    p, q = (decoder.logits(hidden).log_softmax(-1) for decoder in (dense, quantized))
    assert not torch.equal(p, q)
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 1e-4
    assert quantized.logits(hidden).dtype == torch.float32


@pytest.mark.parametrize(("family", "sign"), [("smollm2", -1), ("mistral", 1)])
@pytest.mark.parametrize("vocab", [384, 389])
def test_what_it_saves_is_what_the_ledger_finds(vocab: int, family: str, sign: int, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path, dtype="bfloat16", vocab_size=vocab)
    config: ModelConfig = open_checkpoint(path).config
    dense, quantized = both(path)
    saved = saved_bytes(config, "int8", 2)
    assert saved * sign > 0  # a tied model keeps both
    assert tensor_bytes(dense) - tensor_bytes(quantized) == saved
    assert saved_bytes(config, "auto", 2) == 0
    hidden = torch.randn(3, config.hidden_size).bfloat16()
    ours, theirs = quantized.logits(hidden), dense.logits(hidden)
    assert ours.shape == theirs.shape == (3, vocab)  # zeros that pad the weight are no tokens
    assert ours.is_contiguous()
    assert error_ratio(ours, theirs) < 2e-2


def test_a_model_answers_with_it_and_its_name_says_so(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model("mistral", tmp_path)), lm_head_dtype="int8", max_model_len=64)
    assert "int8 head" in llm.engine.ledger.label
    dense = LLM(str(tmp_path), max_model_len=64)
    ids = [[5, 6, 7]]
    ours, theirs = (torch.cat(list(x.engine.prompt_logits(ids[0]))) for x in (llm, dense))
    assert 0 < error_ratio(ours, theirs) < 1e-2


@pytest.mark.parametrize("name", ["int4", "", "bfloat16", None])
def test_other_names_are_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lm_head_dtype must be one of auto, int8, not"):
        LLM(str(tmp_path / "nothing here"), lm_head_dtype=name)
