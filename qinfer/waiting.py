"""The note beside a checkpoint that waits for its verdict: by what call it was made, and from what files.

Where judging was interrupted, the same call finds the note and goes on with judging, told to overwrite or
not.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import qinfer
from qinfer.calibrate.report import FILE_NAME, QuantizeReport
from qinfer.checkpoint.files import read_json
from qinfer.reading import OpenModel

NAME = "qinfer_waiting.json"

logger = logging.getLogger(__name__)


def call_of(source: OpenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is read and how it is quantized, JSON-ready.

    Files that have changed since are others, though their names are the same.
    """
    calibration = settings["calibration"]
    files = list(source.checkpoint.weight_files)
    if isinstance(calibration, str) and os.path.isfile(calibration):
        files.append(Path(calibration))
    stats = {str(file.resolve()): file.stat() for file in files}
    return {
        "qinfer": qinfer.__version__,
        "source": str(source.checkpoint.path.resolve()),
        "size_and_time": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        **settings,
    }


def note(call: dict[str, Any]) -> dict[str, str]:
    """The note, by its file's name."""
    return {NAME: json.dumps(call, indent=1, default=repr)}


def wait(folder: Path, call: dict[str, Any]) -> None:
    """Leaves the note in a folder whose verdict is not the last word."""
    for name, text in note(call).items():
        (folder / name).write_text(text, encoding="utf-8")


def found(folder: Path, call: dict[str, Any], *, overwrite: bool) -> QuantizeReport | None:
    """Report of the checkpoint that this very call made in `folder` and that waits for its verdict."""
    path = folder / NAME
    if not os.path.isfile(path) or read_json(path) != call:  # Path's own raises where a name is too long
        return None
    logger.warning(
        "%s was made by this command before and waits for its verdict: judging it%s",
        folder,
        ", not overwriting it" if overwrite else "",
    )
    return QuantizeReport.from_dict(read_json(folder / FILE_NAME))


def is_over(folder: Path) -> None:
    """Takes the note away, where there is one."""
    (folder / NAME).unlink(missing_ok=True)
