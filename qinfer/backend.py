"""Which of an op's twins runs on a GPU: its Triton kernel, or its meaning in plain torch.

The twin of `qinfer.kernels.<op>.<function>` is the function of the same name in
`qinfer.kernels.<op>_triton`, with the same signature. `QINFER_BACKEND` decides (env.py). A twin may decline
an input; then the meaning runs, and that is said once with the op, the shapes and the reason: it is slow.

`QINFER_CHECK=1` runs both on every call and raises at the first that differ: the thing to switch on first
when a model talks nonsense on a GPU. The settings are read once, at the first op.

On the CPU nobody asks here: `ops` looks at one attribute of a tensor and calls what the CPU has.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from qinfer import env
from qinfer.errors import UserError
from qinfer.kernels.tiles import Declined, gpu_key, is_measured

logger = logging.getLogger(__name__)

fallbacks: Counter[tuple[str, str]] = Counter()  # how often an op ran without its kernel, and why

P = ParamSpec("P")
R = TypeVar("R")

# ||a - b|| / ||b|| above which two twins are called different. They round at other places: 8-bit codes of one
# input may differ by one step in a few elements, which moves a product by less than this.
CHECK_LIMIT = 2e-2
# The same of 8-bit codes, whose numbers a twin may round to bfloat16 on the way, unlike the meaning: then
# up to an eighth of a row's codes are the next ones, in e4m3 6e-2 of it.
CODES_LIMIT = 8e-2

CODES = (torch.int8, torch.float8_e4m3fn)
HOPPER = 9  # major compute capability; the kernels use instructions that no other has


class Settings(NamedTuple):
    """What the environment asks of the ops."""

    backend: str
    check: bool


class Rehearsal(NamedTuple):
    """A copy of what an op will write into, so that its meaning can be tried without harm.

    `args` are the op's with the copy in them; `written` is what then counts of the copy, and `actual()` the
    same of the op's own arguments.
    """

    args: tuple[Any, ...]
    written: Any
    actual: Callable[[], Any]


@cache
def settings() -> Settings:
    """The settings of this process; raises UserError for a value that means nothing."""
    return Settings(env.backend(), env.check())


def model_device() -> torch.device:
    """Where models run: the GPU if there is one, else the CPU.

    Raises UserError for senseless settings, also on the CPU, and for QINFER_BACKEND=triton without a GPU.
    """
    backend = settings().backend
    if torch.cuda.is_available() and torch.version.cuda:  # not ROCm, which goes by the same name
        return torch.device("cuda", torch.cuda.current_device())
    if backend == "triton":
        raise UserError("QINFER_BACKEND=triton needs an NVIDIA GPU, and torch sees none: use auto or torch")
    return torch.device("cpu")


def runs_kernels() -> bool:
    """Whether ops on this GPU are their Triton kernels, unchecked: what may be captured in a CUDA graph."""
    chosen = settings()
    return chosen.backend != "torch" and not chosen.check and _has_kernels()


@cache
def _has_kernels() -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability()[0] == HOPPER


def describe(gpu: str, major: int) -> str:
    """How ops would run on a GPU of that name and major compute capability, in words."""
    chosen = settings()
    if chosen.backend == "torch":
        return "plain torch, as QINFER_BACKEND asks, which is slow"
    if find_spec("triton") is None:
        return "plain torch, which is slow: Triton is not installed"
    if major != HOPPER:
        return "plain torch, which is slow: the kernels are made for Hopper GPUs"
    tiles = f"tiles measured for {gpu_key(gpu)}" if is_measured(gpu_key(gpu)) else "tiles by formula"
    checked = "; every op compared with plain torch (QINFER_CHECK)" if chosen.check else ""
    return f"Triton kernels, {tiles}{checked}"


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, ops only ask for their kernels, and results are garbage; at its end all are compiled.

    Many at a time, with a progress line on stderr where it takes longer than a second. Compiled kernels stay
    in Triton's cache folder, so that the next process finds them there.
    """
    from qinfer.kernels.ahead_triton import compiled_ahead

    with compiled_ahead() as futures:
        yield
        for _ in tqdm(as_completed(futures), "compiling kernels", len(futures), delay=1.0, leave=False):
            pass


