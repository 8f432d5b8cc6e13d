"""A process has three standard streams, whoever has started it.

A service may be started with them closed. Then the next files to be opened take their numbers, the port or
the engine's pipe among them, and what a library in C writes to stderr goes there; and Python has None for
streams, which libraries do not expect.
"""

from __future__ import annotations

import os
import sys

NUM_STREAMS = 3


def open_standard_streams() -> None:
    """Opens what is closed of stdin, stdout and stderr on nothing; must come before any file is opened."""
    while (number := os.open(os.devnull, os.O_RDWR)) < NUM_STREAMS:  # the lowest number that is free
        os.set_inheritable(number, True)  # as standard streams are, by compilers that are started
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
