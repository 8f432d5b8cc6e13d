"""The gate's verdict on paper: `qinfer_gate.json` beside the checkpoint, and who may serve on it.

A certificate says: *these* bytes were compared with that source, on that text, through that engine with
that KV cache, and this was the verdict. It is bound to the bytes by the SHA-256 of every file that decides
what the model computes or what tokens it sees: weights, index, config, tokenizer, chat template. `require`
reads it before a quantized checkpoint is served and refuses a verdict that is failed, undecided, missing,
unreadable or stale. Stale means: any of those files was changed, added or removed since, or the KV cache to
be used is riskier than the one measured (float32 < bfloat16 = float16 < int8 < fp8; a safer one is fine), or
the head is to be int8 and was not.
Files are hashed in streams and nothing is cached: a cached hash would trust a time stamp. Not covered is
`generation_config.json`: it holds sampling defaults, which the gate does not measure. Standard library only,
so that refusing costs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qinfer.errors import GateError, UserError

CERTIFICATE_NAME = "qinfer_gate.json"
REPORT_NAME = "qinfer_gate.md"
FORMAT = 1
KV_RISK: Mapping[str, int] = {"float32": 0, "bfloat16": 1, "float16": 1, "int8": 2, "fp8": 3}
_COVERED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
)


class GateStatus(NamedTuple):
    """What the gate says of a checkpoint that may be served, and one line for the log and `/health`."""

    state: Literal["dense", "passed", "ungated"]
    line: str


def hash_files(checkpoint: Path) -> dict[str, str]:
    """SHA-256 (hex) of every file of the folder that the certificate covers, by file name."""
    paths = sorted({path for pattern in _COVERED for path in checkpoint.glob(pattern)})
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:  # hashlib releases the GIL
        return dict(zip((path.name for path in paths), pool.map(_sha256, paths), strict=True))


def write(checkpoint: Path, contents: Mapping[str, Any], hashes: Mapping[str, str], report: str) -> Path:
    """Writes the certificate (JSON, without NaN) and its Markdown report; returns the certificate's path.

    `contents` holds at least `verdict`, `reasons` and `settings` with `kv_cache_dtype`; `hashes` are those of
    `hash_files` taken before the checkpoint was loaded, so that a file changed while it was being measured
    makes the verdict stale. Raises UserError where the folder cannot be written to.
    """
    document = {"format": FORMAT, **contents, "hashes": dict(hashes)}
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        _replace(checkpoint / REPORT_NAME, report)
        _replace(checkpoint / CERTIFICATE_NAME, text)
    except OSError as error:
        raise UserError(f"the certificate cannot be written to {checkpoint}: {error.strerror}") from error
    return checkpoint / CERTIFICATE_NAME


def read(checkpoint: Path) -> dict[str, Any]:
    """The certificate's contents; raises GateError in one line where it is missing or not understood."""
    path = checkpoint / CERTIFICATE_NAME
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise GateError(f"{checkpoint} is quantized and has no verdict of the gate") from None
    except (OSError, ValueError, RecursionError) as error:
        raise GateError(f"{path} cannot be read as a certificate ({error})") from None
    if not _well_formed(document):
        raise GateError(f"{path} is not a certificate of format {FORMAT}")
    return dict(document)


