"""Log-probabilities in the shapes of chat and of completions. JSON has no infinity: -inf is -9999.0 there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from freight.outputs import Logprob, TokenLogprobs
from freight.tokenizer import Tokenizer

LOWEST = -9999.0


def finite(logprob: float) -> float:
    """`logprob` as a number that JSON has."""
    return logprob if math.isfinite(logprob) else LOWEST


def text_of(token: int, entry: Logprob, tokenizer: Tokenizer | None) -> str:
    """The text of a token by itself; its id where there is no tokenizer."""
    if entry.decoded_token is not None:
        return entry.decoded_token
    return tokenizer.token_text(token) if tokenizer else f"token_id:{token}"


def _bytes_of(token: int, text: str, tokenizer: Tokenizer | None) -> list[int]:
    """The bytes that a token adds: a part of a character has no text that tells them."""
    pieces = tokenizer.pieces(False) if tokenizer and "\ufffd" in text else None
    piece = None if pieces is None else pieces[token]
    return list(piece) if isinstance(piece, bytes) else list(text.encode())


def chat_entries(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], asked: int, tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """An entry of `logprobs.content` for each token, with the `asked` most likely tokens in their order."""
    result = []
    for token, candidates in zip(token_ids, entries, strict=True):
        shown = {
            other: {
                "token": (text := text_of(other, entry, tokenizer)),
                "logprob": finite(entry.logprob),
                "bytes": _bytes_of(other, text, tokenizer),
            }
            for other, entry in sorted(candidates.items(), key=lambda item: item[1].rank)
        }
        top = [shown[other] for other in shown if candidates[other].rank <= asked][:asked]
        result.append({**shown[token], "top_logprobs": top})
    return result


def prompt_body(entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None) -> list[Any]:
    """`prompt_logprobs`: for each token of the prompt its candidates by token id; None for the first."""
    return [
        entry
        and {
            str(token): {
                "logprob": finite(value.logprob),
                "rank": value.rank,
                "decoded_token": text_of(token, value, tokenizer),
            }
            for token, value in entry.items()
        }
        for entry in entries
    ]


class TextLogprobs:
    """`logprobs` of one choice of a completion, as four lists that grow together.

    skipped  ids of tokens that add no text, because special tokens are left out
    """

    def __init__(self, tokenizer: Tokenizer | None, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._offset = 0  # in characters of the choice's text
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._told = 0

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> None:
        """Take tokens. An entry is None for the first token of a prompt, which nothing precedes."""
        for token, candidates in zip(token_ids, entries, strict=True):
            own = None if candidates is None else candidates[token]
            text = text_of(token, own or Logprob(0.0, 1), self._tokenizer)
            self._tokens.append(text)
            self._logprobs.append(None if own is None else finite(own.logprob))
            self._top.append(None if candidates is None else self._by_text(candidates))
            self._offsets.append(self._offset)
            if token not in self._skipped:
                self._offset += len(text)

    def _by_text(self, candidates: TokenLogprobs) -> dict[str, float]:
        """Candidates by text. Of tokens with the same text the most likely one counts, as a reader cannot tell them."""
        best: dict[str, float] = {}
        for token, entry in candidates.items():
            text, value = text_of(token, entry, self._tokenizer), finite(entry.logprob)
            best[text] = max(value, best.get(text, value))
        return best

    def take(self) -> dict[str, Any]:
        """What is new since the last call."""
        first, self._told = self._told, len(self._tokens)
        return self._body(first)

    def body(self) -> dict[str, Any]:
        """Everything."""
        return self._body(0)

    def _body(self, first: int) -> dict[str, Any]:
        return {
            "tokens": self._tokens[first:],
            "token_logprobs": self._logprobs[first:],
            "top_logprobs": self._top[first:],
            "text_offset": self._offsets[first:],
        }
