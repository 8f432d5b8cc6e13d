"""Memory of the host that a GPU's kernels read and write by themselves.

torch's allocator gives pinned memory to the next who asks as soon as the tensor is gone; it waits for the
copies that it sees, and does not see these. So the tensors are kept until the stream has come so far.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class Pinned:
    """Makes int64 tensors that kernels of the current stream use, and keeps each as long as they may."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU they are plain, and nothing is kept."""
        self._on_gpu = device.type == "cuda"
        self._kept: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def empty(self, size: int) -> Tensor:
        """[size] of memory that no kernel uses."""
        return torch.empty(size, dtype=torch.int64, pin_memory=self._on_gpu)

    def keep(self, tensor: Tensor) -> torch.cuda.Event | None:
        """Says that what was launched so far uses `tensor`; returns what tells when it no longer does."""
        if not self._on_gpu:
            return None
        while self._kept and self._kept[0][0].query():  # type: ignore[no-untyped-call]  # untyped in torch
            self._kept.popleft()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        event.record()
        self._kept.append((event, tensor))
        return event
