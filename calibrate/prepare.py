"""Settles what a quantize run is to do, with every mistake told before any weight of a layer is read."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from qinfer.calibrate.data import DEFAULT_SEED, Document, calibration_sequences
from qinfer.calibrate.devices import chosen_device
from qinfer.calibrate.job import QuantizeJob
from qinfer.calibrate.kv_scales import check_kind
from qinfer.calibrate.recipe import settle
from qinfer.calibrate.rotations import RotatedCheckpoint
from qinfer.calibrate.selftext import Generate, engine_generate
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.writer import check_out
from qinfer.errors import UserError
from qinfer.tokenizer import Tokenizer

NUM_SAMPLES = 16
MAX_SEQ_LEN = 512

logger = logging.getLogger(__name__)


def prepare(
    source: Checkpoint,
    tokenizer: Tokenizer,
    out: Path,
    *,
    scheme: str = "int8",
    method: str | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    ranges: str | None = None,
    kv_scales: str | None = None,
    mixing: bool = False,
    rotate: bool = False,
    calibration: str | Iterable[Document] | None = None,
    num_samples: int | None = None,
    max_seq_len: int | None = None,
    seed: int = DEFAULT_SEED,
    overwrite: bool = False,
    resume: bool = True,
    device: str | None = None,
    generate: Generate | None = None,
    progress: bool = True,
) -> QuantizeJob:
    """Settles a job: recipe first, then the text, both before any weight of a layer is read.

    `device` is "auto" (or None: a GPU where there is one), "cpu", "cuda" or "cuda:N". `generate` writes
    self-written text; None loads the source into the engine when that is called for. `rotate` merges
    rotations into the weights first. `mixing` says that sensitivities will be measured, which takes text
    whatever the method.
    Raises UserError as `settle` and `calibration_sequences` do, for a source that is quantized already, an
    `out` that holds something, and a length beyond the model's context.
    """
    if source.is_quantized:
        raise UserError(f"{source.path} is quantized already: give the original model", "model")
    recipe = settle(source.config, scheme, method, group_size=group_size, symmetric=symmetric, ranges=ranges)
    where = chosen_device(device)
    if rotate and source.config.num_experts:
        raise UserError("rotations are not for mixtures of experts: leave out --rotate", "rotate")
    if rotate:
        source, note = _rotated(source, seed)
        recipe = recipe._replace(notes=(*recipe.notes, note))
    check_kind(kv_scales)
    for note in recipe.notes:
        logger.warning(note)
    check_out(source, out, overwrite=overwrite)  # refuses now what it would refuse later
    context = source.config.context_len
    if max_seq_len is not None and max_seq_len > context:
        raise UserError(f"max_seq_len is {max_seq_len}, the model's context {context} tokens", "max_seq_len")
    data = None
    if recipe.needs_text or kv_scales is not None or mixing:
        data = calibration_sequences(
            calibration,
            tokenizer,
            generate or engine_generate(source, tokenizer, device=where, progress=progress),
            num_samples=NUM_SAMPLES if num_samples is None else num_samples,
            max_seq_len=min(MAX_SEQ_LEN, context) if max_seq_len is None else max_seq_len,
            seed=seed,
        )
    elif calibration is not None:
        logger.warning("%s looks at the weights alone: the calibration text is not read", recipe.method)
    return QuantizeJob(
        source, out, recipe, data, overwrite, kv_scales=kv_scales, seed=seed, resume=resume, device=where
    )


def _rotated(source: Checkpoint, seed: int) -> tuple[Checkpoint, str]:
    rotated = RotatedCheckpoint(source, seed)
    if source.config.sandwich_norms:
        return rotated, "only the heads' values are rotated: this family's norms keep the stream as it is"
    extra = " and lm_head, which was the embedding, is a matrix of its own" if rotated.unties else ""
    return rotated, f"the residual stream and the heads' values are rotated{extra}"
