"""Memory that the tensors of a model lie in: counted, and made so that loading leaves no holes in it.

What is loaded is fused and packed on a GPU, and between the tensors that stay lie those that went. PyTorch's
allocator gives memory back only in whole segments, which a single small survivor keeps: of an 8B model 700
MiB were lost, which are 5,000 tokens of its KV cache. So things are made `Aside`, in memory of another
stream, and then copied, each as it is, into memory where nothing else comes and goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors within containers and objects of this package, some perhaps more than once."""
    return _tensors_in(value, set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    elif type(value).__module__.startswith("qinfer."):
        children = list(getattr(value, "__dict__", {}).values())
    else:
        children = []
    for child in children:
        yield from _tensors_in(child, seen)


def tensor_bytes(value: Any) -> int:
    """Bytes of all memory that the tensors within refer to, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(value))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def rehouse(tensors: Iterable[Tensor]) -> None:
    """Copies what these tensors refer to into new memory, in place, padding and shared parts included."""
    houses: dict[int, torch.UntypedStorage] = {}
    found = {id(tensor): tensor for tensor in tensors}
    bases = [tensor._base for tensor in found.values() if tensor._base is not None]  # a view keeps it alive
    for tensor in (found | {id(base): base for base in bases}).values():
        old = tensor.untyped_storage()
        if old.data_ptr() not in houses:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                old, 0, (old.nbytes(),), (1,)
            )
            houses[old.data_ptr()] = whole.clone().untyped_storage()
        new = houses[old.data_ptr()]
        tensor.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())


class Aside:
    """Calls what makes tensors; what it returns lies alone in its memory. On a CPU it just calls."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def give_back(self) -> None:
        """Returns the memory in which things were made to the device."""
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.empty_cache()

    def __call__(self, make: Callable[[], T]) -> T:
        """What `make` returns, in the current stream's memory."""
        if self._stream is None:
            return make()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            made = make()
        current.wait_stream(self._stream)
        rehouse(tensors_in(made))
        self._stream.wait_stream(current)  # whose copies read memory that is free again
        return made
