"""A run in mixed precision: measure what each unit costs, raise the worst, to a budget or until it passes.

Costs are measured once, for units rounded to nearest. They are not quite those that the method will leave,
and they do not quite add up. So a verdict is never guessed: after each step the whole model is quantized
again and judged again by whoever called. That is the repair for a checkpoint that its gate fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import torch

from qinfer.calibrate.devices import fast_dtype, working_on
from qinfer.calibrate.job import QuantizeJob, unit_name
from qinfer.calibrate.mixing import average_bits, cure_of, next_step, ranked, within_budget
from qinfer.calibrate.pace import Pace
from qinfer.calibrate.pipeline import run
from qinfer.calibrate.report import QuantizeReport
from qinfer.calibrate.sensitivity import MEASURED_PARAMETERS, TOKENS, Unit, sensitivities
from qinfer.checkpoint.checkpoint import CPU
from qinfer.checkpoint.names import global_tensors, layer_groups, layer_modules, layer_tensors, num_weights
from qinfer.config import ModelConfig
from qinfer.quant import W4A16, Scheme

_KL_PASSES = 7  # over the logits of a unit: their logarithms of shares, and what these are compared with
_THERE_AND_BACK = 3  # times a pass through the model, for the gradients

logger = logging.getLogger(__name__)


def with_costs(job: QuantizeJob, *, progress: bool = True) -> QuantizeJob:
    """The job with the KL that each unit costs alone: measured, or estimated above a billion parameters."""
    assert job.data is not None, "a job that mixes is prepared with text"
    measured = _is_measured(job.source.config)
    with working_on(job.device):
        costs = sensitivities(
            job.source,
            job.data.sequences,
            job.recipe.scheme,
            storage=job.storage,
            # in bfloat16 any change at all costs 0.001 nats, as much as most units of SmolLM2-135M in 4 bits
            dtype=torch.float32 if measured else job.dtype or fast_dtype(CPU),
            measured=measured,
            device=job.device,
            progress=progress,
        )
    return replace(job, costs=costs)


def _is_measured(config: ModelConfig) -> bool:
    return config.num_layers * num_weights(config, layer_modules(config)) <= MEASURED_PARAMETERS


def whole_bytes(config: ModelConfig) -> int:
    """What the weights take while costs are measured (float32) or estimated, with all loaded at once."""
    shapes = [*global_tensors(config).values()]
    for i in range(config.num_layers):
        shapes += layer_tensors(config, i).values()
    item = torch.float32 if _is_measured(config) else fast_dtype(CPU)
    return sum(map(prod, shapes)) * item.itemsize


def measuring_seconds(config: ModelConfig, num_tokens: int, pace: Pace) -> float:
    """How long `with_costs` takes: half the model and the head for each unit, or all once there and back."""
    layer, tokens = num_weights(config, layer_modules(config)), min(num_tokens, TOKENS)
    units = config.num_layers * len(layer_groups(config))
    head = 2.0 * tokens * config.hidden_size * config.vocab_size
    whole = 2.0 * tokens * config.num_layers * layer
    if not _is_measured(config):
        return _THERE_AND_BACK * (whole + head) / pace.products
    unit = (whole / 2 + head) / pace.float32 + _KL_PASSES * tokens * config.vocab_size / pace.passes
    return (whole + head) / pace.float32 + units * unit


def within(job: QuantizeJob, budget: float) -> QuantizeJob:
    """The job with its worst units raised as far as `budget` bits per weight allow, or UserError."""
    config, scheme = job.source.config, job.recipe.scheme
    mix = within_budget(config, order_of(job), scheme, budget, job.storage.itemsize)
    _say_who_reads(scheme)
    return replace(job, mix=mix)


def _say_who_reads(scheme: Scheme) -> None:
    if isinstance(scheme, W4A16) and not scheme.symmetric:
        logger.warning(
            "mixed precision with zero points is read by qinfer and vLLM; transformers with "
            "compressed-tensors 0.18 or newer does not load it, but does with --sym"
        )


def order_of(job: QuantizeJob) -> list[Unit]:
    """Units, the one whose cure gains most per bit first."""
    return ranked(job.source.config, job.costs, job.recipe.scheme, job.storage.itemsize)


def resumed(job: QuantizeJob, made: QuantizeReport) -> QuantizeJob:
    """The job at the step that `made` tells of, whose costs need not be measured again."""
    config, cure = job.source.config, cure_of(job.recipe.scheme)
    units = [(i, group.name) for i in range(config.num_layers) for group in layer_groups(config)]
    return replace(
        job,
        costs={unit: made.sensitivity[unit_name(unit)] for unit in units},
        mix={unit: cure for unit in units if unit_name(unit) in made.mix},
    )


def run_until(
    job: QuantizeJob,
    passes: Callable[[QuantizeReport], bool],
    *,
    made: QuantizeReport | None = None,
    budget: float | None = None,
    progress: bool = True,
    extra_files: Mapping[str, str] | None = None,
) -> QuantizeReport:
    """Quantizes and asks `passes`; while it says no, raises the next tenth of the units and does so again.

    `made` is the report where the job's checkpoint lies there already. Ends with what was made last where all
    units are raised, or the next step would exceed `budget`.
    """
    order = order_of(job)
    _say_who_reads(job.recipe.scheme)
    report = made or run(job, progress=progress, extra_files=extra_files)
    while not passes(report):
        mix = next_step(order, job.mix, job.recipe.scheme)
        bits = average_bits(job.source.config, job.recipe.scheme, mix, job.storage.itemsize)
        if mix == job.mix or (budget is not None and bits > budget):
            logger.warning(
                "not passed with %d of %d units raised, and %s",
                len(job.mix),
                len(order),
                "none is left" if mix == job.mix else f"the next step would take {bits:.2f} bits per weight",
            )
            return report
        logger.warning("not passed: raising %d of %d units, %.2f bits per weight", len(mix), len(order), bits)
        job = replace(job, mix=mix, overwrite=True)
        report = run(job, progress=progress, extra_files=extra_files)
    return report
