"""The body of a request, from ASGI messages to a JSON object, within limits checked before parsing.

Time and memory are linear in the bytes received, whatever they are: nesting, digits and surrogates
are checked without recursion, on the bytes. The result can be written as JSON and as UTF-8 again.
Whatever the body, other threads run every few milliseconds while it is parsed: no call of a library
reads more than a part of it, or one string.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

from freight.base.fields import JsonDict
from freight.base.files import DuplicateNameError, unique_names
from freight.serve.transport.errors import ApiError
from freight.serve.transport.head import body_too_large
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.json_pieces import loads_in_pieces

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# A JSON string. It never backtracks: linear, even if the closing quote is missing.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_WITHIN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_STRINGS_AND_OTHERS = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 level, as signed bytes
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
# Exponents of two digits cannot overflow: with number_digits digits before them, below 1e308.
_LARGE_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3}")
_PIECE = 1 << 16  # bytes that one call of a library reads
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONGEST_PARAM = 60  # characters of a name that an error repeats


class DisconnectedError(Exception):
    """The client left, or was refused, before its body was complete: nobody reads an answer."""


async def read_body(
    receive: Receive,
    headers: Iterable[tuple[bytes, bytes]],
    limits: HttpLimits,
    hold: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Read a body that is declared as JSON, for `parse_object`.

    receive  of ASGI
    headers  of the ASGI scope
    hold     is called with the number of bytes received so far, and may raise ApiError

    Raises ApiError: 413 too large (the rest is not read), 415 not declared as JSON. Raises
    DisconnectedError.
    """
    values = {name.lower(): value.decode("latin-1").strip() for name, value in headers}
    _check_type(values)
    length = values.get(b"content-length", "0")
    if (
        length.isascii()
        and length.isdigit()
        and (len(length) > 18 or int(length) > limits.body_bytes)
    ):
        raise body_too_large(limits)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limits.body_bytes:
            raise body_too_large(limits)
        hold(len(body))
    return bytes(body)


def _check_type(values: dict[bytes, str]) -> None:
    declared = values.get(b"content-type", "")
    kind, _, parameters = declared.lower().partition(";")
    charset = re.sub(r'[\s"]', "", parameters)
    # Without this check a web page of any origin could send requests to a server on the machine of
    # its reader: a browser sends a CORS preflight before JSON, but not before a form's types.
    if kind.strip() != "application/json" or charset not in ("", "charset=utf-8"):
        what = f"{declared[:100]!r}" if declared else "missing"
        raise ApiError(
            415,
            f"Content-Type is {what}; send the header 'Content-Type: application/json', in UTF-8",
        )
    encoding = values.get(b"content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding[:100]!r}; send the body as it is")


def parse_object(body: bytes, limits: HttpLimits) -> JsonDict:
    """Parse a JSON object. Raises ApiError with status 400, also for a name that comes twice in one
    object: a proxy that checked the other value would not have checked this one.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body is not valid UTF-8 at byte {error.start}") from None
    bare = _without_strings(body)
    steps = array("b", bare.translate(_STEP, _NOT_BRACKETS))
    if len(steps) > 2 * limits.json_containers:
        raise ApiError(400, f"body has more than {limits.json_containers} arrays and objects")
    if max(accumulate(steps), default=0) > limits.json_depth:
        raise ApiError(400, f"body has arrays and objects more than {limits.json_depth} deep")
    # A search for a run of zeros takes a twentieth of the time of a regular expression.
    if b"0" * (limits.number_digits + 1) in bare.translate(_AS_ZEROS):
        raise ApiError(400, f"body has a number of more than {limits.number_digits} digits")
    # A call of _finite for each number costs time, and few bodies need it.
    may_overflow = (b"e" in bare or b"E" in bare) and _LARGE_EXPONENT.search(bare) is not None
    decoder = json.JSONDecoder(
        parse_constant=_refuse_constant,
        parse_float=_finite if may_overflow else None,
        object_pairs_hook=partial(_object_of, limits=limits),
    )
    decode = decoder.decode if len(text) <= _PIECE else partial(loads_in_pieces, decoder=decoder)
    try:
        value = decode(text)
    except DuplicateNameError as error:
        is_short = len(error.name) <= _LONGEST_PARAM and error.name.isprintable()
        param = error.name if is_short else None
        raise ApiError(400, f"body is ambiguous: {error}; send it once", param=param) from None
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode())
        raise ApiError(400, f"body is not valid JSON at byte {at}: {error.msg}") from None
    if _SURROGATE.search(body):
        _refuse_lone_surrogates(value)
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", type(None): "null"}.get(
            type(value), "a number or a boolean"
        )
        raise ApiError(400, f"body is {kind}; send a JSON object")
    return value


def _without_strings(body: bytes) -> bytes:
    """Return `body` without its strings. What is behind a quote that none closes counts as one."""
    parts = []
    begin = 0
    while begin < len(body):
        piece = _STRINGS_AND_OTHERS.match(body, begin, begin + _PIECE)
        end = begin if piece is None else piece.end()
        if end == begin:  # a string that is longer than a piece
            begin = _end_of_string(body, begin)
            continue
        parts.append(_STRING.sub(b"", body[begin:end]))
        begin = end
    return b"".join(parts)


def _end_of_string(body: bytes, begin: int) -> int:
    """Return the position behind the string that begins at `begin`; the body's end if none closes it."""
    at = begin + 1
    while at + 1 < len(body):
        at = next(
            _WITHIN_STRING.finditer(body, at, at + _PIECE)
        ).end()  # which matches nothing as well
        if body[at : at + 1] == b'"':
            return at + 1
    return len(body)


def _object_of(pairs: list[tuple[str, Any]], limits: HttpLimits) -> JsonDict:
    if len(pairs) > limits.json_names:
        raise ApiError(
            400,
            f"body has an object of {len(pairs)} names; at most {limits.json_names} are allowed",
        )
    return unique_names(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"body is not valid JSON: {name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ApiError(400, f"body has a number that is too large: {digits[:40]}")
    return value


def _refuse_lone_surrogates(value: object) -> None:
    values = [value]
    try:
        while values:
            item = values.pop()
            if isinstance(item, str):
                item.encode()
            elif isinstance(item, dict):
                values += item
                values += item.values()
            elif isinstance(item, list):
                values += item
    except UnicodeEncodeError:
        raise ApiError(
            400, "body has half of a surrogate pair (\\ud800 to \\udfff) in a string"
        ) from None
