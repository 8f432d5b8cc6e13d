"""A line of a batch file: a request in OpenAI's batch format, or a bare body.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"prompt": "..."}       a body of /v1/completions
    {"messages": [...]}     one of /v1/chat/completions

A bare body may have a `custom_id`; without one it is called after its line, `line-7`. Lines end at "\n" and
nowhere else, blank ones are passed over. What a line is and whether its body can be answered are two
questions: a line that is none is a `LineFault`, a body that no route takes is what the server would say, a
`Failure`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from qinfer.errors import UserError
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.embeddings import EmbeddingsRequest
from qinfer.server.errors import Failure, invalid
from qinfer.server.open_body import OpenBody
from qinfer.server.options import MAX_BODY_BYTES
from qinfer.server.protocol import CompletionRequest
from qinfer.server.responses_protocol import ResponsesRequest

BODIES: dict[str, type[OpenBody]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/responses": ResponsesRequest,
}
_BARE = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_CHARS_PER_TOKEN = 4  # about, in English; only the order of lengths matters
_READ = MAX_BODY_BYTES + 1
_USUAL_ANSWER = 256  # tokens that a chat without a limit is taken for


class LineFault(Exception):
    """What makes a line no request at all; the message says what, without the line's number."""


class Line(NamedTuple):
    """One request: `place` counts requests from 0, `number` lines of the file from 1."""

    place: int
    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    size: int  # bytes of the line

    def tokens(self) -> int:
        """About how many tokens the request is, prompt and answer: for sorting, before any is counted."""
        if self.url == "/v1/embeddings":
            return self.size // _CHARS_PER_TOKEN
        usual = 16 if self.url == "/v1/completions" else _USUAL_ANSWER
        limit = next((self.body[name] for name in _LIMITS if isinstance(self.body.get(name), int)), usual)
        return self.size // _CHARS_PER_TOKEN + int(limit)


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of every line that is not blank; a too long one is cut, for `parse` to see.

    Raises UserError where the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(_READ):
                number += 1
                rest = raw
                while len(rest) == _READ and not rest.endswith(b"\n"):
                    rest = file.readline(_READ)
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "input_file") from None


def parse(raw: bytes, place: int, number: int) -> Line:
    """The request of a line; raises LineFault where it is none."""
    if len(raw) > MAX_BODY_BYTES:
        raise LineFault(f"longer than {MAX_BODY_BYTES >> 20} MiB")
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LineFault(f"not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(entry, dict):
        raise LineFault("not a JSON object")
    if "url" not in entry and "body" not in entry:
        return _bare(entry, place, number, len(raw))
    custom_id, method, url, body = (entry.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise LineFault("custom_id must be a text that no other line has")
    if method != "POST":
        raise LineFault(f'method must be "POST", not {method!r:.50}')
    if not isinstance(url, str) or url not in BODIES:
        raise LineFault(f"url must be one of {', '.join(BODIES)}, not {url!r:.100}")
    if not isinstance(body, dict):
        raise LineFault("body must be a JSON object")
    return Line(place, number, custom_id, url, body, len(raw))


def _bare(entry: dict[str, Any], place: int, number: int, size: int) -> Line:
    url = next((url for key, url in _BARE.items() if key in entry), None)
    if url is None:
        raise LineFault('neither a batch line (custom_id, method, url, body) nor {"prompt": ...}')
    custom_id = entry.pop("custom_id", None) or f"line-{number}"
    if not isinstance(custom_id, str):
        raise LineFault("custom_id must be a text that no other line has")
    return Line(place, number, custom_id, url, entry, size)


def request_of(line: Line, model_names: Collection[str]) -> OpenBody | Failure:
    """The line's body as its route takes it, or what the server would say of it."""
    if line.body.get("stream"):
        return Failure(400, "a line of a batch cannot stream: leave out stream", "stream")
    if line.url == "/v1/responses" and line.body.get("background"):
        return Failure(
            400, "a line of a batch cannot run in the background: leave out background", "background"
        )
    try:
        request = BODIES[line.url].model_validate(line.body)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        return invalid([{**fault, "loc": ("body", *fault["loc"])} for fault in faults], line.body)
    model = getattr(request, "model", None)
    if model is not None and model not in model_names:
        served = ", ".join(model_names)
        return Failure(404, f"the model {model[:200]!r} does not exist; served here: {served}", "model")
    return request
