"""Clients of `freight serve` that leave, do not read, come in numbers or ask for too much: nobody
else notices.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.asking import Open, Server
from tests.demo_chat import demo_with_chat_template
from tests.serving import ServeProcess, has_ended
from tests.unit.server.raw_http import wait_for

pytestmark = pytest.mark.clock

ADA, BOB = ({"Authorization": f"Bearer {name}-0123456789"} for name in ("ada", "bob"))
KEYS = ["--api-key", "ada:ada-0123456789", "--api-key", "bob:bob-0123456789"]
OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "128MiB", *KEYS]
OPTIONS += ["--max-num-seqs", "4", "--max-queue", "4", "--max-num-batched-tokens", "64"]
DRAWN = {"temperature": 0, "ignore_eos": True}
LONG = {"prompt": "def main(", "max_tokens": 1000, **DRAWN}
# no machine computes four of them before they are looked at
ENDLESS = {**LONG, "max_tokens": 16_000}
STEPS = 900 - len("def main(")  # of an answer of `body_for`, one token each
APIS = ("/v1/completions", "/v1/chat/completions", "/generate_stream")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    model = demo_with_chat_template(tmp_path_factory.mktemp("model") / "demo", 16384)
    with ServeProcess(model, OPTIONS, forked=True) as served:
        served.wait_until_healthy()
        yield served
        assert served.stop() == 0, served.said[-2000:]
        assert "Traceback" not in served.said, served.said.partition("Traceback")[2][:4000]


@pytest.fixture
def server(process: ServeProcess) -> Iterator[Server]:
    """Idle before and after each test."""
    found = Server(process.url, ADA)
    yield found
    found.wait_for(0)


def body_for(path: str, text: str, stream: bool, n: int = 1) -> dict[str, Any]:
    most = 900 - len(text)
    if path.startswith("/generate"):
        return {"inputs": text, "parameters": {"max_new_tokens": most}}
    body: dict[str, Any] = {"max_tokens": most, "stream": stream}
    if path == "/v1/completions":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    return body if path == "/v1/messages" else {**DRAWN, "n": n, **body}


def new_text(length: int) -> str:
    """Text that no cache has, of at most so many tokens."""
    return "".join(random.SystemRandom().choices("abcdefghijklmnopqrstuvwxyz (=", k=length))


def steps_after_leaving(server: Server, opened: Open, reset: bool = False) -> int:
    """Steps of an engine that has nothing else to do, from just before the client leaves."""
    before = server.steps()
    opened.leave(reset)
    after, end = server.steps(), time.monotonic() + 300
    while True:
        time.sleep(0.06)  # longer than a step
        previous, after = after, server.steps()
        if after == previous and server.load() == (0, 0, 0):
            return after - before
        assert time.monotonic() < end, f"{server.load()} are left"


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("path", APIS)
def test_a_client_that_leaves_within_its_stream_frees_all(
    server: Server, process: ServeProcess, path: str, reset: bool
) -> None:
    for n in (1, 1, 4 if path != "/generate_stream" else 1):
        found = []
        # a machine that stands still sees it late
        while not found or (found[-1] >= STEPS - 100 and len(found) < 10):
            opened = server.open(path, body_for(path, "def main(", True, n))
            opened.first_event()
            found.append(steps_after_leaving(server, opened, reset))
        assert found[-1] < STEPS - 100, found  # it did not go on to its end
    wait_for(lambda: "status=499" in process.said)  # a client that leaves is no error


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", APIS)
def test_a_client_that_leaves_before_its_first_token_frees_all(
    server: Server, path: str, stream: bool
) -> None:
    path = "/generate" if path == "/generate_stream" and not stream else path
    found, drawn = [], []
    for _ in range(20):  # until one left in time: the prompt takes more than seven steps
        begun, before = server.steps(), server.metric("vllm:generation_tokens_total")
        opened = server.open(path, body_for(path, new_text(800), stream))
        wait_for(lambda: server.steps() != begun)  # noqa: B023
        found.append(steps_after_leaving(server, opened))
        drawn.append(server.metric("vllm:generation_tokens_total") - before)
        if len(drawn) >= 3 and min(drawn) == 0:
            break
    assert min(drawn) == 0


@contextlib.contextmanager
def full(server: Server, waiting: int, others: int = 0) -> Iterator[list[Open]]:
    """Four streams that run, and so many requests that wait, then a request of the other key for
    `others` completions.
    """
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(server.streaming(ENDLESS)) for _ in range(4)]
        for _ in range(waiting):
            opened = server.open("/v1/completions", ENDLESS)
            stack.callback(opened.leave)
        server.wait_for(4, waiting)
        if others:
            opened = server.open("/v1/completions", {**ENDLESS, "n": others}, BOB)
            stack.callback(opened.leave)
            server.wait_for(4, waiting + others)
        yield streams


@pytest.mark.parametrize("path", APIS)
def test_a_client_that_leaves_the_queue_is_forgotten(server: Server, path: str) -> None:
    with full(server, 0):
        opened = server.open(path, body_for(path, "def main(", path == "/generate_stream"))
        server.wait_for(4, 1)
        opened.leave()
        server.wait_for(4, 0)


def test_a_full_queue_refuses_before_an_answer_begins(server: Server) -> None:
    alone = server.ask("/v1/completions", LONG | {"max_tokens": 300}).body["choices"][0]["text"]
    before = server.metric("vllm:generation_tokens_total")
    refused = server.metric("vllm:admission_rejections_total", reason="queue_full")
    with full(server, 2, others=2) as streams:
        answers = []
        for path in ("/v1/completions", "/v1/chat/completions"):
            for stream in (False, True):
                answer = server.ask(path, body_for(path, "x", stream))
                assert answer.error["code"] == "queue_full"
                assert answer.headers["content-type"] == "application/json"
                answers.append(answer)
        for path in ("/generate", "/generate_stream", "/"):
            answer = server.ask(path, {"inputs": "x"})
            assert set(answer.body) == {"error", "error_type"}
            assert answer.body["error_type"] == "overloaded"
            answers.append(answer)
        for stream in (False, True):
            answer = server.ask("/v1/messages", body_for("/v1/messages", "x", stream))
            assert (answer.body["type"], set(answer.error)) == ("error", {"type", "message"})
            assert answer.error["type"] == "rate_limit_error"
            answers.append(answer)
        assert {answer.status for answer in answers} == {429}
        assert all(1 <= int(answer.headers["retry-after"]) <= 120 for answer in answers)
        counted = server.ask("/v1/messages/count_tokens", body_for("/v1/messages", "x", False))
        assert counted.status == 200  # it takes no place
        # more than all places: no use to wait
        answer = server.ask("/v1/completions", {"prompt": "x", "n": 9})
        assert (answer.status, answer.error["param"]) == (400, "n")
        tokens = int(server.metric("vllm:generation_tokens_total") - before) // 4
        for stream in streams:  # past what was there when others were refused
            text = "".join(event["choices"][0]["text"] for event in stream.events(tokens + 100))
            assert len(text) > 100
            assert text[: len(alone) // 2] in alone
    assert server.metric("vllm:admission_rejections_total", reason="queue_full") == refused + 9


def test_a_key_has_half_of_the_queue_and_the_other_finds_places(server: Server) -> None:
    with full(server, 2):  # of 4
        answer = server.ask("/v1/completions", LONG)
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        other = server.open("/v1/completions", LONG, BOB)
        server.wait_for(4, 3)
        other.leave()


def test_a_client_that_does_not_read_holds_up_nobody(server: Server) -> None:
    short = {"prompt": "import os", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone = server.ask("/v1/completions", short)
    begun = server.steps()
    opened = server.open("/v1/completions", {**LONG, "logprobs": 20, "stream": True})
    try:
        opened.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(lambda: server.steps() != begun)
        beside = server.ask("/v1/completions", short)
        assert beside.body["choices"] == alone.body["choices"]
        server.wait_for(0)  # all is computed, and waits for the reader
    finally:
        opened.leave()


def test_a_cached_prefix_is_known_to_the_key_that_brought_it_only(server: Server) -> None:
    bob = Server(server.url, BOB)
    body = {"prompt": new_text(200), "max_tokens": 2}
    requests = {
        name: server.metric("freight:key_requests_total", key=name) for name in ("ada", "bob")
    }

    def cached(asked: Server) -> int:
        usage = asked.ask("/v1/completions", body).body["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(server) == 0
    assert cached(bob) == 0
    assert cached(server) > 0
    assert cached(bob) > 0
    for name, count in requests.items():
        assert server.metric("freight:key_requests_total", key=name) == count + 2
        assert server.metric("freight:key_prompt_tokens_cached_total", key=name) > 0
    assert Server(server.url).ask("/v1/models").status == 401


def test_the_next_conversation_has_a_new_process_for_its_template(
    process: ServeProcess, server: Server
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert server.ask("/v1/chat/completions", body).status == 200
    killed = process.all_of("render_process")
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while not all(map(has_ended, killed)):
        time.sleep(0.01)  # to free its memory takes a moment
    answer = server.ask("/v1/chat/completions", body)
    if answer.status == 500:  # it came before the end of the process was seen
        answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.raw
    assert not set(killed) & set(process.all_of("render_process"))


def test_no_address_in_a_request_is_connected_to(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        image = [{"type": "image_url", "image_url": {"url": url}}]
        schema = {"$ref": url}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        function = {"name": "f", "description": url, "parameters": schema}
        tools = [{"type": "function", "function": function}]
        shown = [{"role": "user", "content": image}]
        chats: list[dict[str, Any]] = [
            {"messages": shown},
            {"response_format": form},
            {"tools": tools, "tool_choice": "required"},
            {"chat_template_kwargs": {"documents": [url]}},
            {"user": url, "metadata": {"url": url}, "cache_salt": url},
            {"model": url},
        ]
        chat = {"messages": [{"role": "user", "content": url}], "max_tokens": 1}
        grammar = {"grammar": {"type": "json", "value": schema}}
        for path, body in (
            *(("/v1/chat/completions", chat | fields) for fields in chats),
            ("/v1/completions", {"prompt": url, "max_tokens": 1, "suffix": url}),
            ("/generate", {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 1}}),
            ("/generate", {"inputs": "x", "parameters": grammar}),
            ("/tokenize", {"messages": shown}),
        ):
            answer = server.ask(path, body, {"X-Request-Id": url, "Referer": url, "Origin": url})
            assert answer.status < 500, (path, answer.raw)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_it_listens_on_one_socket(process: ServeProcess, server: Server) -> None:
    pids = [process.process.pid, *process.all_of("worker"), *process.all_of("render_process")]
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {os.readlink(link) for link in links if link.is_symlink()}
    listening = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes and (table.startswith("udp") or fields[3] == "0A"):
                listening.append(fields[1])
    port = int(server.url.rpartition(":")[2])
    assert listening == [f"0100007F:{port:04X}"]


def test_lists_that_are_too_long_are_refused_while_others_go_on(server: Server) -> None:
    too_much: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": ["x"] * 10**5}),
        ("/v1/completions", {"prompt": [5] * 800_000}),
        ("/v1/completions", {"prompt": "word " * 600_000}),
        ("/v1/completions", {"prompt": "x", "n": 10**6}),
        ("/v1/completions", {"prompt": [4095, 4096]}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(10**5)}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 50_000}),
    ]
    with server.streaming(LONG) as opened, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: server.ask(*one), too_much))
        assert [answer.status for answer in answers] == [400] * len(too_much)
        assert opened.whole().events[-1] == "[DONE]"
