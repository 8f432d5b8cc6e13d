"""One quantize run, layer by layer, with one layer's weights in memory at a time.

    embed the calibration sequences
    for each layer: load it -> quantize it (layer.py), which makes the next layer's inputs -> write it
    copy what is not quantized, check, rename the folder into place

Each layer, and each linear within it, thus sees the errors that those before it really make (as GPTQ does it,
and llm-compressor by default), not the activations of the dense model. Round-to-nearest looks at no
activation, so it runs none.

On a processor with bfloat16 matrix units activations are bfloat16, elsewhere float32. On one layer of
SmolLM2-135M both made the same choices, and bfloat16 took 0.6 of the processor time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import qinfer
from qinfer.calibrate import health
from qinfer.calibrate.block import Batch, embed_batches, load_block
from qinfer.calibrate.data import DEFAULT_SEED, CalibrationData, Document, calibration_sequences
from qinfer.calibrate.journal import Journal
from qinfer.calibrate.kv_scales import SIDECAR, check_kind, kv_cache_scheme, scale_tensors, sidecar
from qinfer.calibrate.layer import LayerPlan, QuantizedLayer, quantize_layer
from qinfer.calibrate.mixing import average_bits, unit_bits
from qinfer.calibrate.recipe import PRESETS, Recipe, settle
from qinfer.calibrate.report import FILE_NAME, QuantizeReport
from qinfer.calibrate.report_page import MARKDOWN_NAME, PAGE_NAME, html, markdown
from qinfer.calibrate.rotations import RotatedCheckpoint
from qinfer.calibrate.selftext import Generate, engine_generate
from qinfer.calibrate.sensitivity import Unit
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import (
    all_modules,
    layer_groups,
    layer_modules,
    layer_prefix,
    layer_tensors,
    unquantized,
)
from qinfer.checkpoint.writer import CheckpointWriter, check_out
from qinfer.env import cpu_features
from qinfer.errors import CheckpointError, UserError
from qinfer.quant import Dense, Scheme
from qinfer.tokenizer import Tokenizer

__all__ = ["PRESETS", "QuantizeJob", "prepare", "run"]

NUM_SAMPLES = 16
MAX_SEQ_LEN = 512
SEARCH_TOKENS = 2048  # tokens that every candidate is tried on; statistics use all
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PROPAGATED = "outputs of the quantized layers before it"

_CPU = torch.device("cpu")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizeJob:
    """Everything that a run needs, settled and checked; `data` is None for a method that needs no text."""

    source: Checkpoint
    out: Path
    recipe: Recipe
    data: CalibrationData | None
    overwrite: bool = False
    dtype: torch.dtype | None = None  # of activations while calibrating; None: what the processor is fast at
    kv_scales: str | None = None  # one of kv_scales.KV_SCALES
    mix: Mapping[Unit, Scheme] = field(default_factory=dict)  # units that have a scheme of their own
    costs: Mapping[Unit, float] = field(default_factory=dict)  # KL of each unit alone, where it was measured
    seed: int = DEFAULT_SEED
    resume: bool = True  # whether to go on with what the same command left unfinished

    @property
    def storage(self) -> torch.dtype:
        """The checkpoint's dtype, in which scales are stored."""
        dtype = getattr(torch, self.source.config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def activations(self) -> torch.dtype:
        """The dtype of activations while calibrating."""
        return self.dtype or fast_dtype()

    def identity(self) -> dict[str, Any]:
        """All that decides a bit of the result, for JSON."""
        stats = {file.name: file.stat() for file in self.source.weight_files}
        return {
            "qinfer": qinfer.__version__,
            "torch": torch.__version__,
            "source": str(self.source.path.resolve()),
            "weights": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "read as": type(self.source).__name__,
            "scheme": self.recipe.scheme.label,
            "method": self.recipe.method,
            "ranges": self.recipe.ranges,
            "seed": self.seed,
            "activations": str(self.activations).removeprefix("torch."),
            "kv_scales": self.kv_scales,
            "calibration": None if self.data is None else self.data.record(),
            "mix": {unit_name(unit): scheme.label for unit, scheme in sorted(self.mix.items())},
        }

    def scheme_of(self, index: int, group: str) -> Scheme:
        """The scheme of one group of one layer."""
        return self.mix.get((index, group), self.recipe.scheme)

    def scheme_of_module(self, module: str) -> Scheme:
        """The scheme of a linear by its full name."""
        return self._schemes[module]

    @cached_property
    def _schemes(self) -> dict[str, Scheme]:
        config = self.source.config
        return {
            layer_prefix(config, i) + module: self.scheme_of(i, group.name)
            for i in range(config.num_layers)
            for group in layer_groups(config)
            for module in group.modules
        }


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
    generate: Generate | None = None,
    progress: bool = True,
) -> QuantizeJob:
    """Settles a job: recipe first, then the text, both before any weight of a layer is read.

    `generate` writes self-written text; None loads the source into the engine when that is called for.
    `rotate` merges rotations into the weights first. `mixing` says that sensitivities will be measured, which
    takes text whatever the method.
    Raises UserError as `settle` and `calibration_sequences` do, for a source that is quantized already, an
    `out` that holds something, and a length beyond the model's context.
    """
    if source.is_quantized:
        raise UserError(f"{source.path} is quantized already: give the original model", "model")
    recipe = settle(source.config, scheme, method, group_size=group_size, symmetric=symmetric, ranges=ranges)
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
            generate or engine_generate(source, tokenizer, progress=progress),
            num_samples=NUM_SAMPLES if num_samples is None else num_samples,
            max_seq_len=min(MAX_SEQ_LEN, context) if max_seq_len is None else max_seq_len,
            seed=seed,
        )
    elif calibration is not None:
        logger.warning("%s looks at the weights alone: the calibration text is not read", recipe.method)
    return QuantizeJob(source, out, recipe, data, overwrite, kv_scales=kv_scales, seed=seed, resume=resume)


