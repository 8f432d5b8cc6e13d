"""What a verdict covers: that KV cache, those activations, that head, tokenizer and template, until then.

A use that is riskier than what was measured is refused: a KV cache of a riskier kind (float32 < bfloat16 =
float16 < int8 < fp8; a safer one is fine); activations in another dtype, unless that is float32, since
bfloat16 rounds where float16 does not and float16 overflows where bfloat16 does not; an int8 head where the
measured one was dense; another tokenizer or chat template. So is a verdict that has ended.

Every refusal carries what would help: not each is mended by judging once more.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import qinfer
from qinfer.errors import GateError, UserError
from qinfer.evals import signature
from qinfer.evals.certificate import (
    KV_RISK,
    GateState,
    own_dtype,
    read,
    resolve_kv_cache_dtype,
    series,
)
from qinfer.evals.hashes import hash_all, reading_files, small_files

_SAFEST = "float32"


@dataclass(frozen=True)
class Use:
    """How a checkpoint is to be served, as far as a verdict depends on it."""

    kv_cache_dtype: str = "auto"  # a key of KV_RISK, "fp8_e4m3" or "auto": what config.json says
    lm_head_dtype: str = "auto"
    dtype: str | None = None  # of activations; None: the measured one
    tokenizer: Path | None = None  # another folder's
    chat_template: str | None = None  # the text of another one
    trust: tuple[Path, ...] = ()  # public keys, one of which must have signed
    device: str | None = None  # "cpu" or "cuda"; another than the measured one is said, not refused

    def options(self, checkpoint: Path) -> str:
        """What `qinfer eval` must be told to judge such a use, each option with a space before it."""
        try:
            own = own_dtype(checkpoint)
        except UserError:  # damaged since: nobody knows what goes without saying
            own = None
        said = "" if self.dtype in (None, own) else f" --dtype {self.dtype}"
        if self.kv_cache_dtype not in ("auto", self.dtype or own):
            said += f" --kv-cache-dtype {self.kv_cache_dtype}"
        return said if self.lm_head_dtype == "auto" else f"{said} --lm-head-dtype {self.lm_head_dtype}"


class Refusal(GateError):
    """Why a verdict does not let a checkpoint be served; `remedy` is what would, `state` what to call it."""

    def __init__(self, message: str, remedy: str, state: GateState = "ungated") -> None:
        super().__init__(message)
        self.remedy = remedy
        self.state: GateState = state


def covered(checkpoint: Path, use: Use) -> dict[str, Any]:
    """The certificate, once it covers such a use; raises Refusal with the first reason why it does not.

    Raises UserError for an unknown KV dtype and for a trusted key that is none.
    """
    kv_cache_dtype = resolve_kv_cache_dtype(use.kv_cache_dtype, checkpoint)
    document: dict[str, Any] = {}
    try:
        document = read(checkpoint)
        if use.trust:
            _check_signature(checkpoint, document, use)
        if document["verdict"] != "PASS":
            raise _not_passed(checkpoint, document)
        _check_expiry(checkpoint, document["expires"], datetime.now(UTC))
        _check_numbers(checkpoint, document["settings"], use, kv_cache_dtype)
        check_reading(checkpoint, document["hashes"], use)
    except Refusal:
        raise
    except GateError as error:
        raise Refusal(str(error), judge_again(checkpoint, use, document)) from None
    return document


def judge_again(checkpoint: Path, use: Use, document: Mapping[str, Any]) -> str:
    """The command that gives a verdict on such a use; an earlier certificate (or {}) names the source."""
    source = _said(document, "settings", "against")
    named = "REF" if source is None else shlex.quote(source)
    command = f"qinfer eval {shlex.quote(str(checkpoint))} --against {named}{use.options(checkpoint)}"
    return f"get a verdict with `{command}`"


def check_reading(checkpoint: Path, then: Mapping[str, str], use: Use) -> None:
    """Refuses another tokenizer or chat template than the one the verdict was measured with."""
    if use.tokenizer is not None:
        files = small_files(use.tokenizer)
        templates = use.chat_template is None  # which would take the place of all that the folder has
        there = hash_all({name: files[name] for name in reading_files(files, templates=templates)})
        ours = {name: then[name] for name in reading_files(then, templates=templates)}
        if there != ours:
            raise Refusal(
                f"the verdict on {checkpoint} was measured with its own tokenizer and chat template "
                f"and does not cover those of {use.tokenizer}",
                "leave --tokenizer out, or put those files into the folder and judge that",
            )
    if use.chat_template is not None:
        given = sha256(use.chat_template.encode("utf-8", "surrogatepass")).hexdigest()
        if given != then.get("chat_template.jinja"):
            raise Refusal(
                f"the verdict on {checkpoint} was measured with its own chat template and does not cover "
                "another",
                "leave --chat-template out, or put it into the folder as chat_template.jinja and judge that",
            )


def _check_signature(checkpoint: Path, document: Mapping[str, Any], use: Use) -> None:
    try:
        signature.check(document, use.trust)
    except GateError as error:
        raise Refusal(
            f"the verdict on {checkpoint} is not to be trusted: {error}",
            f"have it signed by a holder of such a key (`qinfer gate {shlex.quote(str(checkpoint))} "
            "--sign KEY`)",
        ) from None


def _check_expiry(checkpoint: Path, expires: Mapping[str, Any], now: datetime) -> None:
    end, known = expires.get("at"), expires.get("qinfer")
    if end is not None and now >= datetime.fromisoformat(end):
        raise GateError(f"the verdict on {checkpoint} expired at {end}")
    if known not in (None, series(qinfer.__version__)):
        raise GateError(
            f"the verdict on {checkpoint} was given by qinfer {known} and this is {qinfer.__version__}, "
            "whose numbers may differ"
        )


def _check_numbers(checkpoint: Path, settings: Mapping[str, Any], use: Use, kv: str) -> None:
    """Refuses a KV cache, activations or a head that are riskier than the measured ones."""
    measured = settings["kv_cache_dtype"]
    if KV_RISK[kv] > KV_RISK[measured]:
        raise GateError(
            f"the verdict on {checkpoint} was measured with a {measured} KV cache and does not cover {kv}"
        )
    dtype = settings.get("dtype")
    if use.dtype not in (None, _SAFEST, dtype):
        raise GateError(
            f"the verdict on {checkpoint} was measured with activations in {dtype} "
            f"and does not cover {use.dtype}"
        )
    if use.lm_head_dtype not in ("auto", settings.get("lm_head_dtype", "auto")):
        raise GateError(
            f"the verdict on {checkpoint} was measured with a dense lm_head "
            f"and does not cover {use.lm_head_dtype}"
        )


def _not_passed(checkpoint: Path, document: Mapping[str, Any]) -> Refusal:
    """Judged again it would be the same: what helps is another checkpoint, or more evidence."""
    verdict = document["verdict"]
    because = f" ({document['reasons'][0]})" if document["reasons"] else ""
    message = f"the gate's verdict on {checkpoint} is {verdict}{because}"
    if verdict != "FAIL":
        return Refusal(message, "measure more: a longer --budget or none, more --tasks, a longer --text")
    return Refusal(message, _way_out(document), "failed")


def _way_out(document: Mapping[str, Any]) -> str:
    """What may turn a FAIL into a PASS, by what the certificate knows of it."""
    if how := _said(document, "offer", "how"):  # which was tried
        return f"what passes in its place: {how}"
    if culprit := _said(document, "blame", "culprit"):
        return f"{culprit} alone is to blame: make the checkpoint anew"
    if not document.get("measures"):
        return "give it its source's tokenizer files and chat template, and judge that"
    return "see that --against is what it was made from, quantize with --until-gate, or choose a finer scheme"


def _said(document: Mapping[str, Any], part: str, name: str) -> str | None:
    """A line of one part of the certificate, which anybody may have written."""
    found = document.get(part)
    line = found.get(name) if isinstance(found, Mapping) else None
    return line if isinstance(line, str) and line.isprintable() and line else None
