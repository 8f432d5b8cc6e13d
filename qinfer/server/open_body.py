"""What bodies of all routes have in common: any fields, JSON of any form, but nested only so deep.

Schemas, tools and what templates read are of any form, and all that looks at them later (the template, the
grammar, the document that is sent back) descends by recursion, which ends somewhere with an error of its own.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from qinfer.nesting import is_deeper

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
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"more than {MAX_DEPTH} objects and lists within each other are not read")
