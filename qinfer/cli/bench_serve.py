"""`qinfer bench serve`: a load on a server that runs already."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from qinfer.cli.options import HubTokenOption, JsonOption
from qinfer.cli.output import show, stdout_kept_for_result, to_json
from qinfer.errors import UserError

_METRICS = ("ttft", "tpot", "itl", "e2el")


def serve(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="NAME:MS")] = None,
    backend: Annotated[
        str, typer.Option(help="openai (= vllm): completions; openai-chat: chat completions.")
    ] = "openai",
    base_url: Annotated[
        str | None, typer.Option(help="http://HOST:PORT, in place of --host and --port.")
    ] = None,
    host: Annotated[str, typer.Option(help="The server's address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port.")] = 8000,
    endpoint: Annotated[str | None, typer.Option(help="The route. Default: the backend's.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a header to send; may be repeated.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Key to send.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name in the requests. Default: the server's first.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder, hub id or built-in with the tokenizer. Default: --model.")
    ] = None,
    dataset_name: Annotated[str, typer.Option(help="random, sharegpt or custom.")] = "random",
    dataset_path: Annotated[
        str | None, typer.Option(help="ShareGPT's JSON; JSONL with a prompt each, or text, one a line.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 1000,
    input_len: Annotated[
        int | None,
        typer.Option("--random-input-len", "--input-len", min=1, help="Tokens of a random prompt: 1024."),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option("--random-output-len", "--output-len", min=1, help="Tokens of an answer, at most: 128."),
    ] = None,
    random_range_ratio: Annotated[
        float, typer.Option(help="Random lengths lie within their mean * (1 +- this).")
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens that all random prompts begin with, besides.")
    ] = 0,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf: all at once.")] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson arrivals; less: in bursts; inf: regular.")
    ] = 1.0,
    ramp_up_strategy: Annotated[str | None, typer.Option(help="linear or exponential.")] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option(help="Rate at the first request.")] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="Rate at the last request.")] = None,
    probe_request_rate: Annotated[
        float, typer.Option(min=0.0, help="Questions for one token a second, told apart; 0: none.")
    ] = 0.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    num_warmups: Annotated[
        int | None,
        typer.Option(min=0, help="Other requests before the clock. Default: as run at once, at least 4."),
    ] = None,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(min=0.0, help="How long to wait for the server.")
    ] = 600.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Default: the server's.")] = None,
    logprobs: Annotated[int | None, typer.Option(min=0, help="Logprobs of so many tokens each.")] = None,
    extra_body: Annotated[str | None, typer.Option(help="JSON object of more fields for every body.")] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Latencies to print: ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, by commas.")] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="An objective in milliseconds, such as ttft:500; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    label: Annotated[str | None, typer.Option(help="Name of this run, in the document.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the document.")] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the document to a file.")] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With an entry for each request.")
    ] = False,
    append_result: Annotated[
        bool, typer.Option("--append-result", help="As one more line of the file.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Where the file goes.")] = Path("."),
    result_filename: Annotated[str | None, typer.Option(help="The file's name.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Have the server record itself meanwhile.")
    ] = False,
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar.")] = False,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send requests to a running server and tell what its clients see: rates, first tokens, gaps.

    Flags, keys and definitions are those of vLLM's tool, also `--goodput ttft:500 tpot:50`. Warm-up requests
    have prompts of their own and are not counted. Any server with OpenAI's routes will do; qinfer's also
    tells its model and counters.
    """
    with stdout_kept_for_result():
        from qinfer.bench import serving, serving_text
        from qinfer.bench.arrivals import Arrivals
        from qinfer.bench.dataset import Dataset
        from qinfer.bench.http_client import Address
        from qinfer.bench.sample import Target
        from qinfer.hub import tokenizer_folder
        from qinfer.tokenizer import Tokenizer

        target = Target(
            Address.of(base_url or f"http://{host}:{port}"),
            endpoint or _known(backend, serving.BACKENDS),
            chat=backend == "openai-chat",
            headers=_headers(header, api_key),
        )
        words = words or []
        slo = serving.parse_slo([*(goodput or []), *(word for word in words if ":" in word)])
        more = _pairs([*(metadata or []), *(word for word in words if ":" not in word)], "metadata")
        percentiles = _percentiles(metric_percentiles)
        metrics = _metrics(percentile_metrics)
        load = serving.Load(
            Dataset(
                name=dataset_name,
                path=dataset_path,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                range_ratio=random_range_ratio,
                prefix_len=random_prefix_len,
                seed=seed,
            ),
            Arrivals(request_rate, burstiness, ramp_up_strategy, ramp_up_start_rps, ramp_up_end_rps),
            max_concurrency=max_concurrency,
            num_warmups=num_warmups,
            percentiles=percentiles,
            slo=slo,
            fields=_fields(context, target.chat),
            profile=profile,
            probe_rate=probe_request_rate,
        )
        file = _file(context, save_result or append_result)
        served = asyncio.run(serving.served_model(target, ready_check_timeout_sec))
        named = tokenizer or model or served
        reader = Tokenizer.load(tokenizer_folder(named, token=hf_token))
        measured, samples = asyncio.run(
            serving.measure(target, model or served, reader, load, progress=not disable_tqdm)
        )
        about = {"endpoint_type": backend, "backend": backend, "label": label, "tokenizer_id": named}
        document = {**measured, **about, **more}
        if file is not None:
            entry = {**document, **(serving_text.details(samples) if save_detailed else {})}
            _write(file, entry, append=append_result)
    show(document, serving_text.to_text(document, metrics, percentiles), as_json)


