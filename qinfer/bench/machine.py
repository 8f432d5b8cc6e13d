"""What this machine can do at best, measured: how fast memory is copied and large matrices multiplied.

With torch's own calls: what a roofline is drawn with must not depend on the kernels that are to be judged by
it. Measured when the model is loaded, in the room that a step's activations take otherwise (0.3 GB). A GPU
needs some milliseconds for it, a CPU about a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from qinfer.bench.roofline import Machine
from qinfer.env import cpu_name
from qinfer.quant import ActivationFormat

_ROUNDS = 5  # the fastest counts: others were disturbed
_COPY_BYTES = 1 << 27  # more than any cache holds


def measure(device: torch.device, dtype: torch.dtype, activations: ActivationFormat) -> Machine:
    """The machine's rates for a model of that dtype whose layers multiply such activations."""
    name = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Machine(name, bandwidth(device), product_rate(device, dtype, activations))


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _fastest(lambda: target.copy_(source), device)


def product_rate(device: torch.device, dtype: torch.dtype, activations: ActivationFormat) -> float:
    """Operations per second of a square product in the format that the layers multiply in."""
    size = 1024 if device.type == "cpu" else 8192
    formats = {activations}
    if device.type == "cpu":  # where torch's 8-bit products may be slower than its wide ones
        formats.add(ActivationFormat.NONE)
    elif activations is ActivationFormat.INT8_PER_TOKEN and _multiplies_fp8(device):
        formats.add(ActivationFormat.FP8_PER_TOKEN)  # as fast in hardware; torch's int8 product is slower
    return 2 * size**3 / min(_fastest(_product(size, device, dtype, one), device) for one in formats)


def _multiplies_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _product(
    size: int, device: torch.device, dtype: torch.dtype, activations: ActivationFormat
) -> Callable[[], Tensor]:
    wide = torch.randn(size, size, device=device, dtype=dtype)
    if activations is ActivationFormat.INT8_PER_TOKEN:
        codes = (wide * 32).clamp(-127, 127).to(torch.int8)
        return lambda: torch._int_mm(codes, codes.t())
    if activations.value.startswith("fp8") and device.type != "cpu":
        fp8, one = wide.to(torch.float8_e4m3fn), torch.ones((), device=device)
        return lambda: torch._scaled_mm(fp8, fp8.t(), one, one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(wide, wide.t())


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, in the fastest of some rounds."""
    calls = 1 if device.type == "cpu" else 20
    run()
    found = []
    for _ in range(_ROUNDS):
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _wait(device)
        found.append((time.perf_counter() - start) / calls)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
