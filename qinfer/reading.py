"""Models that read texts: what is opened to judge them, how they are run, and what they have read before.

A `Reader` runs one model as it is served, through qinfer's own engine, and gives the logits of every position
of a text. The source of a comparison is read once and for all: its hidden states after the final norm, a
hundredth of its logits, are kept in a store, and from then on only its head is loaded to make logits of them,
the same to the last bit.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from qinfer import env
from qinfer.backend import model_device
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.dtypes import DTYPES, name_of
from qinfer.engine.engine import Engine
from qinfer.engine.kv_pool import scales_in
from qinfer.engine.options import EngineOptions
from qinfer.engine.sampler import slice_rows
from qinfer.engine.scoring import LOGIT_ROWS
from qinfer.errors import UserError
from qinfer.evals import fidelity
from qinfer.evals.certificate import resolve_kv_cache_dtype
from qinfer.evals.hashes import hash_files
from qinfer.evals.store import Store, code_digest, key_of
from qinfer.hub import resolve
from qinfer.model.decoder import Decoder, load_decoder, load_ends
from qinfer.model.head import check_lm_head_dtype
from qinfer.source import check_dtype
from qinfer.tokenizer import Tokenizer

_T = TypeVar("_T")


@dataclass(frozen=True)
class OpenModel:
    """A model on disk: only headers and the tokenizer have been read; `name` as the person wrote it."""

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer

    @property
    def num_parameters(self) -> int:
        """Numbers in the weight tensors (of a dense checkpoint)."""
        return sum(math.prod(self.checkpoint.header(name)[0]) for name in self.checkpoint.names())

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 (hex) of the files that a certificate covers, as they are when first asked for."""
        return hash_files(self.checkpoint.path)

    def schemes(self) -> dict[str, str]:
        """Label -> name of each scheme that a linear has."""
        schemes = [self.checkpoint.scheme(module) for module in all_modules(self.checkpoint.config)]
        return {scheme.label: scheme.name for scheme in schemes}


@dataclass(frozen=True)
class Serving:
    """How a model is run: dtype of activations and dense weights, a key of certificate.KV_RISK, the head."""

    dtype: torch.dtype
    kv_cache_dtype: str
    lm_head_dtype: str = "auto"

    @classmethod
    def settle(
        cls, dtype: str, kv_cache_dtype: str, checkpoint: Checkpoint, lm_head_dtype: str = "auto"
    ) -> Serving:
        """Resolves "auto" as serving would; raises UserError for an unknown name."""
        check_lm_head_dtype(lm_head_dtype)
        check_dtype(dtype)
        settled = DTYPES[checkpoint.config.dtype if dtype == "auto" else dtype]
        kv = resolve_kv_cache_dtype(kv_cache_dtype, checkpoint.path)
        if kv_cache_dtype == "auto" and kv != "fp8":  # fp8 where the checkpoint asks for it
            kv = name_of(settled)
        return cls(settled, kv, lm_head_dtype)

    def to_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return {
            "dtype": name_of(self.dtype),
            "kv_cache_dtype": self.kv_cache_dtype,
            "lm_head_dtype": self.lm_head_dtype,
        }


