"""A batch, from the checked file to the last answer: what the server's routes would say, without HTTP.

Every line goes through the function behind its route, so that it is answered, or refused, word for word as
over HTTP, but in no queue that could be full. An engine that dies ends the run with what is on disk;
`--resume` goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Response

from qinfer.batch.lines import Line, request_of
from qinfer.batch.output import OrderedOutput, Outcome
from qinfer.batch.window import Window, lines_from
from qinfer.errors import EngineDeadError
from qinfer.server import chat, completions, embeddings, responses
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.embeddings import EmbeddingsRequest
from qinfer.server.errors import Failure, failure_of
from qinfer.server.open_body import OpenBody
from qinfer.server.protocol import CompletionRequest
from qinfer.server.response_store import ResponseStore
from qinfer.server.responses_protocol import ResponsesRequest
from qinfer.server.state import ServerState

logger = logging.getLogger(__name__)

BLOCK_ROUNDS = 4  # a block is so many times what may be under way; what is asked last in it is written last
SECONDS_BETWEEN_REPORTS = 5.0


@dataclass(frozen=True)
class BatchFiles:
    """Where requests come from and answers go; `errors` None: failures lie among the answers."""

    source: Path
    output: Path
    errors: Path | None = None


@dataclass(frozen=True)
class Pace:
    """How a batch runs: requests under way, lines of a block, whether the first failure ends it.

    None under way: twice the sequences that the engine takes at once. Lines of a block None: four times that.
    """

    max_inflight: int | None = None
    fail_fast: bool = False
    block_lines: int | None = None


class FailedLineError(Exception):
    """A line failed, and the first to fail was to end the run."""


class Batch:
    """One run over a file of `num_lines` requests, `first` of which are answered already."""

    def __init__(self, state: ServerState, files: BatchFiles, pace: Pace, num_lines: int, first: int) -> None:
        self.state, self.files, self.pace = state, files, pace
        self.num_lines, self.first = num_lines, first
        self._store = ResponseStore(max_chars=0)  # no later request can ask for a response by its id
        self._began = time.monotonic()
        self._inflight = pace.max_inflight or 2 * state.engine.card.limits.max_num_seqs

    async def run(self) -> dict[str, Any]:
        """Answers all lines; what was done, as plain values.

        Raises EngineDeadError and FailedLineError; what is on disk by then is a valid beginning.
        """
        before = self.state.engine.stats
        with OrderedOutput(self.files.output, self.files.errors, self.first) as output:
            block = self.pace.block_lines or BLOCK_ROUNDS * self._inflight
            window = Window(lines_from(self.files.source, self.first), output, block_lines=block)
            reports = asyncio.ensure_future(self._report(output))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._inflight, self.num_lines - self.first)):
                        group.create_task(self._work(window, output))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None  # the others ended because of it
            finally:
                reports.cancel()
        after, seconds = self.state.engine.stats, time.monotonic() - self._began
        tokens = after.generation_tokens - before.generation_tokens
        return {
            "num_lines": self.num_lines,
            "num_resumed": self.first,
            "num_failed": output.num_failed,
            "seconds": seconds,
            "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
            "output_tokens": tokens,
            "output_tokens_per_second": tokens / seconds,
        }

    async def _work(self, window: Window, output: OrderedOutput) -> None:
        while (line := await window.next()) is not None:
            outcome = await self._answer(line)
            output.put(outcome)
            window.wrote()
            if outcome.failure is not None and self.pace.fail_fast:
                raise FailedLineError(f"line {line.number} failed: {outcome.failure.message}")

    async def _answer(self, line: Line) -> Outcome:
        request_id = f"qinfer-{uuid.uuid4().hex}"
        request = request_of(line, self.state.model_names)
        if isinstance(request, Failure):
            return Outcome(line, request_id, None, request)
        try:
            answer = await self._route(request, request_id)
        except EngineDeadError:
            raise
        except Exception as error:  # as the server does: this line's answer, and no other's
            failure = failure_of(error)
            if failure.status == 500:
                logger.exception("line %d failed", line.number)
            return Outcome(line, request_id, None, failure)
        return Outcome(line, request_id, bytes(answer.body).decode(), None)

    async def _route(self, request: OpenBody, request_id: str) -> Response:
        self.state.note(request)
        match request:
            case ChatRequest():
                return await chat.answer(self.state, request, request_id)
            case CompletionRequest():
                return await completions.answer(self.state, request, request_id)
            case EmbeddingsRequest():
                return await embeddings.answer(self.state, request, request_id)
            case ResponsesRequest():
                return await responses.answer(self.state, self._store, request)
        raise AssertionError(request)

    async def _report(self, output: OrderedOutput) -> None:
        """A line on stderr every few seconds: a bar is for terminals, and a batch runs for hours without."""
        engine = self.state.engine
        then, tokens = self._began, engine.stats.generation_tokens
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_REPORTS)
            now, stats = time.monotonic(), engine.stats
            rate = (stats.generation_tokens - tokens) / (now - then)
            then, tokens = now, stats.generation_tokens
            failed = f", {output.num_failed:,} failed" if output.num_failed else ""
            print(
                f"{output.first:,} of {self.num_lines:,} lines written{failed}, {rate:,.1f} output tokens/s, "
                f"running: {stats.num_running}, waiting: {engine.num_waiting}",
                file=sys.stderr,
                flush=True,
            )
