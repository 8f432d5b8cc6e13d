"""`qinfer quantize --dry-run`: time, memory and disk of a run, before any weight is read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qinfer.calibrate import mixed_run
from qinfer.calibrate.devices import chosen_device, device_name, fast_dtype
from qinfer.calibrate.journal import finished_layers
from qinfer.calibrate.mixing import average_bits
from qinfer.calibrate.needs import Work, disk, gpu_memory, memory, spills
from qinfer.calibrate.pace import disk_seconds, effort, measured_pace
from qinfer.calibrate.prepare import TextSize, needs_text, settle_recipe
from qinfer.calibrate.selftext import GPU_SHARE
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.writer import partial_folder
from qinfer.dtypes import DTYPES
from qinfer.engine.footprint import format_size
from qinfer.env import host_memory

_KEPT = 200 << 20  # bytes that libraries take at their first use, and that an allocator keeps for later
_GPU_PROCESS = 800 << 20  # bytes of a GPU that a process takes before it does anything; 751 MiB on an H200


@dataclass(frozen=True)
class DryRun:
    """What a run will take; bytes of memory and disk by name, at the worst moment."""

    scheme: str
    method: str
    layers: int
    tokens: int
    device: str
    seconds: float
    process: int  # bytes of the process as it is now, and of what it keeps for itself while it works
    memory: Mapping[str, int]
    memory_free: int
    gpu_process: int  # bytes of the GPU that a process takes by being there
    gpu_memory: Mapping[str, int]
    gpu_memory_free: int
    disk: Mapping[str, int]
    disk_free: int
    source_bytes: int
    finished: int  # layers that a stopped run into the same folder has left
    budget: float | None = None  # bits per weight that the worst units may be raised to, on average
    notes: tuple[str, ...] = ()  # what the recipe made of what was asked
    spills: bool = False  # hidden states wait on the disk
    whole: int = 0  # bytes of all weights, where the model writes text or its layers' damage is measured
    writes_text: bool = False

    @property
    def peak(self) -> int:
        """Bytes of memory, the process itself included."""
        whole = 0 if self.fits_gpu else self.whole
        return self.process + max(sum(self.memory.values()), whole)

    @property
    def gpu_peak(self) -> int:
        """Bytes of the GPU's memory."""
        whole = self.whole if self.fits_gpu else 0
        return self.gpu_process + max(sum(self.gpu_memory.values()), whole)

    @property
    def fits_gpu(self) -> bool:
        """Whether a GPU takes the whole model, where that is loaded at once."""
        return 0 < self.whole < GPU_SHARE * self.gpu_memory_free

    @property
    def disk_peak(self) -> int:
        """Bytes of disk."""
        return sum(self.disk.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {
            "peak": self.peak,
            "gpu_peak": self.gpu_peak,
            "disk_peak": self.disk_peak,
        }

    def to_text(self) -> str:
        """For a terminal."""
        text = f"{self.tokens:,} tokens of text" if self.tokens else "no text"
        stays = self.disk["checkpoint"]
        on_gpu = {"the process": self.gpu_process, **self.gpu_memory}
        lines = [
            f"{self.scheme} by {self.method}, {self.layers} layers, {text}: nothing is read or written",
            f"  time  {_duration(self.seconds):>12}  on {self.device}, at its speed of this moment, without "
            "the gate",
            f"  RAM   {format_size(self.peak):>12}  of {format_size(self.memory_free)} free: "
            + _sum({"the process": self.process, **self.memory}),
            f"  VRAM  {format_size(self.gpu_peak):>12}  "
            + (
                f"of {format_size(self.gpu_memory_free)} free: {_sum(on_gpu)}"
                if self.gpu_memory
                else "calibration runs on the CPU"
            ),
            f"  disk  {format_size(self.disk_peak):>12}  of {format_size(self.disk_free)} free: "
            + _sum(self.disk),
            f"  files {format_size(self.source_bytes):>12}  become {format_size(stays)}, "
            f"{stays / self.source_bytes:.0%}",
        ]
        return "\n".join([*lines, *(f"  {line}" for line in self._remarks())])

    def _remarks(self) -> Iterator[str]:
        """What is to be known beside the numbers."""
        yield from self.notes
        if self.budget is not None:
            yield f"the worst units are raised to 8 bits up to {self.budget:g} bits per weight on average"
        if self.finished:
            yield f"{self.finished} layers are finished: the command that began them goes on behind them"
        if self.spills:
            yield "hidden states wait on the disk: memory does not suffice for them"
        if self.peak > self.memory_free:
            yield "RAM does not suffice: lower --num-samples or --max-seq-len"
        if self.gpu_peak > self.gpu_memory_free:
            yield "VRAM does not suffice: free some of it, or choose --device cpu"
        if self.writes_text:
            yield (
                f"the model writes some of the text itself, for which all {format_size(self.whole)} are "
                "loaded at once: --calibration FILE.txt does without"
            )
        elif self.whole:
            yield f"what its layers do is measured first, for which all {format_size(self.whole)} are loaded"
        if self.disk_peak > self.disk_free:
            yield "the disk does not suffice: choose another for --out"


def plan(
    source: Checkpoint,
    out: Path,
    settings: Settings,
    *,
    mixing: bool = False,
    budget: float | None = None,
    overwrite: bool = False,
) -> DryRun:
    """Plans a run from the shapes of `source`; measures for a moment how fast this machine is.

    `mixing` says that sensitivities are measured, `budget` how many bits per weight the worst units may be
    raised to on average. Raises UserError as the run itself would.
    """
    config = source.config
    recipe = settle_recipe(source, settings, out, budget=budget, overwrite=overwrite)
    size = TextSize.of(settings, config)
    tokens = size.num_samples * size.max_seq_len if needs_text(recipe, settings, mixing=mixing) else 0
    where = chosen_device(settings.device)
    dtype = fast_dtype(where)
    work = Work(config, recipe, tokens, size.max_seq_len, dtype.itemsize, on_gpu=where.type == "cuda")
    pace = measured_pace(recipe.scheme, dtype, where)
    free, gpu_free = host_memory().available, _gpu_free(where)
    work = replace(work, on_disk=spills(work, free))
    finished = finished_layers(partial_folder(out))
    on_disk = disk(work)
    if budget is not None:
        bits = average_bits(config, recipe.scheme, {}, DTYPES[config.dtype].itemsize)
        on_disk["checkpoint"] += int((budget - bits) * config.num_layers * work.layer_weights / 8)
    needed = config.num_layers * effort(work).seconds(pace) + disk_seconds(work)
    before = mixed_run.measuring_seconds(config, tokens, pace) if mixing else 0.0
    writes_text = tokens > 0 and settings.calibration in (None, "self")
    return DryRun(
        scheme=recipe.scheme.label,
        method=recipe.method,
        layers=config.num_layers,
        tokens=tokens,
        device=device_name(where),
        seconds=_started() + before + (1 - finished / config.num_layers) * needed,
        process=_resident() + _KEPT,
        memory=memory(work),
        memory_free=free,
        gpu_process=_GPU_PROCESS if work.on_gpu else 0,
        gpu_memory=gpu_memory(work),
        gpu_memory_free=gpu_free,
        disk=on_disk,
        disk_free=_free(out),
        source_bytes=source.num_bytes,
        finished=finished,
        budget=budget,
        notes=recipe.notes,
        spills=work.on_disk,
        whole=max(source.num_bytes if writes_text else 0, mixed_run.whole_bytes(config) if mixing else 0),
        writes_text=writes_text,
    )


def _gpu_free(device: torch.device) -> int:
    """Bytes of the GPU's memory that this process could have, with what it takes by being there."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] + _GPU_PROCESS


def _started() -> float:
    """Seconds of processor time that it took this process to begin."""
    return time.process_time()


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
