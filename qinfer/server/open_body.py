"""What bodies of all routes have in common: any fields, JSON of any form, but nested only so deep.

Schemas, tools and what templates read are of any form, and all that looks at them later (the template, the
grammar, the document that is sent back) descends by recursion, which ends somewhere with an error of its own.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

MAX_DEPTH = 200  # objects and lists within each other; a schema has two for each level of what it describes


class OpenBody(BaseModel):
    """A body that may bring fields which mean nothing here."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _is_shallow(cls, body: Any) -> Any:
        check_depth(body)
        return body

    @property
    def unread(self) -> list[str]:
        """Names of those fields; of fields within fields, after the outer one and a dot."""
        names = list(self.model_extra or ())
        for name in type(self).model_fields:
            if isinstance(inner := getattr(self, name), OpenBody):
                names += [f"{name}.{one}" for one in inner.unread]
        return names


def check_depth(value: Any) -> None:
    """ValueError for JSON with more than MAX_DEPTH objects and lists within each other."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [inner for one in level for inner in _within(one)]
    if level:
        raise ValueError(f"more than {MAX_DEPTH} objects and lists within each other are not read")


def _within(one: dict[str, Any] | list[Any]) -> list[Any]:
    values = one.values() if isinstance(one, dict) else one
    return [value for value in values if type(value) is dict or type(value) is list]
