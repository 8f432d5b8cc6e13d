"""Compiles what a model's steps will launch, before the first request.

A kernel's variant depends on the model's shapes, which are all there, and on a step's number of tokens or
sequences only by size classes: the tables' rows end at powers of two, the formulas' somewhere between. So a
step of every power of two, and of one and a half times that, asks for all. The steps run as real ones do, but
nothing is computed by kernels (`backend.compiling_ahead`), nothing is stored in the pages, and of layers that
are alike two or three speak for all.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from qinfer import backend, ops
from qinfer.engine.graphs import capture, why_it_waits
from qinfer.engine.options import StepLimits
from qinfer.engine.plan import Chunk, StepPlan, shapes
from qinfer.engine.runner import Runner
from qinfer.model.decoder import Decoder
from qinfer.model.layer import Layer
from qinfer.model.parts import Mlp

logger = logging.getLogger(__name__)


def make_ready(runner: Runner, *, eager: bool) -> None:
    """Captures the graphs of a runner whose kernels are compiled; none where `eager` or ops run meanings.

    Where a step of this model waits for the device, that is said, and steps are neither captured nor padded.
    """
    if runner.decoder.device.type == "cpu" or not backend.runs_kernels():
        return
    if (reason := why_it_waits(runner)) is not None:
        logger.warning("no CUDA graphs: a step of this model waits for the device (%s)", reason)
        runner.buffers = None
    elif not eager:
        runner.graphs = capture(runner)


def compile_kernels(runner: Runner) -> None:
    """Compiles the kernels of every step within the runner's limits, which pads none if its model waits."""
    assert runner.buffers is not None
    with backend.compiling_ahead(), _few_layers(runner.decoder):
        if why_it_waits(runner) is None:
            for shape in shapes(runner.limits):
                runner.forward_padded(shape)
        else:
            runner.buffers = None
        for plan in plans(runner.limits):
            ids = {chunk.seq_id: [0] * chunk.stop for chunk in plan.chunks}
            out = runner.run(plan, ids, keep=frozenset({0}))  # so all rows go through the last layer
            _ask_for_tokens(out.logits)
            if runner.decoder.dtype != out.logits.dtype:
                ops.greedy(out.logits.to(runner.decoder.dtype))


@contextmanager
def _few_layers(decoder: Decoder) -> Iterator[None]:
    layers = decoder.layers
    decoder.layers = [layers[i] for i in speakers([_kind(layer) for layer in layers])]
    try:
        yield
    finally:
        decoder.layers = layers


def _kind(layer: Layer) -> Hashable:
    """Layers of one kind launch the same kernels."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, Mlp):
        return attention.index  # experts: each layer may have other ones
    linears = attention.qkv, attention.o, mlp.gate_up, mlp.down
    turns = attention.config.rotary_layers[attention.index]
    return attention.window, turns, *((linear.scheme, linear.bias is None) for linear in linears)


def speakers(kinds: Sequence[Hashable]) -> list[int]:
    """Few of the items, in order, among which each kind follows each that it follows among all.

    For a layer begins with what the one before it left. First and last stay so.
    """
    chosen, seen = {0, len(kinds) - 1}, set[tuple[Hashable, Hashable]]()
    for i in range(1, len(kinds)):
        if (pair := (kinds[i - 1], kinds[i])) not in seen:
            seen.add(pair)
            chosen |= {i - 1, i}
    return sorted(chosen)


def plans(limits: StepLimits) -> Iterator[StepPlan]:
    """Steps of single tokens for up to max_num_seqs sequences, then of prompts; all in page 1."""
    for count in sizes(limits.max_num_seqs):
        yield _in_page_1([(0, 1)] * count, limits)
    for count in sizes(min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)):
        starts = range(0, count, limits.max_model_len)
        lengths = [min(limits.max_model_len, count - start) for start in starts]
        if max(lengths) > 1:
            yield _in_page_1([(0, length) for length in lengths], limits)


def largest_step(limits: StepLimits) -> StepPlan:
    """The step that takes most memory: all sequences, all tokens, the end of the longest prompt.

    For `Runner.run` or `launch` with any ids, all in page 1; what it leaves there is nobody's.
    """
    spare = limits.max_num_batched_tokens - limits.max_num_seqs
    ranges = []
    for i in range(limits.max_num_seqs):
        length = 1 + min(spare, limits.max_model_len - 1)
        spare -= length - 1
        stop = length if i else limits.max_model_len
        ranges.append((stop - length, stop))
    return _in_page_1(ranges, limits)


def _in_page_1(ranges: list[tuple[int, int]], limits: StepLimits) -> StepPlan:
    """Tokens [start, stop) of one sequence after the other."""
    chunks = tuple(Chunk(i, start, stop, sample=True, lane=i) for i, (start, stop) in enumerate(ranges))
    return StepPlan(chunks, {i: (1,) * -(-stop // limits.block_size) for i, (_, stop) in enumerate(ranges)})


def sizes(largest: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12 ... and `largest`."""
    size = 1
    while size < largest:
        yield size
        if size > 1 and size * 3 // 2 < largest:
            yield size * 3 // 2
        size *= 2
    yield largest


@torch.inference_mode()
def _ask_for_tokens(logits: torch.Tensor) -> None:
    """The ways of the sampler: greedy, a draw, a draw within limits; and where tokens are kept."""
    ids = ops.greedy(logits)
    host = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)
    ops.keep_ids(ids, torch.zeros_like(ids), torch.zeros_like(ids), host)
    numbers = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    one = torch.ones(len(logits), device=logits.device)
    ops.sample(logits, numbers, one, None, None, None)
    ops.sample(logits, numbers, one, one.long(), one, one)
