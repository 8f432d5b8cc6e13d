"""How long a quantize run will take: its work counted from shapes, at the speed this machine shows now.

Work is counted in products of activations (in their dtype, and as the scheme makes them), products of float32
(second moments, GPTQ), passes over numbers (rounding, ranges, what lies between products), small operations
that cost what it takes to begin one (GPTQ's columns), and bytes that are copied. Each kind is timed on a
small sample, which takes half a second; a disk is taken for one of 500 MB/s, as nothing is to be written.
What is counted are the loops of this package, so the counts are its own: a search walks through the layer
once per candidate, ranges are tried a dozen times, GPTQ sweeps once behind its own pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from qinfer.calibrate import awq, gptq, smoothquant
from qinfer.calibrate.layer import ERROR_TOKENS
from qinfer.calibrate.needs import Work
from qinfer.calibrate.ranges import CHUNKS, num_tries
from qinfer.calibrate.roundtrip import dequantized
from qinfer.checkpoint.checkpoint import CPU
from qinfer.checkpoint.names import layer_modules
from qinfer.model.linear import Linear
from qinfer.quant import W4A16, ActivationFormat, Scheme, W8A8Fp8Static

_ROUND_PASSES = 14  # over a weight to quantize it and to read it back
_CHECK_PASSES = 40  # more, once, to load it, to check what is stored, and to tell the error
_HIDDEN_PASSES = 18  # over the stream, and over what is as wide, on the way through a layer
_INNER_PASSES = 9  # over what is as wide as the MLP
_ATTENTION = 4  # times a product's time that attention takes for as many operations
_GRAM = (4, 2)  # times a product's that second moments take: on a processor in bfloat16 from float32, in TF32
_CODE_PASSES = 6  # over what is quantized on the way into a product
_SCALE_PASSES = 3  # over what comes out of a product of codes
_TRY_PASSES = 8  # over a weight for one width of its range
_STEP_PASSES = 10  # over a column of GPTQ for one step
_STEP_CALLS = 10  # to round a column and to tell the others
_ROUND_CALLS = 60  # to quantize a linear, to check it and to measure its errors
_TRY_CALLS = 12
_CANDIDATE_CALLS = 60  # to round a group and to run it
_COPIES = 2  # of file tensors: as gathered and as bytes
_WRITTEN = 2  # times a quantized layer is written: as a piece, and into a shard
DISK_PACE = 5e8  # bytes a second
_CALLS = 200
_PROBE = {"cpu": 1024, "cuda": 8192}


class Pace(NamedTuple):
    """Operations a second.

    Products in the activations' dtype, as the scheme makes them and in float32, passes over numbers,
    operations begun, bytes copied.
    """

    products: float
    quantized: float
    float32: float
    passes: float
    calls: float
    copies: float


class Effort(NamedTuple):
    """The work of one layer in a Pace's units."""

    products: float
    quantized: float
    float32: float
    passes: float
    calls: float
    copies: float

    def seconds(self, pace: Pace) -> float:
        """At this pace."""
        return sum(work / speed for work, speed in zip(self, pace, strict=True))


def measured_pace(scheme: Scheme, dtype: torch.dtype, device: torch.device = CPU) -> Pace:
    """Of this device with its load of the moment."""
    size = _PROBE[device.type]
    a, b = torch.randn(2, size, size, device=device)
    low_a, low_b = a.to(dtype), b.to(dtype)
    tensors = scheme.quantize(b, dtype=dtype)
    if isinstance(scheme, W8A8Fp8Static):
        tensors = scheme.with_input_range(tensors, 6.0)
    linear = Linear([dequantized(scheme, tensors, b)], device=device, dtype=dtype)
    tiny = torch.zeros(64, device=device)
    host = torch.zeros(1 << 22)
    copy = torch.empty_like(host)
    flops = 2.0 * size**3

    def begin() -> None:
        for _ in range(_CALLS):
            tiny.add_(1.0)

    return Pace(
        flops / _fastest(lambda: low_a @ low_b, device),
        flops / _fastest(lambda: linear(low_a), device),
        flops / _fastest(lambda: a @ b, device),
        a.numel() / _fastest(lambda: a + 1.0, device),  # into new memory, as most do
        _CALLS / _fastest(begin, device),
        4 * len(host) / _fastest(lambda: copy.copy_(host), CPU),
    )


