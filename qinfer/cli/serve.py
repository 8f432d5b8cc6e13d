"""`qinfer serve`: the OpenAI-shaped HTTP server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.engine_options import (
    ENGINE,
    GATE,
    HUB,
    MODEL,
    EngineKeywords,
    describe_model,
    say_gate,
    with_engine_options,
)
from qinfer.cli.options import JsonOption, ModelArgument
from qinfer.cli.output import stdout_kept_for_result, to_json
from qinfer.cli.server_options import (
    AllowedOriginsOption,
    ApiKeyOption,
    ForceUsageOption,
    GenerationConfigOption,
    HistogramBucketsOption,
    KeepAliveOption,
    LogAnswersOption,
    LogRequestsOption,
    MaxBodyOption,
    MetricsCompatOption,
    OverrideGenerationConfigOption,
    QueuedReqsOption,
    QueuedTokensOption,
    SchedulingPolicyOption,
    ServedModelNameOption,
    ShutdownTimeoutOption,
    ToolCallParserOption,
    TrustTemplateOption,
    WebPageOption,
)
from qinfer.generation_config import parse_overrides

if TYPE_CHECKING:
    from qinfer.llm import LLM
    from qinfer.model_card import ModelCard


@with_engine_options(*MODEL, *ENGINE, "seed", *GATE, *HUB)
def serve(
    model: ModelArgument,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: ApiKeyOption = None,
    served_model_name: ServedModelNameOption = None,
    allowed_origins: AllowedOriginsOption = None,
    max_body_mb: MaxBodyOption = 32,
    max_num_queued_reqs: QueuedReqsOption = 16384,
    max_num_queued_tokens: QueuedTokensOption = None,
    shutdown_timeout: ShutdownTimeoutOption = 0.0,
    access_log: LogAnswersOption = False,
    enable_log_requests: LogRequestsOption = False,
    sse_keep_alive_interval: KeepAliveOption = None,
    enable_force_include_usage: ForceUsageOption = False,
    trust_request_chat_template: TrustTemplateOption = False,
    tool_call_parser: ToolCallParserOption = "auto",
    metrics_compat: MetricsCompatOption = "vllm",
    custom_histogram_buckets: HistogramBucketsOption = None,
    webui: WebPageOption = True,
    scheduling_policy: SchedulingPolicyOption = "fcfs",
    generation_config: GenerationConfigOption = "auto",
    override_generation_config: OverrideGenerationConfigOption = None,
    engine: EngineKeywords,
    as_json: JsonOption = False,
) -> None:
    """Serve MODEL over HTTP until it is interrupted.

    What was loaded, the memory ledger and the address are told on stderr; with --json they are also one
    document on stdout, as soon as requests are answered.
    """
    keywords = {
        **engine,
        "scheduling_policy": scheduling_policy,
        "generation_config": generation_config,
        "override_generation_config": parse_overrides(override_generation_config),
        "served_model_name": served_model_name or None,
    }
    stdout = sys.stdout

    def load() -> LLM:
        from qinfer.engine_thread import threads_left_to_the_engine
        from qinfer.llm import LLM  # imports torch, which takes seconds: the port comes first

        with threads_left_to_the_engine():
            return LLM(model, **keywords)

    def import_libraries() -> None:
        """Those without which the tokenizer that the engine's process has loaded cannot come over."""
        from qinfer.tokenizer import import_transformers

        import_transformers()

    def ready(url: str, card: ModelCard) -> None:
        names = card.names
        say_gate(card.gate)
        print(card.ledger.to_text(), file=sys.stderr)
        print(f"{', '.join(names)} is served at {url}/v1", file=sys.stderr, flush=True)
        if webui:
            print(f"a page to chat and watch is at {url}/", file=sys.stderr, flush=True)
        if as_json:
            document = {
                "url": url,
                "model": names[0],
                "served_model_names": list(names),
                **describe_model(card.config, card.gate, card.ledger),
            }
            print(to_json(document), file=stdout, flush=True)

    with stdout_kept_for_result():
        from qinfer.server import run
        from qinfer.server.histogram import parse_bounds
        from qinfer.server.options import ServerOptions

        options = ServerOptions(
            api_keys=api_key or (),
            allowed_origins=allowed_origins or (),
            max_body_bytes=max_body_mb << 20,
            keep_alive_seconds=sse_keep_alive_interval,
            force_usage=enable_force_include_usage,
            max_num_queued_reqs=max_num_queued_reqs,
            max_num_queued_tokens=max_num_queued_tokens,
            shutdown_timeout=shutdown_timeout,
            log_answers=access_log,
            log_requests=enable_log_requests,
            trust_request_chat_template=trust_request_chat_template,
            tool_call_parser=tool_call_parser,
            metrics_compat=metrics_compat,
            histogram_bounds=parse_bounds(custom_histogram_buckets) if custom_histogram_buckets else {},
            web_page=webui,
        )
        run.serve(load, options, host=host, port=port, on_ready=ready, meanwhile=import_libraries)
