"""HTTPS: the context for `--ssl-certfile` and `--ssl-keyfile`, and uvicorn's server with it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn

from freight.base.fields import JsonDict
from freight.base.files import read_bytes
from freight.errors import ConfigError
from freight.serve.transport.http_limits import HttpLimits


def tls_context(
    certfile: Path | None, keyfile: Path | None, password: str | None
) -> ssl.SSLContext | None:
    """Build a context for TLS 1.2 and newer; None without a certificate. Raises ConfigError.

    certfile  a certificate (chain) in PEM
    keyfile   its key; None: `certfile` has the key, too
    password  of an encrypted key; without it the key is refused, and OpenSSL does not prompt
    """
    if certfile is None:
        if keyfile is not None or password is not None:
            raise ConfigError(
                "--ssl-keyfile is given without --ssl-certfile: give the certificate, too"
            )
        return None
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            if path is not None:
                read_bytes(path)
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror or error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    files = (
        f"--ssl-certfile {certfile}"
        if keyfile is None
        else f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile}"
    )
    try:
        context.load_cert_chain(certfile, keyfile, lambda: password or "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{files}: the key does not match the certificate") from None
        raise ConfigError(
            f"{files}: not a certificate and its key in PEM, or the key's password is missing or wrong "
            f"(--ssl-keyfile-password): {error.reason or error}"
        ) from None
    except (ValueError, OSError) as error:  # a password that is too long
        raise ConfigError(f"{files}: {error}") from None
    return context


class Server(uvicorn.Server):
    """uvicorn's server, without signal handlers, and with a time limit on TLS handshakes.

    The limit is `head_seconds`. uvicorn does not pass one on, and asyncio's default is a minute.
    """

    def __init__(
        self, config: uvicorn.Config, limits: HttpLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        loop = asyncio.get_running_loop()
        values = {"config": config, "server_state": self.server_state, "app_state": {}}
        make = cast(Callable[[], asyncio.Protocol], partial(config.http_protocol_class, **values))
        times = {
            "ssl_handshake_timeout": self._limits.head_seconds,
            "ssl_shutdown_timeout": self._limits.linger_seconds,
        }
        secure: JsonDict = {} if self._tls is None else {"ssl": self._tls, **times}
        self.servers = [
            await loop.create_server(make, sock=bound_socket, backlog=config.backlog, **secure)
            for bound_socket in sockets or ()
        ]
        self.started = True
