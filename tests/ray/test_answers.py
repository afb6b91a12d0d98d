"""What Ray's address answers, beside `freight serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.wire import Api
from tests.serving import freight_serve

pytestmark = pytest.mark.ray

OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "64MiB", "--threads", "1"]
OPTIONS += ["--served-model-name", "m"]
# what differs between two answers of one server
_VARIES = re.compile(
    rb'"(id|created|created_at|time|item_id)": ?("[^"]*"|\d+)|(chatcmpl|cmpl|msg|resp|rs|fc)[-_]\w+'
)
# and headers of the listener; the length is that of an id, which Ray makes longer
_HOP = {
    "content-length",
    "date",
    "server",
    "x-request-id",
    "connection",
    "transfer-encoding",
    "keep-alive",
}

TEXT = {"model": "m", "prompt": "def main(", "max_tokens": 12, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 12}
CHAT |= {"model": "m", "temperature": 0}
TGI = {"inputs": "def main(", "parameters": {"max_new_tokens": 12, "details": True}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TEXT),
    ("/v1/completions", TEXT | {"stream": True, "logprobs": 2}),
    ("/v1/completions", TEXT | {"temperature": 1, "seed": 7, "n": 3}),
    ("/v1/completions", TEXT | {"prompt": list(range(3, 40)), "cache_salt": "s"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/messages", CHAT),
    ("/v1/messages", CHAT | {"stream": True}),
    (
        "/v1/responses",
        {
            "model": "m",
            "input": "def main(",
            "max_output_tokens": 12,
            "stream": True,
            "temperature": 0,
        },
    ),
    ("/generate", TGI),
    ("/generate_stream", TGI),
    ("/invocations", TGI),
    ("/tokenize", {"prompt": "def main("}),
    ("/v1/completions", TEXT | {"temprature": 1}),
    ("/v1/completions", TEXT | {"model": "other"}),
    ("/v1/completions", TEXT | {"prompt": "x " * 5000}),
    ("/v1/messages", {"model": "m", "messages": []}),
    ("/generate", {"inputs": 3}),
    ("/nothing", {}),
]


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Api]:
    with freight_serve(model, OPTIONS) as url:
        yield Api(url, "m", None)


def test_every_answer_is_that_of_freight_serve(deployed: Callable[..., str], alone: Api) -> None:
    there = Api(deployed(num_replicas=2, served_model_name="m"), "m", None)
    for path, body in BODIES:
        for attempt in range(2):  # each replica may be asked
            one, other = alone.post(path, body), there.post(path, body)
            assert other.status == one.status, (path, body, other.body)
            if attempt == 0:
                assert _plain(other.body) == _plain(one.body)
            names = [{k: v for k, v in r.headers.items() if k not in _HOP} for r in (one, other)]
            assert names[0] == names[1], (path, body)
    for path in ("/v1/models", "/health", "/version", "/info", "/model_info", "/"):
        one, other = alone.get(path), there.get(path)
        assert (other.status, _plain(other.body)) == (one.status, _plain(one.body))
    mine = there.send("GET", "/version", None, {"x-request-id": "mine"})
    assert mine.headers["x-request-id"] == "mine"


def test_prefixes_are_found_as_by_one_server(deployed: Callable[..., str], alone: Api) -> None:
    """Conversations that begin alike, in turns: what two replicas find is 95 % of what one finds."""
    there = Api(deployed(num_replicas=2, served_model_name="m"), "m", None)
    cached = []
    for api in (alone, there):
        cached.append(0)
        for turn in range(6):
            for prefix in range(8):
                words = " ".join(f"{prefix * 7919 + i * 31:x}" for i in range(80))
                body = TEXT | {"prompt": f"{words} {turn}", "max_tokens": 2}
                usage = api.post("/v1/completions", body).json()["usage"]
                cached[-1] += usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{cached[1]} of {cached[0]} cached tokens")
    assert cached[1] >= 0.95 * cached[0] > 0


def _plain(body: bytes) -> bytes:
    return json.dumps(_VARIES.sub(b"", body).decode()).encode()
