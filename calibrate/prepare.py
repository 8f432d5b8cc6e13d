"""Settles what a quantize run is to do, with every mistake told before any weight of a layer is read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from qinfer.calibrate.data import CalibrationData, calibration_sequences
from qinfer.calibrate.devices import chosen_device
from qinfer.calibrate.job import QuantizeJob
from qinfer.calibrate.mixing import check_budget
from qinfer.calibrate.recipe import Recipe, settle
from qinfer.calibrate.rotations import RotatedCheckpoint
from qinfer.calibrate.selftext import Generate, engine_generate
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.writer import check_out
from qinfer.config import ModelConfig
from qinfer.dtypes import DTYPES
from qinfer.errors import UserError
from qinfer.tokenizer import Tokenizer

NUM_SAMPLES = 16
MAX_SEQ_LEN = 512

logger = logging.getLogger(__name__)


class TextSize(NamedTuple):
    """How much text is read: at most so many sequences, of at most so many tokens."""

    num_samples: int
    max_seq_len: int

    @classmethod
    def of(cls, settings: Settings, config: ModelConfig) -> TextSize:
        """UserError for sequences beyond the model's context."""
        asked, context = settings.max_seq_len, config.context_len
        if asked is not None and asked > context:
            raise UserError(f"max_seq_len is {asked}, the model's context {context} tokens", "max_seq_len")
        return cls(settings.num_samples or NUM_SAMPLES, asked or min(MAX_SEQ_LEN, context))


def settle_recipe(
    source: Checkpoint, settings: Settings, out: Path, *, budget: float | None = None, overwrite: bool = False
) -> Recipe:
    """The recipe for this model, for a folder that may be written.

    Raises UserError as `settle` and `check_budget` do, for a source that is quantized already or has nothing
    to rotate, and an `out` that holds something.
    """
    if source.is_quantized:
        raise UserError(f"{source.path} is quantized already: give the original model", "model")
    recipe = settle(
        source.config,
        settings.scheme,
        settings.method,
        group_size=settings.group_size,
        symmetric=settings.symmetric,
        ranges=settings.ranges,
    )
    if budget is not None:
        check_budget(source.config, recipe.scheme, budget, DTYPES[source.config.dtype].itemsize)
    if settings.rotate and source.config.num_experts:
        raise UserError("rotations are not for mixtures of experts: leave out --rotate", "rotate")
    check_out(source, out, overwrite=overwrite)  # refuses now what it would refuse later
    return recipe


def needs_text(recipe: Recipe, settings: Settings, *, mixing: bool) -> bool:
    """Whether the model reads text: for its method, for KV scales, or for what its units cost (`mixing`)."""
    return recipe.needs_text or settings.kv_scales is not None or mixing


def prepare_job(
    source: Checkpoint,
    tokenizer: Tokenizer,
    out: Path,
    settings: Settings,
    *,
    mixing: bool = False,
    budget: float | None = None,
    overwrite: bool = False,
    resume: bool = True,
    generate: Generate | None = None,
    progress: bool = True,
) -> QuantizeJob:
    """Settles a job: recipe first, then the text, both before any weight of a layer is read.

    `generate` writes self-written text; None loads the source into the engine when that is called for.
    `mixing` says that sensitivities will be measured, which takes text whatever the method; `budget` is the
    average of bits per weight that they may be raised to.
    Raises UserError as `settle_recipe`, `TextSize.of` and `calibration_sequences` do.
    """
    recipe = settle_recipe(source, settings, out, budget=budget, overwrite=overwrite)
    device = chosen_device(settings.device)
    if settings.rotate:
        source, note = _rotated(source, settings.seed)
        recipe = recipe._replace(notes=(*recipe.notes, note))
    for note in recipe.notes:
        logger.warning(note)
    size = TextSize.of(settings, source.config)
    data = None
    if needs_text(recipe, settings, mixing=mixing):
        generate = generate or engine_generate(source, tokenizer, device=device, progress=progress)
        data = _text(tokenizer, generate, settings, size)
    elif settings.calibration is not None:
        logger.warning("%s looks at the weights alone: the calibration text is not read", recipe.method)
    return QuantizeJob(
        source,
        out,
        recipe,
        data,
        overwrite,
        kv_scales=settings.kv_scales,
        seed=settings.seed,
        resume=resume,
        device=device,
    )


def _text(tokenizer: Tokenizer, generate: Generate, settings: Settings, size: TextSize) -> CalibrationData:
    return calibration_sequences(
        settings.calibration,
        tokenizer,
        generate,
        num_samples=size.num_samples,
        max_seq_len=size.max_seq_len,
        seed=settings.seed,
    )


def _rotated(source: Checkpoint, seed: int) -> tuple[Checkpoint, str]:
    rotated = RotatedCheckpoint(source, seed)
    if source.config.sandwich_norms:
        return rotated, "only the heads' values are rotated: this family's norms keep the stream as it is"
    extra = " and lm_head, which was the embedding, is a matrix of its own" if rotated.unties else ""
    return rotated, f"the residual stream and the heads' values are rotated{extra}"
