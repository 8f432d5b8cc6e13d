"""`qinfer batch`: a file of requests, answered into a file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.engine_options import ENGINE, GATE, HUB, MODEL, EngineKeywords, say_gate, with_engine_options
from qinfer.cli.options import JsonOption, ModelArgument
from qinfer.cli.output import show, stdout_kept_for_result
from qinfer.cli.server_options import (
    MetricsCompatOption,
    ServedModelNameOption,
    ToolCallParserOption,
    TrustTemplateOption,
)
from qinfer.errors import EngineDeadError, UserError

if TYPE_CHECKING:
    from qinfer.batch.check import Checked
    from qinfer.batch.run import Batch, BatchFiles
    from qinfer.llm import LLM
    from qinfer.server.options import ServerOptions
    from qinfer.server.state import ServerState


@with_engine_options(*MODEL, *ENGINE, "seed", *GATE, *HUB)
def batch(
    model: ModelArgument,
    *,
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, one JSON object a line.")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="Where the answers go.")],
    error_file: Annotated[
        Path | None,
        typer.Option(help="Where failed lines go. Default: among the answers.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the output file ends.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew where there is an output file.")
    ] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="End at the first line that fails.")] = False,
    max_inflight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests under way at once. Default: twice what the engine takes in a step.",
            show_default=False,
        ),
    ] = None,
    enable_metrics: Annotated[
        bool, typer.Option("--enable-metrics", help="Serve /metrics while the batch runs.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address of the metrics.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the metrics.")] = 8000,
    served_model_name: ServedModelNameOption = None,
    trust_request_chat_template: TrustTemplateOption = False,
    tool_call_parser: ToolCallParserOption = "auto",
    metrics_compat: MetricsCompatOption = "vllm",
    engine: EngineKeywords,
    as_json: JsonOption = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format, or of {"prompt": ...}, into another file.

    Every line is checked before the model is loaded. Answers are written in the input's order while the batch
    runs, so that --resume goes on after anything that ended it. Exit code 1: some line failed, now or before.
    """
    names = tuple(served_model_name or (model,))
    with stdout_kept_for_result():
        from qinfer.batch.check import check
        from qinfer.batch.output import Written, written_before
        from qinfer.batch.run import Batch, BatchFiles, Pace
        from qinfer.server.options import ServerOptions

        files = BatchFiles(input_file, output_file, error_file)
        _check_places(files, resume=resume, overwrite=overwrite)
        checked = check(input_file, names)
        if checked.num_bad:
            _tell_bad(checked)
            if fail_fast:
                raise UserError("--fail-fast: no line was asked", "fail_fast")
        before = written_before(input_file, output_file, error_file) if resume else Written()
        first = before.num_lines
        options = ServerOptions(
            trust_request_chat_template=trust_request_chat_template,
            tool_call_parser=tool_call_parser,
            metrics_compat=metrics_compat,
        )
        pace = Pace(max_inflight, fail_fast=fail_fast)
        document: dict[str, Any] = {"num_lines": first, "num_resumed": first, "num_failed": 0, "seconds": 0.0}

        def make(state: ServerState) -> Batch:
            if overwrite:  # only now that a model is there: whatever was refused before kept the old answers
                _begun_anew(files)
            return Batch(state, files, pace, checked.num_lines, first)

        if first < checked.num_lines:
            document = _answered(
                lambda: _load(model, {**engine, "served_model_name": names}),
                make,
                options,
                (host, port) if enable_metrics else None,
            )
        document["num_failed"] += before.num_failed
    show(document, _text(document, files), as_json)
    if document["num_failed"]:
        raise typer.Exit(1)


def _load(model: str, keywords: Mapping[str, Any]) -> LLM:
    from qinfer.llm import LLM

    llm = LLM(model, **keywords)
    say_gate(llm.gate)
    print(llm.engine.ledger.to_text(), file=sys.stderr, flush=True)
    return llm


def _answered(
    load: Callable[[], LLM],
    make: Callable[[ServerState], Batch],
    options: ServerOptions,
    metrics: tuple[str, int] | None,
) -> dict[str, Any]:
    """Loads the model and runs the batch; leaves with 1 where the run was ended by what a line met."""
    from qinfer.async_llm import AsyncLLM
    from qinfer.batch.metrics import metrics_served
    from qinfer.batch.run import FailedLineError
    from qinfer.server.state import ServerState

    engine = AsyncLLM(llm := load())
    try:
        state = ServerState(engine, llm.served_model_names, llm.gate, options)
        with metrics_served(state, metrics), _interrupts_cancel():
            return asyncio.run(make(state).run())
    except (EngineDeadError, FailedLineError) as error:
        print(f"qinfer: {error}; --resume goes on after what is written", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        engine.shutdown()


@contextmanager
def _interrupts_cancel() -> Iterator[None]:
    """Ctrl-C cancels what asyncio runs, which it arranges where nobody else has; ignored ones stay so."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_places(files: BatchFiles, *, resume: bool, overwrite: bool) -> None:
    """UserError before anything is read, where the answers could not be written as asked."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite: take one of them", "resume")
    outputs = [path for path in (files.output, files.errors) if path is not None]
    if any(_same(*pair) for pair in combinations((files.source, *outputs), 2)):
        raise UserError("input, output and error file must be different files", "output_file")
    for path in outputs:
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path}: there is no such folder as {path.parent}", "output_file")
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file in it", "output_file")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UserError(f"{path} may not be written: choose another folder", "output_file")
        if path.exists() and path.stat().st_size and not resume and not overwrite:
            raise UserError(f"{path} exists: --resume goes on, --overwrite begins anew", "output_file")


def _begun_anew(files: BatchFiles) -> None:
    """Empties what is there; asked once nothing but the answers themselves is left to do."""
    for path in (files.output, files.errors):
        if path is not None and path.is_file():  # a device or a pipe has nothing to lose
            os.truncate(path, 0)


def _same(one: Path, other: Path) -> bool:
    """Whether two names are of one file: through `..`, links, or another hard link of it."""
    if one.resolve() == other.resolve():
        return True
    return one.exists() and other.exists() and one.samefile(other)


def _tell_bad(checked: Checked) -> None:
    for line in checked.told:
        print(f"{line}", file=sys.stderr)
    print(f"{checked.num_bad:,} of {checked.num_lines:,} lines will fail", file=sys.stderr, flush=True)


def _text(document: Mapping[str, Any], files: BatchFiles) -> str:
    resumed = f", {document['num_resumed']:,} of them before" if document["num_resumed"] else ""
    where = files.output if files.errors is None else files.errors
    failed = f"; {document['num_failed']:,} failed, see {where}" if document["num_failed"] else ""
    rate = ""
    if "output_tokens" in document:
        rate = (
            f" in {document['seconds']:.1f} s: {document['prompt_tokens']:,} prompt tokens, "
            f"{document['output_tokens']:,} output tokens, "
            f"{document['output_tokens_per_second']:,.1f} a second"
        )
    return f"{files.output}: {document['num_lines']:,} lines{resumed}{rate}{failed}"
