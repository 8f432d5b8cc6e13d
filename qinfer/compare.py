"""Two models read the same held-out text through qinfer's own engine, and the gate judges the difference.

The candidate runs in the dtype and with the KV cache that will serve. The source is the reference: in
float32 where it is small enough to afford that, else in its own dtype. So the KL is the whole distance from
the source to what is served, rounding of the serving dtype included, and it is that whole distance which the
limits are for: nothing is subtracted. How much of it the dtype alone makes is measured on the first windows,
with the source itself served alike, and reported beside it as the noise floor.

The source reads first, or has read the text in an earlier run; then the candidate reads, and the logits of
both meet slice by slice. What is kept is the source's hidden states and a few numbers per token.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import qinfer
from qinfer import env
from qinfer.backend import describe, model_device
from qinfer.blame import find_blame
from qinfer.dtypes import name_of
from qinfer.errors import UserError, check_counts
from qinfer.evals import text
from qinfer.evals.budget import gather
from qinfer.evals.examples import kl_quantiles, moved, regressions
from qinfer.evals.gate import GateResult, Verdict, decide
from qinfer.evals.store import Store
from qinfer.evals.tasks import Task, check_files, load_tasks
from qinfer.evals.thresholds import Limits, limits_for, profile_named, scheme_class
from qinfer.offer import find_offer
from qinfer.reading import OpenModel, Serving, read_text
from qinfer.streams import Streams
from qinfer.tokenizer import Tokenizer

WINDOW = 512  # tokens; the standard profile is 32 such windows
FLOAT32_PARAMETERS = 2_000_000_000  # a source up to this size is the reference in float32


@dataclass(frozen=True)
class Questions:
    """Tasks by name, as `evals.tasks` knows them, and how they are put."""

    tasks: tuple[str, ...]
    limit: int | None = None  # questions of each task
    num_fewshot: int | None = None
    chat: bool = False  # through the model's chat template

    @classmethod
    def chosen(
        cls,
        tasks: Sequence[str] | None,
        profile: str,
        limit: int | None = None,
        num_fewshot: int | None = None,
        chat: bool = False,
    ) -> Questions | None:
        """The tasks named, or where None are, the profile's own; None where there are none.

        Raises UserError for what is only for tasks then, for no count, and for a file that is no task.
        """
        tasks = profile_named(profile).tasks if tasks is None else tasks
        check_counts(limit=limit)
        if num_fewshot is not None and (not isinstance(num_fewshot, int) or num_fewshot < 0):
            raise UserError(
                f"num_fewshot must be a whole number from 0 on, not {num_fewshot!r}", "num_fewshot"
            )
        if tasks:
            check_files(tasks)
            return cls(tuple(tasks), limit, num_fewshot, chat)
        for name, value in (("limit", limit), ("num_fewshot", num_fewshot), ("chat", chat or None)):
            if value is not None:
                raise UserError(f"{name} is for tasks: name some", name)
        return None

    def load(self) -> list[Task]:
        """The tasks; raises UserError where one cannot be had."""
        return load_tasks(self.tasks, num_fewshot=self.num_fewshot, chat=self.chat)

    def words(self) -> list[str]:
        """As on a command line."""
        words = ["--tasks", ",".join(self.tasks)]
        words += [] if self.limit is None else ["--limit", str(self.limit)]
        words += [] if self.num_fewshot is None else ["--num-fewshot", str(self.num_fewshot)]
        return words + (["--chat"] if self.chat else [])


@dataclass(frozen=True)
class Comparison:
    """A candidate, how it will be served, its source, and what is read."""

    candidate: OpenModel
    serving: Serving
    source: OpenModel
    profile: str
    text_file: Path | None = None  # None: the built-in held-out text
    seed: int = 0  # of the bootstrap
    questions: Questions | None = None  # None: text alone
    budget: float | None = None  # seconds; None: all that the profile wants
    keep: bool = True  # results, in the cache folder
    explain: bool = True  # whether to look for what a failure is due to, and for what would pass

    def opened_store(self) -> AbstractContextManager[Store]:
        """Where results are kept."""
        return opened_store(keep=self.keep)

    @property
    def reference(self) -> Serving:
        """How the source is run: float32 where it is small enough, else its own dtype."""
        small = self.source.num_parameters <= FLOAT32_PARAMETERS
        return Serving.settle("float32" if small else "auto", "auto", self.source.checkpoint)

    def command(self) -> str:
        """The command line that makes this comparison."""
        words = ["qinfer", "eval", self.candidate.name, "--against", self.source.name]
        words += ["--profile", self.profile, "--seed", str(self.seed)]
        words += ["--dtype", name_of(self.serving.dtype), "--kv-cache-dtype", self.serving.kv_cache_dtype]
        if self.serving.lm_head_dtype != "auto":
            words += ["--lm-head-dtype", self.serving.lm_head_dtype]
        words += [] if self.text_file is None else ["--text", str(self.text_file)]
        words += [] if self.questions is None else self.questions.words()
        words += [] if self.budget is None else ["--budget", f"{self.budget:g}s"]
        return shlex.join(words)


@contextmanager
def opened_store(*, keep: bool) -> Iterator[Store]:
    """A store in the cache folder, or one that lasts as long as this does."""
    if keep:
        yield Store(env.results_dir())
        return
    with TemporaryDirectory() as folder:
        yield Store(Path(folder))


def check_comparable(candidate: OpenModel, source: OpenModel) -> None:
    """Raises UserError unless `source` is dense and has the candidate's vocabulary."""
    if source.checkpoint.is_quantized:  # else a checkpoint compared with itself would pass
        raise UserError(
            f"{source.name} is quantized itself: compare with the dense model that it was made from",
            "against",
        )
    ours, theirs = candidate.checkpoint.config.vocab_size, source.checkpoint.config.vocab_size
    if ours != theirs:
        raise UserError(
            f"{source.name} has a vocabulary of {theirs} and {candidate.name} one of {ours}: "
            "compare with the model that it was made from",
            "against",
        )


