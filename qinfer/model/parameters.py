"""What a model is made of, from the tensors of a file: each complete, and no number of it broken.

Parameters begin as NaN and are filled from the file, and one that holds NaN afterwards is named in an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import Shape
from qinfer.errors import CheckpointError
from qinfer.model.linear import FileTensors


def filled(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of these names and shapes, NaN until the file's tensors are copied in."""
    parameters = {
        name: torch.full(shape, math.nan, device=device, dtype=dtype) for name, shape in shapes.items()
    }
    for name, parameter in parameters.items():
        tensor = checkpoint.tensor(name, device)
        assert tensor.shape == parameter.shape, name  # the checkpoint has checked; copy_ would broadcast
        _refuse_overflow(checkpoint, name, tensor, dtype)
        parameter.copy_(tensor)
    _refuse_nan(checkpoint, parameters)
    return parameters


def file_linear(checkpoint: Checkpoint, module: str, device: torch.device, dtype: torch.dtype) -> FileTensors:
    """A linear's scheme and file tensors, whose presence and shapes the checkpoint has checked."""
    tensors = checkpoint.module(module, device)
    _refuse_nan(checkpoint, {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})
    for suffix, tensor in tensors.items():
        _refuse_overflow(checkpoint, f"{module}.{suffix}", tensor, dtype)
    return checkpoint.scheme(module), tensors


def _refuse_nan(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise CheckpointError(f"{checkpoint.path}: {name} holds NaN, so this checkpoint is broken")


def _refuse_overflow(checkpoint: Checkpoint, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """CheckpointError for a number of the file that float16, the one narrow dtype, makes infinite."""
    if dtype is not torch.float16 or tensor.dtype not in (torch.bfloat16, torch.float32):
        return
    largest = float(tensor.abs().amax()) if tensor.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise CheckpointError(
            f"{checkpoint.path}: {name} holds {largest:.4g}, which float16 cannot: load it as bfloat16 or "
            "float32"
        )
