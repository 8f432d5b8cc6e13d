"""From a model's name to its open checkpoint.

`load_format` says where weights come from: "auto" and "safetensors" read them from the files that the name
leads to; "dummy" makes random ones of the same shapes, for which a config.json is enough, of a folder or of
a model on the hub. Nobody has judged random weights: they may be measured, and served only as anything else
without a verdict. Where such a folder has no tokenizer either, the model takes token ids alone.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from qinfer import hub
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.dummy import open_dummy
from qinfer.dtypes import DTYPES
from qinfer.errors import UserError

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
