"""Two models read the same held-out text through qinfer's own engine, and the gate judges the difference.

The candidate runs in the dtype and with the KV cache that will serve. The source is the reference: in
float32 where it is small enough to afford that, else in its own dtype. So the KL is the whole distance from
the source to what is served, rounding of the serving dtype included, and it is that whole distance which the
limits are for: nothing is subtracted. How much of it the dtype alone makes is measured on the first windows,
with the source itself served alike, and reported beside it as the noise floor.

Both models are in memory at once and their logits meet slice by slice; nothing is stored but a few numbers
per token.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import qinfer
from qinfer.backend import model_device
from qinfer.blame import find_blame
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.engine.engine import Engine
from qinfer.engine.kv_pool import scales_in
from qinfer.engine.options import EngineOptions
from qinfer.errors import UserError
from qinfer.evals import fidelity, text
from qinfer.evals.certificate import resolve_kv_cache_dtype
from qinfer.evals.gate import (
    GateResult,
    Measure,
    Verdict,
    decide,
)
from qinfer.evals.thresholds import Limits, limits_for, profile_named, scheme_class
from qinfer.hub import resolve
from qinfer.model.decoder import load_decoder
from qinfer.model.head import check_lm_head_dtype
from qinfer.tokenizer import Tokenizer

WINDOW = 512  # tokens; the standard profile is 32 such windows
FLOOR_WINDOWS = 8  # the first ones, for the noise floor
FLOAT32_PARAMETERS = 2_000_000_000  # a source up to this size is the reference in float32
_DTYPES = ("auto", "float32", "bfloat16", "float16")
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
        if dtype not in _DTYPES:
            raise UserError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}", "dtype")
        name = checkpoint.config.dtype if dtype == "auto" else dtype
        kv = resolve_kv_cache_dtype(kv_cache_dtype, checkpoint.path)
        if kv_cache_dtype == "auto" and kv != "fp8":  # fp8 where the checkpoint asks for it
            kv = name
        return cls(getattr(torch, name), kv, lm_head_dtype)


@dataclass(frozen=True)
class Comparison:
    """A candidate, how it will be served, its source, and what is read."""

    candidate: OpenModel
    serving: Serving
    source: OpenModel
    profile: str
    text_file: Path | None = None  # None: the built-in held-out text
    seed: int = 0  # of the bootstrap

    @property
    def reference(self) -> Serving:
        """How the source is run: float32 where it is small enough, else its own dtype."""
        small = self.source.num_parameters <= FLOAT32_PARAMETERS
        return Serving.settle("float32" if small else "auto", "auto", self.source.checkpoint)

    def command(self) -> str:
        """The command line that makes this comparison."""
        words = ["qinfer", "eval", self.candidate.name, "--against", self.source.name]
        words += ["--profile", self.profile, "--seed", str(self.seed)]
        words += ["--dtype", name_of(self.serving.dtype), "--kv-cache-dtype", self.serving.kv_cache_dtype]
        if self.serving.lm_head_dtype != "auto":
            words += ["--lm-head-dtype", self.serving.lm_head_dtype]
        return shlex.join(words + ([] if self.text_file is None else ["--text", str(self.text_file)]))


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def open_model(name: str, *, revision: str | None = None, token: str | None = None) -> OpenModel:
    """Finds the model and reads its headers and tokenizer; raises UserError where that fails."""
    path = resolve(name, revision=revision, token=token)
    return OpenModel(name, open_checkpoint(path), Tokenizer.load(path))


def check_comparable(candidate: OpenModel, source: OpenModel) -> None:
    """Raises UserError unless `source` is dense and has the candidate's vocabulary."""
    if source.checkpoint.is_quantized:  # else a checkpoint compared with itself would pass
        raise UserError(
            f"{source.name} is quantized itself: compare with the dense model that it was made from",
            "against",
        )
    ours, theirs = candidate.checkpoint.config.vocab_size, source.checkpoint.config.vocab_size
    if ours != theirs:
        raise UserError(
            f"{source.name} has a vocabulary of {theirs} and {candidate.name} one of {ours}: "
            "compare with the model that it was made from",
            "against",
        )


