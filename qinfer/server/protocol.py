"""The bodies that the OpenAI routes take: their fields, types and bounds, and nothing of what they do.

Fields that OpenAI does not know carry vLLM's names. What is not listed is accepted and ignored, since SDKs
send new fields all the time; `unread` names it (`ignored` says so). None means "not given" everywhere.
Ranges of sampling fields are checked by `SamplingParams`, once for all faces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from fastapi import Header
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from qinfer.server.open_body import OpenBody
from qinfer.structured_outputs import StructuredOutputsParams

MAX_PROMPTS = 1024
MAX_STOPS = 4
MAX_BEAMS = 64
_INT64 = 2**63


def _unicode(text: str) -> str:
    """JSON may hold what no text can: half a surrogate pair; a NUL is text to nobody."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"lone surrogate at character {error.start}: this is no valid Unicode") from None
    if "\x00" in text:
        raise ValueError(f"NUL character at character {text.index(chr(0))}: this is no text")
    return text


def kind_of(value: Any) -> str:
    """Which member of a union a value is meant for, so that only that one complains, and once."""
    if not isinstance(value, list):
        return type(value).__name__
    return f"list[{type(value[0]).__name__}]" if value else "list[int]"


def list_or_not(value: Any) -> str:
    """Tag of a union of lists and something else."""
    return "list" if isinstance(value, list) else type(value).__name__


Count = Annotated[int, Field(ge=0, lt=2**31)]
Priority = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
PriorityHeader = Annotated[
    int | None,
    Header(alias="x-vllm-priority", ge=-_INT64, lt=_INT64, description="Goes before the body's priority."),
]
Text = Annotated[str, AfterValidator(_unicode)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("list[str]")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("list[list]")],
    Discriminator(
        kind_of,
        custom_error_type="prompt_type",
        custom_error_message="must be text, token ids, or a list of either",
    ),
]
Stops = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_STOPS), Tag("list")],
    Discriminator(
        list_or_not, custom_error_type="stop_type", custom_error_message="must be text or a list of texts"
    ),
]


class StreamOptions(OpenBody):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    """The schema of `response_format`, by the name that OpenAI gives it."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The answer's form: any text, any JSON object, JSON of a schema, or text with parts that have one."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    # vLLM's, of a structural tag
    structures: list[dict[str, Any]] | None = None
    triggers: list[Text] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema: {name, schema}")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's way to say the answer's form; `StructuredOutputsParams` checks that it is one."""

    model_config = ConfigDict(extra="ignore")

    json_: dict[str, Any] | Text | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None


class GenerationRequest(OpenBody):
    """What completions and chat have in common."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Stops | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Text], Field(fail_fast=True)] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Priority = 0
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    stream_interval: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None  # of beam search only
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed: leave out stream")
        if self.use_beam_search and self.stream:
            raise ValueError("beam search cannot be streamed")
        if self.use_beam_search and (self.n or 1) > MAX_BEAMS:
            raise ValueError(f"beam search has at most {MAX_BEAMS} beams (n)")
        if self.structured_outputs is not None and self.has_form:
            raise ValueError("response_format and structured_outputs say the same thing: leave one out")
        return self

    @property
    def has_form(self) -> bool:
        """Whether `response_format` asks for more than text."""
        return self.response_format is not None and self.response_format.type != "text"

    def form(self) -> StructuredOutputsParams | None:
        """What the answer must look like; UserError where that is said badly, None: as the model likes."""
        if self.structured_outputs is not None:
            given = self.structured_outputs.model_dump(by_alias=True)
            return StructuredOutputsParams(**given)
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=self.response_format.model_dump())
        if self.response_format.json_schema is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.response_format.json_schema.schema_)

    def field_of_form(self, kind: str) -> str:
        """Where the client said what has become a grammar of this kind."""
        return "response_format" if self.structured_outputs is None else f"structured_outputs.{kind}"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries token counts."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: Count | None = None  # None: 16, as OpenAI's
    logprobs: Count | None = None
    echo: bool = False
    suffix: Text | None = None  # means nothing to models that do not fill in the middle

    def prompts(self) -> Sequence[str | TokenIds]:
        """The prompts, always as a list, which may be empty."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(Sequence[str | TokenIds], self.prompt)
