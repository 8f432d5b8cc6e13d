"""Every error that a user can cause, as a small tree.

A `UserError` is one clear line: what was wrong, the value, what is allowed, what to do. The command line
prints it and exits with 2, the server answers 400. Anything else that escapes is a bug of ours and raises
with its traceback.
"""


class QinferError(Exception):
    """Base of everything that qinfer raises on purpose."""


class UserError(QinferError, ValueError):
    """A mistake in what was asked for; the message is one line for the person who asked.

    `parameter` names the argument at fault, where there is one.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


def check_flags(**flags: object) -> None:
    """UserError for the first keyword that is neither True nor False: a text such as "no" counts as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UserError(f"{name} must be True or False, not {value!r:.100}", name)


def check_counts(**counts: object) -> None:
    """UserError for the first keyword that is neither None nor a whole number of at least 1."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(f"{name} must be a whole number of at least 1, not {value!r:.100}", name)


def check_seed(seed: object) -> None:
    """UserError for what is no whole number."""
    if not isinstance(seed, int):
        raise UserError(f"seed must be a whole number, not {seed!r:.100}", "seed")


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or contradicts itself; names the file or the tensor."""


class UnsupportedModelError(CheckpointError):
    """An architecture or a format that qinfer does not run; names those that it does."""


class GateError(QinferError):
    """A quantized checkpoint whose verdict does not allow serving it; the command line exits with 1."""


class EngineDeadError(QinferError):
    """The engine's loop has ended with an error; nothing more will be answered."""


class EngineStoppedError(EngineDeadError):
    """The engine was shut down on purpose; another server may answer."""


class EngineSilentError(EngineDeadError):
    """The engine's process does not run at present: stopped, frozen or starved; it may come back."""


class OverloadedError(QinferError):
    """The engine has too much to do; the same request may be let in later. `reason` says what is full."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
