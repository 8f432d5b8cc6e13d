"""A headless Chromium (Debian's package) for tests of the web page, driven by its DevTools over pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0  # seconds, on a slow machine
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--mute-audio"),
    *("--no-default-browser-check", "--remote-debugging-pipe", "--disable-features=Translate"),
)


class Browser:
    """The process. DevTools reads its file descriptor 3 and writes 4: JSON documents that end with NUL."""

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium")
        assert program, "tests of the web page need chromium (Debian package chromium)"
        theirs, self._to = os.pipe()
        back, theirs_out = os.pipe()
        start = f'exec "$0" "$@" 3<&{theirs} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", start, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(theirs_out)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.on_event: dict[str, Callable[[str, dict[str, Any]], None]] = {}  # by session
        self._last_id = 0
        self._reader = threading.Thread(target=self._read, args=(back,), daemon=True)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._last_id += 1
        number, answer = self._last_id, queue.SimpleQueue[dict[str, Any]]()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": params}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        found = answer.get(timeout=PATIENCE)
        assert "error" not in found, f"{method}: {found['error']}"
        return dict(found["result"])

    def close(self) -> None:
        with contextlib.suppress(OSError, queue.Empty):
            self.call("Browser.close")
        os.close(self._to)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()

    def _read(self, source: int) -> None:
        with os.fdopen(source, "rb") as file:
            rest = b""
            while data := os.read(file.fileno(), 1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for message in messages:
                    self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.pop(message["id"]).put(message)
        elif (session := message.get("sessionId")) in self.on_event:
            self.on_event[session](message["method"], message["params"])


class Page:
    """A window of its own, with storage of its own; `complaints` is what scripts and policies have logged."""

    def __init__(self, browser: Browser, url: str, *, width: int = 1280, height: int = 800) -> None:
        self.browser = browser
        self.complaints: list[str] = []
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._close = lambda: browser.call("Target.disposeBrowserContext", browserContextId=context)
        browser.on_event[self.session] = self._hear
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.open(url)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the protocol, of this page."""
        return self.browser.call(method, self.session, **params)

    def open(self, url: str) -> None:
        """Goes there and waits for it."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int, height: int) -> None:
        """The window's size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def scheme(self, name: str) -> None:
        """The reader's system is set to light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def js(self, expression: str) -> Any:
        """What an expression is in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def run(self, function: str, *arguments: Any) -> Any:
        """What a function of the page's language returns."""
        return self.js(f"({function})({', '.join(map(json.dumps, arguments))})")

    def wait(self, expression: str) -> Any:
        """What an expression is, once that is something."""
        end = time.monotonic() + PATIENCE
        while not (found := self.js(expression)):
            assert time.monotonic() < end, f"never: {expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """The text that a person sees in the first such element."""
        return str(self.js(f"document.querySelector({selector!r}).innerText"))

    def click(self, selector: str) -> None:
        """Clicks the first such element."""
        self.js(f"document.querySelector({selector!r}).click()")

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses a key: Enter, Tab, Escape."""
        code = {"Enter": 13, "Tab": 9, "Escape": 27}[key]
        event: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        event["modifiers"] = 8 if shift else 0
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def picture(self) -> bytes:
        """What it looks like, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        del self.browser.on_event[self.session]
        self._close()

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def make_page(browser: Browser) -> Callable[..., Page]:
    """Opens a page that the caller closes."""
    return partial(Page, browser)


@pytest.fixture
def open_page(make_page: Callable[..., Page]) -> Iterator[Callable[..., Page]]:
    """Opens pages, which are closed at the end; what they logged must have been taken out of `complaints`."""
    pages: list[Page] = []

    def start(url: str, **size: int) -> Page:
        pages.append(make_page(url, **size))
        return pages[-1]

    yield start
    for page in pages:
        page.close()
    assert [page.complaints for page in pages] == [[] for _ in pages]
