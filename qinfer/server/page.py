"""The web page at `/`: files of the package put together into one document.

The page is one answer: its style and scripts are written into it, so that it needs no other route (only `/`
is open where an API key is wanted), no build step and no network beyond this server. Its content security
policy names the SHA-256 of each piece: nothing else runs, and it may talk to its own server alone. A key that
the user types stays in the browser's session.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z_]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z_]+\.js)" defer></script>')


def page_routes() -> APIRouter:
    """`/` itself, outside the OpenAPI document, which is about the API."""
    router = APIRouter()
    html, policy = compose()
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(html, headers=headers)

    return router


def compose() -> tuple[str, str]:
    """The document, with the files that it names in their places, and its content security policy."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(kind: str, name: str) -> str:
        text = _read(name)
        assert f"</{kind}" not in text, f"{name} would end the element that it stands in"
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    html = _STYLE.sub(lambda found: inline("style", found[1]), _read("index.html"))
    html = _SCRIPT.sub(lambda found: inline("script", found[1]), html)
    policy = {
        "default-src": ["'none'"],
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "style-src": hashes["style"],
        "script-src": hashes["script"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
    return html, "; ".join(f"{name} {' '.join(values)}" for name, values in policy.items())


def _read(name: str) -> str:
    return resources.files("qinfer.server").joinpath("web", name).read_text(encoding="utf-8")
