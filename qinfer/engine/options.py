"""What a user may choose about the engine, and what is checked before anything is allocated. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from qinfer.errors import UserError, check_counts, check_flags

SCHEDULING_POLICIES = ("fcfs", "priority")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class EngineOptions:
    """Engine options with vLLM's names; None means: chosen from the model and the device.

    `num_kv_blocks` fixes the number of pages and `kv_cache_memory_bytes` their bytes; else `memory`, a hard
    budget in bytes for weights, activations and pages together, decides, or on a GPU
    `gpu_memory_utilization` of the device. `scheduling_policy` "fcfs" runs requests in order of arrival,
    "priority" the smaller priority first. Raises UserError for a value that no engine could have.
    """

    max_model_len: int | None = None  # the model's context, or what the pool holds of it
    max_num_seqs: int | None = None  # 64 on the CPU, 256 on a GPU
    max_num_batched_tokens: int | None = None
    block_size: int | None = None  # tokens per page: 16 on the CPU, 64 on a GPU
    kv_cache_dtype: str = "auto"  # auto: the model's dtype, or fp8 where the checkpoint asks for it
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_kv_blocks: int | None = None
    memory: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    seed: int = 0
    max_logprobs: int = 20  # -1: no limit
    enforce_eager: bool = False  # on a GPU: no CUDA graphs
    scheduling_policy: str = "fcfs"

    def __post_init__(self) -> None:
        sizes: tuple[str, ...] = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
        sizes += ("num_kv_blocks", "memory", "kv_cache_memory_bytes")
        check_counts(**{name: getattr(self, name) for name in sizes})
        for name, kind in (("seed", int), ("max_logprobs", int), ("gpu_memory_utilization", (int, float))):
            if not isinstance(value := getattr(self, name), kind) or isinstance(value, bool):
                raise UserError(f"{name} must be a number, not {value!r:.100}", name)
        check_flags(
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enforce_eager=self.enforce_eager,
        )
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise UserError(f"block_size must be a power of two, not {self.block_size}", "block_size")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise UserError(
                f"kv_cache_dtype must be one of {known}, not {self.kv_cache_dtype!r}", "kv_cache_dtype"
            )
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            allowed = " or ".join(SCHEDULING_POLICIES)
            raise UserError(
                f"scheduling_policy must be {allowed}, not {self.scheduling_policy!r}", "scheduling_policy"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(
                f"gpu_memory_utilization must lie in (0, 1], not {self.gpu_memory_utilization}",
                "gpu_memory_utilization",
            )
        if self.max_logprobs < -1:
            raise UserError(f"max_logprobs must be at least -1, not {self.max_logprobs}", "max_logprobs")

    @property
    def has_fixed_pool(self) -> bool:
        """Whether the KV pool's size was chosen, so that it is not what a share of the device leaves."""
        return self.num_kv_blocks is not None or self.kv_cache_memory_bytes is not None


class StepLimits(NamedTuple):
    """The settled numbers that the scheduler obeys; lengths in tokens."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    chunked_prefill: bool = True


def settle_limits(options: EngineOptions, context: int, *, on_gpu: bool) -> StepLimits:
    """Fills in what was left open, for a model of `context` positions.

    Raises UserError where the choices contradict each other: a length beyond the context, a token budget
    under the number of sequences, or under the length where prefill may not be split (cases.md S08).
    """
    length = options.max_model_len or context
    if length > context:
        raise UserError(
            f"max_model_len {length} exceeds the model's context of {context} tokens", "max_model_len"
        )
    seqs = options.max_num_seqs or (256 if on_gpu else 64)
    chosen = options.max_num_batched_tokens
    batched = chosen or (8192 if on_gpu else 1024)
    if chosen is None:
        batched = max(batched, seqs, 0 if options.enable_chunked_prefill else length)
    if batched < seqs:
        if options.max_num_seqs is not None:
            raise UserError(
                f"max_num_batched_tokens {batched} is below max_num_seqs {seqs}: every running "
                "sequence needs one token per step; raise the one or lower the other",
                "max_num_batched_tokens",
            )
        seqs = batched
    if not options.enable_chunked_prefill and batched < length:
        raise UserError(
            f"max_num_batched_tokens {batched} is below max_model_len {length} and chunked prefill is off: a "
            "longer prompt could never run; raise it or turn enable_chunked_prefill on",
            "max_num_batched_tokens",
        )
    return StepLimits(
        length, seqs, batched, options.block_size or (64 if on_gpu else 16), options.enable_chunked_prefill
    )


class StepCounts(NamedTuple):
    """What one step has computed; all zero where there was none to book."""

    prefill_tokens: int = 0  # of prompts, and what a preempted sequence has to compute again
    new_tokens: int = 0
    num_prefills: int = 0  # sequences
    num_decodes: int = 0

    @property
    def phase(self) -> str:
        """One of prefill, decode, mixed."""
        if not self.num_prefills:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"


class EngineStats(NamedTuple):
    """The engine's counters: `num_*` running and waiting now, the others since the engine was made."""

    num_running: int  # sequences that hold pages
    num_waiting: int
    kv_usage: float  # share of the pages held by running sequences, 0 to 1
    kv_tokens: int  # tokens that the pool holds
    num_preemptions: int
    prompt_tokens: int  # of requests whose prompt has been computed
    cached_tokens: int  # of those, taken from the prefix cache
    generation_tokens: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # and found there
    last_step: StepCounts = StepCounts()
    fallbacks: tuple[tuple[str, str, int], ...] = ()  # (op, why it ran without its kernel, how often)
