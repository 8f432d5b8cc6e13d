"""The engine as one of lm-eval's models: its tasks put their questions, `Scorer` has them answered.

Item by item the answers are those of lm-eval's own `hf` model on the same weights; only the rounding of the
arithmetic differs. What `hf` does and this does too: a rolling text gets a BOS (or EOS) in front even where
the tokenizer adds one; the windows of a rolling text that is too long share no token; a template that
refuses a system message is asked again without it, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qinfer.errors import UserError
from qinfer.evals.items import Generated
from qinfer.evals.scorer import Scorer
from qinfer.sampling_params import SamplingParams

_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")  # beside temperature and do_sample
_Encoded = tuple[tuple[str, str] | None, list[int], list[int]]

logger = logging.getLogger(__name__)


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's interface over a `Scorer`; results come in the order of the requests."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        super().__init__()
        self._scorer = scorer
        self._name = name
        self.tokenizer = scorer.tokenizer.hf  # for its chat template, which lm-eval notes

    @property
    def max_length(self) -> int:
        """Tokens that the model can read at once."""
        return self._scorer.max_length

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's own EOS."""
        return int(self._scorer.tokenizer.hf.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context."""
        return self._scorer.prefix_id

    @property
    def tokenizer_name(self) -> str:
        """Distinguishes prompts that lm-eval may have cached."""
        return self._name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        return {"model_name": self._name, "max_length": self.max_length}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """Ids of a text; None: with the special tokens that the tokenizer adds, but never two BOS."""
        if add_special_tokens is None:
            return self._scorer.encode(string)
        return self._scorer.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether greedy decoding would say it) of each continuation."""
        pairs = [request.args for request in requests]
        return self._loglikelihood_tokens([(pair, *self._scorer.encode_pair(*pair)) for pair in pairs])

    def _loglikelihood_tokens(
        self, requests: Sequence[_Encoded], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        found = self._scorer.logliks([(context, continuation) for _, context, continuation in requests])
        for (key, _, _), one in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, one)
        return list(found)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability in nats of each whole text, every token scored once."""
        windows: list[_Encoded] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (loglik, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += loglik
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model says to each prompt, up to the first stop string."""
        return [text for text, _ in self.say(requests)]

    def say(self, requests: Sequence[Instance]) -> list[tuple[str, Generated]]:
        """As `generate_until`, with how each answer came out."""
        eos = self.tokenizer.decode([self.eot_token_id])
        wanted = [self._params(request.args[1], eos) for request in requests]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        said = self._scorer.generate(
            [(ids, params) for ids, (params, _) in zip(prompts, wanted, strict=True)]
        )
        found = []
        for request, (_, until), one in zip(requests, wanted, said, strict=True):
            text = postprocess_generated_text(one.text, until, None)
            self.cache_hook.add_partial("generate_until", request.args, text)
            found.append((text, one.generated))
        return found

    def _params(self, gen_kwargs: Mapping[str, Any], eos: str) -> tuple[SamplingParams, list[str]]:
        """The sampling that a task asks for, and the strings that end an answer."""
        wanted = dict(normalize_gen_kwargs(dict(gen_kwargs)))
        until = [text for text in handle_stop_sequences(wanted.pop("until", None), eos) if text]
        wanted.pop("do_sample", None)  # normalised: no temperature without it
        params: dict[str, Any] = {"repetition_penalty": self._scorer.repetition_penalty}
        params |= {"temperature": wanted.pop("temperature", 0.0), "max_tokens": wanted.pop("max_gen_toks")}
        params |= {name: wanted.pop(name) for name in _SAMPLING if name in wanted}
        if wanted:
            raise UserError(
                f"a task wants generation with {', '.join(sorted(wanted))}, which qinfer does not have; "
                f"it has until, max_gen_toks, do_sample, temperature, {', '.join(_SAMPLING)}",
                "gen_kwargs",
            )
        stop = [text for text in until if text != eos]  # the end token is known by its id
        return SamplingParams(**params, stop=stop, detokenize=bool(stop)), until

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the template writes it; the last turn goes on without a generation prompt."""
        try:
            return self._render(chat_history, add_generation_prompt)
        except UserError as error:
            turns = [message for message in chat_history if message["role"] != "system"]
            if len(turns) == len(chat_history):
                raise
            logger.warning("the system message is left out: %s", error)
            return self._render(turns, add_generation_prompt)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return self._scorer.tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
