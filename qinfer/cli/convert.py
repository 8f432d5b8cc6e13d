"""`qinfer convert`: the same weights in another tool's dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.options import HubTokenOption, JsonOption, ModelArgument, RevisionOption
from qinfer.cli.output import show, stdout_kept_for_result


def convert(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", show_default=False)],
    to: Annotated[
        str, typer.Option(help="compressed-tensors, awq (AutoAWQ gemm) or gptq (AutoGPTQ, GPTQModel).")
    ] = "compressed-tensors",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in --out.")] = False,
    revision: RevisionOption = None,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rewrite the quantized checkpoint MODEL in another tool's dialect, bit by bit.

    Linears of a .gguf file are rounded anew: Q4_0 to the same 4 bits, others to 8 bits (to 4 bits: `qinfer
    quantize FILE.gguf --scheme awq`). A verdict of the gate holds for the files that were judged: judge the
    new ones with `qinfer eval`.
    """
    with stdout_kept_for_result():
        from qinfer.checkpoint.checkpoint import open_checkpoint
        from qinfer.checkpoint.convert import Conversion, check_target
        from qinfer.checkpoint.convert import convert as rewrite
        from qinfer.checkpoint.gguf_requantize import Requantized, check_direct, requantize
        from qinfer.hub import resolve

        is_gguf = model.endswith(".gguf")
        check_target(to)
        if is_gguf:
            check_direct(model, to)
        source = open_checkpoint(resolve(model, revision=revision, token=hf_token))
        done: Conversion | Requantized
        if is_gguf:
            done = requantize(Path(model).expanduser(), source, out, overwrite=overwrite)
        else:
            done = rewrite(source, out, to, overwrite=overwrite)
    show(done.to_dict(), done.to_text(), as_json)
