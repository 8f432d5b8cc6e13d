"""The progress bar of `LLM.generate`, as vLLM's users know it: a bool, or a constructor like tqdm's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

from tqdm.auto import tqdm

from qinfer.outputs import RequestOutput

Progress: TypeAlias = bool | Callable[..., Any]


class ProgressBar:
    """Counts answers that are done, with tokens per second in and out."""

    def __init__(self, use_tqdm: Progress, total: int) -> None:
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make(
            total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed(0, 0, 1.0)
        )
        self._start = time.monotonic()
        self._tokens_in = self._tokens_out = 0

    def advance(self, output: RequestOutput) -> None:
        """Counts a finished request: by its n."""
        self._tokens_in += len(output.prompt_token_ids) * len(output.outputs)
        self._tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.postfix = self._speed(self._tokens_in, self._tokens_out, seconds)
        self._bar.update(len(output.outputs))

    def close(self) -> None:
        """Ends the line."""
        self._bar.close()

    @staticmethod
    def _speed(tokens_in: int, tokens_out: int, seconds: float) -> str:
        rates = (tokens_in / seconds, tokens_out / seconds)
        return f"est. speed input: {rates[0]:.2f} toks/s, output: {rates[1]:.2f} toks/s"
