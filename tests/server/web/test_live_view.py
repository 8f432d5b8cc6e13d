"""The live view in a headless Chromium: what runs, how fast, where the memory is, what the gate says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from qinfer.evals.certificate import GateStatus

Open = Callable[..., Any]
TILES = """Object.fromEntries([...document.querySelectorAll('#tiles div')].map(
    (tile) => [tile.querySelector('dt').innerText, tile.querySelector('dd').innerText]))"""
PIXELS = """() => {
    const canvas = document.querySelector('#page-map');
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const found = {};
    for (let i = 0; i < data.length; i += 4) {
        const color = data[i + 3] ? `${data[i]},${data[i + 1]},${data[i + 2]}` : 'none';
        found[color] = (found[color] ?? 0) + 1;
    }
    return found;
}"""
HELD, SHARED, CACHED, FREE = "29,91,184", "176,72,15", "77,143,134", "227,228,234"  # of style.css, in light


def test_requests_show_while_they_run_and_after(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.5  # as long as it takes to see them
        page = open_page(f"{served.url}/#live")
        body = {"prompt": [97, 98, 99], "max_tokens": 150, "n": 3}
        client = threading.Thread(target=served.post, args=("/v1/completions", body))
        client.start()
        page.wait(f"({TILES}).Running === '3' && parseFloat(({TILES})['Output tokens/s']) > 0")
        page.wait("document.querySelector('#chart-requests').innerText.includes('now running 3, waiting 0')")
        points = "document.querySelector('#chart-speed polyline').getAttribute('points').split(' ').length"
        page.wait(f"{points} >= 2")
        served.scripted.seconds_per_step = 0.0
        client.join()
        page.wait(f"({TILES}).Running === '0' && ({TILES}).Finished === '3'")
        row = page.wait("document.querySelector('#recent').innerText").split("\t")
        assert row[1:3] == ["3", "450"]
        assert row[-1].strip() == "length"
        assert page.text("#latencies").startswith("first token")
        assert page.text("#latency-caption") == "of one request"


def test_the_map_shows_what_the_pages_hold(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted() as served:
        pages = served.scripted.pages  # 40
        taken = pages.allocate(10)
        for number, page in enumerate(taken[:6]):
            pages.publish(page, bytes([number]))
        pages.hold(taken[:2])
        pages.release(taken[2:6])
        view = open_page(f"{served.url}/#live")
        legend = view.wait("document.querySelector('#page-legend').innerText").split("\n")
        assert [line.strip() for line in legend] == [
            "6 of 40 pages held",
            "2 of them by several sequences",
            "4 free, with a known prefix",
            "30 blank",
        ]
        counts = view.run(PIXELS)
        one = counts[SHARED] / 2
        shares = {color: round(counts[color] / one) for color in (HELD, SHARED, CACHED, FREE)}
        assert shares == {HELD: 4, SHARED: 2, CACHED: 4, FREE: 30}
        view.scheme("dark")
        view.wait(f"!(({PIXELS})()['{HELD}'])")
        view.complaints.clear()  # Chromium would have us read pixels in another way


def test_the_ledger_and_the_gate_are_told(serve_scripted: Any, open_page: Open) -> None:
    gate = GateStatus("ungated", "served without a verdict <b>")
    with serve_scripted(gate=gate) as served:
        page = open_page(f"{served.url}/#live")
        assert page.wait("document.querySelector('#ledger-line').innerText") == (
            "int8 in 1000 B: room for 640 tokens, 2 sequences of 256; against float32 4.00×"
        )
        parts = "KV pool 640 B weights 300 B activations 50 B graphs 5 B reserve 1 B"
        assert " ".join(page.text("#ledger").split()) == parts
        assert page.text("#gate-state") == "ungated"
        assert page.text("#gate-line") == "served without a verdict <b>"
        facts = page.text("#facts")
        for text in ("w4a16+w8a8-int8", "4+8", "64", "int8", "bfloat16", "torch", "256 tokens"):
            assert text in facts
        assert page.js("[...document.querySelectorAll('#ledger-bar rect')].length") == 5


def test_a_dead_engine_is_told(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted() as served:
        page = open_page(f"{served.url}/#live")
        page.wait("document.querySelector('#tiles').innerText")
        served.scripted.fail_at_step = served.scripted.num_steps
        assert served.post("/v1/completions", {"prompt": "a"}).status_code == 500
        assert page.wait("document.querySelector('#live-problem').innerText") == "The engine is dead."


def test_nobody_asks_while_nobody_looks(serve_scripted: Any, open_page: Open) -> None:
    with serve_scripted() as served:
        page = open_page(f"{served.url}/")
        page.wait("document.querySelector('#served-model').innerText === 'tiny'")
        page.js("new Promise((go) => setTimeout(go, 1500))")
        assert "/qinfer/stats" not in served.get("/metrics").text
