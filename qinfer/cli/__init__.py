"""The command `qinfer`: one file per subcommand, and here what they share at the door.

Results go to stdout, as text or with `--json` as one JSON document; progress and logs go to stderr. Exit
codes: 0 done, 1 the gate said no, 2 something asked for was wrong (one line says what), 130 interrupted.
Any other error is a bug of ours and keeps its traceback. Modules below import torch inside the command
only, so `qinfer --help` answers at once.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

import qinfer
from qinfer.cli import batch, bench, convert, doctor, eval, gate, generate, inspect, plan, quantize, serve
from qinfer.cli.usage import system_line, usage_line
from qinfer.errors import GateError, QinferError

app = typer.Typer(
    name="qinfer",
    help="Quantize a language model, have it judged against its source, serve it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for name, command, summary in (
    ("quantize", quantize.quantize, "Make a smaller checkpoint and judge it."),
    ("eval", eval.evaluate, "Judge a checkpoint against its source."),
    ("gate", gate.gate, "Whether a checkpoint's verdict still holds."),
    ("generate", generate.generate, "Continue prompts or answer them."),
    ("serve", serve.serve, "Serve over HTTP as OpenAI does."),
    ("batch", batch.batch, "Answer a file of requests into a file."),
    ("plan", plan.plan, "What fits into a memory budget, scheme by scheme."),
    ("inspect", inspect.inspect, "What a checkpoint folder holds."),
    ("convert", convert.convert, "Rewrite a quantized checkpoint for another tool."),
    ("doctor", doctor.doctor, "What this machine has."),
):
    app.command(name, short_help=summary)(command)
app.add_typer(bench.app, name="bench", short_help="How fast a model runs here.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(qinfer.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("qinfer").setLevel(logging.INFO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves with its exit code; `arguments` default to the process's own."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with _noticed_interrupts() as interrupts:
        try:
            # not standalone: there typer prints several lines for a mistake, and nothing for an interrupt
            code = app(words, prog_name="qinfer", standalone_mode=False)
        except typer.TyperException as error:
            _leave(usage_line(error, words, _commands()), 2)
        except GateError as error:
            _leave(str(error), 1)
        except (QinferError, NotImplementedError) as error:  # what a person asked for cannot be done
            _leave(str(error), 2)
        except OSError as error:  # a full disk, a folder without permission: the person's, never a traceback
            _leave(system_line(error), 2)
        except KeyboardInterrupt:  # outside of the command
            _leave("interrupted", 130)
        except Exception:
            # An extension that is interrupted may raise an error of its own instead: safetensors does.
            if not interrupts:
                raise
            _leave("interrupted", 130)
    if code == 130:  # what typer makes of an interrupt
        _leave("interrupted", 130)
    sys.exit(code or 0)


def _commands() -> list[str]:
    """The words after `qinfer` that mean something; a group's commands with the group's name before."""
    names = [command.name or "" for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        names += [f"{group.name} {command.name}" for command in group.typer_instance.registered_commands]
    return names


@contextmanager
def _noticed_interrupts() -> Iterator[list[int]]:
    """Ctrl-C interrupts as ever, and is remembered in the list."""
    interrupts: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        interrupts.append(signum)
        signal.default_int_handler(signum, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as a shell has it for what runs in its background
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(message: str, code: int) -> NoReturn:
    print(f"qinfer: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
