"""What routes a request: keys of the beginning of its prompt. Equal keys mean an equal beginning.

As in `cache/prefix.py`, the key of a chunk is a digest over the key of the chunk before it and its own
content, and the first one's parent is a digest of who may share a prefix with whom. Here the chunks
are of the bytes that a client sent: the front has no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence

from freight.base.fields import JsonObject

CHUNK = 128  # bytes that share a key: about 32 tokens of English text, two blocks of the cache
_MOST = 1 << 16  # bytes of a prompt that are looked at; what follows does not change the choice
# In the order in which chat templates write them: tools stand before or in the system's message.
_BEFORE = ("tools", "system", "instructions")
_CONVERSATIONS = ("messages", "input")


def prefix_keys(body: JsonObject, credential: bytes = b"") -> list[bytes]:
    """Return the keys of the whole chunks of a request's prompt, from the first on; none where the
    body has no prompt.

    body        of any API of the server, parsed
    credential  the API key, where each has a part of the prefix cache of its own

    Prompts with different `cache_salt` have no key in common. Token ids and text have none either.
    Of several prompts the first counts.
    """
    kind, content = _content(body)
    if len(content) < CHUNK:
        return []
    parent = _root(kind, body.get("cache_salt"), credential)
    keys = []
    for start in range(0, len(content) - CHUNK + 1, CHUNK):
        parent = _digest(parent + content[start : start + CHUNK])
        keys.append(parent)
    return keys


def _content(body: JsonObject) -> tuple[str, bytes]:
    """Return what kind of prompt a body has, and its beginning as bytes."""
    for name in _CONVERSATIONS:
        if body.get(name) is not None:
            return "chat", _conversation(body, body[name])
    prompt = body.get("prompt", body.get("inputs"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return "text", _bytes(prompt)
    if isinstance(prompt, list):
        return "ids", _ids(prompt)
    return "none", b""


def _conversation(body: JsonObject, messages: object) -> bytes:
    """Return a conversation as lines, so that one that goes on begins with those of before."""
    parts = [body[name] for name in _BEFORE if body.get(name) is not None]
    if isinstance(messages, list):
        parts += messages
    else:
        parts.append(messages)
    content = bytearray()
    for part in parts:
        content += json.dumps(part, sort_keys=True).encode() + b"\n"
        if len(content) >= _MOST:
            break
    return bytes(content[:_MOST])


def _ids(ids: Sequence[int]) -> bytes:
    try:
        return array("q", ids[: _MOST // 8]).tobytes()
    except (TypeError, OverflowError):  # a replica refuses it
        return b""


def _bytes(text: str) -> bytes:
    return text[:_MOST].encode("utf-8", "surrogatepass")[:_MOST]


def _root(kind: str, salt: object, credential: bytes) -> bytes:
    """Return the parent of the first key. No salt and the empty salt are different salts."""
    return _digest(json.dumps([kind, salt]).encode() + b"\0" + credential)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
