"""`qinfer plan`: what fits into a memory budget, for every scheme side by side, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.options import (
    BlockSizeOption,
    GpuMemoryUtilizationOption,
    HubTokenOption,
    JsonOption,
    LMHeadDtypeOption,
    ModelArgument,
    RevisionOption,
)
from qinfer.cli.output import show, stdout_kept_for_result, table
from qinfer.engine.activations import MIB, RUNTIME

if TYPE_CHECKING:
    from qinfer.bench.plan import Row, Setting
    from qinfer.config import ModelConfig


def plan(
    model: ModelArgument,
    memory: Annotated[
        str | None,
        typer.Option(help="Budget for everything, such as 24GiB. Default: what `qinfer serve` takes here."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda. Default: cuda where there is one, or a budget is given; else cpu."),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Only this: a preset of `qinfer quantize` (int8, fp8, awq), or schemes whose name starts so."
        ),
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Only this KV dtype.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a full-length sequence. Default: the model's context, or what fits of it.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Sequences in one step. Default: 256, on a CPU 64.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in one step. Default: 8192, on a CPU 1024.")
    ] = None,
    block_size: BlockSizeOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = None,
    lm_head_dtype: LMHeadDtypeOption = "auto",
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Kept free for the runtime beside weights, activations and pool. "
            f"Default: {RUNTIME // MIB}MiB and a page, on a CPU nothing."
        ),
    ] = None,
    revision: RevisionOption = None,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute weights, KV pool and tokens of every scheme and KV dtype under a memory budget.

    MODEL may also be a config.json. Nothing but the configuration is read.
    """
    with stdout_kept_for_result():
        from qinfer.bench.plan import Setting, place, side_by_side
        from qinfer.engine.footprint import parse_size
        from qinfer.engine.options import EngineOptions, settle_limits
        from qinfer.model.head import check_lm_head_dtype

        check_lm_head_dtype(lm_head_dtype)
        if gpu_memory_utilization is None:
            gpu_memory_utilization = EngineOptions.gpu_memory_utilization
        options = EngineOptions(
            memory=None if memory is None else parse_size(memory),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        space = place(device, options.memory)
        config = _read_config(model, revision, hf_token)
        setting = Setting(
            options,
            settle_limits(options, config.context_len, on_gpu=space.on_gpu),
            space,
            None if reserve is None else parse_size(reserve),
            lm_head_dtype,
        )
        rows = side_by_side(config, setting, scheme, kv_cache_dtype)
    show(_document(model, setting, rows), _text(model, config, setting, rows, device), as_json)


def _read_config(model: str, revision: str | None, token: str | None) -> ModelConfig:
    """The model's configuration; of a hub model only its config.json is fetched."""
    from qinfer.checkpoint.files import read_json
    from qinfer.config import ModelConfig

    path = Path(model)
    if not model.endswith(".json"):
        from qinfer.hub import config_file

        path = config_file(model, revision=revision, token=token)
    return ModelConfig.from_dict(read_json(path))


def _document(model: str, setting: Setting, rows: list[Row]) -> dict[str, Any]:
    limits = setting.limits
    return {
        "model": model,
        "device": "cuda" if setting.space.on_gpu else "cpu",
        "budget": setting.options.memory,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "rows": [_numbers(row) for row in rows],
    }


def _numbers(row: Row) -> dict[str, Any]:
    """One row; the ledger's numbers are null where it does not fit."""
    names = ("budget", "activations", "graphs", "reserve", "kv_pool", "pages", "tokens", "max_model_len")
    ledger: dict[str, Any] = {} if row.ledger is None else row.ledger.to_dict()
    return {
        "scheme": row.scheme,
        "kv_cache_dtype": row.kv_cache_dtype,
        "max_num_batched_tokens": row.limits.max_num_batched_tokens,
        "fits": row.ledger is not None,
        "reason": row.shortfall or None,
        "weights": row.weights,
        **{name: ledger.get(name) for name in (*names, "sequences", "ratio")},
    }


def _text(model: str, config: ModelConfig, setting: Setting, rows: list[Row], device: str | None) -> str:
    from qinfer.bench.plan import SHORT

    limits = setting.limits
    title = f"{model} ({config.architecture}), {_planned_for(setting, device)}"
    full = f"seqs of {limits.max_model_len:,}"
    header = ("weights + KV", "weights", "activations + reserve", "KV pool", "tokens", full, "ratio")
    notes = [
        f"up to {limits.max_num_seqs} sequences and {limits.max_num_batched_tokens} tokens in a step; ratio: "
        f"KV tokens against dense + {SHORT[config.dtype]} KV in the same memory, blank if that does not fit"
    ]
    if any(row.ledger and row.ledger.max_model_len < limits.max_model_len for row in rows):
        notes.append(
            f"1 of fewer than {limits.max_model_len:,}: the pool does not hold the model's context, and "
            "serving lowers max_model_len"
        )
    shorter = sorted({row.limits.max_num_batched_tokens for row in rows} - {limits.max_num_batched_tokens})
    if shorter:
        notes.append(
            f"a step of {' or '.join(f'{n:,}' for n in shorter)} tokens in some rows, as serving settles it: "
            "longer ones would take too much of what the weights leave"
        )
    cells = [_cells(row, limits.max_model_len) for row in rows]
    return "\n\n".join((title, table(header, cells), "\n".join((*notes, _about_weights(setting)))))


def _planned_for(setting: Setting, device: str | None) -> str:
    """'planned for a GPU in 24.00 GiB', and how to ask for something else where nobody chose."""
    from qinfer.engine.footprint import format_size

    budget, space = setting.options.memory, setting.space
    where = "a GPU" if space.on_gpu else "this machine's CPU"
    if budget is None:
        room = f"as `qinfer serve` sizes it with {format_size(space.available)} free"
        return f"planned for {where}, {room}; --memory 24GiB plans a budget"
    chosen = "" if device or not space.on_gpu else "; --device cpu plans this machine's CPU"
    if not space.on_gpu and budget > space.available:
        chosen = (
            f"; it has {format_size(space.available)} free now, so `qinfer serve` would refuse this budget"
        )
    return f"planned for {where} in {format_size(budget)}{chosen}"


def _about_weights(setting: Setting) -> str:
    if setting.space.on_gpu:
        return "On a CPU loaded weights take more than in the file: fp8 2 bytes each, w4a16 1 byte."
    return "Weights are as loaded on a CPU, more than in the file: fp8 2 bytes each, w4a16 1 byte."


def _cells(row: Row, max_model_len: int) -> tuple[str, ...]:
    from qinfer.engine.footprint import format_size

    led = row.ledger
    if led is None:
        return (row.label, format_size(row.weights), "", "does not fit", "", "", "")
    lowered = f" of {led.max_model_len:,}" if led.max_model_len < max_model_len else ""
    return (
        row.label,
        format_size(led.weights),
        format_size(led.activations + led.graphs + led.reserve),
        format_size(led.kv_pool),
        f"{led.tokens:,}",
        f"{led.sequences:,}{lowered}",
        "" if led.ratio is None else f"{led.ratio:.2f}×",
    )
