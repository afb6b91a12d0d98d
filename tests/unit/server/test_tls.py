"""HTTPS: which files are accepted, and that the limits on connections hold before and after the
handshake.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from concurrent.futures import Future
from pathlib import Path

import pytest
from tests.certificates import Certificate, certificate
from tests.unit.server.raw_http import GET, QUICK, Client, Echo, in_time, post, running, wait_for

from freight.errors import ConfigError
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.tls import tls_context

pytestmark = pytest.mark.clock
LOOPS = ["asyncio", "uvloop"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Certificate:
    return certificate(folder, "ours")


@pytest.fixture(scope="module")
def context(ours: Certificate) -> ssl.SSLContext:
    made = tls_context(ours.cert, ours.key, None)
    assert made is not None
    return made


def test_files_are_checked(folder: Path, ours: Certificate, tmp_path: Path) -> None:
    other, locked = certificate(folder, "other"), certificate(folder, "locked", "secret")
    assert tls_context(None, None, None) is None
    both = tmp_path / "both.pem"
    both.write_bytes(ours.cert.read_bytes() + ours.key.read_bytes())
    made = tls_context(both, None, None)
    assert made is not None
    assert made.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls_context(locked.cert, locked.key, "secret") is not None
    for given, said in (
        ((None, ours.key, None), "without --ssl-certfile"),
        ((tmp_path / "none", ours.key, None), "--ssl-certfile .*none cannot be read: No such file"),
        ((ours.cert, tmp_path, None), "--ssl-keyfile .* cannot be read: Is a directory"),
        ((ours.cert, other.key, None), "the key does not match the certificate"),
        ((ours.key, ours.cert, None), "not a certificate and its key in PEM"),
        ((ours.cert, None, None), "not a certificate and its key in PEM"),
        ((locked.cert, locked.key, None), "--ssl-keyfile-password"),
        ((locked.cert, locked.key, "wrong"), "--ssl-keyfile-password"),
    ):
        with pytest.raises(ConfigError, match=said):
            tls_context(*given)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="FIFO"):
        tls_context(tmp_path / "fifo", None, None)


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_and_limits_are_those_of_http(
    loop: str, ours: Certificate, context: ssl.SSLContext
) -> None:
    app = Echo()
    idle = HttpLimits(idle_seconds=0.3)
    with (
        running(app, idle, loop, context) as server,
        Client(server.port, tls=ours.client()) as client,
    ):
        assert client.ended()
    with (
        running(app, None, loop, context) as server,
        Client(server.port, tls=ours.client()) as client,
    ):
        assert client.ask(GET).status == 200
        assert client.ask(post(b"x" * 100_000)).status == 200
    with running(app, QUICK, loop, context) as server:
        with Client(server.port, tls=ours.client()) as client:
            client.send(GET[:20])  # and no more
            assert client.read().status == 408
            assert client.ended()
        with Client(server.port, tls=ours.client()) as client:
            assert client.ask(post(b"x" * (QUICK.body_bytes + 1))).status == 413
            assert client.ended()
        assert [scope["scheme"] for scope in app.seen] == ["https"] * len(app.seen)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_is_closed_already_can_be_ended(
    loop: str, ours: Certificate, context: ssl.SSLContext
) -> None:
    """As when the server ends while a client leaves."""
    ended: Future[int] = Future()
    with (
        running(Echo(), None, loop, context) as server,
        Client(server.port, tls=ours.client()) as client,
    ):
        assert client.ask(GET).status == 200
        (connection,) = server.server.server_state.connections

        def close_twice() -> None:
            try:
                connection.transport.close()
                connection.shutdown()
                ended.set_result(connection.transport.get_write_buffer_size())
            except BaseException as error:
                ended.set_exception(error)

        connection.loop.call_soon_threadsafe(close_twice)
        assert ended.result(300) >= 0


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_no_handshake_ends_in_time(
    loop: str, ours: Certificate, context: ssl.SSLContext
) -> None:
    with running(Echo(), QUICK, loop, context) as server:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01", GET):
            with Client(server.port) as client:
                client.send(sent)
                while client.socket.recv(1000):  # an alert, perhaps
                    pass
        with pytest.raises(ssl.SSLError):
            Client(
                server.port, tls=ssl.create_default_context()
            )  # which does not trust the certificate
        with Client(server.port, tls=ours.client()) as client:
            assert client.ask(GET).status == 200


@pytest.fixture
def old_client(ours: Certificate) -> ssl.SSLContext:
    context = ours.client()
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def test_old_versions_are_not_spoken(old_client: ssl.SSLContext, context: ssl.SSLContext) -> None:
    with (
        running(Echo(), QUICK, tls=context) as server,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        Client(server.port, tls=old_client)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_never_says_goodbye_is_dropped(
    loop: str, ours: Certificate, context: ssl.SSLContext
) -> None:
    limits = HttpLimits(idle_seconds=0.3, linger_seconds=0.1)

    def attempt() -> bool:
        with Client(server.port, tls=ours.client()) as client:
            try:
                assert client.ask(GET).status == 200
            except (
                EOFError,
                ConnectionResetError,
                ssl.SSLEOFError,
            ):  # it was idle for too long before
                return False
            wait_for(
                lambda: not server.server.server_state.connections
            )  # its side of TLS is not read
            return True

    with running(Echo(), limits, loop, context) as server:
        assert in_time(attempt)


def test_bytes_right_behind_the_handshake_are_not_lost(
    ours: Certificate, context: ssl.SSLContext
) -> None:
    """A client that sends its request in the packet that ends its handshake, as TLS 1.3 permits."""

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=ours.client())
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        found = await reader.readline()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        return found

    with running(Echo(), QUICK, tls=context) as server:
        assert [asyncio.run(ask(server.port)).split()[1] for _ in range(20)] == [b"200"] * 20
