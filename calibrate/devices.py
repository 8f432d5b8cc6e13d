"""The device that calibration runs on: by name, in which dtype it is fast, and while work is done there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qinfer.backend import model_device
from qinfer.checkpoint.checkpoint import CPU
from qinfer.env import cpu_features
from qinfer.errors import UserError


def chosen_device(name: str | None) -> torch.device:
    """The device that `name` means: "cpu", "cuda" or "cuda:1"; None or "auto": a GPU where there is one.

    Raises UserError for another name, and for a GPU that torch does not see.
    """
    if name is None or name == "auto":
        return model_device()
    kind, _, number = str(name).partition(":")
    if kind == "cpu" and not number:
        return CPU
    if kind != "cuda" or not (number.isdecimal() or name == "cuda"):
        raise UserError(f"unknown device {name!r:.100}; choose auto, cpu, cuda or cuda:N", "device")
    count, index = torch.cuda.device_count(), int(number or 0)
    if index >= count:
        seen = f"{count} GPUs, from cuda:0" if count else "no GPU"
        raise UserError(f"there is no {name}: torch sees {seen}; choose auto or cpu", "device")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """What decides the bits of a result: GPUs of one model give the same."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def fast_dtype(device: torch.device) -> torch.dtype:
    """Of activations: bfloat16 where the device has matrix units for it, else float32."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = "amx_bf16" in cpu_features()
    return torch.bfloat16 if fast else torch.float32


@contextmanager
def working_on(device: torch.device) -> Iterator[None]:
    """Kernels run on this device; what torch keeps of a GPU's memory is given back at the end."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def give_memory_back() -> None:
    """Returns to the system what this process has freed, where its C library does not do so by itself.

    glibc's keeps freed blocks below 32 MiB, holes among those in use: of a layer's inputs, group after group,
    as much again as is in use. To ask for them takes no time that could be measured.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
