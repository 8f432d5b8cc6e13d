"""The requests of one `LLM`: several methods take them in, and whoever waits for some steps them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from qinfer.engine.admission import check_text
from qinfer.engine.continuation import Continuation
from qinfer.engine.engine import Engine
from qinfer.engine.pooling import Pooling
from qinfer.errors import UserError
from qinfer.outputs import RequestOutput
from qinfer.progress import Progress, ProgressBar
from qinfer.prompts import Prompt, params_list, text_and_ids
from qinfer.sampling_params import RequestOutputKind, SamplingParams
from qinfer.tokenizer import Tokenizer


class Requests:
    """Encodes prompts, numbers requests, runs them, and keeps outputs for who asks for them later."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer prompts are token ids."""
        self._engine, self._tokenizer = engine, tokenizer
        self._ids = count()
        self._finished: dict[str, RequestOutput] = {}
        self._widths: dict[str, int] = {}  # n of each request, for the progress bar

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; UserError where there is none."""
        if self._tokenizer is None:
            raise UserError(
                "this LLM has no tokenizer (skip_tokenizer_init=True, or dummy weights of a folder without "
                "one) and takes token ids only: name one (tokenizer=..., --tokenizer) for text"
            )
        return self._tokenizer

    def encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, where it has one, and its ids; UserError for a text that is far too long."""
        text, ids = text_and_ids(prompt)
        if text is None or ids is not None:
            return text, ids
        return text, self.encode_text(text, add_special_tokens=True)

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As `encode`, of a text that may have its special tokens already."""
        tokenizer = self.tokenizer
        check_text(text, tokenizer, self._engine.limits.max_model_len)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def add(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        pooling: Pooling | None = None,
        priority: Sequence[int] | None = None,
        continuations: Sequence[Continuation] | None = None,
    ) -> list[str]:
        """Takes in a request for each prompt, with `params` of its own or those of all; returns their ids.

        All or none: where one cannot be run, those before it are taken out, and its error is raised.
        """
        each = params_list(params, len(prompts))
        ranks = [0] * len(prompts) if priority is None else priority
        if len(ranks) != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {len(ranks)} priorities: give one each", "priority")
        ids: list[str] = []
        try:
            for i, (prompt, own, rank) in enumerate(zip(prompts, each, ranks, strict=True)):
                text, token_ids = self.encode(prompt)
                final = own.clone()
                final.output_kind = RequestOutputKind.FINAL_ONLY
                request_id = str(next(self._ids))
                self._engine.add(
                    request_id,
                    token_ids,
                    final,
                    prompt=text,
                    priority=rank,
                    pooling=pooling,
                    continuation=continuations[i] if continuations else None,
                )
                ids.append(request_id)
                self._widths[request_id] = own.n
        except BaseException:
            self._abort(ids)
            raise
        return ids

    def run(self, ids: Sequence[str], use_tqdm: Progress) -> list[RequestOutput]:
        """Steps until these have finished and returns their outputs; those of others are kept."""
        missing = {request_id for request_id in ids if request_id not in self._finished}
        total = sum(self._widths.pop(request_id) for request_id in ids)
        bar = ProgressBar(use_tqdm, total) if use_tqdm else None
        try:
            while missing:
                for output in self._engine.step():
                    self._finished[output.request_id] = output
                    if bar and output.request_id in missing:
                        bar.advance(output)
                    missing.discard(output.request_id)
        except BaseException:  # also an interrupt: what nobody waits for any more must not run on
            self._abort(missing)
            raise
        finally:
            if bar:
                bar.close()
        return [self._finished.pop(request_id) for request_id in ids]

    def _abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)
