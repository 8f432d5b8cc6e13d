"""`qinfer plan`: what fits into a memory budget, for every scheme side by side, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.options import HubTokenOption, JsonOption, ModelArgument, RevisionOption
from qinfer.cli.output import show, stdout_kept_for_result, table
from qinfer.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from qinfer.bench.plan import Row, Setting
    from qinfer.config import ModelConfig


def plan(
    model: ModelArgument,
    memory: Annotated[
        str | None,
        typer.Option(help="Budget for everything, such as 24GiB. Default: the RAM that is available now."),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Only schemes whose name starts so, such as w8a8-fp8.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Only this KV dtype.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a full-length sequence. Default: the model's context."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one step.")] = 8192,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV page.")] = 16,
    reserve: Annotated[
        str, typer.Option(help="Kept free for the runtime beside weights, activations and pool.")
    ] = "256MiB",
    revision: RevisionOption = None,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute weights, KV pool and tokens of every scheme and KV dtype under a memory budget.

    MODEL may also be a config.json. Nothing but the configuration is read.
    """
    with stdout_kept_for_result():
        from qinfer import env
        from qinfer.bench.plan import Setting, side_by_side
        from qinfer.engine.footprint import parse_size

        config = _read_config(model, revision, hf_token)
        budget = env.host_memory().available if memory is None else parse_size(memory)
        setting = Setting(
            budget=budget,
            max_model_len=max_model_len or config.context_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            reserve=parse_size(reserve),
        )
        rows = _chosen(side_by_side(config, setting), scheme, kv_cache_dtype)
    show(_document(model, setting, rows), _text(model, config, setting, rows), as_json)


def _read_config(model: str, revision: str | None, token: str | None) -> ModelConfig:
    """The model's configuration; of a hub model only its config.json is fetched."""
    from qinfer.config import ModelConfig

    path = Path(model)
    if not model.endswith(".json"):
        from qinfer.hub import config_file

        path = config_file(model, revision=revision, token=token)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a config.json: {error}") from None
    return ModelConfig.from_dict(raw)


def _chosen(rows: list[Row], scheme: str | None, kv_cache_dtype: str | None) -> list[Row]:
    """The rows asked for; UserError, naming what there is, when that is none."""
    kv_cache_dtype = "fp8" if kv_cache_dtype == "fp8_e4m3" else kv_cache_dtype
    chosen = [
        row
        for row in rows
        if row.scheme.startswith(scheme or "") and kv_cache_dtype in (None, row.kv_cache_dtype)
    ]
    if not chosen:
        schemes = ", ".join(dict.fromkeys(row.scheme for row in rows))
        dtypes = ", ".join(dict.fromkeys(row.kv_cache_dtype for row in rows))
        raise UserError(f"nothing to plan: this model has the schemes {schemes} and the KV dtypes {dtypes}")
    return chosen


def _document(model: str, setting: Setting, rows: list[Row]) -> dict[str, Any]:
    return {
        "model": model,
        "budget": setting.budget,
        "max_model_len": setting.max_model_len,
        "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.max_num_batched_tokens,
        "block_size": setting.block_size,
        "rows": [_numbers(row) for row in rows],
    }


def _numbers(row: Row) -> dict[str, Any]:
    """One row; the ledger's numbers are null where it does not fit."""
    names = ("activations", "graphs", "reserve", "kv_pool", "pages", "tokens", "sequences", "ratio")
    ledger: dict[str, Any] = {} if row.ledger is None else row.ledger.to_dict()
    return {
        "scheme": row.scheme,
        "kv_cache_dtype": row.kv_cache_dtype,
        "fits": row.ledger is not None,
        "reason": row.shortfall or None,
        "weights": row.weights,
        **{name: ledger.get(name) for name in names},
    }


def _text(model: str, config: ModelConfig, setting: Setting, rows: list[Row]) -> str:
    from qinfer.bench.plan import SHORT
    from qinfer.engine.footprint import format_size

    header = (
        "weights + KV",
        "weights",
        "reserve",
        "KV pool",
        "tokens",
        f"seqs of {setting.max_model_len:,}",
        "ratio",
    )
    cells = []
    for row in rows:
        if row.ledger is None:
            cells.append((row.label, format_size(row.weights), "", "does not fit", "", "", ""))
            continue
        led = row.ledger
        ratio = "" if led.ratio is None else f"{led.ratio:.2f}×"
        reserve = format_size(led.activations + led.graphs + led.reserve)
        pool = format_size(led.kv_pool)
        cells.append(
            (
                row.label,
                format_size(led.weights),
                reserve,
                pool,
                f"{led.tokens:,}",
                f"{led.sequences:,}",
                ratio,
            )
        )
    title = (
        f"{model} ({config.architecture}) in {format_size(setting.budget)}: up to {setting.max_num_seqs} "
        f"sequences and {setting.max_num_batched_tokens} tokens in a step; ratio: KV tokens against "
        f"dense + {SHORT[config.dtype]} KV"
    )
    note = "On a CPU loaded weights take more than in the file: w8a8-fp8 2 bytes each, w4a16 1 byte."
    return f"{title}\n\n{table(header, cells)}\n\n{note}"
