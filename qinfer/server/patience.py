"""How long a connection may owe the server something: a request's head, or the next piece of its body.

A connection is an open file, of which there are only so many, and a client that has gone without a word, or
means ill, would keep it for ever. uvicorn closes what is idle between two requests; this closes what has
asked nothing since it came, stops in the middle of a head, or of a body. Answers may take any time.
"""

from __future__ import annotations

import asyncio
from typing import cast

from qinfer.server.chunking import ChunkingH11

SECONDS = 60.0


class PatientH11(ChunkingH11):
    """uvicorn's HTTP/1.1, that closes a connection whose client owes it something for SECONDS."""

    _debt: asyncio.TimerHandle | None = None
    _is_body = False  # that which it owes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        super().connection_made(cast(asyncio.Transport, transport))  # uvicorn asks for no less than it gets
        self._note_debt()

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        super().data_received(data)
        self._note_debt()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        self._forget_debt()
        super().connection_lost(exc)

    def _note_debt(self) -> None:
        """A head is due as a whole, from its first byte on; of a body each piece."""
        under_way = self.cycle is not None and not self.cycle.response_complete
        owes_body = under_way and self.cycle.more_body
        if under_way or self._is_body:
            self._forget_debt()
        self._is_body = owes_body
        if self._debt is None and (owes_body or not under_way) and not self.transport.is_closing():
            self._debt = self.loop.call_later(SECONDS, self.transport.close)

    def _forget_debt(self) -> None:
        if self._debt is not None:
            self._debt.cancel()
            self._debt = None
