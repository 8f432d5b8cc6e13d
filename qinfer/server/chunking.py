"""HTTP/1.1 for answers of a thousand small pieces: h11, but for the pieces themselves.

h11 checks every event against its state machine and writes a piece by way of four objects. Within a chunked
body a piece changes no state, and is its length, itself and two line ends: this writes just that. Heads, ends
and all that is read stay h11's.
"""

from __future__ import annotations

import h11

_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class ChunkingConnection(h11.Connection):
    """One connection, of a server."""

    _is_chunked = False

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """The bytes of an event, in parts; raises as h11."""
        if type(event) is h11.Data and event.data and self._is_chunked and self.our_state is h11.SEND_BODY:
            return [b"%x\r\n" % len(event.data), event.data, b"\r\n"]
        sent = super().send_with_data_passthrough(event)
        if type(event) is h11.Response:
            self._is_chunked = sent is not None and _CHUNKED in b"".join(sent).lower()
        return sent
