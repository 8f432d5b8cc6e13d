"""What the model reads while it is calibrated: token sequences with no padding, and a record of them.

    FILE.txt       one long text, cut at blank lines into passages that fill a sequence
    FILE.jsonl     one document a line: {"text": ...} or {"messages": [...]}
    hub dataset    its train split, the same two columns (needs the `datasets` extra)
    self           text that the model writes itself at temperature 1, from its first token and from prompts
    (nothing)      the calibration half of the reference text, with a quarter of self-written text

A chat model meets text the way it will in use: through its chat template, the first sentence of a passage
as the question and the rest as the answer. Text for other models begins with the first token that serving
gives them. A sequence is cut at `max_seq_len` tokens and never padded, so no statistic has anything to
leave out. The same seed gives the same sequences; the record holds their hash.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from qinfer.calibrate.selftext import Generate, self_text
from qinfer.corpus import reference_text
from qinfer.errors import UserError
from qinfer.tokenizer import Tokenizer

Document = str | list[dict[str, Any]]  # plain text, or the messages of a conversation

DEFAULT_SEED = 42
SELF_SHARE = 4  # with no corpus given, one sequence in this many is self-written
SELF_LEN = 128  # and this long at most: writing a token costs far more than reading one
_CHARS_PER_TOKEN = 6  # generous, so that a passage fills its sequence
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_POOL = 50  # documents looked at per sequence wanted, before a choice is made by the seed


@dataclass(frozen=True)
class CalibrationData:
    """Token sequences, mixed in a fixed order, and what the report says about them."""

    sequences: tuple[tuple[int, ...], ...]
    source: str
    seed: int
    kinds: tuple[tuple[str, int], ...]  # ("reference text", 12), ("self-written", 4)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(len(sequence) for sequence in self.sequences)

    def record(self) -> dict[str, Any]:
        """For the report: where the text came from, how much it is, and a hash of every token id."""
        ids = json.dumps(self.sequences, separators=(",", ":")).encode()
        return {
            "source": self.source,
            "seed": self.seed,
            "kinds": dict(self.kinds),
            "num_sequences": len(self.sequences),
            "num_tokens": self.num_tokens,
            "sha256": sha256(ids).hexdigest(),
        }


def check_source(spec: str | Iterable[Document] | None) -> None:
    """UserError for the name of a file that is not there or is of another kind; no file is read."""
    if not isinstance(spec, str):
        return
    is_text = spec.endswith((".txt", ".jsonl"))
    if is_text and os.path.isfile(spec):  # Path's own raises where a name is too long
        return
    if not is_text and os.path.exists(spec) and spec != "self":
        raise UserError(f"calibration file {spec}: the name must end in .txt or .jsonl", "calibration")
    if is_text or not _HUB_ID.fullmatch(spec):
        raise UserError(f"cannot read the calibration file {spec!r}: No such file", "calibration")


def calibration_sequences(
    spec: str | Iterable[Document] | None,
    tokenizer: Tokenizer,
    generate: Generate,
    *,
    num_samples: int,
    max_seq_len: int,
    seed: int = DEFAULT_SEED,
) -> CalibrationData:
    """At most `num_samples` sequences of at most `max_seq_len` tokens.

    `spec` is None, a name as in this module's head, or documents themselves; `generate` is called for
    self-written text only. Raises UserError for limits below 1, an unknown source, a file that cannot be
    read, and a source with no text in it.
    """
    for name, value, least in (("num_samples", num_samples, 1), ("max_seq_len", max_seq_len, 2)):
        if value < least:
            raise UserError(f"{name} is {value}: at least {least} is needed", name)
    num_self = num_samples // SELF_SHARE if spec is None else num_samples if spec == "self" else 0
    self_len = min(max_seq_len, SELF_LEN) if spec is None else max_seq_len
    written = self_text(tokenizer, generate, num_self, self_len, seed) if num_self else []
    read: list[tuple[int, ...]] = []
    if num_samples > num_self:
        documents = _documents(spec, max_seq_len * _CHARS_PER_TOKEN, num_samples * _POOL)
        read = _tokenize(documents, tokenizer, num_samples - num_self, max_seq_len, seed)
    sequences = _interleave(read, written)
    source = "reference text and self" if spec is None else spec if isinstance(spec, str) else "documents"
    if not sequences:
        raise UserError(f"no text to calibrate on in {source}", "calibration")
    text_kind = "reference text" if spec is None else "given text"
    kinds = tuple((kind, n) for kind, n in ((text_kind, len(read)), ("self-written", len(written))) if n)
    return CalibrationData(tuple(sequences), source, seed, kinds)


def _documents(spec: str | Iterable[Document] | None, passage_chars: int, limit: int) -> list[Document]:
    """Documents of a source; from one that may have no end, the first `limit`."""
    if spec is None:
        return list(passages("\n\n".join(reference_text("calibration")), passage_chars))
    if not isinstance(spec, str):
        return list(islice(spec, limit))
    check_source(spec)
    path = Path(spec)
    if path.suffix in (".txt", ".jsonl"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the calibration file {spec}: {error}", "calibration") from error
        return list(passages(text, passage_chars)) if path.suffix == ".txt" else _jsonl(text, spec)
    return _hub(spec, limit)


def passages(text: str, chars: int) -> list[str]:
    """Cuts a text at blank lines into pieces of at least `chars` characters; the last may be shorter."""
    pieces: list[str] = []
    current = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for start in range(0, len(paragraph), chars):  # a paragraph may itself be a whole book
            current += ("\n\n" if current and not start else "") + paragraph[start : start + chars]
            if len(current) >= chars:
                pieces.append(current)
                current = ""
    return [*pieces, current] if current.strip() else pieces


def _jsonl(text: str, source: str) -> list[Document]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{source} line {number} is not JSON: {error}", "calibration") from error
            rows.append(_document(row, f"{source} line {number}"))
    return rows


def _document(row: Any, where: str) -> Document:
    if isinstance(row, dict):
        if isinstance(row.get("messages"), list):
            return list(row["messages"])
        if isinstance(row.get("text"), str):
            return str(row["text"])
    found = f"columns {', '.join(map(str, row))}" if isinstance(row, dict) else type(row).__name__
    raise UserError(f'{where} has {found}: wanted "text" (a string) or "messages" (a list)', "calibration")


def _hub(name: str, limit: int) -> list[Document]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"calibration source {name!r} is no .txt or .jsonl file, not 'self', and to read it as a hub "
            "dataset the datasets extra is needed: pip install 'qinfer[datasets]'",
            "calibration",
        ) from error
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
        return [_document(row, f"dataset {name}") for row in islice(rows, limit)]
    except (OSError, ValueError) as error:  # not found, no network, no train split
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read the hub dataset {name!r}: {error}", "calibration") from error


def _tokenize(
    documents: list[Document], tokenizer: Tokenizer, count: int, max_seq_len: int, seed: int
) -> list[tuple[int, ...]]:
    """The first `count` documents in the seed's order that give any tokens, cut at `max_seq_len`."""
    order = random.Random(seed).sample(documents, len(documents))
    sequences: list[tuple[int, ...]] = []
    for document in order:
        ids = _encode(document, tokenizer, max_seq_len)
        if ids:
            sequences.append(ids)
        if len(sequences) == count:
            break
    return sequences


