"""Markdown as models write it: what is shown, and that nothing of it is ever taken for markup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

INTO = "const e = document.createElement('div'); e.append(Markdown.render(text));"
HTML = f"(text) => {{ {INTO} return e.innerHTML }}"
CODE = f"(text) => {{ {INTO} return e.querySelector('code').textContent }}"
STRANGE = f"""(text) => {{
    {INTO}
    const names = [...e.querySelectorAll('*')].flatMap((node) => node.getAttributeNames());
    return [
        e.querySelectorAll('img, script, b, i, u').length,
        names.filter((name) => name.startsWith('on')).length,
        [...e.querySelectorAll('a')].filter((node) => !/^https?:/.test(node.href)).length,
    ];
}}"""
MILLISECONDS = """(text) => {
    const began = performance.now();
    Markdown.render(text.repeat(20000));
    return performance.now() - began;
}"""


@pytest.fixture(scope="module")
def page(make_page: Any, serve_scripted: Any) -> Iterator[Any]:
    with serve_scripted() as served:
        found = make_page(f"{served.url}/")
        yield found
        found.close()


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("one  \ntwo", "<p>one<br>two</p>"),
        ("# Title #", "<h4>Title</h4>"),
        ("#hash", "<p>#hash</p>"),
        (
            "a **b** *c* _d_ ~~e~~ `f*g*`",
            "<p>a <strong>b</strong> <em>c</em> <em>d</em> <del>e</del> <code>f*g*</code></p>",
        ),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("``a`b`` \\*c\\*", "<p><code>a`b</code> *c*</p>"),
        (
            "- a\n- b\n  - c\n  - d\n- e",
            "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>",
        ),
        ("1. a\n\n2. b", "<ol><li>a</li><li>b</li></ol>"),
        ("3) c\n4) d", '<ol start="3"><li>c</li><li>d</li></ol>'),
        ("- a\nlazy\n\nafter", "<ul><li>a\nlazy</li></ul><p>after</p>"),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        (
            "| a | b |\n|---|:-:|\n| 1 | `2` |",
            '<div class="scroll"><table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>'
            "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>",
        ),
        (
            "[x](https://a.example/b) https://c.example/d.",
            '<p><a href="https://a.example/b" rel="noopener noreferrer" target="_blank">x</a> '
            '<a href="https://c.example/d" rel="noopener noreferrer" target="_blank">https://c.example/d</a>.</p>',
        ),
    ],
)
def test_it_is_shown_as_it_was_meant(page: Any, text: str, html: str) -> None:
    assert page.run(HTML, text) == html


def test_code_keeps_every_character_also_while_it_streams_in(page: Any) -> None:
    code = "if a < b && c:\n    **x** = '<b>'\n\n# done"
    whole = page.run(HTML, f"Look:\n\n```python\n{code}\n```\nafter")
    assert "<span>python</span>" in whole
    assert whole.endswith("<p>after</p>")
    for written in (f"```python\n{code}\n```", f"```python\n{code}"):
        assert page.run(CODE, written) == code


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "[x](data:text/html,<script>)",
        '[x](https://a.example/"onmouseover="alert(1))',
        "`<b>`",
        "| <i> | b |\n|---|---|\n| <u> | 2 |",
    ],
)
def test_nothing_of_it_is_markup(page: Any, text: str) -> None:
    assert page.run(STRANGE, text) == [0, 0, 0]


@pytest.mark.parametrize("piece", ["*", "_", "`", "[", "> ", "- ", "**a ", "~~", "a|", "](", "\n> - ", "  "])
def test_no_text_is_too_much(page: Any, piece: str) -> None:
    assert page.run(MILLISECONDS, piece) < 20_000