def effort(work: Work) -> Effort:
    """What one layer takes."""
    modules = len(layer_modules(work.config))
    passes = float((_ROUND_PASSES + _CHECK_PASSES) * work.layer_weights)
    calls = float(_ROUND_CALLS * modules)
    copies = float(work.layer_weights * work.storage + _COPIES * work.file_bytes_per_layer)
    if not work.tokens:
        return Effort(0.0, 0.0, 0.0, passes, calls, copies)
    recipe = work.recipe
    copies += _moves(work) * work.stream_bytes
    walks = (2 if work.made_anew else 1) + (1 if recipe.transform else 0)
    sampled = 2 * min(work.tokens, ERROR_TOKENS) * work.layer_weights  # for the errors of outputs
    products = walks * _walk(work, work.tokens) + sampled
    quantized, float32 = float(sampled), 0.0
    passes += walks * work.tokens * _numbers(work) + work.tokens * _codes(work)
    if recipe.transform:
        searched = _search(work)
        quantized += searched.products
        passes += searched.weights * _ROUND_PASSES + searched.numbers
        calls += searched.candidates * _CANDIDATE_CALLS
    if recipe.ranges != "absmax":
        tries = num_tries(symmetric=not isinstance(recipe.scheme, W4A16) or recipe.scheme.symmetric)
        passes += tries * _TRY_PASSES * work.layer_weights
        calls += tries * _TRY_CALLS * max(modules, work.layer_weights / CHUNKS[work.on_gpu])
        if isinstance(recipe.scheme, W4A16) and recipe.ranges == "output":
            size = recipe.scheme.group_size
            float32 += 2 * tries * size * work.layer_weights
            float32 += sum(2 * work.tokens * width * size for width in work.widths.values())
    effort = Effort(products, quantized, float32, passes, calls, copies)
    if not recipe.by_gptq:
        return effort
    return Effort(*(sum(both) for both in zip(effort, _gptq(work), strict=True)))


def disk_seconds(work: Work) -> float:
    """Reading and writing of a whole run, journal included."""
    layers, storage = work.config.num_layers, work.storage
    layer = work.layer_weights * storage + _WRITTEN * work.file_bytes_per_layer + work.stream_bytes
    spilled = _moves(work) * work.stream_bytes if work.on_disk else 0
    return (layers * (layer + spilled) + (1 + _WRITTEN) * work.other_bytes) / DISK_PACE


def _numbers(work: Work) -> float:
    """Passes over what a token becomes between the products of a layer."""
    config = work.config
    mlps = max(1, config.num_experts)
    return float(_HIDDEN_PASSES * config.hidden_size + mlps * _INNER_PASSES * config.intermediate_size)


def _codes(work: Work) -> float:
    """Passes over a token's inputs and outputs because a layer multiplies codes; 0 for weights alone."""
    if work.recipe.scheme.activations is ActivationFormat.NONE:
        return 0.0
    outputs = sum(work.group_weights[name] // width for name, width in work.widths.items())
    return float(_CODE_PASSES * sum(work.widths.values()) + _SCALE_PASSES * outputs)


def _moves(work: Work) -> int:
    """How often a stream comes from where it waits or goes there: for every look at a group, and back."""
    if not work.made_anew:
        return 2  # into the journal
    return 2 + 2 * len(work.widths) + 2 + (1 if work.recipe.transform else 0)


def _walk(work: Work, tokens: int) -> float:
    """All tokens through the layer once."""
    return float(tokens * (2 * work.layer_weights + _attention(work)))


def _attention(work: Work) -> float:
    """Of one token, in a product's operations."""
    return float(_ATTENTION * 4 * work.length * work.config.num_heads * work.config.head_dim)


class _Searched(NamedTuple):
    """Products, rounded weights and passes over outputs of all candidates, and how many there are."""

    products: float
    weights: float
    numbers: float
    candidates: int


def _search(work: Work) -> _Searched:
    weights, tokens = work.group_weights, work.searched
    used = {
        "qkv": 2 * (weights["qkv"] + weights["o"]) + _attention(work),
        "o": 2 * weights["o"],
        "gate_up": 2 * sum(w for name, w in weights.items() if name.startswith(("gate_up", "down"))),
        "down": 2 * sum(w for name, w in weights.items() if name.startswith("down")),
    }
    if work.recipe.transform == "smoothquant":
        del used["o"]
    candidates = 1 + (awq.NUM_GRID if work.recipe.transform == "awq" else len(smoothquant.ALPHAS))
    rounded = sum(w for name, w in weights.items() if name.partition(".")[0] in used)
    return _Searched(
        float(candidates * tokens * sum(used.values())),
        float(candidates * rounded),
        candidates * tokens * (2 * _numbers(work) + _codes(work)),
        candidates * len(used),
    )


def _gptq(work: Work) -> Effort:
    """Second moments, their factors, and the sweeps over the columns."""
    products = float32 = passes = calls = 0.0
    rounds = 1 + gptq.SWEEPS
    for name, width in work.widths.items():
        rows = work.group_weights[name] // width
        products += _GRAM[work.on_gpu] * work.tokens * width * width
        float32 += 2.0 * width**3 + 2.0 * rounds * rows * width * width
        passes += _STEP_PASSES * rounds * rows * width
        calls += _STEP_CALLS * rounds * width
    return Effort(products, 0.0, float32, passes, calls, 0.0)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
