"""Grammars that bind a sequence: compiled once, then a bit per token that may come next.

llguidance walks a grammar along the tokens of a sequence and says which tokens the grammar can go on with;
the sampler takes all others out of the running. A `Constraint` belongs to one sequence and keeps up with it
by itself: asked for bits, it first takes what the sequence has got since. Preemption does not concern it,
since tokens are never taken back. When the grammar has come to its end only the ends of sequence are left, so
a complete answer finishes with "stop".

Bits are computed on the CPU, by threads of llguidance's own, between launching a step and waiting for its
logits: while a GPU computes. Compiling may take a second for a large schema; `compile` may be called ahead,
on any thread, and remembers.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qinfer.errors import UserError
from qinfer.structural_tags import tags_grammar
from qinfer.structured_outputs import WHITESPACE, StructuredOutputsParams

if TYPE_CHECKING:  # imported when a grammar comes: most engines never see one
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from qinfer.engine.request import Sequence
    from qinfer.tokenizer import Tokenizer

MAX_COMPILED = 128  # grammars that are remembered
MAX_TRIED = 16  # first tokens of a grammar, about
MAX_MESSAGE = 200  # characters of the compiler's complaint


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size  # of the grammar, not less than the model's
        self._num_taken = 0

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any further; None while it can."""
        return _in_short(self.matcher.get_error()) if self.matcher.is_error() else None

    def follow(self, token_ids: AnySequence[int], num_prompt: int) -> None:
        """Takes the tokens that the sequence has got since the last call."""
        for token in token_ids[num_prompt + self._num_taken :]:
            self._num_taken += 1
            if not self.matcher.is_stopped():  # at its end; with ignore_eos, more ends follow
                self.matcher.consume_token(token)


class Grammars:
    """Compiles what requests ask for, for one vocabulary; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size if tokenizer else 0)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Any, ...], LLMatcher] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> LLMatcher:
        """The grammar at its beginning; UserError naming the field where it is none, or there is no text."""
        written = _written(params)
        key = (params.kind, written, params.disable_any_whitespace, params.whitespace_pattern)
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return known
        from llguidance import LLMatcher

        vocabulary = self._known_vocabulary()
        matcher = LLMatcher(vocabulary, _grammar_of(params, written, self._is_token), log_level=0)
        if (complaint := _complaint(matcher)) is not None:
            raise _refusal(complaint, params.kind)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def start(self, params: StructuredOutputsParams) -> Constraint:
        """A new sequence's constraint; raises as `compile`."""
        return Constraint(self.compile(params).deep_copy(), self._vocab_size)

    def _is_token(self, text: str) -> bool:
        """Whether a text is a special token of this vocabulary."""
        assert self._tokenizer is not None, "the vocabulary is its"
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return len(ids) == 1 and ids[0] in self._tokenizer.special_ids

    def _known_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.eos_token_ids:
            raise UserError(
                "structured output needs a tokenizer with an end-of-sequence token, and this model has none",
                "structured_outputs",
            )
        with self._lock:
            if self._vocabulary is None:
                ends = sorted(tokenizer.eos_token_ids)
                text = tokenizer.to_json()
                self._vocabulary = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
            return self._vocabulary


def _written(params: StructuredOutputsParams) -> str:
    """What was asked for, as text."""
    match params.kind:
        case "json":
            return json.dumps(params.schema())
        case "choice":
            return "|".join(map(_literally, params.choice or ()))
        case "json_object":
            return '{"type": "object"}'
        case "structural_tag":
            return json.dumps(params.tags())
    text: str = getattr(params, params.kind)
    return text


def _literally(text: str) -> str:
    """A regex that matches this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _grammar_of(params: StructuredOutputsParams, written: str, is_token: Callable[[str], bool]) -> str:
    """llguidance's own form of a grammar, not yet compiled; UserError where it cannot be written in it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if params.kind in ("regex", "choice"):
        return LLMatcher.grammar_from_regex(written)
    if params.kind == "grammar":
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(written))
        except Exception as error:  # that is what the converter raises for a rule without a definition
            raise _refusal(str(error), "grammar") from None
    spacing: JsonCompileOptions = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        spacing = {"whitespace_flexible": False}
    try:
        if params.kind == "structural_tag":
            return LLMatcher.grammar_from_lark(tags_grammar(params.tags(), is_token, spacing))
        return LLMatcher.grammar_from_json_schema(written, overrides=spacing)
    except UserError:
        raise
    except ValueError as error:  # half a surrogate pair, or a number of hundreds of digits
        raise _refusal(str(error), params.kind) from None


def _complaint(matcher: LLMatcher) -> str | None:
    """What goes wrong when a grammar is begun; None as usual.

    A grammar of too many alternatives fails only after a first token, and not after each: some are tried.
    """
    start = matcher.deep_copy()
    bits = start.compute_bitmask()  # may take a second: copies share what the lexer has found out
    if start.is_error():
        return start.get_error()
    may_come = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").nonzero()[0]
    for token in may_come[:: max(1, len(may_come) // MAX_TRIED)].tolist():
        ahead = start.deep_copy()
        if not ahead.consume_token(token):
            return ahead.get_error()
    return None


def _refusal(complaint: str, kind: str) -> UserError:
    return UserError(f"the {kind} cannot be compiled: {_in_short(complaint)}", kind)


def _in_short(complaint: str) -> str:
    """In one line, without the state of the parser that may follow."""
    return " ".join(complaint.partition("<state>")[0].split())[:MAX_MESSAGE]


def constrain(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Logits [S, V] with minus infinity where a grammar forbids; the same tensor where there are none.

    A row whose grammar has failed becomes NaN, which ends its sequence with "error": see `Constraint.fault`.
    """
    constraints = []
    for row, seq in enumerate(sequences):
        if seq.constraint is not None:
            seq.constraint.follow(seq.token_ids, seq.num_prompt)
            constraints.append((row, seq.constraint))
    if not constraints:
        return logits
    allowed = _unpacked(_bits([one for _, one in constraints]).to(logits.device), logits.shape[1])
    rows = torch.tensor([row for row, _ in constraints], device=logits.device)
    masked = logits[rows].masked_fill(~allowed, float("-inf"))
    for i, (_, constraint) in enumerate(constraints):
        if constraint.matcher.is_error():
            masked[i] = float("nan")
    return logits.index_copy(0, rows, masked)


def _bits(constraints: list[Constraint]) -> Tensor:
    """The tokens that may come next, int32 [S, words], the lowest bit first."""
    words = -(-constraints[0].vocab_size // 32)
    bits = np.zeros((len(constraints), words), dtype=np.int32)
    if len(constraints) == 1:
        constraints[0].matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    else:
        tasks = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        _executor().unsafe_compute_mask_ptr(tasks, bits.ctypes.data, words * bits.itemsize, len(tasks))
    return torch.from_numpy(bits)


@cache
def _executor() -> LLExecutor:
    """Threads for many grammars at once, made when they are first needed."""
    from llguidance import LLExecutor

    return LLExecutor()


def _unpacked(bits: Tensor, vocab_size: int) -> Tensor:
    """int32 [S, words] -> bool [S, V]."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> places) & 1).bool().flatten(1)[:, :vocab_size]
