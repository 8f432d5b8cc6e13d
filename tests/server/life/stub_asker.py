"""Asks a stub engine in a process of its own, and says on stderr what comes of it."""

import asyncio
import os
import signal
import sys

from stub_server import load

from qinfer.async_llm import AsyncLLM
from qinfer.engine_process import EngineProcess


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
