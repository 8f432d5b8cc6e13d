"""Fields of a request that mean nothing here: taken, as vLLM takes them, but not in silence.

SDKs send new fields all the time, so an unknown one is no mistake; `temprature` is one, and looks the same.
The answer names what was ignored in the header `x-qinfer-ignored`, and the log names each field once, with
the one that may have been meant. Names come from strangers: only plain ones are repeated, and only so many.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Sequence

from starlette.requests import Request

from qinfer.server.open_body import OpenBody

logger = logging.getLogger(__name__)

HEADER = "x-qinfer-ignored"
MAX_NAMED = 16  # in one answer
MAX_TOLD = 1000  # in the log of one server
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Ignored:
    """Tells an operator and clients which fields were ignored."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, body: OpenBody, request: Request | None = None, also: Iterable[str] = ()) -> None:
        """Logs what of `body`, `also` among it, is new, and leaves the header for the answer to `request`."""
        names = [*body.unread, *also]
        if not names:
            return
        if request is not None:
            request.state.ignored = header_value(names)
        for name in names[:MAX_NAMED]:
            if _PLAIN.fullmatch(name) and name not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(name)
                logger.warning("the field %s means nothing here and is ignored%s", name, _meant(name, body))


def header_value(names: Sequence[str]) -> str:
    """The names as a header has them: those that are plain, and "..." where there are others."""
    plain = [name for name in names[:MAX_NAMED] if _PLAIN.fullmatch(name)]
    return ", ".join(plain + ["..."] * (len(plain) < len(names)))


def _meant(name: str, body: OpenBody) -> str:
    known = type(body).model_fields
    close = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f": is {close[0]} meant?" if close else ""
