"""What qinfer asks of its surroundings: where its cache is, and the machine's memory and processor.

Read when asked, never at import, and nowhere else: whoever wants to know how the environment changes what
qinfer does reads this page. Only the standard library, so that planning memory needs no torch.

    QINFER_CACHE    folder of converted models and of what evaluations have measured (else
                    $XDG_CACHE_HOME/qinfer, else ~/.cache/qinfer)
    QINFER_BACKEND  auto: on a GPU the Triton kernels, and torch where they decline an input; torch: never a
                    Triton kernel; triton: an error where they decline
    QINFER_TORCH_PROFILER_DIR
                    folder for recordings of a server (trace.py)
    QINFER_CHECK    1: on a GPU every op runs both ways, and the first difference is an error; slow
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from qinfer.errors import UserError

# Instructions that decide which of torch's CPU kernels a linear reaches, as Linux and macOS spell them.
CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
)

BACKENDS = ("auto", "torch", "triton")


def cache_dir() -> Path:
    """Folder for converted models; made by whoever writes into it."""
    if chosen := os.environ.get("QINFER_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qinfer"


def cache_is_writable() -> bool:
    """Whether that folder, or the nearest one above it that exists, is a folder that may be written to."""
    folder = cache_dir().absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def results_dir() -> Path:
    """Folder where evaluations keep what they have measured."""
    return cache_dir() / "results"


def profiler_dir() -> Path | None:
    """Folder for recordings of what a server's engine does; None: nobody said where to."""
    chosen = os.environ.get("QINFER_TORCH_PROFILER_DIR")
    return Path(chosen).expanduser() if chosen else None


def backend() -> str:
    """QINFER_BACKEND: "auto" unless set; UserError for a value that is none of BACKENDS."""
    chosen = os.environ.get("QINFER_BACKEND") or "auto"
    if chosen not in BACKENDS:
        raise UserError(f"QINFER_BACKEND must be one of {', '.join(BACKENDS)}, not {chosen!r}")
    return chosen


def check() -> bool:
    """Whether QINFER_CHECK asks to compare both ways of every op; UserError for a value but 0 or 1."""
    chosen = os.environ.get("QINFER_CHECK") or "0"
    if chosen not in ("0", "1"):
        raise UserError(f"QINFER_CHECK must be 0 or 1, not {chosen!r}")
    return chosen == "1"


class HostMemory(NamedTuple):
    """RAM in bytes: what this process could ever have, and what is free for it now."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """RAM of the machine, or of the container where its limit is lower.

    Linux tells what is available; elsewhere half of the RAM counts as available. UserError on a system
    that tells neither. `root` stands before /proc and /sys.
    """
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        for limit, used in _container_limits(root):
            total, available = min(total, limit), min(available, max(0, limit - used))
        return HostMemory(total, available)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise UserError(
            f"{sys.platform} does not tell its memory: give a budget in bytes", "memory"
        ) from error
    return HostMemory(total, total // 2)


def _container_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of the control groups, v2 and v1, of this process."""
    groups = root / "proc/self/cgroup"
    found = []
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        v2 = controllers == ""
        base = root / ("sys/fs/cgroup" if v2 else "sys/fs/cgroup/memory")
        limit_name, used_name = (
            ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        for folder in (base / path.lstrip("/"), base):  # inside a container the path is often not mounted
            limit_file = folder / limit_name
            if limit_file.exists() and (limit := limit_file.read_text().strip()) != "max":
                found.append((int(limit), int((folder / used_name).read_text()) - _droppable(folder)))
    return found


def _droppable(folder: Path) -> int:
    """Bytes of file cache that the kernel gives back before it kills anyone; counted as used by the group."""
    stat = folder / "memory.stat"
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def cpu_name() -> str:
    """The processor as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """Those of CPU_FEATURES that this processor has; empty where the system does not list them."""
    cpuinfo = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags.update(line.split(":", 1)[1].split())
                break
    return tuple(feature for feature in CPU_FEATURES if feature in flags)
