"""The files of a model folder: which are copied along, reading JSON, and folders that appear whole.

A folder that is being written lies beside its final place under another name and is renamed when complete,
so whoever looks sees all of it or nothing, whatever stops the writer.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qinfer.errors import CheckpointError

# What serving needs beside weights and config.json, and what a licence asks to keep with them.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError naming the file when it is missing or no JSON object."""
    what = "; a model's folder has one beside its .safetensors files" if path.name == "config.json" else ""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}{what}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def write_json(path: Path, value: Any) -> None:
    """Indented UTF-8 JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def companions(folder: Path) -> list[Path]:
    """Files of a model folder that go along with its weights: tokenizer, templates, generation config."""
    found = {file for pattern in _COMPANIONS for file in folder.glob(pattern) if file.is_file()}
    return sorted(found)


@contextmanager
def appears_whole(final: Path) -> Iterator[Path]:
    """A new folder beside `final` that takes its place when the block ends well or vanishes.

    Safe for processes that make the same folder at once: the first to finish wins, the others' is dropped.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = final.with_name(f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        yield draft
        try:
            draft.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def empty(folder: Path) -> None:
    """Removes all that is in a folder, and not the folder, which somebody may hold a lock on."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
