"""Every connection is an open file, and a process may have only so many.

The limit that a shell gives is small, for programs that use `select`; a server asks for more, as far as the
system lets it. Where that is not enough, connections wait in the system's queue until others close. asyncio
would say so thousands of times a second, with a traceback each: once a minute is enough to be seen.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from typing import Any

logger = logging.getLogger(__name__)

ENOUGH = 65536  # files; more than the requests that a server lets in
INTERVAL = 60.0  # seconds between two lines about the same
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_file_limit() -> None:
    """Lets this process open ENOUGH files, or as many as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LoopErrors:
    """What an event loop does with an error that nobody caught: as ever, but for connections kept waiting."""

    def __init__(self) -> None:
        self._told = -INTERVAL

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """To be set by `loop.set_exception_handler`."""
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in _OUT_OF:
            return loop.default_exception_handler(context)
        if loop.time() - self._told >= INTERVAL:
            self._told = loop.time()
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.warning(
                "connections wait: %s (at most %d files are open at once, one for each connection; "
                "`ulimit -n` or LimitNOFILE= allow more)",
                error.strerror,
                limit,
            )
