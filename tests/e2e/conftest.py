"""One server for the tests of its clients: the demo model with a chat template in the style of
Hermes, and a key.

It is started once per process of pytest. `served_folder` is what it serves, so that `LLM` can open
the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.demo_chat import demo_with_chat_template
from tests.lost_ranks import BASE, COMMON, RankPair, tokens_of
from tests.serving import freight_serve

from freight.llm import LLM

KEY = "clients-key"
OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "64MiB"]
HERMES = (
    "{{ bos_token }}"
    "{% for tool in tools or [] %}tool: {{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>\n"
    "{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class DemoServer:
    """A running server; `name` is its model's, `folder` what it serves."""

    url: str
    name: str
    folder: Path
    key: str = KEY


def demo_with_tools(folder: Path) -> Path:
    """The demo model in `folder`, with a template that knows tools; returns it."""
    demo_with_chat_template(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": HERMES}))
    return folder


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_with_tools(tmp_path_factory.mktemp("served") / "demo-tools")


@pytest.fixture(scope="session")
def demo_server(served_folder: Path) -> Iterator[DemoServer]:
    with freight_serve(
        served_folder, [*OPTIONS, "--api-key", f"tests:{KEY}", "--enable-tokenizer-info-endpoint"]
    ) as url:
        yield DemoServer(url, served_folder.name, served_folder)


@pytest.fixture(scope="session")
def served_llm(served_folder: Path) -> LLM:
    """The same model in this process."""
    return LLM(str(served_folder), kv_cache_dtype="fp8", kv_cache_memory="64MiB")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RankPair]:
    """Starts LLMs of two ranks, which are ended at the test's end."""
    made = RankPair(monkeypatch, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tokens_of_one_rank() -> list[int]:
    return tokens_of(LLM(BASE, **COMMON))