def _rotated(source: Checkpoint, seed: int) -> tuple[Checkpoint, str]:
    rotated = RotatedCheckpoint(source, seed)
    if source.config.sandwich_norms:
        return rotated, "only the heads' values are rotated: this family's norms keep the stream as it is"
    extra = " and lm_head, which was the embedding, is a matrix of its own" if rotated.unties else ""
    return rotated, f"the residual stream and the heads' values are rotated{extra}"


def run(
    job: QuantizeJob, *, progress: bool = True, extra_files: Mapping[str, str] | None = None
) -> QuantizeReport:
    """Quantizes, writes and checks; `out` appears when all of it succeeds, whole.

    A run that is stopped after a layer leaves its journal, and the same job goes on from there; faults of the
    weights leave nothing. `extra_files` are texts by name that appear together with the checkpoint. Raises
    CheckpointError for weights that cannot be quantized and a result that cannot be served, UserError where
    memory does not suffice, and where another job's unfinished work is in the way.
    """
    writer = CheckpointWriter(job.source, job.out, overwrite=job.overwrite, keep=job.resume)
    try:
        journal = Journal(writer.folder, job.identity())
    except BaseException:
        writer.release()
        raise
    try:
        with torch.inference_mode():
            return _run(job, writer, journal, progress, extra_files or {})
    except BaseException as error:
        if isinstance(error, CheckpointError) or not journal.done:
            writer.abort()
        else:
            finished = f"{len(journal.done)} of {job.source.config.num_layers}"
            logger.warning("stopped with %s layers finished: the same command goes on from there", finished)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error):
            raise UserError(
                "memory does not suffice for this calibration: lower num_samples or max_seq_len",
                "num_samples",
            ) from error
        raise
    finally:
        writer.release()


