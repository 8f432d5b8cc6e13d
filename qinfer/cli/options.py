"""Arguments and options that several commands share, with one spelling and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint folder, a hub id, a .gguf file, or the built-in smollm2-135m-instruct.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
HubTokenOption = Annotated[
    str | None,
    typer.Option("--hf-token", envvar="HF_TOKEN", help="Access token of the hub.", show_envvar=True),
]
DtypeOption = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32: of activations and dense weights.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Hard budget for all that the process holds there, weights and KV pool included, such as 24GiB."
    ),
]
GpuMemoryUtilizationOption = Annotated[
    float | None,
    typer.Option(help="Share of the GPU for all of that, where --memory is not given: 0.92."),
]
MaxModelLenOption = Annotated[
    int | None, typer.Option(min=1, help="Longest sequence, prompt and answer, in tokens.")
]
MaxNumSeqsOption = Annotated[int | None, typer.Option(min=1, help="Most sequences in one step.")]
MaxNumBatchedTokensOption = Annotated[int | None, typer.Option(min=1, help="Most tokens in one step.")]
BlockSizeOption = Annotated[int | None, typer.Option(min=1, help="Tokens of a KV page.")]
KVCacheDtypeOption = Annotated[
    str, typer.Option(help="auto (the model's), bfloat16, float16, float32, int8 or fp8.")
]
LMHeadDtypeOption = Annotated[
    str, typer.Option(help="auto (dense) or int8: of the head alone, quantized while loading.")
]
PrefixCachingOption = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse the KV of shared prompt starts."
    ),
]
SeedOption = Annotated[int, typer.Option(help="Seed of the engine's random numbers.")]
AllowUngatedOption = Annotated[
    bool,
    typer.Option("--allow-ungated", help="Load a quantized checkpoint without a valid verdict of the gate."),
]
ChatTemplateOption = Annotated[str | None, typer.Option(help="A Jinja chat template, or a file with one.")]
ProfileOption = Annotated[
    str, typer.Option(help="How much is measured and how strictly: lenient, standard or strict.")
]
ChunkedPrefillOption = Annotated[
    bool,
    typer.Option(
        "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Compute long prompts in parts."
    ),
]
EnforceEagerOption = Annotated[
    bool, typer.Option("--enforce-eager", help="On a GPU: no CUDA graphs, the same tokens.")
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="A folder or hub id with a tokenizer. Default: MODEL's.", show_default=False),
]
LoadFormatOption = Annotated[
    str,
    typer.Option(help="auto, or dummy: random weights, for which config.json is enough."),
]
SchemeOption = Annotated[
    str | None,
    typer.Option(
        help="Of dummy weights: dense, w8a8-int8 (the preset int8), w4a16, ... Default: the model's.",
        show_default=False,
    ),
]
GroupSizeOption = Annotated[
    int | None,
    typer.Option(help="Weights that share a scale (w4a16): 128, 64 or 32.", show_default=False),
]
SymmetricOption = Annotated[
    bool | None,
    typer.Option("--sym/--asym", help="Without or with zero points (w4a16).", show_default=False),
]
TrustOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="KEY",
        help="A file with a public Ed25519 key, one of which must have signed the verdict. May be repeated.",
        show_default=False,
    ),
]
SignOption = Annotated[
    Path | None,
    typer.Option(
        metavar="KEY", help="A file with the private Ed25519 key that signs the verdict.", show_default=False
    ),
]
ValidDaysOption = Annotated[
    int | None,
    typer.Option(min=1, help="Days after which the verdict is void. Default: never.", show_default=False),
]
