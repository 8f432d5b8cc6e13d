"""The whole file, read once before a model is loaded: hours later would be late to find a bad line.

Nothing of a line is kept but eight bytes of a hash of its custom_id, so that files larger than memory can be
checked for ids that occur twice; only where two hashes agree is the file read again, to be sure.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qinfer.batch.lines import LineFault, parse, raw_lines, request_of
from qinfer.errors import UserError
from qinfer.sampling_params import SamplingParams
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.errors import ApiError, Failure, failure_of
from qinfer.server.open_body import OpenBody
from qinfer.server.protocol import CompletionRequest
from qinfer.server.responses_protocol import ResponsesRequest
from qinfer.server.sampling import chat_params, completion_params

MAX_TOLD = 10
_ROOM = 1 << 30  # tokens: no model is known yet whose context could be too short


class Checked(NamedTuple):
    """How many requests the file has, and what the first of those that will fail have wrong."""

    num_lines: int
    num_bad: int
    told: list[str]


def check(path: Path, model_names: Collection[str]) -> Checked:
    """Reads every line; raises UserError where one is no request, naming the first ten.

    A request with a body that its route refuses is only counted: its answer will be that refusal.
    """
    hashes = array("Q")
    faults: list[str] = []
    told: list[str] = []
    num_faults = num_bad = 0
    for number, raw in raw_lines(path):
        try:
            line = parse(raw, len(hashes), number)
        except LineFault as fault:
            num_faults += 1
            faults += [f"line {number}: {fault}"] if len(faults) < MAX_TOLD else []
            continue
        hashes.append(_hash(line.custom_id))
        request = request_of(line, model_names)
        failure = request if isinstance(request, Failure) else _refusal(request)
        if failure is not None:
            num_bad += 1
            told += [f"line {number}: {failure.message}"] if len(told) < MAX_TOLD else []
    if not faults:
        faults = _repeated(path, hashes)
        num_faults = len(faults)
    if faults:
        more = f" (and {num_faults - MAX_TOLD} more)" if num_faults > MAX_TOLD else ""
        raise UserError(f"{path}: {'; '.join(faults[:MAX_TOLD])}{more}", "input_file")
    if not hashes:
        raise UserError(f"{path} holds no request", "input_file")
    return Checked(len(hashes), num_bad, told)


def _refusal(request: OpenBody) -> Failure | None:
    """What any model would be refused of this request: values out of range, or at odds with each other."""
    defaults = SamplingParams(max_tokens=_ROOM)
    try:
        if isinstance(request, ResponsesRequest):
            request.refuse_absent()
            request = request.chat([])
        if isinstance(request, CompletionRequest):
            completion_params(request, defaults, room=_ROOM)
        elif isinstance(request, ChatRequest):
            chat_params(request, defaults, room=_ROOM)
    except (UserError, ApiError, NotImplementedError) as error:
        return failure_of(error)
    return None


def _hash(custom_id: str) -> int:
    text = custom_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _repeated(path: Path, hashes: array[int]) -> list[str]:
    """One clause per line whose custom_id another had before."""
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64)) if hashes else np.empty(0, np.uint64)
    suspects = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return []
    first: dict[str, int] = {}
    faults = []
    for number, raw in raw_lines(path):
        custom_id = parse(raw, 0, number).custom_id
        if _hash(custom_id) not in suspects:
            continue
        if (before := first.setdefault(custom_id, number)) != number:
            faults.append(f"line {number}: custom_id {custom_id[:100]!r} is that of line {before}")
    return faults
