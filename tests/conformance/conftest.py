"""The conformance suite: what clients of OpenAI's and TGI's APIs rely on, and what a server must
survive.

    pytest tests/conformance                                          starts `freight serve` itself
    pytest tests/conformance --url http://127.0.0.1:8000 [--api-key KEY] [--model NAME]

Every test speaks HTTP and nothing else, so other engines can be held to it. A test's name says the
shape or the fault; at the end a table counts them by group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.wire import Api

KEY = "conformance-key"
LEAKS = (b"Traceback", b'File "', b" at 0x", b"site-packages", b"/usr/", b"/home/", b"/root/")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--url",
        default=None,
        help="A server to hold to the suite; without it, freight serve is started.",
    )
    group.addoption("--api-key", default=None, help="Its key.")
    group.addoption(
        "--model", default=None, help="The model to ask for; default: the first that it lists."
    )


@pytest.fixture(scope="session")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    config = request.config
    url = config.getoption("url", None)
    if url:
        yield Api(url.rstrip("/").removesuffix("/v1"), "", config.getoption("api_key", None))
        return
    from tests.demo_chat import demo_with_chat_template  # loads torch, which no other server needs
    from tests.serving import freight_serve

    folder = demo_with_chat_template(tmp_path_factory.mktemp("models") / "demo-chat")
    options = ["--api-key", KEY, "--kv-cache-memory", "64MiB", "--kv-cache-dtype", "fp8"]
    options += ["--enable-tokenizer-info-endpoint"]
    with freight_serve(folder, options) as url:
        yield Api(url, "", KEY)


@pytest.fixture(scope="session")
def api(request: pytest.FixtureRequest, base: Api) -> Api:
    """The server, and the name of its model."""
    model = (
        request.config.getoption("model", None) or base.get("/v1/models").json()["data"][0]["id"]
    )
    return Api(base.url, model, base.api_key, base.seen)


@pytest.fixture(scope="session")
def max_model_len(api: Api) -> int:
    """Tokens of the longest context; 1 million where the server does not say it, which is too long
    everywhere.
    """
    return int(api.get("/v1/models").json()["data"][0].get("max_model_len") or 1_000_000)


@pytest.fixture(autouse=True)
def _still_serves(request: pytest.FixtureRequest, api: Api) -> Iterator[None]:
    """After each test: no answer showed the server's inside or was its failure, and a plain request
    is served.
    """
    api.seen.clear()
    yield
    for reply in api.seen:
        assert reply.status < 500, reply.body[:500]
        if reply.status >= 400:
            assert not [leak for leak in LEAKS if leak in reply.body], reply.body[:500]
    reply = api.complete("x", max_tokens=1)
    assert reply.status == 200, (
        f"after this test a plain request gets {reply.status}: {reply.body[:200]!r}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of keys run where a key is known: on a server that was started here, or with --api-key."""
    if config.getoption("url", None) and not config.getoption("api_key", None):
        keyed = [item for item in items if item.get_closest_marker("keyed")]
        if keyed:
            config.hook.pytest_deselected(items=keyed)
            items[:] = [item for item in items if item not in keyed]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "keyed: needs a server with a key")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Passed and failed by group, a group being a file."""
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            if "tests/conformance/" in report.nodeid and (
                report.when == "call" or outcome != "passed"
            ):
                group = Path(report.nodeid.split("::")[0]).stem.removeprefix("test_")
                counts.setdefault(group, Counter())[
                    "passed" if outcome == "passed" else "failed"
                ] += 1
    if counts:
        terminalreporter.section("conformance")
        for group, found in sorted(counts.items()):
            terminalreporter.write_line(
                f"{group:16}{found['passed']:4} passed{found['failed']:5} failed"
            )
        total: Counter[str] = sum(counts.values(), Counter())
        terminalreporter.write_line(
            json.dumps({"passed": total["passed"], "failed": total["failed"]})
        )
