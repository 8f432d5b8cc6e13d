"""Who may serve: whether a certificate covers these bytes, used in this way, now.

A quantized checkpoint is refused when its verdict is failed, undecided, missing, unreadable, expired, not
signed by a trusted key where one is demanded, or stale: a covered file was changed, added or removed since.
What else a verdict covers, and what helps where it does not, is in `coverage`.

All that can be known at once is checked when a `Clearance` is made. The weights are hashed on threads of
their own while they are loaded, and `result` waits for that: nothing is served before it has returned. A
file, of weights or not, whose time or size differs between the two ends is as stale as one with another hash.

Where a person allows it, an ungated checkpoint is served all the same, and everything says so; one that has
failed is told apart from one of which nothing valid is known.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from qinfer.errors import GateError
from qinfer.evals import signature
from qinfer.evals.certificate import GateStatus
from qinfer.evals.coverage import Refusal, Use, check_reading, covered, judge_again
from qinfer.evals.hashes import covered_files, hash_all, hash_file, weight_files
from qinfer.evals.words import one_line

Kind = Literal["dense", "quantized", "dummy"]

logger = logging.getLogger(__name__)


class Clearance:
    """A check under way; a context, at whose end hashing stops. `result` gives the status.

    Dense weights need no verdict, dummy ones can have none. Raises GateError, one line with the reason and
    the way to a verdict, unless `allow_ungated`; UserError for an unknown KV dtype or a file that is no key.
    `reads` are the files that the opened checkpoint takes weights from: each must be covered.
    """

    def __init__(
        self,
        checkpoint: Path,
        use: Use,
        kind: Kind = "quantized",
        *,
        allow_ungated: bool = False,
        reads: Iterable[Path] = (),
    ) -> None:
        self._checkpoint, self._use, self._allow = checkpoint, use, allow_ungated
        self._stopped = threading.Event()
        self._threads: ThreadPoolExecutor | None = None
        self._hashes: dict[str, Future[str]] = {}
        self._status: GateStatus | None = None
        self._document: dict[str, Any] = {}
        if kind == "dense":
            self._status = GateStatus("dense", "dense weights: no verdict needed")
            return
        if kind == "dummy":
            self._status = _dummy_status(allow_ungated)
            return
        try:
            self._marks = _marks(checkpoint)
            self._document = covered(checkpoint, use)
            weights = _check_small_files(checkpoint, self._document["hashes"])
            # an index that was another one when the weights were opened led to other files
            strange = {str(path) for path in reads if path not in weights.values()}
            _refuse_changed(checkpoint, strange)
        except GateError as error:
            self._status = self._refused(error)
            return
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "qinfer-hash")
        for name, path in weights.items():
            self._hashes[name] = self._threads.submit(hash_file, path, self._stopped.is_set)

    def __enter__(self) -> Clearance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._threads is not None:
            self._threads.shutdown()

    def result(self) -> GateStatus:
        """Waits for the hashes of the weights and says on what verdict the checkpoint is served."""
        if self._status is None:
            try:
                self._check_weights()
                self._status = GateStatus("passed", one_line(_line(self._document, self._use)))
            except GateError as error:
                self._status = self._refused(error)
        if self._status.is_warning:
            logger.warning("%s", self._status.line)
        return self._status

    def _check_weights(self) -> None:
        then = self._document["hashes"]
        now = {name: future.result() for name, future in self._hashes.items()}
        # also of the small files: the tokenizer and its templates were read since
        moved = {name for name, _ in self._marks.items() ^ _marks(self._checkpoint).items()}
        _refuse_changed(self._checkpoint, moved | {name for name in now if now[name] != then[name]})
        _check_small_files(self._checkpoint, then)
        check_reading(self._checkpoint, then, self._use)

    def _refused(self, error: GateError) -> GateStatus:
        refusal = error if isinstance(error, Refusal) else self._stale(error)
        if not self._allow:
            allow = "serve it all the same with --allow-ungated (allow_ungated=True)"
            raise GateError(one_line(f"{refusal}; {refusal.remedy}; or {allow}")) from None
        served = "in spite of a FAIL" if refusal.state == "failed" else "without a valid verdict of the gate"
        return GateStatus(refusal.state, one_line(f"served {served}: {refusal}"))

    def _stale(self, error: GateError) -> Refusal:
        """Files that differ or cannot be read: another verdict is what they want."""
        return Refusal(str(error), judge_again(self._checkpoint, self._use, self._document))


def require(
    checkpoint: Path, use: Use | None = None, kind: Kind = "quantized", *, allow_ungated: bool = False
) -> GateStatus:
    """The whole check at once, without loading anything; raises like `Clearance`."""
    with Clearance(checkpoint, use or Use(), kind, allow_ungated=allow_ungated) as clearance:
        return clearance.result()


def _dummy_status(allow_ungated: bool) -> GateStatus:
    if not allow_ungated:
        raise GateError(
            "dummy weights are random numbers, which no gate judges: they are there to be measured "
            "(`qinfer bench`); serve them all the same with --allow-ungated (allow_ungated=True)"
        )
    return GateStatus("ungated", "dummy weights: random numbers, which no gate judges")


def _check_small_files(checkpoint: Path, then: Mapping[str, str]) -> dict[str, Path]:
    """Weight files, which are left to be hashed, once all other files are as they were."""
    now = covered_files(checkpoint)
    weights = weight_files(checkpoint)
    small = {name: path for name, path in now.items() if name not in weights}
    hashes = hash_all(small)
    _refuse_changed(
        checkpoint, then.keys() ^ now.keys() | {name for name in small if then.get(name) != hashes[name]}
    )
    return weights


def _refuse_changed(checkpoint: Path, names: set[str]) -> None:
    if names:
        raise GateError(
            f"the verdict on {checkpoint} is stale: {', '.join(sorted(names))} changed since it was given"
        )


def _marks(checkpoint: Path) -> dict[str, tuple[int, ...] | None]:
    """Of each covered file what differs when it was written to or replaced; None where there is none."""
    return {name: _mark(path) for name, path in covered_files(checkpoint).items()}


def _mark(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    # mtime can be set back by whoever writes, ctime cannot
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _line(document: Mapping[str, Any], use: Use) -> str:
    said = f"gate passed: {document['reasons'][0] if document['reasons'] else 'PASS'}"
    if use.trust:
        said += f"; signed by {signature.signed_by(document)}"
    measured = document["settings"].get("device")
    if use.device is not None and measured not in (None, use.device):
        said += f"; measured on {measured}, served on {use.device} by other kernels"
    return said