def judge(comparison: Comparison, *, progress: bool) -> GateResult:
    """Measures and decides; a candidate that reads the text as other tokens than its source fails at once."""
    candidate, source = comparison.candidate, comparison.source
    profile, limits = profile_named(comparison.profile), _limits(comparison)
    tasks = [] if comparison.questions is None else comparison.questions.load()
    length = min(WINDOW, candidate.checkpoint.config.context_len, source.checkpoint.config.context_len)
    ours, windows = (
        text.first_tokens(_held_out(model.tokenizer, comparison.text_file, length), profile.num_tokens)
        for model in (candidate, source)
    )
    settings = _settings(comparison, limits, windows, length)
    if text.data_hash(ours) != text.data_hash(windows):
        reason = "its tokenizer or chat template reads the held-out text as other tokens than its source's"
        return GateResult(Verdict.FAIL, (reason,), (), settings)
    if not windows:
        verdict, reasons = decide((), num_tokens=0, num_windows=0, wanted=profile.num_tokens)
        return GateResult(verdict, tuple(reasons), (), settings)
    ids = [window.token_ids for window in windows]
    with comparison.opened_store() as store:
        streams = Streams(comparison, limits, ids, tasks, store, progress)
        found = gather(streams.all, comparison.budget)
        floor = streams.noise_floor()
    scores, wanted = streams.text.scores, profile.num_tokens
    scored = sum(map(len, ids[: len(scores)]))
    if comparison.budget is not None and sum(map(len, ids)) >= wanted:
        wanted = scored  # a budget may end sooner what is decided already; what the text lacks it still lacks
    verdict, reasons = decide(
        found.measures, num_tokens=scored, num_windows=len(scores), wanted=wanted, unsettled=found.open
    )
    failed = verdict is Verdict.FAIL and comparison.explain
    return GateResult(
        verdict,
        tuple(reasons),
        found.measures + floor,
        settings,
        find_blame(comparison, ids) if failed else None,
        {
            "tasks": [result.to_dict() for result in streams.results()],
            "spent": [one._asdict() for one in found.spent],
        },
        _examples(streams, ids, source.tokenizer),
        find_offer(comparison, ids) if failed and candidate.checkpoint.is_quantized else None,
    )


def _limits(comparison: Comparison) -> Limits:
    """The limits of the candidate's class of schemes, for its source's size and the text that is read."""
    return limits_for(
        scheme_class(comparison.candidate.schemes().values()),
        comparison.source.num_parameters,
        profile_named(comparison.profile),
        other_text=comparison.text_file is not None,
    )


def _examples(streams: Streams, ids: Sequence[Sequence[int]], tokenizer: Tokenizer) -> dict[str, Any]:
    """What moved most, to look at."""
    scores, spell = streams.text.scores, partial(tokenizer.decode, skip_special_tokens=False)
    return {
        "regressions": regressions(streams.pairs),
        "moved": moved(ids, scores, spell),
        "kl_quantiles": kl_quantiles(scores),
    }


def _held_out(tokenizer: Tokenizer, text_file: Path | None, length: int) -> Iterator[text.Window]:
    if text_file is None:
        return text.reference_windows(tokenizer, length)
    return text.text_windows(tokenizer, read_text(text_file), length)


def _settings(
    comparison: Comparison, limits: Limits, windows: list[text.Window], length: int
) -> dict[str, Any]:
    """All that it takes to get the same numbers again, for the certificate."""
    candidate, source = comparison.candidate, comparison.source
    kinds = [window.kind for window in windows]
    return {
        "command": comparison.command(),
        "model": candidate.name,
        "schemes": sorted(candidate.schemes()),
        "against": source.name,
        "source_parameters": source.num_parameters,
        "profile": comparison.profile,
        "limits": {name: float(f"{limit:.6g}") for name, limit in limits._asdict().items()},
        "text": "built-in" if comparison.text_file is None else str(comparison.text_file),
        "data_sha256": text.data_hash(windows),
        "windows": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "window": length,
        "tokens": sum(len(window.token_ids) for window in windows),
        "seed": comparison.seed,
        "dtype": name_of(comparison.serving.dtype),
        "kv_cache_dtype": comparison.serving.kv_cache_dtype,
        "lm_head_dtype": comparison.serving.lm_head_dtype,
        "reference_dtype": name_of(comparison.reference.dtype),
        **_engine(),
    }


def _engine() -> dict[str, Any]:
    """What computed: versions, the kind of device, and how ops run there."""
    device = model_device()
    if device.type == "cpu":
        name, kernels = env.cpu_name(), "plain torch and its CPU ops"
    else:
        card = torch.cuda.get_device_properties(device)
        name, kernels = card.name, describe(card.name, card.major)
    versions = {"qinfer": qinfer.__version__, "torch": torch.__version__}
    return {**versions, "device": device.type, "device_name": name, "kernels": kernels}
