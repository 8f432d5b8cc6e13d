"""Puts questions to an engine, many at a time: how likely is this continuation, what do you say to this.

Everything that tasks ask comes down to these two. The rules of text are those of lm-eval's own `hf` model, so
that the answers are: a text that starts with the BOS token gets no second one; an empty context is the BOS
(or EOS) token; spaces at a context's end belong to the continuation; context and continuation are encoded
together and parted where the context alone would end; what is too long loses its beginning, and then only
the continuation is scored.

Where a token spans context and continuation nothing is left behind that point, and lm-eval stops. Here all
tokens count from the first one on which the two encodings differ: at least one is scored.

Questions are asked in the order of their tokens, so that those with a common beginning (a context with its
choices, examples before the question) follow one another and find it in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import Any, NamedTuple

from tqdm import tqdm

from qinfer.engine.continuation import Continuation
from qinfer.engine.engine import Engine
from qinfer.errors import UserError
from qinfer.evals.items import Generated
from qinfer.outputs import CompletionOutput, RequestOutput
from qinfer.sampling_params import RequestOutputKind, SamplingParams
from qinfer.tokenizer import Tokenizer

_NO_ANSWER = SamplingParams(
    temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
_REPEATED = 4  # tokens in a row that count as said before


class Loglik(NamedTuple):
    """Of a continuation: its log-probability in nats, and whether greedy decoding would have said it."""

    loglik: float
    is_greedy: bool


class Said(NamedTuple):
    """What a model made of a prompt; the text has what follows the stop string in the last token."""

    text: str
    generated: Generated


class _Asked(NamedTuple):
    """What the engine gets for one question."""

    token_ids: list[int]
    params: SamplingParams
    continuation: Continuation | None = None


class Scorer:
    """An idle engine with its tokenizer; `progress` shows bars on stderr.

    `repetition_penalty` is what the model's generation_config.json asks for where a task says nothing.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, repetition_penalty: float = 1.0, progress: bool = False
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.repetition_penalty = repetition_penalty
        self._progress = progress
        self._ids = count()
        self._prefix_text = tokenizer.hf.decode([self.prefix_id])

    @property
    def max_length(self) -> int:
        """Tokens that the model can read at once."""
        return self.engine.limits.max_model_len

    @property
    def prefix_id(self) -> int:
        """What stands for an empty context: BOS, or EOS where there is none."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.hf.eos_token_id):
            if token is not None:
                return int(token)
        raise UserError("the tokenizer has neither a BOS nor an EOS token: nothing can stand before a text")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds, but never two BOS."""
        return self.tokenizer.encode(text, add_special_tokens=not text.startswith(self._prefix_text))

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context, at least one, and of what is to be scored after it, at least one.

        Raises UserError for an empty continuation.
        """
        if not continuation:
            raise UserError("a continuation is empty: there is nothing to score", "tasks")
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not context:
            ids = self.tokenizer.encode(continuation, add_special_tokens=False)
            begun = ids[0] == self.prefix_id and len(ids) > 1
            return (ids[:1], ids[1:]) if begun else ([self.prefix_id], ids)
        whole, alone = self.encode(kept + continuation), self.encode(kept)
        if 0 < len(alone) < len(whole):
            return alone, whole[len(alone) :]
        others = (i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b)
        split = next(others, min(len(alone), len(whole) - 1))
        return (whole[:split], whole[split:]) if split else ([self.prefix_id], whole)

    def logliks(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Loglik]:
        """Scores of (context, continuation) in ids, in the order given; neither may be empty.

        Raises UserError where a continuation alone is longer than the model can read.
        """
        asked: list[_Asked] = []
        for context, continuation in pairs:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens: between 1 and {self.max_length} "
                    "can be scored",
                    "tasks",
                )
            ids = [*context, *continuation][-(self.max_length + 1) :]
            asked.append(_Asked(ids[:-1], _NO_ANSWER, Continuation(list(continuation))))
        self._run(asked, "scoring")
        found = (one.continuation for one in asked if one.continuation is not None)
        return [Loglik(sum(one.logprobs), all(one.likeliest)) for one in found]

    def generate(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Said]:
        """Continues prompts of ids, cut from the left to leave room for max_tokens, in the order given.

        Raises UserError where max_tokens leaves no room for a prompt.
        """
        asked: list[_Asked] = []
        for ids, params in prompts:
            room = self.max_length - (params.max_tokens or 0)
            if room < 1:
                raise UserError(
                    f"{params.max_tokens} tokens are to be generated and the model reads {self.max_length}: "
                    "ask for fewer",
                    "max_gen_toks",
                )
            own = params.clone()
            own.output_kind = RequestOutputKind.FINAL_ONLY
            asked.append(_Asked(list(ids)[-room:] or [self.prefix_id], own))
        return [self._said(output.outputs[0]) for output in self._run(asked, "generating")]

    def _said(self, output: CompletionOutput) -> Said:
        ids = list(output.token_ids)
        finish: Any = output.finish_reason
        if finish == "stop":
            finish = "eos" if output.stop_reason is None else "stop"
        text = self.tokenizer.hf.decode(ids, skip_special_tokens=True)
        return Said(text, Generated(len(ids), finish, repetition(ids)))

    def _run(self, asked: Sequence[_Asked], what: str) -> list[RequestOutput]:
        """Outputs in the order given; a few requests more than run at a time are in the engine."""
        engine, room = self.engine, 2 * self.engine.limits.max_num_seqs
        waiting = iter(sorted(range(len(asked)), key=lambda i: asked[i].token_ids))
        running: dict[str, int] = {}
        found: dict[int, RequestOutput] = {}
        try:
            with tqdm(total=len(asked), desc=what, unit="question", disable=not self._progress) as bar:
                while len(found) < len(asked):
                    for i in islice(waiting, room - len(running)):
                        one = asked[i]
                        name = f"question {next(self._ids)}"
                        engine.add(name, one.token_ids, one.params, continuation=one.continuation)
                        running[name] = i
                    for output in engine.step():
                        found[running.pop(output.request_id)] = output
                        bar.update()
        finally:
            for name in running:  # where something went wrong: the engine is idle again
                engine.abort(name)
        return [found[i] for i in range(len(asked))]


def repetition(token_ids: Sequence[int]) -> float:
    """Share of the 4-grams of a text that had occurred in it before, 0 to 1; 0 for fewer than two of them."""
    grams = [tuple(token_ids[i : i + _REPEATED]) for i in range(len(token_ids) - _REPEATED + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