def require(
    checkpoint: Path,
    *,
    is_quantized: bool,
    kv_cache_dtype: str,
    allow_ungated: bool,
    lm_head_dtype: str = "auto",
) -> GateStatus:
    """Says whether the checkpoint may be served with that KV cache and head; a dense one always may.

    `kv_cache_dtype` is a key of KV_RISK, "fp8_e4m3" or "auto" (what config.json says). Raises GateError,
    one line with the reason and the way to a verdict, unless `allow_ungated`, and UserError for an unknown
    dtype.
    """
    if not is_quantized:
        return GateStatus("dense", "dense weights: no verdict needed")
    kv_cache_dtype = resolve_kv_cache_dtype(kv_cache_dtype, checkpoint)
    try:
        document = read(checkpoint)
        _check(checkpoint, document, kv_cache_dtype, lm_head_dtype)
    except GateError as error:
        if allow_ungated:
            return GateStatus("ungated", f"served without a valid verdict of the gate: {error}")
        raise GateError(
            f"{error}; get a verdict with `qinfer eval {checkpoint} --against REF{_option(lm_head_dtype)}`, "
            "or serve it all the same with --allow-ungated (allow_ungated=True)"
        ) from None
    return GateStatus("passed", f"gate passed: {document['reasons'][0] if document['reasons'] else 'PASS'}")


def require_dummy(*, allow_ungated: bool) -> GateStatus:
    """What there is to say of random weights; raises GateError unless `allow_ungated`."""
    if not allow_ungated:
        raise GateError(
            "dummy weights are random numbers, which no gate judges: they are there to be measured "
            "(`qinfer bench`); serve them all the same with --allow-ungated (allow_ungated=True)"
        )
    return GateStatus("ungated", "dummy weights: random numbers, which no gate judges")


def resolve_kv_cache_dtype(kv_cache_dtype: str, checkpoint: Path) -> str:
    """The key of KV_RISK that an option means; "auto" is what config.json says. UserError when unknown."""
    name = {"fp8_e4m3": "fp8"}.get(kv_cache_dtype, kv_cache_dtype)
    if name == "auto":
        try:
            config = json.loads((checkpoint / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{checkpoint / 'config.json'} cannot be read: {error}") from None
        config = {**config, **(config.get("text_config") or {})}
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if (config.get("quantization_config") or {}).get("kv_cache_scheme"):
            name = "fp8"  # the only kind that compressed-tensors knows
    if name not in KV_RISK:
        raise UserError(
            f"unknown kv_cache_dtype {kv_cache_dtype!r}; known: auto, {', '.join(KV_RISK)}", "kv_cache_dtype"
        )
    return name


def _option(lm_head_dtype: str) -> str:
    """What the command needs so that its verdict covers this head."""
    return "" if lm_head_dtype == "auto" else f" --lm-head-dtype {lm_head_dtype}"


def _check(checkpoint: Path, document: Mapping[str, Any], kv_cache_dtype: str, lm_head_dtype: str) -> None:
    """Raises GateError with the first reason why the certificate does not cover serving."""
    if document["verdict"] != "PASS":
        because = f" ({document['reasons'][0]})" if document["reasons"] else ""
        raise GateError(f"the gate's verdict on {checkpoint} is {document['verdict']}{because}")
    measured = document["settings"]["kv_cache_dtype"]
    if not KV_RISK[kv_cache_dtype] <= KV_RISK[measured]:
        raise GateError(
            f"the verdict on {checkpoint} was measured with a {measured} KV cache "
            f"and does not cover {kv_cache_dtype}"
        )
    if lm_head_dtype not in ("auto", document["settings"].get("lm_head_dtype", "auto")):
        raise GateError(
            f"the verdict on {checkpoint} was measured with a dense lm_head "
            f"and does not cover {lm_head_dtype}"
        )
    then, now = document["hashes"], hash_files(checkpoint)
    changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if changed:
        raise GateError(
            f"the verdict on {checkpoint} is stale: {', '.join(changed)} changed since it was given"
        )


def _well_formed(document: object) -> bool:
    return (
        isinstance(document, dict)
        and document.get("format") == FORMAT
        and isinstance(document.get("verdict"), str)
        and isinstance(document.get("reasons"), list)
        and all(isinstance(reason, str) for reason in document["reasons"])
        and isinstance(document.get("settings"), dict)
        and document["settings"].get("kv_cache_dtype") in KV_RISK
        and isinstance(document.get("hashes"), dict)
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, text: str) -> None:
    """Writes the file in one step, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
