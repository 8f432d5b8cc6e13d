"""`qinfer serve`: the OpenAI-shaped HTTP server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.engine_options import describe_model, llm_keywords
from qinfer.cli.options import (
    AllowUngatedOption,
    BlockSizeOption,
    ChatTemplateOption,
    ChunkedPrefillOption,
    DtypeOption,
    EnforceEagerOption,
    GpuMemoryUtilizationOption,
    GroupSizeOption,
    HubTokenOption,
    JsonOption,
    KVCacheDtypeOption,
    LMHeadDtypeOption,
    LoadFormatOption,
    MaxModelLenOption,
    MaxNumBatchedTokensOption,
    MaxNumSeqsOption,
    MemoryOption,
    ModelArgument,
    PrefixCachingOption,
    RevisionOption,
    SchemeOption,
    SeedOption,
    SymmetricOption,
    TokenizerOption,
    TrustOption,
)
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


def serve(
    model: ModelArgument,
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
    tokenizer: TokenizerOption = None,
    load_format: LoadFormatOption = "auto",
    scheme: SchemeOption = None,
    group_size: GroupSizeOption = None,
    symmetric: SymmetricOption = None,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    lm_head_dtype: LMHeadDtypeOption = "auto",
    memory: MemoryOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    max_num_batched_tokens: MaxNumBatchedTokensOption = None,
    block_size: BlockSizeOption = None,
    enable_prefix_caching: PrefixCachingOption = True,
    enable_chunked_prefill: ChunkedPrefillOption = True,
    scheduling_policy: SchedulingPolicyOption = "fcfs",
    enforce_eager: EnforceEagerOption = False,
    chat_template: ChatTemplateOption = None,
    generation_config: GenerationConfigOption = "auto",
    override_generation_config: OverrideGenerationConfigOption = None,
    seed: SeedOption = 0,
    allow_ungated: AllowUngatedOption = False,
    trust: TrustOption = None,
    revision: RevisionOption = None,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve MODEL over HTTP until it is interrupted.

    What was loaded, the memory ledger and the address are told on stderr; with --json they are also one
    document on stdout, as soon as requests are answered.
    """
    keywords = llm_keywords(
        memory,
        tokenizer=tokenizer,
        load_format=load_format,
        scheme=scheme,
        group_size=group_size,
        symmetric=symmetric,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        lm_head_dtype=lm_head_dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        enable_chunked_prefill=enable_chunked_prefill,
        enforce_eager=enforce_eager,
        scheduling_policy=scheduling_policy,
        generation_config=generation_config,
        override_generation_config=parse_overrides(override_generation_config),
        chat_template=chat_template,
        seed=seed,
        allow_ungated=allow_ungated,
        trust=trust or (),
        revision=revision,
        hf_token=hf_token,
        served_model_name=served_model_name or None,
    )
    stdout = sys.stdout

    def load() -> LLM:
        from qinfer.llm import LLM  # imports torch, which takes seconds: the port comes first

        return LLM(model, **keywords)

    def ready(url: str, llm: LLM) -> None:
        names = llm.served_model_names
        print(f"{llm.gate.line}\n{llm.engine.ledger.to_text()}", file=sys.stderr)
        print(f"{', '.join(names)} is served at {url}/v1", file=sys.stderr, flush=True)
        if webui:
            print(f"a page to chat and watch is at {url}/", file=sys.stderr, flush=True)
        if as_json:
            document = {
                "url": url,
                "model": names[0],
                "served_model_names": list(names),
                **describe_model(llm),
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
        run.serve(load, options, host=host, port=port, on_ready=ready)
