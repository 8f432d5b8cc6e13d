"""A recording of what an engine's thread does, by torch's profiler, for chrome://tracing or Perfetto.

For those who measure a server: recording slows it down and takes memory while it runs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from qinfer.env import profiler_dir
from qinfer.errors import UserError

if TYPE_CHECKING:
    from torch.profiler import profile


class Trace:
    """At most one recording at a time; both methods are called on the thread that is recorded."""

    def __init__(self) -> None:
        self._recording: profile | None = None
        self._prefix = ""

    def start(self, prefix: str | None) -> None:
        """Records from now on; UserError where nobody said where to, or it does already."""
        from torch.profiler import profile

        self._folder()
        if self._recording is not None:
            raise UserError("a recording is under way: stop it first")
        self._prefix = f"{prefix}-" if prefix else ""
        self._recording = profile()
        self._recording.start()

    def stop(self) -> Path:
        """Ends the recording and returns its file; UserError where there is none."""
        if self._recording is None:
            raise UserError("nothing is being recorded: start it first")
        recording, self._recording = self._recording, None
        recording.stop()
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._prefix}qinfer-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
        recording.export_chrome_trace(str(path))
        return path

    def _folder(self) -> Path:
        if (folder := profiler_dir()) is None:
            raise UserError("set QINFER_TORCH_PROFILER_DIR to the folder for recordings")
        return folder
