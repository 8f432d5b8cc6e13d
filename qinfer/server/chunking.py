"""HTTP/1.1 for answers of a thousand small pieces: all is uvicorn's and h11's, but for the pieces themselves.

A piece of a body passes through every layer around a route as a message of its own, and h11 checks it against
its state machine. Within a chunked body a piece changes no state, and is its length, itself and two line
ends. So a connection offers, as an extension of ASGI, a plain function that writes just that. Heads, ends and
all that is read stay h11's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

EXTENSION = "qinfer.piece"
WritePiece = Callable[[bytes], bool]

_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_MAX_HEAD = 1 << 16  # bytes


class _Connection(h11.Connection):
    """A server's; `is_chunked`: whether the answer that has begun is."""

    is_chunked = False

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """The bytes of an event, in parts; raises as h11."""
        sent = super().send_with_data_passthrough(event)
        if type(event) is h11.Response:
            self.is_chunked = sent is not None and _CHUNKED in b"".join(sent).lower()
        return sent


class ChunkingH11(H11Protocol):
    """uvicorn's HTTP/1.1 with the extension."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn: _Connection = _Connection(h11.SERVER, _MAX_HEAD)
        self._routes: ASGIApp = self.app
        self.app = self._with_extension

    def write_piece(self, data: bytes) -> bool:
        """Writes a piece, not an empty one, of the body that has begun.

        False, and nothing is written, where it has to go the usual way: the body is not chunked or at its
        end, the client is slow or gone.
        """
        usable = self.conn.is_chunked and self.conn.our_state is h11.SEND_BODY
        usable = usable and not self.flow.write_paused and not self.transport.is_closing()
        if usable:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return usable

    async def _with_extension(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {EXTENSION: self.write_piece}
        await self._routes(scope, receive, send)


def piece_writer(scope: Scope) -> WritePiece:
    """The function that the server offers; one that never writes where it offers none."""
    offered: WritePiece | None = (scope.get("extensions") or {}).get(EXTENSION)
    return offered or (lambda data: False)
