"""`qinfer serve`: the OpenAI-shaped HTTP server."""

from __future__ import annotations

from typing import Annotated

import typer

from qinfer.cli.options import (
    AllowUngatedOption,
    BlockSizeOption,
    ChatTemplateOption,
    DtypeOption,
    HubTokenOption,
    JsonOption,
    KVCacheDtypeOption,
    MaxModelLenOption,
    MaxNumBatchedTokensOption,
    MaxNumSeqsOption,
    MemoryOption,
    ModelArgument,
    PrefixCachingOption,
    RevisionOption,
    SeedOption,
)


def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="QINFER_API_KEY", show_envvar=True, help="Key that clients must send; may be repeated."
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the API instead of MODEL; may be repeated.")
    ] = None,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    memory: MemoryOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    max_num_batched_tokens: MaxNumBatchedTokensOption = None,
    block_size: BlockSizeOption = None,
    enable_prefix_caching: PrefixCachingOption = True,
    chat_template: ChatTemplateOption = None,
    seed: SeedOption = 0,
    allow_ungated: AllowUngatedOption = False,
    revision: RevisionOption = None,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve MODEL over HTTP until interrupted. With --json one document is printed when it is ready."""
    raise NotImplementedError("serve")
