"""Measure the client's cost per event in `freight bench serving`, against httpx2's `aiter_lines`.

    python benchmarks/client_cost.py

Only the client's processor time counts: the server is another process. Rounds alternate the clients
and the event loops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import httpx2
import uvloop

from freight.lab.bench.http_stream import Address
from freight.lab.bench.load import Amount, Level, Target, run_level
from freight.lab.bench.prompts import Ask, Listed

STREAMS = 4
REQUESTS = 8
EVENTS = 500
ROUNDS = 3
CHUNK = {"id": "x", "choices": [{"index": 0, "text": "ab"}], "usage": {"prompt_tokens": 1}}
BODY = {"model": "x", "max_tokens": EVENTS, "prompt": "hello", "stream": True}


async def serve() -> None:
    """Answer every request with EVENTS events, one write each."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
                for number in range(EVENTS):
                    CHUNK["usage"] = {"prompt_tokens": 1, "completion_tokens": number + 1}
                    data = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def ours(url: str) -> int:
    prompts = Listed([Ask("hello", EVENTS)])
    target = Target(Address.parse(url), "x")
    answers = await run_level(
        target, prompts, Level(concurrency=STREAMS), Amount(requests=REQUESTS), 0
    )
    assert not any(answer.error for answer in answers), answers[0].message
    return sum(len(answer.times) for answer in answers)


async def theirs(url: str) -> int:
    async with httpx2.AsyncClient(timeout=60) as client:

        async def worker() -> int:
            result = 0
            for _ in range(REQUESTS // STREAMS):
                async with client.stream("POST", url + "/v1/completions", json=BODY) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            json.loads(line[6:])
                            result += 1
            return result

        return sum(await asyncio.gather(*(worker() for _ in range(STREAMS))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # For the server's process
    parser.add_argument("role", nargs="?", choices=("serve",), help=argparse.SUPPRESS)
    if parser.parse_args().role:
        asyncio.run(serve())
        return
    clients: dict[str, Callable[[str], Awaitable[int]]] = {"freight": ours, "httpx2": theirs}
    with subprocess.Popen(
        [sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        for _ in range(ROUNDS):
            for name, client in clients.items():
                for loop, factory in (
                    ("uvloop", uvloop.new_event_loop),
                    ("asyncio", asyncio.new_event_loop),
                ):
                    begin = time.process_time()
                    with asyncio.Runner(loop_factory=factory) as runner:
                        count = runner.run(client(url))
                    print(
                        f"{name:8} {loop:8} {(time.process_time() - begin) / count * 1e6:6.1f} us per event"
                    )
        server.terminate()


if __name__ == "__main__":
    main()
