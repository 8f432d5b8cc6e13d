"""What a request asks of the sampler: vLLM's names, defaults and checks for the fields that exist here.

A `SamplingParams` is checked and normalised once, when it is made: a stop string becomes a list, -1 of
`seed` and `top_k` becomes "off", a temperature under 1e-5 becomes greedy. What depends on the model (its
vocabulary, the context, `max_logprobs`) is checked by `Engine.add`. Every refusal is a `UserError` whose
`parameter` names the field.

Order of effects: `logprobs` report the log-softmax of the model's own logits, before anything below. Then
structured output, allowed ids, bad words, `min_tokens`, `logit_bias`, penalties, temperature, min_p, top_k,
top_p.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from qinfer.errors import UserError
from qinfer.param_checks import as_list, bias_from_json, check_real, check_text, check_whole
from qinfer.structured_outputs import StructuredOutputsParams

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
MIN_TEMPERATURE = 1e-2  # others are raised to this: smaller ones overflow in half precision
MAX_N = 16384
MAX_COUNT = 2**31 - 1  # token counts and ids; larger ones are mistakes, not wishes
MAX_PATTERN = 4096  # tokens of a repetition, and times
MAX_NAMED_LOGPROBS = 128
MAX_SEED = 2**63 - 1

logger = logging.getLogger(__name__)


class RequestOutputKind(Enum):
    """What a stream yields: all text so far, only what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Ends an answer whose last tokens are one pattern over and over: `min_count` times or more.

    A pattern has `min_pattern_size` to `max_pattern_size` tokens. Raises UserError where a field is out of
    range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        check_whole("max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN)
        check_whole("min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        check_whole("min_count", self.min_count, 2, MAX_PATTERN)

    def found_in(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens end in such a repetition."""
        for size in range(self.min_pattern_size, self.max_pattern_size + 1):
            total = size * self.min_count
            if total <= len(token_ids) and token_ids[-total:-size] == token_ids[size - total :]:
                return True
        return False


@dataclass
class SamplingParams:
    """How to choose a request's tokens and when to stop; raises UserError where a field is out of range."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # counts the prompt's tokens too
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None or -1: not reproducible
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    logprobs: int | None = None  # -1: the whole vocabulary
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None  # told at every position, beside the likeliest
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        self._refuse_absent()
        self._normalise()
        self._check_numbers()
        self._check_lists()
        self._check_structure()
        self._settle_temperature()

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Like the constructor, with None meaning a field's default; max_tokens None still means 'no limit'.

        `logit_bias` may have string keys, as JSON has, and is clamped to [-100, 100].
        """
        given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        if "logit_bias" in given:
            given["logit_bias"] = bias_from_json(given["logit_bias"])
        return cls(**given)

    def clone(self) -> SamplingParams:
        """An independent copy."""
        return copy.deepcopy(self)

    def chosen(self) -> dict[str, Any]:
        """The fields that differ from the defaults."""
        plain = type(self)()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(plain, name)}

    @property
    def greedy(self) -> bool:
        """Whether each token is the one with the largest logit."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, normalised."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _refuse_absent(self) -> None:
        for name in ("extra_args", "truncate_prompt_tokens", "logits_processors"):
            if getattr(self, name) is not None:
                raise NotImplementedError(f"qinfer does not have SamplingParams({name}=...)")
        if self.flat_logprobs:
            raise NotImplementedError("qinfer does not have SamplingParams(flat_logprobs=True)")

    def _normalise(self) -> None:
        self.stop = as_list(self.stop, "stop", str)
        self.stop_token_ids = list(dict.fromkeys(as_list(self.stop_token_ids, "stop_token_ids", int)))
        self.bad_words = as_list(self.bad_words, "bad_words", str)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(
                dict.fromkeys(as_list(self.allowed_token_ids, "allowed_token_ids", int))
            )
        if self.logprob_token_ids is not None:
            asked = as_list(self.logprob_token_ids, "logprob_token_ids", int)
            self.logprob_token_ids = list(dict.fromkeys(asked))
            self.logprobs = self.logprobs or 0
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                setattr(self, name, 1 if value else None)

    def _check_numbers(self) -> None:
        check_whole("n", self.n, 1, MAX_N)
        for name in ("presence_penalty", "frequency_penalty"):
            check_real(name, getattr(self, name), -2.0, 2.0)
        check_real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        check_real("temperature", self.temperature, 0.0, 2.0)
        check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_real("min_p", self.min_p, 0.0, 1.0)
        check_whole("top_k", self.top_k, 0, MAX_COUNT)
        check_whole("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.seed is not None:
            check_whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.stream_interval is not None:
            check_whole("stream_interval", self.stream_interval, 1, MAX_COUNT)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), -1, MAX_COUNT)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise UserError(
                    f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", "min_tokens"
                )

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                check_text(name, text)
        if self.stop and not self.detokenize:
            raise UserError("stop strings need text: set detokenize=True or use stop_token_ids", "stop")
        if len(self.logprob_token_ids or ()) > MAX_NAMED_LOGPROBS:
            raise UserError(f"logprob_token_ids has more than {MAX_NAMED_LOGPROBS} ids", "logprob_token_ids")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                check_whole(name, token, 0, MAX_COUNT)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UserError(
                "allowed_token_ids is empty: no token could be chosen; use None", "allowed_token_ids"
            )
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise UserError(
                f"logit_bias is {self.logit_bias!r}; it must be a dict of token id: bias", "logit_bias"
            )
        for token, bias in (self.logit_bias or {}).items():
            check_whole("logit_bias", token, 0, MAX_COUNT)
            check_real("logit_bias", bias, -math.inf, math.inf)

    def _check_structure(self) -> None:
        repetition = self.repetition_detection
        if repetition is not None and not isinstance(repetition, RepetitionDetectionParams):
            raise UserError(
                f"repetition_detection must be RepetitionDetectionParams, not {repetition!r:.100}",
                "repetition_detection",
            )
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise UserError(
                f"structured_outputs must be StructuredOutputsParams, not {self.structured_outputs!r:.100}",
                "structured_outputs",
            )
        for name in ("min_tokens", "bad_words", "allowed_token_ids"):
            if getattr(self, name):
                raise UserError(
                    f"{name} with structured_outputs may forbid all that the grammar allows: leave one out",
                    name,
                )

    def _settle_temperature(self) -> None:
        if self.greedy:
            if self.n > 1:
                raise UserError(
                    f"n is {self.n} with temperature 0: the answers would be the same; raise temperature", "n"
                )
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning("temperature %g is raised to %g", self.temperature, MIN_TEMPERATURE)
            self.temperature = MIN_TEMPERATURE
