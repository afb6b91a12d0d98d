"""API keys, and the addresses that need one.

Logs and metrics show the name of a key. Of its value only digests are kept, made with secrets
(HMAC-SHA256). Each key has a separate part of the prefix cache, so that the time of an answer
reveals nothing about the prompts of others.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Container, Sequence
from pathlib import Path

from freight.base.files import read_bytes
from freight.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VALUE = re.compile(r"[!-~]{1,512}")


class Keys:
    """The keys that this server accepts; without any, it is open to all. Built by `Keys.read`."""

    def __init__(
        self,
        values: Sequence[tuple[str, str]],
        shared_prefix_cache: bool = False,
        unnamed: Container[str] = (),
        secret: bytes | None = None,
    ) -> None:
        """Keep digests of `values`: the (name, value) of each key, both without duplicates.

        unnamed  names that were not given with their keys
        secret   what salts are made with: those of two processes are equal if it is. None: drawn
        """
        self.secret = secret or secrets.token_bytes(32)
        self._drawn = secrets.token_bytes(32)
        self._digests = tuple((name, self._digest(value.encode())) for name, value in values)
        self._shared = shared_prefix_cache
        # A name that was not given is a number, and may be another key's tomorrow.
        self._parts = {name: self._part_of(value) for name, value in values if name in unnamed}

    @classmethod
    def read(
        cls,
        options: Sequence[str] = (),
        files: Sequence[Path] = (),
        shared_prefix_cache: bool = False,
        secret: bytes | None = None,
    ) -> Keys:
        """Read keys from the command line (VALUE or NAME:VALUE) and from files with one per line.

        In a file, empty lines and lines that begin with `#` are skipped. Keys without a name are
        named key-1, key-2, ... in order. Raises ConfigError, which names the file and line but
        never a key's value.
        """
        entries = [("--api-key", text) for text in options]
        for path in files:
            entries += _lines(path)
        named: dict[str, str] = {}
        seen: dict[str, str] = {}  # value -> where it was given
        unnamed: set[str] = set()
        for where, text in entries:
            name, colon, value = text.partition(":")
            if colon and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{where}: the text before the ':' is not a name, which has 1 to 64 letters, digits, . _ -; "
                    "give VALUE or NAME:VALUE; a value with a ':' needs a name"
                )
            if not colon:
                name = ""
                value = text
            if not name:
                name = f"key-{len(unnamed) + 1}"
                unnamed.add(name)
            if not _VALUE.fullmatch(value):
                problem = (
                    "is empty"
                    if not value
                    else "is longer than 512 characters, or has blanks or characters outside ASCII"
                )
                raise ConfigError(
                    f"{where}: the key {problem}; give VALUE or NAME:VALUE, NAME of letters, digits, . _ -"
                )
            if name in named:
                raise ConfigError(
                    f"{where}: the name {name!r} is given twice; each key needs its own"
                )
            if value in seen:
                raise ConfigError(
                    f"{where}: this key's value was given before ({seen[value]}); each key needs its own"
                )
            named[name] = value
            seen[value] = where
        return cls(tuple(named.items()), shared_prefix_cache, unnamed, secret)

    def take(self, other: Keys) -> None:
        """Replace the keys by those of `other`, which were read with the same secret. A name keeps
        its part of the prefix cache, and so does a key without one.
        """
        self._drawn = other._drawn
        self._digests = other._digests
        self._parts = other._parts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._digests)

    def __bool__(self) -> bool:
        """Return whether a key is needed."""
        return bool(self._digests)

    def check(self, authorization: str | None, x_api_key: str | None) -> str | None:
        """Return the name of the key that a request carries, or None.

        authorization  the header `Authorization: Bearer VALUE`
        x_api_key      the header of that name (Anthropic's)

        The comparison takes constant time: it does not depend on which key matches, or how far.
        """
        scheme, _, value = (authorization or "").partition(" ")
        bearer = value.strip() if scheme.lower() == "bearer" else ""
        matched = None
        for secret in (x_api_key or "", bearer):
            digest = self._digest(secret.encode("utf-8", "replace"))
            for name, known in self._digests:
                if hmac.compare_digest(digest, known):
                    matched = name
        return matched

    def salt_for(self, name: str | None, request_salt: str | None) -> str | None:
        """Return the cache salt of a request with the key `name`. Equal salts share prefixes.

        request_salt  the request's `cache_salt`; it divides the key's part further
        """
        if name is None or self._shared:
            return request_salt
        mark = "-" if request_salt is None else "+" + request_salt
        part = self._parts.get(name, f"name\0{name}")
        text = f"salt\0{part}\0{mark}".encode("utf-8", "surrogatepass")
        return hmac.digest(self.secret, text, hashlib.sha256).hex()

    def _part_of(self, value: str) -> str:
        """Return what stands for a key that has no name."""
        return "value\0" + hmac.digest(self.secret, f"key\0{value}".encode(), hashlib.sha256).hex()

    def _digest(self, value: bytes) -> bytes:
        return hmac.digest(self._drawn, value, hashlib.sha256)


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        text = read_bytes(path).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {path}: not UTF-8 at byte {error.start}") from None
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    keys = [
        (f"--api-key-file {path}, line {number}", line)
        for number, line in lines
        if line and line[0] != "#"
    ]
    if not keys:
        raise ConfigError(f"--api-key-file {path}: there is no key in it; write one per line")
    return keys


def check_binding(host: str, keys: Keys, insecure: bool) -> None:
    """Raise ConfigError if other machines could reach the server without a key."""
    if keys or insecure or is_loopback(host):
        return
    address = host or "an empty host (all addresses)"
    raise ConfigError(
        f"--host {address} is reachable from other machines, and no key is set: give --api-key or --api-key-file, "
        "bind 127.0.0.1, or give --insecure if anybody may use this server"
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address or name. Raises ConfigError for an
    unknown name.
    """
    if host == "localhost":
        return True
    try:
        return _is_loopback_address(host)
    except ValueError:
        pass
    try:
        addresses = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such name"
        raise ConfigError(
            f"--host {host}: {reason}; give an address or a name of this machine"
        ) from None
    return all(_is_loopback_address(str(address[0])) for *_, address in addresses)


def _is_loopback_address(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
