"""Requests and answers as they pass between the front and a replica.

A `Request` is an ASGI scope with its whole body. An answer comes back in groups of ASGI messages. The
first group is held until it says something: the first event of a stream, or the whole of any other
answer. So a replica that ends before that has sent nothing, and the request may be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from freight.base.fields import JsonDict
from freight.serve.transport.middleware import App, Message, Scope

# Types of messages that stand for an answer. ENDED: the engine ended, or gives no sign of life, after
# the request was begun; AWAY: it was not begun, since the replica does not serve now.
ENDED = "freight.ended"
AWAY = "freight.away"

_STREAM = b"text/event-stream"
_PASSED = ("type", "http_version", "method", "scheme", "query_string")


@dataclass
class Request:
    """A request on its way to a replica. `keys` is for the router, and stays behind.

    scope  the ASGI scope, of plain values
    body   whole, or more of it than any server takes
    keys   of `prompts.prefix_keys`
    """

    scope: JsonDict
    body: bytes
    keys: list[bytes] = field(default_factory=list)

    def __reduce__(self) -> tuple[type[Request], tuple[JsonDict, bytes]]:
        return Request, (self.scope, self.body)


def plain_scope(scope: Scope, headers: list[tuple[bytes, bytes]]) -> JsonDict:
    """Return the parts of an ASGI scope that a server reads. A path below `root_path` is relative to
    it.
    """
    root = scope.get("root_path", "")
    path = scope["path"]
    if root and path.startswith(root):
        path = path[len(root) :] or "/"
    plain = {name: scope[name] for name in _PASSED if name in scope}
    client = scope.get("client")
    return plain | {
        "path": path,
        "raw_path": path.encode("utf-8", "surrogateescape"),
        "root_path": "",
        "headers": headers,
        "client": client and tuple(client),
        "server": None,
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }


async def answer(
    app: App, request: Request, serves: Callable[[], bool]
) -> AsyncGenerator[list[Message], None]:
    """Have `app` answer a request; yields groups of ASGI messages. Leaving the generator is a client
    that leaves.

    serves  whether the replica can serve now; it is asked before the request is begun

    A 503 is never an answer: it says that the replica does not serve any more.
    """
    if not serves():
        yield [{"type": AWAY}]
        return
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    scope = request.scope | {"headers": [tuple(pair) for pair in request.scope["headers"]]}
    running = asyncio.ensure_future(app(scope, receive, messages.put))
    running.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        withheld: list[Message] | None = []
        async for group in _groups(messages):
            if withheld is None:
                yield group
                continue
            withheld += group
            if withheld[0].get("status") == 503:
                yield [{"type": ENDED}]
                return
            if _says_something(withheld):
                yield withheld
                withheld = None
        running.result()  # what it raised, before or after its messages
    finally:
        left.set()
        await asyncio.wait({running})  # it ends soon: its client has left, or has everything


async def _groups(messages: asyncio.Queue[Message | None]) -> AsyncGenerator[list[Message], None]:
    """Yield what has come since the last group, up to a None."""
    while True:
        group = [await messages.get()]
        while not messages.empty():
            group.append(messages.get_nowait())
        whole_group = [message for message in group if message is not None]
        if whole_group:
            yield whole_group
        if len(whole_group) < len(group):
            return


def _says_something(messages: list[Message]) -> bool:
    headers = dict(messages[0].get("headers", ()))
    if is_complete(messages[-1]):
        return True
    is_stream = bytes(headers.get(b"content-type", b"")).startswith(_STREAM)
    return is_stream and any(message.get("body") for message in messages[1:])


def is_complete(message: Message) -> bool:
    """Return whether an answer ends with this message."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)
