"""The page at `/` in a headless Chromium: a question is asked, text streams in, and all that is around it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from qinfer.server.page import compose

Open = Callable[..., Any]
BODY = ".message.assistant .body"
BODY_TEXT = f"document.querySelector('{BODY}').innerText"
PATIENCE = 120.0  # seconds
IDLE = "document.querySelector('#stop').hidden"


def ask(page: Any, text: str) -> None:
    """Types a question where the focus is and sends it."""
    page.wait("document.activeElement.id === 'question'")
    page.type(text)
    page.press("Enter")


def listener(prompts: list[str], tokenizer: Any) -> Callable[[Sequence[int], int], list[int]]:
    """A script that answers "yes", 40 times, and notes every prompt as text."""

    def script(prompt_ids: Sequence[int], choice: int) -> list[int]:
        prompts.append(tokenizer.decode(prompt_ids, skip_special_tokens=False))
        return [*(list(b"yes ") * 40), *tokenizer.eos_token_ids]

    return script


def test_a_question_is_asked_and_text_streams_in(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted() as served:
        page = open_page(f"{served.url}/")
        page.wait("document.querySelector('#served-model').textContent === 'tiny'")
        assert page.text("#gate-badge") == "gate: passed"
        served.scripted.seconds_per_step = 0.05
        page.js("document.querySelector('#set-max_completion_tokens').value = 150")
        ask(page, "What is new?")
        first = page.wait(f"document.querySelector('{BODY}')?.innerText")
        assert page.js("document.querySelector('.message.assistant').ariaBusy") == "true"
        assert page.js("document.querySelector('#send').hidden")
        assert page.text("#announcer") == "The model is answering."
        more = page.wait(f"document.querySelector('{BODY}').innerText.length > {len(first)} && {BODY_TEXT}")
        assert more.startswith(first)
        served.scripted.seconds_per_step = 0.0
        page.wait(IDLE)
        answer = page.text(BODY)
        assert re.fullmatch(r"[a-z]+", answer)
        assert page.text(".message.user .body") == "What is new?"
        assert page.text("#announcer") == f"The model says: {answer}"
        measured = r"(\d+) tokens · ([\d.,]+) tokens/s · first token after [\d.]+ (ms|s)"
        told = re.fullmatch(f"{measured} · cut at the longest answer", page.text(".message.assistant .note"))
        assert told
        assert (
            int(told[1]) == served.get("/qinfer/stats").json()["tokens"]["generation"] == len(answer) == 150
        )
        assert page.js("document.activeElement.id") == "question"


@pytest.mark.parametrize("how", ["the button", "Escape"])
def test_stopping_frees_the_engine_and_keeps_what_came(
    serve_scripted: Any, open_page: Open, how: str
) -> None:
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.05
        page = open_page(f"{served.url}/")
        ask(page, "Go on for ever")
        page.wait(f"document.querySelector('{BODY}')?.innerText.length > 2")
        if how == "Escape":
            page.press("Escape")
        else:
            page.js("document.querySelector('#stop').focus()")
            page.press("Enter")
        page.wait(IDLE)
        assert page.text(".message.assistant .note").endswith("stopped")
        assert len(page.text(BODY)) > 2
        assert page.js("document.activeElement.id") == "question"
        end = time.monotonic() + PATIENCE
        while served.scripted.jobs:
            assert time.monotonic() < end
        assert len(served.scripted.aborted) == 1
        page.click(".message.assistant .under button:last-child")  # ask again
        page.wait(f"document.querySelector('{BODY}')?.innerText.length > 2")
        page.click("#stop")
        page.wait(IDLE)
        assert page.js("document.querySelectorAll('.message').length") == 2


def test_an_edited_question_is_asked_again_without_what_came_after_it(
    serve_scripted: Any, open_page: Open, tokenizer: Any
) -> None:
    prompts: list[str] = []
    with serve_scripted(listener(prompts, tokenizer)) as served:
        page = open_page(f"{served.url}/")
        for number, text in enumerate(("one", "two"), 1):
            ask(page, text)
            page.wait(f"{IDLE} && document.querySelectorAll('.message').length === {2 * number}")
        assert prompts[-1].index("one") < prompts[-1].index("yes yes") < prompts[-1].index("two")
        page.js("[...document.querySelectorAll('.message')[0].querySelectorAll('button')].at(-1).click()")
        page.wait("document.activeElement.ariaLabel === 'Your message'")
        page.press("Escape")
        assert page.text(".message.user .body") == "one"
        page.js("[...document.querySelectorAll('.message')[0].querySelectorAll('button')].at(-1).click()")
        page.wait("document.activeElement.ariaLabel === 'Your message'")
        page.js("document.activeElement.select()")
        page.type("three")
        page.press("Enter")
        page.wait(
            f"{IDLE} && {BODY_TEXT}.includes('yes') && document.querySelectorAll('.message').length === 2"
        )
    assert "three" in prompts[-1]
    assert not {"one", "two", "yes"} & set(re.findall(r"\w+", prompts[-1]))


EDIT = "[...document.querySelectorAll('.message')[0].querySelectorAll('button')].at(-1).click()"
WORDS = "[...document.querySelectorAll('.message .body')].map((one) => one.innerText.slice(0, 3))"


def test_what_cannot_be_asked_anew_leaves_the_conversation_as_it_was(
    serve_scripted: Any, open_page: Open, tokenizer: Any
) -> None:
    with serve_scripted(listener([], tokenizer)) as served:
        page = open_page(f"{served.url}/")
        for number, text in enumerate(("one", "two"), 1):
            ask(page, text)
            page.wait(f"{IDLE} && document.querySelectorAll('.message').length === {2 * number}")
        for name, value, said in (
            ("temperature", "3", "Temperature: "),
            ("system", "too long " * 200, "this model's maximum context length is"),
        ):
            page.run(
                "(name, value) => { document.querySelector(`[name=${name}]`).value = value }", name, value
            )
            page.js(EDIT)
            page.wait("document.activeElement.ariaLabel === 'Your message'")
            page.js("document.activeElement.select()")
            page.type("three")
            page.press("Enter")
            page.wait(
                f"document.querySelector('#problem').innerText.startsWith({json.dumps(said)}) && {IDLE}"
            )
            page.open(f"{served.url}/")
            assert page.wait(f"document.querySelectorAll('.message').length === 4 && {WORDS}") == [
                *("one", "yes", "two", "yes")
            ]
        page.complaints.clear()  # Chromium logs every 400


def test_an_answer_below_its_limit_ends_where_the_context_does(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted(lambda prompt_ids, choice: [97] * 1000) as served:
        page = open_page(f"{served.url}/")
        page.js("document.querySelector('#set-max_completion_tokens').value = 1000")
        ask(page, "Go on for ever")
        page.wait(f"{IDLE} && document.querySelector('.message.assistant .note').innerText.includes('cut')")
        assert page.text(".message.assistant .note").endswith("cut: no more room")


def test_the_end_stays_in_sight_when_the_window_shrinks(
    serve_scripted: Any, open_page: Open, tokenizer: Any
) -> None:
    below = "(({scrollHeight, scrollTop, clientHeight: h}) => scrollHeight - scrollTop - h)"
    with serve_scripted(lambda prompt_ids, choice: [*b"yes", *tokenizer.eos_token_ids]) as served:
        page = open_page(f"{served.url}/", width=500, height=700)
        ask(page, "a\n" * 50 + "b")
        page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 2")
        page.wait(f"{below}(document.querySelector('#messages')) < 2")
        tall = page.js("document.querySelector('#messages').clientHeight")
        page.resize(500, 450)
        page.wait(f"document.querySelector('#messages').clientHeight < {tall}")
        page.wait(f"{below}(document.querySelector('#messages')) < 2")
        page.js("document.querySelector('#messages').scrollTop = 0")
        page.resize(500, 500)
        page.wait(f"document.querySelector('#messages').clientHeight > {tall - 250}")
        assert page.js("document.querySelector('#messages').scrollTop") == 0  # who reads above is left there


def test_settings_are_sent_kept_and_bounded(serve_scripted: Any, open_page: Open, tokenizer: Any) -> None:
    prompts: list[str] = []
    with serve_scripted(listener(prompts, tokenizer), served_model_names=["tiny", "other"]) as served:
        page = open_page(f"{served.url}/")
        page.wait("document.querySelector('#set-model').options.length === 2")
        values = {"temperature": "0.3", "top_k": "7", "seed": "11", "max_completion_tokens": "9"}
        values |= {"system": "Be brief.", "stop": "END\\nFIN", "model": "other"}
        for name, value in values.items():
            page.js(f"document.querySelector('[name={name}]').value = '{value}'")
        page.js("document.querySelector('[name=top_k]').dispatchEvent(new Event('input', {bubbles: true}))")
        page.open(f"{served.url}/")
        page.wait("document.querySelector('#set-model').value === 'other'")
        ask(page, "Well?")
        page.wait(f"document.querySelector('.note') && {IDLE}")
        (params,) = served.scripted.seen
        assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.3, 7, 11, 9)
        assert params.stop_strings == ("END", "FIN")
        assert "Be brief." in prompts[-1]
        page.js("document.querySelector('[name=temperature]').value = '3'")
        ask(page, "And now?")
        assert page.wait("document.querySelector('#problem').innerText").startswith("Temperature: ")
        assert len(served.scripted.seen) == 1
        page.click("#reset-settings")
        assert page.js("document.querySelector('[name=seed]').value") == ""
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.message').length === 4 && {IDLE}")
        assert served.scripted.seen[1].temperature == 1.0
        assert "Be brief." not in prompts[-1]


def test_conversations_are_kept_in_the_browser_until_they_are_deleted(
    serve_scripted: Any, open_page: Open, tokenizer: Any
) -> None:
    with serve_scripted(listener([], tokenizer)) as served:
        page = open_page(f"{served.url}/")
        ask(page, "About cats")
        page.wait(f"document.querySelectorAll('.message').length === 2 && {IDLE}")
        page.click("#new-chat")
        assert page.js("document.querySelectorAll('.message').length") == 0
        ask(page, "About dogs")
        page.wait(f"document.querySelectorAll('.message').length === 2 && {IDLE}")
        page.open(f"{served.url}/")
        titles = "[...document.querySelectorAll('#chat-list .title')].map((one) => one.innerText)"
        assert page.wait(titles) == ["About dogs", "About cats"]
        page.js("document.querySelectorAll('#chat-list .title')[1].click()")
        assert page.text(".message.user .body") == "About cats"
        page.js("document.querySelector('[aria-label=\"Delete About cats\"]').click()")
        assert page.js(titles) == ["About dogs"]
        assert page.text(".message.user .body") == "About dogs"


def test_a_conversation_is_exported(
    serve_scripted: Any, open_page: Open, tokenizer: Any, tmp_path: Path
) -> None:
    with serve_scripted(listener([], tokenizer)) as served:
        page = open_page(f"{served.url}/")
        page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        ask(page, "Keep this")
        page.wait(f"document.querySelectorAll('.message').length === 2 && {IDLE}")
        page.click("#export")
        file, end = tmp_path / "conversation.json", time.monotonic() + PATIENCE
        while not file.exists():
            assert time.monotonic() < end
    document = json.loads(file.read_text())
    assert [one["role"] for one in document["messages"]] == ["user", "assistant"]
    assert document["messages"][0]["content"] == document["title"] == "Keep this"
    assert document["messages"][1]["content"] == "yes " * 40


def test_a_key_is_asked_for_and_lives_as_long_as_the_tab(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted(api_keys=["sesame"]) as served:
        page = open_page(f"{served.url}/")
        assert page.wait("document.querySelector('#problem').innerText") == (
            "This server wants an API key: type it under Settings."
        )
        ask(page, "Let me in")
        page.wait("document.activeElement.id === 'set-key'")
        assert page.js("document.querySelector('#question').value") == "Let me in"
        page.complaints.clear()  # Chromium logs every 401
        page.type("sesame")
        page.press("Tab")
        page.wait("document.querySelector('#problem').hidden")
        page.js("document.querySelector('#question').focus()")
        page.press("Enter")
        page.wait(f"document.querySelector('.note') && {IDLE}")
        page.open(f"{served.url}/#live")
        page.wait("document.querySelector('#tiles').innerText.includes('Finished')")
        assert "sesame" not in page.js("JSON.stringify(localStorage)")


def test_a_failure_is_told_and_the_question_not_lost(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted() as served:
        served.scripted.fail_at_step = 0
        page = open_page(f"{served.url}/")
        ask(page, "Are you there?")
        assert "the engine has died" in page.wait("document.querySelector('#problem').innerText")
        page.wait("document.querySelector('#question').value === 'Are you there?'")
        assert page.js("document.querySelectorAll('.message').length") == 0
        page.complaints.clear()  # Chromium logs every 500


def test_it_talks_to_its_own_server_alone(serve_scripted: Any) -> None:
    with serve_scripted() as served:
        answer = served.get("/")
        assert served.client.head("/").status_code == 200
    html, policy = compose()
    assert answer.text == html
    assert answer.headers["content-security-policy"] == policy
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", html)
    for kind in ("style", "script"):
        for text in re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert len(html) < 100_000


def test_there_is_no_page_where_the_operator_wants_none(serve_scripted: Any) -> None:
    with serve_scripted(web_page=False) as served:
        assert served.get("/").status_code == 404