def _encode(document: Document, tokenizer: Tokenizer, max_seq_len: int) -> tuple[int, ...]:
    if isinstance(document, str):
        # a document of any length costs what its first max_seq_len tokens cost
        document = document.strip()[: max_seq_len * _CHARS_PER_TOKEN * 4]
        if not document:
            return ()
        if not tokenizer.has_chat_template:
            return tuple(tokenizer.encode(document, add_special_tokens=True)[:max_seq_len])
        document = as_conversation(document)
    if not tokenizer.has_chat_template:
        text = "\n\n".join(str(message.get("content", "")) for message in document)
        return _encode(text, tokenizer, max_seq_len)
    return tuple(tokenizer.apply_chat_template(document, add_generation_prompt=False)[:max_seq_len])


def as_conversation(text: str) -> list[dict[str, Any]]:
    """A passage as one question and one answer: its first line or sentence, then the rest."""
    first = re.match(r".{1,200}?(?:[.!?:](?=\s)|(?=\n)|$)", text)
    cut = first.end() if first else min(len(text), 200)
    question, answer = text[:cut].strip(), text[cut:].strip()
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _interleave(read: Sequence[tuple[int, ...]], written: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Self-written sequences spread evenly among the others, so that any prefix holds both kinds."""
    if not read or not written:
        return [*read, *written]
    places = [(i / len(read), 0, i) for i in range(len(read))]
    places += [((i + 0.5) / len(written), 1, i) for i in range(len(written))]
    return [(read, written)[kind][i] for _, kind, i in sorted(places)]
