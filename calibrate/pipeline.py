"""One quantize run, layer by layer, with one layer's weights in memory at a time.

    embed the calibration sequences
    for each layer: load it -> quantize it (layer.py), which makes the next layer's inputs -> write it
    copy what is not quantized, check, rename the folder into place

Each layer, and each linear within it, thus sees the errors that those before it really make (as GPTQ does it,
and llm-compressor by default), not the activations of the dense model. Round-to-nearest looks at no
activation, so it runs none.

The device, a GPU where there is one, holds one layer and one batch of sequences; rest.py says where the
streams of the others wait.

On a processor with bfloat16 matrix units activations are bfloat16, elsewhere float32. On one layer of
SmolLM2-135M both made the same choices, and bfloat16 took 0.6 of the processor time.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from qinfer.calibrate import health, needs
from qinfer.calibrate.block import Batch, embed_batches, load_block
from qinfer.calibrate.data import DEFAULT_SEED, Document, calibration_sequences
from qinfer.calibrate.job import QuantizeJob, chosen_device, unit_name
from qinfer.calibrate.journal import Journal
from qinfer.calibrate.kv_scales import SIDECAR, check_kind, scale_tensors, sidecar
from qinfer.calibrate.layer import LayerPlan, QuantizedLayer, quantize_layer
from qinfer.calibrate.mixing import average_bits
from qinfer.calibrate.recipe import PRESETS, settle
from qinfer.calibrate.report import FILE_NAME, QuantizeReport
from qinfer.calibrate.report_page import MARKDOWN_NAME, PAGE_NAME, html, markdown
from qinfer.calibrate.rotations import RotatedCheckpoint
from qinfer.calibrate.selftext import Generate, engine_generate
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import (
    layer_groups,
    layer_modules,
    layer_tensors,
)
from qinfer.checkpoint.writer import CheckpointWriter, check_out
from qinfer.engine.footprint import format_size
from qinfer.env import host_memory
from qinfer.errors import CheckpointError, UserError
from qinfer.quant import Dense
from qinfer.tokenizer import Tokenizer

__all__ = ["PRESETS", "QuantizeJob", "prepare", "run"]

NUM_SAMPLES = 16
MAX_SEQ_LEN = 512
PROPAGATED = "outputs of the quantized layers before it"

STREAMS = ".streams"  # folder for hidden states that do not fit into memory

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
        with torch.inference_mode(), _working_on(job.device):
            return _run(job, writer, journal, progress, extra_files or {})
    except BaseException as error:
        if isinstance(error, CheckpointError) or not journal.done:
            writer.abort()
        else:
            finished = f"{len(journal.done)} of {job.source.config.num_layers}"
            logger.warning("stopped with %s layers finished: the same command goes on from there", finished)
        if isinstance(error, torch.OutOfMemoryError):
            raise UserError(
                f"the memory of {job.device} does not suffice for one layer of this calibration: see "
                "--dry-run, free some of it, or choose --device cpu (device='cpu')",
                "device",
            ) from error
        if isinstance(error, MemoryError) or "not enough memory" in str(error):
            raise UserError(
                "memory does not suffice for this calibration: lower num_samples or max_seq_len",
                "num_samples",
            ) from error
        raise
    finally:
        shutil.rmtree(writer.folder / STREAMS, ignore_errors=True)
        writer.release()


@contextmanager
def _working_on(device: torch.device) -> Iterator[None]:
    """Kernels run on this device; what torch keeps of a GPU's memory is given back at the end."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def _run(
    job: QuantizeJob,
    writer: CheckpointWriter,
    journal: Journal,
    progress: bool,
    extra_files: Mapping[str, str],
) -> QuantizeReport:
    config, scheme = job.source.config, job.recipe.scheme
    start, before = time.perf_counter(), len(journal.done)

    def write(name: str, tensor: Tensor) -> None:
        health.check_finite(name, tensor)
        writer.add(name, tensor)

    batches = _batches(job, writer.folder)
    states = {"hidden": batches}
    writer.restore(journal.pieces)
    journal.restore(states, last=len(journal.done) == config.num_layers)
    label = f"{scheme.label}, {job.recipe.method}"
    left = range(len(journal.done), config.num_layers)
    for index in tqdm(left, label, config.num_layers, initial=len(journal.done), disable=not progress):
        layer = _quantize_layer(job, index, batches)
        for name, tensor in layer.tensors.items():
            write(name, tensor)
        journal.record(layer.report, writer.commit(), states, last=index == left[-1])
    layers = journal.done
    in_layers = {name for i in range(config.num_layers) for name in layer_tensors(config, i)}
    for name in sorted(job.source.names() - in_layers):
        write(name, job.source.tensor(name))
    health.check_complete(job.expected_names(), writer.names)
    result = QuantizeReport(
        scheme=scheme.label,
        method=job.recipe.method,
        ranges=job.recipe.ranges,
        notes=job.recipe.notes,
        calibration=None if job.data is None else job.data.record(),
        propagated=PROPAGATED,
        seconds=time.perf_counter() - start,
        resumed=before,
        bytes_before=job.weight_bytes(Dense()),
        bytes_after=job.weight_bytes(None),
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
        job.configuration(),
        files,
        lambda written: health.check_written(written, job.scheme_of_module, **sizes),
    )
    return result


def _batches(job: QuantizeJob, folder: Path) -> list[Batch]:
    """The text, embedded; its streams wait in memory, or in files of `folder` where they would not fit."""
    if job.data is None:
        return []
    free = host_memory().available
    spills = needs.spills(job.work, free)
    if spills:
        size = format_size(job.work.stream_bytes)
        logger.warning("hidden states of %s wait on the disk: %s of memory are free", size, format_size(free))
    return embed_batches(
        job.source,
        job.data.sequences,
        search_tokens=needs.SEARCH_TOKENS,
        device=job.device,
        dtype=job.activations,
        folder=folder / STREAMS if spills else None,
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
        job.device,
        job.activations,
    )
    layer = quantize_layer(plan, load_block(job.source, index, job.device), batches)
    named = {plan.prefix + name: tensor for name, tensor in layer.tensors.items()}
    linears = {f"{plan.prefix}{module}.weight" for module in layer_modules(config)}
    for name in (layer_tensors(config, index).keys() & named.keys() & job.source.names()) - linears:
        named[name] = named[name].to(job.source.tensor(name).dtype)  # norms, biases, a router: as they were
    if job.kv_scales is not None:
        scales = scale_tensors(job.kv_scales, layer.kv_maxima, job.storage)
        named |= {plan.prefix + name: tensor for name, tensor in scales.items()}
    return layer._replace(tensors=named)
