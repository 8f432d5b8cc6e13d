"""A whole engine through the Triton kernels without a GPU: on tensors that claim to be there, interpreted.

What a GPU's numbers are is for tests/gpu; here it is that every op gets what it takes, layouts included.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qinfer import backend, ops
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine import inputs
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.model import linear
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.quant import scheme_by_name
from qinfer.sampling_params import SamplingParams
from qinfer.testing import error_ratio, tiny_model

IDS = [(37 * i + 11) % 256 for i in range(12)]
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=2, logprobs=2, repetition_penalty=1.2),
)  # without limits, whose search takes the interpreter half a minute
PACKING = ("pack_w8a8_int8", "pack_w8a8_fp8", "pack_w8a16_int8", "pack_w4a16")


class Claiming(Tensor):
    """A tensor that says it is on a GPU; so does what torch makes of it."""

    is_cuda = True


def mapped(value: Any, as_class: type[Tensor]) -> Any:
    """The value with its tensors, also those in tuples and dicts, as the class."""
    if isinstance(value, Tensor):
        return value.as_subclass(as_class)
    if isinstance(value, dict):
        return {key: mapped(item, as_class) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [mapped(item, as_class) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes steps and weights claim to be on a GPU; the names of the ops that asked for a twin."""
    asked: list[str] = []
    run, to_device = backend._run, inputs._on_device

    def plainly(meaning: Callable[..., Any], rehearse: Any, args: Any, kwargs: Any) -> Any:
        asked.append(meaning.__name__)
        return mapped(run(meaning, rehearse, mapped(args, Tensor), mapped(kwargs, Tensor)), Claiming)

    def packed(pack: Callable[..., Any]) -> Callable[..., Any]:
        return lambda weight, *rest: mapped(pack(weight.as_subclass(Claiming), *rest), Tensor)

    monkeypatch.setenv("QINFER_BACKEND", "triton")
    backend.settings.cache_clear()
    monkeypatch.setattr(backend, "_run", plainly)
    monkeypatch.setattr(inputs, "_on_device", lambda *args: [mapped(x, Claiming) for x in to_device(*args)])
    for name in PACKING:
        monkeypatch.setattr(ops, name, packed(getattr(ops, name)))
    embed = Decoder.embed
    taken = linear.takes_turns
    cuda = torch.device("cuda")
    monkeypatch.setattr(linear, "takes_turns", lambda shards, bias, _: taken(shards, bias, cuda))
    monkeypatch.setattr(Decoder, "embed", lambda self, ids: embed(self, ids).as_subclass(Claiming))
    yield asked
    monkeypatch.undo()
    backend.settings.cache_clear()


def quantized(scheme_name: str) -> Callable[..., Any]:
    """Loads a checkpoint as if its linears were stored in that scheme."""
    scheme = scheme_by_name(scheme_name)

    def file_linear(checkpoint: Any, module: str, device: torch.device, dtype: torch.dtype) -> Any:
        weight = checkpoint.tensor(f"{module}.weight", device)
        return scheme, scheme.quantize(weight, dtype=dtype)

    return file_linear


def answers(folder: Path, kv: str) -> tuple[Tensor, list[list[int]]]:
    """Logits of a text in chunks, and what two requests of a batch get."""
    options = EngineOptions(kv_cache_dtype=kv, num_kv_blocks=16, max_num_batched_tokens=8, max_num_seqs=4)
    engine = Engine(load_decoder(open_checkpoint(folder)), None, options)
    logits = torch.cat([part.as_subclass(Tensor) for part in engine.prompt_logits(IDS)])
    for i, params in enumerate(PARAMS):
        engine.add(str(i), IDS[: 5 + i], params)
    found = {}
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    return logits, [found[str(i)] for i in range(len(PARAMS))]


EXPECTED = {
    "dense": {"rms_norm", "add_rms_norm", "silu_mul"},
    "w8a8-int8": {
        *("rms_norm_int8", "add_rms_norm", "add_rms_norm_int8", "gated_to_int8"),
        *("int8_per_token", "w8a8_int8_parts"),
    },
    "w8a16-int8": {"rms_norm", "add_rms_norm", "silu_mul", "w8a16_int8_parts"},
}
ALWAYS = {
    "greedy",
    "group_rows",
    "put_known_ids",
    "rope_angles",
    "qkv_post",
    "paged_attention",
    "apply_penalties",
    "sample",
    "token_logprobs",
}


@pytest.mark.parametrize(
    ("family", "scheme", "kv"),
    [("qwen3", "dense", "auto"), ("qwen2", "w8a8-int8", "int8"), ("qwen2", "w8a16-int8", "auto")],
)
def test_an_engine_through_the_kernels_answers_like_the_cpu(
    family: str, scheme: str, kv: str, tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(family, tmp_path / "m", hidden_size=128, intermediate_size=256)
    if scheme != "dense":
        monkeypatch.setattr("qinfer.model.layer.file_linear", quantized(scheme))
    expected, expected_tokens = answers(folder, kv)
    asked = request.getfixturevalue("claimed")
    logits, tokens = answers(folder, kv)
    assert set(asked) == EXPECTED[scheme] | ALWAYS
    assert error_ratio(logits, expected) < 1e-5
    assert tokens == expected_tokens
