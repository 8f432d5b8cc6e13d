"""Asks a stub engine in a process of its own, and says on stderr what comes of it."""

import asyncio
import gc
import os
import signal
import sys

from stub_server import load

from qinfer.async_llm import AsyncLLM
from qinfer.engine_process import EngineProcess
from qinfer.errors import UserError


def vocabulary(engine):
    return engine.vocab_size


async def leave_and_ask(engine):
    """One asker leaves before the answer comes, the next one stays."""
    os.kill(engine.pid, signal.SIGSTOP)
    left = asyncio.ensure_future(engine.ask(vocabulary))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    os.kill(engine.pid, signal.SIGCONT)
    return [left.cancelled(), await engine.ask(vocabulary)]


class OddError(UserError):
    """Pickled, but not unpickled."""

    def __init__(self, message, more):
        super().__init__(f"{message} and {more}")


def odd_error(engine):
    raise OddError("this", "that")


def local_error(engine):
    class LocalError(UserError):
        pass

    raise LocalError("not of a module")


def function_within(engine):
    return lambda: None


class OddAnswer:
    """Pickled, but unpickled in the engine's process only."""

    def __reduce__(self):
        return only_there, (os.getpid(),)


def only_there(pid):
    if os.getpid() != pid:
        raise LookupError("only there")


def odd_answer(engine):
    return OddAnswer()


class OddQuestion:
    """Pickled, but unpickled in the asker's process only."""

    __call__ = vocabulary

    def __reduce__(self):
        return only_there, (os.getpid(),)


async def ask_oddly(engine):
    """Nothing of a question may keep it from being answered."""
    kinds = []
    for question in (odd_error, local_error, function_within, odd_answer, OddQuestion()):
        try:
            await engine.ask(question)
        except Exception as error:
            kinds.append(type(error).__name__)
    return [*kinds, await engine.ask(vocabulary)]


def walked(engine):
    """Objects that the collector looks at, for each that it does not."""
    return len(gc.get_objects()) / gc.get_freeze_count()


async def ask_what_is_walked(engine):
    return await engine.ask(walked) < 0.1


async def main(engine):
    print(await globals()[sys.argv[1]](engine), engine.errored, file=sys.stderr, flush=True)


if __name__ == "__main__":
    process = EngineProcess(load)
    try:
        process.wait()
        engine = AsyncLLM(process)
        asyncio.run(main(engine))
        engine.shutdown()
    finally:
        process.kill()
