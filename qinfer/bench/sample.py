"""What became of one request of a load, and the loop that asks it and watches the clock.

Three moments: due (by the schedule), sent (when the limit of concurrency let it), and each arrival of output.
Latencies count from `sent`, as vLLM's do; what a request waited before that on the client is told apart,
since a load above what the server takes would look fine otherwise. Output is a chunk with a choice that is
not the mere role of a chat's first one; a chunk is one arrival, however many tokens it brings.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qinfer.bench.http_client import Address, Answer, HttpError, events, request

Clock = Callable[[], float]  # seconds since the load began


@dataclass
class Sample:
    """Times in seconds since the load began; tokens as the server counts them, or 0 where it does not say."""

    prompt_len: int
    due: float = 0.0
    sent: float = math.nan
    arrivals: list[float] = field(default_factory=list)
    output_len: int = 0
    text: str = ""
    error: str = ""  # empty: complete

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return not self.error

    @property
    def first_token(self) -> float:
        """Seconds from sending to the first output."""
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last output."""
        return self.arrivals[-1] - self.sent

    @property
    def queued(self) -> float:
        """Seconds that it waited on the client."""
        return self.sent - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between one arrival of output and the next."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Seconds per token after the first; 0 for an answer of one."""
        return (self.latency - self.first_token) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True)
class Target:
    """Which server, by which of its routes; `chat`: prompts are sent as a user's message."""

    address: Address
    path: str
    chat: bool
    headers: dict[str, str]

    def body(self, prompt: str, output_len: int, fields: Mapping[str, Any]) -> bytes:
        """The request as it is sent."""
        said: dict[str, Any] = {"prompt": prompt, "max_tokens": output_len}
        if self.chat:
            message = {"role": "user", "content": prompt}
            said = {"messages": [message], "max_completion_tokens": output_len}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**said, **streamed, **fields}).encode()


async def ask(target: Target, body: bytes, sample: Sample, clock: Clock) -> None:
    """Sends the request and writes down what comes; what fails is the sample's `error`."""
    sample.sent = clock()
    try:
        async with request(target.address, "POST", target.path, body, target.headers) as answer:
            if answer.status != 200:
                sample.error = f"HTTP {answer.status}: {(await answer.text())[:500]}"
                return
            await _read(answer, target.chat, sample, clock)
    except OSError as error:
        sample.error = f"no connection: {error.strerror or error}"
    except HttpError as error:
        sample.error = str(error)
    if not sample.error and not sample.arrivals:
        sample.error = "the answer has no output"


async def _read(answer: Answer, chat: bool, sample: Sample, clock: Clock) -> None:
    done = False
    async for data in events(answer.pieces):
        now = clock()
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            sample.error = f"in the stream: {chunk['error'].get('message', chunk['error'])}"
            return
        if chunk.get("usage"):
            sample.output_len = chunk["usage"]["completion_tokens"]
        if (choices := chunk.get("choices")) and (text := _output(choices[0], chat)) is not None:
            sample.arrivals.append(now)
            sample.text += text
    if not done:
        sample.error = "the stream ended without [DONE]"


def _output(choice: dict[str, Any], chat: bool) -> str | None:
    """The choice's text; None where it is only the role."""
    if not chat:
        return str(choice.get("text") or "")
    delta = choice.get("delta") or {}
    content = delta.get("content") or ""
    return None if "role" in delta and not content else str(content)


def since(start: float) -> Clock:
    """A clock that began at `start` of `time.perf_counter`."""
    return lambda: time.perf_counter() - start
