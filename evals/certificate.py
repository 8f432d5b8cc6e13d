"""The gate's verdict on paper: `qinfer_gate.json` beside the checkpoint.

A certificate says: *these* bytes were compared with that source, on that text, through that engine with that
KV cache, and this was the verdict. It is bound to the bytes by the SHA-256 of every file that decides what
the model computes or what tokens it sees: weights, index, config, tokenizer, chat template, and whatever
else lies there as JSON. Not covered are sampling defaults (`generation_config.json`), which the gate does not
measure, and what qinfer writes itself. It says when it expires, and may carry a signature.

`clearance` reads it before a checkpoint is served. Nothing is cached: a cached hash would trust a time stamp.
Standard library only, so that refusing costs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qinfer.errors import GateError, UserError

if TYPE_CHECKING:
    from qinfer.evals.signature import Signer

CERTIFICATE_NAME = "qinfer_gate.json"
REPORT_NAME = "qinfer_gate.md"
FORMAT = 2
KV_RISK: Mapping[str, int] = {"float32": 0, "bfloat16": 1, "float16": 1, "int8": 2, "fp8": 3}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_INDEX = "model.safetensors.index.json"
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_COVERED = ("*.json", "tokenizer.model", "merges.txt", "chat_template.*", _MORE_TEMPLATES)
_NOT_COVERED = ("generation_config.json", "quantize_report.json")  # and what begins with "qinfer_"
_BLOCK = 1 << 20  # bytes hashed at a time


GateState = Literal["dense", "passed", "failed", "ungated"]
"""No verdict needed; a PASS that covers this use; served in spite of a FAIL, or without a valid verdict."""


class GateStatus(NamedTuple):
    """What the gate says of a checkpoint that may be served, and one line for the log and `/health`."""

    state: GateState
    line: str


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
    known = {*TOKENIZER_FILES, *(_TEMPLATE_FILES if templates else ())}
    return {name for name in names if name in known or (templates and fnmatchcase(name, _MORE_TEMPLATES))}


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


def write(
    checkpoint: Path,
    contents: Mapping[str, Any],
    hashes: Mapping[str, str],
    report: str,
    *,
    signer: Signer | None = None,
    valid_days: int | None = None,
) -> Path:
    """Writes the certificate (JSON, without NaN) and its Markdown report; returns the certificate's path.

    `contents` holds at least `verdict`, `reasons` and `settings` with `kv_cache_dtype`; `hashes` are those of
    `hash_files` taken before the checkpoint was loaded, so that a file changed while it was being measured
    makes the verdict stale. Raises UserError where the folder cannot be written to.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    document = {
        "format": FORMAT,
        **contents,
        "made_at": now.isoformat(),
        "expires": _expiry(contents["settings"], now, valid_days),
        "hashes": dict(hashes),
    }
    if signer is not None:
        document["signature"] = signer.sign(document)
    return _put(checkpoint, document, report)


def sign(checkpoint: Path, signer: Signer) -> dict[str, Any]:
    """Signs the certificate that lies there, whatever its verdict; returns it. GateError where none does."""
    document = read(checkpoint)
    document["signature"] = signer.sign(document)
    _put(checkpoint, document)
    return document


def read(checkpoint: Path) -> dict[str, Any]:
    """The certificate's contents; raises GateError in one line where it is missing or not understood."""
    path = checkpoint / CERTIFICATE_NAME
    try:
        document = json.loads(path.read_bytes())
        # NaN, infinities and lone surrogates are no JSON: they could be neither signed nor shown
        json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise GateError(f"{checkpoint} is quantized and has no verdict of the gate") from None
    except (OSError, ValueError, RecursionError) as error:
        raise GateError(f"{path} cannot be read as a certificate ({error})") from None
    if not _well_formed(document):
        raise GateError(f"{path} is not a certificate of format {FORMAT}")
    return dict(document)


def resolve_kv_cache_dtype(kv_cache_dtype: str, checkpoint: Path) -> str:
    """The key of KV_RISK that an option means; "auto" is what config.json says. UserError when unknown."""
    name = {"fp8_e4m3": "fp8"}.get(kv_cache_dtype, kv_cache_dtype)
    if name == "auto":
        config = _config(checkpoint)
        # fp8 is the only kind that compressed-tensors knows
        name = "fp8" if (config.get("quantization_config") or {}).get("kv_cache_scheme") else _dtype(config)
    if name not in KV_RISK:
        raise UserError(
            f"unknown kv_cache_dtype {kv_cache_dtype!r}; known: auto, {', '.join(KV_RISK)}", "kv_cache_dtype"
        )
    return name


def own_dtype(checkpoint: Path) -> str:
    """The dtype of activations that config.json says; UserError where it cannot be read."""
    return _dtype(_config(checkpoint))


def _config(checkpoint: Path) -> dict[str, Any]:
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
        return {**config, **(config.get("text_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{checkpoint / 'config.json'} cannot be read: {error}") from None


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def series(version: str) -> str:
    """ "0.3" of "0.3.1": within a series of qinfer a checkpoint computes what it was judged by."""
    return ".".join(version.split(".")[:2])


def _expiry(settings: Mapping[str, Any], now: datetime, valid_days: int | None) -> dict[str, Any]:
    """When the verdict ends, for `clearance` to obey and for a person to read."""
    version = settings.get("qinfer")
    end = None if valid_days is None else (now + timedelta(days=valid_days)).isoformat()
    rules = [
        "any file under `hashes` changed, or one of such a name added or removed",
        f"a KV cache riskier than {settings['kv_cache_dtype']}",
        "another tokenizer or chat template than the folder's",
    ]
    if (dtype := settings.get("dtype")) is not None:
        rules.insert(1, f"activations in another dtype than {dtype}, float32 excepted")
    if settings.get("lm_head_dtype", "auto") == "auto":
        rules.append("an lm_head quantized while loading")
    if version is not None:
        rules.append(f"a qinfer other than {series(version)}")
    if end is not None:
        rules.append(f"after {end}")
    return {"at": end, "qinfer": None if version is None else series(version), "rules": rules}


def _well_formed(document: object) -> bool:
    return (
        isinstance(document, dict)
        and document.get("format") == FORMAT
        and isinstance(document.get("verdict"), str)
        and isinstance(document.get("reasons"), list)
        and all(isinstance(reason, str) for reason in document["reasons"])
        and isinstance(document.get("settings"), dict)
        and isinstance(document["settings"].get("kv_cache_dtype"), str)
        and document["settings"]["kv_cache_dtype"] in KV_RISK
        and isinstance(document.get("made_at"), str)
        and _is_time(document["made_at"])
        and isinstance(document.get("hashes"), dict)
        and isinstance(document.get("expires"), dict)
        and _is_time(document["expires"].get("at"))
    )


def _is_time(value: object) -> bool:
    """Whether it is None or a time with its zone."""
    try:
        return value is None or datetime.fromisoformat(str(value)).tzinfo is not None
    except ValueError:
        return False


def _put(checkpoint: Path, document: Mapping[str, Any], report: str | None = None) -> Path:
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        if report is not None:
            _replace(checkpoint / REPORT_NAME, report)
        _replace(checkpoint / CERTIFICATE_NAME, text)
    except OSError as error:
        raise UserError(f"the certificate cannot be written to {checkpoint}: {error.strerror}") from error
    return checkpoint / CERTIFICATE_NAME


def _replace(path: Path, text: str) -> None:
    """Writes the file in one step, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
