"""Text of single tokens, for decoders where it does not depend on the tokens around them.

Decoding the full sequence again for each new token would make streaming slow. The decoders of
nearly all models do not need it: byte-level ones join the bytes of all tokens, those in the style
of SentencePiece join the texts of all tokens, with runs of byte tokens between them. Only the
beginning of the text is special. For any other decoder `read_decoder` returns None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in the vocabularies with byte fallback


@dataclass(frozen=True)
class TextDecoder:
    """A decoder that joins the texts of tokens. The defaults change nothing."""

    # Replaced in this order within each token: ("▁", " ")
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False  # tokens "<0x00>" … "<0xFF>" are bytes of UTF-8
    strip: str = " "  # the character that is removed at the beginning of the text
    strip_most: int = 0  # at most so many times
    drop_in_first: str = ""  # a character that is removed everywhere in the first token

    def piece(self, token: str) -> str | bytes:
        """Return the text of a vocabulary entry, or its byte."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback:
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte is not None:
                return bytes.fromhex(byte[1])
        return token


@dataclass(frozen=True)
class ByteDecoder:
    """A byte-level decoder: the text is the UTF-8 of the bytes of all tokens, with U+FFFD for what
    is not UTF-8.
    """

    def piece(self, token: str) -> str | bytes:
        """Return the text of a vocabulary entry, or its bytes if they are not complete characters
        by themselves.
        """
        if _BYTE_OF.keys() >= set(token):
            data = bytes(map(_BYTE_OF.__getitem__, token))
        else:
            data = token.encode()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class Pieces(dict[int, str | bytes | None]):
    """Token id -> piece, computed at first use; None for a token that adds nothing (skipped, or
    unknown).
    """

    def __init__(
        self, decoder: TextDecoder | ByteDecoder, token_string: Callable[[int], str | None]
    ) -> None:
        self.decoder = decoder
        self.token_string = token_string

    def __missing__(self, token: int) -> str | bytes | None:
        string = self.token_string(token)
        piece = None
        if string is not None:
            piece = self.decoder.piece(string)
        self[token] = piece
        return piece


def read_decoder(decoder: Any) -> TextDecoder | ByteDecoder | None:
    """Read the rule of a decoder of `tokenizers`; None if tokens have to be decoded together."""
    if decoder is None:
        return None
    spec = json.loads(decoder.__getstate__())
    steps = [spec]
    if spec["type"] == "Sequence":
        steps = spec["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteDecoder()
    if kinds == ["Metaspace"]:
        space = steps[0]["replacement"]
        if steps[0]["prepend_scheme"] == "never":
            return TextDecoder(((space, " "),))
        return TextDecoder(((space, " "),), drop_in_first=space)
    replacements = []
    while kinds and kinds[0] == "Replace" and steps[0]["pattern"].get("String"):
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        kinds = kinds[1:]
        steps = steps[1:]
    if kinds == ["ByteFallback", "Fuse"]:
        return TextDecoder(tuple(replacements), byte_fallback=True)
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        return TextDecoder(tuple(replacements), True, steps[2]["content"], steps[2]["start"])
    return None


def _byte_of() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies: printable Latin-1,
    then U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    bytes_of: dict[str, int] = {}
    substitute = 0x100
    for byte in range(0x100):
        if byte in printable:
            bytes_of[chr(byte)] = byte
        else:
            bytes_of[chr(substitute)] = byte
            substitute += 1
    return bytes_of


_BYTE_OF = _byte_of()