def _fields(context: typer.Context, chat: bool) -> dict[str, Any]:
    """What goes into every body beside prompt and length."""
    chosen = {name: context.params[name] for name in ("temperature", "top_p", "top_k")}
    fields = {name: value for name, value in chosen.items() if value is not None}
    if context.params["ignore_eos"]:
        fields["ignore_eos"] = True
    if (logprobs := context.params["logprobs"]) is not None:
        fields |= {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
    if (text := context.params["extra_body"]) is not None:
        try:
            fields |= json.loads(text)
        except (ValueError, TypeError):
            raise UserError(f"--extra-body must be a JSON object, not {text!r:.100}", "extra_body") from None
    return fields


def _known(backend: str, paths: Mapping[str, str]) -> str:
    if backend not in paths:
        raise UserError(f"--backend must be one of {', '.join(paths)}, not {backend!r}", "backend")
    return paths[backend]


def _headers(given: Sequence[str] | None, api_key: str | None) -> dict[str, str]:
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {**key, **{name.lower(): value for name, value in _pairs(given, "header").items()}}


def _pairs(words: Sequence[str] | None, name: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in words or ()]
    for key, mark, _ in pairs:
        if not key or not mark:
            raise UserError(f"--{name} must be NAME=VALUE, not {key!r}", name)
    return {key: value for key, _, value in pairs}


def _metrics(text: str) -> list[str]:
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    for word in chosen:
        if word not in _METRICS:
            raise UserError(f"--percentile-metrics {word!r}: known are {', '.join(_METRICS)}", "metrics")
    return chosen


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= value <= 100 for value in found):
        raise UserError(f"--metric-percentiles {text!r}: say numbers from 0 to 100, by commas", "percentiles")
    return found


def _file(context: typer.Context, wanted: bool) -> Path | None:
    """Where the document goes; UserError before the load begins where it could not."""
    if not wanted:
        return None
    folder: Path = context.params["result_dir"]
    if not folder.is_dir():
        raise UserError(f"--result-dir {folder}: there is no such folder", "result_dir")
    name = context.params["result_filename"]
    if name is None:
        begin = context.params["label"] or context.params["backend"]
        name = f"{begin}-{context.params['request_rate']:g}qps-{datetime.now():%Y%m%d-%H%M%S}.json"
    return folder / str(name)


def _write(file: Path, document: Mapping[str, Any], *, append: bool) -> None:
    text = json.dumps(json.loads(to_json(document))) + "\n"
    with file.open("a" if append else "w", encoding="utf-8") as opened:
        opened.write(text)
    print(f"written to {file}", file=sys.stderr)
