"""Runs the command line in this process, as its entry point does."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from qinfer.cli import main


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def qinfer(capsys) -> Callable[..., Result]:
    """qinfer("plan", path, ...) -> exit code, stdout, stderr."""

    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        code = left.value.code
        return Result(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run
