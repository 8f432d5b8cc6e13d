"""What steps and graphs take on a GPU, found by running the largest step: no later one takes more.

That step has max_num_batched_tokens tokens of max_num_seqs sequences, one of them the end of the longest
prompt, and all are sampled. Then comes what copies logits, for as many rows as are copied at a time:
penalties, biases, log-probabilities, over the longest texts. Decoder and kernels are those that will serve.
Only the pages are few: all sequences share one, since launches and workspaces depend on shapes alone.

Of the graphs, which share one pool of memory, the largest and some more are captured.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from qinfer import backend
from qinfer.engine.activations import GRAPH_LAYER, with_gaps
from qinfer.engine.budget import warn_if_released
from qinfer.engine.footprint import format_size
from qinfer.engine.graphs import capture
from qinfer.engine.kv_pool import KVPool
from qinfer.engine.options import EngineOptions, StepLimits
from qinfer.engine.plan import shapes
from qinfer.engine.request import Request, Sequence, StopRules
from qinfer.engine.runner import Runner
from qinfer.engine.sampler import describe, draw_of, sample, slice_rows
from qinfer.engine.warmup import compile_kernels, largest_step
from qinfer.errors import UserError
from qinfer.model.decoder import Decoder
from qinfer.sampling_params import SamplingParams

SOME = 6  # graphs that are captured to find what all take


class StepUse(NamedTuple):
    """Bytes beside weights and pages."""

    activations: int
    graphs: int


def measure_use(decoder: Decoder, options: EngineOptions, limits: StepLimits, kv_cache_dtype: str) -> StepUse:
    """What an engine of these limits takes on a GPU; compiles its kernels on the way.

    Raises UserError where its largest step does not fit.
    """
    device, config = decoder.device, decoder.config
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    scales = dict.fromkeys(range(config.num_layers), (1.0, 1.0))
    pool = KVPool(config, 1, limits.block_size, kv_cache_dtype, scales=scales, device=device)
    before = torch.cuda.memory_allocated(device)
    runner = Runner(decoder, pool, limits)
    runs_kernels = backend.runs_kernels()
    if runs_kernels:
        compile_kernels(runner)
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_largest(runner, options.max_logprobs)
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"a step of {limits.max_num_batched_tokens:,} tokens of {limits.max_num_seqs:,} sequences does "
            f"not fit beside {format_size(before)} of weights: lower max_num_batched_tokens or max_num_seqs",
            "max_num_batched_tokens",
        ) from None
    activations = with_gaps(torch.cuda.max_memory_allocated(device) - before)
    graphs = _graph_bytes(runner) if runs_kernels and not options.enforce_eager else 0
    del runner, pool
    torch.cuda.empty_cache()
    warn_if_released(free, torch.cuda.mem_get_info(device)[0])
    return StepUse(activations, graphs)


@torch.inference_mode()
def run_largest(runner: Runner, max_logprobs: int) -> None:
    """Runs all that a step may do: draws, then copies of logits, while its hidden states are kept."""
    limits, vocab_size = runner.limits, runner.decoder.config.vocab_size
    text = [0] * limits.max_model_len
    plan = largest_step(limits)
    ids = dict.fromkeys((chunk.seq_id for chunk in plan.chunks), text)
    greediest = [_demanding(i, text, max_logprobs) for i in range(limits.max_num_seqs)]
    runner.launch(plan, ids, draw_of(greediest)).tokens()
    out = runner.run(plan, ids, frozenset(ids))
    rows = min(slice_rows(vocab_size), limits.max_num_seqs)
    sample(out.logits[:rows], greediest[:rows], None)
    scores = runner.logits(out.hidden[0][:rows])
    describe(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device), max_logprobs, None)


def _demanding(index: int, text: list[int], max_logprobs: int) -> Sequence:
    """One that asks for everything that takes memory."""
    params = SamplingParams(
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={0: 1.0},
        logprobs=max_logprobs,
    )
    rules = StopRules(frozenset(), frozenset(), 0, len(text))
    return Sequence(index, Request(str(index), text[:1], params, rules), 0, 0, text)


def _graph_bytes(runner: Runner) -> int:
    """What the graphs of all shapes will take: torch's part as measured, the driver's for each as planned.

    All use the same pool, so that some tell its size: the largest, and the largest that makes logits. The
    driver's part would show in the device's free memory alone, where it is lost among what others take.
    """
    sizes = shapes(runner.limits)
    decodes = next(shape for shape in sizes if shape.decodes)
    some = capture(runner, list(dict.fromkeys([*sizes[:SOME], decodes])))
    if some is None:
        return 0
    return some.num_bytes + len(sizes) * runner.decoder.config.num_layers * GRAPH_LAYER
