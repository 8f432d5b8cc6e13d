"""What a benchmark asks: prompts as token ids, and how long each answer is to be.

    random    ids drawn at random, lengths drawn around a mean: needs no file and no tokenizer
    sharegpt  a JSON list of {"conversations": [{"value": ...}, {"value": ...}]}: the first message is the
              prompt, the second says how long the answer was
    custom    a .jsonl file of {"prompt": ...}, or a text file with one prompt a line

Lengths of `random` lie within mean * (1 ± range ratio), evenly, or evenly in their logarithm, as what people
write does: most are short, few are long. The same seed gives the same requests; another `stream` of the same
seed gives others of the same kind, for warming up without touching what will be measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qinfer.errors import UserError
from qinfer.tokenizer import Tokenizer

DATASETS = ("random", "sharegpt", "custom")
SPREADS = ("uniform", "log")
_SHORTEST = 4  # tokens; as in vLLM, what is shorter or longer than this is no conversation
_LONGEST_PROMPT, _LONGEST = 1024, 2048


class BenchRequest(NamedTuple):
    """One prompt, and the tokens that are to follow it."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class Dataset:
    """What is to be drawn; `output_len` None: the dataset's own lengths, or 128."""

    name: str = "random"
    path: str | None = None
    num_prompts: int = 1000
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    spread: str = "uniform"
    prefix_len: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for a choice that means nothing."""
        for name, value, known in (("dataset-name", self.name, DATASETS), ("spread", self.spread, SPREADS)):
            if value not in known:
                raise UserError(f"--{name} must be one of {', '.join(known)}, not {value!r}", name)
        if not 0 <= self.range_ratio < 1:
            raise UserError(f"--random-range-ratio must lie in [0, 1), not {self.range_ratio}", "range_ratio")
        if (self.path is None) != (self.name == "random"):
            said = "needs --dataset-path" if self.path is None else "has no --dataset-path"
            raise UserError(f"--dataset-name {self.name} {said}", "dataset_path")
        if self.name != "random" and self.input_len is not None:
            raise UserError(f"--input-len is for random prompts, not for {self.name}", "input_len")

    def draw(self, vocab_size: int, tokenizer: Tokenizer | None, stream: int = 0) -> list[BenchRequest]:
        """The requests; fewer than `num_prompts` where a file has fewer.

        Raises UserError for a file that cannot be read, holds nothing, or wants a tokenizer that is missing.
        """
        generator = np.random.default_rng([self.seed, stream])
        if self.name == "random":
            return self._random(generator, vocab_size, tokenizer)
        if tokenizer is None:
            raise UserError(
                f"--dataset-name {self.name} is text and this model has no tokenizer: use random prompts",
                "dataset_name",
            )
        path = Path(self.path or "")
        if self.name == "sharegpt":
            entries = _parsed(_text(path), path)
            if not isinstance(entries, list):
                raise UserError(f"{path} must hold a JSON list of conversations", "dataset_path")
            usable = self._sharegpt([entries[i] for i in generator.permutation(len(entries))], tokenizer)
        else:
            usable = self._custom(_text(path), path, tokenizer)
        found = list(islice(usable, self.num_prompts))  # no more is encoded than is asked for
        if not found:
            raise UserError(f"{path} holds no prompt that could be used", "dataset_path")
        return found

    def _random(
        self, generator: np.random.Generator, vocab_size: int, tokenizer: Tokenizer | None
    ) -> list[BenchRequest]:
        special = tokenizer.special_ids if tokenizer else frozenset()
        ids = np.array([i for i in range(vocab_size) if i not in special])
        prefix = ids[generator.integers(len(ids), size=self.prefix_len)].tolist()
        inputs = self._lengths(generator, 1024 if self.input_len is None else self.input_len)
        outputs = self._lengths(generator, 128 if self.output_len is None else self.output_len)
        return [
            BenchRequest([*prefix, *ids[generator.integers(len(ids), size=inputs[i])].tolist()], outputs[i])
            for i in range(self.num_prompts)
        ]

    def _lengths(self, generator: np.random.Generator, mean: int) -> list[int]:
        low = max(1, math.floor(mean * (1 - self.range_ratio)))
        high = math.ceil(mean * (1 + self.range_ratio))
        if self.spread == "log":
            drawn = np.exp(generator.uniform(math.log(low), math.log(high + 1), size=self.num_prompts))
            return [min(high, int(length)) for length in drawn]
        return [int(length) for length in generator.integers(low, high + 1, size=self.num_prompts)]

    def _sharegpt(self, entries: Sequence[Any], tokenizer: Tokenizer) -> Iterator[BenchRequest]:
        for entry in entries:
            turns = entry.get("conversations") or [] if isinstance(entry, dict) else []
            if len(turns) < 2:
                continue
            prompt, answer = (tokenizer.encode(str(turn.get("value", ""))) for turn in turns[:2])
            output_len = len(answer) if self.output_len is None else self.output_len
            fits = len(prompt) <= _LONGEST_PROMPT and len(prompt) + output_len <= _LONGEST
            if fits and len(prompt) >= _SHORTEST and output_len >= _SHORTEST:
                yield BenchRequest(prompt, output_len)

    def _custom(self, text: str, path: Path, tokenizer: Tokenizer) -> Iterator[BenchRequest]:
        for line in filter(str.strip, text.splitlines()):
            entry = _parsed(line, path) if path.suffix == ".jsonl" else {"prompt": line}
            if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
                raise UserError(
                    f'{path}: a line is no object with a "prompt": {line.strip():.60}', "dataset_path"
                )
            output_len = self.output_len or entry.get("output_len") or entry.get("output_tokens") or 128
            yield BenchRequest(tokenizer.encode(entry["prompt"]), int(output_len))


def total_tokens(requests: Sequence[BenchRequest]) -> tuple[int, int]:
    """Tokens of all prompts, and of all answers."""
    return sum(len(request.prompt) for request in requests), sum(request.output_len for request in requests)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", "dataset_path") from None


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", "dataset_path") from None
