"""The engine: signatures first; the body follows within the hour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineOptions, EngineStats
from qinfer.model.decoder import Decoder
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.tokenizer import Tokenizer


class Engine:
    """Runs many requests at once on one decoder."""

    ledger: Ledger

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None, options: EngineOptions) -> None: ...

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request_id: str) -> None: ...

    def has_unfinished(self) -> bool: ...

    def prompt_logits(self, token_ids: Sequence[int], *, rows: int = 256) -> Iterator[Tensor]: ...

    def reset_prefix_cache(self) -> bool: ...

    def stats(self) -> EngineStats: ...
