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
from typing import Any, TypeAlias

from qinfer import llm_tasks
from qinfer.chat_messages import Message
from qinfer.config import ModelConfig
from qinfer.dtypes import DTYPES
from qinfer.engine.continuation import Continuation
from qinfer.engine.pooling import Pooling
from qinfer.errors import check_flags
from qinfer.generation_config import default_params
from qinfer.llm_keywords import ABSENT_METHODS, engine_options_of, refuse, served_names
from qinfer.llm_requests import Requests
from qinfer.llm_tasks import BeamSearchOutput, BeamSearchParams
from qinfer.loading import Loader, schemes_of
from qinfer.model.head import check_lm_head_dtype
from qinfer.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from qinfer.progress import Progress
from qinfer.prompts import Prompt, conversation_list, prompt_list
from qinfer.sampling_params import SamplingParams
from qinfer.source import Weights, check_dtype, check_quantization, open_model
from qinfer.tokenizer import Tokenizer

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


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
        check_dtype(dtype)
        check_lm_head_dtype(lm_head_dtype)
        weights = Weights(load_format, scheme, group_size, symmetric, seed)
        checkpoint = open_model(model, weights, revision=revision, token=hf_token)
        self.path = checkpoint.path
        self._recommended = (generation_config, override_generation_config or {})
        self.served_model_names = served_names(str(model) if served_model_name is None else served_model_name)
        check_quantization(quantization, checkpoint)
        self.config: ModelConfig = checkpoint.config
        self.schemes = schemes_of(checkpoint)
        self.weight_bytes = checkpoint.num_bytes
        self.lm_head_dtype = lm_head_dtype
        self.dtype = DTYPES[self.config.dtype if dtype == "auto" else dtype]
        self.engine, self.tokenizer, self.gate = Loader(
            checkpoint,
            options,
            self.dtype,
            lm_head_dtype,
            tokenizer,
            chat_template,
            hf_token,
            skip_tokenizer=skip_tokenizer_init,
            allow_ungated=allow_ungated,
            trust=[trust] if isinstance(trust, str | os.PathLike) else trust,
        ).load()
        self._requests = Requests(self.engine, self.tokenizer)
        self._enqueued: list[str] = []

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
        return self.run(prompt_list(prompts), sampling_params, use_tqdm, priority=priority)

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
            for conversation in conversation_list(messages)
        ]
        prompts = [self._requests.encode_text(text, add_special_tokens=False) for text in texts]
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
        return llm_tasks.embed(self, prompt_list(prompts), use_tqdm)

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
        return llm_tasks.score(self, prompt_list(data_1), prompt_list(data_2), use_tqdm)

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
        ids = [list(self._requests.encode(prompt)[1]) for prompt in prompt_list(prompts)]
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
        params = self.get_default_sampling_params() if params is None else params
        ids = self._requests.add(
            prompts, params, pooling=pooling, priority=priority, continuations=continuations
        )
        return self._requests.run(ids, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Takes prompts in like `generate`, for `wait_for_completion` to run; returns their request ids."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        ids = self._requests.add(prompt_list(prompts), params, priority=priority)
        self._enqueued += ids
        return ids

    def wait_for_completion(self, *, use_tqdm: Progress = True) -> list[RequestOutput]:
        """Runs all that was enqueued and returns the outputs in that order."""
        ids, self._enqueued = self._enqueued, []
        return self._requests.run(ids, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; UserError where there is none."""
        return self._requests.tokenizer

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
