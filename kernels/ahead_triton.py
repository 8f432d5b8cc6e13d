# mypy: allow-untyped-defs, allow-untyped-calls
"""Compiles kernels before they are needed, many at a time.

Triton compiles a kernel when it is launched with arguments of new types, for about a second each, and a model
has dozens. Which they are is best known by whoever launches them. So the model is run as ever, but a launch
only says what it would need; threads compile it meanwhile (most of the work is outside Python), compile what
calls it from the host, and load both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.jit import JITFunction

_launch = JITFunction.run


class _Loading(ThreadPoolExecutor):
    """Runs compilations in threads that use the caller's GPU, and loads what they give."""

    def __init__(self, num_threads: int | None) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def use_device() -> None:
            if device is not None:
                torch.cuda.set_device(device)

        super().__init__(num_threads, initializer=use_device)

    def submit(self, compilation: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        def loaded() -> Any:
            kernel = compilation()
            assert kernel.run is not None  # asking for it loads it
            return kernel

        return super().submit(loaded)


@contextmanager
def compiled_ahead(num_threads: int | None = None) -> Iterator[list[Future[Any]]]:
    """Inside, this thread's launches compile but do not run; yields the compilations, a growing list.

    Leaving waits for all and raises what any of them raised. Other threads' launches run as ever.
    """
    try:
        with _Loading(num_threads or os.cpu_count()) as threads, AsyncCompileMode(threads) as mode:
            JITFunction.run = _compile_only
            try:
                yield mode.raw_futures
            finally:
                JITFunction.run = _launch
    finally:
        active_mode.set(None)  # Triton 3.6 leaves it behind where a compilation fails


def _compile_only(self, *args, grid, warmup, **kwargs):
    """`JITFunction.run` while some thread compiles ahead: this one, or another?"""
    return _launch(self, *args, grid=grid, warmup=warmup or active_mode.get() is not None, **kwargs)
