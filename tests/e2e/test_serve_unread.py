"""A client of `freight serve` that reads nothing of a long stream loses its connection after
--write-timeout.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from urllib.parse import urlsplit

from tests.asking import Server
from tests.serving import freight_serve

DRAWN = {"temperature": 0, "ignore_eos": True}
# Four streams with log-probabilities: far more bytes than the buffers of a connection hold.
LONG = {"prompt": "def main(", "max_tokens": 900, "n": 4, "logprobs": 20, "stream": True, **DRAWN}
SHORT = {"prompt": "import os", "max_tokens": 10, **DRAWN}
OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "8MiB", "--write-timeout", "0.5"]
OPTIONS += ["--max-num-seqs", "8"]


def asked_on_a_small_window(url: str) -> http.client.HTTPConnection:
    """A connection on which a stream was asked for, whose system takes in little that is not read."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    connection.sock = socket.socket()
    connection.sock.settimeout(60)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it is connected
    connection.sock.connect((parts.hostname, parts.port))
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(LONG), kind)
    return connection


def test_a_client_that_reads_nothing_is_dropped_and_holds_nothing() -> None:
    with freight_serve("demo", OPTIONS) as url:
        server = Server(url)
        alone = server.ask("/v1/completions", SHORT).body["choices"]
        connection = asked_on_a_small_window(url)
        try:
            asked, end = 0, time.monotonic() + 300
            while ended(server, "abort") == 0:
                # nobody else notices
                assert server.ask("/v1/completions", SHORT).body["choices"] == alone
                asked += 1
                assert time.monotonic() < end
            server.wait_for(0)
            assert (ended(server, "abort"), ended(server, "length")) == (1, 1 + asked)
            time.sleep(0.1)
            assert b"[DONE]" not in received(connection.sock)
        finally:
            connection.close()


def ended(server: Server, reason: str) -> float:
    return server.metric("vllm:request_success_total", finished_reason=reason)


def received(sock: socket.socket) -> bytes:
    """What waits for the client, up to the end of the connection, however it ended."""
    found = b""
    try:
        while data := sock.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found