def judge(comparison: Comparison, *, progress: bool) -> GateResult:
    """Measures and decides; a candidate that reads the text as other tokens than its source fails at once."""
    candidate, source = comparison.candidate, comparison.source
    profile = profile_named(comparison.profile)
    kind = scheme_class(candidate.schemes().values())
    limits = limits_for(kind, source.num_parameters, profile)
    length = min(WINDOW, candidate.checkpoint.config.context_len, source.checkpoint.config.context_len)
    ours, windows = (
        text.first_tokens(_held_out(model.tokenizer, comparison.text_file, length), profile.num_tokens)
        for model in (candidate, source)
    )
    settings = _settings(comparison, limits, windows, length)
    if text.data_hash(ours) != text.data_hash(windows):
        reason = "its tokenizer or chat template reads the held-out text as other tokens than its source's"
        return GateResult(Verdict.FAIL, (reason,), (), settings)
    measures = _measure(comparison, limits, windows, progress) if windows else ()
    num_tokens = sum(len(window.token_ids) for window in windows)
    verdict, reasons = decide(
        measures, num_tokens=num_tokens, num_windows=len(windows), wanted=profile.num_tokens
    )
    ids = [window.token_ids for window in windows]
    blame = find_blame(comparison, ids) if verdict is Verdict.FAIL else None
    return GateResult(verdict, tuple(reasons), measures, settings, blame)


def engine_logits(checkpoint: Checkpoint, serving: Serving, window: int) -> fidelity.Logits:
    """Loads the model into an engine with a KV pool for one window; gives its logits of any token ids."""
    decoder = load_decoder(
        checkpoint, device=model_device(), dtype=serving.dtype, lm_head_dtype=serving.lm_head_dtype
    )
    options = EngineOptions(
        kv_cache_dtype=serving.kv_cache_dtype,
        num_kv_blocks=window // 16 + 2,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    scales = scales_in(checkpoint) if serving.kv_cache_dtype == "fp8" else None
    return Engine(decoder, None, options, kv_scales=scales).prompt_logits


def read_text(path: Path) -> str:
    """The UTF-8 text of a file; raises UserError where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the text {path} cannot be read: {error}", "text") from error


def with_progress(items: Iterable[_T], total: int, what: str, progress: bool) -> Iterator[_T]:
    """The same items, with a bar on stderr."""
    yield from tqdm(items, total=total, desc=what, unit="window", disable=not progress)


def _held_out(tokenizer: Tokenizer, text_file: Path | None, length: int) -> Iterator[text.Window]:
    if text_file is None:
        return text.reference_windows(tokenizer, length)
    return text.text_windows(tokenizer, read_text(text_file), length)


def _measure(
    comparison: Comparison, limits: Limits, windows: list[text.Window], progress: bool
) -> tuple[Measure, ...]:
    source, serving, seed = comparison.source.checkpoint, comparison.serving, comparison.seed
    ids = [window.token_ids for window in windows]
    length = max(map(len, ids))
    reference = engine_logits(source, comparison.reference, length)
    candidate = engine_logits(comparison.candidate.checkpoint, serving, length)
    scores = fidelity.compare(reference, candidate, ids)
    measures = fidelity.measures(list(with_progress(scores, len(ids), "gate", progress)), limits, seed=seed)
    if serving.dtype == comparison.reference.dtype:
        return measures
    del candidate, scores  # the source as served takes the candidate's place in memory
    served_alike = Serving(serving.dtype, name_of(serving.dtype))
    floor = fidelity.compare(reference, engine_logits(source, served_alike, length), ids[:FLOOR_WINDOWS])
    total = min(FLOOR_WINDOWS, len(ids))
    return measures + fidelity.noise_floor(
        list(with_progress(floor, total, "noise floor", progress)), seed=seed
    )


def _settings(
    comparison: Comparison, limits: Limits, windows: list[text.Window], length: int
) -> dict[str, Any]:
    """All that it takes to get the same numbers again, for the certificate."""
    candidate, source = comparison.candidate, comparison.source
    kinds = [window.kind for window in windows]
    return {
        "command": comparison.command(),
        "model": candidate.name,
        "schemes": sorted(candidate.schemes()),
        "against": source.name,
        "source_parameters": source.num_parameters,
        "profile": comparison.profile,
        "limits": {name: float(f"{limit:.6g}") for name, limit in limits._asdict().items()},
        "text": "built-in" if comparison.text_file is None else str(comparison.text_file),
        "data_sha256": text.data_hash(windows),
        "windows": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "window": length,
        "tokens": sum(len(window.token_ids) for window in windows),
        "seed": comparison.seed,
        "dtype": name_of(comparison.serving.dtype),
        "kv_cache_dtype": comparison.serving.kv_cache_dtype,
        "lm_head_dtype": comparison.serving.lm_head_dtype,
        "reference_dtype": name_of(comparison.reference.dtype),
        "qinfer": qinfer.__version__,
        "torch": torch.__version__,
    }
