"""Text that the model writes itself: calibration data for any language model, with no corpus at hand.

Sampled at temperature 1, a model's own text has the distribution it was trained on, which is what the
statistics should come from. Half of the sequences start at the first token alone, half at a prompt put
through the chat template; a model without a template has only the first kind, one without a first token
only the second. Sequence i is drawn with seed + i, so a run can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from qinfer.calibrate.devices import working_on
from qinfer.checkpoint.checkpoint import CPU, Checkpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.model.decoder import load_decoder
from qinfer.sampling_params import SamplingParams
from qinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# (prompts, tokens per whole sequence, seed) -> the tokens that follow each prompt
Generate = Callable[[Sequence[Sequence[int]], int, int], list[list[int]]]

GPU_SHARE = 0.8  # of a GPU's free memory that the weights may take; the rest is for pages and activations

PROMPTS = (
    "Explain how rain forms, step by step.",
    "Write a short story about a lighthouse keeper.",
    "Write a Python function that counts the words of a text, and explain it.",
    "What were the main causes of the First World War?",
    "Give me a recipe for vegetable soup with exact amounts.",
    "Summarize the plot of a famous play in one paragraph.",
    "A train travels 180 km in 2.5 hours. What is its speed? Show your work.",
    "Write a polite email asking for a deadline to be moved.",
)


def self_text(
    tokenizer: Tokenizer, generate: Generate, num_samples: int, max_seq_len: int, seed: int
) -> list[tuple[int, ...]]:
    """`num_samples` sequences, prompt and continuation, of at most `max_seq_len` tokens each."""
    starts = self_prompts(tokenizer, num_samples)
    starts = [start[: max_seq_len - 1] for start in starts]
    written = generate(starts, max_seq_len, seed)
    return [tuple([*start, *rest][:max_seq_len]) for start, rest in zip(starts, written, strict=True)]


def self_prompts(tokenizer: Tokenizer, num_samples: int) -> list[list[int]]:
    """What each sequence starts from: the first token and chat prompts in turn."""
    bare: list[list[int]] = []
    if tokenizer.bos_token_id is not None:
        bare = [[tokenizer.bos_token_id]]
    elif not tokenizer.has_chat_template:
        bare = [[min(tokenizer.eos_token_ids)]]  # such models (GPT-2's heirs) end and begin with one token
    chats: list[list[int]] = []
    if tokenizer.has_chat_template:
        messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        chats = [tokenizer.apply_chat_template(m, add_generation_prompt=True) for m in messages]
    turns = [kind for kind in (bare, chats) if kind]
    return [turns[i % len(turns)][i // len(turns) % len(turns[i % len(turns)])] for i in range(num_samples)]


def engine_generate(
    checkpoint: Checkpoint, tokenizer: Tokenizer, *, device: torch.device = CPU, progress: bool = True
) -> Generate:
    """A `Generate` that loads the whole model into qinfer's own engine, when called; a bar counts tokens."""

    def generate(prompts: Sequence[Sequence[int]], seq_len: int, seed: int) -> list[list[int]]:
        fits = device.type == "cpu" or checkpoint.num_bytes < GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        if not fits:
            logger.warning("the model is too large for %s as a whole: it writes text on the CPU", device)
        where = device if fits else CPU
        with working_on(where):
            decoder = load_decoder(checkpoint, device=where, progress=progress)
            blocks = sum(-(-seq_len // 16) + 1 for _ in prompts)
            # written once: graphs would take longer to capture than they save
            options = EngineOptions(max_model_len=seq_len, num_kv_blocks=blocks, enforce_eager=True)
            engine = Engine(decoder, tokenizer, options)
            for i, prompt in enumerate(prompts):
                params = SamplingParams(
                    temperature=1.0, seed=seed + i, max_tokens=seq_len - len(prompt), detokenize=False
                )
                engine.add(str(i), prompt, params)
            written = _write(engine, sum(seq_len - len(prompt) for prompt in prompts), progress)
            del engine, decoder
        return [written[str(i)] for i in range(len(prompts))]

    return generate


def _write(engine: Engine, most: int, progress: bool) -> dict[str, list[int]]:
    """All that the engine's requests write, at `most` so many tokens together, by their ids."""
    written: dict[str, list[int]] = {}
    with tqdm(total=most, desc="writing calibration text", unit="token", disable=not progress) as bar:
        while engine.has_unfinished():
            for output in engine.step():
                ids = list(output.outputs[0].token_ids)
                bar.update(len(ids) - len(written.get(output.request_id, ())))
                written[output.request_id] = ids
        bar.total = bar.n  # some sequences have ended before their limit
        bar.refresh()
    return written
