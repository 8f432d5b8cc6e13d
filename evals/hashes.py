"""The files of a checkpoint that a verdict is bound to, and their SHA-256.

Covered is every file that decides what the model computes or what tokens it sees: weights, index, config,
tokenizer, chat templates, and whatever else lies there as JSON. Not covered are sampling defaults
(`generation_config.json`), which the gate does not measure, and what qinfer writes itself.

Nothing is cached: a cached hash would trust a time stamp. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from qinfer.errors import GateError

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_INDEX = "model.safetensors.index.json"
_COVERED = ("*.json", "chat_template.*", *_TOKENIZER, *_TEMPLATES)
_NOT_COVERED = ("generation_config.json", "quantize_report.json")  # and what begins with "qinfer_"
_BLOCK = 1 << 20  # bytes hashed at a time


def weight_files(checkpoint: Path) -> dict[str, Path]:
    """Every file that weights may be read from, by name: what the index lists, whatever it is called."""
    found = {path.name: path for path in checkpoint.glob("*.safetensors")}
    if (checkpoint / _INDEX).is_file():
        try:
            listed = json.loads((checkpoint / _INDEX).read_bytes())["weight_map"].values()
            found |= {name: checkpoint / name for name in listed}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise GateError(f"{checkpoint / _INDEX} cannot be read as an index ({error})") from None
    return found


def covered_files(checkpoint: Path) -> dict[str, Path]:
    """Every file of the folder that the certificate covers, by name."""
    return dict(sorted((small_files(checkpoint) | weight_files(checkpoint)).items()))


def small_files(checkpoint: Path) -> dict[str, Path]:
    """What the certificate covers beside weights, by name."""
    paths = (path for pattern in _COVERED for path in checkpoint.glob(pattern))
    found = {path.relative_to(checkpoint).as_posix(): path for path in paths}
    left_out = {name for name in found if name.startswith("qinfer_")} | {*_NOT_COVERED}
    return {name: path for name, path in found.items() if name not in left_out}


def reading_files(names: Iterable[str], *, templates: bool) -> set[str]:
    """Those of a folder's file names that say how it turns text into tokens, with or without a chat's."""
    patterns = (*_TOKENIZER, *(_TEMPLATES if templates else ()))
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def hash_files(checkpoint: Path) -> dict[str, str]:
    """SHA-256 (hex) of every file of the folder that the certificate covers, by file name."""
    return hash_all(covered_files(checkpoint))


def hash_all(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 (hex) of each, on a few threads: hashlib gives up the interpreter's lock."""
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(files, pool.map(hash_file, files.values()), strict=True))


def hash_file(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """SHA-256 (hex) of a file, read in blocks; of what was read so far, once `stopped` says so.

    Raises GateError for what is no file or cannot be read: nothing can be said of it.
    """
    digest = hashlib.sha256()
    block = bytearray(_BLOCK)
    view = memoryview(block)
    try:
        if not path.is_file():  # a folder, a link that leads nowhere, or a pipe that would never end
            raise GateError(f"{path} is covered by the gate and is no file that can be read")
        with path.open("rb", buffering=0) as file:
            while not stopped() and (size := file.readinto(block)):
                digest.update(view[:size])
    except OSError as error:
        raise GateError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
