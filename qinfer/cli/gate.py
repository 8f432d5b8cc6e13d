"""`qinfer gate`: what the gate has said of a checkpoint, and whether that still holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.options import (
    DtypeOption,
    JsonOption,
    KVCacheDtypeOption,
    LMHeadDtypeOption,
    SignOption,
    TrustOption,
)
from qinfer.cli.output import show, stdout_kept_for_result
from qinfer.errors import GateError, UserError

if TYPE_CHECKING:
    from qinfer.evals.coverage import Use


def gate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint folder.", show_default=False)],
    trust: TrustOption = None,
    sign: SignOption = None,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    lm_head_dtype: LMHeadDtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Print the verdict on DIR: exit code 1 unless it would be served, so, now.

    Nothing is measured: every covered file is hashed and compared with the certificate beside it. --sign puts
    a signature on a certificate that is there, and on nothing that has changed since.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give that of a checkpoint", "folder")
    with stdout_kept_for_result():
        from qinfer.checkpoint.checkpoint import open_checkpoint
        from qinfer.dtypes import name_of
        from qinfer.evals.coverage import Use
        from qinfer.reading import Serving

        checkpoint = open_checkpoint(folder)
        serving = Serving.settle(dtype, kv_cache_dtype, checkpoint, lm_head_dtype)
        served = name_of(serving.dtype)
        use = Use(serving.kv_cache_dtype, lm_head_dtype, served, trust=tuple(trust or ()))
        if sign is not None:
            _sign(folder, sign)
        document = {"path": str(folder), **told(folder, use, is_quantized=checkpoint.is_quantized)}
    show(document, _text(document), as_json)
    if document["state"] == "refused":
        raise typer.Exit(1)


def _sign(folder: Path, key: Path) -> None:
    from qinfer.evals import certificate
    from qinfer.evals.hashes import hash_files
    from qinfer.evals.signature import Signer

    signer = Signer.load(key)
    if certificate.read(folder)["hashes"] != hash_files(folder):
        raise GateError(f"the verdict on {folder} is stale: what has changed since is not signed")
    certificate.sign(folder, signer)


def told(folder: Path, use: Use | None = None, *, is_quantized: bool) -> dict[str, Any]:
    """Whether a checkpoint would be served, why, and what its certificate says but for the files' hashes.

    `use` is how it would be, None: as it comes.
    """
    from qinfer.evals import certificate, clearance

    try:
        status = clearance.require(folder, use, "quantized" if is_quantized else "dense")
        found = {"state": status.state, "line": status.line}
    except GateError as error:
        found = {"state": "refused", "line": str(error)}
    try:
        written = certificate.read(folder)
    except GateError:
        written = {}
    return {**found, "certificate": {name: value for name, value in written.items() if name != "hashes"}}


def _text(document: dict[str, Any]) -> str:
    from qinfer.evals.words import one_line

    written, settings = document["certificate"], document["certificate"].get("settings", {})
    lines = [f"{'refused' if document['state'] == 'refused' else 'served'}: {document['line']}"]
    if not written:
        return one_line(lines[0])
    blame = written.get("blame") or {}
    lines += [f"verdict {written['verdict']}, given {written['made_at']}"]
    lines += [f"  {reason}" for reason in written["reasons"]]
    lines += [f"  {blame['line']}"] if blame else []
    wanted = ("against", "profile", "text", "tokens", "dtype", "kv_cache_dtype", "qinfer", "device_name")
    lines += [f"{name.replace('_', ' ')}: {settings[name]}" for name in wanted if name in settings]
    lines += [f"void: {rule}" for rule in written["expires"]["rules"]]
    signature = written.get("signature")
    lines.append(f"signed by {signature['key']}" if signature else "not signed")
    return "\n".join(map(one_line, lines))
