# mypy: allow-untyped-defs, allow-untyped-calls
"""Compiles kernels before they are needed, many at a time.

Triton compiles a kernel when it is launched with arguments of new types, for about a second each, and a model
has dozens. Which they are is best known by whoever launches them. So the model is run as ever, but a launch
only says what it would need; threads compile it meanwhile (most of the work is outside Python).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.jit import JITFunction

_launch = JITFunction.run


@contextmanager
def compiled_ahead(num_threads: int | None = None) -> Iterator[list[Future[Any]]]:
    """Inside, this thread's launches compile but do not run; yields the compilations, a growing list.

    Leaving waits for all and raises what any of them raised. Other threads' launches run as ever.
    """
    with ThreadPoolExecutor(num_threads or os.cpu_count()) as threads, AsyncCompileMode(threads) as mode:
        JITFunction.run = _compile_only
        try:
            yield mode.raw_futures
        finally:
            JITFunction.run = _launch


def _compile_only(self, *args, grid, warmup, **kwargs):
    """`JITFunction.run` while some thread compiles ahead: this one, or another?"""
    return _launch(self, *args, grid=grid, warmup=warmup or active_mode.get() is not None, **kwargs)