def run(meaning: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The op's result from its twin or its meaning; raises like the op, and as the module says."""
    return _run(meaning, _nothing_written if settings().check else None, args, kwargs)


def run_in_place(
    rehearse: Callable[..., Rehearsal], meaning: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """`run` for an op that writes into its arguments: `rehearse`, given them, copies what is written."""
    return _run(meaning, rehearse if settings().check else None, args, kwargs)


def run_unchecked(meaning: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`run` for an op whose twins' results cannot be compared number by number."""
    return _run(meaning, None, args, kwargs)


def _run(
    meaning: Callable[..., R],
    rehearse: Callable[..., Rehearsal] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> R:
    """`rehearse` is None where nothing is to be compared."""
    result: R
    backend = settings().backend
    if backend == "torch":
        return meaning(*args, **kwargs)
    try:
        twin = _twin(meaning)
        if rehearse is None:
            result = twin(*args, **kwargs)
        else:
            result = _checked(meaning, twin, rehearse(*args), args, kwargs)
        return result
    except Declined as reason:
        name, shapes = meaning.__name__, _shapes((args, kwargs))
        if backend == "triton":
            raise UserError(
                f"QINFER_BACKEND=triton, but {name} has no kernel for {shapes}: {reason}; use auto"
            ) from reason
        _fall_back(name, str(reason), shapes)
        return meaning(*args, **kwargs)


def _nothing_written(*args: Any) -> Rehearsal:
    return Rehearsal(args, None, lambda: None)


def _checked(
    meaning: Callable[..., R],
    twin: Callable[..., R],
    rehearsal: Rehearsal,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> R:
    """The twin's result, after comparing it, and what was written in place, with the meaning's."""
    expected = meaning(*rehearsal.args, **kwargs)
    result = twin(*args, **kwargs)
    found, wanted = _tensors((result, rehearsal.actual())), _tensors((expected, rehearsal.written))
    for ours, theirs in zip(found, wanted, strict=True):
        if ours.dim() == 3 and theirs.dim() == 2:  # a product in parts, compared by what they add up to
            ours = ours.sum(0).to(theirs.dtype)
        error = difference(ours, theirs)
        if not error <= (CODES_LIMIT if theirs.dtype in CODES else CHECK_LIMIT):
            raise RuntimeError(
                f"QINFER_CHECK: {meaning.__name__} on {_shapes((args, kwargs))}: the Triton kernel's "
                f"{_shapes(ours)} differs from the meaning's {_shapes(theirs)} by {error:.2e}"
            )
    return result


def difference(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||; infinite for other shapes, other ids, or numbers where NaN belongs.

    int64 is ids, of which any other is wrong. Infinities and NaN must lie at the same places.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if theirs.dtype is torch.int64:
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    a, b = ours.float(), theirs.float()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return float("inf")
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    off = torch.linalg.vector_norm(a - b, dtype=torch.float64)
    return float(off / torch.linalg.vector_norm(b, dtype=torch.float64)) if float(off) else 0.0


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(child)


def _shapes(tree: Any) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(tree))


@cache
def _twin(meaning: Callable[..., R]) -> Callable[..., R]:
    """The function of the same name beside the meaning; Declined where there is none that runs here."""
    if find_spec("triton") is None:
        raise Declined("Triton is not installed")
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != HOPPER:
        raise Declined(f"the kernels are made for Hopper GPUs, not for {torch.cuda.get_device_name()}")
    twin: Callable[..., R] | None = getattr(
        import_module(f"{meaning.__module__}_triton"), meaning.__name__, None
    )
    if twin is None:
        raise Declined("there is no kernel for weights in this layout or dtype")
    return twin


def _fall_back(op: str, reason: str, shapes: str) -> None:
    """Counts, and warns once of an op and a reason, with the shapes that met it: others come every step."""
    if (op, reason) not in fallbacks:
        logger.warning("%s runs in plain torch, which is slow, for %s: %s", op, shapes, reason)
    fallbacks[op, reason] += 1
