"""Options of `qinfer serve` that are about HTTP, not about the model; `ServerOptions` says what they mean."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        envvar="QINFER_API_KEY", show_envvar=True, help="Key that clients must send; may be repeated."
    ),
]
ServedModelNameOption = Annotated[
    list[str] | None, typer.Option(help="Name in the API instead of MODEL; may be repeated.")
]
AllowedOriginsOption = Annotated[
    list[str] | None,
    typer.Option(help="Web origin that browsers may call from, or *; may be repeated. Default: none."),
]
MaxBodyOption = Annotated[int, typer.Option(min=1, help="Longest request body that is read, in MiB.")]
KeepAliveOption = Annotated[
    float | None, typer.Option(help="Seconds after which a silent stream gets a comment. Default: none.")
]
ForceUsageOption = Annotated[
    bool, typer.Option("--enable-force-include-usage", help="Token counts in every stream.")
]
TrustTemplateOption = Annotated[
    bool, typer.Option("--trust-request-chat-template", help="Obey chat templates that requests bring.")
]
ToolCallParserOption = Annotated[
    Literal["auto", "hermes", "llama3_json", "none"],
    typer.Option(help="The form in which the model calls tools; auto: as its chat template shows."),
]
QueuedReqsOption = Annotated[
    int, typer.Option(min=1, help="Sequences, running and waiting, beyond which requests get 503.")
]
QueuedTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Prompt tokens, running and waiting, beyond which requests get 503."),
]
ShutdownTimeoutOption = Annotated[
    float, typer.Option(min=0.0, help="Seconds that requests have to end after SIGTERM or Ctrl-C.")
]
LogAnswersOption = Annotated[bool, typer.Option("--access-log", help="A line in the log for every answer.")]
LogRequestsOption = Annotated[
    bool, typer.Option("--enable-log-requests", help="Prompts and parameters in the log: else in none.")
]
SchedulingPolicyOption = Annotated[
    Literal["fcfs", "priority"],
    typer.Option(help="Who runs first: who came first, or whose `priority` is smaller."),
]
GenerationConfigOption = Annotated[
    str, typer.Option(help="Default sampling: auto (the model's own), vllm (none), or a folder's.")
]
OverrideGenerationConfigOption = Annotated[
    str | None, typer.Option(help='What replaces parts of it, as JSON: {"temperature": 0.5}.')
]
MetricsCompatOption = Annotated[
    Literal["vllm", "none"], typer.Option(help="Whose names /metrics has beside qinfer's own.")
]
HistogramBucketsOption = Annotated[
    str | None,
    typer.Option(
        "--custom-histogram-buckets",
        help='Bounds of histograms in /metrics by family, as JSON: {"time_to_first_token": [0.2, 0.5, 1]}.',
    ),
]
WebPageOption = Annotated[bool, typer.Option("--webui/--no-webui", help="A page to chat and watch, at /.")]
