"""`qinfer.server.run.serve` on an engine without tensors, for tests of a server's life as a process.

A prompt of token ids is continued by "x" at 20 tokens a second; id 1 kills the engine when it is to be
continued, id 2 makes its step last for ever, id 3 is continued until there is a file of the name that is the
second argument. The first is ServerOptions as JSON.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineStats, StepLimits
from qinfer.evals.certificate import GateStatus
from qinfer.outputs import CompletionOutput, RequestOutput, RequestStateStats
from qinfer.sampling_params import SamplingParams
from qinfer.server.options import ServerOptions
from qinfer.server.run import serve

DEADLY, ENDLESS, HELD = 1, 2, 3


class Engine:
    limits = StepLimits(4096, 64, 1024, 16)
    ledger = Ledger("float32", 1000, 600, 50, 0, 0, 320, 10, 16, 4096)
    vocab_size = 256
    kv_cache_dtype = "float32"
    pages = SimpleNamespace(caching=True)

    def __init__(self):
        self.jobs = {}

    def add(self, request_id, token_ids, params, **more):
        times = RequestStateStats(time.time(), *[time.monotonic()] * 2)
        self.jobs[request_id] = (token_ids, params, times, [])

    def abort(self, request_id):
        self.jobs.pop(request_id, None)

    def has_unfinished(self):
        return bool(self.jobs)

    def stats(self):
        return EngineStats(len(self.jobs), 0, 0.0, 4096, 0, 0, 0, 0, 0, 0)

    def step(self):
        time.sleep(0.05)
        return [self.advance(request_id) for request_id in list(self.jobs)]

    def advance(self, request_id):
        prompt, params, times, tokens = self.jobs[request_id]
        assert DEADLY not in prompt
        if ENDLESS in prompt:
            print("in a step without end", file=sys.stderr, flush=True)
            time.sleep(10**6)
        tokens.append(120)
        times.first_token_ts = times.last_token_ts = time.monotonic()
        finished = Path(sys.argv[2]).exists() if HELD in prompt else len(tokens) >= params.max_tokens
        choice = CompletionOutput(0, "x" * len(tokens), list(tokens))
        choice.finish_reason = "length" if finished else None
        if finished:
            del self.jobs[request_id]
        return RequestOutput(request_id, None, prompt, None, [choice], finished, times, 0)


def load():
    return SimpleNamespace(
        engine=Engine(),
        gate=GateStatus("dense", "a stub"),
        config="stub",
        path=Path("stub"),
        served_model_names=("stub",),
        schemes=(),
        dtype=SimpleNamespace(itemsize=4),
        get_tokenizer=SimpleNamespace,
        get_default_sampling_params=SamplingParams,
    )


if __name__ == "__main__":
    serve(load, ServerOptions(**json.loads(sys.argv[1])), port=0)
