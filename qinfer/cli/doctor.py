"""`qinfer doctor`: what this machine has, and which path each op would take on it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from qinfer.cli.options import JsonOption
from qinfer.cli.output import show, stdout_kept_for_result

PACKAGES = (
    "qinfer", "torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub",
    "numpy", "fastapi", "uvicorn", "pydantic", "typer",
)  # fmt: skip


def doctor(as_json: JsonOption = False) -> None:
    """Show versions, processor, memory, GPU, the path of every op, and the cache folder."""
    with stdout_kept_for_result():
        from qinfer import backend, ops

        document = {
            "python": platform.python_version(),
            "system": platform.platform(),
            "packages": {name: _version(name) for name in PACKAGES},
            "cpu": _cpu(),
            "torch": _torch(),
            "gpus": _gpus(),
            "models_run_on": str(backend.model_device()),
            "cpu_paths": ops.cpu_paths(),
            "cache": _cache(),
        }
    show(document, _text(document), as_json)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    from qinfer import env

    memory = env.host_memory()
    return {
        "name": env.cpu_name(),
        "features": list(env.cpu_features()),
        "memory_total": memory.total,
        "memory_available": memory.available,
    }


def _torch() -> dict[str, Any]:
    """Threads and the CPU back ends that the quantized ops live in."""
    import torch

    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "quantized_engines": list(torch.backends.quantized.supported_engines),
        "cuda_build": torch.version.cuda,
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    from qinfer import backend

    found = []
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        capability = f"{card.major}.{card.minor}"
        ops = backend.describe(card.name, card.major)
        found.append(
            {"name": card.name, "capability": capability, "memory_total": card.total_memory, "ops": ops}
        )
    return found


def _cache() -> dict[str, Any]:
    from qinfer import env

    folder = env.cache_dir()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    return {"path": str(folder), "num_bytes": size, "writable": env.cache_is_writable()}


def _text(document: dict[str, Any]) -> str:
    from qinfer.engine.footprint import format_size

    cpu, torch, cache = document["cpu"], document["torch"], document["cache"]
    kept = format_size(cache["num_bytes"])
    if not cache["writable"]:
        kept += "; it cannot be written: set QINFER_CACHE to a folder that can"
    packages = [f"{name} {found}" for name, found in document["packages"].items() if found]
    absent = [name for name, found in document["packages"].items() if not found]
    gpus = [
        f"{card['name']} (sm {card['capability']}, {format_size(card['memory_total'])})"
        for card in document["gpus"]
    ]
    rows = [
        ("python", f"{document['python']} on {document['system']}"),
        ("packages", ", ".join(packages)),
        ("not installed", ", ".join(absent) or "-"),
        ("cpu", f"{cpu['name']}: {', '.join(cpu['features']) or 'no features listed'}"),
        ("memory", f"{format_size(cpu['memory_available'])} available of {format_size(cpu['memory_total'])}"),
        (
            "torch",
            f"{torch['threads']} threads, {torch['cpu_capability']}, CUDA {torch['cuda_build'] or 'no'}",
        ),
        ("gpu", "; ".join(gpus) or "none"),
        *((f"ops on {card['name']}", card["ops"]) for card in document["gpus"]),
        ("models run on", document["models_run_on"]),
        ("cache", f"{cache['path']} ({kept})"),
    ]
    rows += [(f"op {name} on the cpu", path) for name, path in document["cpu_paths"].items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
