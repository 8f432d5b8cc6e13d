"""Small things to test with: a random two-layer model of every family, and one measure of error.

`tiny_model` writes a real checkpoint folder, which transformers loads as well as qinfer does, so that a test
never needs a download: config.json, safetensors (whole or in shards), a byte-level tokenizer with merges up
to the vocabulary's end, and a ChatML template. Norms and biases are random too; a model whose norms are all
one would pass with a norm forgotten.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from qinfer.checkpoint.names import global_tensors, layer_tensors
from qinfer.checkpoint.spelling import byte_letters
from qinfer.config import ModelConfig
from qinfer.dtypes import DTYPES
from qinfer.engine.plan import StepPlan
from qinfer.engine.runner import Arriving, StepOutput, TokenIds
from qinfer.engine.sampler import Draw, choose

T = TypeVar("T")

_COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# what each family's config.json says beside the common fields
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4},
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_SCALING,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2_5": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "smollm2": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "rope_theta": 2000000.0,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": 256,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
# with experts, four of them and two for a token
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
}
MIXTURES: tuple[str, ...] = tuple(_MIXTURES)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of a family or mixture: 2 layers, hidden 64, vocabulary 384; `changes` replace fields."""
    return {**_COMMON, **(_FAMILIES | _MIXTURES)[family], "dtype": "float32", **changes}


def tiny_model(
    family: str, directory: Path, *, seed: int = 0, dtype: str = "float32", shards: int = 1, **changes: Any
) -> Path:
    """Writes a random model of the family into `directory` and returns it; the seed decides every weight.

    `shards` > 1 spreads the tensors over that many safetensors files with an index.
    """
    raw = tiny_config(family, dtype=dtype, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    _write_tensors(directory, _random_tensors(raw, seed, DTYPES[dtype]), shards)
    generation = {"bos_token_id": raw["bos_token_id"], "eos_token_id": [258, 256], "pad_token_id": 256}
    vocab_size = raw.get("text_config", raw)["vocab_size"]
    _byte_level_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("config.json", raw),
        ("generation_config.json", generation),
        ("tokenizer_config.json", settings),
    ):
        (directory / name).write_text(json.dumps(content, indent=2))
    (directory / "chat_template.jinja").write_text(CHATML)
    return directory


def wait_until(condition: Callable[[], T]) -> T:
    """What the condition gives, once that is true; AssertionError where it never is.

    Patience is counted in naps, two minutes of them: a machine may stand still for a while, which takes none.
    """
    for _ in range(6000):
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come true")


def error_ratio(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN anywhere gives NaN, which no bound accepts."""
    expected = reference.double()
    return float((out.double() - expected).norm() / expected.norm())


def _random_tensors(raw: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    config = ModelConfig.from_dict(raw)
    shapes = dict(global_tensors(config))
    for i in range(config.num_layers):
        shapes.update(layer_tensors(config, i))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = (1.0 - config.norm_offset) + 0.2 * noise
        elif name.endswith(".bias"):
            noise = 0.2 * noise
        else:  # linears keep the variance of their input; logits spread over a few units
            noise = noise * shape[-1] ** -0.5 * (2.0 if "embed" in name or "lm_head" in name else 1.0)
        tensors[name] = noise.to(dtype)
    return tensors


def _write_tensors(directory: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    """256 bytes, three special tokens, then merges of two letters until the vocabulary is full."""
    vocab = {letter: i for i, letter in enumerate(byte_letters())}
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(a, b) for a in letters for b in letters][: max(0, vocab_size - 256 - len(_SPECIAL))]
    for i, (a, b) in enumerate(pairs):
        vocab[a + b] = 256 + len(_SPECIAL) + i
    vocab.update({token: 256 + i for i, token in enumerate(_SPECIAL)})
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


Script = Sequence[int] | Callable[[list[int]], Sequence[int]]


class FakeRunner:
    """Stands in for the engine's runner: the next tokens are scripted, the plans are kept in `plans`.

    `script` is what every sequence says, or makes that from its prompt; the last token is repeated for ever.
    A scripted token's logit is 20 and all others' 0; the prompt's own logits are all 0. With `overlaps`, the
    engine launches it as it does a GPU.
    """

    def __init__(self, vocab_size: int, script: Script, *, overlaps: bool = False) -> None:
        self.plans: list[StepPlan] = []
        self.overlaps = overlaps
        self._vocab_size = vocab_size
        self._script = script
        self._prompts: dict[int, list[int]] = {}

    def run(self, plan: StepPlan, token_ids: TokenIds, keep: frozenset[int] = frozenset()) -> StepOutput:
        """Logits [S, V] of the scripted tokens; asserts that no chunk is empty, or of unknown tokens."""
        self.plans.append(plan)
        assert all(chunk.start < chunk.stop for chunk in plan.chunks)
        assert all(chunk.pending or chunk.stop <= len(token_ids[chunk.seq_id]) for chunk in plan.chunks)
        sampled = [chunk for chunk in plan.chunks if chunk.sample]
        logits = torch.zeros(len(sampled), self._vocab_size)
        for row, chunk in zip(logits, sampled, strict=True):
            prompt = self._prompts.setdefault(chunk.seq_id, list(token_ids[chunk.seq_id]))
            script = self._script(prompt) if callable(self._script) else self._script
            row[script[min(chunk.stop - len(prompt), len(script) - 1)]] = 20.0
        kept = {
            chunk.seq_id: torch.zeros(chunk.stop - chunk.start, self._vocab_size)
            for chunk in plan.chunks
            if chunk.seq_id in keep
        }
        return StepOutput(logits, kept)

    def launch(self, plan: StepPlan, token_ids: TokenIds, draw: Draw | None) -> Arriving:
        """`run`, and the tokens that `draw` makes of its logits."""
        rows, limited = (None, False) if draw is None else (torch.from_numpy(draw.rows), draw.limited)
        return Arriving(choose(self.run(plan, token_ids).logits, rows, limited=limited))

    def logits(self, hidden: Tensor, *, to_compare: bool = False) -> Tensor:
        """The kept rows are logits already."""
        return hidden
