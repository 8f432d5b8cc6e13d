"""The Python face: a model, its engine and its tokenizer in one object, with vLLM's names.

    llm = LLM("smollm2-135m-instruct")
    llm.generate("The sun is", SamplingParams(max_tokens=20))
    llm.chat([{"role": "user", "content": "Hello"}])

It runs on the GPU where there is one. Making one resolves the model's name, opens the checkpoint, asks the
gate, loads the weights and allocates the KV pool, in this order, so that a refusal costs nothing. What
scripts for vLLM use and qinfer lacks raises NotImplementedError with its name; a keyword that `llm_keywords`
does not know is a TypeError.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

import torch

from qinfer import llm_tasks
from qinfer.backend import model_device
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import layer_modules, layer_prefix
from qinfer.config import ModelConfig
from qinfer.engine.admission import check_text
from qinfer.engine.budget import require_weights_fit
from qinfer.engine.continuation import Continuation
from qinfer.engine.engine import Engine
from qinfer.engine.kv_pool import resolve_kv_cache_dtype, scales_in
from qinfer.engine.pooling import Pooling
from qinfer.engine.sizing import space_of
from qinfer.errors import UserError, check_flags
from qinfer.evals.certificate import GateStatus
from qinfer.generation_config import default_params
from qinfer.llm_keywords import ABSENT_METHODS, engine_options_of, refuse
from qinfer.llm_tasks import BeamSearchOutput, BeamSearchParams
from qinfer.model.decoder import load_decoder
from qinfer.model.head import check_lm_head_dtype
from qinfer.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from qinfer.progress import Progress, ProgressBar
from qinfer.quant import Dense, Scheme
from qinfer.sampling_params import RequestOutputKind, SamplingParams
from qinfer.source import Weights, find_tokenizer, judge, open_model
from qinfer.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]  # {"prompt": ...} or {"prompt_token_ids": ...}
Message: TypeAlias = Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


class LLM:
    """A model that answers in this process.

    `gate` says on what verdict it runs, `engine.ledger` where its memory went, `path` where the files are,
    `schemes` the formats of its layers' products and `weight_bytes` what all tensors take in files.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        lm_head_dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        seed: int = 0,
        allow_ungated: bool = False,
        trust: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        chat_template: str | None = None,
        served_model_name: str | Sequence[str] | None = None,
        hf_token: str | None = None,
        skip_tokenizer_init: bool = False,
        load_format: str = "auto",
        scheme: str | None = None,
        group_size: int | None = None,
        symmetric: bool | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        """Loads a folder, hub id, .gguf file or built-in name; other keywords are those of EngineOptions.

        Bytes may be numbers or texts such as memory="24GiB". lm_head_dtype="int8" quantizes the head, and
        it alone, while loading. load_format="dummy" makes random weights, for which config.json is enough,
        in the `scheme` (and w4a16's `group_size`, `symmetric`) given, else in the model's own.
        `trust` names files of public keys, of which one must have signed the verdict.
        Raises UserError for what cannot be loaded or does not fit, GateError for a quantized checkpoint
        without a passing verdict (unless `allow_ungated`).
        """
        check_flags(allow_ungated=allow_ungated, skip_tokenizer_init=skip_tokenizer_init)
        options = engine_options_of(seed, engine_options)
        if dtype != "auto" and dtype not in DTYPES:
            raise UserError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}", "dtype")
        check_lm_head_dtype(lm_head_dtype)
        weights = Weights(load_format, scheme, group_size, symmetric, seed)
        checkpoint = open_model(model, weights, revision=revision, token=hf_token)
        self.path = checkpoint.path
        self._recommended = (generation_config, override_generation_config or {})
        self.served_model_names = _served_names(
            str(model) if served_model_name is None else served_model_name
        )
        _check_quantization(quantization, checkpoint)
        self.config: ModelConfig = checkpoint.config
        self.schemes = _schemes(checkpoint)
        self.weight_bytes = checkpoint.num_bytes
        self.lm_head_dtype = lm_head_dtype
        self.dtype = model_dtype = DTYPES[self.config.dtype if dtype == "auto" else dtype]
        kv_cache_dtype = resolve_kv_cache_dtype(
            options.kv_cache_dtype,
            str(model_dtype).removeprefix("torch."),
            checkpoint_has_fp8=checkpoint.quantization.kv_cache_scheme is not None,
        )
        device = model_device()
        clearance = judge(
            checkpoint,
            kv_cache_dtype,
            lm_head_dtype,
            dtype=str(model_dtype).removeprefix("torch."),
            allow_ungated=allow_ungated,
            tokenizer=tokenizer,
            chat_template=chat_template,
            hf_token=hf_token,
            trust=[trust] if isinstance(trust, str | os.PathLike) else trust,
        )
        with clearance:  # the weights are hashed while they are loaded
            require_weights_fit(self.weight_bytes, space_of(device), options)
            self.tokenizer: Tokenizer | None = None
            if not skip_tokenizer_init:
                self.tokenizer = find_tokenizer(
                    checkpoint, tokenizer, chat_template=chat_template, token=hf_token
                )
            decoder = load_decoder(
                checkpoint, device=device, dtype=model_dtype, lm_head_dtype=lm_head_dtype, progress=True
            )
            self.gate: GateStatus = clearance.result()
        self.engine = Engine(
            decoder,
            self.tokenizer,
            replace(options, kv_cache_dtype=kv_cache_dtype),
            kv_scales=scales_in(checkpoint),
            label=_label(self.schemes, model_dtype, kv_cache_dtype, lm_head_dtype),
        )
        self._ids = count()
        self._enqueued: list[str] = []
        self._finished: dict[str, RequestOutput] = {}
        self._widths: dict[str, int] = {}  # n of each request, for the progress bar

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT_METHODS:
            raise NotImplementedError(f"qinfer does not have LLM.{name}")
        raise AttributeError(f"LLM has no attribute {name!r}")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Continues prompts and returns their outputs in the order given.

        A prompt is text, a list of ids, {"prompt": text} or {"prompt_token_ids": ids}. `sampling_params`:
        one for all, one for each, or None for the model's defaults. `use_tqdm` may be a tqdm constructor.
        `priority`: one for each, the smaller the sooner, with scheduling_policy="priority".
        """
        refuse(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self.run(_prompt_list(prompts), sampling_params, use_tqdm, priority=priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, written out by the model's chat template.

        A conversation is a list of {"role", "content"}. Raises UserError for messages the template refuses.
        """
        refuse(
            lora_request=lora_request,
            chat_template_content_format=None
            if chat_template_content_format in ("auto", "string")
            else chat_template_content_format,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise UserError(
                f"messages is a {type(messages).__name__}; it must be a list of messages such as "
                '{"role": "user", "content": "Hello"}, or a list of such lists',
                "messages",
            )
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        texts = [
            tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        prompts = [self._encode_text(text, add_special_tokens=False) for text in texts]
        return self.run(prompts, sampling_params, use_tqdm, priority=priority)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of length 1 for each text or list of ids, in the order given."""
        refuse(
            pooling_params=pooling_params, lora_request=lora_request, tokenization_kwargs=tokenization_kwargs
        )
        return llm_tasks.embed(self, _prompt_list(prompts), use_tqdm)

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        chat_template: None = None,
    ) -> list[ScoringRequestOutput]:
        """How likely each of `data_2` is after its one of `data_1`, or after the only one, in nats.

        Both are texts or lists of ids. Raises UserError where there are not as many of one as of the other.
        """
        refuse(pooling_params=pooling_params, lora_request=lora_request, chat_template=chat_template)
        refuse(tokenization_kwargs=tokenization_kwargs)
        return llm_tasks.score(self, _prompt_list(data_1), _prompt_list(data_2), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
        priority: None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, best first; `concurrency_limit` is the engine's own."""
        refuse(lora_request=lora_request, priority=priority)
        ids = [list(self._encode(prompt)[1]) for prompt in _prompt_list(prompts)]
        return llm_tasks.beam_search(self, ids, params, use_tqdm)

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        use_tqdm: Progress,
        *,
        pooling: Pooling | None = None,
        priority: Sequence[int] | None = None,
        continuations: Sequence[Continuation] | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to their end, pooled, scored or continued; what all methods above come to."""
        ids = self._add(prompts, params, pooling=pooling, priority=priority, continuations=continuations)
        return self._run(ids, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Takes prompts in like `generate`, for `wait_for_completion` to run; returns their request ids."""
        ids = self._add(_prompt_list(prompts), sampling_params, priority=priority)
        self._enqueued += ids
        return ids

    def wait_for_completion(self, *, use_tqdm: Progress = True) -> list[RequestOutput]:
        """Runs all that was enqueued and returns the outputs in that order."""
        ids, self._enqueued = self._enqueued, []
        return self._run(ids, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; UserError where there is none."""
        if self.tokenizer is None:
            raise UserError(
                "this LLM has no tokenizer (skip_tokenizer_init=True, or dummy weights of a folder without "
                "one) and takes token ids only: name one (tokenizer=..., --tokenizer) for text"
            )
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, over the defaults of SamplingParams.

        Raises UserError for values that cannot be.
        """
        return default_params(self.path, *self._recommended)

    def get_metrics(self) -> dict[str, float]:
        """The engine's counters and gauges by name."""
        return self.engine.stats()._asdict()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        return self.engine.reset_prefix_cache()

    def _add(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        *,
        pooling: Pooling | None = None,
        priority: Sequence[int] | None = None,
        continuations: Sequence[Continuation] | None = None,
    ) -> list[str]:
        params = self._params_list(sampling_params, len(prompts))
        ranks = [0] * len(prompts) if priority is None else priority
        if len(ranks) != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {len(ranks)} priorities: give one each", "priority")
        ids: list[str] = []
        try:
            for i, (prompt, own, rank) in enumerate(zip(prompts, params, ranks, strict=True)):
                text, token_ids = self._encode(prompt)
                final = own.clone()
                final.output_kind = RequestOutputKind.FINAL_ONLY
                request_id = str(next(self._ids))
                self.engine.add(
                    request_id,
                    token_ids,
                    final,
                    prompt=text,
                    priority=rank,
                    pooling=pooling,
                    continuation=continuations[i] if continuations else None,
                )
                ids.append(request_id)
                self._widths[request_id] = own.n
        except BaseException:
            self._abort(ids)
            raise
        return ids

    def _params_list(self, sampling_params: Params, count: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, Sequence) or not all(
            isinstance(params, SamplingParams) for params in sampling_params
        ):
            raise UserError(
                f"sampling_params must be a SamplingParams or a list of them, not {sampling_params!r:.100}",
                "sampling_params",
            )
        if len(sampling_params) != count:
            raise UserError(
                f"{count} prompts but {len(sampling_params)} sampling_params: give one for all or one each",
                "sampling_params",
            )
        return list(sampling_params)

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        text: Any = prompt
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            if prompt.get("prompt_token_ids") is not None:
                return text, prompt["prompt_token_ids"]
        if isinstance(text, str):
            return text, self._encode_text(text, add_special_tokens=True)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            return None, prompt
        raise UserError(
            'a prompt is text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}, '
            f"not {prompt!r:.100}",
            "prompts",
        )

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self.get_tokenizer()
        check_text(text, tokenizer, self.engine.limits.max_model_len)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _run(self, ids: Sequence[str], use_tqdm: Progress) -> list[RequestOutput]:
        """Steps until these requests have finished; outputs of others are kept for who waits for them."""
        missing = {request_id for request_id in ids if request_id not in self._finished}
        total = sum(self._widths.pop(request_id) for request_id in ids)
        bar = ProgressBar(use_tqdm, total) if use_tqdm else None
        try:
            while missing:
                for output in self.engine.step():
                    self._finished[output.request_id] = output
                    if bar and output.request_id in missing:
                        bar.advance(output)
                    missing.discard(output.request_id)
        except BaseException:  # also an interrupt: what nobody waits for any more must not run on
            self._abort(missing)
            raise
        finally:
            if bar:
                bar.close()
        return [self._finished.pop(request_id) for request_id in ids]

    def _abort(self, ids: Sequence[str] | set[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)


def _served_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """The model's names in the API; UserError for none, or an empty one."""
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or not all(isinstance(name, str) and name.strip() for name in found):
        raise UserError(
            f"served_model_name must be a name or several, not {names!r:.100}", "served_model_name"
        )
    return found


def _check_quantization(quantization: str | None, checkpoint: Checkpoint) -> None:
    found = checkpoint.quantization.method if checkpoint.is_quantized else None
    if quantization not in (None, found):
        raise UserError(
            f"quantization={quantization!r} but the checkpoint is {found or 'not quantized'}: leave it "
            "out, or quantize first with `qinfer quantize`",
            "quantization",
        )


def _schemes(checkpoint: Checkpoint) -> tuple[Scheme, ...]:
    """The formats in the first layer, in the order of its products, each once."""
    prefix = layer_prefix(checkpoint.config, 0)
    found = (checkpoint.scheme(prefix + module) for module in layer_modules(checkpoint.config))
    return tuple(dict.fromkeys(found))


def _label(schemes: Sequence[Scheme], dtype: torch.dtype, kv_cache_dtype: str, lm_head_dtype: str) -> str:
    """'w8a8-int8 + int8 head + fp8 KV': what the ledger calls this engine."""
    model_dtype = str(dtype).removeprefix("torch.")
    weights = model_dtype if list(schemes) == [Dense()] else " + ".join(one.label for one in schemes)
    head = "" if lm_head_dtype == "auto" else f" + {lm_head_dtype} head"
    return weights + head + ("" if kv_cache_dtype == model_dtype else f" + {kv_cache_dtype} KV")


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UserError(
            f"prompts is a {type(prompts).__name__}; it must be text, token ids, a prompt dict or a list "
            "of them",
            "prompts",
        )
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [prompts]  # type: ignore[list-item]  # one prompt of ids
    return list(prompts)  # type: ignore[arg-type]
