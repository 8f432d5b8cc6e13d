"""`qinfer generate`: continue prompts, or answer them as a chat, in this process."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.engine_options import (
    ENGINE,
    GATE,
    HUB,
    EngineKeywords,
    describe_model,
    say_gate,
    with_engine_options,
)
from qinfer.cli.options import JsonOption, ModelArgument
from qinfer.cli.output import show, stdout_kept_for_result
from qinfer.errors import UserError
from qinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qinfer.outputs import RequestOutput


@with_engine_options(*ENGINE, *GATE, *HUB)
def generate(
    model: ModelArgument,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt", "-p", help="Text to continue or to answer; may be repeated.", show_default=False
        ),
    ],
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(help="System message before each prompt (with --chat).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most likely token. Default: the model's own.", show_default=False),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this share of probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Answers for each prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of each prompt's sampling.")] = None,
    engine: EngineKeywords,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts, or answer them with --chat."""
    if system is not None and not chat:
        raise UserError("--system needs --chat: a plain prompt has no system message", "system")
    _check_prompts(prompt, chat=chat)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop,
        "seed": seed,
    }
    given = {name: value for name, value in sampling.items() if value not in (None, [])}
    # checked before the model is loaded, and taken over as settled, so that a warning comes once
    wanted = SamplingParams(n=n, max_tokens=max_tokens, **given)
    chosen = {name: getattr(wanted, name) for name in ("n", "max_tokens", *given)}
    with stdout_kept_for_result():
        from qinfer.llm import LLM

        llm = LLM(model, **engine)
        say_gate(llm.gate)
        params = replace(llm.get_default_sampling_params(), **chosen)
        start = time.perf_counter()
        if chat:
            before = [] if system is None else [{"role": "system", "content": system}]
            conversations = [[*before, {"role": "user", "content": text}] for text in prompt]
            outputs = llm.chat(conversations, params)
        else:
            outputs = llm.generate(prompt, params)
        seconds = time.perf_counter() - start
    loaded = describe_model(llm.config, llm.gate, llm.engine.ledger)
    document = {"model": model, **loaded, "seconds": seconds, "outputs": _plain(prompt, outputs)}
    show(document, _text(prompt, outputs), as_json)


def _check_prompts(prompts: list[str], *, chat: bool) -> None:
    """UserError for what no model could take, before one is loaded."""
    for prompt in prompts:
        if not prompt and not chat:
            raise UserError("--prompt is empty: give at least one character", "prompt")
        try:
            prompt.encode()
        except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
            raise UserError(f"--prompt is not valid Unicode: {prompt!r:.100}", "prompt") from None


def _plain(prompts: list[str], outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "answers": [
                {
                    "text": answer.text,
                    "token_ids": list(answer.token_ids),
                    "finish_reason": answer.finish_reason,
                }
                for answer in output.outputs
            ],
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _text(prompts: list[str], outputs: list[RequestOutput]) -> str:
    """The answers alone where there is one; else each under its prompt."""
    if len(prompts) == 1 and len(outputs[0].outputs) == 1:
        return outputs[0].outputs[0].text
    parts = [
        f"> {prompt}\n{answer.text}"
        for prompt, output in zip(prompts, outputs, strict=True)
        for answer in output.outputs
    ]
    return "\n\n".join(parts)
