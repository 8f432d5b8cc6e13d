"""The gate's verdict on paper: `qinfer_gate.json` beside the checkpoint.

A certificate says: *these* bytes were compared with that source, on that text, through that engine with that
KV cache, and this was the verdict. It is bound to the bytes by the `hashes` of the files that decide
what it computes. It says when it expires, and may carry a signature.

`clearance` reads it before a checkpoint is served. Whoever can write to the folder may have written it, so
`read` gives it out only if it has the form on which its readers rely. Standard library only, so that refusing
costs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qinfer.errors import GateError, UserError

if TYPE_CHECKING:
    from qinfer.evals.signature import Signer

CERTIFICATE_NAME = "qinfer_gate.json"
REPORT_NAME = "qinfer_gate.md"
FORMAT = 2
KV_RISK: Mapping[str, int] = {"float32": 0, "bfloat16": 1, "float16": 1, "int8": 2, "fp8": 3}

GateState = Literal["dense", "passed", "failed", "ungated"]
"""No verdict needed; a PASS that covers this use; served in spite of a FAIL, or without a valid verdict."""


class GateStatus(NamedTuple):
    """What the gate says of a checkpoint that may be served, and one line for the log and `/health`."""

    state: GateState
    line: str

    @property
    def is_warning(self) -> bool:
        """Whether it is served without a PASS that it needs, of which the log warns."""
        return self.state in ("ungated", "failed")


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
    return isinstance(document, dict) and all(fits(document.get(name)) for name, fits in _FORM.items())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _has_text(value: object, name: str) -> bool:
    return isinstance(value, dict) and _is_text(value.get(name))


def _is_time(value: object) -> bool:
    """Whether it is a time with its zone."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _are_settings(value: object) -> bool:
    return (
        isinstance(value, dict) and _has_text(value, "kv_cache_dtype") and value["kv_cache_dtype"] in KV_RISK
    )


def _is_end(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _are_texts(value.get("rules"))
        and (value.get("at") is None or _is_time(value["at"]))
    )


_FORM: Mapping[str, Callable[[object], bool]] = {
    "format": lambda value: value == FORMAT,
    "verdict": _is_text,
    "reasons": _are_texts,
    "settings": _are_settings,
    "made_at": _is_time,
    "hashes": lambda value: isinstance(value, dict),
    "expires": _is_end,
    "blame": lambda value: value is None or _has_text(value, "line"),
    "signature": lambda value: value is None or _has_text(value, "key"),
}
"""What a certificate's readers rely on, by the name of the part."""


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
