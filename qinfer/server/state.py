"""What all routes of one server share."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property

from starlette.requests import Request

from qinfer import __version__
from qinfer.async_llm import AsyncLLM
from qinfer.errors import EngineStoppedError
from qinfer.evals.certificate import GateStatus
from qinfer.server.call_readers import HermesReader
from qinfer.server.door import SHUT, Door
from qinfer.server.errors import ApiError
from qinfer.server.ignored import Ignored
from qinfer.server.infill import Marks, marks_of
from qinfer.server.open_body import OpenBody
from qinfer.server.options import ServerOptions
from qinfer.server.protocol import CompletionRequest, GenerationRequest
from qinfer.server.tools import ToolParser, parser_of
from qinfer.server.wire import ModelCard, Permission


@dataclass(frozen=True)
class ServerState:
    """The engine and how it is presented; the first of `model_names` signs every answer."""

    engine: AsyncLLM
    model_names: tuple[str, ...]
    gate: GateStatus
    options: ServerOptions
    door: Door = field(default_factory=Door)
    ignored: Ignored = field(default_factory=Ignored)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_ready(self) -> bool:
        """Whether requests are let in and the engine's process runs."""
        return self.engine.is_running and self.engine.is_awake and self.door.is_open

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when the same request may be answered differently."""
        engine = self.engine
        decides = f"{self.model_names[0]} {engine.card.config} {engine.max_model_len} {self.gate}"
        return f"qinfer-{__version__}-{hashlib.sha256(decides.encode()).hexdigest()[:8]}"

    @cached_property
    def tool_parser(self) -> ToolParser:
        """The form in which the model calls tools."""
        chosen = self.options.tool_call_parser
        return parser_of(str(self.engine.tokenizer.hf.chat_template)) if chosen == "auto" else chosen

    @cached_property
    def hides_calls(self) -> bool:
        """Whether the mark of a call is a special token, which texts leave out unless told otherwise."""
        tokenizer = self.engine.tokenizer
        mark = tokenizer.encode(HermesReader.START, add_special_tokens=False)
        return self.tool_parser == "hermes" and mark[0] in tokenizer.special_ids

    @cached_property
    def infill_marks(self) -> Marks | None:
        """The tokens by which the model fills in the middle."""
        return marks_of(self.engine.tokenizer)

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine has died or does not run, or the server is to end."""
        await self.engine.check_health()
        if not self.door.is_open:
            raise EngineStoppedError(SHUT)

    def check_model(self, name: str | None) -> None:
        """Raises the 404 of an unknown model; None means the served one."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ApiError(404, f"the model {name[:200]!r} does not exist; served here: {served}", "model")

    def note(self, body: OpenBody, request: Request | None = None) -> None:
        """Tells the log, and who made `request`, which fields of its body mean nothing here."""
        asks_infill = isinstance(body, CompletionRequest) and body.suffix
        also = ["suffix"] if asks_infill and self.infill_marks is None else []
        self.ignored.note(body, request, also)

    def admit(self, request: GenerationRequest) -> None:
        """Raises where the request wants another model."""
        self.check_model(request.model)

    def cards(self) -> list[ModelCard]:
        """/v1/models: one entry per name."""
        root, length = self.model_names[0], self.engine.max_model_len
        return [
            ModelCard(
                id=name,
                object="model",
                created=self.created,
                owned_by="qinfer",
                root=root,
                parent=None,
                max_model_len=length,
                permission=[self._permission(name)],
            )
            for name in self.model_names
        ]

    def _permission(self, name: str) -> Permission:
        return Permission(
            id=f"modelperm-{name}",
            object="model_permission",
            created=self.created,
            allow_create_engine=False,
            allow_sampling=True,
            allow_logprobs=True,
            allow_search_indices=False,
            allow_view=True,
            allow_fine_tuning=False,
            organization="*",
            group=None,
            is_blocking=False,
        )
