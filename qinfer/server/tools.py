"""Tools in a request: their shapes, and how an answer is bound to call them.

"required" and a named function are a matter of grammar: the model cannot but write calls that fit the
parameters' schemas. "auto" leaves it to the model, which writes calls in the form that it was trained on;
which form that is, its chat template tells, or the operator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from qinfer.server.call_readers import ArrayReader, CallReader, HermesReader, JsonReader, NamedReader
from qinfer.server.errors import ApiError
from qinfer.server.protocol import Text
from qinfer.structured_outputs import WHITESPACE, StructuredOutputsParams

ToolParser = Literal["hermes", "llama3_json", "none"]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]  # quoted in grammar and template
MAX_TOOLS = 256


class Function(BaseModel):
    """What a tool is called, and the JSON schema of what it takes."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A function that the client runs."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class FunctionChoice(BaseModel):
    """The name in a tool choice."""

    name: FunctionName


class NamedChoice(BaseModel):
    """A tool choice that leaves none."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedChoice, Tag("dict")],
    Discriminator(
        lambda value: "str" if isinstance(value, str) else "dict",
        custom_error_type="tool_choice_type",
        custom_error_message='must be "none", "auto", "required" or a named function',
    ),
]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


def check_choice(tools: Sequence[Tool] | None, choice: Any) -> None:
    """ValueError where a choice goes without tools, or names one that is not there."""
    if tools is not None and not tools:
        raise ValueError("tools must not be an empty list: leave it out")
    if tools is None and choice not in (None, "none"):
        raise ValueError("tool_choice needs tools")
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise ValueError("tools has the same name twice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise ValueError(f"tool_choice names {choice.function.name!r}, which is not in tools")


def form_of_calls(tools: Sequence[Tool], choice: Any, *, parallel: bool) -> StructuredOutputsParams | None:
    """The grammar that a choice demands; None: it leaves the model free."""
    if isinstance(choice, NamedChoice):
        function = next(tool.function for tool in tools if tool.function.name == choice.function.name)
        return StructuredOutputsParams(json=_schema(function))
    if choice != "required":
        return None
    more = ' (", " call)*' if parallel else ""
    rules = [f'start: "[" call{more} "]"', *_rules(tools)]
    return StructuredOutputsParams(grammar="\n".join(rules))


def text_or_calls(
    tools: Sequence[Tool], text: StructuredOutputsParams, parser: ToolParser
) -> StructuredOutputsParams:
    """A grammar for JSON of the text's schema, or else calls; NotImplementedError where they look alike."""
    if text.kind not in ("json", "json_object"):
        raise NotImplementedError(f"qinfer does not have tools together with structured_outputs.{text.kind}")
    if parser != "hermes":
        raise NotImplementedError(
            "qinfer does not have response_format with the tools of this model, unmarked JSON"
        )
    schema = text.schema() if text.kind == "json" else {"type": "object"}
    marked = f'{json.dumps(HermesReader.START)} "\\n" call "\\n" {json.dumps(HermesReader.END)}'
    rules = [
        'start: text | marked ("\\n" marked)*',
        f"marked: {marked}",
        f"text: {_json(schema)}",
        *_rules(tools),
    ]
    return StructuredOutputsParams(grammar="\n".join(rules))


def reader_of(tools: Sequence[Tool], choice: Any, parser: ToolParser) -> CallReader | None:
    """What reads an answer's text; None: it is content, since the client chose "none"."""
    if isinstance(choice, NamedChoice):
        return NamedReader(choice.function.name)
    if choice == "required":
        return ArrayReader()
    if choice == "none":
        return None
    if parser == "hermes":
        return HermesReader()
    if parser == "llama3_json":
        return JsonReader([tool.function.name for tool in tools])
    raise ApiError(
        400,
        "the chat template of this model shows no known form of calls: choose required or a named function, "
        "or start the server with --tool-call-parser",
        "tool_choice",
    )


def parser_of(template: str) -> ToolParser:
    """The form of calls that a chat template teaches, "none" where it is not a known one."""
    if "<tool_call>" in template:
        return "hermes"
    if "tools" in template and '"parameters"' in template:
        return "llama3_json"
    return "none"


def _rules(tools: Sequence[Tool]) -> list[str]:
    """Lark rules of `call`: one of the tools with its arguments."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        rules.append(f'call_{i}: {head} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {_json(_schema(tool.function))}")
    return rules


def _json(schema: Mapping[str, Any]) -> str:
    """A Lark term for JSON of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def _schema(function: Function) -> Mapping[str, Any]:
    """The parameters' schema; a function without any takes an empty object."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}
