"""From a model's name to what an engine is made of: the open checkpoint, the gate's word, the tokenizer.

`load_format` says where weights come from: "auto" and "safetensors" read them from the files that the name
leads to; "dummy" makes random ones of the same shapes, for which a config.json is enough, of a folder or of
a model on the hub. Nobody has judged random weights: they may be measured, and served only as anything else
without a verdict. Where such a folder has no tokenizer either, the model takes token ids alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from qinfer import hub
from qinfer.backend import model_device
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.dummy import DummyCheckpoint, open_dummy
from qinfer.checkpoint.names import layer_modules, layer_prefix
from qinfer.dtypes import DTYPES, name_of
from qinfer.errors import UserError
from qinfer.evals.clearance import Clearance, Kind
from qinfer.evals.coverage import Use
from qinfer.quant import Dense, Scheme
from qinfer.tokenizer import Tokenizer, has_tokenizer, read_template

LOAD_FORMATS = ("auto", "safetensors", "dummy")


class Weights(NamedTuple):
    """Where weights come from; a scheme, with its options, is for dummy ones only."""

    load_format: str = "auto"
    scheme: str | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    seed: int = 0


def open_model(
    model: str | os.PathLike[str],
    weights: Weights,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> Checkpoint:
    """The checkpoint that a name and a load format lead to; its `path` is the local folder.

    Raises UserError for an unknown format, a scheme for weights that have one already, and whatever finding
    and opening raise.
    """
    if weights.load_format not in LOAD_FORMATS:
        raise UserError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {weights.load_format!r}",
            "load_format",
        )
    if weights.load_format == "dummy":
        _, scheme, group_size, symmetric, seed = weights
        folder = hub.config_file(model, revision=revision, token=token).parent
        return open_dummy(folder, scheme, group_size=group_size, symmetric=symmetric, seed=seed)
    for name in ("scheme", "group_size", "symmetric"):
        if getattr(weights, name) is not None:
            raise UserError(
                f"{name}={getattr(weights, name)!r} is for load_format='dummy': weights in files have their "
                "scheme; make others with `qinfer quantize`",
                name,
            )
    return open_checkpoint(hub.resolve(model, revision=revision, token=token))


def judge(
    checkpoint: Checkpoint,
    kv_cache_dtype: str,
    lm_head_dtype: str = "auto",
    *,
    dtype: str,
    allow_ungated: bool,
    tokenizer: str | os.PathLike[str] | None = None,
    chat_template: str | None = None,
    hf_token: str | None = None,
    trust: Sequence[str | os.PathLike[str]] = (),
) -> Clearance:
    """Begins to check that the gate lets it be served so; raises GateError where it surely does not.

    What is returned hashes the weights meanwhile; its `result` gives the status, or raises GateError.
    """
    kind: Kind = "quantized" if checkpoint.is_quantized else "dense"
    use = Use(
        kv_cache_dtype,
        lm_head_dtype,
        dtype,
        None if tokenizer is None else hub.resolve(tokenizer, token=hf_token),
        None if chat_template is None else read_template(chat_template),
        tuple(Path(key) for key in trust),
        model_device().type,
    )
    return Clearance(
        checkpoint.path,
        use,
        "dummy" if isinstance(checkpoint, DummyCheckpoint) else kind,
        allow_ungated=allow_ungated,
        reads=() if isinstance(checkpoint, DummyCheckpoint) else checkpoint.weight_files,
    )


def find_tokenizer(
    checkpoint: Checkpoint,
    tokenizer: str | os.PathLike[str] | None,
    *,
    chat_template: str | None = None,
    token: str | None = None,
) -> Tokenizer | None:
    """The checkpoint's tokenizer, or the one named; None for dummy weights of a folder without one."""
    if tokenizer is None and isinstance(checkpoint, DummyCheckpoint) and not has_tokenizer(checkpoint.path):
        return None
    folder = checkpoint.path if tokenizer is None else hub.resolve(tokenizer, token=token)
    return Tokenizer.load(folder, chat_template=chat_template)


def check_dtype(dtype: str) -> None:
    """UserError unless it is "auto" or names one."""
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}", "dtype")


def check_quantization(quantization: str | None, checkpoint: Checkpoint) -> None:
    """UserError unless the checkpoint is quantized as the caller says, where he says it."""
    found = checkpoint.quantization.method if checkpoint.is_quantized else None
    if quantization not in (None, found):
        raise UserError(
            f"quantization={quantization!r} but the checkpoint is {found or 'not quantized'}: leave it "
            "out, or quantize first with `qinfer quantize`",
            "quantization",
        )


def schemes_of(checkpoint: Checkpoint) -> tuple[Scheme, ...]:
    """The formats in the first layer, in the order of its products, each once."""
    prefix = layer_prefix(checkpoint.config, 0)
    found = (checkpoint.scheme(prefix + module) for module in layer_modules(checkpoint.config))
    return tuple(dict.fromkeys(found))


def label_of(schemes: Sequence[Scheme], dtype: torch.dtype, kv_cache_dtype: str, lm_head_dtype: str) -> str:
    """'w8a8-int8 + int8 head + fp8 KV': what the ledger calls this engine."""
    model_dtype = name_of(dtype)
    weights = model_dtype if list(schemes) == [Dense()] else " + ".join(one.label for one in schemes)
    head = "" if lm_head_dtype == "auto" else f" + {lm_head_dtype} head"
    return weights + head + ("" if kv_cache_dtype == model_dtype else f" + {kv_cache_dtype} KV")
