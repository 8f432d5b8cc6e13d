"""From a model's name to what an engine is made of: the open checkpoint, the gate's word, the tokenizer.

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
from qinfer.checkpoint.dummy import DummyCheckpoint, open_dummy
from qinfer.errors import UserError
from qinfer.evals.certificate import GateStatus, require, require_dummy
from qinfer.tokenizer import Tokenizer, has_tokenizer

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
    checkpoint: Checkpoint, kv_cache_dtype: str, lm_head_dtype: str = "auto", *, allow_ungated: bool
) -> GateStatus:
    """What the gate says of serving it with that KV cache and head; raises GateError unless it may be."""
    if isinstance(checkpoint, DummyCheckpoint):
        return require_dummy(allow_ungated=allow_ungated)
    return require(
        checkpoint.path,
        is_quantized=checkpoint.is_quantized,
        kv_cache_dtype=kv_cache_dtype,
        allow_ungated=allow_ungated,
        lm_head_dtype=lm_head_dtype,
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
