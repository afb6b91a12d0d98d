"""Fixtures of the page's tests: a browser for all of them, the server that it talks to, and the page
in it, ready.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.server.page.browser import Browser, browser, wait_for
from tests.unit.server.page.fake_server import Fake, Server, serving


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def running() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.fake = Fake()
    yield running
    running.fake.ended.set()
    running.fake.changed.set()


@pytest.fixture
def page(server: Server, window: Browser) -> Iterator[Browser]:
    """The page, following the engine; afterwards the console has no complaint, and no request left
    the origin.
    """
    window.run("sessionStorage.clear()") if window.run(
        "return location.protocol"
    ) == "http:" else None
    window.devtools("Emulation.clearDeviceMetricsOverride")
    window.log()
    window.open(server.url)
    wait_for(
        lambda: window.text("#status") == "Ready" and window.text("[data-live=held]") == "18,432"
    )
    yield window
    requests = window.run(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert [url for url in requests if not url.startswith(server.url)] == []
    assert [entry["message"] for entry in window.log() if entry["source"] != "network"] == []
    assert window.run("return document.title") == "demo · Freight"