class Reader:
    """A model as it is run, reading texts; it is loaded when one comes that it has not read before."""

    def __init__(self, model: OpenModel, serving: Serving, length: int, store: Store | None = None) -> None:
        """`length` is the longest text's, in tokens; with a store, what is read is kept there."""
        self.model = model
        self.serving = serving
        self._length = length
        self._store = store
        self._engine: Engine | None = None
        self._ends: Decoder | None = None

    @cached_property
    def identity(self) -> str:
        """Hex digest of all that decides its logits: files, dtypes, versions, code and the machine's kind."""
        device = model_device()
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else env.cpu_name()
        return key_of(
            files=self.model.hashes,
            serving=self.serving.to_dict(),
            device=[on, env.backend()],
            code=[code_digest(), torch.__version__],
        )

    def logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Logits of every position, in order, as slices [rows, V] of float32 or of the model's dtype."""
        if self._store is None:
            yield from self._loaded().prompt_logits(token_ids, narrow=True)
            return
        hidden = self.hidden(token_ids)
        ends = self._head()
        on_gpu = ends.device.type != "cpu"
        rows = slice_rows(ends.config.vocab_size) if on_gpu else LOGIT_ROWS
        with torch.inference_mode():
            for part in torch.split(hidden, rows):
                yield ends.logits(part.to(ends.device))

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Hidden states after the final norm [T, H], read now or before."""
        key = key_of(kind="hidden", reader=self.identity, token_ids=list(token_ids))
        kept = self._store.tensors(key) if self._store else None
        if kept is not None:
            return kept["hidden"]
        hidden = torch.cat(list(self._loaded().prompt_hidden(token_ids))).cpu()
        if self._store:
            self._store.put_tensors(key, {"hidden": hidden})
        return hidden

    def unload(self) -> None:
        """Frees what was loaded; it is loaded again where it is needed."""
        self._engine = self._ends = None
        gc.collect()

    def _loaded(self) -> Engine:
        if self._engine is None:
            options = EngineOptions(
                num_kv_blocks=self._length // 16 + 2,
                max_num_seqs=1,
                enable_prefix_caching=False,
                enforce_eager=True,
            )
            self._engine = engine_for(self.model.checkpoint, self.serving, options)
        return self._engine

    def _head(self) -> Decoder:
        """The decoder, or one without layers where the texts have been read."""
        if self._ends is None:
            checkpoint, serving = self.model.checkpoint, self.serving
            self._ends = load_ends(
                checkpoint, device=model_device(), dtype=serving.dtype, lm_head_dtype=serving.lm_head_dtype
            )
        return self._ends


def scores_of(
    reference: Reader, candidate: Reader, windows: Sequence[Sequence[int]], store: Store, bar: Bar
) -> list[fidelity.WindowScores]:
    """The candidate's scores on each window, measured now or before.

    The source reads first and is unloaded then, so that two models are never in memory at once.
    """
    keys = [
        key_of(kind="scores", source=reference.identity, candidate=candidate.identity, token_ids=list(ids))
        for ids in windows
    ]
    kept = [store.tensors(key) for key in keys]
    missing = [i for i, scores in enumerate(kept) if scores is None]
    for i in bar(missing, "source"):
        reference.hidden(windows[i])
    reference.unload()
    for i in bar(missing, "candidate"):
        (scores,) = fidelity.compare(reference.logits, candidate.logits, [windows[i]])
        kept[i] = scores._asdict()
        store.put_tensors(keys[i], scores._asdict())
    return [fidelity.WindowScores(**scores) for scores in kept if scores is not None]


@dataclass(frozen=True)
class Bar:
    """Progress bars on stderr, or none."""

    shown: bool
    unit: str = "window"

    def __call__(self, items: Sequence[_T], what: str) -> Iterator[_T]:
        """The same items."""
        yield from tqdm(items, desc=what, unit=self.unit, disable=not (self.shown and items))


def open_model(name: str, *, revision: str | None = None, token: str | None = None) -> OpenModel:
    """Finds the model and reads its headers and tokenizer; raises UserError where that fails."""
    path = resolve(name, revision=revision, token=token)
    return OpenModel(name, open_checkpoint(path), Tokenizer.load(path))


def engine_for(
    checkpoint: Checkpoint, serving: Serving, options: EngineOptions, tokenizer: Tokenizer | None = None
) -> Engine:
    """Loads the model into an engine as it is served; `options` say the rest."""
    decoder = load_decoder(
        checkpoint, device=model_device(), dtype=serving.dtype, lm_head_dtype=serving.lm_head_dtype
    )
    scales = scales_in(checkpoint) if serving.kv_cache_dtype == "fp8" else None
    served = replace(options, kv_cache_dtype=serving.kv_cache_dtype)
    return Engine(decoder, tokenizer, served, kv_scales=scales)


def read_text(path: Path) -> str:
    """The UTF-8 text of a file; raises UserError where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the text {path} cannot be read: {error}", "text") from error
