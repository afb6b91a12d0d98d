"""The head of an HTTP/1 request (request line and headers), checked as bytes before it is parsed.

An accepted head means the same to every HTTP parser: one Host, one length, no folded lines, no bare
line ends. So a proxy in front and the parser behind cannot disagree about the end of a request or
its target (request smuggling). Pure: no socket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits

END_OF_HEAD = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"[A-Z]{1,16} /[!-~]* HTTP/1\.([01])")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LENGTH = re.compile(rb"[0-9]{1,18}")


@dataclass(frozen=True)
class Head:
    """A checked head.

    raw         its bytes for the parser, without the headers that ask for another protocol: servers
                may ignore Upgrade, and some clients (Java's) ask for HTTP/2 with every request
    body_bytes  length of the body that follows; None: it comes in chunks
    """

    raw: bytes
    body_bytes: int | None


def refuse_early(part: bytes, limits: HttpLimits) -> None:
    """Raise ApiError for the beginning of a head that cannot become valid, without waiting for its
    end.
    """
    if len(part) > limits.head_bytes:
        raise ApiError(
            431,
            f"the request's headers take more than {limits.head_bytes} bytes; send fewer or shorter ones",
        )
    if part.count(b"\n") > limits.max_headers + 3:
        raise _too_many(limits)
    if part.count(b"\n") != part.count(b"\r\n"):
        raise ApiError(400, "a line of the request's headers does not end in CR LF")
    if _CONTROL.search(part):
        raise ApiError(
            400,
            "the request's headers contain a control character; this port speaks HTTP/1.1 without TLS",
        )


def read_head(raw: bytes, limits: HttpLimits) -> Head:
    """Check a complete head, its empty line included. Raises ApiError: 400, 413 or 431."""
    refuse_early(raw, limits)
    request_line, *lines = raw.removesuffix(END_OF_HEAD).split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(request_line)
    if match is None:
        raise ApiError(400, "the request's first line is not METHOD /path HTTP/1.1")
    if len(lines) > limits.max_headers:
        raise _too_many(limits)
    values: dict[bytes, list[bytes]] = {}
    head_lines = [request_line]
    for line in lines:
        name, value = _field(line)
        values.setdefault(name, []).append(value)
        if name not in (b"upgrade", b"http2-settings"):
            head_lines.append(line)
    _check_host(values.get(b"host", []), needed=match[1] == b"1")
    return Head(
        b"\r\n".join(head_lines) + END_OF_HEAD, _body_bytes(values, match[1] == b"1", limits)
    )


def _too_many(limits: HttpLimits) -> ApiError:
    return ApiError(431, f"the request has more than {limits.max_headers} headers; send fewer")


def _field(line: bytes) -> tuple[bytes, bytes]:
    if line[:1] in (b" ", b"\t"):
        raise ApiError(400, "a header continues on a second line; write it on one")
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name):
        raise ApiError(400, "a header line is not NAME: VALUE")
    return name.lower(), value.strip(b" \t")


def _check_host(hosts: list[bytes], needed: bool) -> None:
    if len(hosts) > 1 or (needed and not hosts):
        raise ApiError(400, f"the request has {len(hosts) or 'no'} Host headers; it needs one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise ApiError(400, "the Host header is not HOST or HOST:PORT")


def _body_bytes(
    values: dict[bytes, list[bytes]], may_chunk: bool, limits: HttpLimits
) -> int | None:
    lengths = values.get(b"content-length", [])
    codings = values.get(b"transfer-encoding", [])
    if lengths and codings:
        raise ApiError(
            400, "the request has both Content-Length and Transfer-Encoding; send one of them"
        )
    if codings:
        if not may_chunk or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise ApiError(400, "Transfer-Encoding can be chunked only, once, in HTTP/1.1")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise ApiError(400, "Content-Length is not one number of bytes")
    length = int(lengths[0])
    if length > limits.body_bytes:
        raise body_too_large(limits)
    return length


def body_too_large(limits: HttpLimits) -> ApiError:
    """Return the error for a body over the limit. It closes the connection: the rest of the body is
    not read.
    """
    message = f"the body is larger than {limits.body_bytes} bytes; send less in one request"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
