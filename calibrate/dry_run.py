"""`qinfer quantize --dry-run`: time, memory and disk of a run, before any weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qinfer.calibrate import pipeline
from qinfer.calibrate.job import fast_dtype
from qinfer.calibrate.journal import finished_layers
from qinfer.calibrate.needs import Work, disk, memory
from qinfer.calibrate.pace import effort, measured_pace
from qinfer.calibrate.recipe import settle
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.writer import check_out, partial_folder
from qinfer.engine.footprint import format_size
from qinfer.env import host_memory
from qinfer.errors import UserError


@dataclass(frozen=True)
class DryRun:
    """What a run will take; bytes of memory and disk by name, at the worst moment."""

    scheme: str
    method: str
    layers: int
    tokens: int
    seconds: float
    process: int  # bytes of the process as it is now
    memory: Mapping[str, int]
    memory_free: int
    gpu_memory: int
    disk: Mapping[str, int]
    disk_free: int
    source_bytes: int
    finished: int  # layers that a stopped run of the same folder has left
    writes_text: bool = False  # the model writes text itself, for which all of it is loaded

    @property
    def peak(self) -> int:
        """Bytes of memory, the process itself included."""
        loaded = self.source_bytes if self.writes_text else 0
        return self.process + max(sum(self.memory.values()), loaded)

    @property
    def disk_peak(self) -> int:
        """Bytes of disk."""
        return sum(self.disk.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"peak": self.peak, "disk_peak": self.disk_peak}

    def to_text(self) -> str:
        """For a terminal."""
        text = f"{self.tokens:,} tokens of text" if self.tokens else "no text"
        stays = self.disk["checkpoint"]
        lines = [
            f"{self.scheme} by {self.method}, {self.layers} layers, {text}: nothing is read or written",
            f"  time  {_duration(self.seconds):>12}  estimated from this machine's speed, without the gate",
            f"  RAM   {format_size(self.peak):>12}  of {format_size(self.memory_free)} free: "
            + _sum({"the process": self.process, **self.memory}),
            f"  VRAM  {format_size(self.gpu_memory):>12}  calibration runs on the CPU",
            f"  disk  {format_size(self.disk_peak):>12}  of {format_size(self.disk_free)} free: "
            + _sum(self.disk),
            f"  files {format_size(self.source_bytes):>12}  become {format_size(stays)}, "
            f"{stays / self.source_bytes:.0%}",
        ]
        if self.finished:
            lines.append(f"  {self.finished} layers are finished: the same command goes on behind them")
        if self.peak > self.memory_free:
            lines.append("  RAM does not suffice: lower --num-samples or --max-seq-len")
        if self.writes_text:
            lines.append(
                f"  the model writes some of the text itself, for which all {format_size(self.source_bytes)} "
                "are loaded at once: --calibration FILE.txt does without"
            )
        if self.disk_peak > self.disk_free:
            lines.append("  the disk does not suffice: choose another for --out")
        return "\n".join(lines)


def plan(
    source: Checkpoint,
    out: Path,
    *,
    scheme: str,
    method: str | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    ranges: str | None = None,
    with_text: bool = False,
    calibration: str | None = None,
    num_samples: int | None = None,
    max_seq_len: int | None = None,
    overwrite: bool = False,
) -> DryRun:
    """Plans a run from the shapes of `source`; measures for a moment how fast this machine is.

    `with_text` says that text is read whatever the method is, for KV scales or sensitivities. Raises
    UserError as the run itself would for settings that do not go together, a source that is quantized and
    an `out` that holds something.
    """
    if source.is_quantized:
        raise UserError(f"{source.path} is quantized already: give the original model", "model")
    config = source.config
    recipe = settle(config, scheme, method, group_size=group_size, symmetric=symmetric, ranges=ranges)
    check_out(source, out, overwrite=overwrite)
    length = min(max_seq_len or pipeline.MAX_SEQ_LEN, config.context_len)
    tokens = (num_samples or pipeline.NUM_SAMPLES) * length if recipe.needs_text or with_text else 0
    dtype = fast_dtype()
    work = Work(config, recipe, tokens, length, pipeline.SEARCH_TOKENS, dtype.itemsize)
    return DryRun(
        scheme=recipe.scheme.label,
        method=recipe.method,
        layers=config.num_layers,
        tokens=tokens,
        seconds=config.num_layers * effort(work).seconds(measured_pace(dtype)),
        process=_resident(),
        memory=memory(work),
        memory_free=host_memory().available,
        gpu_memory=0,
        disk=disk(work),
        disk_free=_free(out),
        source_bytes=source.num_bytes,
        finished=finished_layers(partial_folder(out)),
        writes_text=tokens > 0 and calibration in (None, "self"),
    )


def _resident() -> int:
    """Bytes of memory that this process holds now."""
    status = Path("/proc/self/status")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return int(fields.get("VmRSS", "0 kB").split()[0]) * 1024


def _free(folder: Path) -> int:
    """Bytes free on the disk where `folder` is, or will be."""
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _sum(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{format_size(size)} {name}" for name, size in terms.items() if size)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
