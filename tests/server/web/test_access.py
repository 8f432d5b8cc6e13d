"""The page for everyone: names for screen readers, the keyboard alone, contrast light and dark, a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Open = Callable[..., Any]
INTERACTIVE = {"button", "textbox", "link", "combobox", "spinbutton", "searchbox", "DisclosureTriangle"}
IDLE = "document.querySelectorAll('.message').length && document.querySelector('#stop').hidden"

# Every element with text of its own: what it says, and the contrast of its colour with what lies behind it.
CONTRASTS = """() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (color) => {
        const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = color.map((c) => linear(c / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const color = rgba(getComputedStyle(node).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255, 255];
    };
    const found = [];
    for (const node of document.body.querySelectorAll('*')) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!own || !node.checkVisibility() || node.closest('script, style, noscript')) continue;
        const style = getComputedStyle(node);
        const [a, b] = [luminance(rgba(style.color)), luminance(ground(node))];
        found.push([node.innerText.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
    }
    return found;
}"""


@pytest.fixture
def page(serve_scripted: Any, open_page: Open) -> Any:
    """With one question answered, in Markdown of every kind."""
    text = b"# T\n> q `c` [l](https://a.example)\n\n```py\nx\n```\n\n|a|b|\n|-|-|\n|c|d|"
    with serve_scripted(lambda ids, choice: [*text, 258]) as served:
        found = open_page(f"{served.url}/")
        found.type("Hello")
        found.press("Enter")
        found.wait(IDLE)
        assert found.js("document.querySelectorAll('.body table, .body pre, .body blockquote').length") == 3
        yield found


@pytest.mark.parametrize("view", ["chat", "live"])
def test_everything_to_act_on_has_a_name(page: Any, view: str) -> None:
    page.js(f"location.hash = '#{view}'")
    page.wait(f"!document.querySelector('#{view}-view').hidden")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    acting = [node for node in shown if node["role"]["value"] in INTERACTIVE]
    assert len(acting) >= (20 if view == "chat" else 3)
    assert [node for node in acting if not node["name"]["value"].strip()] == []
    roles = [node["role"]["value"] for node in shown]
    assert roles.count("main") == 1
    assert {"banner", "navigation", "heading"} <= set(roles)
    assert page.js("document.documentElement.lang") == "en"
    ids = page.js("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))


def test_the_keyboard_alone_reaches_everything(page: Any) -> None:
    reached = set()
    for _ in range(60):
        page.press("Tab")
        reached.add(page.js("document.activeElement.id || document.activeElement.innerText"))
        outlined = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        assert page.js(f"document.activeElement === document.body || {outlined}")
    assert {"question", "send", "messages", "set-model", "set-system", "set-key", "export"} <= reached
    assert {"Skip to the content", "Chat", "Live", "Copy", "Edit", "Ask again", "new-chat"} <= reached


def test_skipping_to_the_content_leaves_the_view(page: Any) -> None:
    page.js("location.hash = '#live'")
    page.wait("!document.querySelector('#live-view').hidden")
    page.js("document.querySelector('.skip').click()")
    assert page.js("document.activeElement.id") == "main"
    assert not page.js("document.querySelector('#live-view').hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(page: Any, scheme: str) -> None:
    page.scheme(scheme)
    dark = page.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 21, 24)"
    assert dark == (scheme == "dark")
    chat = page.run(CONTRASTS)
    page.js("location.hash = '#live'")
    page.wait("document.querySelector('#recent').innerText")
    live = page.run(CONTRASTS)
    assert len(chat) > 30
    assert len(live) > 50
    assert [(text, ratio) for text, ratio in chat + live if ratio < 4.5] == []


@pytest.mark.parametrize("view", ["chat", "live"])
def test_a_phone_scrolls_down_only(page: Any, view: str) -> None:
    page.resize(360, 640)
    page.js(f"location.hash = '#{view}'")
    page.wait(f"!document.querySelector('#{view}-view').hidden")
    for name in ("served-model", "gate-line", "problem"):
        page.js(f"document.querySelector('#{name}').textContent = '/models/x'.repeat(20)")
    assert page.js("document.documentElement.scrollWidth") <= 360
    assert page.js(f"document.querySelector('#{view}-view').scrollWidth") <= 360
    assert not page.js("document.querySelector('#settings').open")
    if view == "chat":
        assert page.run("() => document.querySelector('#send').getBoundingClientRect().bottom") <= 640
