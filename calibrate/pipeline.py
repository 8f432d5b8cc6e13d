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
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from qinfer.calibrate import health, needs
from qinfer.calibrate.block import Batch, embed_batches, load_block
from qinfer.calibrate.devices import working_on
from qinfer.calibrate.job import QuantizeJob, unit_name
from qinfer.calibrate.journal import Journal
from qinfer.calibrate.kv_scales import SIDECAR, scale_tensors, sidecar
from qinfer.calibrate.layer import LayerPlan, QuantizedLayer, quantize_layer
from qinfer.calibrate.mixing import average_bits
from qinfer.calibrate.report import FILE_NAME, LayerReport, QuantizeReport
from qinfer.calibrate.report_page import MARKDOWN_NAME, PAGE_NAME, html, markdown
from qinfer.checkpoint.names import layer_groups, layer_modules, layer_tensors
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.engine.footprint import format_size
from qinfer.env import host_memory
from qinfer.errors import CheckpointError, UserError
from qinfer.quant import Dense

PROPAGATED = "outputs of the quantized layers before it"

STREAMS = ".streams"  # folder for hidden states that do not fit into memory

logger = logging.getLogger(__name__)


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
        with torch.inference_mode(), working_on(job.device):
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


def _run(
    job: QuantizeJob,
    writer: CheckpointWriter,
    journal: Journal,
    progress: bool,
    extra_files: Mapping[str, str],
) -> QuantizeReport:
    start, before = time.perf_counter(), len(journal.done)
    _quantize_layers(job, writer, journal, progress)
    config = job.source.config
    in_layers = {name for i in range(config.num_layers) for name in layer_tensors(config, i)}
    for name in sorted(job.source.names() - in_layers):
        _write(writer, name, job.source.tensor(name))
    health.check_complete(job.expected_names(), writer.names)
    result = _report(job, journal.done, seconds=time.perf_counter() - start, resumed=before)
    sizes = {"num_bytes": result.bytes_after, "source_bytes": result.bytes_before}
    writer.finish(
        job.configuration(),
        {**_reports(job, result), **extra_files},
        lambda written: health.check_written(written, job.scheme_of_module, **sizes),
    )
    return result


def _quantize_layers(job: QuantizeJob, writer: CheckpointWriter, journal: Journal, progress: bool) -> None:
    """Those that the journal does not have yet, one after another, each safe on the disk before the next."""
    count, done = job.source.config.num_layers, len(journal.done)
    batches = _batches(job, writer.folder)
    states = {"hidden": batches}
    writer.restore(journal.pieces)
    journal.restore(states, last=done == count)
    label = f"{job.recipe.scheme.label}, {job.recipe.method}"
    for index in tqdm(range(done, count), label, count, initial=done, disable=not progress):
        layer = _quantize_layer(job, index, batches)
        for name, tensor in layer.tensors.items():
            _write(writer, name, tensor)
        journal.record(layer.report, writer.commit(), states, last=index == count - 1)


def _write(writer: CheckpointWriter, name: str, tensor: Tensor) -> None:
    health.check_finite(name, tensor)
    writer.add(name, tensor)


def _report(
    job: QuantizeJob, layers: Sequence[LayerReport], *, seconds: float, resumed: int
) -> QuantizeReport:
    config, scheme = job.source.config, job.recipe.scheme
    return QuantizeReport(
        scheme=scheme.label,
        method=job.recipe.method,
        ranges=job.recipe.ranges,
        notes=job.recipe.notes,
        calibration=None if job.data is None else job.data.record(),
        propagated=PROPAGATED,
        seconds=seconds,
        resumed=resumed,
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


def _reports(job: QuantizeJob, result: QuantizeReport) -> dict[str, str]:
    """Files that go beside the weights."""
    files = {FILE_NAME: result.to_json(), PAGE_NAME: html(result), MARKDOWN_NAME: markdown(result)}
    if job.kv_scales == "int8-head":
        maxima = [{x: torch.tensor(of) for x, of in layer.kv_absmax.items()} for layer in result.layers]
        files[SIDECAR] = sidecar(dict(enumerate(maxima)))
    return files


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