def _run(
    job: QuantizeJob,
    writer: CheckpointWriter,
    journal: Journal,
    progress: bool,
    extra_files: Mapping[str, str],
) -> QuantizeReport:
    config, scheme = job.source.config, job.recipe.scheme
    start = time.perf_counter() - journal.seconds

    def write(name: str, tensor: Tensor) -> None:
        health.check_finite(name, tensor)
        writer.add(name, tensor)

    batches: list[Batch] = []
    if job.data is not None:
        batches = embed_batches(
            job.source, job.data.sequences, search_tokens=SEARCH_TOKENS, device=_CPU, dtype=job.activations
        )
    states = {"hidden": batches}
    writer.restore(journal.pieces)
    journal.restore(states, last=len(journal.done) == config.num_layers)
    label = f"{scheme.label}, {job.recipe.method}"
    left = range(len(journal.done), config.num_layers)
    for index in tqdm(left, label, config.num_layers, initial=len(journal.done), disable=not progress):
        layer = _quantize_layer(job, index, batches)
        for name, tensor in layer.tensors.items():
            write(name, tensor)
        seconds = time.perf_counter() - start
        journal.record(layer.report, writer.commit(), states, seconds=seconds, last=index == left[-1])
    layers = journal.done
    in_layers = {name for i in range(config.num_layers) for name in layer_tensors(config, i)}
    for name in sorted(job.source.names() - in_layers):
        write(name, job.source.tensor(name))
    health.check_complete(_expected_names(job), writer.names)
    result = QuantizeReport(
        scheme=scheme.label,
        method=job.recipe.method,
        ranges=job.recipe.ranges,
        notes=job.recipe.notes,
        calibration=None if job.data is None else job.data.record(),
        propagated=PROPAGATED,
        seconds=time.perf_counter() - start,
        bytes_before=_weight_bytes(job, Dense()),
        bytes_after=_weight_bytes(job, None),
        average_bits=average_bits(config, scheme, job.mix, job.storage.itemsize),
        mix={unit_name(unit): other.label for unit, other in job.mix.items()},
        sensitivity={unit_name(unit): cost for unit, cost in job.costs.items()},
        kv_scales=job.kv_scales,
        settings=job.identity(),
        health=health.CHECKS,
        layers=tuple(layers),
    )
    pages = {PAGE_NAME: html(result), MARKDOWN_NAME: markdown(result)}
    files = {FILE_NAME: result.to_json(), **pages, **extra_files}
    if job.kv_scales == "int8-head":
        files[SIDECAR] = sidecar(
            {i: {x: torch.tensor(of) for x, of in layer.kv_absmax.items()} for i, layer in enumerate(layers)}
        )
    sizes = {"num_bytes": result.bytes_after, "source_bytes": result.bytes_before}
    writer.finish(
        _configuration(job),
        files,
        lambda written: health.check_written(written, job.scheme_of_module, **sizes),
    )
    return result


def unit_name(unit: Unit) -> str:
    """A unit in words."""
    return f"layer {unit[0]} {unit[1]}"


def _weight_bytes(job: QuantizeJob, scheme: Scheme | None) -> int:
    """Of all tensors in the files; every linear in `scheme`, or in its own where that is None."""
    config, item = job.source.config, job.storage.itemsize
    linears = {f"{module}.weight" for module in all_modules(config)}
    headers = [job.source.header(name) for name in job.source.names() - linears]
    others = sum(prod(shape) * _ITEM_BYTES[dtype] for shape, dtype in headers)
    units = [(i, group.name) for i in range(config.num_layers) for group in layer_groups(config)]
    bits = sum(unit_bits(config, group, scheme or job.scheme_of(i, group), item) for i, group in units)
    return others + bits // 8


def _expected_names(job: QuantizeJob) -> set[str]:
    config = job.source.config
    names = health.expected_names(config, job.scheme_of_module, job.source.names())
    if kv_cache_scheme(job.kv_scales) is not None:
        prefixes = [layer_prefix(config, i) for i in range(config.num_layers)]
        names |= {f"{prefix}self_attn.{x}_scale" for prefix in prefixes for x in "kv"}
    return names


def _configuration(job: QuantizeJob) -> dict[str, Any]:
    exceptions = {m: job.scheme_of_module(m) for m in all_modules(job.source.config)}
    return quantization_config(
        job.recipe.scheme,
        ignore=unquantized(job.source.config),
        exceptions={m: s for m, s in exceptions.items() if s != job.recipe.scheme},
        kv_cache_scheme=kv_cache_scheme(job.kv_scales),
    )


def _quantize_layer(job: QuantizeJob, index: int, batches: list[Batch]) -> QuantizedLayer:
    """The quantized layer, its tensors by full name; the batches move on through it."""
    config, recipe = job.source.config, job.recipe
    plan = LayerPlan(
        config,
        index,
        {group.name: job.scheme_of(index, group.name) for group in layer_groups(config)},
        recipe.transform,
        recipe.ranges,
        recipe.by_gptq,
        job.storage,
        _CPU,
        job.activations,
    )
    layer = quantize_layer(plan, load_block(job.source, index), batches)
    named = {plan.prefix + name: tensor for name, tensor in layer.tensors.items()}
    linears = {f"{plan.prefix}{module}.weight" for module in layer_modules(config)}
    for name in (layer_tensors(config, index).keys() & named.keys() & job.source.names()) - linears:
        named[name] = named[name].to(job.source.tensor(name).dtype)  # norms, biases, a router: as they were
    if job.kv_scales is not None:
        scales = scale_tensors(job.kv_scales, layer.kv_maxima, job.storage)
        named |= {plan.prefix + name: tensor for name, tensor in scales.items()}
    return layer._replace(tensors=named)


def fast_dtype() -> torch.dtype:
    """Of activations: bfloat16 where the processor has matrix units for it, else float32."""
    return torch.bfloat16 if "amx_bf16" in cpu_features() else torch.float32
