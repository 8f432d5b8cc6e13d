"""`qinfer bench`: throughput, latency, and in `bench_serve` a server's; flags and JSON keys are vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from qinfer.cli.bench_serve import serve
from qinfer.cli.engine_options import ENGINE, HUB, MODEL, EngineKeywords, with_engine_options
from qinfer.cli.options import JsonOption, ModelArgument
from qinfer.cli.output import show, stdout_kept_for_result, to_json
from qinfer.errors import UserError

app = typer.Typer(help="Measure a model's speed on this machine.", rich_markup_mode=None)
app.command("serve", short_help="A load on a running server: what its clients see.")(serve)
NOption = Annotated[int, typer.Option(min=1, help="Answers for each prompt.")]
BenchSeedOption = Annotated[int, typer.Option(help="Of the prompts, of their lengths, and of dummy weights.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")]
DetokenizeOption = Annotated[bool, typer.Option("--disable-detokenize", help="Leave answers as token ids.")]
OutputJsonOption = Annotated[
    str | None, typer.Option(help="Write the JSON document to this file.", show_default=False)
]


@app.command("throughput", short_help="All requests at once: how many tokens per second.")
@with_engine_options(*MODEL, *ENGINE, *HUB)
def throughput(
    model: ModelArgument,
    *,
    dataset_name: Annotated[str, typer.Option(help="random, sharegpt or custom.")] = "random",
    dataset_path: Annotated[
        str | None, typer.Option(help="ShareGPT's JSON; JSONL with a prompt each, or text, one a line.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 1000,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a random prompt, on average: 1024.")
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of an answer, on average. Default: the dataset's, or 128."),
    ] = None,
    random_range_ratio: Annotated[
        float, typer.Option(help="Random lengths lie within their mean * (1 +- this).")
    ] = 0.0,
    random_spread: Annotated[
        str, typer.Option(help="Random lengths lie evenly there (uniform), or mostly short (log).")
    ] = "uniform",
    random_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens that all random prompts begin with, besides.")
    ] = 0,
    scheduling: Annotated[
        str, typer.Option(help="continuous, or static: fixed batches that wait for their longest answer.")
    ] = "continuous",
    sort_by_length: Annotated[
        bool, typer.Option("--sort-by-length", help="Shortest requests first.")
    ] = False,
    num_warmups: Annotated[int, typer.Option(min=0, help="Other requests, answered before the clock.")] = 8,
    n: NOption = 1,
    temperature: TemperatureOption = 1.0,
    disable_detokenize: DetokenizeOption = False,
    seed: BenchSeedOption = 0,
    engine: EngineKeywords,
    output_json: OutputJsonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer many requests and tell requests and tokens per second, beside the roofline of the same work.

    Loading, compiling and warming up are not counted, and the prefix cache begins empty.
    """
    keywords = {**engine, "seed": seed}
    with stdout_kept_for_result():
        from qinfer.bench import throughput as bench
        from qinfer.bench.dataset import Dataset

        dataset = Dataset(
            name=dataset_name,
            path=dataset_path,
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            range_ratio=random_range_ratio,
            spread=random_spread,
            prefix_len=random_prefix_len,
            seed=seed,
        )
        setting = bench.Throughput(
            dataset,
            scheduling=scheduling,
            sort_by_length=sort_by_length,
            num_warmups=num_warmups,
            n=n,
            temperature=temperature,
            detokenize=not disable_detokenize,
        )
        _check_writable(output_json)
        document = bench.run(model, setting, keywords)
    _tell(document, bench.to_text(document), output_json, as_json)


@app.command("latency", short_help="One batch at a time: how many seconds.")
@with_engine_options(*MODEL, *ENGINE, *HUB, enable_prefix_caching=False)
def latency(
    model: ModelArgument,
    *,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of a batch.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before the clock.")] = 10,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches that are measured.")] = 30,
    n: NOption = 1,
    temperature: TemperatureOption = 1.0,
    disable_detokenize: DetokenizeOption = False,
    seed: BenchSeedOption = 0,
    engine: EngineKeywords,
    output_json: OutputJsonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer the same batch again and again and tell the seconds, beside the roofline of the same work."""
    keywords = {**engine, "seed": seed}
    with stdout_kept_for_result():
        from qinfer.bench import latency as bench

        setting = bench.Latency(
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            n=n,
            num_iters_warmup=num_iters_warmup,
            num_iters=num_iters,
            temperature=temperature,
            detokenize=not disable_detokenize,
            seed=seed,
        )
        _check_writable(output_json)
        document = bench.run(model, setting, keywords)
    _tell(document, bench.to_text(document), output_json, as_json)


def _check_writable(output_json: str | None) -> None:
    """UserError before minutes are spent, where the result could not be written."""
    if output_json is not None and not Path(output_json).absolute().parent.is_dir():
        raise UserError(f"--output-json {output_json}: there is no such folder", "output_json")


def _tell(document: Mapping[str, Any], text: str, output_json: str | None, as_json: bool) -> None:
    if output_json is not None:
        Path(output_json).write_text(to_json(document) + "\n", encoding="utf-8")
        print(f"written to {output_json}", file=sys.stderr)
    show(document, text, as_json)
