"""The output of a response as it grows: items, and the events that tell of every change to them.

A message item holds one text, a function_call item the arguments of one call. At most one is open; what does
not belong to it closes it. An answer that is not streamed is made by the same steps, its events unread.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]


class Items:
    """`output` is what `response.output` holds, the open item too."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._is_open = False

    def say(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        """More text."""
        events = self._open_message()
        part = self.output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        delta = {"content_index": 0, "delta": text, "logprobs": list(logprobs)}
        return [*events, self._event("response.output_text.delta", **delta)]

    def call(self, name: str) -> list[Event]:
        """A new call."""
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        return [*self.close("completed"), *self._open(item)]

    def argue(self, text: str) -> list[Event]:
        """More arguments of the open call."""
        self.output[-1]["arguments"] += text
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def finish(self, status: str) -> list[Event]:
        """Closes the last item; an answer without any is an empty message."""
        events = [] if self.output else self._open_message()
        return [*events, *self.close(status)]

    def close(self, status: str) -> list[Event]:
        """Ends the open item, if any."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            ends = [self._event("response.function_call_arguments.done", **done)]
        else:
            (part,) = item["content"]
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            ends = [
                self._event("response.output_text.done", **done),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*ends, self._item_event("response.output_item.done")]

    def turn(self) -> dict[str, Any]:
        """The output as the assistant's turn of a conversation; NULs, which are no text, are left out."""
        texts = [item["content"][0]["text"] for item in self.output if item["type"] == "message"]
        turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts).replace("\x00", "")}
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self.output
            if item["type"] == "function_call" and item["status"] == "completed"
        ]
        return {**turn, "tool_calls": calls} if calls else turn

    def _open_message(self) -> list[Event]:
        if self._is_open and self.output[-1]["type"] == "message":
            return []
        closing = self.close("completed")
        item = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        opening = self._open(item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output[-1]["content"].append(part)
        added = self._event("response.content_part.added", content_index=0, part={**part, "logprobs": []})
        return [*closing, *opening, added]

    def _open(self, item: dict[str, Any]) -> list[Event]:
        self.output.append(item)
        self._is_open = True
        return [self._item_event("response.output_item.added")]

    def _event(self, kind: str, **more: Any) -> Event:
        where = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return {"type": kind, **where, **more}

    def _item_event(self, kind: str) -> Event:
        item = self.output[-1]
        copy = {**item, "content": list(item["content"])} if "content" in item else dict(item)
        return {"type": kind, "output_index": len(self.output) - 1, "item": copy}
