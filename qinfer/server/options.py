"""What an operator decides about a server, beside the model: one record, from command line to routes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qinfer.errors import UserError

Compat = Literal["vllm", "none"]
MAX_BODY_BYTES = 32 << 20


@dataclass(frozen=True)
class ServerOptions:
    """`served_model_names` None: the LLM's own; `api_keys` empty: open to all; UserError for bad values.

    `histogram_bounds` are those of /metrics that were chosen, by family (`histogram.parse_bounds`);
    `web_page`: whether there is one at `/`.
    `tool_call_parser`: the form in which the model calls tools, "auto": as its chat template shows.
    `allowed_origins` are the web origins that browsers may call from ("*": any); `keep_alive_seconds` between
    comments on a silent stream, None: none; `force_usage`: every stream ends with token counts. What would
    bring more than `max_num_queued_reqs` sequences or `max_num_queued_tokens` prompt tokens together, running
    or waiting, gets 503. After SIGTERM requests have `shutdown_timeout` seconds to end. `log_answers` logs a
    line for every answer, `log_requests` prompts and parameters, which are in no log otherwise. `dev_mode`
    (QINFER_SERVER_DEV_MODE=1) adds routes for those who measure the server.
    """

    served_model_names: Sequence[str] | None = None
    api_keys: Sequence[str] = ()
    metrics_compat: Compat = "vllm"
    histogram_bounds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    web_page: bool = True
    allowed_origins: Sequence[str] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    keep_alive_seconds: float | None = None
    force_usage: bool = False
    max_num_queued_reqs: int | None = 16384
    max_num_queued_tokens: int | None = None
    shutdown_timeout: float = 0.0
    log_answers: bool = False
    log_requests: bool = False
    trust_request_chat_template: bool = False
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "none"] = "auto"
    dev_mode: bool = field(default_factory=lambda: os.environ.get("QINFER_SERVER_DEV_MODE") == "1")

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_keys):  # a client without a key would match it
            raise UserError("an API key is empty: give one that cannot be guessed, or none at all", "api_key")
        if self.max_body_bytes < 1:
            raise UserError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}", "max_body_bytes")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise UserError(
                f"shutdown_timeout must be a number of seconds, at least 0, not {self.shutdown_timeout}",
                "shutdown_timeout",
            )
        if self.keep_alive_seconds is not None and not self.keep_alive_seconds > 0:
            raise UserError(
                f"keep_alive_seconds must be more than 0, not {self.keep_alive_seconds}", "keep_alive_seconds"
            )
