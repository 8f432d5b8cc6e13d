"""From an open checkpoint to an engine that may serve it: limits, the gate's word, weights, then the pool.

So a refusal costs nothing. Whether the weights are those that were judged takes seconds to find out, in which
they are hashed and loaded at once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from qinfer import hub
from qinfer.backend import model_device
from qinfer.chat_messages import read_template
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.dummy import DummyCheckpoint
from qinfer.checkpoint.names import all_modules
from qinfer.dtypes import name_of
from qinfer.engine.budget import require_weights_fit
from qinfer.engine.engine import Engine
from qinfer.engine.kv_pool import resolve_kv_cache_dtype, scales_in
from qinfer.engine.options import EngineOptions, settle_limits
from qinfer.engine.sizing import space_of
from qinfer.evals.certificate import GateStatus
from qinfer.evals.clearance import Clearance, Kind
from qinfer.evals.coverage import Use
from qinfer.model.decoder import load_decoder
from qinfer.quant import Dense, Scheme
from qinfer.tokenizer import Tokenizer, has_tokenizer


class Loaded(NamedTuple):
    """What answers, and on what verdict."""

    engine: Engine
    tokenizer: Tokenizer | None
    gate: GateStatus


@dataclass(frozen=True)
class Loader:
    """How a checkpoint is to be run; `tokenizer` and `chat_template` stand in for its own.

    `trust` are files of public keys, of which one must have signed the verdict.
    """

    checkpoint: Checkpoint
    options: EngineOptions
    dtype: torch.dtype
    lm_head_dtype: str = "auto"
    tokenizer: str | os.PathLike[str] | None = None
    chat_template: str | None = None
    hf_token: str | None = None
    skip_tokenizer: bool = False
    allow_ungated: bool = False
    trust: Sequence[str | os.PathLike[str]] = ()

    def load(self) -> Loaded:
        """Raises GateError for what may not serve, UserError for what cannot be loaded or does not fit."""
        checkpoint, device = self.checkpoint, model_device()
        settle_limits(self.options, checkpoint.config.context_len, on_gpu=device.type != "cpu")
        kv_cache_dtype = resolve_kv_cache_dtype(
            self.options.kv_cache_dtype,
            name_of(self.dtype),
            checkpoint_has_fp8=checkpoint.quantization.kv_cache_scheme is not None,
        )
        with self._clearance(kv_cache_dtype) as clearance:
            require_weights_fit(checkpoint.num_bytes, space_of(device), self.options)
            tokenizer = self._find_tokenizer()
            decoder = load_decoder(
                checkpoint,
                device=device,
                dtype=self.dtype,
                lm_head_dtype=self.lm_head_dtype,
                progress=True,
            )
            gate = clearance.result()
        engine = Engine(
            decoder,
            tokenizer,
            replace(self.options, kv_cache_dtype=kv_cache_dtype),
            kv_scales=scales_in(checkpoint),
            label=self._label(kv_cache_dtype),
        )
        return Loaded(engine, tokenizer, gate)

    def _clearance(self, kv_cache_dtype: str) -> Clearance:
        """Refuses where the gate surely does; else hashes the weights until it is asked for its result."""
        checkpoint = self.checkpoint
        is_dummy = isinstance(checkpoint, DummyCheckpoint)
        kind: Kind = "dummy" if is_dummy else "quantized" if checkpoint.is_quantized else "dense"
        use = Use(
            kv_cache_dtype,
            self.lm_head_dtype,
            name_of(self.dtype),
            None if self.tokenizer is None else hub.resolve(self.tokenizer, token=self.hf_token),
            None if self.chat_template is None else read_template(self.chat_template),
            tuple(Path(key) for key in self.trust),
            model_device().type,
        )
        reads = () if is_dummy else checkpoint.weight_files
        return Clearance(checkpoint.path, use, kind, allow_ungated=self.allow_ungated, reads=reads)

    def _find_tokenizer(self) -> Tokenizer | None:
        """None where none is wanted, and for dummy weights of a folder without one."""
        folder = self.checkpoint.path
        if self.skip_tokenizer:
            return None
        if self.tokenizer is not None:
            folder = hub.resolve(self.tokenizer, token=self.hf_token)
        elif isinstance(self.checkpoint, DummyCheckpoint) and not has_tokenizer(folder):
            return None
        return Tokenizer.load(folder, chat_template=self.chat_template)

    def _label(self, kv_cache_dtype: str) -> str:
        """'w8a8-int8 + int8 head + fp8 KV': what the ledger calls this engine."""
        dtype, schemes = name_of(self.dtype), schemes_of(self.checkpoint)
        weights = dtype if schemes == (Dense(),) else " + ".join(one.label for one in schemes)
        head = "" if self.lm_head_dtype == "auto" else f" + {self.lm_head_dtype} head"
        return weights + head + ("" if kv_cache_dtype == dtype else f" + {kv_cache_dtype} KV")


def schemes_of(checkpoint: Checkpoint) -> tuple[Scheme, ...]:
    """The formats of the layers' products, each once, the most frequent first."""
    found = Counter(map(checkpoint.scheme, all_modules(checkpoint.config)))
    return tuple(scheme for scheme, _ in found.most_common())
