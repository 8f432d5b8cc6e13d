"""The door of a server: open while it serves, shut while it drains, with a count of who is inside.

A request is inside until its answer's last byte is sent, so a stream that still runs keeps the server up for
as long as the operator lets it. Operators' routes pass at any time: a balancer learns of the end by /health.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from qinfer.server.errors import Failure

SHUT = "the server is shutting down"


class Door:
    """`is_open` until `shut`; `num_inside` requests are being answered."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_inside = 0

    def shut(self) -> None:
        """Lets nobody in from now on."""
        self.is_open = False

    async def wait_until_empty(self) -> None:
        """Returns when nobody is inside."""
        while self.num_inside:
            await asyncio.sleep(0.02)


class PassDoor:
    """Answers 503 where the door is shut, and tells `refused`; `open_paths` pass and are not counted."""

    def __init__(
        self, app: ASGIApp, *, door: Door, open_paths: frozenset[str], refused: Callable[[], None]
    ) -> None:
        self.app, self.door, self.open_paths, self.refused = app, door, open_paths, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open_paths:
            return await self.app(scope, receive, send)
        if not self.door.is_open:
            self.refused()
            return await Failure(503, SHUT).response()(scope, receive, send)
        self.door.num_inside += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.door.num_inside -= 1
