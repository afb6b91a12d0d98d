"""The page at `/`: chat or completion in the browser, and a live view of the engine.

The files of `page/` are the whole page: no build step, no framework, no request to another origin.
They are read once, and served with a Content-Security-Policy under which a browser runs no other
script and text cannot become HTML (`require-trusted-types-for`): what a model or a client writes
stays text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import NamedTuple

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # The browser revalidates each time, so that after an upgrade no old script meets a new server.
    "Cache-Control": "no-cache",
}


class PageResponse(NamedTuple):
    """An HTTP answer: status 200, or 304 with an empty body."""

    status: int
    headers: dict[str, str]
    body: bytes


def _load() -> dict[str, tuple[str, bytes]]:
    files_by_path = {}
    for file in sorted(
        files("freight.serve").joinpath("page").iterdir(), key=lambda file: file.name
    ):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            files_by_path[path] = (kind, file.read_bytes())
    return files_by_path


PAGE: Mapping[str, tuple[str, bytes]] = MappingProxyType(_load())  # path -> (content type, content)
_TAGS = {
    path: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for path, (_, content) in PAGE.items()
}


def page_response(path: str, if_none_match: str | None = None) -> PageResponse | None:
    """Return the answer to GET `path`; None if the page has no such file.

    The path is a key of a table and is never opened. `if_none_match` is the request's header: a
    browser that has the current file gets 304.
    """
    if path not in PAGE:
        return None
    kind, content = PAGE[path]
    headers = {**_HEADERS, "Content-Type": kind, "ETag": _TAGS[path]}
    known = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    if "*" in known or _TAGS[path] in known:
        return PageResponse(304, headers, b"")
    return PageResponse(200, headers, content)
