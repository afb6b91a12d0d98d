"""The front before replicas that end, are away, or are cut off: nothing is lost that had not begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.adapters.ray import front as module
from freight.adapters.ray.front import MOST_LOSSES, NoReplicaError, ReplicaLostError, front
from freight.adapters.ray.passing import AWAY, ENDED, Request, answer
from freight.serve.openai.stream import DONE
from freight.serve.transport.http_limits import HttpLimits

LIMITS = HttpLimits(body_bytes=1000)
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


def event(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.0)


@dataclass
class Scripted:
    """Replicas that do at each attempt what a script says, the last for ever.

    A script is a list of groups of messages; an exception is raised.
    """

    scripts: list[list[Any]]
    requests: list[Request] = field(default_factory=list)
    closed: int = 0

    async def send(self, request: Request) -> AsyncGenerator[list[Any], None]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        try:
            for step in script:
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await asyncio.sleep(3600)
                yield step
        finally:
            self.closed += 1


def ask(
    replicas: Any,
    path: str = "/v1/completions",
    body: Any = None,
    leaves: bool = False,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    keyed: bool = False,
    **scope: Any,
) -> list[dict[str, Any]]:
    """The messages that a client gets."""
    sent: list[dict[str, Any]] = []
    content = body if isinstance(body, bytes) else json.dumps(body or {"prompt": "x"}).encode()

    async def run() -> None:
        incoming = [{"type": "http.request", "body": content, "more_body": False}]
        waiting = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            if not leaves:
                await waiting.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        asked = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
        }
        await asyncio.wait_for(front(replicas, LIMITS, keyed)(asked | scope, receive, send), 20)

    asyncio.run(run())
    return sent


def text(sent: list[dict[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


GOOD = [[START, event("one")], [event("two", more=False)]]
FAILURES = {
    "lost": [ReplicaLostError()],
    "ended": [[{"type": ENDED}]],
    "away": [[{"type": AWAY}]],
    "nothing": [],
}


@given(st.lists(st.sampled_from(["away", "lost", "ended", "nothing"]), max_size=6))
def test_a_request_is_sent_again_until_an_answer_has_begun(failures: list[str]) -> None:
    losses = len([one for one in failures if one != "away"])
    replicas = Scripted([*(FAILURES[one] for one in failures), GOOD])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FIRST_WAIT", 0.0)
        sent = ask(replicas)
    assert replicas.closed == len(replicas.requests)
    assert all(request is replicas.requests[0] for request in replicas.requests)
    if losses < MOST_LOSSES:
        assert len(replicas.requests) == len(failures) + 1
        assert [message["type"] for message in sent] == ["http.response.start"] + [
            "http.response.body"
        ] * 2
        assert text(sent) == b"data: one\n\ndata: two\n\n"
    else:
        assert sent[0]["status"] == 503
        assert json.loads(text(sent))["error"]["code"] == "engine_ended"


def test_without_any_replica_it_is_503_in_the_form_of_the_api() -> None:
    for path, kind in (
        ("/v1/completions", "service_unavailable_error"),
        ("/v1/messages", "overloaded_error"),
    ):
        sent = ask(Scripted([[NoReplicaError()]]), path)
        assert sent[0]["status"] == 503
        assert json.loads(text(sent))["error"]["type"] == kind
        assert any(key == b"x-request-id" for key, _ in sent[0]["headers"])
    assert (
        json.loads(text(ask(Scripted([[NoReplicaError()]]), "/generate")))["error_type"]
        == "overloaded"
    )


def created(number: int, name: str, **more: Any) -> dict[str, Any]:
    data = {"type": name, "sequence_number": number, **more}
    body = f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
    return {"type": "http.response.body", "body": body, "more_body": True}


@pytest.mark.parametrize("end", [ReplicaLostError(), [{"type": ENDED}], "nothing"], ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/invocations"])
def test_a_cut_stream_ends_with_an_error_event(path: str, end: Any) -> None:
    replicas = Scripted([[[START, event("one")], *([] if end == "nothing" else [end])]])
    sent = ask(replicas, path)
    assert len(replicas.requests) == 1
    begin, error, rest = text(sent).split(b"\n\n", 2)
    assert begin == b"data: one"
    assert rest == DONE
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_ended"
    assert sent[-1]["more_body"] is False


def cut(path: str, body: Any = None, *groups: Any) -> bytes:
    """What the front itself adds to a stream that was cut."""
    sent = ask(Scripted([[[START, event("one")], *groups, ReplicaLostError()]]), path, body)
    assert sent[-1]["more_body"] is False
    return bytes(sent[-1]["body"])


def test_a_cut_stream_of_anthropics_api() -> None:
    name, data = cut("/v1/messages").decode().strip().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", None), ("/", None), ("/invocations", {"inputs": "x"})]
)
def test_a_cut_stream_of_tgis_api(path: str, body: Any) -> None:
    data = cut(path, body).decode()
    assert json.loads(data.strip().removeprefix("data:"))["error_type"] == "overloaded"


def test_a_cut_stream_of_states_just_ends() -> None:
    assert cut("/state/stream") == b""


def test_a_cut_response_fails_with_the_number_that_follows() -> None:
    response = {"id": "resp_1", "status": "in_progress", "error": None, "output": []}
    first = created(0, "response.created", response=response)
    delta = '"sequence_number": 99'  # what a model may write
    second = created(7, "response.output_text.delta", delta=delta)
    replicas = Scripted([[[START, first], [second], ReplicaLostError()]])
    name, data = bytes(ask(replicas, "/v1/responses")[-1]["body"]).decode().strip().split("\n")
    assert name == "event: response.failed"
    failed = json.loads(data.removeprefix("data: "))
    assert failed["sequence_number"] == 8
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["id"] == "resp_1"
    assert failed["response"]["error"]["code"] == "server_error"


def test_a_client_that_leaves_closes_what_was_sent_to_a_replica() -> None:
    replicas = Scripted([[[START, event("one")], None]])
    ask(replicas, leaves=True)
    assert replicas.closed == len(replicas.requests)


def test_what_a_replica_is_told() -> None:
    replicas = Scripted([GOOD])
    headers = ((b"x-request-id", b"mine"), (b"authorization", b"Bearer k"), (b"accept", b"*/*"))
    sent = ask(replicas, "/llm/v1/completions", headers=headers, root_path="/llm", client=["h", 1])
    (request,) = replicas.requests
    assert request.scope["path"] == "/v1/completions"
    assert request.scope["root_path"] == ""
    assert dict(request.scope["headers"]) == dict(headers)
    assert (b"x-request-id", b"mine") in sent[0]["headers"]


@pytest.mark.parametrize("keyed", [False, True])
def test_keys_divide_prefixes_where_they_divide_the_cache(keyed: bool) -> None:
    found = []
    for value in (b"Bearer a", b"Bearer b"):
        replicas = Scripted([GOOD])
        ask(
            replicas,
            body={"prompt": "x" * 500},
            headers=((b"authorization", value),),
            keyed=keyed,
        )
        found.append(replicas.requests[0].keys)
    assert found[0]
    assert (found[0] == found[1]) != keyed


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"prompt": NaN}'],
    ids=lambda b: repr(b[:9]),
)
def test_a_replica_refuses_what_is_no_json(body: bytes) -> None:
    replicas = Scripted([GOOD])
    ask(replicas, body=body)
    assert replicas.requests[0].keys == []
    assert replicas.requests[0].body == body[: LIMITS.body_bytes + 1]


def test_a_body_that_says_that_it_is_too_large_is_not_waited_for() -> None:
    replicas = Scripted([GOOD])
    ask(replicas, body=b"x" * 2000, headers=((b"content-length", b"2000"),))
    assert replicas.requests[0].body == b""


# ----------------------------------------------------------------- the side of a replica


def collect(app: Callable[..., Any], serves: Callable[[], bool] = lambda: True) -> list[list[Any]]:
    async def run() -> list[list[Any]]:
        request = Request({"type": "http", "path": "/", "headers": [[b"a", b"b"]]}, b"body")
        return [group async for group in answer(app, request, serves)]

    return asyncio.run(run())


def script(*messages: Any) -> Callable[..., Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["headers"] == [(b"a", b"b")]
        assert (await receive())["body"] == b"body"
        for message in messages:
            await asyncio.sleep(0)
            if isinstance(message, Exception):
                raise message
            await send(message)

    return app


@given(st.lists(st.sampled_from([b"", b"data: x\n\n"]), max_size=5))
def test_a_stream_is_held_until_its_first_byte(bodies: list[bytes]) -> None:
    parts = [{"type": "http.response.body", "body": body, "more_body": True} for body in bodies]
    end = {"type": "http.response.body", "body": b"", "more_body": False}
    groups = collect(script(START, *parts, end))
    assert [message for group in groups for message in group] == [START, *parts, end]
    first = groups[0]
    assert first[0] == START
    assert b"".join(message.get("body", b"") for message in first) or first[-1] == end


def test_any_other_answer_is_held_until_it_is_whole() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
    parts = [
        {"type": "http.response.body", "body": b"xx", "more_body": more} for more in (True, False)
    ]
    assert collect(script(start, *parts)) == [[start, *parts]]


def test_a_503_is_never_an_answer() -> None:
    start = {"type": "http.response.start", "status": 503, "headers": []}
    body = {"type": "http.response.body", "body": b"{}", "more_body": False}
    assert collect(script(start, body)) == [[{"type": ENDED}]]
    assert collect(script(start, body), lambda: False) == [[{"type": AWAY}]]


def test_an_app_that_fails_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        collect(script(START, ZeroDivisionError()))


def test_leaving_the_generator_is_a_client_that_leaves() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await send(event("one"))
        heard.append((await receive())["type"])

    async def run() -> None:
        groups = answer(app, Request({"headers": []}, b""), lambda: True)
        async for _ in groups:
            break
        await groups.aclose()

    asyncio.run(run())
    assert heard == ["http.disconnect"]


def test_the_lifespan_of_the_front() -> None:
    async def run() -> list[str]:
        said: list[str] = []
        kinds: Iterator[str] = iter(("lifespan.startup", "lifespan.shutdown"))

        async def receive() -> dict[str, str]:
            return {"type": next(kinds)}

        async def send(message: Any) -> None:
            said.append(message["type"])

        await front(Scripted([GOOD]), LIMITS, False)({"type": "lifespan"}, receive, send)
        return said

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
