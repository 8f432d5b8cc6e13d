"""The answers on disk: in the order of the input, written as soon as all before them are there.

A file that is cut off anywhere is a valid beginning: whole lines, none left out. So a run that is resumed
need only find how far the files go: it walks the input and the answers side by side. With a file for errors,
lines that failed go there as OpenAI writes them, and the two files together are the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from qinfer.batch.lines import Line, parse, raw_lines
from qinfer.errors import UserError
from qinfer.server.errors import Failure

_BEGINNING = b'{"id": "qinfer-'  # of every line that is written here


class Outcome(NamedTuple):
    """What became of a line: the answer's JSON, or what the server said instead of one."""

    line: Line
    request_id: str
    body: str | None
    failure: Failure | None

    def text(self, *, apart: bool) -> str:
        """The line to write; `apart`: a failure as OpenAI's error file has it."""
        head = f'{{"id": {json.dumps(self.request_id)}, "custom_id": {json.dumps(self.line.custom_id)}'
        if self.failure is None:
            response = _response(200, self.request_id, self.body or "")
            return f'{head}, "response": {response}, "error": null}}\n'
        written = self.failure.json()
        error = json.loads(written)["error"]
        error = json.dumps({"code": error["type"], "message": error["message"], "param": error["param"]})
        response = "null" if apart else _response(self.failure.status, self.request_id, written)
        return f'{head}, "response": {response}, "error": {error}}}\n'


def _response(status: int, request_id: str, body: str) -> str:
    return f'{{"status_code": {status}, "request_id": {json.dumps(request_id)}, "body": {body}}}'


class OrderedOutput:
    """A context in which outcomes are put in any order and written in the input's.

    `first` is the place of the first line that is not on disk yet; `held` counts the bytes that wait for
    a line before them.
    """

    def __init__(self, output: Path, errors: Path | None, first: int) -> None:
        self.first = first
        self.num_failed = self.held = 0
        self._paths = output, errors
        self._waiting: dict[int, tuple[bytes, bool]] = {}
        self._open = ExitStack()

    def __enter__(self) -> OrderedOutput:
        output, errors = self._paths
        self._output: BinaryIO = self._open.enter_context(output.open("ab"))
        self._errors = self._output if errors is None else self._open.enter_context(errors.open("ab"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def put(self, outcome: Outcome) -> None:
        """Takes one in, and writes what now follows on what is written."""
        failed = outcome.failure is not None
        text = outcome.text(apart=self._errors is not self._output).encode()
        self._waiting[outcome.line.place] = text, failed
        self.held += len(text)
        if outcome.line.place != self.first:
            return
        while (ready := self._waiting.pop(self.first, None)) is not None:
            text, failed = ready
            (self._errors if failed else self._output).write(text)
            self.num_failed += failed
            self.held -= len(text)
            self.first += 1
        self._output.flush()
        self._errors.flush()


class Written(NamedTuple):
    """How many requests were answered in runs before, and how many of them by a failure."""

    num_lines: int = 0
    num_failed: int = 0


def written_before(source: Path, output: Path, errors: Path | None) -> Written:
    """What of `source` the files answer already; a last line that was cut off is taken away.

    Raises UserError, and changes nothing, where the files hold anything but answers to `source`.
    """
    files = [path for path in (output, errors) if path is not None and path.exists()]
    answered = [_answers(path) for path in files]
    heads = [next(ends, None) for ends in answered]
    count = num_failed = 0
    for number, raw in raw_lines(source):
        custom_id = parse(raw, count, number).custom_id
        place = next((i for i, head in enumerate(heads) if head and head[0] == custom_id), None)
        if place is None:
            break
        num_failed += heads[place] == (custom_id, True)
        heads[place] = next(answered[place], None)
        count += 1
    for path, head in zip(files, heads, strict=True):
        if head is not None:
            raise UserError(
                f"{path} does not go on with {source}: after {count} requests it answers {head[0][:100]!r}; "
                "--overwrite begins anew",
                "resume",
            )
    for path in files:  # only now that all of it is known to be ours
        _end_at_a_line(path)
    return Written(count, num_failed)


def _answers(path: Path) -> Iterator[tuple[str, bool]]:
    """(custom_id, whether it failed) of whole lines; half a line that begins as ours do is passed over."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") and (number > 1 or raw[: len(_BEGINNING)] == _BEGINNING[: len(raw)]):
                return
            try:
                if not raw.endswith(b"\n"):
                    raise ValueError("half a line of something else")
                answer = json.loads(raw)
                if "response" not in answer:  # a request has an id too
                    raise KeyError("response")
                yield str(answer["custom_id"]), answer.get("error") is not None
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(f"{path}: line {number} is no answer of a batch", "resume") from None


def _end_at_a_line(path: Path) -> None:
    """Cuts off what follows the last newline: a run was killed in the middle of writing it."""
    if not path.is_file():  # a device or a pipe
        return
    with path.open("rb+") as file:
        end = file.seek(0, 2)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)
