"""What a server says of itself while it is measured: its model, its counters before and after.

Any OpenAI server may be measured; what only qinfer's /metrics tells is left out for others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time

from qinfer.bench.http_client import Address, HttpError, request
from qinfer.errors import UserError

logger = logging.getLogger(__name__)

_SERIES = re.compile(r"^(qinfer_\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TOLD = ("quantization", "weight_bits", "kv_cache_dtype", "backend")


async def wait_until_ready(address: Address, headers: dict[str, str], timeout: float) -> None:
    """Returns when /v1/models is answered with 200; UserError when `timeout` seconds have passed before.

    At once where a key is wanted that was not given: no waiting helps.
    """
    end = time.monotonic() + timeout
    told = False
    while True:
        said = await status_of(address, "GET", "/v1/models", headers)
        if said == 200:
            return
        if said in (401, 403):
            raise UserError(
                f"/v1/models answers {said}: the server wants another key, give --api-key", "api_key"
            )
        if time.monotonic() >= end:
            answer = "does not answer" if said is None else f"answers {said}"
            where = f"{address.host}:{address.port}"
            raise UserError(f"/v1/models of {where} {answer}: is it an OpenAI server, and up?", "base_url")
        if not told:
            told = True
            logger.warning(
                "%s:%d %s: waiting up to %g s for it (--ready-check-timeout-sec)",
                address.host,
                address.port,
                "is not there yet" if said is None else f"answers {said}",
                timeout,
            )
        await asyncio.sleep(0.5)


async def status_of(address: Address, method: str, path: str, headers: dict[str, str]) -> int | None:
    """The status of an answer, whose body is not read; None where there is no server."""
    try:
        async with request(address, method, path, headers=headers) as answer:
            return answer.status
    except (OSError, HttpError):
        return None


async def first_model(address: Address, headers: dict[str, str]) -> str:
    """The first model of /v1/models; UserError where there is none."""
    try:
        async with request(address, "GET", "/v1/models", headers=headers) as answer:
            return str(json.loads(await answer.text())["data"][0]["id"])
    except (OSError, HttpError, ValueError, LookupError, TypeError):
        raise UserError("the server names no model at /v1/models: give --model", "model") from None


class Counters:
    """qinfer's counters and gauges of one moment, each summed over its labels; empty for other servers."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, float] = {}
        self.about: dict[str, str] = {}
        for name, labels, value in _SERIES.findall(text):
            self.values[name] = self.values.get(name, 0.0) + float(value)
            if name == "qinfer_model_info":
                self.about = {key: text for key, text in _LABEL.findall(labels) if key in _TOLD}

    @classmethod
    async def read(cls, address: Address) -> Counters:
        """From GET /metrics."""
        try:
            async with request(address, "GET", "/metrics") as answer:
                return cls(await answer.text() if answer.status == 200 else "")
        except (OSError, HttpError):
            return cls("")

    def since(self, before: Counters) -> dict[str, float]:
        """What the counters have grown by."""
        return {
            name: value - before.values.get(name, 0.0)
            for name, value in self.values.items()
            if name.endswith("_total")
        }


def hit_rate(grown: dict[str, float]) -> float | None:
    """The share of prompt tokens found in the prefix cache, by what `Counters.since` says; None: unknown."""
    looked_up = grown.get("qinfer_prefix_cache_queried_tokens_total", 0.0)
    return grown["qinfer_prefix_cache_hit_tokens_total"] / looked_up if looked_up else None
