"""The last look at a checkpoint before it appears: everything there, nothing that could not be served.

A scale of NaN or zero, a tensor forgotten or misshapen: none of them stops a writer, and all of them give a
model that talks nonsense. So every tensor is checked as it is written and the list at the end, and any fault
stops the run, with the names; the folder then never comes into being.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import all_modules, linear_shape, relative_name
from qinfer.checkpoint.shards import FLOATS
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError
from qinfer.quant import Dense, Scheme

CHECKS = (
    "no tensor holds NaN or infinity",
    "no scale is zero, denormal or negative",
    "every tensor of every linear has its scheme's shape and dtype",
    "no tensor is missing and none is there that should not be",
    "no linear was left dense unasked",
    "the files are as large as the schemes make them, and smaller than the source's",
)
_SIZE_TOLERANCE = 0.02  # of the weights, and as much for each tensor's entry in a header:
_HEADER_BYTES = 400
_LISTED = 5  # names in a message
_FP8_NAN = 0x7F  # of e4m3, without its sign
_PORTION = 1 << 24  # numbers looked at at a time


def expected_names(
    config: ModelConfig, scheme_of: Callable[[str], Scheme], source_names: Iterable[str]
) -> set[str]:
    """Names of the quantized checkpoint: the source's, with its scheme's tensors for each linear's weight."""
    names = set(source_names) - {f"{module}.weight" for module in all_modules(config)}
    for module in all_modules(config):
        shape = linear_shape(config, relative_name(config, module))
        names |= {f"{module}.{suffix}" for suffix in scheme_of(module).specs(*shape)}
    return names


def check_linear(
    name: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], storage: torch.dtype
) -> None:
    """Raises CheckpointError where a tensor is not as the scheme promises or a scale is unusable."""
    for suffix, spec in scheme.specs(*shape).items():
        full = f"{name}.{suffix}"
        if suffix not in tensors:
            raise CheckpointError(f"{full} is missing from the quantized layer")
        tensor, dtype = tensors[suffix], spec.dtype or storage
        if tuple(tensor.shape) != spec.shape or tensor.dtype != dtype:
            raise CheckpointError(
                f"{full} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(spec.shape)}"
            )
        if suffix.endswith("scale") and not bool(
            (tensor.float() >= torch.finfo(tensor.dtype).tiny).all() and tensor.float().isfinite().all()
        ):
            raise CheckpointError(f"{full} holds a scale that is NaN, infinite, denormal or not above zero")
        check_finite(full, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises CheckpointError where a floating-point tensor holds NaN or infinity."""
    if tensor.dtype is torch.float8_e4m3fn:  # no infinity, and two codes for NaN; to widen it takes longer
        finite = bool(((tensor.view(torch.uint8) & _FP8_NAN) != _FP8_NAN).all())
        if not finite:
            raise CheckpointError(f"{name} holds NaN or infinity")
    elif tensor.is_floating_point():
        for part in torch.split(tensor.flatten(), _PORTION):  # no float32 copy of an embedding
            if not bool(part.float().isfinite().all()):
                raise CheckpointError(f"{name} holds NaN or infinity")


def check_written(
    result: Checkpoint, scheme_of: Callable[[str], Scheme], *, num_bytes: int, source_bytes: int
) -> None:
    """The last look at the files themselves; raises CheckpointError naming the linear or the size at fault.

    `num_bytes` are those that the schemes make of the `source_bytes`.
    """
    for module in all_modules(result.config):
        asked, found = scheme_of(module), result.scheme(module)
        if asked.label != found.label:
            raise CheckpointError(f"{module} reads as {found.label}, and was to be {asked.label}")
        weight = f"{module}.weight"
        if not isinstance(asked, Dense) and weight in result.names() and result.header(weight)[1] in FLOATS:
            raise CheckpointError(f"{weight} was left dense, and was to be {asked.label}")
    slack = _SIZE_TOLERANCE * num_bytes + _HEADER_BYTES * len(result.names())
    if abs(result.num_bytes - num_bytes) > slack:
        raise CheckpointError(f"the weights take {result.num_bytes} bytes, and were to take {num_bytes}")
    if num_bytes > source_bytes:
        raise CheckpointError(f"the weights would take {num_bytes} bytes, more than {source_bytes} before")


def check_complete(expected: set[str], written: set[str]) -> None:
    """Raises CheckpointError naming what was expected and not written, or written and not expected."""
    for what, names in (("missing", expected - written), ("unexpected", written - expected)):
        if names:
            some = ", ".join(sorted(names)[:_LISTED])
            raise CheckpointError(f"{len(names)} tensors {what} in the quantized checkpoint: {some}")
